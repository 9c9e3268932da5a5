"""The cost of elasticity: figures and verdicts."""

import atoll.core.events as events_module


def test_the_delay_of_a_death_starts_at_the_end_of_the_survivors_steps(b, tmp_path):
    moment = {"virtual_time_s": None}
    who = {"known": 2, "alive": 2, "attempts": 1, "epoch": 1, "digest": "0"}
    events = [
        events_module.Computed(island=0, round=4, start_s=10.0, end_s=12.5, steps=2, batches=2.0, tokens=8, loss=3.0),
        events_module.Leased(round=5, delivered=[[0, 0, 8, 2]], returned=[[1, 1, 8, 2]], wall_time_s=13.25, **moment),
        events_module.Attended(round=5, participating=1, wall_time_s=13.25, **who, **moment),
        events_module.Attended(round=6, participating=2, wall_time_s=20.25, **who, **moment),
    ]
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    assert b.elastic_runs.deaths(tmp_path) == [
        {"round": 5, "attempts": 1, "alive": 2, "steps_s": 2.5, "delay_s": 0.75, "back_s": 7.0}
    ]


def test_the_cost_without_failures_is_judged_pair_by_pair(b):
    calm = {"exchange_s": 0.1, "digest": "d"}
    cells = {"elastic 0": {"round_s": 1.02, **calm}, "plain 0": {"round_s": 1.0, **calm}}
    section = b.elastic_cost.calm_section(cells, b.elastic_cost.QUICK)
    assert "costs +2.0% of a round" in section
    assert "it holds. The final weights of both are the same bits." in section
    cells["elastic 0"]["round_s"] = 1.04
    assert "**it does not hold**" in b.elastic_cost.calm_section(cells, b.elastic_cost.QUICK)


def test_the_cost_of_a_commit_is_judged_by_the_median_of_its_pairs(b):
    names, plan = b.elastic_transports.TRANSPORTS, {**b.elastic_cost.QUICK, "heavy_pairs": 3}
    rank = {what: {name: [0.1, 0.1] for name in names} for what in ("exchange", "commit")}

    def section(*costs_s):
        cells = {"transports": {"params": 10, "ranks": [rank, rank]}}
        for pair, cost_s in enumerate(costs_s):
            for kind, round_s in (("elastic", 1.0 + cost_s), ("plain", 1.0)):
                cells[f"heavy {kind} {pair}"] = {"round_s": round_s, "exchange_s": 0.5, "digest": "d"}
        return b.elastic_cost.commit_section(cells, plan)

    assert "cost +0.090 s beyond the same round on processes (median of the pairs; allowed: at most 0.1 s): it holds" in section(
        0.05, 0.09, 0.9
    )
    assert "within 3% of rounds of 3.0 s and longer" in section(0.05, 0.09, 0.9)
    assert "| 2 | 1.900 | 1.000 | +0.900 | 0.500 | 0.500 |" in section(0.05, 0.09, 0.9)
    assert "**it does not hold**" in section(0.05, 0.11, 0.9)


def test_deaths_are_judged_by_the_longest_delay(b):
    def death(delay_s):
        return {"round": 3, "attempts": 1, "alive": 2, "steps_s": 2.5, "delay_s": delay_s, "back_s": 8.0}

    twins, sound = [{"round": 9, "tensors": 4, "bytes": 8, "equal": True}], {"data": [], "apart": []}
    training = {"deaths": [death(0.5)], "into_round_s": [1.25], "twins": twins, **sound}
    meeting = {"deaths": [death(1.5)], "into_round_s": [], "twins": twins, **sound}
    early = {"deaths": [death(0.25)], "into_round_s": [1.5], "twins": twins, **sound}
    cells = {"killed in training": training, "killed early": early, "killed in the exchange": meeting}
    section = b.elastic_cost.killed_section(cells)
    assert "at most 1.50 s after the end of its own steps (allowed: at most 2 s): it holds" in section
    assert "| 1.2 s into the round | 2.50 | 0.50 | 1 | 8.0 |" in section
    assert "| 1.5 s into the round, back before its end | 2.50 | 0.25 | 1 | 8.0 |" in section
    meeting["deaths"] = [death(2.5)]
    section = b.elastic_cost.killed_section(cells)
    assert "**it does not hold**" in section


def test_losses_after_kills_are_compared_with_those_of_the_same_seed(b):
    losses = b.elastic_losses

    def outcome(row, *found):
        summaries = ({"val_loss": loss, "rounds": 15 + n, "missed": 2 * n, "load": 3.0 + n} for n, loss in enumerate(found))
        return b.cells.Outcome(row, tuple(summaries))

    kills = [(2.0, 3.0), (2.1, 3.1), (2.3, 3.2), (2.2, 3.3)]
    elastic = {one.label: outcome(one.row(()), *found) for one, found in zip(losses.KILLS, kills, strict=True)}
    words, killed = losses.report(elastic, [0, 1], ())
    assert "15 rounds without kills, seeds 0, 1." in words
    assert "in its exchange of round 5, and with two kills the other one in that of round 10." in killed
    assert "load was 3 to 4. Twice with the donor's moments minus twice with empty ones: +0.0000 [" in killed
    assert "| one kill, after a third of the rounds: empty moments | 2.6000 ± 0.7071 | 2.1000 to 3.1000 | +0.1000 [" in killed
    assert "| higher | 15 to 16 | 0 to 2 |" in killed
