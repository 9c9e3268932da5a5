"""Fakes of the protocols, to drive one round of an algorithm by hand.

>>> import torch
>>> from atoll.algorithms.diloco import DiLoCo
>>> peers = ScriptedPeers()
>>> state = one_round(DiLoCo(inner_steps=2), FakeReplica(moves_by=-0.5), peers, params=Tree.of({"w": torch.zeros(3)}))
>>> peers.sent[0]["w"]                                                   # two steps of -0.5; the delta is old minus new
tensor([1., 1., 1.])
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Encoding, Gradient, Mean, Scattered, Task, Weigh, Work
from atoll.engines.chunk_reduction import encoded_mean
from atoll.engines.simulator.collectives import ordered_sum, weighted_mean

S = TypeVar("S")
T = TypeVar("T")


class FakeReplica:
    """A model in which each step reads `tokens` and adds `moves_by` to every weight, and every gradient is -`moves_by`."""

    def __init__(self, moves_by: float = -1.0, tokens: int = 1) -> None:
        self.moves_by, self.tokens = moves_by, tokens  # of each step
        self.trained: list[tuple[int, Work]] = []
        self._params: Tree | None = None

    def load(self, params: Tree) -> None:
        held = self._params
        part = held is not None and held.layout.offsets.keys() >= params.layout.offsets.keys() and held.numel > params.numel
        self._params = held.overlaid(params) if held is not None and part else params.copy()

    def params(self) -> Tree:
        assert self._params is not None, "load() comes first"
        return self._params.copy()

    def moments(self) -> dict[str, Tree]:
        return {}

    def load_moments(self, moments: Mapping[str, Tree]) -> None:
        assert not moments, "a FakeReplica has no moments"

    async def train(self, steps: int, work: Work) -> int:
        self.trained.append((steps, work))
        self._params = self.params() + steps * self.moves_by
        return steps * self.tokens

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        if at is not None:
            self.load(at)
        self.trained.append((1, work))
        gradient = self.params().zeros() - self.moves_by
        return Gradient(gradient + onto.sum, 1 + onto.weight, 1 + onto.tokens) if onto else Gradient(gradient, 1.0, 1)


class ScriptedPeers:
    """Peers with scripted contributions: each of `others` is what one peer contributes to every exchange."""

    rank = 0

    def __init__(self, *others: Tree, heard: bool = True, weights: Sequence[float] | None = None, newest: Any = None) -> None:
        self.size, self.examples = 1 + len(others), 1
        self.sent: list[Tree] = []
        self.weights: list[float] = []
        self._others = others
        self._their_weights = list(weights) if weights is not None else [1.0] * len(others)
        self._heard = heard
        self._newest = newest
        self._steps = self._batches = 0

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        work = Work(shard=0, start=self._batches, schedule=self._steps, examples=self.examples, pieces=pieces)
        self._steps += steps
        self._batches += steps if batches is None else batches
        return work

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        self.sent.append(tree.claim())
        self.weights.append(weight)
        others = [one.part(self.sent[-1].layout) for one in self._others]
        trees, weights = [self.sent[-1], *others], [weight, *self._their_weights]
        if not self._heard:
            trees, weights = trees[1:], weights[1:]
        total = sum(weights)
        if encoding is not None and total:
            value, unsent = encoded_mean(trees, weights, [encoding] * len(trees))
            return Mean(value, total, self._heard, True, unsent[0] if self._heard else None)
        return Mean(weighted_mean(trees, weights) if total else self.sent[-1].zeros(), total, self._heard)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        self.sent.append(tree.claim(wire))
        self.weights.append(weight)
        trees = [self.sent[-1], *self._others]
        total = ordered_sum([tree.wide() if wide else tree for tree in trees], [1.0] * self.size)
        finite = all(tree.is_finite() for tree in trees)
        return Scattered(total.shard(self.rank, self.size), weight + sum(self._their_weights), finite)

    async def total(self, number: float) -> float:
        return number

    async def all_gather(self, shard: Tree) -> Tree:
        rest = [other.shard(rank, self.size) for rank, other in enumerate(self._others, 1)]
        return Tree.join([shard, *rest])

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> FinishedExchange[T]:
        return FinishedExchange(drive(coroutine))

    async def catch_up(self, state: S) -> S:
        if self._newest is None or not self._heard:
            return state
        return replace(state, **self._newest)  # type: ignore[type-var]


class FinishedExchange(Generic[T]):
    """A background exchange that has finished."""

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, Any, T]:
        return self._result
        yield


class ScriptedHub:
    """A hub that gives every worker the same task, and stores what workers push."""

    def __init__(self, params: Tree, steps: int = 1) -> None:
        self.pushed: list[Tree] = []
        self._task = Task(params, steps, Work(shard=0, start=0, schedule=0, examples=1))

    async def pull(self) -> Task:
        return self._task

    async def push(self, delta: Tree) -> None:
        self.pushed.append(delta.copy())


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over fakes, which never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the coroutine waits for something that the fakes do not provide")


def one_round(algorithm: Algorithm[S], replica: FakeReplica, peers: ScriptedPeers, *, params: Tree, state: S | None = None) -> S:
    """Run one round from `state`, or from the initial State, with a replica that holds `params`."""
    replica.load(params)
    return drive(algorithm.round(algorithm.init(params, peers) if state is None else state, replica, peers))
