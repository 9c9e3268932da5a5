"""Cells: none runs twice, and a failed or missing cell affects no other."""

import json
import sys

import pytest

from atoll.core.errors import AtollError, ConfigError
from atoll.data.prepare import Preparation, prepare


def test_rows_with_the_same_run_share_a_cell_that_runs_once(b, small, lines_of, tmp_path):
    settings = {"default": (), "four": ("cluster.islands=4",)}
    rows = {label: b.cells.Row(recipe="demo-diloco", base=tuple(small), settings=each) for label, each in settings.items()}
    first, again = (b.cells.run_rows(rows, [0], b.record.Record(tmp_path), "", quiet=True) for _ in range(2))
    assert len(lines_of(tmp_path)) == 1
    assert first == again
    assert first["default"].summaries == first["four"].summaries


def test_the_same_text_in_another_folder_shares_the_cell(b, small, lines_of, tmp_path):
    """The key has the digests of the tokens; the cell says which folder it read."""
    for folder, size in (("one", 60_000), ("two", 60_000), ("other", 70_000)):
        prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=size), tmp_path / folder)
    texts = {}
    for folder in ("one", "two", "other"):
        record = b.record.Record(tmp_path / f"record of {'another' if folder == 'other' else 'one'} text")
        b.record.check_texts(record, {"text": tmp_path / folder})
        corpus = f"data=Text(corpus='prepared:{tmp_path / folder}',seq_len=16,eval_batches=2)"
        b.cells.run_rows({"row": b.cells.Row(recipe="demo-ddp", base=(*small, corpus))}, [0], record, "", quiet=True)
        texts[folder] = [json.loads(line) for line in lines_of(record.path)]
    assert texts["one"] == texts["two"]
    ((one,), (other,)) = texts["one"], texts["other"]
    assert [*one["texts"]] == [str(tmp_path / "one")]
    assert one["key"] != other["key"]


def test_a_run_that_diverges_is_recorded_and_affects_only_its_row(b, small, lines_of, tmp_path):
    good = b.cells.Row(recipe="demo-diloco", base=tuple(small))
    bad = b.cells.Row(recipe="demo-diloco", base=tuple(small), settings=("optimizer.lr=1e18", "train.warm_start_steps=0"))
    found = b.cells.run_rows({"good": good, "bad": bad}, [0], b.record.Record(tmp_path), "", quiet=True)
    assert found["good"].loss is not None
    assert found["bad"].loss is None
    assert b.figure_text.loss_text(found["bad"])[0] == "diverged (1 of 1 seeds)"
    assert len(lines_of(tmp_path)) == 2


def test_progress_is_shown_on_standard_error(b, small, tmp_path, capsys):
    b.cells.run_rows({"row": b.cells.Row(recipe="demo-diloco", base=tuple(small))}, [0], b.record.Record(tmp_path), "few")
    out, err = capsys.readouterr()
    assert out == ""
    assert "few: cells" in err
    assert "demo-diloco, seed 0: loss" in err


def test_a_row_has_the_seeds_before_the_first_missing_one(b, small, tmp_path):
    """Rows are compared seed by seed: a gap would shift the later seeds."""
    row, record = b.cells.Row(recipe="demo-ddp", base=tuple(small)), b.record.Record(tmp_path)
    for seed in (0, 2):
        cell = {"key_version": b.cells.KEY_VERSION, "recipe": row.recipe, "settings": small, "seed": seed}
        record.add(b.cells.key_of(row.run(seed)), {**cell, "summary": {"val_loss": float(seed)}})
    found = b.cells.run_rows({"row": row}, [0, 1, 2], record, "", quiet=True, until_s=0.0)
    assert found["row"].loss.values == (0.0,)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_cell_costs_no_other_and_is_named_at_the_end(b, small, lines_of, tmp_path, processes):
    """Cells run in processes have the figures of this process."""
    rows = {steps: b.cells.Row(recipe="demo-ddp", base=(*small, f"train.steps={steps}")) for steps in (4, 2, 3)}
    bad = b.cells.Row(recipe="demo-ddp", base=(*small, "data.seq_len=100000"), name="too long")
    record = b.record.Record(tmp_path / "record")
    with pytest.raises(AtollError, match=r"1 of 4 cells failed: too long, seed 0 \(.*100001"):
        b.cells.run_rows({"bad": bad, **rows}, [0], record, "", quiet=True, islands=True, processes=processes)
    found = {line["settings"][-1]: line for line in map(json.loads, lines_of(record.path))}
    assert {*found} == {"train.steps=4", "train.steps=2", "train.steps=3"}
    assert "too long, seed 0: failed (" in (record.path / "log.txt").read_text()
    here = b.cells.run_rows({4: rows[4]}, [0], b.record.Record(tmp_path / "here"), "", quiet=True, islands=True)[4]
    cell = found["train.steps=4"]
    assert (cell["summary"]["digest"], cell["islands"]) == (here.summaries[0]["digest"], list(here.islands[0]))


def test_a_cell_whose_library_is_missing_is_refused_before_the_first_cell(b, small, lines_of, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    rows = {"first": (), "k-means": ("data.partition=KMeans()",)}
    rows = {label: b.cells.Row(recipe="demo-diloco", base=tuple(small), settings=each) for label, each in rows.items()}
    with pytest.raises(ConfigError, match=r"need sklearn.cluster, which cannot be imported .* Install it with"):
        b.cells.run_rows(rows, [0], b.record.Record(tmp_path), "", quiet=True)
    assert not (tmp_path / "cells.jsonl").exists()


def test_what_a_cell_finds_asks_for_more_cells(b, small, lines_of, tmp_path):
    """A choice and the rows that follow from it are one call, in which no process waits."""
    first, second = (b.cells.Row(recipe="demo-ddp", base=(*small, f"train.steps={steps}")) for steps in (2, 4))

    def wanted(found):
        follows = "first" in found and found["first"].loss is not None
        return [b.cells.Wanted("first", first, 0), *([b.cells.Wanted("second", second, 0)] if follows else [])]

    for _ in range(2):
        found = b.cells.run_cells(wanted, b.record.Record(tmp_path), "", quiet=True, processes=2)
        assert [*found] == ["first", "second"]
        assert len(lines_of(tmp_path)) == 2


@pytest.mark.parametrize("recipe", ["demo-ddp", "demo-diloco", "demo-acco", "demo-async", "demo-two-level"])
def test_the_first_demos_settings_fit_todays_recipes(b, recipe):
    base = b.cells.FIRST_TWO_LEVEL if recipe == "demo-two-level" else b.cells.FIRST_DEMO
    assert b.cells.Row(recipe=recipe, base=base).run(0).model.width == 48
