"""The handshake on entry: islands compare settings and models, and start from the same weights or the same round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.loop.process_groups import Topology
from atoll.loop.replica import WeightSlice
from atoll.loop.settings import LoopSettings
from atoll.loop.state_dict import LoopCheckpoint
from atoll.replica.flat_parameters import ModuleWeights


class Handshake:
    """This process's side of the handshake.

    Args:
        weights: the part of the module's weights that this process exchanges.
        thread: runs the exchanges.
    """

    def __init__(
        self,
        settings: LoopSettings,
        topology: Topology,
        module: ModuleWeights,
        weights: ModuleWeights | WeightSlice,
        thread: CommunicationThread,
    ) -> None:
        self._settings, self._topology, self._module, self._weights, self._thread = settings, topology, module, weights, thread

    def run(self, checkpoint: LoopCheckpoint | None) -> None:
        """Compares. Without a checkpoint every island then loads the weights and buffers of island 0, if any differ."""
        params, fresh = self._weights.read(), checkpoint is None
        fixed = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._module.others()] if fresh else ""
        mine = [_fingerprint(self._settings.comparable), _fingerprint(f"{_described(params.layout)} {fixed}")]
        mine += [not fresh, checkpoint.rounds if checkpoint else 0, self._values_fingerprint(params) if fresh else 0]
        rows = self._thread.call(lambda: self._topology.inter_island.all_gather_on_entry(*mine))
        _check_same_round([row[2:4] for row in rows])
        self._check_equal([row[0] for row in rows], "another algorithm or another finish", self._settings.comparable)
        self._check_equal([row[1] for row in rows], "another model or other buffers", _summary(params.layout))
        differ = any(row[4] != rows[0][4] for row in rows)
        if self._topology.intra_island is not None:  # one device that differs makes all devices of its island take part
            intra_island = self._topology.intra_island
            differ = any(row[0] for row in self._thread.call(lambda: intra_island.all_gather_numbers(differ)))
        if differ:
            self._load_from_first(params)

    def check_same_round(self, checkpoint: LoopCheckpoint) -> None:
        """For a checkpoint that is loaded inside of the block."""
        _check_same_round(self._thread.call(lambda: self._topology.inter_island.all_gather_on_entry(True, checkpoint.rounds)))

    def _check_equal(self, fingerprints: Sequence[float], what: str, here: str) -> None:
        others = [f"island {island}" for island, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
        if others:
            raise ConfigError(
                f"{', '.join(others)} entered with {what} than island 0. Island {self._topology.position.island} has {here}. Give "
                f"the same on all islands."
            )

    def _load_from_first(self, params: Tree) -> None:
        inter_island = self._topology.inter_island
        self._thread.call(lambda: inter_island.broadcast(params.flat))
        self._weights.write(params)
        with torch.no_grad():
            for _, tensor in self._module.others():
                received = tensor.clone(memory_format=torch.contiguous_format)
                data = received.view(-1).view(torch.uint8)
                self._thread.call(lambda data=data: inter_island.broadcast(data))  # type: ignore[misc]
                if not torch.equal(received, tensor):
                    tensor.copy_(received)

    def _values_fingerprint(self, params: Tree) -> float:
        digest = hashlib.blake2b(params.digest().encode())
        for _, tensor in self._module.others():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return _fingerprint(digest.hexdigest())


def _check_same_round(rows: Sequence[Sequence[float]]) -> None:
    """Each row: whether the island has a checkpoint, and its round."""
    if any(row != rows[0] for row in rows):
        rounds = [f"round {number:g}" if saved else "no checkpoint" for saved, number in rows]
        raise CheckpointError(f"islands would resume from {', '.join(rounds)}. Load checkpoints of the same round on all of them.")


def _described(layout: Layout) -> str:
    return f"{[(piece.name, piece.shape, piece.dtype) for piece in layout.pieces]}"


def _summary(layout: Layout) -> str:
    first = layout.pieces[0]
    return f"{len(layout.pieces)} trained tensors with {layout.numel} numbers, first {first.name} {first.shape} {first.dtype}"


def _fingerprint(text: str) -> float:
    """48 bits, which a double holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
