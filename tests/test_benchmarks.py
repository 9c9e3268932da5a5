"""The benchmarks run in miniature, resume, and judge as they say they do."""

import doctest
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import atoll.events as events_module
import atoll.testing.namespaces
from atoll.engines.sim.network import Link, all_gather, reduce_scatter
from atoll.engines.sim.world import Cluster
from atoll.errors import AtollError, ConfigError
from atoll.models.gpt import GPT
from atoll.protocols import Work
from atoll.testing.simulate import simulate

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = [path.stem for path in BENCHMARKS.glob("*.py")]
SMALL = [
    "model=GPT(layers=1,width=8,heads=1,head_size=8)",
    "data=Text(limit_bytes=60000,seq_len=16,eval_batches=2)",
    "train=Train(steps=20,batch_size=2,warm_start_steps=2)",
    "optimizer.lr.warmup=2",
]


@pytest.fixture(scope="module")
def b():
    """The benchmarks' modules, which lie in no package: their folder is the path while they are scripts."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in NAMES:
            del sys.modules[name]


def lines_of(record):
    return (record / "cells.jsonl").read_text().splitlines()


def outcome(b, *losses, tokens=100):
    summaries = [{"val_loss": loss, "tokens": tokens, "warm_start_tokens": 0} for loss in losses]
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), tuple(summaries))


# ------------------------------------------------------------------------------------------------------------------- spread


@pytest.mark.parametrize(
    "name",
    [
        "spread",
        "record",
        "wording",
        "claims",
        "demo_seeds",
        "async_demo",
        "async_ray",
        "async_rows",
        "async_claims",
        "acco_unequal",
        "page",
        "options",
        "slow_island",
        "slow_tables",
    ],
)
def test_examples_in_docstrings_are_true(b, name):
    assert doctest.testmod(getattr(b, name)).failed == 0


@pytest.mark.parametrize("ours", [(2.3, 2.5, 2.35), (1.0, 1.5, 0.5, 2.0, 1.25, 1.75)])
def test_the_interval_is_the_paired_t_interval(b, ours):
    stats = pytest.importorskip("scipy.stats")
    theirs = tuple(value + 0.1 * (-1) ** at + 0.01 * at for at, value in enumerate(ours))
    found = b.spread.difference(b.spread.Sample(ours), b.spread.Sample(theirs))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=2e-3)


def test_what_all_seeds_share_does_not_hide_a_difference(b):
    ours, theirs = b.spread.Sample((1.0, 5.0, 9.0)), b.spread.Sample((1.1, 5.1, 9.11))
    assert b.spread.verdict(b.spread.difference(ours, theirs)) == "lower"
    assert b.spread.verdict(b.spread.difference(theirs, ours)) == "higher"
    assert b.spread.verdict(b.spread.difference(ours, ours)) == "none"


def test_one_seed_gives_no_verdict(b):
    one, two = b.spread.Sample((1.0,)), b.spread.Sample((2.0,))
    assert b.spread.verdict(b.spread.difference(one, two)) == "one seed"


# ------------------------------------------------------------------------------------------------------------------- record


def test_a_finished_cell_is_there_for_the_next_process(b, tmp_path):
    b.record.Record(tmp_path).add("one", {"loss": 0.1})
    again = b.record.Record(tmp_path)
    assert again["one"] == {"key": "one", "loss": 0.1}
    assert again.get("two") is None
    assert (tmp_path / "source.txt").read_text().count("commit:") == 2


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_next_stands_alone(b, tmp_path):
    b.record.Record(tmp_path).add("one", {})
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "two", "lo')
    again = b.record.Record(tmp_path)
    assert again.get("two") is None
    again.add("three", {})
    assert [json.loads(line)["key"] for line in lines_of(tmp_path)] == ["one", "three"]


def test_a_spoilt_line_is_named(b, tmp_path):
    (tmp_path / "cells.jsonl").write_text('{"key": "one"}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*cells\.jsonl is not a cell"):
        b.record.Record(tmp_path)


def test_tables_go_between_the_marks_and_nowhere_else(b, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n")
    for text in ("new", "newer"):
        assert b.record.replace_between(page, "x", text)
    assert page.read_text() == "before\n<!-- x:begin -->\n\nnewer\n\n<!-- x:end -->\nafter\n"


def test_a_page_without_marks_is_refused_and_a_missing_page_is_not(b, tmp_path):
    page = tmp_path / "page.md"
    assert not b.record.replace_between(page, "x", "text")
    page.write_text("<!-- x:end --> <!-- x:begin -->")
    with pytest.raises(ConfigError, match="x:begin"):
        b.record.has_marks(page, "x")


# -------------------------------------------------------------------------------------------------------------------- cells


def test_rows_that_come_to_the_same_run_share_a_cell_and_nothing_runs_twice(b, tmp_path):
    rows = [b.cells.Row(recipe="demo-diloco", base=tuple(SMALL), settings=settings) for settings in ((), ("cluster.islands=4",))]
    first = b.cells.carry_out(rows, [0], b.record.Record(tmp_path), "", quiet=True)
    again = b.cells.carry_out(rows, [0], b.record.Record(tmp_path), "", quiet=True)
    assert len(lines_of(tmp_path)) == 1
    assert first == again
    assert first[rows[0]].summaries == first[rows[1]].summaries


def test_a_run_that_diverges_is_recorded_and_spoils_its_row_alone(b, tmp_path):
    good = b.cells.Row(recipe="demo-diloco", base=tuple(SMALL))
    bad = b.cells.Row(recipe="demo-diloco", base=tuple(SMALL), settings=("optimizer.lr=1e30", "train.warm_start_steps=0"))
    found = b.cells.carry_out([good, bad], [0], b.record.Record(tmp_path), "", quiet=True)
    assert found[good].loss is not None
    assert found[bad].loss is None
    assert b.wording.loss_text(found[bad])[0] == "diverged (1 of 1 seeds)"
    assert len(lines_of(tmp_path)) == 2


def test_progress_is_shown_on_standard_error(b, tmp_path, capsys):
    b.cells.carry_out([b.cells.Row(recipe="demo-diloco", base=tuple(SMALL))], [0], b.record.Record(tmp_path), "few")
    out, err = capsys.readouterr()
    assert out == ""
    assert "few: cells" in err
    assert "demo-diloco, seed 0: loss" in err


# --------------------------------------------------------------------------------------------------------------- demo_seeds


def test_demo_seeds_leaves_a_record_and_goes_on_from_it(b, tmp_path, capsys):
    arguments = ["--seeds", "0", "1", "--record", str(tmp_path), "--quiet", *(part for each in SMALL for part in ("--set", each))]
    b.demo_seeds.main(arguments)
    readme, cells = (tmp_path / "README.md").read_text(), lines_of(tmp_path)
    assert len(cells) == 2 * (2 + 2)  # two recipes, and two rates besides the recipe's own
    assert "demo-diloco: " in readme
    assert "1/20" in readme
    assert "(the recipe's)" in readme
    assert "verdict" in capsys.readouterr().out
    b.demo_seeds.main(arguments)
    assert lines_of(tmp_path) == cells
    assert (tmp_path / "README.md").read_text() == readme


def test_another_rate_changes_the_baseline_and_not_its_warm_start(b):
    own, other = (b.demo_seeds.rate_row(rate, ()).run(0) for rate in (b.demo_seeds.own_rate(()), 0.5))
    assert other.optimizer == own.optimizer
    assert other.algorithm.optimizer.lr.lr == 0.5
    assert own.algorithm.optimizer == own.optimizer


# --------------------------------------------------------------------------------------------------------- diloco_ablations


def test_ablations_fill_record_plot_and_page(b, tmp_path, capsys):
    page, record = tmp_path / "page.md", tmp_path / "record"
    page.write_text("<!-- ablations:begin -->\n<!-- ablations:end -->\n")
    options = ["--quick", "--only", "H", "--only", "alone", "--seeds", "0", "1", "--quiet"]
    b.diloco_ablations.main([*options, "--record", str(record), "--docs", str(page)])
    text = page.read_text()
    assert "| H=4 | `algorithm.inner_steps=4` |" in text
    assert text.count("### ") == 3  # two ablations and the claims
    assert "[H=1] - [H=4] = " in text
    assert (record / "plot.png").stat().st_size > 1000
    assert text.splitlines()[4] in (record / "README.md").read_text()
    assert len(lines_of(record)) == 2 * 5
    assert "atoll run demo-diloco" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_every_row_of_every_ablation_is_a_run(b, name):
    study = getattr(b, name).STUDY
    for plan in (study.plan, study.quick):
        for label, row in study.all_rows(plan, study.groups(plan)).items():
            assert row.run(0).recipe in ("demo-diloco", "demo-ddp", "demo-async"), label


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_a_label_means_one_row_and_claims_know_their_rows(b, name):
    study = getattr(b, name).STUDY
    plan = study.plan
    named = {(label, row) for group in study.groups(plan) for label, row in group.rows.items()} | set(study.standing(plan).items())
    assert max(Counter(label for label, _ in named).values()) == 1
    labels = {label for label, _ in named}
    for claim in study.claims(plan):
        assert {label for _, label in claim.terms} <= labels, claim.text


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_an_ablation_alone_has_all_that_its_rows_are_compared_with(b, name):
    study = getattr(b, name).STUDY
    for group in study.groups(study.plan):
        there = set(study.all_rows(study.plan, [group]))
        assert set(group.against) | set(group.against.values()) | set(group.timed) | set(group.timed.values()) <= there, group.name


@pytest.mark.parametrize("study", ["diloco_rows", "evidence_diloco"])
def test_pools_that_are_said_to_train_alike_have_as_many_islands_over_the_run(b, study):
    module = getattr(b, study)
    pools = next(group.rows for group in module.groups(module.Plan()) if group.name == "pool")
    counts = {}
    for label, row in pools.items():
        run = row.run(0)
        rounds = run.train.steps // run.algorithm.steps_per_round
        counts[label] = sum(len(run.cluster.present(number, rounds)) for number in range(rounds))
    assert counts["pool: doubling"] == counts["pool: halving"]
    assert counts["pool: ramp up"] == counts["pool: ramp down"]


def test_claims_are_judged_by_the_cells(b):
    claim = b.claims.Claim(text="A ends below B.", terms=((1.0, "A"), (-1.0, "B")), below=0.0)
    low, high = outcome(b, 1.0, 2.0, 3.0), outcome(b, 1.2, 2.3, 3.2)
    said = [b.claims.judged(claim, {"A": one, "B": two}) for one, two in ((low, high), (high, low), (low, low))]
    assert [line.split("**")[1] for line in said] == ["holds here", "does not hold here", "holds here"]
    noisy = outcome(b, 3.0, 2.0, 1.0)
    assert "within the spread" in b.claims.judged(claim, {"A": noisy, "B": high})
    assert "no verdict" in b.claims.judged(claim, {"A": outcome(b, 1.0), "B": outcome(b, 2.0)})
    assert b.claims.judged(claim, {"A": low}) is None
    alone = {"A": outcome(b, 1.0), "B": outcome(b, 2.0)}
    for std, verdict in ((0.1, "holds here"), (1.0, "within the spread")):
        assert f"**{verdict}** (one seed): A ends below B." in b.claims.judged(claim, alone, b.spread.Scatter(std, 4))
    assert "no verdict" in b.claims.judged(b.claims.unlike(claim), alone, b.spread.Scatter(0.1, 4)), "of other rows"


def test_a_row_that_lacks_a_seed_has_those_before_it(b, tmp_path):
    """Rows are compared seed by seed: a hole would shift the others."""
    row, record = b.cells.Row(recipe="demo-ddp", base=tuple(SMALL)), b.record.Record(tmp_path)
    for seed in (0, 2):
        record.add(b.cells.key_of(row.run(seed)), {"summary": {"val_loss": float(seed)}})
    found = b.cells.carry_out([row], [0, 1, 2], record, "", quiet=True, until_s=0.0)
    assert found[row].loss.values == (0.0,)


def test_other_tokens_are_told_in_the_verdict(b):
    group = b.groups.Group(name="x", title="x", note="x", rows={})
    outcomes = {"default": outcome(b, 1.0, 1.1), "same": outcome(b, 2.0, 2.1), "more": outcome(b, 2.0, 2.1, tokens=200)}
    told = {label: b.groups.compared(group, label, outcomes)[2] for label in outcomes}
    assert told == {"default": "-", "same": "higher", "more": "higher, at ×2 tokens"}


# ---------------------------------------------------------------------------------------------------------- async_ablations


def test_asynchronous_ablations_fill_record_plot_and_page_and_go_on_from_there(b, tmp_path, capsys):
    page, record = tmp_path / "page.md", tmp_path / "record"
    page.write_text("<!-- ablations:begin -->\n<!-- ablations:end -->\n")
    options = ["--quick", "--only", "level", "--only", "grace", "--seeds", "0", "1", "--quiet"]
    for _ in range(2):
        b.async_ablations.main([*options, "--record", str(record), "--docs", str(page)])
        assert len(lines_of(record)) == 2 * (2 * 3 + 1 + 2)  # levels by methods, the batch, and two rows that are new in grace
    text = page.read_text()
    assert "| of sync's |" in text
    assert text.count("### ") == 3  # two ablations and the claims
    assert "[very, naive] - [very, sync] = " in text
    assert (record / "plot.png").stat().st_size > 1000
    assert "atoll run demo-async" in capsys.readouterr().out


def test_rows_that_must_equal_synchronous_training_do(b, tmp_path):
    rows = b.async_rows
    plan = rows.QUICK
    named = {label: row for group in rows.groups(plan) for label, row in group.rows.items()}
    labels = ["none, sync", "none, DN+DyLU", "buffer, grace inf"]
    found = b.cells.carry_out([named[label] for label in labels], [0], b.record.Record(tmp_path), "", quiet=True)
    losses = [found[named[label]].loss.mean for label in labels]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_all_rows_of_as_many_workers_take_as_many_local_updates(b):
    plan = b.async_rows.Plan()
    for group in b.async_rows.groups(plan):
        for label, row in group.rows.items():
            run = row.run(0)
            batches = run.train.steps * run.cluster.islands * getattr(run.algorithm, "accumulation", 1)
            workers = int(label.split(",")[0].removeprefix("k=")) if label.startswith("k=") else plan.islands
            assert batches == plan.steps * workers, label


# --------------------------------------------------------------------------------------------------------------- async_demo


def test_the_asynchronous_demo_leaves_a_record_and_goes_on_from_it(b, tmp_path, capsys):
    small = [*SMALL, "keep.evaluate_every=20", "algorithm.inner_steps=10"]
    arguments = ["--seeds", "0", "1", "--rates", "0.1", "0.7", "--record", str(tmp_path), "--quiet"]
    arguments += [part for each in small for part in ("--set", each)]
    b.async_demo.main(arguments)
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 2 * (3 + 1)  # three recipes, and one rate besides the naive one's own
    assert "demo-async ends " in out
    assert "(the best rate)" in out
    assert (tmp_path / "plot.png").stat().st_size > 1000
    for cell in map(json.loads, cells):
        times, updates, losses = zip(*cell["curve"], strict=True)
        assert list(times) == sorted(times)
        assert (updates[0], updates[-1]) == (0, cell["summary"]["local_updates"])
        assert losses[-1] == cell["summary"]["val_loss"]
    b.async_demo.main(arguments)
    assert lines_of(tmp_path) == cells
    assert capsys.readouterr().out == out


def test_the_best_rate_is_that_of_the_lowest_mean_and_a_diverged_one_is_none(b):
    rows = b.async_demo.all_rows((), b.async_demo.RATES)
    assert list(rows) == ["demo-diloco", "demo-async", "demo-async-naive", *(f"demo-async-naive at {r}" for r in (0.03, 0.1, 0.3))]
    losses = dict(zip(rows, [(1.0, 1.0), (0.5, 0.5), (3.0, 3.0), (2.0, 1.0), (1.6, 1.6), ()], strict=True))
    outcomes = {
        label: b.cells.Outcome(rows[label], tuple({"val_loss": loss} for loss in losses[label]), () if losses[label] else ("NaN",))
        for label in rows
    }
    assert b.async_demo.best_naive(outcomes) == "demo-async-naive at 0.03"
    assert b.async_demo.naive_rates(outcomes)["demo-async-naive"] == 0.7


def test_the_time_that_is_asked_for_is_judged(b):
    def told(mine_s):
        rows = {"demo-diloco": 100.0, "demo-async": mine_s}
        return b.async_demo.time_line(
            {name: b.cells.Outcome(b.cells.Row(recipe=name), ({"virtual_time_s": time_s},)) for name, time_s in rows.items()}
        )

    assert [told(mine_s).split("**")[1] for mine_s in (40.0, 40.1)] == ["holds here", "does not hold here"]


# ---------------------------------------------------------------------------------------------------------------- async_ray


def test_nobody_waits_is_judged_by_every_seed_and_by_every_replay(b):
    def told(*times_s, same_bits=True):
        replay = {"rounds": 9, "largest": 0.0, "relative": 0.0 if same_bits else 1e-3, "tolerance": 1e-5, "same_bits": same_bits}
        more = {
            "staleness": 1.0,
            "steps": [9, 3],
            "hub_busy": 0.01,
            "hub_apply_s": 0.002,
            "replay": {**replay, "agrees": same_bits},
        }
        cells = []
        for seed, (sync_s, async_s) in enumerate(times_s):
            common = {"seed": seed, "local_updates": 12, "val_loss": 2.0, "utilisation": 0.5}
            cells.append({"label": "synchronous", "wall_s": sync_s, **common})
            cells.append({"label": "asynchronous", "wall_s": async_s, **common, **more})
        sections = b.async_ray.report(cells, 0.1, ("train.steps=6", "cluster.step_time_s=[0.5,1.25]"))
        return [line.split("**")[1] for line in sections[0].splitlines() if line.startswith("- **")], sections

    assert told((10.0, 4.5), (10.0, 4.0))[0] == ["holds here", "holds here"]
    assert told((10.0, 4.6), (10.0, 4.0))[0] == ["does not hold here", "holds here"]
    verdicts, sections = told((10.0, 4.0), same_bits=False)
    assert verdicts == ["holds here", "does not hold here"]
    assert "0.1 times its step time (0.50, 1.25, 0.50, 1.25 s)" in sections[1]
    assert "--engine dist" in sections[2]
    assert "--engine ray" in sections[2]


def test_how_busy_a_hub_was_is_weighed_by_how_long_each_report_tells_of(b):
    settings = {"virtual_time_s": None, "pushes": 1, "apply_s": 0.1, "waited_s": 0.0, "most_waiting": 1}
    reports = [events_module.HubLoad(seconds=9.0, busy=0.0, **settings), events_module.HubLoad(seconds=1.0, busy=0.5, **settings)]
    assert b.async_ray.busy(reports) == 0.05


# --------------------------------------------------------------------------------------------------------------------- ACCO


def test_the_time_of_an_update_is_the_formulas_and_acco_sends_twice_what_zero1_does(b):
    links = b.acco_links
    for ratio in (0.25, 1.0, 3.0):
        cell = links.swept(ratio)
        for name, (_, formula) in links.FORMULAS.items():
            assert cell[name]["update_s"] == pytest.approx(formula(links.C_S, cell["m_s"]), abs=1e-9), name
        assert cell["ACCO"]["sent_bytes"] == [2 * sent for sent in cell["ZeRO-1"]["sent_bytes"]]


def test_a_small_model_on_a_slow_line_exchanges_as_a_large_one_on_a_fast_line(b):
    links = b.acco_links
    setting = links.SETTINGS[1]
    lines = [setting.line] * 4
    whole = [cost(int(setting.params), 2, lines).seconds for cost in (reduce_scatter, all_gather)]
    assert links.widened(setting, 4)["m_s"] == pytest.approx(sum(whole), rel=1e-6)


def small_settings(*more):
    return [part for each in [*SMALL, *more] for part in ("--set", each)]


def test_the_demo_with_hidden_exchanges_leaves_a_record_and_goes_on_from_it(b, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- acco_demo:begin -->\n<!-- acco_demo:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    arguments += ["--warmup", "2", *small_settings("train.steps=4", "keep.evaluate_every=4")]
    b.acco_demo.main(arguments)
    assert "\n### Rows\n" in page.read_text()
    assert "](./plot.png)" in page.read_text()
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 7
    assert "All rows commit 512 tokens in 4 updates." in out
    assert all("islands" in json.loads(cell) for cell in cells)
    b.acco_demo.main(arguments)
    assert lines_of(tmp_path) == cells


def test_unequal_islands_leave_a_record_that_says_who_idles(b, tmp_path, capsys):
    arguments = ["--seeds", "0", "--steps", "24", "--rates", "0.01", "--processes", "1", "--record", str(tmp_path), "--quiet"]
    b.acco_unequal.main(arguments + small_settings())
    out = capsys.readouterr().out
    assert "so DDP accumulates 3:" in out
    assert "**holds here**: samples per update agree within 10 %" in out
    idle = {row.split(" | ")[0] + row.split(" | ")[1]: row.split(" | ")[3] for row in out.splitlines() if "s a batch" in row}
    free = "| ACCO, free"
    assert idle[f"{free}0 (1 s a batch)"] == idle[f"{free}3 (4 s a batch)"] == "100 %"
    assert idle["| DDP, accumulating0 (1 s a batch)"] in {"24 %", "25 %"}


def test_learning_rates_go_by_samples_for_both(b):
    plan = b.acco_unequal.Plan(steps=1800, base=())
    acco, ddp = plan.acco(0.05, warm=True).run(0), plan.ddp(0.05, 3).run(0)
    for rule, batches in ((acco.algorithm.optimizer, 1), (ddp.algorithm.optimizer, 3)):
        assert (rule.lr.steps * batches, rule.lr.warmup * batches) == (1800, 120)
    assert (acco.train.warm_start_steps, acco.train.warm_start_lr) == (ddp.train.warm_start_steps, ddp.train.warm_start_lr)
    assert acco.optimizer.lr.warmup == ddp.optimizer.lr.warmup  # which the warm start takes over


def test_a_cell_comes_out_the_same_in_a_process_of_its_own(b, tmp_path):
    row = b.cells.Row(recipe="demo-ddp", base=(*SMALL, "train.steps=2"))
    here, apart = (
        b.cells.carry_out([row], [0], b.record.Record(tmp_path / str(n)), "", quiet=True, islands=True, processes=n)[row]
        for n in (1, 2)
    )
    assert (here.loss, here.islands) == (apart.loss, apart.islands)
    assert here.summaries[0]["digest"] == apart.summaries[0]["digest"]


def test_a_cell_that_fails_in_its_process_costs_no_other_that_was_begun(b, tmp_path):
    good, never = (b.cells.Row(recipe="demo-ddp", base=(*SMALL, f"train.steps={steps}")) for steps in (4, 2))
    bad = b.cells.Row(recipe="demo-ddp", base=(*SMALL, "data.seq_len=100000"))
    with pytest.raises(AtollError, match="100001"):
        b.cells.carry_out([bad, good, never], [0], b.record.Record(tmp_path), "", quiet=True, processes=2)
    assert [json.loads(line)["settings"] for line in lines_of(tmp_path)] == [list(good.base)]


# ---------------------------------------------------------------------------------------------------------------- two levels


def test_two_levels_are_recorded_against_each_alone_at_equal_tokens(b, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- two_level:begin -->\n<!-- two_level:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    b.two_level.main(arguments + small_settings("algorithm.inner_steps=10"))
    assert "\n### Rows\n" in page.read_text()
    out = capsys.readouterr().out
    assert len(lines_of(tmp_path)) == 5
    assert "All rows train on" in out
    assert (
        out.index("Against ZeRO-1 alone, one ring between islands")
        < out.index("times as long on a flat ring")
        < out.index("Against Di")
    )
    summaries = [json.loads(line)["summary"] for line in lines_of(tmp_path)]
    assert [summary["islands"] for summary in summaries] == [4, 4, 8, 8, 4]
    assert [summary.get("inside_dropped_tokens") for summary in summaries] == [8 * 16, 0, None, None, None]
    assert "128 tokens in vain (2.5 % of those it trains on)" in out


def test_one_ring_between_islands_trains_as_zero1_does_where_islands_are_as_fast_as_their_devices_together(b):
    """Lines inside that cost nothing: the demo's islands, twice as fast, with its batch and its warm start."""
    run = b.two_level.all_rows(())[b.two_level.BETWEEN].run(0)
    zero1 = b.cells.Row(recipe="demo-zero1").run(0)
    assert run.train == zero1.train
    assert (run.cluster.islands, run.cluster.devices_per_island, run.cluster.link) == (4, 1, zero1.cluster.link)
    both = [[cluster.step_time(island, 0) for island in range(4)] for cluster in (run.cluster, zero1.cluster)]
    assert both[0] == [time_s / 2 for time_s in both[1]]


# ------------------------------------------------------------------------------------------------------------------ memory


def test_memory_is_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    for _ in range(2):
        b.memory.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 16  # six algorithms, two of them also where rounds may fail, and two sizes
    assert "ACCO and ZeRO-1 are at most" in capsys.readouterr().out
    assert "estimate: " in (tmp_path / "README.md").read_text()


def test_where_rounds_may_fail_the_slices_before_them_stay_and_with_acco_the_half_that_waited(b):
    ways = {way.name: way for way in b.memory.ways()}
    workload = b.memory.SmallBatches.of(GPT(layers=2, width=128, heads=2, head_size=64), vocab_size=2048)
    for name, more in (("ACCO", 12 / 4 + 2), ("ZeRO-1", 12 / 4)):
        plain, kept = (
            b.memory.hold(way.algorithm, workload, size=4, rounds=2, may_fail=way.may_fail)
            for way in (ways[name], ways[f"{name}, may fail"])
        )
        assert kept.per_param - plain.per_param == pytest.approx(more, abs=0.1), name


def test_a_formula_comes_to_what_it_says(b):
    acco, ddp = (next(way for way in b.memory.ways() if way.name == name) for name in ("ACCO", "DDP"))
    assert [acco.per_param(2), acco.per_param(4), ddp.per_param(4)] == [12, 9, 16]


# ------------------------------------------------------------------------------------------------------------------ the hub


def test_hub_steps_are_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    for _ in range(2):
        b.hub_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 26  # three rules in three forms and four that do more, twice
    assert "The dearest fused step" in capsys.readouterr().out


def test_scheduling_is_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    for _ in range(2):
        b.hub_schedule.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 4
    for cell in map(json.loads, lines_of(tmp_path)):
        assert sum(cell["shares"].values()) == pytest.approx(1)
    assert "500 arrivals from 20 workers" in capsys.readouterr().out


def test_a_clock_around_its_parts_does_not_change_what_is_scheduled(b):
    schedule = b.hub_schedule
    size = schedule.Size(arrivals=300, workers=7)
    for setting in schedule.settings():
        plain, timed = schedule.scheduler_of(setting, size), schedule.TimedScheduler(setting, size, schedule.Clock())
        for one in (plain, timed):
            schedule.drive(one, size)
        assert plain.to_parts() == timed.to_parts()
        assert plain.local_updates > 0


# ------------------------------------------------------------------------------------------------------------- sim_overhead


def test_overhead_is_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    arguments = ["--quick", "--only", "speed", "--only", "outer", "--record", str(tmp_path), "--quiet"]
    b.sim_overhead.main(arguments)
    cells = lines_of(tmp_path)
    assert len(cells) == 1 + 4
    b.sim_overhead.main(arguments)
    assert lines_of(tmp_path) == cells
    assert "outer step in all" in capsys.readouterr().out


def test_the_bare_loop_trains_as_an_island_does(b):
    small = ("model=GPT(layers=1,width=8,heads=1,head_size=8)", "data.seq_len=16", "data.limit_bytes=60000", "optimizer.lr=0.01")
    plan = b.sim_speed.SpeedPlan(islands=2, steps=4, inner_steps=4, more=small)
    run, workload = plan.run(), b.sim_speed.workload_of(plan)
    replica = b.sim_speed.replica_of(run, workload, workload.loss, 1)
    losses = replica.train(4, Work(shard=1, start=0, schedule=0, examples=0)).losses
    assert b.sim_speed.bare_loop(plan, 1, 4) == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_memory_is_told_per_further_island(b):
    held = b.sim_memory.use_memory(b.sim_memory.run_of(2, GPT(layers=1, width=8, heads=1, head_size=8), 257))
    assert 0 < held["rss_bytes"] <= held["peak_bytes"]
    few = {"islands": 4, "params": 10, "rss_bytes": 1000, "peak_bytes": 1000}
    many = {"islands": 8, "params": 10, "rss_bytes": 1000 + 4 * 160, "peak_bytes": 1000 + 4 * 240}
    assert [row[-1] for row in b.sim_overhead.memory_section(few, many).rows] == ["1.00", "1.50"]


# --------------------------------------------------------------------------------------------------------------- slow links


@pytest.fixture(scope="module")
def namespaces():
    """The module, where it can be used."""
    reason = atoll.testing.namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    return atoll.testing.namespaces


def test_a_slow_line_is_measured_in_miniature_and_not_twice(b, namespaces, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- slow_link:begin -->\n<!-- slow_link:end -->\n")
    arguments = ["--quick", "--rates", "20", "--only", "atoll ACCO", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    b.slow_link.main(arguments)
    (cell,) = map(json.loads, lines_of(tmp_path))
    assert 15 < cell["line"]["mbit_per_s"] < 40  # in miniature a good part passes in the shaper's burst; unshaped it is thousands
    assert b.slow_tables.over_formula(cell) == pytest.approx(1, abs=0.03)
    at_the_rate = cell["formula_bytes"][0] - namespaces.burst_bytes(20)
    assert cell["round_s"] > at_the_rate * 8 / 20e6 > 0  # but for a burst, nothing goes faster than the line
    assert "\n### By rate\n" in page.read_text()
    b.slow_link.main(arguments)
    assert len(lines_of(tmp_path)) == 1
    assert "payload on the wire" in capsys.readouterr().out


def test_islands_that_fail_are_a_cell_with_an_error(b, namespaces):
    with namespaces.joined() as islands:
        spec = b.slow_link.QUICK.spec(islands, ["atoll DDP"], (1, 1), None)
        specs = [b.slow_link.replace(spec, rank=rank, inner_steps=0, methods=["atoll DiLoCo"]) for rank in range(2)]
        (found,) = b.slow_cells.carried_out(islands, specs, limit_s=60.0)
    assert found["error"].startswith("ConfigError: inner_steps=0")


def test_without_namespaces_the_benchmark_says_why_and_leaves_nothing(b, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(b.slow_link, "why_not", lambda: "only root may make network namespaces")
    b.slow_link.main(["--record", str(tmp_path / "none")])
    assert capsys.readouterr().out == "skipped: only root may make network namespaces.\n"
    assert not (tmp_path / "none").exists()


def test_predictions_are_the_formulas(b):
    params, measured = 1000, {"inner_steps": 7, "step_s": 0.5, "mbit_per_s": 0.064, "latency_s": 0.25}
    exchange_s = 2 * (0.25 + 2000 * 8 / 0.064e6)
    found = {name: b.slow_sim.predicted_s(name, params=params, **measured) for name in b.slow_ours.ALGORITHMS}
    expected = {"DDP": 0.5 + exchange_s, "ZeRO-1": 0.5 + exchange_s, "DiLoCo": 3.5 + exchange_s, "ACCO": 2 * exchange_s}
    assert found == pytest.approx(expected)


def test_what_is_computed_does_not_change_the_virtual_time(b):
    real = b.slow_island.workload_of(b.slow_link.QUICK.spec([SimpleNamespace(device="", address="")], [], (1, 1), None))
    cluster = Cluster(islands=2, step_time_s=(0.5,), link=Link(latency_s=0.01, bandwidth_mbit_per_s=3.0))
    weighing = b.slow_sim.Weighing(b.slow_link.QUICK.params)
    for make in b.slow_ours.ALGORITHMS.values():
        algorithm = make(2)
        times_s = [
            simulate(algorithm, steps=4, workload=workload, cluster=cluster, evaluate_every=4).finished.virtual_time_s
            for workload in (real, weighing)
        ]
        assert times_s[0] == times_s[1], algorithm


def test_a_cell_that_was_disturbed_is_measured_again_and_the_steadiest_counts(b):
    def found(*unsteady):
        made = iter([{"unsteady": each, "round_s": number} for number, each in enumerate(unsteady)])
        cell = b.slow_link.calmest(lambda: next(made), 3)
        return cell["round_s"], cell["tries"]

    assert [found(0.1, 0.0), found(0.9, 0.1, 0.0), found(0.9, 0.5, 0.7)] == [(0, 1), (1, 2), (1, 3)]
    assert b.slow_link.calmest(lambda: {"error": "timed out"}, 3) == {"error": "timed out", "tries": 1}


def test_a_crossover_is_judged_by_both_of_its_conditions(b):
    def told(acco_s, rival_s):
        cell = {"mbit_per_s": 50.0, "step_s": 2.0, "exchange_s": 0.9, "update_s": {"atoll ACCO": acco_s, "rival": rival_s}}
        return b.slow_tables.crossing_line(cell).split("**")[1]

    assert [told(2.2, 2.3), told(2.21, 2.3), told(2.1, 2.05)] == ["holds here", *["does not hold here"] * 2]


def test_outer_steps_are_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    pytest.importorskip("torchft")
    for _ in range(2):
        b.outer_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
        (cell,) = map(json.loads, lines_of(tmp_path))
    assert "atoll's outer step takes" in capsys.readouterr().out
    for rank in cell["ranks"]:
        parts = [sum(turn) for turn in zip(*rank["parts"].values(), strict=True)]
        assert all(whole >= part for whole, part in zip(rank["seconds"]["atoll"], parts, strict=True))


# ------------------------------------------------------------------------------------------------- islands that are killed


def stormy(**changes):
    """A cell of a soak of two minutes, in which everything is as it should be, but for what is changed."""
    report = {
        "commits": 3,
        "attempts": 3,
        "known": 8.0,
        "alive": 8.0,
        "participating": 7.5,
        "delivered": 24,
        "returned": 1,
        "data": [],
        "compared": 24,
        "apart": [],
        "unseen": 0,
        "done": {"Kill": 1},
        "recoveries": [{"victim": "island-0000", "at_s": 20.0, "commit_s": 2.0, "back_s": 9.0}],
        "loss": 2.5,
    }
    attended = [[0.0, 8, 8, 8, 1, "a"], [60.0, 8, 8, 6, 1, "b"], [300.0, 8, 8, 1, 9, "c"]]
    cell = {"attended": attended, "losses": [[0.0, 0, 5.0], [300.0, 99, 2.5]], "tokens": 99, "seconds": 300.0, "load": [1.0, 2.0]}
    return {**cell, "report": {**report, **changes}}


def holding(b, broken, alone=None):
    return [holds for _, _, holds in b.soak.checks(broken, alone or stormy(), b.soak_run.Soak(minutes=2.0))]


def test_a_soak_in_which_all_is_well_holds_and_what_comes_after_the_storm_does_not_count(b):
    assert holding(b, stormy()) == [True] * 5


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"apart": ["island-0001 held something else"]}, 0),
        ({"compared": 0}, 0),
        ({"compared": 13}, 0),  # of 15 who took part, one of which may have been killed before it wrote it down
        ({"data": ["shard 0: batches 0 to 10 are in no commit"]}, 3),
        ({"loss": 2.56}, 4),
    ],
)
def test_what_a_soak_finds_wrong_is_told_from_what_is_right(b, changes, number):
    assert [at for at, holds in enumerate(holding(b, stormy(**changes))) if not holds] == [number]


def test_shares_of_a_soak_are_of_its_storm(b):
    late = {**stormy(), "attended": [[0.0, 8, 8, 6, 2, "a"], [100.0, 8, 8, 6, 1, "b"]]}
    assert holding(b, late) == [True, False, False, True, True]


def test_losses_after_other_numbers_of_tokens_are_not_compared(b):
    assert holding(b, stormy(), {**stormy(), "tokens": 98})[4] is False


def test_a_soaks_kills_are_its_seeds_and_its_tables_and_plot_are_drawn(b, tmp_path):
    soak = b.soak_run.Soak()
    assert soak.script == b.soak_run.Soak().script != b.soak_run.Soak(seed=1).script
    assert len(soak.script.faults) == 29
    assert {type(one.fault).__name__ for one in b.soak_run.Soak(kinds=("Kill", "Freeze")).script.faults} == {"Kill", "Freeze"}
    outcome, figures = b.soak.sections_of(stormy(), stormy(), soak)
    assert "| every unit of data in exactly one commit | 24 units, each in one commit; 1 leased again | yes |" in outcome
    assert "(median, most) | 9.0, 9.0 | - |" in figures
    assert b.soak.save_figure(b.soak.figure, {"with kills": stormy(), "left alone": stormy()}, tmp_path / "plot.png").exists()


def test_a_death_is_counted_from_the_end_of_the_survivors_own_steps(b, tmp_path):
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


def test_what_elasticity_costs_is_judged_pair_by_pair(b):
    calm = {"exchange_s": 0.1, "digest": "d"}
    cells = {"elastic 0": {"round_s": 1.02, **calm}, "plain 0": {"round_s": 1.0, **calm}}
    cells |= {"heavy, elastic": {"round_s": 0.9, **calm}, "heavy, plain": {"round_s": 0.6, **calm}}
    section = b.elastic_cost.calm_section(cells, b.elastic_cost.QUICK)
    assert "costs +2.0% of a round" in section
    assert "cost +0.300 s a commit: within 3% of rounds of 10 s and longer" in section
    assert "it holds. The weights at the end are the same bits with both." in section
    cells["elastic 0"]["round_s"] = 1.04
    assert "**it does not hold**" in b.elastic_cost.calm_section(cells, b.elastic_cost.QUICK)


def test_deaths_are_told_by_their_moment_and_judged_by_the_slowest(b):
    def death(delay_s):
        return {"round": 3, "attempts": 1, "alive": 2, "steps_s": 2.5, "delay_s": delay_s, "back_s": 8.0}

    twins, sound = [{"round": 9, "tensors": 4, "bytes": 8, "equal": True}], {"data": [], "apart": []}
    training = {"deaths": [death(0.5)], "into_round_s": [1.25], "twins": twins, **sound}
    meeting = {"deaths": [death(1.5)], "into_round_s": [], "twins": twins, **sound}
    early = {"deaths": [death(0.25)], "into_round_s": [1.5], "twins": twins, **sound}
    cells = {"killed in training": training, "killed early": early, "killed in the exchange": meeting}
    (section,) = b.elastic_cost.killed_sections(cells, b.elastic_cost.QUICK)
    assert "at most 1.50 s after the end of its own steps (asked for: at most 2 s): it holds" in section
    assert "| 1.2 s into the round | 2.50 | 0.50 | 1 | 8.0 |" in section
    assert "| 1.5 s into the round, and back before its end | 2.50 | 0.25 | 1 | 8.0 |" in section
    meeting["deaths"] = [death(2.5)]
    (section,) = b.elastic_cost.killed_sections(cells, b.elastic_cost.QUICK)
    assert "**it does not hold**" in section
