"""Faults inside an island's process: unusable deltas, and messages whose bits differ from their checksums.

The engine does not know of them: the corrupter wraps the algorithm, whose peers then average another tree, and the membership,
whose process group then flips a bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Flight, Mean, Peers, Replica, Scattered, Work
from atoll.engines.elastic.commit import QuorumSource
from atoll.engines.elastic.island import Interpose
from atoll.engines.elastic.membership import Quorum
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.processes.transport import Group
from atoll.testing.chaos.faults import FaultScript, UpdateFault

S = TypeVar("S")
T = TypeVar("T")
HUGE = 1e6
"""Factor of a huge delta."""


class UpdateCorrupter:
    """Injects the update faults of one island.

    Args:
        faults: of all islands.
        island: name of this island.
        current_round: gives the round that this island is in.
        log: takes a line for each injected fault.
    """

    def __init__(
        self, faults: Iterable[UpdateFault], island: str, current_round: Callable[[], int], log: Callable[[str], object]
    ) -> None:
        self._pending = [fault for fault in faults if fault.island == island]
        self._current_round, self._log = current_round, log
        self.numel = 0
        """Of the last averaged tree."""

    def algorithm(self, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        return _CorruptedAlgorithm(algorithm, self)

    def membership(self, membership: QuorumSource) -> QuorumSource:
        return _CorruptedMembership(membership, self)

    def take(self, *kinds: str) -> str | None:
        """The kind of the pending fault of the current round among these kinds. Each fault is taken once."""
        for fault in self._pending:
            if fault.round == self._current_round() and fault.kind in kinds:
                self._pending.remove(fault)
                self._log(f"chaos: {fault.kind} in round {fault.round}")
                return fault.kind
        return None

    def corrupt(self, tree: Tree) -> Tree:
        """The tree that this island averages instead of its own."""
        self.numel = tree.numel
        kind = self.take("nan", "huge")
        if kind == "nan":
            flat = tree.flat.clone()
            flat[0] = float("nan")
            return Tree(tree.layout, flat)
        return tree * HUGE if kind == "huge" else tree


def interpose_update_faults(script: Path) -> Interpose:
    """Injects an island's update faults of this script into its process."""
    faults = FaultScript.read(script).update_faults

    def interpose(status: IslandStatus, log: Callable[[str], object]) -> UpdateCorrupter:
        return UpdateCorrupter(faults, status.name, lambda: status.round, log)

    return interpose


class _CorruptedAlgorithm:
    """A protocols.Algorithm with corrupted peers."""

    def __init__(self, algorithm: Algorithm[Any], corrupter: UpdateCorrupter) -> None:
        self._algorithm, self._corrupter = algorithm, corrupter
        self.accumulation: int = getattr(algorithm, "accumulation", 1)
        self.missed: str = getattr(algorithm, "missed", "global")

    @property
    def steps_per_round(self) -> int:
        return self._algorithm.steps_per_round

    def init(self, params: Tree, peers: Peers) -> Any:
        return self._algorithm.init(params, peers)

    async def round(self, state: Any, replica: Replica, peers: Peers) -> Any:
        return await self._algorithm.round(state, replica, _CorruptedPeers(peers, self._corrupter))


class _CorruptedPeers:
    """A protocols.Peers that averages a corrupted tree."""

    def __init__(self, peers: Peers, corrupter: UpdateCorrupter) -> None:
        self._peers, self._corrupter = peers, corrupter

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def size(self) -> int:
        return self._peers.size

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._peers.work(steps, batches, pieces=pieces)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        return await self._peers.mean(self._corrupter.corrupt(tree), weight, compare=compare)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        return await self._peers.reduce_scatter(tree, weight, wide=wide, wire=wire)

    async def all_gather(self, shard: Tree) -> Tree:
        return await self._peers.all_gather(shard)

    async def total(self, number: float) -> float:
        return await self._peers.total(number)

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> Flight[T]:
        return self._peers.background(coroutine)

    async def catch_up(self, state: S) -> S:
        return await self._peers.catch_up(state)


class _CorruptedMembership:
    """A membership whose process group may flip a bit."""

    def __init__(self, membership: QuorumSource, corrupter: UpdateCorrupter) -> None:
        self._membership, self._corrupter = membership, corrupter

    def form_quorum(self, version: StateVersion, failures: int) -> Quorum:
        return self._membership.form_quorum(version, failures)

    def connect(self, quorum: Quorum, limit_s: float) -> Group:
        group: Any = _CorruptedGroup(self._membership.connect(quorum, limit_s), self._corrupter)
        return group  # type: ignore[no-any-return]

    def abort(self) -> None:
        self._membership.abort()


class _CorruptedGroup:
    """A process group that flips one bit of a message when a fault is due. Payload is single or half precision; control messages
    are double precision, or text."""

    def __init__(self, group: Any, corrupter: UpdateCorrupter) -> None:
        self._group, self._corrupter = group, corrupter
        self._sent_numel: dict[int, int] = {}
        """Payload elements sent, by destination rank."""
        self._control_messages: dict[int, int] = {}
        """Double-precision messages sent, by destination rank."""

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._group.recv(tensors, rank, tag)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        if tensor.dtype == torch.float64:
            return self._group.send([self._control_message(tensor, rank)], rank, tag)
        if tensor.dtype == torch.uint8 or not tensor.numel():
            return self._group.send(tensors, rank, tag)
        sent = self._sent_numel[rank] = self._sent_numel.get(rank, 0) + tensor.numel()
        # The island first sends each rank its slice of the delta; what it sends to that rank beyond the slice is the mean.
        phase = "mean" if sent > -(-self._corrupter.numel // self.size()) else "delta"
        kind = self._corrupter.take(f"corrupt_{phase}", f"kill_in_{phase}")
        if kind == f"kill_in_{phase}":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._group.send([_flip_bit(tensor)] if kind else tensors, rank, tag)

    def _control_message(self, tensor: Tensor, rank: int) -> Tensor:
        """The first message names the state this island holds; the second, if it has trained, the weight of its delta."""
        count = self._control_messages[rank] = self._control_messages.get(rank, 0) + 1
        is_weight = count == 2 and tensor.numel() > 1 and bool(tensor[0])
        return _flip_bit(tensor, bit=51) if is_weight and self._corrupter.take("corrupt_weight") else tensor


def _flip_bit(tensor: Tensor, bit: int = 0) -> Tensor:
    """A copy with one bit of its first number flipped.

    >>> float(_flip_bit(torch.tensor([1.0]))[0] - 1.0) == 2.0**-23
    True
    >>> float(_flip_bit(torch.tensor([64.0], dtype=torch.float64), bit=51))
    96.0
    """
    copy = tensor.clone()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    copy.view(-1).view(width)[0] ^= 1 << bit
    return copy
