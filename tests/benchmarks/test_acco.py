"""ACCO: formulas over links, the demo with hidden exchanges, and unequal islands."""

import json

import pytest

from atoll.runs.cluster import all_gather_cost, reduce_scatter_cost


def test_the_time_of_an_update_is_the_formulas_and_acco_sends_twice_what_zero1_does(b):
    links = b.acco_links
    for ratio in (0.25, 1.0, 3.0):
        cell = links.swept(ratio)
        for name, (_, formula) in links.FORMULAS.items():
            assert cell[name]["update_s"] == pytest.approx(formula(links.C_S, cell["m_s"]), abs=1e-9), name
        assert cell["ACCO"]["sent_bytes"] == [2 * sent for sent in cell["ZeRO-1"]["sent_bytes"]]


def test_a_small_model_on_a_slow_line_exchanges_as_a_large_one_on_a_fast_line(b):
    links = b.acco_links
    setting = links.SETTINGS[1]
    lines = [setting.line] * 4
    whole = [cost(int(setting.params), 2, lines).seconds for cost in (reduce_scatter_cost, all_gather_cost)]
    assert links.widened(setting, 4)["m_s"] == pytest.approx(sum(whole), rel=1e-6)


def test_the_demo_with_hidden_exchanges_leaves_a_record_and_goes_on_from_it(b, small_settings, lines_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- acco_demo:begin -->\n<!-- acco_demo:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    arguments += ["--warmup", "2", *small_settings("train.steps=4", "keep.evaluate_every=4")]
    b.acco_demo.main(arguments)
    assert "\n### Rows\n" in page.read_text()
    assert "](./plot.png)" in page.read_text()
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 7
    assert "All rows commit 512 tokens in 4 updates." in out
    assert all("islands" in json.loads(cell) for cell in cells)
    b.acco_demo.main(arguments)
    assert lines_of(tmp_path) == cells


def test_unequal_islands_leave_a_record_that_says_who_idles(b, small_settings, tmp_path, capsys):
    arguments = ["--seeds", "0", "--steps", "24", "--rates", "0.01", "--processes", "1", "--record", str(tmp_path), "--quiet"]
    b.acco_unequal.main(arguments + small_settings())
    out = capsys.readouterr().out
    assert "so DDP accumulates 3:" in out
    assert "**holds here**: samples per update agree within 10 %" in out
    idle = {row.split(" | ")[0] + row.split(" | ")[1]: row.split(" | ")[3] for row in out.splitlines() if "s a batch" in row}
    free = "| ACCO, free"
    assert idle[f"{free}0 (1 s a batch)"] == idle[f"{free}3 (4 s a batch)"] == "100 %"
    assert idle["| DDP, accumulating0 (1 s a batch)"] in {"24 %", "25 %"}


def test_learning_rates_go_by_samples_for_both(b):
    plan = b.acco_unequal.Plan(steps=1800, base=())
    acco, ddp = plan.acco(0.05, warm=True).run(0), plan.ddp(0.05, 3).run(0)
    for rule, batches in ((acco.algorithm.optimizer, 1), (ddp.algorithm.optimizer, 3)):
        assert (rule.lr.steps * batches, rule.lr.warmup * batches) == (1800, 120)
    assert (acco.train.warm_start_steps, acco.train.warm_start_lr) == (ddp.train.warm_start_steps, ddp.train.warm_start_lr)
    assert acco.optimizer.lr.warmup == ddp.optimizer.lr.warmup  # which the warm start takes over
