"""The memory of the algorithms: a smoke test, and the formulas."""

import pytest

from atoll.models.gpt import GPT


def test_memory_measures_every_algorithm(b, lines_of, tmp_path, capsys):
    b.memory.main(["--quick", "--record", str(tmp_path), "--quiet"])
    assert len(lines_of(tmp_path)) == 16  # six algorithms, two of them also with rounds that may fail, and two sizes
    assert "ACCO and ZeRO-1 are at most" in capsys.readouterr().out
    assert "estimate: " in (tmp_path / "README.md").read_text()


def test_if_rounds_may_fail_the_old_slices_stay_and_with_acco_the_half_batch(b):
    subjects = {subject.name: subject for subject in b.memory.subjects()}
    workload = b.memory.DecoderWorkload.of(GPT(layers=2, width=128, heads=2, head_size=64), vocab_size=2048)
    for name, more in (("ACCO", 12 / 4 + 2), ("ZeRO-1", 12 / 4)):
        plain, kept = (
            b.memory.measure_peak_memory(subject.algorithm, workload, size=4, rounds=2, may_fail=subject.may_fail)
            for subject in (subjects[name], subjects[f"{name}, may fail"])
        )
        assert kept.per_param - plain.per_param == pytest.approx(more, abs=0.1), name


def test_values_of_the_formulas(b):
    acco, ddp = (next(subject for subject in b.memory.subjects() if subject.name == name) for name in ("ACCO", "DDP"))
    assert [acco.per_param(2), acco.per_param(4), ddp.per_param(4)] == [12, 9, 16]
