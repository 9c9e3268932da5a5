"""`atoll runs` says of each run what it is and how far it is, and reads no whole log for it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import pytest
import torch

from atoll import islands, recipes
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.overrides import override
from atoll.engines import run_lifecycle
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import candidates
from tests.samples import SMALL


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("listed")
    run = override(recipes.demo_diloco(), [*SMALL, "train.steps=20", "train.warm_start_steps=0"], candidates)
    run_lifecycle.run(run, out=root / "some" / "done", command=["test"])
    shutil.copytree(root / "some" / "done", root / "stopped")
    for name in ("final.safetensors", "digests.json"):
        (root / "stopped" / name).unlink()
    RunFolder.create(root / "begun", run, ["test"])
    shutil.copyfile(root / "stopped" / "engine.json", root / "begun" / "engine.json")
    (root / "older").mkdir()
    (root / "older" / "run.json").write_text('{"format": 999}')
    (root / ".unfinished").mkdir()
    (root / ".unfinished" / "run.json").write_text("{}")
    return root


def listed(atoll, root):
    _, out, _ = atoll("runs", root, "--json")
    return {run["folder"].removeprefix(f"{root}/"): run for run in json.loads(out)}


def test_every_run_is_listed_with_its_state_step_and_loss(atoll, root):
    found = listed(atoll, root)
    assert {name: run["state"] for name, run in found.items()} == {
        "some/done": "finished",
        "stopped": "stopped",
        "begun": "stopped",
        "older": "unreadable",
    }
    done, begun = found["some/done"], found["begun"]
    summary = json.loads((root / "some" / "done" / "summary.json").read_text())
    assert (done["recipe"], done["engine"], done["step"], done["steps"]) == ("demo-diloco", "simulator", 20, 20)
    assert done["val_loss"] == summary["val_loss"]
    assert (begun["step"], begun["val_loss"]) == (0, None)
    assert (root / "begun" / "source.txt").read_text().startswith(f"started: {begun['started'][:16]}")


def test_a_run_whose_folder_a_process_holds_is_running(atoll, root):
    before = (root / "begun" / "lock").read_bytes()
    with RunFolder(root / "begun").lock():
        held = (root / "begun" / "lock").read_bytes()
        assert listed(atoll, root)["begun"]["state"] == "running"
        assert (root / "begun" / "lock").read_bytes() == held != before


def test_the_table_and_an_empty_folder(atoll, root, tmp_path):
    code, out, _ = atoll("runs", root)
    assert code == 0
    assert any("some/done" in line and "20 of 20" in line and "finished" in line for line in out.splitlines())
    assert "there is no run in" in atoll("runs", tmp_path)[1]
    code, _, err = atoll("runs", tmp_path / "nowhere")
    assert code == 2
    assert "is not a folder" in err


def test_own_loops_are_listed_while_they_run_and_when_they_end(atoll, tmp_path):
    for ends in (True, False):
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with suppress(ZeroDivisionError), islands(module, optimizer, DiLoCo(inner_steps=2), out=tmp_path / f"loop-{ends}") as block:
            for _ in range(4):
                module(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            block.log_evaluation({"loss": 0.5})
            assert listed(atoll, tmp_path)[f"loop-{ends}"]["state"] == "running"
            assert ends or 1 / 0
    found = listed(atoll, tmp_path)
    assert [found[name]["state"] for name in ("loop-True", "loop-False")] == ["finished", "stopped"]
    assert {run["val_loss"] for run in found.values()} == {0.5}
    assert [(run["recipe"], run["engine"], run["steps"]) for run in found.values()] == [("own loop", "loop", None)] * 2
    assert found["loop-False"]["step"] == 4
    assert "None" not in atoll("runs", tmp_path)[1]
