"""The papers' claims: a smoke test of the whole study, the gate, the choices, and the time to a loss."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
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


@pytest.mark.slow
def test_every_method_chooses_on_a_seed_that_no_table_reports(b, study):
    _, record, _ = study
    choice = b.paper_claims.CHOICE_SEED
    plan = b.paper_claims_rows.QUICK
    tried = [cell for cell in cells(record) if cell["seed"] == choice]
    expected = sum(
        len(b.paper_claims_choices.outers_of(plan, method)) + len(plan.rates) - 1 for method in b.paper_claims_rows.METHODS
    )
    assert len(tried) == expected
    assert {cell["seed"] for cell in cells(record)} == {0, choice}


@pytest.mark.slow
def test_the_report_has_all_tables_and_the_page_the_headline(study):
    _command, record, page = study
    readme = (record / "README.md").read_text()
    for title in ("Choices", "Does a larger batch still pay?", "Further claims", "ACCO", "Time to a loss", "Outer rules"):
        assert f"## {title}\n" in readme
    assert "## Tables of which no row was run" not in readme
    assert "- Tables with one seed: none." in readme
    assert (record / "plot.png").exists()
    assert (record / "deltas.png").exists()
    methods = [line.removeprefix("| ").partition(" | ")[0] for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(methods[1:]) == 8, "README's table has a row per headline, and at most eight"
    assert [method for method in methods if method.startswith("DiLoCo")] == ["DiLoCo, 2 islands"] * 2 + ["DiLoCo, 3 islands"]
    assert all({"curve", "sent", "deltas"} <= cell.keys() for cell in cells(record))


@pytest.mark.slow
def test_a_finished_study_runs_no_cell_again(b, study, capsys):
    command, record, _ = study
    before = len(cells(record))
    b.paper_claims.main(command)
    assert len(cells(record)) == before


def outcome(b, *losses):
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), tuple({"val_loss": loss, "tokens": 1} for loss in losses))


def study_of(b, rows, plan=None, **fields):
    plan = plan or b.paper_claims_rows.SMALL
    known = {"choices": {}, "tried": {}, "text": {"train": {"tokens": 1}}, "seeds": (0, 1, 2), **fields}
    return b.paper_claims_verdicts.Study(plan=plan, outcomes=rows, **known)


@pytest.mark.parametrize(("batch", "verdict"), [(2.0, "not judged here"), (2.9, "judged")])
def test_a_batch_that_still_pays_is_not_judged(b, batch, verdict):
    rows_of, of = b.paper_claims_rows, b.paper_claims_verdicts
    rows = {rows_of.ONE: outcome(b, 3.0, 3.01, 3.0), rows_of.times_batch(4): outcome(b, batch, batch, batch)}
    rows[rows_of.diloco(4, 50)] = outcome(b, 2.9, 2.91, 2.9)
    study = study_of(b, rows)
    (gate,) = of.gate_lines(study)
    assert verdict in gate
    assert ("The margin of 0.02 is 19 % of that gain." in gate) == (verdict == "judged")
    (line,) = (line for line in of.claims_table(study, of.headline_claims(study)).splitlines() if "below 4 times the batch" in line)
    assert line.count("**not judged here**") == (2 if verdict == "not judged here" else 0)


@pytest.mark.parametrize("kind", ["half of the steps", "larger model"])
def test_half_of_the_steps_and_a_larger_model_have_a_gate_of_their_own(b, kind):
    rows_of, of = b.paper_claims_rows, b.paper_claims_verdicts
    rows = {f"{rows_of.ONE}, {kind}": outcome(b, 3.0), f"{rows_of.LARGE}, {kind}": outcome(b, 2.8)}
    assert of.gate_lines(study_of(b, rows)) == [
        f"batch, {kind} gains 0.200 nats over one worker, {kind} (the limit is 0.15): **not judged here**."
    ]


def claim_row(b, one, other, **fields):
    """The cells of the headline's first claim, DiLoCo with 4 islands against 4 times the batch."""
    rows_of, of = b.paper_claims_rows, b.paper_claims_verdicts
    one = replace(one, row=b.cells.Row(recipe="demo-diloco"))
    rows = {rows_of.ONE: outcome(b, 3.1, 3.1, 3.1), rows_of.diloco(4, 50): one, rows_of.times_batch(4): other}
    study = study_of(b, rows, **fields)
    (line,) = (line for line in of.claims_table(study, of.headline_claims(study)).splitlines() if "k=4, H=50: below 4" in line)
    return line.strip("| ").split(" | ")


def started(b, found, *first):
    """A row whose seeds begin with these losses."""
    return replace(found, curves=tuple(((0.0, 0, at), (9.0, 9, 1.0)) for at in first))


@pytest.mark.parametrize(("starts", "judged"), [((5.0, 5.1, 5.2), True), ((5.0, 5.1, 5.3), False)])
def test_rows_that_began_with_other_weights_are_marked_and_not_judged(b, starts, judged):
    rows_of, of, mark = b.paper_claims_rows, b.paper_claims_verdicts, "not judged: unequal start"
    one, other = outcome(b, 3.008, 3.01, 3.012), started(b, outcome(b, 3.0, 3.0, 3.0), *starts)
    _, _, shown, strict, near, _, _ = claim_row(b, started(b, one, 5.0, 5.1, 5.2), other)
    assert (shown.endswith(" (unequal start)"), strict == f"**{mark}**", near == f"**{mark}**") == (not judged,) * 3
    batch = started(b, outcome(b, 3.0, 3.0, 3.0), *starts)
    rows = {rows_of.ONE: started(b, outcome(b, 3.1, 3.1, 3.1), 5.0, 5.1, 5.2), rows_of.times_batch(4): batch}
    study = study_of(b, rows)
    assert study.judged(4) == judged
    assert (mark in of.gate_lines(study)[0]) == (not judged)
    assert ("Unequal start: " in of.rules_text(study)) == (not judged)
    warmer = b.cells.Row(recipe="demo-ddp", settings=("train.warm_start_steps=7",))
    rows[rows_of.times_batch(4)] = replace(batch, row=warmer)
    assert study_of(b, rows).judged(4), "a row with another warm start is meant to begin elsewhere"


def test_the_time_of_an_exchange_has_its_latencies(b):
    """A ring of four islands takes six steps of 1 ms, and sends 1.5 times the weights."""
    rows_of, plan = b.paper_claims_rows, b.paper_claims_rows.MEDIUM
    row = plan.row(rows_of.OVERLAPPED, rows_of.Choice(plan.rate, plan.outers[0]))
    rows = {rows_of.OVERLAPPED: b.cells.Outcome(row, ({"params": 1_000_000},))}
    assert b.paper_claims_verdicts.exchange_share(study_of(b, rows, plan)) == pytest.approx(0.006 + 1.5 * 4 * 8 / 60)


def test_a_claim_is_judged_in_the_papers_direction_and_within_a_margin(b):
    _, _, shown, strict, near, share, _ = claim_row(b, outcome(b, 3.008, 3.01, 3.012), outcome(b, 3.0, 3.0, 3.0))
    assert shown == "+0.0100 [+0.0050, +0.0150]"
    assert (strict, near, share) == ("**does not hold here**", "**holds here**", "0.90")
    _, _, shown, strict, near, _, _ = claim_row(b, outcome(b, 3.01, 3.01), outcome(b, 3.0, 3.0, 3.0))
    assert (shown, strict, near) == ("+0.0100", *["**two seeds, no verdict**"] * 2), "two seeds have neither interval nor verdict"


@pytest.mark.parametrize(
    ("at_edge", "strict", "near"), [("batch", "", " (edge)"), ("DiLoCo", " (edge)", ""), ("both", " (both edges)", " (both edges)")]
)
def test_a_verdict_that_an_edge_of_the_grid_favours_is_marked(b, at_edge, strict, near):
    """The batch at its edge could be better, so that the claim would fail; DiLoCo at its edge, so that it would hold."""
    rows_of = b.paper_claims_rows
    plan, tried, choices = rows_of.SMALL, {}, {}
    for method in (rows_of.DILOCO, rows_of.LARGE):
        best = plan.rates[-1] if at_edge in (method, "both") else plan.rates[1]
        choices[method] = rows_of.Choice(best, plan.outers[0])
        for rate in plan.rates:
            tried[b.paper_claims_choices.choice_label(method, rows_of.Choice(rate, plan.outers[0]))] = outcome(
                b, 2.0 + (rate != best)
            )
    one, other = outcome(b, 3.008, 3.01, 3.012), outcome(b, 3.0, 3.0, 3.0)
    row = claim_row(b, one, other, tried=tried, choices=choices)
    assert row[3:5] == [f"**does not hold here**{strict}", f"**holds here**{near}"]


def test_rows_that_train_the_same_give_the_noise_of_a_repetition(b):
    rows_of = b.paper_claims_rows
    rows = {rows_of.diloco(4, 50): outcome(b, 1.0, 1.0), rows_of.SYNC: outcome(b, 1.001, 1.002), rows_of.DENSE: outcome(b, 1.0)}
    text = b.paper_claims_verdicts.noise_text(study_of(b, rows))
    assert "up to 0.0020 (4 pairs, mean 0.0010)" in text
    assert b.paper_claims_verdicts.noise_text(study_of(b, {})) == ""


def test_the_pooled_scatter_names_the_verdicts_that_it_changes(b):
    """Three pairs that agree by chance: their own interval is narrow, that of all rows is wide."""
    rows_of = b.paper_claims_rows
    rows = {rows_of.ONE: outcome(b, 3.1, 3.1, 3.1), rows_of.times_batch(4): outcome(b, 3.0, 3.0, 3.0)}
    rows[rows_of.diloco(4, 50)] = replace(outcome(b, 3.009, 3.01, 3.011), row=b.cells.Row(recipe="demo-diloco"))
    text = b.paper_claims_verdicts.pooled_text(study_of(b, rows))
    assert "The 3 rows with 3 seeds" in text
    assert text.endswith("Of 3 verdicts none differs with it.")
    rows[rows_of.NAIVE] = outcome(b, 3.3, 3.2, 3.1)
    text = b.paper_claims_verdicts.pooled_text(study_of(b, rows))
    assert "(6 degrees of freedom)" in text
    changed = "DiLoCo, k=4, H=50: below 4 times the batch", "DiLoCo, k=4, H=50: below 4 times the batch (at most 0.02 above)"
    assert all(claim in text for claim in changed)
    assert b.paper_claims_verdicts.pooled_text(study_of(b, {})) == ""


def test_the_deltas_cosines_and_norms_are_means_over_rounds_and_seeds(b):
    rows_of = b.paper_claims_rows
    rows = {}
    for islands, length, cosines in ((4, 50, (0.1, 0.2, 0.3)), (4, 500, (0.5, 0.7)), (8, 50, (0.1, 0.1, 0.1))):
        deltas = tuple(tuple((at, 2.0, 1.0, cosine + seed / 1000) for at, cosine in enumerate(cosines)) for seed in range(3))
        rows[rows_of.diloco(islands, length)] = b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), ({},) * 3, deltas=deltas)
    study = study_of(b, rows)
    assert "| DiLoCo, k=4, H=50 | 0.20 | 0.10, 0.20, 0.30 | 0.50 | 0.50 |" in b.paper_claims_verdicts.deltas_table(study)
    longer, fewer = b.paper_claims_verdicts.deltas_lines(study)
    assert longer.startswith("**holds here**: the deltas of DiLoCo, k=4, H=500 are more alike")
    assert fewer.startswith("**holds here**: the deltas of DiLoCo, k=8, H=50 are less alike than those of DiLoCo, k=4, H=50")


def test_a_diverged_candidate_is_never_chosen(b):
    rows_of = b.paper_claims_rows
    plan, method = rows_of.SMALL, rows_of.ONE
    labels = [
        b.paper_claims_choices.choice_label(method, each)
        for each in b.paper_claims_choices.candidates_of(plan, method, plan.outers[0])
    ]
    found = {labels[0]: outcome(b, 3.0), labels[1]: outcome(b, 2.0), labels[2]: outcome(b, 2.5)}
    assert b.paper_claims_choices.best(plan, found, method, plan.outers[0]).rate == plan.rates[1]
    found[labels[1]] = b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), (), ("diverged",))
    assert b.paper_claims_choices.best(plan, found, method, plan.outers[0]).rate == plan.rates[2]
    del found[labels[0]]
    assert b.paper_claims_choices.best(plan, found, method, plan.outers[0]) is None, "a grid that was not finished chooses nothing"


@pytest.mark.parametrize("side", [0, -1])
def test_a_further_rate_is_tried_beyond_the_edge_that_was_best_and_counts_once_it_was_run(b, side):
    rows_of, report = b.paper_claims_rows, b.paper_claims_report
    plan, method = rows_of.MEDIUM, rows_of.LARGE
    edge, beyond = plan.rates[side], plan.further_rates[side]
    labels = {
        rate: b.paper_claims_choices.choice_label(method, rows_of.Choice(rate, plan.outers[0])) for rate in (*plan.rates, beyond)
    }
    tried = {labels[rate]: outcome(b, 1.2 + abs(rate - edge)) for rate in plan.rates}
    assert [*b.paper_claims_choices.further_rows(plan, tried)] == [labels[beyond]]

    def shown():
        choices = b.paper_claims_choices.best_choices(plan, tried)
        text = report.choices_table(study_of(b, {}, plan, tried=tried, choices=choices))
        return next(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| batch"))

    tried[labels[beyond]] = b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), ())  # as of a row without cells
    assert shown() == f"{edge:g}*"
    for loss, chosen in ((1.1, f"{beyond:g}*"), (1.25, f"{edge:g}")):
        tried[labels[beyond]] = outcome(b, loss)
        assert shown() == chosen
    tried[labels[plan.rates[1]]] = outcome(b, 1.1)
    assert b.paper_claims_choices.further_rows(plan, tried) == {}


def test_each_method_shows_the_outer_rules_that_it_tried(b):
    rows_of, plan = b.paper_claims_rows, b.paper_claims_rows.SMALL
    tried = {label: outcome(b, 2.0) for label in b.paper_claims_choices.choice_rows(plan, {})}
    first = {method: plan_outer[0] for method in rows_of.METHODS if (plan_outer := b.paper_claims_choices.outers_of(plan, method))}
    tried |= {label: outcome(b, 2.0) for label in b.paper_claims_choices.choice_rows(plan, first)}
    study = study_of(b, {}, tried=tried, choices=b.paper_claims_choices.best_choices(plan, tried))
    text = b.paper_claims_report.choices_table(study)
    shown = {row.split(" | ")[0].strip("| "): row.split(" | ")[4] for row in text.splitlines() if row.startswith("| ")}
    assert shown["naive"].startswith("0.7/0.9: 2.0000, 0.9/0.7: 2.0000, 0.1/0.9: 2.0000")
    assert shown["SparseLoCo"].startswith("1/0: 2.0000, 0.7/0: 2.0000, 0.5/0: 2.0000")


def test_all_rows_are_in_a_figure(b):
    deltas = ((0, 1.0, 0.5, 0.2), (1, 1.0, 0.5, 0.3))
    row = b.cells.Row(recipe="demo-ddp")
    found = b.cells.Outcome(row, ({},), curves=(((0.0, 0, 3.0), (1.0, 1, 2.0)),), sent=((0.0, 1.0),), deltas=(deltas,))
    rows = {f"row {number}": found for number in range(16)}
    for draw in (b.curves.costs_figure, b.curves.deltas_figure, b.curves._figure):
        panel = draw(rows).axes[0]
        assert [text.get_text() for text in panel.get_legend().get_texts()] == [*rows]
        labelled = [line for line in panel.get_lines() if line.get_label() in rows]
        assert len({(line.get_color(), line.get_linestyle()) for line in labelled}) == 16


def test_the_time_to_a_loss_is_that_of_the_crossing_and_a_diverged_target_has_none(b):
    report = b.paper_claims_report
    row, curve = b.cells.Row(recipe="demo-ddp"), ((0.0, 0, 3.0), (10.0, 1, 2.0))
    rows = {"A": b.cells.Outcome(row, ({"val_loss": 2.0},), curves=(curve,)), "B": b.cells.Outcome(row, (), ("diverged",))}
    assert report.reach_time_s(rows["A"], 2.0 + report.CLOSE) == pytest.approx(9.8)
    shown = report.reach_table(rows, ["A", "B"], "A", 3)
    assert "| A † | 0:00:09.800 | 1.000 |" in shown, "a row of one seed says so"
    assert "| B † | never | - |" in shown
    assert report.reach_table(rows, ["A", "B"], "B", 3) == "B diverged: there is no loss to reach."


def test_missing_cells_and_rates_beyond_an_edge_are_counted(b):
    rows_of = b.paper_claims_rows
    plan, method = rows_of.MEDIUM, rows_of.LARGE
    groups = [b.ablations.Group(name="x", title="x", note="", rows=dict.fromkeys([*"ABC", rows_of.times_batch(4)]))]
    best = {rate: 1.0 + index for index, rate in enumerate(plan.rates)}
    tried = {
        b.paper_claims_choices.choice_label(method, rows_of.Choice(rate, plan.outers[0])): outcome(b, loss)
        for rate, loss in best.items()
    }
    study = study_of(b, {"A": outcome(b, 1.0, 1.0), "B": outcome(b, 1.0)}, plan, tried=tried)
    cells, rates = b.paper_claims_verdicts.missing_lines(study, [("Tables", groups, [0, 7])])
    assert cells == "Tables: 5 cells (2 of 4 with seed 0, 3 of 4 with seed 7): device time."
    assert rates.startswith("Rates beyond the edge: 1 cells (`batch`): device time. ")
    assert "1 rows of the tables with several seeds" in rates


def test_rows_run_in_the_order_of_their_tables(b):
    """The headline first, then the tables with one seed, then methods of other papers."""
    rows_of, plan = b.paper_claims_rows, b.paper_claims_rows.SMALL
    choices = {method: rows_of.Choice(plan.rate, plan.outers[0]) for method in rows_of.RECIPES}
    groups = [*rows_of.headline(plan, choices), *rows_of.one_seed(plan, choices), *rows_of.exchanges(plan, choices)]
    assert (rows_of.CHOICES, *(group.name for group in groups)) == rows_of.TABLES


def order_of(b, plan, **fields):
    return b.paper_claims.Order(**{"plan": plan, "seeds": (0, 1), "only": frozenset(), "limited": True, **fields})


def all_tried(b, plan):
    """The candidates of all methods, of which the second rate is best."""
    rows_of, choices_of = b.paper_claims_rows, b.paper_claims_choices
    return {
        choices_of.choice_label(method, rows_of.Choice(rate, outer)): outcome(b, 1.0 + (rate != plan.rate) + number / 10)
        for method in rows_of.METHODS
        for number, outer in enumerate(choices_of.outers_of(plan, method))
        for rate in plan.rates
    }


def test_cells_run_in_the_order_of_importance_or_long_ones_first(b):
    plan = b.paper_claims_rows.SMALL
    limited, free = (order_of(b, plan, limited=limited).wanted(all_tried(b, plan)) for limited in (True, False))
    assert {(each.label, each.seed) for each in limited} == {(each.label, each.seed) for each in free}
    parts = list(dict.fromkeys(each.title for each in limited if each.title not in ("outer rules", "inner rates")))
    assert parts == ["headline", "one seed", "exchanges"]
    beyond = [at for at, each in enumerate(limited) if each.label.startswith("SparseLoCo, rate")]
    assert limited[beyond[0] - 1].title == "one seed", "methods of other papers choose after the papers' rows"
    rows = [each for each in free if each.title in parts]
    lengths = [b.paper_claims._length(each.row) for each in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert all(each.title not in parts for each in free[: len(free) - len(rows)]), "rows follow from choices"


def test_a_table_with_one_seed_shows_every_recorded_one_and_starts_none_but_the_first(b):
    plan = b.paper_claims_rows.SMALL
    wanted = order_of(b, plan).wanted(all_tried(b, plan))
    alone = [each for each in wanted if each.title == "one seed"]
    assert {(each.seed, each.starts) for each in alone} == {(0, True), (1, False)}
    assert all(each.starts for each in wanted if each.title == "headline")


def test_on_a_gpu_cells_always_run_in_the_order_of_importance(b):
    plan = b.paper_claims_rows.MEDIUM
    orders = [
        [(each.label, each.seed) for each in order_of(b, plan, limited=limited).wanted(all_tried(b, plan))]
        for limited in (True, False)
    ]
    assert orders[0] == orders[1]
    assert len(orders[0]) > 100


def test_rows_start_once_the_rate_beyond_an_edge_was_tried(b):
    rows_of, plan = b.paper_claims_rows, b.paper_claims_rows.SMALL
    tried, at = all_tried(b, plan), rows_of.Choice(plan.rates[-1], plan.outers[0])
    tried[b.paper_claims_choices.choice_label(rows_of.DILOCO, at)] = outcome(b, 0.5)

    def starting(**fields):
        return {each.label for each in order_of(b, plan, **fields).wanted(tried) if each.starts}

    beyond = replace(at, rate=plan.further_rates[-1])
    label = b.paper_claims_choices.choice_label(rows_of.DILOCO, beyond)
    assert label in starting()
    assert not {rows_of.diloco(4, 50), rows_of.SYNC, "averaged moments"} & starting()
    assert {rows_of.ONE, rows_of.NAIVE} <= starting()
    assert rows_of.diloco(4, 50) in starting(waits=False), "a dry run lists it"
    assert rows_of.diloco(4, 50) in starting(only=frozenset({"diloco"})), "no candidate starts"
    tried[label] = outcome(b, 0.7)
    assert {rows_of.diloco(4, 50), rows_of.SYNC} <= starting()


def test_a_dry_run_lists_the_missing_cells_in_order_and_runs_none(b, tmp_path, capsys):
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=150_000), tmp_path / "text")
    command = ["--text", str(tmp_path / "text"), "--quick", "--quiet", "--seeds", "0", "--record", str(tmp_path / "record")]
    b.paper_claims.main([*command, "--dry-run"])
    *listed, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(listed)} cells are missing. Rows follow when their method has chosen")
    assert listed[0] == "outer rules: one worker, rate 0.02, outer 0.7/0.9, seed 100"
    assert not (tmp_path / "record" / "cells.jsonl").exists()
    b.paper_claims.main([*command, "--dry-run", "--only", "diloco"])
    assert capsys.readouterr().out.startswith("0 cells are missing.")


def published(b, name):
    return sorted((Path(b.paper_claims.__file__).parent / "records").glob(f"*_paper_claims{name}"))[-1]


@pytest.mark.parametrize("name", ["", "_medium"])
def test_keys_of_published_cells_are_those_of_their_settings_and_their_texts_digests(b, name):
    known = json.loads((published(b, name) / "text.json").read_text())["text"]
    found = cells(published(b, name))
    assert {identity for cell in found for identity in cell["texts"].values()} == {b.record.text_identity(known)}
    for cell in found[::10]:
        run = b.cells.Row(recipe=cell["recipe"], settings=tuple(cell["settings"])).run(cell["seed"])
        assert cell["key"] == b.cells.key_of(run, cell["texts"])


def between(text, begin, end):
    return text.partition(begin)[2].partition(end)[0]


def copied(b, name, folder):
    """A copy of a published record, without its tables."""
    record = folder / published(b, name).name
    record.mkdir()
    for file in ("cells.jsonl", "text.json"):
        shutil.copy(published(b, name) / file, record)
    return record


def at_06m(page):
    """The lines of the coverage page in this study's regime."""
    return [line for line in page.read_text().splitlines() if "| 0.6M/8k" in line]


@pytest.mark.parametrize(("name", "seeds"), [("_medium", []), ("", ["--seeds", "0"])])
def test_the_published_tables_are_those_of_the_record(b, tmp_path, monkeypatch, name, seeds):
    """With `--minutes 0` no cell starts, also with a GPU. The tables need neither the text, whatever its folder, nor a GPU."""
    root = Path(b.paper_claims.__file__).parents[1]
    monkeypatch.chdir(tmp_path)
    record, workload, pages = copied(b, name, tmp_path), name.strip("_") or "small", {}
    wanted = {"docs/evidence.md": [f"paper_claims_{workload}"]}
    if name:
        wanted = {
            "docs/evidence.md": [f"paper_claims_{workload}", "evidence_brief", "evidence_short"],
            "README.md": ["evidence_brief"],
        }
    for page, markers in wanted.items():
        pages[page] = tmp_path / Path(page).name
        pages[page].write_text("".join(f"<!-- {marker}:begin -->\n<!-- {marker}:end -->\n" for marker in markers))
    command = ["--text", "any/folder", "--workload", workload, "--minutes", "0", "--quiet", "--record", str(record), *seeds]
    readme = []
    if name:
        coverage = tmp_path / "coverage.md"
        verdicts = re.compile(r"\*[^*]*\*: [a-z, ]*\([-+][^)]*\)")
        page = (root / "docs/coverage.md").read_text()
        coverage.write_text(verdicts.sub(lambda found: found[0].partition("*: ")[0] + "*: held (+1.0)", page))
        readme = ["--readme", str(pages["README.md"]), "--coverage", str(coverage)]
    b.paper_claims.main([*command, "--docs", str(pages["docs/evidence.md"]), *readme])
    if name:
        assert at_06m(coverage) == at_06m(root / "docs/coverage.md")
    for page, marker in ((page, marker) for page, markers in wanted.items() for marker in markers):
        texts = (pages[page].read_text(), (root / page).read_text())
        made, shown = (between(text, f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->").splitlines() for text in texts)
        linked = ("[The record]", "![")  # with other paths
        assert [line for line in made if not line.startswith(linked)] == [line for line in shown if not line.startswith(linked)]
        assert len(made) > (8 if "paper_claims" in marker else 4)
    tables = (record / "README.md").read_text().partition("## How to reproduce")[0]
    assert tables == (published(b, name) / "README.md").read_text().partition("## How to reproduce")[0]


def test_a_text_in_another_folder_measures_no_published_cell_again(b, tmp_path, monkeypatch, capsys):
    """No cell of the first seed of these tables is missing; with another text all are."""
    monkeypatch.chdir(tmp_path)
    record = copied(b, "_medium", tmp_path)
    command = ["--text", "any/folder", "--workload", "medium", "--record", str(record), "--seeds", "0", "--dry-run", "--quiet"]
    only = [part for name in ("diloco", "async") for part in ("--only", name)]
    b.paper_claims.main([*command, *only])
    assert capsys.readouterr().out.startswith("0 cells are missing.")
    text = json.loads((record / "text.json").read_text())
    text["text"]["token_digests"]["train"] = "0" * 32
    (record / "text.json").write_text(json.dumps(text))
    b.paper_claims.main([*command, "--only", "choices"])
    assert "outer rules: DiLoCo, rate 0.004, outer 0.7/0.9, seed 100" in capsys.readouterr().out


def test_a_new_record_takes_the_choices_over_and_no_row_of_the_tables(b, tmp_path, capsys):
    old, new = copied(b, "_medium", tmp_path), tmp_path / "new"
    new.mkdir()
    shutil.copy(old / "text.json", new)
    command = ["--text", "any/folder", "--workload", "medium", "--record", str(new), "--dry-run", "--quiet"]
    b.paper_claims.main([*command, "--choices", str(old)])
    *listed, _ = capsys.readouterr().out.splitlines()
    assert {cell["seed"] for cell in cells(new)} == {b.paper_claims.CHOICE_SEED}
    assert {cell["measured_in"] for cell in cells(new)} == {old.name}
    assert len(cells(new)) == sum(cell["seed"] == b.paper_claims.CHOICE_SEED for cell in cells(old))
    tables = [line.partition(": ")[0] for line in listed]
    assert "inner rates" not in tables
    assert tables[0] == "further rates"
    assert {"headline", "one seed", "exchanges"} <= {*tables}
    b.paper_claims.main([*command, "--choices", str(old)])
    assert [*listed] == capsys.readouterr().out.splitlines()[:-1], "choices are taken over once"
    text = json.loads((old / "text.json").read_text())
    text["text"]["token_digests"]["train"] = "0" * 32
    (old / "text.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="it read another text than"):
        b.paper_claims.main([*command, "--choices", str(old)])


def test_a_record_with_rows_is_not_continued_without_the_weights_that_they_began_with(b, tmp_path):
    record = b.record.Record(tmp_path, ["a command"])
    record.add("choice", {"seed": b.paper_claims.CHOICE_SEED})
    b.paper_claims.check_starts(record)
    record.add("row", {"seed": 0})
    with pytest.raises(ConfigError, match=r"its folder warm is missing.*--choices"):
        b.paper_claims.check_starts(record)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "start.safetensors").write_bytes(b"0" * 2000)
    b.paper_claims.check_starts(record)
    text = b.paper_claims.left_text(["headline: A, seed 0", "one seed: B, seed 0", "headline: A, seed 1"], record)
    assert text.startswith("3 cells are missing: headline 2, one seed 1. ")
    assert text.endswith("a copy of its folder warm (2.00 kB).")
    assert b.paper_claims.left_text([], record) == "No cell is missing."


def test_a_finished_command_says_which_cells_are_missing(b, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = copied(b, "_medium", tmp_path)
    (record / "cells.jsonl").write_text(
        "".join((published(b, "_medium") / "cells.jsonl").read_text().splitlines(keepends=True)[:-1])
    )
    command = ["--text", "any/folder", "--workload", "medium", "--record", str(record), "--quiet"]
    b.paper_claims.main([*command, "--dry-run"])
    missing = len(capsys.readouterr().out.splitlines()) - 1
    b.paper_claims.main([*command, "--minutes", "0"])
    assert f"\n{missing} cells are missing: further rates " in capsys.readouterr().out


def test_baselines_of_acco_also_run_over_a_slow_link_and_with_a_slow_worker(b):
    rows_of, report = b.paper_claims_rows, b.paper_claims_report
    plan = rows_of.MEDIUM
    choices = {method: rows_of.Choice(plan.rate, plan.outers[0]) for method in rows_of.RECIPES}
    slow = next(group for group in rows_of.one_seed(plan, choices) if group.name == "slow")
    runs = {label: row.run(0) for label, row in slow.rows.items()}
    free = runs[rows_of.on_slow_link(rows_of.FREE_DPU)].algorithm
    assert (free.batch, free.wire, free.warmup) == ("free", "bf16", plan.dpu_warmup)
    assert runs[rows_of.on_slow_link(rows_of.ZERO)].algorithm.buckets == plan.buckets
    assert runs[rows_of.on_slow_link(rows_of.ZERO)].cluster.link.bandwidth_mbit_per_s == plan.slow_mbit_per_s
    assert runs[rows_of.with_slow_worker(rows_of.ACCO)].cluster.step_time_s == (1.0, 1.0, 1.0, 4.0)
    curve = ((0.0, 0, 3.0), (10.0, 1, 2.0))
    found = {label: b.cells.Outcome(slow.rows[label], ({"val_loss": 2.0},), curves=(curve,)) for label in slow.rows}
    tables = "\n".join(report.reach_tables(plan, found, 3))
    for label in (rows_of.on_slow_link(rows_of.FREE_WP), rows_of.with_slow_worker(rows_of.ACCO)):
        assert f"| {label} † | 0:00:09.800 | 1.000 |" in tables


def test_the_deltas_figure_has_both_norms_and_all_seeds(b):
    """Of a round: its number, the mean norm, the norm of the mean, the mean cosine."""
    seeds = tuple(((0, 4.0 + seed, 2.0 + seed, 0.1 + seed), (1, 6.0 + seed, 3.0, None)) for seed in (0.0, 1.0))
    row = b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), ({}, {}), deltas=seeds)
    figure = b.curves.deltas_figure({"row": row})
    cosine, mean, of_mean = (panel.get_lines()[0].get_ydata().tolist() for panel in figure.axes)
    assert (cosine[0], mean, of_mean) == (pytest.approx(0.6), [4.5, 6.5], [2.5, 3.0])
    assert cosine[1] != cosine[1], "there is no cosine with a delta of zero"


def test_coverage_has_the_differences_of_a_table_with_one_seed_and_counts_its_missing_rows(b, tmp_path):
    rows_of, pages = b.paper_claims_rows, b.paper_claims_pages
    plan = rows_of.MEDIUM
    choices = {method: rows_of.Choice(plan.rate, plan.outers[0]) for method in rows_of.RECIPES}
    pruned = next(group for group in rows_of.one_seed(plan, choices) if group.name == "pruned")
    page = tmp_path / "coverage.md"
    page.write_text("| <!-- pruned:begin -->x<!-- pruned:end --> | and <!-- pruned:begin --><!-- pruned:end --> |")
    pages.write_coverage(page, study_of(b, {}, plan, choices=choices), [pruned])
    assert page.read_text().count(pages.NOT_RUN) == 2
    rows = {"50% pruned": outcome(b, 2.5), rows_of.diloco(4, 50): outcome(b, 2.25, 9.0)}
    pages.write_coverage(page, study_of(b, rows, plan, choices=choices), [pruned])
    shown = "to `DiLoCo, k=4, H=50`: `50% pruned` † +0.2500. No verdict. 2 rows not run: device time"
    assert page.read_text().count(shown) == 2
