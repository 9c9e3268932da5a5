"""What goes wrong inside an island's own process: a delta that nobody should take, or bits that differ from what was told.

Nothing in the engine knows of it: an algorithm that is spoilt is an algorithm, whose peers hand on another tree, and a membership
that is spoilt finds others over a group that flips a bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Flight, Mean, Peers, Replica, Scattered, Work
from atoll.engines.elastic.commit import Finds
from atoll.engines.elastic.membership import Found
from atoll.engines.elastic.state_version import Generation
from atoll.engines.processes.transport import Group
from atoll.testing.chaos.faults import Spoil

S = TypeVar("S")
T = TypeVar("T")
HUGE = 1e6
"""How many times as long a huge delta is."""


class Spoiler:
    """Spoils what one island brings.

    Args:
        spoils: of all islands.
        island: this one's name.
        now: the round that this island is in.
        say: takes what is done.
    """

    def __init__(self, spoils: Iterable[Spoil], island: str, now: Callable[[], int], say: Callable[[str], object]) -> None:
        self._left = [spoil for spoil in spoils if spoil.island == island]
        self._now, self._say = now, say
        self.numel = 0
        """Of what is averaged, as far as is known."""

    def algorithm(self, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        return _SpoiltAlgorithm(algorithm, self)

    def membership(self, membership: Finds) -> Finds:
        return _SpoiltMembership(membership, self)

    def takes(self, *kinds: str) -> str | None:
        """What is to be spoilt now, of these kinds. It is asked for once."""
        for spoil in self._left:
            if spoil.round == self._now() and spoil.how in kinds:
                self._left.remove(spoil)
                self._say(f"chaos: {spoil.how} in round {spoil.round}")
                return spoil.how
        return None

    def spoilt(self, tree: Tree) -> Tree:
        """What this island brings instead."""
        self.numel = tree.numel
        how = self.takes("nan", "huge")
        if how == "nan":
            flat = tree.flat.clone()
            flat[0] = float("nan")
            return Tree(tree.layout, flat)
        return tree * HUGE if how == "huge" else tree


class _SpoiltAlgorithm:
    """A protocols.Algorithm whose peers hand on something else."""

    def __init__(self, algorithm: Algorithm[Any], spoiler: Spoiler) -> None:
        self._algorithm, self._spoiler = algorithm, spoiler
        self.accumulation: int = getattr(algorithm, "accumulation", 1)
        self.missed: str = getattr(algorithm, "missed", "global")

    @property
    def steps_per_round(self) -> int:
        return self._algorithm.steps_per_round

    def init(self, params: Tree, peers: Peers) -> Any:
        return self._algorithm.init(params, peers)

    async def round(self, state: Any, replica: Replica, peers: Peers) -> Any:
        return await self._algorithm.round(state, replica, _SpoiltPeers(peers, self._spoiler))


class _SpoiltPeers:
    """A protocols.Peers."""

    def __init__(self, peers: Peers, spoiler: Spoiler) -> None:
        self._peers, self._spoiler = peers, spoiler

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def size(self) -> int:
        return self._peers.size

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._peers.work(steps, batches, pieces=pieces)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        return await self._peers.mean(self._spoiler.spoilt(tree), weight, compare=compare)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        return await self._peers.reduce_scatter(tree, weight, wide=wide)

    async def all_gather(self, shard: Tree) -> Tree:
        return await self._peers.all_gather(shard)

    async def total(self, number: float) -> float:
        return await self._peers.total(number)

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> Flight[T]:
        return self._peers.background(coroutine)

    async def catch_up(self, state: S) -> S:
        return await self._peers.catch_up(state)


class _SpoiltMembership:
    """Finds others, over a group that may flip a bit."""

    def __init__(self, membership: Finds, spoiler: Spoiler) -> None:
        self._membership, self._spoiler = membership, spoiler

    def find(self, generation: Generation, failures: int) -> Found:
        return self._membership.find(generation, failures)

    def connect(self, found: Found, limit_s: float) -> Group:
        group: Any = _SpoiltGroup(self._membership.connect(found, limit_s), self._spoiler)
        return group  # type: ignore[no-any-return]

    def abort(self) -> None:
        self._membership.abort()


class _SpoiltGroup:
    """Messages of a process group, one bit of which is flipped when it is time. What is told beside them is in double precision, or
    text."""

    def __init__(self, group: Any, spoiler: Spoiler) -> None:
        self._group, self._spoiler = group, spoiler
        self._sent: dict[int, int] = {}
        """Numbers of payload, by whom they went to."""
        self._told: dict[int, int] = {}
        """Messages in double precision."""

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._group.recv(tensors, rank, tag)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        if tensor.dtype == torch.float64:
            return self._group.send([self._as_told(tensor, rank)], rank, tag)
        if tensor.dtype == torch.uint8 or not tensor.numel():
            return self._group.send(tensors, rank, tag)
        sent = self._sent[rank] = self._sent.get(rank, 0) + tensor.numel()
        # First everybody is sent its own slice of the delta; whatever goes there beyond that is of the mean.
        late = " late" if sent > -(-self._spoiler.numel // self.size()) else ""
        how = self._spoiler.takes(f"damage{late}", f"die{late}")
        if how == f"die{late}":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._group.send([_flipped(tensor)] if how else tensors, rank, tag)

    def _as_told(self, tensor: Tensor, rank: int) -> Tensor:
        """First everybody is told which state this island holds, and then, if it has trained, what its delta weighs."""
        told = self._told[rank] = self._told.get(rank, 0) + 1
        weighs = told == 2 and tensor.numel() > 1 and bool(tensor[0])
        return _flipped(tensor, bit=51) if weighs and self._spoiler.takes("damage told") else tensor


def _flipped(tensor: Tensor, bit: int = 0) -> Tensor:
    """A copy with one bit of its first number flipped.

    >>> float(_flipped(torch.tensor([1.0]))[0] - 1.0) == 2.0**-23
    True
    >>> float(_flipped(torch.tensor([64.0], dtype=torch.float64), bit=51))
    96.0
    """
    copy = tensor.clone()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    copy.view(-1).view(width)[0] ^= 1 << bit
    return copy
