"""The demo over seeds, and the baseline at other rates."""


def test_demo_seeds_writes_a_record_and_repeats_no_cell(b, small_settings, lines_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- demo_table:begin -->\n<!-- demo_table:end -->\n")
    arguments = ["--seeds", "0", "--processes", "1", "--record", str(tmp_path), "--docs", str(page), "--quiet", *small_settings()]
    b.demo_seeds.main(arguments)
    readme, cells = (tmp_path / "README.md").read_text(), lines_of(tmp_path)
    assert len(cells) == 2 + 1 + 2  # two recipes, one island, and two more rates
    assert "demo-diloco: " in capsys.readouterr().out
    b.demo_seeds.main(arguments)
    assert lines_of(tmp_path) == cells
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[0].split(":")[0] for row in rows] == ["| one island alone, 1/4 of the tokens", "| DDP", "| DiLoCo"]
    assert (tmp_path / "README.md").read_text() == readme


def test_another_rate_changes_the_baseline_but_not_its_warm_start(b):
    own, other = (b.demo_seeds.rate_row(rate, ()).run(0) for rate in (b.demo_seeds.own_rate(()), 0.5))
    assert other.optimizer == own.optimizer
    assert other.algorithm.optimizer.lr.lr == 0.5
    assert own.algorithm.optimizer == own.optimizer
