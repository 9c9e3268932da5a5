"""A sweep carries out every combination once, goes on after a kill, and shows one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli.sweep_command import alternatives
from atoll.core.errors import TrainingDiverged
from atoll.engines import run_lifecycle
from atoll.telemetry.event_log import JsonlSink
from tests.samples import SMALL

SETTINGS = (*SMALL, "train.steps=4", "algorithm.inner_steps=2", "train.warm_start_steps=0", "cluster.islands=2")
SETS = [part for setting in SETTINGS for part in ("--set", setting)]
GRID = ["--grid", "algorithm.inner_steps=2,4", "--grid", "seed=0,1"]


@pytest.fixture
def swept(atoll, tmp_path):
    def call(*more, out=tmp_path / "sweep"):
        code, found, err = atoll("sweep", "demo-diloco", *SETS, *(more or GRID), "--out", out, "--quiet", "--json")
        return json.loads(found.splitlines()[-1]) if code == 0 else (code, err)

    return call


def test_the_cells_are_the_runs_that_single_commands_carry_out(swept, atoll, tmp_path):
    found = swept()
    assert [cell["settings"] for cell in found["cells"]] == [
        {"algorithm.inner_steps": steps, "seed": seed} for steps in "24" for seed in "01"
    ]
    digests = [cell["summary"]["digest"] for cell in found["cells"]]
    assert len(set(digests)) == 4
    alone = [*SETS, "--set", "algorithm.inner_steps=4", "--seed", "1"]
    _, out, _ = atoll("run", "demo-diloco", *alone, "--out", tmp_path / "alone", "--quiet", "--json")
    assert json.loads(out)["digest"] == digests[3]
    losses = [cell["summary"]["val_loss"] for cell in found["cells"]]
    assert losses[found["best"]] == min(losses)


def test_a_killed_sweep_goes_on_where_it_stopped_and_repeats_no_finished_cell(swept, monkeypatch, tmp_path):
    class Killed(BaseException):
        pass

    emit, seen = JsonlSink.emit, []

    def killed_in_the_third_cell(sink, event):
        seen.append(event)
        if sum(type(one).__name__ == "RunFinished" for one in seen) == 2 and type(event).__name__ == "RoundFinished":
            raise Killed
        emit(sink, event)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlSink, "emit", killed_in_the_third_cell)
        with pytest.raises(Killed):
            swept()
    whole = {path: path.read_bytes() for path in (tmp_path / "sweep").glob("*=2_*/*") if path.is_file()}
    begun = sorted(path.name for path in (tmp_path / "sweep").iterdir())
    assert begun == ["algorithm.inner_steps=2_seed=0", "algorithm.inner_steps=2_seed=1", "algorithm.inner_steps=4_seed=0"]
    again = swept()
    assert {path: path.read_bytes() for path in whole} == whole
    straight = swept(out=tmp_path / "straight")
    assert [cell["summary"]["digest"] for cell in again["cells"]] == [cell["summary"]["digest"] for cell in straight["cells"]]


def test_values_may_be_added_later_and_other_settings_are_refused(swept):
    first = swept("--grid", "seed=0")
    assert swept("--grid", "seed=0,1")["cells"][0] == first["cells"][0]
    code, err = swept("--grid", "seed=0", "--set", "train.clip_norm=none")
    assert code == 2
    assert "is the folder of another run" in err


def test_a_cell_that_diverges_is_listed_and_the_others_go_on(swept, monkeypatch):
    run = run_lifecycle.run

    def diverges(run_, **given):
        if run_.seed == 0:
            raise TrainingDiverged("the loss is nan at step 3. Lower the rate.")
        return run(run_, **given)

    monkeypatch.setattr(run_lifecycle, "run", diverges)
    found = swept("--grid", "seed=0,1")
    assert found["cells"][0]["error"].startswith("the loss is nan")
    assert found["best"] == 1


def test_the_table_has_a_line_for_each_cell_and_names_the_best(atoll, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "demo-diloco", *SETS, "--grid", "algorithm.outer=SGD(lr=1.0),Nesterov(lr=0.7, momentum=0.9)"]
    code, out, err = atoll(*arguments)
    assert code == 0
    assert [line for line in out.splitlines() if "SGD(lr=1.0)" in line or "Nesterov" in line]
    assert "lowest loss: algorithm.outer=" in out
    assert "cell 2 of 2: algorithm.outer=Nesterov(lr=0.7, momentum=0.9): val loss" in err
    assert atoll(*arguments, "--quiet")[1] == out, "without --out the same command finds its cells"


def test_without_out_sweeps_of_other_runs_or_other_settings_have_other_folders_and_atoll_runs_lists_their_cells(
    atoll, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    of_file = [f"--set={setting}" for setting in SETTINGS if not setting.startswith("train.batch_size")]
    folders = []
    for batch_size in (4, 8):  # of one file, which changes
        (tmp_path / "mine.toml").write_text(f'recipe = "demo-diloco"\n[train]\nbatch_size = {batch_size}\n')
        for grid in ("seed=0", "seed=0,1", "train.clip_norm=none"):
            _, out, _ = atoll("sweep", "mine.toml", *of_file, "--grid", grid, "--quiet", "--json")
            folders.append(json.loads(out.splitlines()[-1])["folder"])
    assert [len({*folders[:2]}), len({*folders})] == [1, 4]
    assert all(folder.startswith("runs/demo-diloco/sweep-") for folder in folders)
    listed = json.loads(atoll("runs", "--json")[1])
    assert {one["folder"] for one in listed} == {str(path.parent) for path in Path("runs").rglob("run.json")}
    assert len(listed) == 6


def test_cells_are_not_written_into_the_folder_of_a_run(atoll, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo-diloco").mkdir(parents=True)
    (tmp_path / "runs/demo-diloco/run.json").touch()
    for more in ([], ["--out", "runs/demo-diloco/cells"], ["--out", "runs/demo-diloco"]):
        code, _, err = atoll("sweep", "demo-diloco", *SETS, *GRID, *more)
        assert code == 2
        assert "the folder of a run" in err
    assert [path.name for path in (tmp_path / "runs/demo-diloco").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("seed", "give a setting and its values"),
        ("seed=1,,2", "give a setting and its values"),
        ("seed=1,1", "given twice"),
        ("train.stepz=1", "train.stepz"),
        ("train.steps=20,7", "the cell train.steps=7: train.steps=7 is not a multiple"),
    ],
)
def test_a_wrong_grid_is_refused_before_the_first_cell(grid, message, atoll, tmp_path):
    code, _, err = atoll("sweep", "demo-diloco", "--grid", grid, "--out", tmp_path / "sweep")
    assert code == 2
    assert message in err
    assert not (tmp_path / "sweep").exists()


def test_commas_inside_of_brackets_belong_to_the_value():
    assert alternatives("[0.5,1],[1,1]") == ["[0.5,1]", "[1,1]"]
    assert alternatives("[0.5,1]") == ["[0.5,1]"]
    assert alternatives("'a,b', c") == ["'a,b'", "c"]
