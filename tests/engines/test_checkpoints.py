from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import own, shared
from atoll.engines.checkpoints import Checkpoint, Checkpoints

torch.set_num_threads(1)


class Momentum(NamedTuple):
    velocity: Tree
    step: int


@dataclass(frozen=True)
class State:
    params: Tree = shared()
    outer: Momentum = shared()
    weights: Tree | None = own()


def state(round: int, numel: int = 10) -> State:
    params = Tree.of({"w": torch.full((numel,), float(round)), "b": torch.zeros(2)})
    return State(params=params, outer=Momentum(params * 2, round), weights=params if round % 2 else None)


def parts(round: int) -> dict[str, Any]:
    return {"shared": state(round), "island0": {"clock_s": round / 3, "generator": torch.arange(5, dtype=torch.uint8)}}


def saved(folder: Path, *rounds: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints", keep=keep)
    for round in rounds:
        checkpoints.save(round, parts(round), {"events_bytes": 100 * round})
    return checkpoints


def holds(checkpoints: Checkpoints, checkpoint: Checkpoint | None, round: int) -> bool:
    """Whether this is the checkpoint of that round, to the last bit."""
    assert checkpoint is not None
    back = checkpoints.load(checkpoint, "shared", like=state(0))
    own_weights = back.weights is None if round % 2 == 0 else back.weights.equal(state(round).params)
    island = checkpoints.load(checkpoint, "island0", like=parts(0)["island0"])
    return (
        checkpoint.round == round == back.outer.step
        and back.params.equal(state(round).params)
        and back.outer.velocity.equal(state(round).outer.velocity)
        and own_weights
        and island["clock_s"] == round / 3
        and torch.equal(island["generator"], torch.arange(5, dtype=torch.uint8))
    )


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


# ------------------------------------------------------------------------------------------------------ saving and loading


def test_a_checkpoint_is_loaded_bit_for_bit(tmp_path):
    checkpoints = saved(tmp_path, 3)
    newest = checkpoints.newest()
    assert holds(checkpoints, newest, 3)
    assert newest.path == tmp_path / "checkpoints" / "00000003"
    assert list(newest.files) == ["island0.safetensors", "shared.safetensors"]
    assert newest.metadata == {"events_bytes": 300}


def test_there_is_no_newest_before_the_first_save(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints", keep=1).newest() is None


def test_the_newest_are_kept_and_the_oldest_removed(tmp_path):
    checkpoints = saved(tmp_path, 5, 10, 15, 20, keep=3)
    assert names(checkpoints) == ["00000010", "00000015", "00000020"]
    assert checkpoints.rounds() == [10, 15, 20]
    assert holds(checkpoints, checkpoints.at(10), 10)


def test_a_run_that_went_back_keeps_its_new_checkpoint(tmp_path):
    checkpoints = saved(tmp_path, 9, keep=1)
    assert checkpoints.save(5, parts(5)).is_dir()
    assert checkpoints.rounds() == [5]


def test_a_checkpoint_of_the_same_round_is_replaced(tmp_path):
    checkpoints = saved(tmp_path, 4)
    checkpoints.save(4, {"shared": state(7)})
    assert names(checkpoints) == ["00000004"]
    assert checkpoints.load(checkpoints.newest(), "shared", like=state(0)).params.equal(state(7).params)


@pytest.mark.parametrize("round", [2, 3])
def test_an_error_before_the_rename_changes_nothing(tmp_path, round: int):
    checkpoints = saved(tmp_path, 1, 2)
    seen = []

    def stop() -> None:
        seen.append((checkpoints.unfinished(round) / "meta.json").exists())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(round, parts(7), before_rename=stop)
    assert seen == [True], "it was complete"
    assert holds(checkpoints, checkpoints.newest(), 2)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000001", "00000002"]


def test_checkpoints_of_given_rounds_are_removed(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=3)
    checkpoints.remove([1, 3, 9])
    assert holds(checkpoints, checkpoints.newest(), 2)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000002"]


def test_saving_again_gives_the_same_bytes(tmp_path):
    one, two = (saved(tmp_path / name, 6).newest() for name in "ab")
    assert all((one.path / name).read_bytes() == (two.path / name).read_bytes() for name in [*one.files, "meta.json"])


def test_metadata_may_have_tuples_and_odd_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"a": None}, {"times": (0.1, float("inf")), "big": 2**70, "by": {10: 1, 9: 2}})
    assert checkpoints.newest().metadata == {"times": [0.1, float("inf")], "big": 2**70, "by": {"10": 1, "9": 2}}


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".a", "a b"])
def test_a_parts_name_is_a_file_name(tmp_path, name: str):
    with pytest.raises(ValueError, match=r"a part cannot be called.*Use letters"):
        Checkpoints(tmp_path / "checkpoints", keep=1).save(1, {name: 1})
    assert not (tmp_path / "checkpoints").exists()


def test_a_value_that_cannot_be_packed_changes_nothing(tmp_path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"x is .*cannot be saved.*Use one of these"):
        checkpoints.save(2, {"a": 1, "b": {"x": object()}})
    assert names(checkpoints) == ["00000001"]


# ------------------------------------------------------------------------------------------------------------- full disks


def test_a_file_that_cannot_grow_leaves_the_older_checkpoints(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(3, {"small": state(3), "shared": state(3, numel=100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the checkpoint of round 3 could not be written to" in str(caught.value)
    assert "File too large" in str(caught.value)
    assert "The checkpoint of round 2 is untouched. Free disk space, then resume" in str(caught.value)
    assert names(checkpoints) == ["00000001", "00000002"]
    assert holds(checkpoints, checkpoints.newest(), 2)


FULL_DISK = """
import sys
from pathlib import Path
import torch
from atoll.core.errors import CheckpointError
from atoll.engines.checkpoints import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]) / "checkpoints", keep=2)
for round in range(10):
    try:
        checkpoints.save(round, {"small": round, "large": torch.full((350_000,), float(round))})
    except CheckpointError as error:
        print(error)
        break
newest = checkpoints.newest()
print(sorted(path.name for path in checkpoints.folder.iterdir()), newest.round)
print(bool((checkpoints.load(newest, "large", like=None) == newest.round).all()))
"""


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path):
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    private = ["unshare", "--mount", "sh", "-c"]  # the mount is seen by this process alone and goes with it
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    command = [*private, f'{mount} && exec "$@"', "sh", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, standing, equal = done.stdout.splitlines()
    assert "the checkpoint of round 2 could not be written to" in error
    assert "No space left on device" in error
    assert "The checkpoint of round 1 is untouched. Free disk space" in error
    assert standing == "['00000000', '00000001'] 1"
    assert equal == "True"


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"round 1 could not be written.*Not a directory.*There is no older one"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1).save(1, {"a": 1})


# ------------------------------------------------------------------------------------------------------------------ kills

SAVE_FOREVER = """
import os, sys
from pathlib import Path
import torch
from atoll.engines.checkpoints import Checkpoints
from atoll.core.flat_tree import Tree

torch.set_num_threads(1)
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        newest = checkpoints.newest()
        round = newest.round if newest else 0
        while True:
            round += 1
            tree = Tree.of({"w": torch.full((20_000,), float(round))})
            checkpoints.save(round, {"tree": tree, "other": {"round": round}}, {"round": round})
            print(os.getpid(), round, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def test_a_process_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    draw = random.Random(0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    command = [sys.executable, "-c", SAVE_FOREVER, str(checkpoints.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        for _ in range(5):
            process.stdin.write("go\n")
            for _ in range(draw.randrange(1, 5)):
                child, round = map(int, process.stdout.readline().split())
            sum(range(draw.randrange(100_000)))  # the next save gets some way, further or less far
            os.kill(child, signal.SIGKILL)
            while (line := process.stdout.readline()) != "killed\n":
                round = int(line.split()[1])
            newest = checkpoints.newest()
            assert newest.round in (round, round + 1)
            assert newest.metadata == {"round": newest.round}
            tree = checkpoints.load(newest, "tree", like=None)
            assert tree.equal(Tree.of({"w": torch.full((20_000,), float(newest.round))}))
            assert checkpoints.load(newest, "other", like=None) == {"round": newest.round}
        process.stdin.close()
    checkpoints.save(newest.round + 1, {"a": 1})
    assert names(checkpoints) == [f"{newest.round + i:08d}" for i in (0, 1)]


def test_remains_of_a_killed_save_are_ignored_and_removed_by_the_next(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for leftover in (".00000003.saving", ".00000000.removing", ".00000002.replaced"):
        shutil.copytree(checkpoints.folder / "00000001", checkpoints.folder / leftover)
    (checkpoints.folder / ".00000003.saving" / "meta.json").unlink()
    assert checkpoints.rounds() == [1, 2]
    assert holds(checkpoints, checkpoints.newest(), 2)
    checkpoints.save(3, parts(3))
    assert names(checkpoints) == ["00000002", "00000003"]
    assert holds(checkpoints, checkpoints.newest(), 3)


def test_a_checkpoint_without_its_replacement_is_valid(tmp_path):
    checkpoints = saved(tmp_path, 1)
    os.rename(checkpoints.folder / "00000001", checkpoints.folder / ".00000001.replaced")
    assert holds(checkpoints, checkpoints.newest(), 1)
    checkpoints.save(2, parts(2))
    assert names(checkpoints) == ["00000001", "00000002"]
    assert holds(checkpoints, checkpoints.at(1), 1)


# ----------------------------------------------------------------------------------------------------------------- damage


def test_a_flipped_bit_anywhere_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for name in ("shared.safetensors", "meta.json"):
        path = checkpoints.folder / "00000002" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            if name == "meta.json" and json_equal(path.read_bytes(), whole):
                continue  # a flip in white space or in the spelling of a number has the same meaning
            with pytest.raises(
                CheckpointError, match=rf"round 2 is damaged: .*{name}.*older one, of round 1.*remove the folder .*00000002"
            ):
                checkpoints.load(checkpoints.newest(), "shared", like=state(0))
        path.write_bytes(whole)
    assert holds(checkpoints, checkpoints.newest(), 2)


def json_equal(one: bytes, two: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(two))
    except ValueError:
        return False


def test_the_older_checkpoint_is_used_when_the_advice_is_followed(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    os.truncate(checkpoints.folder / "00000002" / "island0.safetensors", 5)
    with pytest.raises(CheckpointError, match=r"island0\.safetensors has 5 bytes instead of \d+: it was truncated") as caught:
        checkpoints.newest()
    folder = str(caught.value).partition("remove the folder ")[2].partition(" and resume")[0]
    shutil.rmtree(folder)
    assert holds(checkpoints, checkpoints.newest(), 1)


@pytest.mark.parametrize("name", ["shared.safetensors", "meta.json"])
def test_a_missing_file_is_refused(tmp_path, name: str):
    checkpoints = saved(tmp_path, 1)
    (checkpoints.folder / "00000001" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing\. There is no older one: copy .* from a backup, or start"):
        checkpoints.newest()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda content: {**content, "format": 2},
            r"has format 2, and this version of atoll reads format 3\. Resume with the version",
        ),
        (lambda content: {"round": 1}, r"meta\.json cannot be read \(.*format.*\)\. There is no older one"),
        (lambda content: [content], r"meta\.json cannot be read \(.*indices.*\)\. There is no older one"),
        (lambda content: None, r"meta\.json cannot be read"),
    ],
)
def test_a_checkpoint_of_another_format_or_of_none_is_refused(tmp_path, change, says):
    checkpoints = saved(tmp_path, 1)
    path = checkpoints.folder / "00000001" / "meta.json"
    content = change(json.loads(path.read_text())["content"])
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps({"blake2b": digest, "content": content}))
    with pytest.raises(CheckpointError, match=says):
        checkpoints.newest()


def test_an_unknown_part_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has no part 'island1'. It has: island0, shared.*resume with the settings"):
        checkpoints.load(checkpoints.newest(), "island1", like=None)


def test_a_round_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint of round 3 .*There are: \[1, 2\]. Use one of them"):
        saved(tmp_path, 1, 2).at(3)


def test_a_foreign_checkpoint_is_refused_with_file_and_field(tmp_path):
    checkpoints = saved(tmp_path, 1)
    like = replace(state(0), outer=(1, 2))
    with pytest.raises(CheckpointError, match=r"shared\.safetensors: outer is a .*Momentum.*another run or version"):
        checkpoints.load(checkpoints.newest(), "shared", like=like)
