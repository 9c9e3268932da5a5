"""The papers' claims: a smoke test of the whole study, the gate, the choices, and the time to a loss."""

import json

import pytest

from atoll.data.prepare import Preparation, prepare


@pytest.fixture(scope="module")
def study(b, tmp_path_factory):
    """A record of the whole study at small sizes, and its page."""
    folder = tmp_path_factory.mktemp("study")
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=150_000), folder / "text")
    page = folder / "README.md"
    page.write_text("<!-- evidence_brief:begin -->\n<!-- evidence_brief:end -->\n")
    command = ["--text", str(folder / "text"), "--quick", "--quiet", "--seeds", "0", "--record", str(folder / "record")]
    b.paper_claims.main([*command, "--readme", str(page)])
    return command, folder / "record", page


def cells(record):
    return [json.loads(line) for line in (record / "cells.jsonl").read_text().splitlines()]


def test_every_method_chooses_on_a_seed_that_no_table_reports(b, study):
    _, record, _ = study
    choice = b.paper_claims.CHOICE_SEED
    plan = b.paper_claims_rows.QUICK
    tried = [cell for cell in cells(record) if cell["seed"] == choice]
    expected = sum(len(b.paper_claims_rows.outers_of(plan, method)) + len(plan.rates) - 1 for method in b.paper_claims_rows.METHODS)
    assert len(tried) == expected
    assert {cell["seed"] for cell in cells(record)} == {0, choice}


def test_the_report_has_all_tables_and_the_page_the_headline(study):
    _command, record, page = study
    readme = (record / "README.md").read_text()
    for title in ("Choices", "Does a larger batch still pay?", "Verdicts", "ACCO", "Time to a loss", "Outer rules"):
        assert f"## {title}\n" in readme
    assert "not run" not in readme.lower()
    assert (record / "plot.png").exists()
    assert (record / "deltas.png").exists()
    assert page.read_text().count("| DiLoCo, ") == 2
    assert all({"curve", "sent", "deltas"} <= cell.keys() for cell in cells(record))


def test_a_finished_study_runs_no_cell_again(b, study, capsys):
    command, record, _ = study
    before = len(cells(record))
    b.paper_claims.main(command)
    assert len(cells(record)) == before


def outcome(b, *losses):
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), tuple({"val_loss": loss, "tokens": 1} for loss in losses))


@pytest.mark.parametrize(("batch", "verdict"), [(2.0, "not judged here"), (2.9, "judged")])
def test_a_batch_that_still_pays_is_not_judged(b, batch, verdict):
    plan = b.paper_claims_rows.SMALL
    rows = {b.paper_claims_rows.ONE: outcome(b, 3.0, 3.01), b.paper_claims_rows.times_batch(4): outcome(b, batch, batch)}
    rows[b.paper_claims_rows.diloco(4, 50)] = outcome(b, 2.9, 2.91)
    (gate,) = b.paper_claims_report.gate_lines(plan, rows)
    assert verdict in gate
    lines = b.paper_claims_report.claims(plan, rows)
    assert any("not judged here" in line for line in lines) == (verdict == "not judged here")
    assert any("k=4, H=50] - [4x batch]" in line for line in lines) == (verdict == "judged")


def test_a_diverged_candidate_is_never_chosen(b):
    rows_of = b.paper_claims_rows
    plan, method = rows_of.SMALL, rows_of.ONE
    labels = [rows_of.choice_label(method, each) for each in rows_of.candidates_of(plan, method, plan.outers[0])]
    found = {labels[0]: outcome(b, 3.0), labels[1]: outcome(b, 2.0), labels[2]: outcome(b, 2.5)}
    assert rows_of.best(plan, found, method, plan.outers[0]).rate == plan.rates[1]
    found[labels[1]] = b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), (), ("diverged",))
    assert rows_of.best(plan, found, method, plan.outers[0]).rate == plan.rates[2]
    del found[labels[0]]
    assert rows_of.best(plan, found, method, plan.outers[0]) is None, "a grid that was not finished chooses nothing"
