"""What a kill costs in loss."""

import re


def outcomes_of(b):
    """Losses over two seeds: a kill costs 1 more than that of the row before, and other moments than empty ones 0.25 less."""
    module, found = b.joiner_moments, {}
    for name, row in module.all_rows(module.BASE).items():
        kill = next((number for number, kills in enumerate(module.KILLS, 1) if name.startswith(f"{kills},")), 0)
        loss = 2.0 + kill - 0.25 * (kill > 0 and not name.endswith("empty moments"))
        summaries = [
            {"val_loss": loss + seed, "tokens": 100, "warm_start_tokens": 0, "sent_bytes_per_island": 8} for seed in (0, 1)
        ]
        found[name] = b.cells.Outcome(row, tuple(summaries))
    return found


def test_each_row_of_a_kill_is_compared_with_no_kill_and_with_its_own_empty_moments(b):
    module = b.joiner_moments
    lines = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in module.table(outcomes_of(b)).splitlines()[2:]}
    assert len(lines) == 4 + 3 * 3
    for number, kills in enumerate(module.KILLS, 1):
        empty, donor = (lines[module.label(kills, moments)] for moments in ("empty", "donor's"))
        assert (empty[3].split()[0], empty[5]) == (f"+{number}.0000", "-")
        assert (donor[3].split()[0], donor[5].split()[0]) == (f"+{number - 0.25:.4f}", "-0.2500")
    sentence = module.kills_sentence([*module.KILLS][1], outcomes_of(b))
    assert re.findall(r"[+-]\d\.\d+ \[", sentence) == ["+2.0000 [", "-0.2500 [", "-0.2500 ["]


def test_a_killed_island_is_away_for_a_round_and_all_rows_train_the_same_otherwise(b):
    runs = {name: row.run(0) for name, row in b.joiner_moments.all_rows(b.joiner_moments.BASE).items()}
    shorter = runs.pop(b.joiner_moments.SHORTER)
    assert len({(run.train.steps, run.cluster.islands, run.model, run.data) for run in runs.values()}) == 1
    away = {name: [(one.island, one.start, one.stop) for one in run.cluster.away] for name, run in runs.items()}
    assert away["two kills in rounds 5 and 10, donor's moments"] == [(1, 5, 6), (1, 10, 11)]
    assert [name for name, absences in away.items() if not absences] == [
        "no kill",
        "no kill, averaged moments",
        "no kill, the delta of round 5 lost",
    ]
    assert {name for name, run in runs.items() if run.train.joiner_moments == "donor"} == {
        name for name in runs if away[name] and not name.endswith("empty moments")
    }
    rounds = {name: run.train.steps // run.algorithm.inner_steps for name, run in runs.items()}
    two_kills = next(name for name, absences in away.items() if len(absences) == 2)
    assert 2 * shorter.train.steps // shorter.algorithm.inner_steps == 2 * rounds[two_kills] - 2, "rounds of an island"
    assert (shorter.cluster.away, shorter.cluster.lost, shorter.algorithm) == ((), (), runs["no kill"].algorithm)
