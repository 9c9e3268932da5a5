"""Memory of the algorithms: in miniature, and by formula."""

import pytest

from atoll.models.gpt import GPT


def test_memory_is_measured_in_miniature_and_not_twice(b, lines_of, tmp_path, capsys):
    for _ in range(2):
        b.memory.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 16  # six algorithms, two of them also where rounds may fail, and two sizes
    assert "ACCO and ZeRO-1 are at most" in capsys.readouterr().out
    assert "estimate: " in (tmp_path / "README.md").read_text()


def test_where_rounds_may_fail_the_slices_before_them_stay_and_with_acco_the_half_that_waited(b):
    ways = {way.name: way for way in b.memory.ways()}
    workload = b.memory.DecoderWorkload.of(GPT(layers=2, width=128, heads=2, head_size=64), vocab_size=2048)
    for name, more in (("ACCO", 12 / 4 + 2), ("ZeRO-1", 12 / 4)):
        plain, kept = (
            b.memory.measure_peak_memory(way.algorithm, workload, size=4, rounds=2, may_fail=way.may_fail)
            for way in (ways[name], ways[f"{name}, may fail"])
        )
        assert kept.per_param - plain.per_param == pytest.approx(more, abs=0.1), name


def test_a_formula_comes_to_what_it_says(b):
    acco, ddp = (next(way for way in b.memory.ways() if way.name == name) for name in ("ACCO", "DDP"))
    assert [acco.per_param(2), acco.per_param(4), ddp.per_param(4)] == [12, 9, 16]
