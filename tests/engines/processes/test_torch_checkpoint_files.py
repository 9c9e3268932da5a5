"""Checkpoints of torch.distributed.checkpoint are read, and a forged index executes nothing."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from atoll.core.errors import AtollError
from atoll.core.flat_tree import Tree
from atoll.core.serialization import pack
from atoll.engines import checkpoints
from atoll.engines.checkpoints import CheckpointPart, Checkpoints, ShardSlice
from atoll.engines.processes.sharded_checkpoints import ShardedCheckpoints
from atoll.engines.processes.torch_checkpoint_files import INDEX, IndexUnpickler
from tests.process_pool import context_of


class Runs:
    """A pickle of it runs a command when it is read without restrictions."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def parts_of(rank, size, numel=10):
    """A Tree that the ranks hold in slices, and a tensor of each rank's own."""
    whole = Tree.of({"w": torch.arange(float(numel))})
    return {
        "sharded": CheckpointPart({"params": whole.shard(rank, size)}, ShardSlice(rank, size, "islands")),
        f"own-{rank}": CheckpointPart({"number": torch.tensor([[rank, 7]])}),
    }


def write_by_torch(group, folder):
    """A checkpoint as earlier versions wrote it: torch's files, with the structures in meta.json."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store, parts = Checkpoints(Path(folder), 2), parts_of(rank, size)
    whole = distribute_tensor(torch.arange(10.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    structures = {name: pack(part.value).structure for other in range(size) for name, part in parts_of(other, size).items()}
    tensors = {"sharded/params": whole, f"own-{rank}/number": parts[f"own-{rank}"].value["number"]}
    if rank:
        dist.barrier()
        save(tensors, checkpoint_id=store.unfinished(1))
    else:
        with store.writing(1, {"structures": structures}) as saving:
            dist.barrier()
            save(tensors, checkpoint_id=saving)
    dist.barrier()
    return sorted(path.name for path in (Path(folder) / "00000001").iterdir())


def read(group, folder, numel=10):
    """This rank's slice and its own tensor, or the error."""
    context = context_of(group)
    try:
        found = ShardedCheckpoints(Path(folder), 2, context)
        newest, parts = found.newest(), parts_of(context.rank, context.size, numel)
        load = found.loader(newest, parts)
        sharded, own = (load(name, part) for name, part in parts.items())
        return sharded["params"].flat.tolist(), own and own["number"].tolist()
    except AtollError as error:
        return type(error).__name__, str(error)


def reseal(folder, metadata=None):
    """What a forger does who knows the format: the digests in meta.json match the files."""
    content = json.loads((folder / "meta.json").read_text())["content"]
    (folder / "meta.json").unlink()
    checkpoints._seal(folder, content["round"], content["metadata"] if metadata is None else metadata)


@pytest.fixture
def written(fresh_four, tmp_path):
    (files, *_) = fresh_four.run(write_by_torch, tmp_path, size=2)
    assert files == [INDEX, "__0_0.distcp", "__1_0.distcp", "meta.json"]
    return tmp_path / "00000001"


def test_any_number_of_ranks_reads_the_files_of_torch(four, written):
    assert four.run(read, written.parent, size=2) == [
        ([0.0, 1.0, 2.0, 3.0, 4.0], [[0, 7]]),
        ([5.0, 6.0, 7.0, 8.0, 9.0], [[1, 7]]),
    ]
    three = four.run(read, written.parent, size=3)
    assert [number for elements, _ in three for number in elements] == [float(number) for number in range(10)]
    assert [own for _, own in three] == [[[0, 7]], [[1, 7]], None], "the third rank is new"


def test_a_forged_index_runs_no_command(four, written, tmp_path):
    marker = tmp_path / "ran"
    forged = pickle.dumps(Runs(marker))
    pickle.loads(forged)
    assert marker.exists(), "the pickle is dangerous"
    marker.unlink()
    (written / INDEX).write_bytes(forged)
    reseal(written)
    ((kind, text),) = four.run(read, tmp_path, size=1)
    assert kind == "CheckpointError"
    assert "it refers to posix.system, which is no part of torch's index: the file is damaged or forged" in text
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.distributed.checkpoint.metadata.os", "torch.hub.load"]
)
def test_an_index_consists_of_torchs_own_classes_only(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(AtollError, match="is no part of torch's index"):
        IndexUnpickler(io.BytesIO(f"c{module}\n{attribute}\n.".encode())).load()


def test_an_index_that_names_other_files_or_tensors_of_other_sizes_is_refused(four, written, tmp_path):
    index = pickle.loads((written / INDEX).read_bytes())
    original, outside = pickle.dumps(index), tmp_path / "outside"
    outside.write_bytes((written / "__0_0.distcp").read_bytes())
    for change, says in (
        (lambda place: setattr_frozen(place, "relative_path", "../../outside"), "has not all of"),
        (lambda place: setattr_frozen(place, "length", 5), "cannot be read"),
    ):
        changed = pickle.loads(original)
        for place in changed.storage_data.values():
            change(place)
        (written / INDEX).write_bytes(pickle.dumps(changed))
        reseal(written)
        ((kind, text),) = four.run(read, tmp_path, size=1)
        assert (kind, says in text) == ("CheckpointError", True), text
    swapped = pickle.loads(original)
    places = {at.fqn: place for at, place in swapped.storage_data.items()}
    for at in [at for at in swapped.storage_data if at.fqn == "sharded/params"]:
        swapped.storage_data[at] = places["own-0/number"]
    (written / INDEX).write_bytes(pickle.dumps(swapped))
    reseal(written)
    ((kind, text),) = four.run(read, tmp_path, size=1)
    assert (kind, "differs from its entry" in text) == ("CheckpointError", True), text


def setattr_frozen(place, name, value):
    object.__setattr__(place, name, value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"garbage", pickle.dumps({"a": 1})], ids=["empty", "cut", "text", "dict"])
def test_an_index_that_is_none_is_refused(four, written, content):
    (written / INDEX).write_bytes(content)
    reseal(written)
    ((kind, text),) = four.run(read, written.parent, size=1)
    assert (kind, f"{INDEX} cannot be read" in text) == ("CheckpointError", True), text


@pytest.mark.slow
def test_a_prepared_folder_that_is_resumed_ends_with_one_sentence_and_runs_no_command(tmp_path):
    folder, marker = tmp_path / "run", tmp_path / "ran"
    settings = ("model.hidden=8", "data.examples=512", "data.dimensions=16", "algorithm.inner_steps=2", "train.steps=4")
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "atoll", "run"]
    subprocess.run([*command, "toy-sync", *sets, "--engine", "processes", "--processes", "1", "--out", folder], check=True)
    (folder / "final.safetensors").unlink()  # the run looks unfinished
    newest = max((folder / "checkpoints").iterdir())
    (newest / "rank-0.safetensors").unlink()
    (newest / INDEX).write_bytes(pickle.dumps(Runs(marker)))
    reseal(newest)
    done = subprocess.run([*command, "--resume", folder, "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "it refers to posix.system, which is no part of torch's index" in done.stderr
    assert not marker.exists()
