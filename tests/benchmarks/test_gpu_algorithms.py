"""The benchmark of all algorithms on one GPU: a smoke test on a CPU, its turns and its verdicts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

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


def test_the_command_for_all_speeds_measures_every_algorithm_on_the_text_and_then_models(b, tmp_path, monkeypatch, capsys):
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=90_000), tmp_path / "text")
    monkeypatch.setattr(b.record, "RECORDS", tmp_path)
    command = [*QUICK, "--text", str(tmp_path / "text")]
    b.gpu.main([*command, "--dry-run"])
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == "DiLoCo"
    assert sum(line.endswith(" cells are missing.") for line in listed) == 2, "both parts are listed"
    b.gpu.main([*command, "--only", "algorithms", "--minutes", "0", "--algorithms-record", str(tmp_path / "own")])
    assert "Not measured yet: DiLoCo, ACCO" in capsys.readouterr().out
    assert {*json.loads((tmp_path / "own" / "text.json").read_text())["text"]["token_digests"]} == {"train", "validation"}
    with pytest.raises(ConfigError, match="name the text"):
        b.gpu.main([*QUICK, "--only", "algorithms"])


def test_no_row_starts_after_the_time_limit(b, tmp_path, capsys):
    b.gpu_algorithms.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    assert not (tmp_path / "cells.jsonl").exists()
    assert (
        "Not measured yet: DiLoCo, ACCO, asynchronous, Delayed Nesterov and DyLU, DDP, DPU, WP, ZeRO-1" in capsys.readouterr().out
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_only_quick_is_allowed(b, tmp_path):
    with pytest.raises(ConfigError, match=r"--device cpu: .* --quick"):
        b.gpu_algorithms.main(["--record", str(tmp_path)])


def published(folder):
    """A copy of the published record without its page."""
    record = sorted((Path(__file__).parents[2] / "benchmarks" / "records").glob("*_gpu_algorithms"))[-1]
    for file in ("cells.jsonl", "text.json", "source.txt"):
        shutil.copy(record / file, folder)
    return (record / "README.md").read_text()


def test_the_published_tables_are_those_of_the_record_and_need_no_gpu(b, tmp_path):
    expected = published(tmp_path)
    b.gpu_algorithms.main(["--record", str(tmp_path), "--text", "any/folder", "--device", "cpu", "--quiet"])
    tables, made = (text.partition("## How to reproduce")[0] for text in (expected, (tmp_path / "README.md").read_text()))
    assert made == tables
    assert "On NVIDIA H200, " in made


def test_a_record_of_another_device_is_not_continued(b, tmp_path):
    published(tmp_path)
    with pytest.raises(ConfigError, match=r"was measured on NVIDIA H200, and this device is a CPU"):
        b.gpu_algorithms.main([*QUICK, "--record", str(tmp_path)])
    cell = {"key": "another row", "device": "NVIDIA A100"}
    (tmp_path / "cells.jsonl").write_text(json.dumps(cell) + "\n")
    with pytest.raises(ConfigError, match="was measured on NVIDIA A100"):
        b.gpu_algorithms.main([*QUICK, "--record", str(tmp_path)])


def test_all_rows_are_judged_by_their_medians_against_the_fastest_bare_loop(b):
    row = b.gpu_algorithms.Figures
    figures = {
        "DiLoCo": row({"step_s": [0.1, 0.104, 0.9], "bare_step_s": [0.1, 0.1, 0.1], "arranged": ""}, tokens=100),
        "ACCO": row({"step_s": [0.11, 0.11, 0.1], "bare_step_s": [0.12, 0.12, 0.12], "arranged": ""}, tokens=100),
    }
    rows = SimpleNamespace(tokens="text", sizes=b.gpu_algorithms.QUICK)
    outcome, _ = b.gpu_algorithms.sections(rows, figures, "a device", [])
    held, failed = (line for line in outcome.splitlines() if line.startswith("- "))
    assert held.startswith("- **holds here**: DiLoCo trains 0.962 of")
    assert failed.startswith("- **does not hold here**: ACCO trains 0.909 of")
    assert "1.091 (1.091 to 1.200) of those of the bare loop beside it" in failed


def test_the_bare_loop_is_warm_once_two_turns_agree(b):
    turns = iter([1.0, 0.5, 0.4, 0.396, 0.1])
    bare = SimpleNamespace(turn_s=lambda steps: next(turns))
    assert b.gpu_algorithms._warm(bare, b.gpu_algorithms.QUICK) is bare
    assert list(turns) == [0.1]
