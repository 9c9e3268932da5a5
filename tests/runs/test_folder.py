from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, make_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.config.json_records import to_json
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.verified_files import json_digest
from atoll.engines.processes.rank import open_rank_log, rank_log_path
from atoll.runs.folder import RunFolder, default_path, differences, source


@dataclass(frozen=True, kw_only=True)
class Link:
    latency_s: float = 0.1
    bandwidth_mbit_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Fast:
    pass


@dataclass(frozen=True, kw_only=True)
class Run:
    recipe: str = "diloco"
    seed: int = 0
    link: Link | Fast = Link()
    step_time_s: tuple[float, ...] = (0.5, 0.75)
    compile: bool = False


COMMAND = ["atoll", "run", "diloco", "--set", "data.corpus=my corpus"]


def made(path: Path, run: Run | None = None) -> RunFolder:
    return RunFolder.create(path, run or Run(), COMMAND)


# ------------------------------------------------------------------------------------------------------ making and opening


def test_a_folder_that_was_made_opens_with_its_run(tmp_path):
    folder = made(tmp_path / "a" / "b")
    assert RunFolder.open(tmp_path / "a" / "b") == folder
    assert folder.run_json == to_json(Run())
    saved = json.loads((tmp_path / "a" / "b" / "run.json").read_text())
    assert saved == {"blake2b": json_digest({"format": 2, **to_json(Run())}), "format": 2, **to_json(Run())}
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "run.json", "source.txt"]


def test_a_folder_may_not_name_another_class_than_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"the Run has the type 'tests\.runs\.test_folder\.Run', which does not fit there"):
        made(tmp_path).run  # noqa: B018


def test_an_empty_folder_is_taken(tmp_path):
    assert made(tmp_path).path == tmp_path


def test_a_folder_with_something_in_it_is_refused_with_the_ways_out(tmp_path):
    made(tmp_path / "run")
    both = r"Use --resume \(in Python atoll\.resume\) to continue it, or another --out \(in Python out=\)\."
    with pytest.raises(ConfigError, match=rf"run is a run's folder already.*would overwrite it\. {both}"):
        made(tmp_path / "run")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a").write_text("")
    with pytest.raises(ConfigError, match=r"letters is a folder that is not empty already.*would overwrite it\. Use another --out"):
        made(tmp_path / "letters")
    with pytest.raises(ConfigError, match=r"a is a file, and a run needs a folder.*another --out"):
        made(tmp_path / "letters" / "a")


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot write to .*run: Not a directory\. Make room or get access there, or use another"
    ):
        made(tmp_path / "file" / "run")


def test_what_is_not_a_runs_folder_is_not_opened(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is not a folder\. Give the folder of --out"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no run\.json, so it is no run's folder\. Give the folder"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("[]", r"cannot be read \(ValueError: it holds a list"),
        ("\xff", "cannot"),
        ("[" * 1_000_000, "cannot be read .* nested more than 200 levels deep"),
        ('{"type":' * 500 + "1" + "}" * 500, "cannot be read .* nested more than 200 levels deep"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused(tmp_path, text: str, complaint: str):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"run\.json {complaint}.*Restore it from a copy"):
        RunFolder.open(tmp_path)


def test_every_file_has_its_place(tmp_path):
    folder = RunFolder(tmp_path)
    places = [folder.events, folder.timing, folder.checkpoints, folder.warm_start, folder.final, folder.summary, folder.source]
    expected = "events.jsonl timing.jsonl checkpoints warm_start.safetensors final.safetensors summary.json source.txt"
    assert [str(place.relative_to(tmp_path)) for place in places] == expected.split()


# ------------------------------------------------------------------------------------------------------------------ source


def blocks(folder: RunFolder) -> list[dict[str, str]]:
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in folder.source.read_text().strip().split("\n\n")]


def test_the_source_names_versions_machine_commit_and_command(tmp_path):
    (block,) = blocks(made(tmp_path))
    assert block["command"] == "atoll run diloco --set 'data.corpus=my corpus'"
    assert block["torch"] == torch.__version__
    assert block["numpy"] == np.__version__
    assert block["python"] == ".".join(map(str, sys.version_info[:3]))
    assert block["cpus"] == str(os.cpu_count())
    assert datetime.fromisoformat(block["started"]).tzinfo is not None
    assert {"atoll", "platform", "cuda"} <= block.keys()


def test_the_commit_is_that_of_our_own_checkout():
    root = Path(__file__).parents[2]
    named = ["git", "-C", str(root), "rev-parse", "HEAD", "HEAD:src", "HEAD:benchmarks"]
    head = subprocess.run(named, capture_output=True, text=True, check=False)
    found = source()
    commit = found["commit"]
    if head.returncode or commit == "not from a checkout":
        pytest.skip("atoll does not run from a checkout with a commit")
    whole, src, benchmarks = head.stdout.split()
    assert re.fullmatch(rf"{whole} \((clean|with uncommitted changes)\)", commit)
    assert found["trees"] == f"src {src}, benchmarks {benchmarks} {commit.partition(' ')[2]}"


def test_a_resume_is_noted_after_the_start(tmp_path):
    folder = made(tmp_path)
    folder.append_source("resumed", ["atoll", "run", "--resume", "here"])
    first, second = blocks(folder)
    assert first["command"] == "atoll run diloco --set 'data.corpus=my corpus'"
    assert second["command"] == "atoll run --resume here"
    assert "resumed" in second


# --------------------------------------------------------------------------------------------------------------- same run


def test_the_same_run_is_let_through(tmp_path):
    folder = made(tmp_path)
    folder.same_run(Run())


def test_a_setting_that_an_older_folder_lacks_counts_as_its_default(tmp_path):
    folder, older = made(tmp_path), {"format": 2, **to_json(Run())}
    del older["compile"], older["link"]["latency_s"]
    (tmp_path / "run.json").write_text(json.dumps(older))
    folder.same_run(Run())
    with pytest.raises(ConfigError, match=r"compile: given true, in the folder false"):
        folder.same_run(Run(compile=True))


def test_another_run_is_refused_with_every_setting_that_differs(tmp_path):
    folder = made(tmp_path)
    other = Run(recipe="ddp", seed=4, link=Link(bandwidth_mbit_per_s=10.0), step_time_s=(0.5, 1.0), compile=True)
    with pytest.raises(ConfigError) as caught:
        folder.same_run(other)
    lines = str(caught.value).splitlines()
    assert "is the folder of another run. A run is resumed with the settings it began with; these differ:" in lines[0]
    assert lines[1:-1] == [
        '  recipe: given "ddp", in the folder "diloco"',
        "  seed: given 4, in the folder 0",
        "  link.bandwidth_mbit_per_s: given 10.0, in the folder inf",
        "  step_time_s.1: given 1.0, in the folder 0.75",
        "  compile: given true, in the folder false",
    ]
    assert lines[-1] == "Resume without changing settings, or start a new run in another --out (in Python out=)."


def test_another_class_is_one_difference_with_its_settings(tmp_path):
    folder = made(tmp_path)
    with pytest.raises(ConfigError, match=r"link: given Fast\(\), in the folder Link\(latency_s=0\.1, bandwidth_mbit_per_s=inf\)"):
        folder.same_run(replace(Run(), link=Fast()))
    with pytest.raises(ConfigError, match=r"step_time_s: given \[0\.5\], in the folder \[0\.5, 0\.75\]"):
        folder.same_run(replace(Run(), step_time_s=(0.5,)))


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 1}, {"a": True}, [("a", "1", "true")]),
        ({"a": None}, {}, [("a", "null", "nothing")]),
        ({}, {"a": [1]}, [("a", "nothing", "[1]")]),
        ({"a": to_json(math.inf)}, {"a": to_json(-math.inf)}, [("a", "inf", "-inf")]),
        ({"a": to_json(math.nan)}, {"a": to_json(math.nan)}, []),
    ],
)
def test_differences_are_those_of_the_values(one: Any, two: Any, found: list[Any]):
    assert differences(one, two) == found


def test_a_long_list_of_differences_is_cut(tmp_path):
    fields = [(f"s{i}", int, 0) for i in range(30)]
    many = make_dataclass("Many", fields, frozen=True)
    folder = RunFolder.create(tmp_path, many(), COMMAND)
    with pytest.raises(ConfigError, match=r"s19: given 1, in the folder 0\n  and 10 more\nResume"):
        folder.same_run(many(**{f"s{i}": 1 for i in range(30)}))


def test_a_folder_of_an_older_version_is_refused_by_its_format(tmp_path):
    made(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(to_json(Run())))
    with pytest.raises(ConfigError, match=r"run\.json has format 1, and this version of atoll reads format 2\. Use the version"):
        RunFolder.open(tmp_path)


# ------------------------------------------------------------------------------------------------------- places and locks


def test_a_default_path_never_exists(tmp_path):
    now = datetime(2031, 12, 24, 18, 0, 5)
    found = [default_path("diloco", 3, tmp_path, now) for _ in range(3) if made(default_path("diloco", 3, tmp_path, now))]
    made_paths = sorted(path.name for path in (tmp_path / "diloco").iterdir())
    assert made_paths == ["seed3-20311224-180005", "seed3-20311224-180005-2", "seed3-20311224-180005-3"]
    assert found[-1] == tmp_path / "diloco" / "seed3-20311224-180005-4"


@pytest.mark.parametrize("recipe", ["../up", "a/b", "..", "my recipe:x", "\U0001d4b6" * 4096])
def test_a_recipe_of_any_name_stays_under_the_root(tmp_path, recipe: str):
    path = default_path(recipe, 0, tmp_path)
    assert path.parent.parent == tmp_path
    assert path.resolve().is_relative_to(tmp_path.resolve())
    assert re.fullmatch(r"seed0-\d{8}-\d{6}", path.name)
    path.mkdir(parents=True)  # the system takes the name


HOLD = """
import sys
from pathlib import Path
from atoll.runs.folder import RunFolder

with RunFolder.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


CREATE = """
import sys
from pathlib import Path
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.runs.folder import RunFolder
from dataclasses import replace

for number, line in enumerate(sys.stdin):
    run = replace(recipes.toy_sync(), seed=1000 * int(sys.argv[2]) + number)
    try:
        RunFolder.create(Path(sys.argv[1]) / str(number), run, ["test"])
        print("created", flush=True)
    except ConfigError as error:
        print("is a run's folder already" in str(error) or "is in use by" in str(error) or error, flush=True)
"""


def test_of_processes_that_create_one_folder_at_once_one_succeeds_with_its_own_run(tmp_path):
    tries = 60
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, str(tmp_path), str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    for attempt in range(tries):
        if attempt % 2:
            (tmp_path / str(attempt)).mkdir()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.stdout.readline().strip() for process in processes]
        assert sorted(said) == ["True", "True", "created"]
        assert RunFolder.open(tmp_path / str(attempt)).run.seed == 1000 * said.index("created") + attempt
    for process in processes:
        process.communicate()


def test_a_lock_or_a_log_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    folder = made(tmp_path / "run")
    (tmp_path / "other").write_text("precious")
    for name in ("lock", "source.txt"):
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"lock is a symbolic link, and atoll writes nowhere else"), folder.lock():
        pass
    with pytest.raises(ConfigError, match=r"source\.txt is a symbolic link"):
        folder.append_source("resumed", COMMAND)
    rank_log_path(folder.path, 1).parent.mkdir()
    rank_log_path(folder.path, 1).symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"rank-1\.log.*It is a symbolic link"), open_rank_log(folder.path, 1) as log:
        log("a line")
    assert (tmp_path / "other").read_text() == "precious"


def test_two_processes_cannot_work_in_one_folder_and_a_dead_one_lets_go(tmp_path):
    folder = made(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=rf"is in use by process {other.pid} on .*Wait until it ends or stop it"),
            folder.lock(),
        ):
            pass
        other.kill()
    with folder.lock():
        assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_a_lock_is_released_at_the_end_and_after_an_error(tmp_path):
    folder = made(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"), folder.lock():
            raise RuntimeError("boom")
    with folder.lock(), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), folder.lock():
        pass
    with folder.lock():
        pass


def test_an_error_of_the_run_is_not_taken_for_one_of_the_lock(tmp_path):
    with pytest.raises(OSError, match="the run's own"), made(tmp_path).lock():
        raise OSError("the run's own")


def test_a_removed_folder_cannot_be_locked(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write to .*gone: No such file"), RunFolder(tmp_path / "gone").lock():
        pass
