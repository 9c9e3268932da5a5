"""The ablations of both papers: rows, comparisons, and a smoke test of each command."""

from collections import Counter

import pytest

# --------------------------------------------------------------------------------------------------------- diloco_ablations


def test_diloco_ablations_write_record_plot_and_page(b, lines_of, tmp_path, capsys):
    page, record = tmp_path / "page.md", tmp_path / "record"
    page.write_text("<!-- ablations:begin -->\n<!-- ablations:end -->\n")
    options = ["--quick", "--only", "H", "--seeds", "0", "1", "--quiet"]
    b.diloco_ablations.main([*options, "--record", str(record), "--docs", str(page)])
    text = page.read_text()
    assert "| H=4 | `algorithm.inner_steps=4` |" in text
    assert text.count("### ") == 2  # one ablation and the claims
    assert "[H=1] - [H=4] = " in text
    assert (record / "plot.png").stat().st_size > 1000
    assert text.splitlines()[4] in (record / "README.md").read_text()
    assert len(lines_of(record)) == 2 * 3
    assert "atoll run demo-diloco" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_every_row_resolves_to_a_run(b, name):
    study = getattr(b, name).STUDY
    for plan in (study.plan, study.quick):
        for label, row in study.all_rows(plan, study.groups(plan)).items():
            assert row.run(0).recipe in ("demo-diloco", "demo-ddp", "demo-async", "toy-sync", "toy-async"), label


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_a_label_is_one_row_and_claims_name_existing_rows(b, name):
    study = getattr(b, name).STUDY
    plan = study.plan
    named = {(label, row) for group in study.groups(plan) for label, row in group.rows.items()} | set(study.standing(plan).items())
    assert max(Counter(label for label, _ in named).values()) == 1
    labels = {label for label, _ in named}
    for claim in study.claims(plan):
        assert {label for _, label in claim.terms} <= labels, claim.text


@pytest.mark.parametrize("name", ["diloco_ablations", "async_ablations"])
def test_a_single_ablation_includes_the_rows_it_is_compared_with(b, name):
    study = getattr(b, name).STUDY
    for group in study.groups(study.plan):
        there = set(study.all_rows(study.plan, [group]))
        assert set(group.against) | set(group.against.values()) | set(group.timed) | set(group.timed.values()) <= there, group.name


@pytest.mark.parametrize("study", ["diloco_rows", "evidence_diloco"])
def test_doubling_and_halving_and_both_ramps_have_equal_island_rounds(b, study):
    module = getattr(b, study)
    pools = next(group.rows for group in module.groups(module.Plan()) if group.name == "pool")
    counts = {}
    for label, row in pools.items():
        run = row.run(0)
        rounds = run.train.steps // run.algorithm.steps_per_round
        counts[label] = sum(len(run.cluster.present(number, rounds)) for number in range(rounds))
    assert counts["pool: doubling"] == counts["pool: halving"]
    assert counts["pool: ramp up"] == counts["pool: ramp down"]


# ---------------------------------------------------------------------------------------------------------- async_ablations


def test_async_ablations_write_record_plot_and_page(b, lines_of, tmp_path, capsys):
    page, record = tmp_path / "page.md", tmp_path / "record"
    page.write_text("<!-- ablations:begin -->\n<!-- ablations:end -->\n")
    options = ["--quick", "--only", "level", "--seeds", "0", "1", "--quiet"]
    b.async_ablations.main([*options, "--record", str(record), "--docs", str(page)])
    assert len(lines_of(record)) == 2 * (2 * 3 + 2)  # levels by methods, the batch, and one worker
    text = page.read_text()
    assert text.count("### ") == 2  # one ablation and the claims
    assert "[very, naive] - [very, sync] = " in text
    assert (record / "plot.png").stat().st_size > 1000
    assert "atoll run demo-async" in capsys.readouterr().out


def test_equal_workers_and_an_infinite_grace_window_equal_synchronous_training(b, tmp_path):
    rows = b.async_rows
    plan = rows.QUICK
    named = {label: row for group in rows.groups(plan) for label, row in group.rows.items()}
    labels = ["none, sync", "none, DN+DyLU", "buffer, grace inf"]
    found = b.cells.run_rows({label: named[label] for label in labels}, [0], b.record.Record(tmp_path), "", quiet=True)
    losses = [found[label].loss.mean for label in labels]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_rows_with_equal_workers_have_equal_local_updates(b):
    plan = b.async_rows.Plan()
    for group in b.async_rows.groups(plan):
        for label, row in group.rows.items():
            if group.name == "toy" or label == b.async_rows.ONE:
                continue
            run = row.run(0)
            batches = run.train.steps * run.cluster.islands * getattr(run.algorithm, "accumulation", 1)
            workers = int(label.split(",")[0].removeprefix("k=")) if label.startswith("k=") else plan.islands
            assert batches == plan.steps * workers, label
