"""The demo over several seeds, and the baseline at other rates."""


def test_demo_seeds_leaves_a_record_and_goes_on_from_it(b, small, lines_of, tmp_path, capsys):
    arguments = ["--seeds", "0", "1", "--record", str(tmp_path), "--quiet", *(part for each in small for part in ("--set", each))]
    b.demo_seeds.main(arguments)
    readme, cells = (tmp_path / "README.md").read_text(), lines_of(tmp_path)
    assert len(cells) == 2 * (2 + 2)  # two recipes, and two rates besides the recipe's own
    assert "demo-diloco: " in readme
    assert "1/20" in readme
    assert "(the recipe's)" in readme
    assert "verdict" in capsys.readouterr().out
    b.demo_seeds.main(arguments)
    assert lines_of(tmp_path) == cells
    assert (tmp_path / "README.md").read_text() == readme


def test_another_rate_changes_the_baseline_and_not_its_warm_start(b):
    own, other = (b.demo_seeds.rate_row(rate, ()).run(0) for rate in (b.demo_seeds.own_rate(()), 0.5))
    assert other.optimizer == own.optimizer
    assert other.algorithm.optimizer.lr.lr == 0.5
    assert own.algorithm.optimizer == own.optimizer
