"""The seams of atoll, on one page.

A **rule** turns weights and a gradient into new weights: pure mathematics over Trees.
An **algorithm** says what one island does in one round. It is handed a **replica** (this island's model, which can train) and
**peers** (the other islands, with which it exchanges), and it `await`s wherever time passes or bytes move, and nowhere else.
An **asynchronous algorithm** has no peers: its workers pull weights from a **hub** and push what they learnt, each at its own pace.
An **engine** supplies replica, peers or hub, and owns the clock. A **workload** is what is trained; a **sink** takes what is
reported.

Implementations are final. `atoll.testing` ships the checks that each of them must pass.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.events import Event
from atoll.core.flat_tree import Tree

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# ---------------------------------------------------------------------------------------------------------------- rules


class Rule(Protocol):
    """An update rule: what `torch.optim` does, as a value. `update` is pure and returns the next weights and state.

    A rule that reads its own learning rate from a schedule counts its updates in its state.
    """

    def init(self, params: Tree) -> Any: ...

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]: ...


# ----------------------------------------------------------------------------------------------------------- algorithms


class Owner(Enum):
    """Whose a field of an algorithm's State is. It decides how the field is checked, saved and sent to a joiner."""

    SHARED = "shared"  # the same bits on every island: digested, saved once, sent to a joiner
    SHARDED = "sharded"  # a slice by rank: re-cut when the number of islands changes
    OWN = "own"  # this island's alone: saved per island, at its default for a joiner


def shared(*, donated: bool = False) -> Any:
    """Declares a State field that has the same bits on every island.

    `donated` says that the update of a round replaces the field. An engine that will never have to repeat the round then lets the
    update compute in the field's buffers.
    """
    return field(metadata={"owner": Owner.SHARED, "donated": donated})


def sharded(*, donated: bool = False) -> Any:
    """Declares a State field that holds this rank's slice of something. `donated`: see `shared`."""
    return field(metadata={"owner": Owner.SHARDED, "donated": donated})


def own(default: Any = None, *, donated: bool = False) -> Any:
    """Declares a State field that belongs to this island alone; a joiner starts with `default`. `donated`: see `shared`."""
    return field(default=default, metadata={"owner": Owner.OWN, "donated": donated})


def fields_owned(state: Any, owner: Owner) -> dict[str, Any]:
    """The fields of a State that were declared with this owner, by name."""
    assert is_dataclass(state), f"a State is a frozen dataclass, not {type(state).__name__}"
    undeclared = [f.name for f in fields(state) if "owner" not in f.metadata]
    assert not undeclared, f"{type(state).__name__}.{undeclared} must be declared shared(), sharded() or own()"
    return {f.name: getattr(state, f.name) for f in fields(state) if f.metadata["owner"] is owner}


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work for a replica, which keeps no data position of its own.

    Attributes:
        shard: which shard of the data to read.
        start: position in the shard, in batches, or in pieces where batches are cut.
        schedule: position on the learning-rate schedule, in inner steps.
        examples: how many examples the shard holds in all; the weight of a delta where islands differ in data.
        pieces: into how many each batch is cut; `start` counts these.
    """

    shard: int
    start: int
    schedule: int
    examples: int
    pieces: int = 1


class Gradient(NamedTuple):
    """Gradients added up; divide by `weight` for the mean.

    Attributes:
        sum: each batch's mean gradient times its weight.
        weight: of all of them: how many batches (or pieces of batches) they are, or how many tokens these have.
        tokens: that were read for it.
    """

    sum: Tree
    weight: float
    tokens: int

    def mean(self) -> Tree:
        """The mean gradient. It is computed in the buffer of the sum, which can then no longer be read."""
        return self.sum.claim().div_(self.weight or 1.0)


Weigh = Literal["batches", "tokens"]


class Replica(Protocol):
    """This island's copy of the model, with its inner optimizer. Ordinary, fast PyTorch lives behind this door."""

    def load(self, params: Tree) -> None:
        """Take these weights. The inner optimizer's state stays as it is."""

    def params(self) -> Tree:
        """The present weights, borrowed: they can be read until the replica computes or loads again. What a round returns in its
        State is copied by the engine."""

    async def train(self, steps: int, work: Work) -> None:
        """Take that many optimizer steps on consecutive batches of `work`."""

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        """The gradient of the batch, or piece of one, that `work` begins with. No optimizer is involved.

        Args:
            work: what to read.
            at: weights to load first; none: those that the replica holds.
            onto: gradients to add it to. They are donated: the sum lies in their buffer.
            weigh: whether each batch weighs the same, or each token.
            wide: add up in single precision where the model has half.
        """


class Mean(NamedTuple):
    """What an exchange brought.

    Attributes:
        value: the weighted mean of what arrived. Every island that was heard has the same bits, and may have the same object: read
            it.
        weight: the sum of the weights that arrived; 0 means that nothing did, and `value` is zero.
        heard: whether this island took part. If not, the others went on without it and it must not use `value`.
        finite: whether every island's tree was.
    """

    value: Tree
    weight: float
    heard: bool
    finite: bool = True


class Scattered(NamedTuple):
    """What a reduce-scatter brought.

    Attributes:
        value: this rank's slice of the sum, borrowed from the buffer that was exchanged. A sharded step writes the new weights
            over it, for an all-gather to collect.
        weight: the sum of the weights.
        finite: whether every island's tree was. If not, no island may use its slice: it may look finite where another's is not.
    """

    value: Tree
    weight: float
    finite: bool


class PendingExchange(Protocol[T_co]):
    """A coroutine that goes on in the background. Await it for its result."""

    def done(self) -> bool:
        """Whether it is over by now."""

    def __await__(self) -> Generator[Any, Any, T_co]: ...


class Peers(Protocol):
    """The islands of this round, as equals. Calls match across islands in program order, and sums are in rank order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        """The next piece of work for this island: `steps` positions of the schedule and `batches` (else `steps`) of the data. Where
        batches are cut into pieces, `batches` counts these."""

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        """The weighted mean of every island's tree, which is donated. `compare` has the engine report norms and cosines of the
        contributions."""

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        """This rank's slice of the sum of every island's tree, and the sum of their weights, such as numbers of batches.

        Trees are added as they are: a weight is sent, not multiplied. The tree is donated: the slice lies in its buffer, and so
        does what an all-gather makes of it next.

        Args:
            tree: what this island contributes.
            weight: of it.
            wide: sum in single precision what travels in half.
            wire: the precision in which the tree travels; None: its own.
        """

    async def all_gather(self, shard: Tree) -> Tree:
        """The whole tree of which every island holds a shard. All islands may have the same object: read it."""

    async def total(self, number: float) -> float:
        """The sum of every island's number, such as the square of a norm of which each holds a part."""

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> PendingExchange[T]:
        """Go on with a coroutine that exchanges, while this island computes. It runs up to its first exchange at once. An
        island has one background exchange at a time, and makes no other exchange until it has awaited it."""

    async def catch_up(self, state: S) -> S:
        """Bring the shared fields up to date, if this island missed an exchange and can be reached now; else `state` itself."""


class Algorithm(Protocol[S]):
    """What one island does. All that it remembers between rounds is in its State, a frozen dataclass whose fields are
    declared `shared()`, `sharded()` or `own()` and which has a field `params`, the global weights: shared, or sharded.

    If the State has a shared field `steps`, that is how far the run has come: it ends when the `whole_steps` of it reach the steps
    it was given. Without one, every round counts `steps_per_round`.

    An algorithm is a frozen dataclass. Fields called `optimizer` and `clip_norm` that are None are filled in from the Run, and
    schedules that were left open are made as long as it."""

    @property
    def steps_per_round(self) -> int:
        """Inner steps that each island takes in one round."""

    def init(self, params: Tree, peers: Peers) -> S:
        """The State before the first round. Sends nothing."""

    async def round(self, state: S, replica: Replica, peers: Peers) -> S:
        """One round. `state` is not changed."""


def whole_steps(steps: float) -> int:
    """How many steps are over, of a number that was added up from fractions.

    >>> whole_steps(12 + sum([1 / 3] * 3) - 1e-15)
    13
    """
    return math.floor(steps + 1e-9)


@runtime_checkable
class HoldsWeights(Protocol):
    """What an algorithm with sharded weights has besides: its replicas keep the whole of them from one round to the next, so that
    they need not be gathered anew. Each round leaves them there; an engine puts them there for a joiner, after a round that
    failed, and when a run is resumed."""

    def held(self, state: Any) -> Tree:
        """This rank's slice of the weights that the replica holds between two rounds."""


@runtime_checkable
class Rebases(Protocol[S]):
    """What an algorithm has besides that can train the devices of one island."""

    def rebase(self, state: S, params: Tree, peers: Peers) -> S:
        """Go on from these weights, which the islands agreed on. Moments stay.

        Args:
            state: of this rank.
            params: the whole; this rank's slice alone, if the algorithm is one that `HoldsWeights`. Nothing of it is kept.
            peers: the devices of the island.
        """


# ---------------------------------------------------------------------------------------------- asynchronous algorithms


class Task(NamedTuple):
    """What a hub dispatches a worker with: the present weights, and how many steps to take on what."""

    params: Tree
    steps: int
    work: Work


class Arrival(NamedTuple):
    """A worker's update, as the hub sees it.

    Attributes:
        delta: the weights it was dispatched with minus those it reached.
        dispatched: the weights it was dispatched with.
        staleness: how many updates the hub has applied since.
        workers: how many there are now.
    """

    delta: Tree
    dispatched: Tree
    staleness: int
    workers: int


class Hub(Protocol):
    """The server, seen from one worker in one round."""

    async def pull(self) -> Task:
        """The present weights, and work."""

    async def push(self, delta: Tree) -> None:
        """Send what the round brought: old weights minus new. It is donated."""


class Correction(Protocol):
    """What a hub does to an update because it is late, before its rule sees it. Pure."""

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The delta to apply to `params`, the hub's present weights, times `weight`: the arrival's own Tree or a new one; none to
        leave it out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a hub dispatches workers.

    Attributes:
        steps: of a round, for the fastest worker where `pace` is not even, else for all.
        grace_s: how long the hub waits, from the first arrival on, for others to be dispatched together with it.
        pace: even: all take the same steps; given or measured: steps in proportion to speed, which is known or observed.
        speeds: steps per second by worker, where `pace` is given; empty where the engine knows them.
        shards: how a worker's next shard is found: by how far shards lag behind their share, or by fewest visits.
        ties: who gets which of several shards that lag equally: the worker's last one if it is among them, or chance alone.
    """

    steps: int
    grace_s: float = 0.0
    pace: Literal["even", "given", "measured"] = "even"
    speeds: tuple[float, ...] = ()
    shards: Literal["deficit", "visits"] = "deficit"
    ties: Literal["last", "chance"] = "last"

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: a round needs at least 1 inner step. Use 1 to push after every step.")
        if not self.grace_s >= 0:
            raise ConfigError(
                f"grace_s={self.grace_s}: a hub can wait for 0 seconds or more. Use 0 to send every worker off at once, or inf to "
                f"wait for all of them."
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(
                f"speeds={list(self.speeds)}: each is a positive number of steps per second. Give a worker that hardly works a "
                f"small one."
            )
        if self.speeds and self.pace != "given":
            raise ConfigError(f"speeds are given, but pace={self.pace} does not look at them. Use pace=given, or leave them out.")


@runtime_checkable
class AsyncAlgorithm(Protocol[S]):
    """What one worker does, and what the hub does with what it brings. All that the hub's mathematics remembers is in a State
    with a field `params`, the global weights; who is where and does what is the scheduler's, and inner optimizers stay with
    workers."""

    @property
    def plan(self) -> Plan:
        """How workers are dispatched."""

    def init(self, params: Tree) -> S:
        """The State before the first arrival."""

    async def round(self, replica: Replica, hub: Hub) -> None:
        """One worker's round."""

    def step(self, state: S, arrival: Arrival) -> S:
        """The hub's step for one arrival: pure. The same State means that the update was left out."""


# ------------------------------------------------------------------------------------------------- what is trained, and how


class Batches(Protocol):
    """A source of batches by position. It has no cursor: the same shard and position give the same batch to any reader, and several
    threads may ask at a time."""

    @property
    def num_shards(self) -> int: ...

    def examples(self, shard: int) -> int:
        """How many examples the shard holds."""

    def batch(self, shard: int, position: int) -> Any:
        """The batch at this position; shards have no end (they start again, in another order)."""

    def tokens(self, batch: Any) -> int:
        """How many tokens (or whatever is counted) a batch has."""


@runtime_checkable
class ReadsAhead(Protocol):
    """What batches have besides that can be read on a device."""

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Any]:
        """Consecutive batches, on that device, and there before they are asked for."""


class Workload(Protocol):
    """What is trained: how to make a module, what it reads, what its loss is, and how it is judged."""

    @property
    def batches(self) -> Batches: ...

    def module(self) -> torch.nn.Module:
        """A new module with its initial weights, which are the same at every call."""

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss over a batch, as a scalar."""

    def evaluate(self, module: torch.nn.Module) -> Mapping[str, float]:
        """Measures on held-out data; has at least `loss`."""


class Sink(Protocol):
    """Takes events. Engines report; algorithms are silent; nothing prints."""

    def emit(self, event: Event) -> None: ...
