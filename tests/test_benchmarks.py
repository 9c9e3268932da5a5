"""The benchmarks run in miniature, resume, and judge as they say they do."""

import doctest
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.errors import ConfigError
from atoll.models.gpt import GPT
from atoll.protocols import Work

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


@pytest.mark.parametrize("name", ["spread", "record", "wording", "claims", "demo_seeds"])
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


def test_every_row_of_every_ablation_is_a_run(b):
    for plan in (b.diloco_rows.Plan(), b.diloco_rows.QUICK):
        for group in b.diloco_rows.groups(plan):
            for label, row in group.rows.items():
                assert row.run(0).recipe in ("demo-diloco", "demo-ddp"), label


def test_a_label_means_one_row_and_claims_know_their_rows(b):
    rows = b.diloco_rows
    plan = rows.Plan()
    named = {(label, row) for group in rows.groups(plan) for label, row in group.rows.items()} | {
        ("default", rows.default_row(plan))
    }
    assert max(Counter(label for label, _ in named).values()) == 1
    labels = {label for label, _ in named}
    for claim in b.diloco_claims.claims(plan):
        assert {label for _, label in claim.terms} <= labels, claim.text
    for group in rows.groups(plan):
        assert set(group.against) | set(group.against.values()) <= labels


def test_pools_that_are_said_to_train_alike_have_as_many_islands_over_the_run(b):
    rows = b.diloco_rows.groups(b.diloco_rows.Plan())
    pools = next(group.rows for group in rows if group.name == "pool")
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


def test_other_tokens_are_told_in_the_verdict(b):
    group = b.diloco_rows.Group(name="x", title="x", note="x", rows={})
    outcomes = {"default": outcome(b, 1.0, 1.1), "same": outcome(b, 2.0, 2.1), "more": outcome(b, 2.0, 2.1, tokens=200)}
    told = {label: b.diloco_tables._compared(group, label, outcomes)[2] for label in outcomes}
    assert told == {"default": "-", "same": "higher", "more": "higher, at ×2 tokens"}


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
