"""Checkpoints of several processes: the same number resumes to the same bits, any other number reads the whole."""

import copy
import json
import os
import shutil
import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.errors import AtollError, CheckpointError, ExchangeFailed
from atoll.core.events import LimitSet
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import trees
from atoll.engines import checkpoints as checkpoints_module
from atoll.engines.checkpoints import CheckpointPart, ShardSlice
from atoll.engines.processes.rank_context import RankContext
from atoll.engines.processes.sharded_checkpoints import ShardedCheckpoints
from atoll.optim.adam import AdamW
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine
from tests.process_pool import ProcessPool, context_of, engine_of, outcomes

RULE = AdamW(lr=0.05)
WORKLOAD = Regression(hidden=3)
ALGORITHMS = {
    "DDP": (DDP(optimizer=RULE, accumulation=2), None),
    "ZeRO1": (ZeRO1(optimizer=RULE, clip_norm=0.5), None),
    "DiLoCo": (DiLoCo(inner_steps=2), None),
    "ACCO": (ACCO(optimizer=RULE, pieces_per_half=2), None),
    "two-DDP": (DiLoCo(inner_steps=2), DDP(optimizer=RULE)),
    "two-ACCO": (DiLoCo(inner_steps=2), ACCO(optimizer=RULE)),
    "codec": (DiLoCo(inner_steps=2, codec="int4"), None),
    "two-codec": (Streaming(inner_steps=4, fragments=2, overlap=3, codec="topk", feedback=0.5), DDP(optimizer=RULE)),
    "two-FSDP": (DiLoCo(inner_steps=2), FSDP(optimizer=RULE)),
}
IN_FRESH_PROCESSES = "two-FSDP"
STOP = 2
"""The round after which runs are stopped here, of four."""


class RankOutcome(NamedTuple):
    """The results of one rank of a run."""

    begun: Tree
    """The weights that it began, or went on, with."""
    slices: list[Tree]
    """What it then held slices of: weights and moments."""
    replica: Any
    """Its moments then; none where devices have an algorithm of their own."""
    positions: tuple[Any, Any]
    """In its shard, then and at the end."""
    ended: Tree
    finished: Any
    events: list[str]
    parts: dict[str, Any]
    """What it saved last."""


class Stop(Exception):
    """The run is to go no further."""


def timeless(events):
    """Events without what depends on the machine."""
    lines = [json.loads(event.to_json()) for event in events if event.recorded and not isinstance(event, LimitSet)]
    by_clock = ("utilisation", "busiest_second_bytes")
    kept = [{k: v for k, v in line.items() if not k.endswith("_s") and k not in by_clock} for line in lines]
    return sorted(json.dumps(line) for line in kept)


def taking_part(group, folder, kind, stop=None, workload=WORKLOAD, machines=1, rounds=4):
    """Go on with what is in the folder, or begin, and save after every round; up to its end or to this round."""
    algorithm, inside = ALGORITHMS[kind]
    world = context_of(group, 1 if inside is None else 2, inside=inside is not None)
    here = Path(folder) / f"machine-{world.rank * machines // world.size}"
    checkpoints = ShardedCheckpoints(here, 2, world)
    found = checkpoints.newest()
    saved = {}

    def save(engine):
        saved.update(engine.parts())
        checkpoints.save(engine.round, saved, {"engine": engine.metadata()})
        if engine.round == stop:
            raise Stop

    steps = rounds * algorithm.steps_per_round
    engine, sink = engine_of(world, algorithm, workload, steps, AdamW(lr=0.05), inside, save_every=1)
    if found is not None:
        engine.restore(found.metadata["engine"], checkpoints.loader(found, engine.parts()))
    rank, parts = world.rank, engine.parts()
    begun, slices = engine.params.copy(), [tree.copy() for tree in trees(parts["sharded"].value)]
    replica = copy.deepcopy(parts[f"replica-{rank}"].value["optimizer"]) if inside is None else None
    before = parts[f"read-{rank}"].value["position"]
    try:
        finished = run_engine(engine, save)
    except Stop:
        finished = None
    after = engine.parts()[f"read-{rank}"].value["position"]
    outcome = RankOutcome(begun, slices, replica, (before, after), engine.params.copy(), finished, timeless(sink.events), saved)
    engine.close()
    return outcome._replace(parts={name: part.value for name, part in saved.items()})


def same(one, two):
    """Whether two values of a State have the same bits."""
    if isinstance(one, Tree):
        return one.same_bits(two)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


# ------------------------------------------------------------------------------------------------------- as many as before


def by_four(four, *arguments):
    """torch keeps meshes of devices in mind, and with them groups that are no more: who uses one is given fresh processes."""
    if arguments[1] != IN_FRESH_PROCESSES:
        return four.run(taking_part, *arguments)
    with closing(ProcessPool(4)) as fresh:
        return fresh.run(taking_part, *arguments)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_as_many_processes_resume_bit_for_bit(four, tmp_path, kind):
    through = by_four(four, tmp_path / "through", kind)
    stopped = by_four(four, tmp_path / "stopped", kind, STOP)
    resumed = by_four(four, tmp_path / "stopped", kind)
    for rank in range(4):
        assert resumed[rank].begun.equal(stopped[rank].ended)
        assert resumed[rank].ended.equal(through[rank].ended)
        assert same(resumed[rank].parts, through[rank].parts), "weights, moments, random numbers, positions, halves that wait"
    for name in ("rounds", "outer_steps", "steps", "tokens", "local_updates", "sent_bytes_per_island", "val_loss", "digest"):
        assert getattr(resumed[0].finished, name) == getattr(through[0].finished, name), name
    assert resumed[0].finished.control_bytes_per_island == through[0].finished.control_bytes_per_island
    assert sorted(stopped[0].events + resumed[0].events) == through[0].events


def test_a_half_of_a_batch_that_waits_is_saved(four, tmp_path):
    """Else the test above would check less than it seems to."""
    stopped = four.run(taking_part, tmp_path, "ACCO", STOP)
    for rank, outcome in enumerate(stopped):
        own = outcome.parts[f"own-{rank}"]
        assert own["state"]["first"].weight == 2
        assert own["pending_tokens"] == own["state"]["first"].tokens > 0


@pytest.mark.parametrize("kind", ["codec", "two-codec"])
def test_what_a_codec_left_out_is_saved(four, tmp_path, kind):
    stopped = four.run(taking_part, tmp_path, kind, STOP)
    for rank, outcome in enumerate(stopped):
        unsent = [*trees(outcome.parts[f"own-{rank}"]["state"]["unsent"])]
        assert len(unsent) == (2 if kind == "two-codec" else 1)
        assert all(tree.flat.any() for tree in unsent)


# -------------------------------------------------------------------------------------------------------- another number


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("DDP", 4, 3), ("ZeRO1", 4, 3), ("DiLoCo", 4, 3), ("ACCO", 4, 3), ("ZeRO1", 4, 2), ("ACCO", 2, 4), ("DiLoCo", 2, 4)],
)
def test_another_number_of_processes_resumes_from_the_same_weights_with_new_slices(four, tmp_path, kind, before, after):
    workload = Regression(hidden=3, batches=RegressionBatches(num_shards=before))
    stopped = four.run(taking_part, tmp_path, kind, STOP, workload, size=before)
    resumed = four.run(taking_part, tmp_path, kind, None, workload, size=after)
    assert all(outcome.begun.equal(stopped[0].ended) for outcome in resumed)
    assert all(outcome.ended.equal(resumed[0].ended) for outcome in resumed)
    assert not resumed[0].ended.equal(resumed[0].begun)
    assert resumed[0].finished.rounds == 4
    assert same(joined(outcome.slices for outcome in resumed), joined(trees(outcome.parts["sharded"]) for outcome in stopped))
    assert len(resumed[0].slices) == (3 if kind in ("ZeRO1", "ACCO") else 0), "weights and two moments"
    rounds = [json.loads(line) for line in resumed[0].events if '"RoundFinished"' in line]
    assert [line["islands"] for line in rounds] == [after] * 2


def joined(slices):
    """Wholes of which each rank has a slice."""
    return [Tree.join(parts) for parts in zip(*slices, strict=True)]


def test_a_former_rank_keeps_its_moments_and_a_new_one_starts_without(four, tmp_path):
    workload = Regression(hidden=3, batches=RegressionBatches(num_shards=2))
    stopped = four.run(taking_part, tmp_path, "DiLoCo", STOP, workload, size=2)
    resumed = four.run(taking_part, tmp_path, "DiLoCo", None, workload)
    for rank in (0, 1):
        assert same(resumed[rank].replica, stopped[rank].parts[f"replica-{rank}"]["optimizer"])
    for rank in (2, 3):
        assert not any(resumed[rank].replica)


def test_data_positions_resume_for_any_number_of_readers(four, tmp_path):
    """Shards that no rank reads for a while are not read from the beginning again."""
    first = four.run(taking_part, tmp_path, "DDP", 1)
    assert [outcome.positions for outcome in first] == [((0, 1), (2, 1))] * 4
    second = four.run(taking_part, tmp_path, "DDP", 2, size=2)
    assert [outcome.positions for outcome in second] == [((2, 1), (4, 1))] * 2
    third = four.run(taking_part, tmp_path, "DDP", 3)
    assert [outcome.positions[0] for outcome in third] == [(4, 1), (4, 1), (2, 1), (2, 1)]


def test_readers_that_share_a_shard_share_its_position_too(four, tmp_path):
    workload = Regression(hidden=3, batches=RegressionBatches(num_shards=2))
    four.run(taking_part, tmp_path, "DDP", 1, workload, size=2)
    resumed = four.run(taking_part, tmp_path, "DDP", 2, workload)
    assert [outcome.positions for outcome in resumed] == [((2, 1), (6, 1))] * 4


@pytest.mark.parametrize("kind", ["two-DDP", "two-ACCO"])
def test_islands_of_devices_are_added_and_removed_as_a_whole(four, tmp_path, kind):
    stopped = four.run(taking_part, tmp_path, kind, STOP)
    fewer = four.run(taking_part, tmp_path, kind, STOP + 1, size=2)
    assert all(outcome.begun.equal(stopped[0].ended) for outcome in fewer)
    more = four.run(taking_part, tmp_path, kind)
    assert all(outcome.begun.equal(fewer[0].ended) for outcome in more)
    assert all(outcome.ended.equal(more[0].ended) for outcome in more)
    assert more[0].finished.rounds == 4


# ---------------------------------------------------------------------------------------------------- what can go wrong


def some_parts(world, round):
    """Something shared and something of this rank's own."""
    whole = Tree.of({"w": torch.arange(10.0) + round})
    return {
        "shared": CheckpointPart({"params": whole}, ShardSlice(0, 1, "devices")),
        f"own-{world.rank}": CheckpointPart({"number": torch.tensor([world.rank + 10 * round])}),
    }


def writing(group, folder, rounds):
    world = context_of(group)
    checkpoints = ShardedCheckpoints(Path(folder), 2, world)
    for round in rounds:
        checkpoints.save(round, some_parts(world, round), {"round": round})
    return checkpoints.newest().round


def reading(group, folder):
    """What the newest checkpoint holds, or why it cannot be read."""
    try:
        world = context_of(group)
        checkpoints = ShardedCheckpoints(Path(folder), 2, world)
        found = checkpoints.newest()
        if found is None:
            return None
        load = checkpoints.loader(found, some_parts(world, 0))
        values = [load(name, part) for name, part in some_parts(world, 0).items()]
        return found.round, values[0]["params"].flat.tolist(), values[1]["number"].item()
    except AtollError as error:
        return type(error).__name__, str(error)


def failing(group, folder):
    """One rank has something that cannot be written."""
    world = context_of(group)
    checkpoints = ShardedCheckpoints(Path(folder), 2, world)
    checkpoints.save(1, some_parts(world, 1), {})
    parts = some_parts(world, 2)
    if world.rank == 1:
        parts["own-1"] = CheckpointPart({"number": torch.empty(3, device="meta")})
    try:
        checkpoints.save(2, parts, {})
    except CheckpointError as error:
        return str(error)
    return None


@dataclass
class Mortal(RankContext):
    """Is killed at a barrier."""

    lives: int = 0

    def barrier(self):
        if self.lives == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.lives -= 1
        super().barrier()


def dying(group, folder, victim, lives):
    world = context_of(group)
    checkpoints = ShardedCheckpoints(Path(folder), 2, world)
    checkpoints.save(1, some_parts(world, 1), {})
    if world.rank == victim:
        checkpoints = ShardedCheckpoints(
            Path(folder), 2, Mortal(**vars(world), lives=3 + lives)
        )  # its constructor has three barriers
    else:
        checkpoints = ShardedCheckpoints(Path(folder), 2, world)
    checkpoints.save(2, some_parts(world, 2), {})
    return "saved"


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_older_checkpoint(four, tmp_path):
    outcome = four.run(failing, tmp_path, size=3)
    assert all(text is not None and "could not be written" in text for text in outcome)
    assert "The checkpoint of round 1 is untouched" in outcome[0]
    assert four.run(reading, tmp_path, size=3) == [(1, [n + 1.0 for n in range(10)], 10 + rank) for rank in range(3)]


@pytest.mark.parametrize(("victim", "lives"), [(1, 0), (0, 0), (2, 1)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_a_whole_checkpoint(four, tmp_path, victim, lives):
    results = outcomes(3, dying, tmp_path, victim, lives)
    assert results[victim] == (-signal.SIGKILL, None)
    assert all(isinstance(word, ExchangeFailed) for rank, (_, word) in enumerate(results) if rank != victim)
    round, *_ = four.run(reading, tmp_path, size=3)[0]
    assert round == 1 + lives, "the new one stands if all had written before the kill, else the older one"
    assert four.run(reading, tmp_path, size=3)[2] == (round, [n + float(round) for n in range(10)], 10 * round + 2)
    assert four.run(writing, tmp_path, [3], size=3) == [3] * 3
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")], "and nothing is left behind"


@pytest.mark.parametrize("name", ["rank-1.safetensors", "meta.json"])
def test_a_file_whose_bits_have_changed_is_refused_by_name(four, tmp_path, name):
    four.run(writing, tmp_path, [1, 2], size=2)
    path = tmp_path / "00000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    ((kind, text),) = four.run(reading, tmp_path, size=1)
    assert kind == "CheckpointError"
    assert name in text
    assert "round 1" in text, "there is an older one"


def test_a_missing_or_truncated_file_is_refused_by_name_on_all_ranks(four, tmp_path):
    four.run(writing, tmp_path, [1], size=2)
    path = tmp_path / "00000001" / "rank-0.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    for kind, text in four.run(reading, tmp_path, size=2):
        assert (kind, "rank-0.safetensors" in text, "truncated" in text) == ("CheckpointError", True, True)
    path.unlink()
    for kind, text in four.run(reading, tmp_path, size=2):
        assert (kind, "rank-0.safetensors is missing" in text) == ("CheckpointError", True)


@pytest.mark.parametrize(
    "index",
    [{}, {"shared/params": 3}, {"shared/params": {"numel": 10, "pieces": [[0, 0, 10]]}, "own-0/number": {}}, {"shared/params": []}],
    ids=["empty", "number", "lacking", "list"],
)
def test_a_forged_index_is_refused(four, tmp_path, index):
    four.run(writing, tmp_path, [1], size=1)
    folder = tmp_path / "00000001"
    content = json.loads((folder / "meta.json").read_text())["content"]
    (folder / "meta.json").unlink()
    checkpoints_module._seal(folder, 1, {**content["metadata"], "index": index})
    ((kind, text),) = four.run(reading, tmp_path, size=1)
    assert kind == "CheckpointError"
    assert "Use an older checkpoint" in text


def test_the_newest_are_kept_and_an_empty_folder_has_none(four, tmp_path):
    assert four.run(reading, tmp_path, size=2) == [None, None]
    four.run(writing, tmp_path, [1, 2, 3], size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


# ------------------------------------------------------------------------------------------- machines without a common disk


@pytest.mark.parametrize("kind", ["DiLoCo", "ACCO", "two-DDP"])
def test_machines_without_a_common_disk_resume_bit_for_bit(four, tmp_path, kind):
    through = four.run(taking_part, tmp_path / "through", kind)
    four.run(taking_part, tmp_path / "stopped", kind, STOP, WORKLOAD, 2)
    resumed = four.run(taking_part, tmp_path / "stopped", kind, None, WORKLOAD, 2)
    for rank in range(4):
        assert resumed[rank].ended.equal(through[rank].ended)
        assert same(resumed[rank].parts, through[rank].parts)
    for machine in (0, 1):
        files = {path.name for path in (tmp_path / "stopped" / f"machine-{machine}" / "00000004").iterdir()}
        assert files == {"meta.json", *(f"rank-{2 * machine + device}.safetensors" for device in (0, 1))}


def test_files_of_several_disks_in_one_folder_are_verified_and_read_by_another_number(four, tmp_path):
    stopped = four.run(taking_part, tmp_path, "ZeRO1", STOP, WORKLOAD, 2)
    first, second = (tmp_path / f"machine-{machine}" / f"{STOP:08d}" for machine in (0, 1))
    with pytest.raises(CheckpointError, match=r"has not all of 'sharded/.*', which ranks \[0, 1, 2, 3\] have written"):
        four.run(taking_part, tmp_path, "ZeRO1", size=1)
    for rank in (2, 3):
        shutil.copy(second / f"rank-{rank}.safetensors", first)
    content = (first / "rank-3.safetensors").read_bytes()
    (first / "rank-3.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank-3.safetensors does not match its digest"):
        four.run(taking_part, tmp_path, "ZeRO1", size=1)
    (first / "rank-3.safetensors").write_bytes(content)
    (resumed,) = four.run(taking_part, tmp_path, "ZeRO1", size=1)
    assert resumed.begun.equal(stopped[0].ended)
    assert same(resumed.slices, joined(trees(outcome.parts["sharded"]) for outcome in stopped))


def apart(group, folder, rounds):
    """Each rank has a disk of its own, and saves these rounds."""
    world = context_of(group)
    mine = Path(folder) / f"machine-{world.rank}"
    checkpoints = ShardedCheckpoints(mine, 1, world)
    for round in rounds:
        checkpoints.save(round, some_parts(world, round), {})
    try:
        found = checkpoints.newest()
    except CheckpointError as error:
        return str(error)
    return found and found.round


def test_machines_continue_from_the_newest_checkpoint_that_all_of_them_have(four, tmp_path):
    assert four.run(apart, tmp_path, [1, 2], size=2) == [2, 2]
    (tmp_path / "machine-1" / "00000002").rename(tmp_path / "machine-1" / "00000001")
    outcome = four.run(apart, tmp_path, [], size=2)
    assert all("[2]" in text and "[1]" in text for text in outcome), "not from the beginning, as if nothing had been saved"


def test_marks_of_processes_that_were_killed_do_not_mislead_others(four, tmp_path):
    for machine, killed in (("machine-0", 1), ("machine-1", 0)):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / f".seen-by-{killed}").touch()
    assert four.run(apart, tmp_path, [1], size=2) == [1, 1]
    assert [path.name for path in (tmp_path / "machine-1").iterdir()] == ["00000001"]
