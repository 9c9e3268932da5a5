"""The figures of the three papers' pages and of their coverage match the code: defaults, sizes, lengths, and records."""

import dataclasses
import json
import math
import re
import shlex
import typing
from itertools import pairwise
from pathlib import Path

import pytest

import atoll
from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.cli.recipe_settings import run_of
from atoll.core.events import RoundFinished
from atoll.engines.accounting import MAX_SKIPPED
from atoll.models.gpt import GPT
from atoll.optim.delayed_nesterov import DelayedNesterov
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link, step_times
from atoll.testing.simulated_runs import Regression, simulate

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
BYTES_VOCABULARY = 257  # and the id that ends a document


def text_of(page):
    return (ROOT / "docs" / f"{page}.md").read_text()


def runs_of(page):
    """The run of every `atoll run` line in the page's shell blocks."""
    lines = (
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    )
    return [(line, run_from(line)) for line in lines if line.startswith("atoll run ")]


def run_from(line):
    _, _, name, *rest = shlex.split(line, comments=True)
    settings = [after for option, after in pairwise(rest) if option == "--set"]
    return run_of(name, settings, None, among=[name])


# ---------------------------------------------------------------------------------------------------------------- settings

IN_WORDS = {  # defaults that a page puts into words
    (ACCO, "optimizer"): ("the run's", None),
    (ACCO, "clip_norm"): ("`train.clip_norm`", None),
    (ACCO, "clock"): ("`samples` with `batch=free`, else `commits`", None),
    (AsyncLocalSGD, "speeds"): ("the cluster's", ()),
}


def settings_rows(page):
    rows = re.search(r"^\| field \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), flags=re.MULTILINE)[1]
    return [[cell.strip() for cell in row.strip("| \n").split(" | ")] for row in rows.splitlines()]


def default_from(text):
    text = text.strip("`")
    if text == "required":
        return dataclasses.MISSING
    if text == "none":
        return None
    if text.startswith("["):
        return tuple(json.loads(text))
    rule = re.fullmatch(r"(\w+)\((.*)\)", text)
    if rule:
        arguments = dict(pair.split("=") for pair in rule[2].split(", "))
        return getattr(atoll, rule[1])(**{name: type_of(value)(value) for name, value in arguments.items()})
    try:
        return float(text)
    except ValueError:
        return text


def type_of(value):
    return float if "." in value else int


@pytest.mark.parametrize(("page", "kind"), [("diloco", DiLoCo), ("async_local_sgd", AsyncLocalSGD), ("acco", ACCO)])
def test_settings_tables_have_the_fields_with_their_defaults_and_choices(page, kind):
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    rows = settings_rows(page)
    assert sorted(name.strip("`") for name, *_ in rows) == sorted(fields)
    for name, default, meaning in rows:
        field = fields[name.strip("`")]
        said, value = IN_WORDS.get((kind, field.name), (default, None))
        if (kind, field.name) in IN_WORDS:
            assert (default, field.default) == (said, value), field.name
        else:
            assert default_from(default) == field.default, field.name
        for option in literals(hints[field.name]):
            assert re.search(rf'`"?{re.escape(option)}"?`', f"{default} {meaning}"), f"{page}.md: {field.name} has {option}"


def literals(hint):
    """The strings that a type allows."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return [option for part in typing.get_args(hint) for option in literals(part)]


# ------------------------------------------------------------------------------------------------------ recipes and commands


def batch_tokens(run):
    return run.train.batch_size * run.data.seq_len


def all_tokens(run):
    return (run.train.warm_start_steps + run.train.steps * run.cluster.islands) * batch_tokens(run)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "head_size", "millions"),
    [("60m", 3, 896, 16, 64, 58.9), ("150m", 12, 896, 16, 64, 149.8), ("400m", 12, 1536, 12, 128, 388.9)],
)
def test_diloco_recipes_have_the_papers_settings(name, layers, width, heads, head_size, millions):
    run = recipes.recipe(f"diloco-{name}").resolved
    model = run.model
    assert (model.layers, model.width, model.heads, model.head_size, model.vocab_size) == (layers, width, heads, head_size, 32_000)
    assert model.num_params(32_000) / 1e6 == pytest.approx(millions, abs=0.15)
    assert (run.train.batch_size, run.data.seq_len, run.cluster.islands) == (512, 1024, 8)
    assert (run.train.warm_start_steps, run.train.steps, run.algorithm.inner_steps) == (24_000, 64_000, 500)
    assert (run.algorithm.outer, run.algorithm.weighting) == (atoll.Nesterov(lr=0.7, momentum=0.9), "examples")
    assert (run.optimizer.lr.lr, run.optimizer.lr.warmup, run.optimizer.lr.floor) == (4e-4, 1_000, 0.0)
    assert (run.optimizer.betas, run.optimizer.eps, run.train.clip_norm) == ((0.9, 0.95), 1e-8, 1.0)
    assert (run.optimizer.weight_decay, run.optimizer.decay) == (0.1, "matrices")
    page = text_of("diloco")
    assert "(1,000 steps in the paper's recipes)" in page
    assert "`optimizer.lr.floor`, which is 0 in the paper's recipes" in page
    assert "0.9 and 0.95, 1e-8, a norm of 1.0; weight decay on matrices only" in page


def test_warm_starts_on_the_page_keep_the_total_up_to_whole_rounds():
    demo = recipes.demo_diloco()
    total = demo.train.warm_start_steps + demo.train.steps
    assert f"up to whole rounds: {total} in the demo" in text_of("diloco")
    warm = [(line, run) for line, run in runs_of("diloco") if "warm_start_steps" in line]
    assert len(warm) >= 3
    for line, run in warm:
        wanted = 88_000 if "150m" in line else total
        assert 0 <= run.train.warm_start_steps + run.train.steps - wanted < run.algorithm.inner_steps, line


def test_schedules_of_the_outer_rate_last_as_long_as_the_run():
    scheduled = [
        run for _, run in runs_of("diloco") if isinstance(getattr(getattr(run.algorithm, "outer", None), "lr", None), Cosine)
    ]
    assert scheduled
    for run in scheduled:
        assert run.algorithm.outer.lr.steps == run.train.steps / run.algorithm.inner_steps
        assert f"its length in outer steps: {run.algorithm.outer.lr.steps} in the demo" in text_of("diloco")


def test_baselines_on_the_page_have_the_islands_tokens():
    demo = recipes.demo_diloco()
    islands = demo.cluster.islands
    assert f"here for k = {islands}:" in text_of("diloco")
    alone = {line: run for line, run in runs_of("diloco") if line.startswith("atoll run demo-ddp --set cluster.islands=1 ")}
    assert len(alone) == 2
    for line, run in alone.items():
        assert run.train.steps * run.algorithm.accumulation == islands * demo.train.steps, line


def test_levels_of_heterogeneity_are_those_of_the_page():
    page = text_of("async_local_sgd")
    very = step_times("very")
    assert "`very` is {}, {}, {} and {} s a step".format(*very) in page
    assert "by a power of 0,\n1/3 and 2/3" in page
    for level, power in [("none", 0), ("slight", 1 / 3), ("moderate", 2 / 3)]:
        times = step_times(level)
        assert sum(1 / time for time in times) == pytest.approx(sum(1 / time for time in very))
        assert times[3] / times[0] == pytest.approx((very[3] / very[0]) ** power)


def test_the_asynchronous_recipes_steps_and_window_are_those_of_dynamic_local_updates():
    run = recipes.recipe("async-20m").resolved
    times = step_times(run.cluster.step_time_s)
    steps = [math.floor(min(times) / time * run.algorithm.inner_steps) for time in times]
    seconds = [count * time for count, time in zip(steps, times, strict=True)]
    assert steps == [50, 38, 19, 8]
    assert max(seconds) - min(seconds) < run.algorithm.grace_s


def test_the_toy_is_that_of_the_page():
    run = recipes.toy_async()
    assert (run.data.classes, run.data.clusters_per_class) == (4, 8)
    assert "classifies four mixtures of eight Gaussians" in text_of("async_local_sgd")
    assert (run.algorithm.weight, math.sqrt(run.cluster.islands) / run.cluster.islands) == ("sqrt(k)/k", 0.5)
    assert run.train.fresh_optimizer
    assert run.train.peak_first


def test_the_example_of_the_asynchronous_page_is_the_demo():
    assert recipes.demo_async().algorithm.outer == DelayedNesterov(lr=0.8, momentum=0.7, period=4)


def test_figures_of_the_page_about_acco_are_the_codes():
    page = text_of("acco")
    assert f"After {MAX_SKIPPED} skipped\nupdates in a row the run stops" in page
    assert f"(default {DPU().warmup}, ZeRO-Offload's)" in page
    memory = (RECORDS / "2026-11-15_memory" / "README.md").read_text()
    measured = {
        name: re.search(rf"^\| {name}, may fail \| 4 \|(?:[^|]*\|){{2}} ([\d.]+) ", memory, flags=re.MULTILINE)[1]
        for name in ("ACCO", "ZeRO-1")
    }
    said = re.search(r"At N = 4, ([\d.]+) bytes a parameter are then measured for ACCO, and ([\d.]+) for\s+ZeRO-1", page)
    assert said.groups() == (measured["ACCO"], measured["ZeRO-1"])


# --------------------------------------------------------------------------------------------------------- measured figures


@pytest.mark.parametrize("page", ["diloco", "async_local_sgd"])
def test_ablations_have_the_size_tokens_and_bytes_of_their_command(page):
    """The command that the page prints above its tables, against the sentence before it and against the default row."""
    text = text_of(page)
    run = run_from(re.search(r"^```\n(atoll run .*)\n```", text, flags=re.MULTILINE)[1]).resolved
    params = run.model.num_params(BYTES_VOCABULARY)
    assert f"A decoder of {params:,} parameters on {run.cluster.islands} " in text
    assert f"{run.train.warm_start_steps} steps of warm start, then {run.train.steps} " in text
    row = re.search(r"^\| H=20(?:, sync)? \|.*$", text, flags=re.MULTILINE)[0]
    assert f"| {all_tokens(run) / 1e3:.0f} k |" in row
    islands, rounds = run.cluster.islands, run.train.steps / run.algorithm.inner_steps
    assert f"| {rounds * 2 * (islands - 1) / islands * 4 * params / 1e6:.2f} MB |" in row


@pytest.mark.parametrize("page", ["diloco", "async_local_sgd", "acco"])
def test_tables_between_markers_are_those_of_the_record(page):
    text = text_of(page)
    linked = re.findall(r"^\[The record\]\(\.\./benchmarks/records/([\w-]+)/", text, flags=re.MULTILINE)
    ablations = {"diloco": "diloco", "async_local_sgd": "async"}
    newest = [max(path.name for path in RECORDS.glob(f"*_{ablations[page]}_ablations"))] if page in ablations else []
    assert linked or newest
    for record in [*linked, *newest]:
        rows = [line for line in (RECORDS / record / "README.md").read_text().splitlines() if line.startswith(("| ", "- **"))]
        assert rows
        for row in rows:
            assert row in text, f"{page}.md lacks a line of {record}: {row}"


@pytest.mark.parametrize("page", ["streaming", "eager_updates", "codecs", "sparseloco", "muon"])
def test_rows_of_a_measured_table_are_those_of_the_record(page):
    text = text_of(page)
    (record,) = re.findall(r"\[The record\]\(\.\./benchmarks/records/([\w-]+)/", text)
    rows = [line for line in text.split("## Measured")[1].splitlines() if line.startswith("| ")]
    published = (RECORDS / record / "README.md").read_text().splitlines()
    assert len(rows) > 2
    assert [row for row in rows if row not in published] == []


def test_figures_of_the_asynchronous_demo_are_those_of_its_record():
    record = (RECORDS / "2026-11-15_async_demo" / "README.md").read_text()
    rows = re.findall(
        r"^\| .* \| ([\d.]+) \[([\d.]+), ([\d.]+)\] (lower|higher) \| ([\d.]+) \|$", text_of("async_local_sgd"), flags=re.MULTILINE
    )
    assert len(rows) == 3
    measured = re.findall(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\] \(verdict: (\w+)\), in ([\d.]+)", record)
    for (mean, low, high, verdict, share), (*interval, found, time) in zip(rows, measured, strict=True):
        bounds = sorted((low, high), key=float)
        digits = len(mean.partition(".")[2])
        assert [
            f"{abs(float(value)):.{digits}f}" for value in (interval[0], *sorted(interval[1:], key=lambda v: abs(float(v))))
        ] == [mean, *bounds]
        assert (verdict, float(share)) == (found, pytest.approx(float(time), abs=0.005))


# ---------------------------------------------------------------------------------------------------------------- coverage


def test_tokens_and_days_of_the_papers_recipes_on_the_coverage_page():
    page = " ".join(text_of("coverage").split())
    tokens = {all_tokens(recipes.recipe(f"diloco-{name}")) for name in ("60m", "150m", "400m")}
    (tokens,) = tokens
    assert f"{tokens / 1e9:.0f} billion tokens each. On one H200" in page
    rates = []
    for preset in ("m60, 64 x 1024", "m150, 32 x 1024", "m400, 16 x 1024"):
        section = (RECORDS / "2026-11-16_gpu" / "README.md").read_text().partition(f"# {preset}\n")[2]
        rates.append(re.search(r"^\| k=8, apart \| \d+ \| ([\d.]+ [kM]) \|", section, flags=re.MULTILINE)[1])
    assert "{}, {} and {} tokens a second".format(*rates) in page
    days = [tokens / (float(rate[:-2]) * {"k": 1e3, "M": 1e6}[rate[-1]]) / 86_400 for rate in rates]
    assert "that is {:.1f}, {:.1f} and {:.1f} days".format(*days) in page
    (tokens,) = {all_tokens(recipes.recipe(f"async-{name}")) for name in ("20m", "60m", "150m")}
    assert f"The paper's recipes have {tokens / 1e9:.1f} billion tokens each." in page


def newest(study):
    """The newest record of a study."""
    return sorted(RECORDS.glob(f"*_{study}"))[-1]


def coverage_rows():
    rows = [line.strip("| ").split(" | ") for line in text_of("coverage").splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == 5 and row[0] not in ("item", "---")]


def medium_claims():
    """The claims of the study with 0.6 million parameters: the difference and both verdicts by the claim's text."""
    rows = (newest("paper_claims_medium") / "README.md").read_text().splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    return {row[0]: row[2:5] for row in cells if len(row) == 7}


def test_the_reasons_for_the_regime_are_figures_of_plans_recipes_and_records():
    table = text_of("evidence").partition("## Why this regime")[2].partition("\n- ")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines() if line.startswith("| ")]
    models = (
        GPT(layers=3, width=128, heads=4, head_size=32),
        GPT(layers=2, width=32, heads=2, head_size=16),
        GPT(layers=6, width=256, heads=4, head_size=64),
    )
    paper, vocabularies = recipes.recipe("diloco-150m"), (BYTES_VOCABULARY, BYTES_VOCABULARY, 8192)
    read = (paper.train.steps + paper.train.warm_start_steps) * batch_tokens(paper)
    weights = [model.num_params(size) for model, size in zip(models, vocabularies, strict=True)]
    shares = [4000 * batch / size for batch, size in zip((8192, 2048, 32_768), weights, strict=True)]
    assert rows[1] == [f"{share:.0f}" for share in (*shares, read / paper.model.num_params(32_000))]
    speed = float(re.search(r"\| DiLoCo \| ([\d.]+) M \|", text_of("evidence"))[1]) * 1e6
    assert rows[4][2] == f"{3000 * 4 * 32768 / speed:.0f} s alone, at {speed / 1e6:.2f} M tokens/s"
    for column, study in enumerate(("paper_claims_medium", "paper_claims")):
        cells = [json.loads(line) for line in (newest(study) / "cells.jsonl").read_text().splitlines()]
        took = [
            cell["summary"]["wall_time_s"]
            for cell in cells
            if cell["recipe"] == "demo-diloco" and any("Cluster(islands=4," in each for each in cell["settings"])
        ]
        assert rows[4][column].startswith(f"{min(took):.0f} to {max(took):.0f} s")
        gains = re.findall(r"^- \dx batch gains ([\d.]+) nats", (newest(study) / "README.md").read_text(), flags=re.MULTILINE)
        assert rows[3][column].startswith(" and ".join(gains))
        if column == 0:
            assert f"{len(cells)} of them began" in text_of("evidence")


def test_the_coverage_page_has_every_claim_of_the_three_papers_at_06m():
    claims = medium_claims()
    others = [text for text in claims if text.startswith(("DiLoCo,", "DiLoCo:", "Asynchronous", "ACCO")) and "int" not in text]
    assert len(others) > 20
    for text in others:
        assert f"*{text}*: " in text_of("coverage"), text


def test_rows_of_one_seed_have_no_verdict_on_the_coverage_page():
    for item, _, _, command, measured in coverage_rows():
        assert "`" in command, item
        for clause in re.split(r"[.;] ", measured):
            assert not ("†" in clause and re.search(r"\b(held|did not hold|within the spread)\b", clause)), (item, clause)
        assert len(measured) < 900, f"{item}: one row per regime"


def test_claims_about_a_larger_batch_are_not_judged_on_the_coverage_page_where_it_still_pays():
    """At 33k/256 four times the batch gains 0.158 nats, at 13M/4k eight times 0.739; the limit is 0.15."""
    gated = []
    for item, _, regime, _, measured in coverage_rows():
        if regime.startswith(("33k/256", "13M/4k")):
            gated += [(item, clause) for clause in re.split(r"\. (?=[A-Zk*])", measured) if "times the batch" in clause]
    assert len(gated) >= 5
    for item, clause in gated:
        assert "not judged here" in clause or "k times the updates" in clause or "times the updates†" in clause, (item, clause)
        assert not re.search(r"times the batch\*: (held|did not hold|within)", clause), (item, clause)


def test_cosines_and_norms_of_the_coverage_page_are_those_of_the_record():
    rows = (newest("paper_claims_medium") / "README.md").read_text().splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| DiLoCo, k=")]
    deltas = {row[0]: row[1:] for row in cells if len(row) == 5}
    page = text_of("coverage")
    assert "50, 100, 500: {}, {}, {} at k=4".format(*(deltas[f"DiLoCo, k=4, H={length}"][0] for length in (50, 100, 500))) in page
    assert "with H=50: {} at k=4, {} at k=8".format(*(deltas[f"DiLoCo, k={k}, H=50"][2] for k in (4, 8))) in page


def update_s(algorithm, exchange_s):
    """Seconds of an update of two islands that compute for 1 s, over a link on which an exchange takes so long."""
    link = Link(latency_s=0.0, bandwidth_mbit_per_s=64 * 4 * 8 / 1e6 / exchange_s)  # the workload has 64 weights
    cluster = Cluster(islands=2, step_time_s=(1.0,), link=link)
    done = simulate(algorithm, steps=8, cluster=cluster, workload=Regression(hidden=9))
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    return (ends[-1] - ends[3]) / (len(ends) - 4)


def test_times_of_an_update_on_the_page_about_acco_are_the_simulators():
    rule = SGD(lr=0.02)
    table = text_of("acco").partition("    | `m/c` | DDP |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert [float(row[0]) for row in rows] == [0.1, 0.25, 0.5, 0.53, 0.67, 0.75, 1, 2]
    kinds = (DDP(optimizer=rule), DDP(optimizer=rule, buckets=8), ZeRO1(optimizer=rule), ZeRO1(optimizer=rule, buckets=8))
    for exchange, *times, share in rows:
        found = [update_s(algorithm, float(exchange)) for algorithm in (*kinds, ACCO(optimizer=rule))]
        assert [float(time) for time in times] == pytest.approx(found, abs=0.006)
        assert share == f"{100 * (found[4] / found[1] - 1):+.1f} %"
    same = [update_s(algorithm, 8 / 15) for algorithm in (kinds[1], ACCO(optimizer=rule))]
    assert same[0] == pytest.approx(same[1])
    assert "From `m` = 8/15 `c` on it is the slower one" in text_of("acco")
    shares = {row[0]: row[-1].removesuffix(" %") for row in rows}
    assert "| {}, {}, {} and {} % |".format(*(shares[at] for at in ("0.67", "0.75", "1", "2"))) in text_of("evidence")
    assert f"0.50 of a batch's time: {shares['0.5']} %" in text_of("evidence")


def test_regimes_of_the_coverage_page_are_those_of_the_demo():
    demo = recipes.demo_diloco()
    assert f"the demo: {demo.model.num_params(BYTES_VOCABULARY):,} parameters" in text_of("coverage")
    assert (f"{demo.cluster.islands} islands, {demo.train.steps} steps", batch_tokens(demo)) == ("4 islands, 600 steps", 4096)
    assert "| 21k/4k |" in text_of("coverage")
