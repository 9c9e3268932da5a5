"""ACCO: formulas over links, the demo with overlapped exchanges, and unequal islands."""

import json

import pytest

from atoll.runs.cluster import all_gather_cost, reduce_scatter_cost


def test_update_times_equal_the_formulas_and_acco_sends_twice_the_bytes_of_zero1(b):
    links = b.acco_links
    for ratio in (0.25, 1.0, 3.0):
        cell = links.ratio_cell(ratio)
        for name, (_, formula) in links.FORMULAS.items():
            assert cell[name]["update_s"] == pytest.approx(formula(links.C_S, cell["m_s"]), abs=1e-9), name
        assert cell["ACCO"]["sent_bytes"] == [2 * sent for sent in cell["ZeRO-1"]["sent_bytes"]]


def test_a_scaled_down_model_and_link_have_the_exchange_time_of_the_large_ones(b):
    links = b.acco_links
    setting = links.SETTINGS[1]
    whole = [cost(int(setting.params), 2, [setting.far] * 4).seconds for cost in (reduce_scatter_cost, all_gather_cost)]
    assert links.islands_cell(setting, 4)["m_s"] == pytest.approx(sum(whole), rel=1e-6)


def test_acco_demo_writes_record_and_page(b, small_settings, lines_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- acco_demo:begin -->\n<!-- acco_demo:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    arguments += ["--warmup", "2", *small_settings("train.steps=4", "keep.evaluate_every=4")]
    b.acco_demo.main(arguments)
    assert "\n### Rows\n" in page.read_text()
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 7
    assert "All rows commit 512 tokens in 4 updates." in out
    assert all("islands" in json.loads(cell) for cell in cells)


def test_variants_of_dpu_have_the_papers_warm_up_length_and_batch(b, tmp_path, monkeypatch, capsys):
    demo, plan = b.acco_demo, b.acco_demo.DPU_PLAN
    rows = {label: row.run(0) for label, row in demo.variant_rows(plan).items()}
    assert rows[demo.DPU_500].algorithm.warmup == 500
    tokens = {label: run.train.steps * run.train.batch_size for label, run in rows.items()}
    assert tokens[demo.DPU_TWICE] == 2 * tokens[demo.DDP]
    assert tokens[demo.DPU_HALF] == tokens[demo.DDP]
    small = b.workload.Workload(
        steps=4,
        warmup=2,
        warm_start=2,
        batch_size=2,
        model="layers=1,width=8,heads=1,head_size=8",
        data="seq_len=16,limit_bytes=60000,eval_batches=2",
    )
    monkeypatch.setattr(demo, "DPU_PLAN", small)
    demo.main(["--variants", "--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--quiet"])
    assert capsys.readouterr().out.count("**one seed, no verdict**") == len(demo.variant_claims())


def test_acco_unequal_measures_idle_time_per_island(b, small_settings, tmp_path, capsys):
    arguments = ["--seeds", "0", "--steps", "24", "--rates", "0.01", "--processes", "1", "--record", str(tmp_path), "--quiet"]
    b.acco_unequal.main(arguments + small_settings())
    out = capsys.readouterr().out
    assert "so DDP accumulates 3:" in out
    idle = {row.split(" | ")[0] + row.split(" | ")[1]: row.split(" | ")[3] for row in out.splitlines() if "s per batch" in row}
    free = "| ACCO, free"
    assert idle[f"{free}0 (1 s per batch)"] == idle[f"{free}3 (4 s per batch)"] == "100 %"
    assert idle["| DDP, accumulating0 (1 s per batch)"] in {"24 %", "25 %"}


def test_acco_and_ddp_have_the_same_learning_rate_per_sample(b):
    plan = b.acco_unequal.Plan(steps=1800, base=())
    acco, ddp = plan.acco(0.05, warm=True).run(0), plan.ddp(0.05, 3).run(0)
    for rule, batches in ((acco.algorithm.optimizer, 1), (ddp.algorithm.optimizer, 3)):
        assert (rule.lr.steps * batches, rule.lr.warmup * batches) == (1800, 120)
    assert (acco.train.warm_start_steps, acco.train.warm_start_lr) == (ddp.train.warm_start_steps, ddp.train.warm_start_lr)
    assert acco.optimizer.lr.warmup == ddp.optimizer.lr.warmup  # the warm start's
