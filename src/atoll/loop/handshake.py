"""The handshake on entry: islands compare settings and models, and start from the same weights or the same round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.loop.process_groups import Topology
from atoll.loop.replica import WeightSlice
from atoll.loop.settings import LoopSettings
from atoll.loop.state_dict import LoopCheckpoint
from atoll.replica.flat_parameters import ModuleWeights


def handshake(
    settings: LoopSettings,
    checkpoint: LoopCheckpoint | None,
    topology: Topology,
    module: ModuleWeights,
    weights: ModuleWeights | WeightSlice,
    thread: CommunicationThread,
) -> None:
    """Compares settings, model and checkpoint. Without a checkpoint every island then loads island 0's weights, if any differ.

    `weights` is the part of the module's weights that this process exchanges.
    """
    params, inter_island, fresh = weights.read(), topology.inter_island, checkpoint is None
    trained = [(piece.name, piece.shape, piece.dtype) for piece in params.layout.pieces]
    fixed = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.untrained_tensors()] if fresh else ""
    mine = [_fingerprint(settings.comparable), _fingerprint(f"{trained} {fixed}")]
    mine += [not fresh, checkpoint.rounds if checkpoint else 0, _values_fingerprint(params, module) if fresh else 0]
    rows = thread.call(lambda: inter_island.all_gather_on_entry(*mine))
    _check_rounds([row[2:4] for row in rows])
    island = topology.position.island
    _check_equal([row[0] for row in rows], "another algorithm or another finish", f"Island {island} has {settings.comparable}")
    _check_equal([row[1] for row in rows], "another model or other buffers", f"Island {island} has {_summary(params.layout)}")
    differ = any(row[4] != rows[0][4] for row in rows)
    if topology.intra_island is not None:  # one device that differs makes all devices of its island take part
        intra_island = topology.intra_island
        differ = any(row[0] for row in thread.call(lambda: intra_island.all_gather_numbers(differ)))
    if differ:
        thread.call(lambda: inter_island.broadcast(params.flat))
        weights.write(params)
        _load_others(module, inter_island, thread)


def check_same_round(checkpoint: LoopCheckpoint, topology: Topology, thread: CommunicationThread) -> None:
    """For a checkpoint that is loaded inside of the block."""
    _check_rounds(thread.call(lambda: topology.inter_island.all_gather_on_entry(True, checkpoint.rounds)))


def _load_others(module: ModuleWeights, inter_island: GroupCollectives, thread: CommunicationThread) -> None:
    """Loads island 0's frozen weights and buffers."""
    with torch.no_grad():
        for _, tensor in module.untrained_tensors():
            received = tensor.clone(memory_format=torch.contiguous_format)
            data = received.view(-1).view(torch.uint8)
            thread.call(lambda data=data: inter_island.broadcast(data))  # type: ignore[misc]
            if not torch.equal(received, tensor):
                tensor.copy_(received)


def _check_equal(fingerprints: Sequence[float], what: str, here: str) -> None:
    others = [f"island {island}" for island, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise ConfigError(f"{', '.join(others)} entered with {what} than island 0. {here}. Give the same on all islands.")


def _values_fingerprint(params: Tree, module: ModuleWeights) -> float:
    digest = hashlib.blake2b(params.digest().encode())
    for _, tensor in module.untrained_tensors():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return _fingerprint(digest.hexdigest())


def _check_rounds(rows: Sequence[Sequence[float]]) -> None:
    """Each row: whether the island has a checkpoint, and its round."""
    if any(row != rows[0] for row in rows):
        rounds = [f"round {number:g}" if saved else "no checkpoint" for saved, number in rows]
        raise CheckpointError(f"islands would resume from {', '.join(rounds)}. Load checkpoints of the same round on all of them.")


def _summary(layout: Layout) -> str:
    first = layout.pieces[0]
    return f"{len(layout.pieces)} trained tensors with {layout.numel} numbers, first {first.name} {first.shape} {first.dtype}"


def _fingerprint(text: str) -> float:
    """48 bits, which a double holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
