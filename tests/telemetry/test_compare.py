"""Comparisons of runs, as a table, as Markdown, as JSON and as a sentence."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import MEMORY_KINDS, MemoryCounted
from atoll.telemetry.compare import ComparedRun, Comparison, busiest_seconds, comparison, markdown, sentence, table
from atoll.telemetry.summary import Summary, read_summary
from atoll.telemetry.sync_summary import OverlapSummary


@pytest.fixture
def folders(tmp_path, script):
    """Data-parallel training, and DiLoCo that meets a tenth as often."""
    both = {"payload_bytes": 4_000_000, "accuracy": False}
    ddp = script(recipe="demo-ddp", rounds=20, steps_per_round=1, **both)
    diloco = script(recipe="demo-diloco", algorithm="DiLoCo", rounds=2, steps_per_round=10, final_loss=2.31, **both)
    return [ddp.write(tmp_path / "a"), diloco.write(tmp_path / "b")]


def printed(renderable: object, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


def test_rows_keep_the_order_given_and_hold_the_summaries(folders) -> None:
    both = comparison(folders)
    assert [row.summary for row in both.rows] == [read_summary(folder) for folder in folders]
    assert [row.label for row in both.rows] == ["demo-ddp", "demo-diloco"]


def test_the_table_fits_into_eighty_columns_and_has_every_figure(folders) -> None:
    text = printed(table(comparison(folders)), width=80)
    diloco = next(line for line in text.splitlines() if "diloco" in line).split()
    assert diloco == ["demo-diloco", "DiLoCo", "2.31", "4.00", "k", "8.00", "MB", "10x", "less", "0:00:29.0", "78", "%"]
    assert "the most" in next(line for line in text.splitlines() if "DDP" in line)


def test_a_long_name_wraps_and_figures_do_not(tmp_path, script) -> None:
    name = "a-recipe-with-a-name-that-is-far-too-long-for-a-table"
    text = printed(table(comparison([script(recipe=name).write(tmp_path / "a")])), width=60)
    assert "2.35" in text
    assert "…" not in text


@pytest.mark.parametrize("ends", ["first second", "seed0-20261116-194218 seed0-20261116-194219"])
def test_runs_of_one_recipe_have_whole_headings_and_figures_in_eighty_columns(ends, tmp_path, script) -> None:
    made = [script(recipe="demo-diloco", algorithm="DiLoCo", accuracy=False).write(tmp_path / end) for end in ends.split()]
    lines = [line.rstrip() for line in printed(table(comparison(made)), width=80).splitlines()]
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    for heading in ("run", "algorithm", "loss", "tokens", "island", "against", "most", "time", "busy"):
        assert heading in words
    assert sum(line.endswith(" %") for line in lines) == 2
    assert words.count("DiLoCo") == 2
    assert "against demo-diloco (" in markdown(comparison(made)), "a Markdown table has no width, so it names the run"


def counted(peak_bytes: int, formula: str) -> MemoryCounted:
    kinds = {f"{kind}_bytes": peak_bytes if kind == "parameters" else 0 for kind in MEMORY_KINDS}
    return MemoryCounted(island=0, round=0, params=100, **kinds, peak_bytes=peak_bytes, formula=formula, formula_bytes=peak_bytes)


def add_counts(folders, *counts: MemoryCounted) -> list:
    for folder, count in zip(folders, counts, strict=True):
        with (folder / "events.jsonl").open("a") as log:
            log.write(count.to_json() + "\n")
    return folders


def test_memory_has_a_column_where_runs_differ_in_it_or_hold_shares(folders) -> None:
    assert "memory" not in markdown(comparison(folders))
    both = comparison(add_counts(folders, counted(1_600_000, "4+4+8"), counted(2_400_000, "4+4+8")))
    assert [line.split(" | ")[-1] for line in markdown(both).splitlines() if line.startswith("| ")] == [
        "peak memory |",
        "1.60 MB |",
        "2.40 MB |",
    ]
    assert "memory" not in markdown(comparison(folders[:1])), "alone there is nothing to compare"


@pytest.mark.parametrize(("formula", "shown"), [("4+4+8", False), ("4+4+8/2", True)])
def test_equal_memory_is_shown_of_shares_alone(folders, formula, shown) -> None:
    both = comparison(add_counts(folders, counted(1000, formula), counted(1000, formula)))
    assert ("memory" in markdown(both)) == shown


def test_with_memory_too_the_table_fits_into_eighty_columns_and_breaks_no_name(tmp_path, script, async_script) -> None:
    names = {"demo-ddp": "DDP", "demo-diloco": "DiLoCo", "demo-acco-free": "ACCO", "demo-two-level": "DiLoCo over ACCO"}
    size = {"payload_bytes": 4_000_000, "accuracy": False, "rounds": 20}
    made = [script(recipe=name, algorithm=names[name], **size).write(tmp_path / name) for name in names]
    add_counts(made, *(counted(1_630_000 + 1000 * number, "4+4+8/4") for number in range(4)))
    made.append(async_script(recipe="demo-async-naive", rounds=30, payload_bytes=1_000_000).write(tmp_path / "hub"))
    lines = printed(table(comparison(made)), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert {*names, "demo-async-naive", "AsyncLocalSGD", "DiLoCo", "over", "ACCO", "1.63"} <= set(words)


def test_the_sentence_compares_the_runs(folders) -> None:
    assert (
        sentence(comparison(folders))
        == "demo-diloco reaches 2.31 against demo-ddp's 2.35 with 1/10 of the bytes in 0.45 of the time."
    )


def test_markdown_has_a_row_per_run_and_the_sentence(folders) -> None:
    both = comparison(folders)
    lines = markdown(both).splitlines()
    assert lines[2] == "| demo-ddp | DDP | 2.35 | 4.00 k | 80.0 MB | the most | 0:01:05 | 35 % |"
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[5] == sentence(both)


def test_the_busiest_second_of_each_run_is_a_line_below_the_sentence(folders) -> None:
    ddp, diloco = comparison(folders).rows
    assert busiest_seconds(comparison(folders)) == "", "runs of older versions do not have it"
    peaked = replace(diloco, summary=replace(diloco.summary, busiest_second_bytes=123_456.0))
    line = "An island sent at most, in one second: demo-diloco 123 kB."
    assert busiest_seconds(Comparison(rows=(ddp, peaked))) == line
    assert markdown(Comparison(rows=(ddp, peaked)), "slower").splitlines()[5:] == [
        sentence(comparison(folders)),
        "",
        line,
        "",
        "slower",
    ]


def test_accuracy_has_a_column_of_its_own_as_soon_as_one_run_has_it(folders, tmp_path, script, async_script) -> None:
    toy = async_script(recipe="toy-async", accuracy=True, rounds=30).write(tmp_path / "toy")
    diloco = script(recipe="toy-sync", accuracy=True).write(tmp_path / "sync")
    lines = markdown(comparison([folders[0], toy, diloco])).splitlines()
    assert [line.split(" | ")[3] for line in lines if line.startswith("| ")] == ["accuracy", "-", "100.0 %", "10.0 %"]
    assert "100.0 %" in printed(table(comparison([folders[0], toy])), width=100)
    assert "accuracy" not in markdown(comparison(folders))


def test_json_has_asynchrony_for_asynchronous_runs_only(folders, tmp_path, async_script) -> None:
    read = json.loads(json.dumps(comparison([folders[0], async_script().write(tmp_path / "c")]).to_dict()))
    assert ["asynchrony" in run for run in read["runs"]] == [False, True]
    assert read["runs"][1]["asynchrony"]["arrivals"] == 12


def test_json_holds_the_summaries_and_the_sentence(folders) -> None:
    both = comparison(folders)
    read = json.loads(json.dumps(both.to_dict(), allow_nan=False))
    assert read["sentence"] == sentence(both)
    assert read["most_bytes"] == "demo-ddp"
    for folder, run in zip(folders, read["runs"], strict=True):
        assert json.loads(read_summary(folder).to_json()).items() <= run.items()
    assert [run["share_of_most_bytes"] for run in read["runs"]] == [1.0, 0.1]


def test_runs_with_other_data_are_not_comparable_and_with_another_partition_are(folders) -> None:
    for folder, partition in zip(folders, ("IID", "ByDomain"), strict=True):
        (folder / "run.json").write_text(json.dumps({"format": 2, "data": {"corpus": "stdlib", "partition": partition}}))
    assert "reaches" in sentence(comparison(folders))
    (folders[0] / "run.json").write_text(json.dumps({"format": 2, "data": {"corpus": "files:x", "partition": "IID"}}))
    assert "not comparable" in sentence(comparison(folders))


def test_runs_of_one_recipe_have_distinct_labels(tmp_path, script) -> None:
    seeds = [script(seed=seed).write(tmp_path / f"seed{seed}") for seed in (0, 1)]
    again = script(seed=1).write(tmp_path / "again")
    assert [row.label for row in comparison(seeds).rows] == ["demo-ddp (seed 0)", "demo-ddp (seed 1)"]
    assert [row.label for row in comparison([*seeds, again]).rows] == ["demo-ddp (seed0)", "demo-ddp (seed1)", "demo-ddp (again)"]
    twice = [row.label for row in comparison([again, again]).rows]
    assert len(set(twice)) == 2


def test_an_unfinished_run_is_refused_with_the_way_to_resume_it(folders, tmp_path, script) -> None:
    unfinished = script(finished=False).write(tmp_path / "c")
    with pytest.raises(AtollError, match="--resume"):
        comparison([*folders, unfinished])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give one folder or more"):
        comparison([])


DDP = Summary(
    recipe="ddp",
    algorithm="DDP",
    islands=4,
    params=1000,
    tokens=10_000,
    warm_start_tokens=0,
    local_updates=100,
    outer_steps=100,
    val_loss=2.35,
    val_perplexity=10.5,
    virtual_time_s=100.0,
    wall_time_s=1.0,
    sent_bytes_per_island=20_000.0,
    control_bytes_per_island=0.0,
    utilisation=0.5,
    resumed_from_round=0,
    run_dir="ddp",
    seed=0,
    rounds=100,
    steps=100,
    digest="00",
)
DILOCO = replace(DDP, recipe="diloco", val_loss=2.31, sent_bytes_per_island=1000.0, virtual_time_s=61.0)


def sentence_about(*summaries: Summary) -> str:
    return sentence(Comparison(rows=tuple(ComparedRun(label=summary.recipe, summary=summary) for summary in summaries)))


def test_a_better_run_has_its_loss_bytes_and_time() -> None:
    assert sentence_about(DDP, DILOCO) == "diloco reaches 2.31 against ddp's 2.35 with 1/20 of the bytes in 0.61 of the time."


def test_the_order_of_two_runs_does_not_matter() -> None:
    assert sentence_about(DDP, DILOCO) == sentence_about(DILOCO, DDP)


def test_a_worse_run_is_reported_as_worse() -> None:
    worse = replace(DILOCO, val_loss=2.40, virtual_time_s=140.0)
    assert (
        sentence_about(DDP, worse)
        == "diloco ends 0.05 worse than ddp (2.40 against 2.35), with 1/20 of the bytes in 1.4 times the time."
    )


def test_the_reported_difference_is_that_of_the_reported_losses() -> None:
    assert "ends 0.23 worse than ddp (3.12 against 2.89)" in sentence_about(
        replace(DDP, val_loss=2.886), replace(DILOCO, val_loss=3.123)
    )


def test_losses_that_differ_in_the_fourth_digit_are_distinguished() -> None:
    assert "2.352 against 2.350" in sentence_about(DDP, replace(DILOCO, val_loss=2.352))


def test_losses_that_agree_in_four_digits_match() -> None:
    assert sentence_about(DDP, replace(DILOCO, val_loss=2.3501)).startswith("diloco matches ddp's 2.35 with")


def test_equal_bytes_and_times_are_called_the_same() -> None:
    same = replace(DILOCO, sent_bytes_per_island=19_999.0, virtual_time_s=100.1)
    assert sentence_about(DDP, same).endswith("with the same bytes in the same time.")


def test_an_unknown_time_is_left_out() -> None:
    assert sentence_about(DDP, replace(DILOCO, virtual_time_s=None)).endswith("with 1/20 of the bytes.")


def test_runs_that_send_nothing_have_no_ratio_of_bytes() -> None:
    quiet = replace(DDP, sent_bytes_per_island=0.0)
    assert "with nothing sent in 0.61 of the time" in sentence_about(quiet, replace(DILOCO, sent_bytes_per_island=0.0))


def test_a_diverged_run_is_called_so_on_either_side() -> None:
    assert sentence_about(DDP, replace(DILOCO, val_loss=math.nan)).startswith(
        "diloco diverged (its loss is NaN) where ddp reaches 2.35, with"
    )
    assert sentence_about(replace(DDP, val_loss=math.inf), DILOCO).startswith("diloco reaches 2.31 where ddp diverged, with 1/20")


@pytest.mark.parametrize("tokens", [9000, 11_000])
def test_runs_on_different_numbers_of_tokens_are_not_compared(tokens: int) -> None:
    text = sentence_about(DDP, replace(DILOCO, tokens=tokens))
    assert text.startswith("These runs are not comparable, because they trained on different numbers of tokens: ddp saw 10.0 k")
    assert "2.3" not in text


def test_the_last_round_of_a_run_with_a_hub_may_go_past_the_end(tmp_path, async_script) -> None:
    """Rounds of 5 steps with 100 tokens each: a run that was asked for 2500 tokens may have seen up to 3000."""
    hub = read_summary(async_script(rounds=6).write(tmp_path / "run"))
    assert hub.tokens == 3000
    assert "not comparable" not in sentence_about(replace(DDP, tokens=2500, params=hub.params), hub)
    assert "not comparable" in sentence_about(replace(DDP, tokens=2400, params=hub.params), hub)
    assert "not comparable" in sentence_about(replace(DDP, tokens=3100, params=hub.params), hub), "it never stops short of it"
    assert "not comparable" in sentence_about(replace(DDP, tokens=2500, params=hub.params), replace(hub, asynchrony=None))


def test_the_last_commit_of_islands_that_accumulate_freely_may_go_past_the_end() -> None:
    """Commits of 300 to 400 tokens: a run that was asked for 10,000 may have seen up to 400 more."""
    rounds = OverlapSummary(islands=(), background=1, exchanges=1, skipped=0, failed=0, most_tokens=400, fewest_tokens=300)
    free = replace(DILOCO, recipe="acco", tokens=10_390, overlap=rounds)
    assert "not comparable" not in sentence_about(DDP, free)
    assert "not comparable" in sentence_about(DDP, replace(free, tokens=10_600))
    assert "not comparable" in sentence_about(DDP, replace(free, tokens=9_700)), "it never stops short of it"
    assert "not comparable" in sentence_about(DDP, replace(free, overlap=None))
    even = replace(rounds, fewest_tokens=400)
    assert "not comparable" in sentence_about(DDP, replace(free, overlap=even)), (
        "with a fixed batch the last commit is as long as asked for"
    )


def test_tokens_of_runs_that_are_not_comparable_are_those_of_the_table_where_warm_starts_are_alike() -> None:
    text = sentence_about(replace(DDP, warm_start_tokens=200), replace(DILOCO, warm_start_tokens=200, tokens=20_500))
    assert text.endswith("diloco saw 20.5 k.")
    text = sentence_about(replace(DDP, warm_start_tokens=500), replace(DILOCO, warm_start_tokens=0, tokens=20_500))
    assert "ddp saw 10.5 k with the warm start" in text


def test_warm_start_tokens_count_as_work() -> None:
    assert "not comparable" in sentence_about(DDP, replace(DILOCO, warm_start_tokens=5000))
    assert "not comparable" not in sentence_about(DDP, replace(DILOCO, tokens=5000, warm_start_tokens=5000))


def test_a_round_more_or_less_is_still_the_same_work() -> None:
    assert "reaches" in sentence_about(DDP, replace(DILOCO, tokens=10_050))


def test_models_of_different_size_are_not_compared() -> None:
    assert "ddp has 1.00 k and diloco has 2.00 k" in sentence_about(DDP, replace(DILOCO, params=2000))


def test_losses_on_different_text_are_not_compared() -> None:
    rows = (
        ComparedRun(label="ddp", summary=DDP, data={"corpus": "stdlib", "tokenizer": "bytes"}),
        ComparedRun(label="diloco", summary=DILOCO, data={"corpus": "stdlib", "tokenizer": "bpe:512"}),
    )
    assert sentence(Comparison(rows=rows)) == (
        "These runs are not comparable, because their data differ: ddp has tokenizer=bytes and diloco has tokenizer=bpe:512."
    )
    same = ComparedRun(label="diloco", summary=DILOCO, data=rows[0].data)
    assert "reaches" in sentence(Comparison(rows=(rows[0], same)))


def test_three_runs_are_compared_with_the_one_that_sent_most() -> None:
    acco = replace(DDP, recipe="acco", val_loss=2.36, virtual_time_s=40.0)
    text = sentence_about(DDP, DILOCO, acco)
    assert text == (
        "diloco reaches 2.31 against ddp's 2.35 with 1/20 of the bytes in 0.61 of the time; "
        "acco ends 0.01 worse than ddp (2.36 against 2.35), with the same bytes in 0.40 of the time."
    )


def test_a_sentence_about_many_runs_names_the_best() -> None:
    others = [
        replace(DDP, recipe=f"run{n}", val_loss=2.4 + n / 10, sent_bytes_per_island=500.0 * n, virtual_time_s=70 - n)
        for n in (1, 2)
    ]
    broken = replace(DDP, recipe="broken", val_loss=math.nan, sent_bytes_per_island=1.0)
    assert sentence_about(DDP, DILOCO, *others, broken) == (
        "Of 5 runs, diloco reaches the lowest loss (2.31), run1 sends least (500 B per island) "
        "and diloco is fastest (0:01:01); 1 diverged."
    )
    assert sentence_about(*[replace(broken, recipe=str(n)) for n in range(5)]) == "All 5 runs diverged."


def test_one_run_alone_has_no_comparison() -> None:
    assert sentence_about(DDP) == "ddp reaches 2.35 after 10.0 k tokens, sending 20.0 kB per island in 0:01:40."
    assert sentence_about(replace(DDP, val_loss=math.nan)).startswith("ddp diverged (its loss is NaN)")


def test_every_result_is_one_sentence() -> None:
    for text in (
        sentence_about(DDP),
        sentence_about(DDP, DILOCO),
        sentence_about(DDP, DILOCO, replace(DILOCO, recipe="x")),
        sentence_about(DDP, replace(DILOCO, tokens=1)),
    ):
        assert text.endswith(".")
        assert ". " not in text
        assert "\n" not in text


def test_the_reference_among_equal_senders_is_the_slowest() -> None:
    fast = replace(DDP, recipe="fast", virtual_time_s=1.0)
    assert Comparison(rows=tuple(ComparedRun(label=s.recipe, summary=s) for s in (fast, DDP))).most.label == "ddp"


def test_losses_are_shown_with_one_number_of_digits() -> None:
    rows = tuple(ComparedRun(label=str(loss), summary=replace(DDP, val_loss=loss)) for loss in (2.351, 2.349, 2.6))
    assert list(Comparison(rows=rows).losses.values()) == ["2.351", "2.349", "2.600"]
