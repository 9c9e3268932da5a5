"""Runs side by side, in every form."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import MEMORY_KINDS, MemoryCounted
from atoll.telemetry import comparison, markdown, read_summary, sentence, table


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


def test_a_long_name_gives_way_and_the_figures_do_not(tmp_path, script) -> None:
    name = "a-recipe-with-a-name-that-nobody-would-want-to-type"
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
    assert "against demo-diloco (" in markdown(comparison(made)), "where there is room, it is named"


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


def test_the_sentence_speaks_of_the_runs(folders) -> None:
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


def test_accuracy_has_a_column_of_its_own_as_soon_as_one_run_has_it(folders, tmp_path, script, async_script) -> None:
    toy = async_script(recipe="toy-async", accuracy=True, rounds=30).write(tmp_path / "toy")
    diloco = script(recipe="toy-sync", accuracy=True).write(tmp_path / "sync")
    lines = markdown(comparison([folders[0], toy, diloco])).splitlines()
    assert [line.split(" | ")[3] for line in lines if line.startswith("| ")] == ["accuracy", "-", "100.0 %", "10.0 %"]
    assert "100.0 %" in printed(table(comparison([folders[0], toy])), width=100)
    assert "accuracy" not in markdown(comparison(folders))


def test_json_tells_an_asynchronous_run_and_leaves_a_synchronous_one_as_it_was(folders, tmp_path, async_script) -> None:
    read = json.loads(comparison([folders[0], async_script().write(tmp_path / "c")]).to_json())
    assert ["asynchrony" in run for run in read["runs"]] == [False, True]
    assert read["runs"][1]["asynchrony"]["arrivals"] == 12


def test_json_holds_the_summaries_and_the_sentence(folders) -> None:
    both = comparison(folders)
    read = json.loads(both.to_json())
    assert read["sentence"] == sentence(both)
    assert read["most_bytes"] == "demo-ddp"
    for folder, run in zip(folders, read["runs"], strict=True):
        assert json.loads(read_summary(folder).to_json()).items() <= run.items()
    assert [run["share_of_most_bytes"] for run in read["runs"]] == [1.0, 0.1]


def test_data_is_read_from_the_run_and_may_be_dealt_out_differently(folders) -> None:
    for folder, partition in zip(folders, ("IID", "ByDomain"), strict=True):
        (folder / "run.json").write_text(json.dumps({"data": {"corpus": "stdlib", "partition": partition}}))
    assert "reaches" in sentence(comparison(folders))
    (folders[0] / "run.json").write_text(json.dumps({"data": {"corpus": "files:x", "partition": "IID"}}))
    assert "not comparable" in sentence(comparison(folders))


def test_runs_of_one_recipe_are_told_apart(tmp_path, script) -> None:
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
