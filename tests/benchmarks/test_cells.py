"""Cells: none runs twice, and one that fails or is missing spoils no other."""

import json

import pytest

from atoll.core.errors import AtollError


def test_rows_that_come_to_the_same_run_share_a_cell_and_nothing_runs_twice(b, small, lines_of, tmp_path):
    rows = [b.cells.Row(recipe="demo-diloco", base=tuple(small), settings=settings) for settings in ((), ("cluster.islands=4",))]
    first = b.cells.carry_out(rows, [0], b.record.Record(tmp_path), "", quiet=True)
    again = b.cells.carry_out(rows, [0], b.record.Record(tmp_path), "", quiet=True)
    assert len(lines_of(tmp_path)) == 1
    assert first == again
    assert first[rows[0]].summaries == first[rows[1]].summaries


def test_a_run_that_diverges_is_recorded_and_spoils_its_row_alone(b, small, lines_of, tmp_path):
    good = b.cells.Row(recipe="demo-diloco", base=tuple(small))
    bad = b.cells.Row(recipe="demo-diloco", base=tuple(small), settings=("optimizer.lr=1e30", "train.warm_start_steps=0"))
    found = b.cells.carry_out([good, bad], [0], b.record.Record(tmp_path), "", quiet=True)
    assert found[good].loss is not None
    assert found[bad].loss is None
    assert b.figure_text.loss_text(found[bad])[0] == "diverged (1 of 1 seeds)"
    assert len(lines_of(tmp_path)) == 2


def test_progress_is_shown_on_standard_error(b, small, tmp_path, capsys):
    b.cells.carry_out([b.cells.Row(recipe="demo-diloco", base=tuple(small))], [0], b.record.Record(tmp_path), "few")
    out, err = capsys.readouterr()
    assert out == ""
    assert "few: cells" in err
    assert "demo-diloco, seed 0: loss" in err


def test_a_row_that_lacks_a_seed_has_those_before_it(b, small, tmp_path):
    """Rows are compared seed by seed: a hole would shift the others."""
    row, record = b.cells.Row(recipe="demo-ddp", base=tuple(small)), b.record.Record(tmp_path)
    for seed in (0, 2):
        record.add(b.cells.key_of(row.run(seed)), {"key_version": b.cells.KEY_VERSION, "summary": {"val_loss": float(seed)}})
    found = b.cells.carry_out([row], [0, 1, 2], record, "", quiet=True, until_s=0.0)
    assert found[row].loss.values == (0.0,)


def test_a_cell_comes_out_the_same_in_a_process_of_its_own(b, small, tmp_path):
    row = b.cells.Row(recipe="demo-ddp", base=(*small, "train.steps=2"))
    here, apart = (
        b.cells.carry_out([row], [0], b.record.Record(tmp_path / str(n)), "", quiet=True, islands=True, processes=n)[row]
        for n in (1, 2)
    )
    assert (here.loss, here.islands) == (apart.loss, apart.islands)
    assert here.summaries[0]["digest"] == apart.summaries[0]["digest"]


def test_a_cell_that_fails_in_its_process_costs_no_other_that_was_begun(b, small, lines_of, tmp_path):
    good, never = (b.cells.Row(recipe="demo-ddp", base=(*small, f"train.steps={steps}")) for steps in (4, 2))
    bad = b.cells.Row(recipe="demo-ddp", base=(*small, "data.seq_len=100000"))
    with pytest.raises(AtollError, match="100001"):
        b.cells.carry_out([bad, good, never], [0], b.record.Record(tmp_path), "", quiet=True, processes=2)
    assert [json.loads(line)["settings"] for line in lines_of(tmp_path)] == [list(good.base)]
