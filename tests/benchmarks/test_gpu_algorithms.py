"""The benchmark of all algorithms on one GPU: a smoke test on a CPU, its turns and its verdicts."""

import json

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.data.prepare import Preparation, prepare
from atoll.replica.local_replica import torch_threads

QUICK = ["--quick", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def cells_in(record):
    return [json.loads(line) for line in (record / "cells.jsonl").read_text().splitlines()]


def test_every_algorithm_is_measured_on_prepared_text_with_a_verdict(b, tmp_path, capsys):
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=90_000), tmp_path / "text")
    command = [*QUICK, "--record", str(tmp_path / "record"), "--text", str(tmp_path / "text")]
    b.gpu_algorithms.main(command)
    cells, printed = cells_in(tmp_path / "record"), capsys.readouterr().out
    names = [*b.gpu_algorithms.ALGORITHMS, b.gpu_algorithms.DEFAULTS, b.gpu_algorithms.STRICT]
    assert [cell["key"].partition(" |")[0] for cell in cells] == names
    for cell in cells:
        assert len(cell["step_s"]) == len(cell["bare_step_s"]) == 2
        assert "prepared text" in cell["key"]
    for name in b.gpu_algorithms.ALGORITHMS:
        assert f": {name} trains " in printed
    assert (tmp_path / "record" / "text.json").exists()
    assert (cells[-2]["precision"], cells[-1]["precision"]) == ("fp32", "fp32-strict")
    b.gpu_algorithms.main(command)
    assert cells_in(tmp_path / "record") == cells, "a finished record is not measured again"


def test_no_row_starts_after_the_time_limit(b, tmp_path, capsys):
    b.gpu_algorithms.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    assert not (tmp_path / "cells.jsonl").exists()
    assert "Not measured yet: DDP, DiLoCo, ACCO, DPU, WP, ZeRO-1, asynchronous" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_only_quick_is_allowed(b, tmp_path):
    with pytest.raises(ConfigError, match=r"--device cpu: .* --quick"):
        b.gpu_algorithms.main(["--record", str(tmp_path)])


@pytest.mark.parametrize(
    ("steps_s", "verdict"),
    [([0.1, 0.104], "**holds here**"), ([0.1, 0.11], "**within the spread**"), ([0.11, 0.12], "**does not hold here**")],
)
def test_a_row_holds_if_every_turn_has_95_percent_of_the_bare_loops_speed(b, steps_s, verdict):
    figures = b.gpu_algorithms.Figures({"step_s": steps_s, "bare_step_s": [0.1, 0.1]}, tokens=100)
    assert figures.verdict == verdict
    assert figures.shares == pytest.approx([0.1 / step_s for step_s in steps_s])
