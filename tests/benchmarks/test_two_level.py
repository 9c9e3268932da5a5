"""Two levels, compared with each alone."""

import json


def test_two_level_records_all_rows_at_equal_tokens(b, small_settings, lines_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- two_level:begin -->\n<!-- two_level:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    b.two_level.main(arguments + small_settings("algorithm.inner_steps=10"))
    assert "\n### Rows\n" in page.read_text()
    out = capsys.readouterr().out
    assert len(lines_of(tmp_path)) == 5
    assert "All rows train on" in out
    summaries = [json.loads(line)["summary"] for line in lines_of(tmp_path)]
    assert [summary["islands"] for summary in summaries] == [4, 4, 8, 8, 4]
    assert [summary.get("inside_dropped_tokens") for summary in summaries] == [8 * 16, 0, None, None, None]
    assert "128 tokens (2.5 % of those it trains on)" in out


def test_the_ring_between_islands_is_zero1_on_islands_with_the_speed_of_their_devices(b):
    """Links inside cost nothing: the demo's islands, twice as fast, with its batch and its warm start."""
    run = b.two_level.all_rows(())[b.two_level.BETWEEN].run(0)
    zero1 = b.cells.Row(recipe="demo-zero1").run(0)
    assert run.train == zero1.train
    assert (run.cluster.islands, run.cluster.devices_per_island, run.cluster.link) == (4, 1, zero1.cluster.link)
    both = [[cluster.step_time(island, 0) for island in range(4)] for cluster in (run.cluster, zero1.cluster)]
    assert both[0] == [time_s / 2 for time_s in both[1]]
