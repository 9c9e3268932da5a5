"""The seams of atoll, on one page.

A **rule** turns weights and a gradient into new weights: pure mathematics over Trees.
An **algorithm** says what one island does in one round. It gets a **replica** (this island's model, which can train) and **peers**
(the other islands, with which it exchanges), and it `await`s wherever time passes or bytes move, and nowhere else.
An **asynchronous algorithm** has no peers: its workers pull weights from a **hub** and push updates, each at its own speed.
An **engine** supplies replica, peers or hub, and owns the clock. A **workload** is the model, its data and its loss; a **sink**
takes events.

Implementations are final. `atoll.testing` ships the checks that each of them must pass.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from atoll.core.config.type_checks import SecondsOrInfinite, check_types, shown
from atoll.core.errors import ConfigError
from atoll.core.events import Event
from atoll.core.flat_tree import Tree

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    _ProtocolMeta = ABCMeta
else:
    _ProtocolMeta = type(Protocol)


class SeesDelegated(_ProtocolMeta):
    """Lets isinstance() of a protocol find members that an object delegates with `__getattr__`, as a wrapper around an algorithm
    does. From Python 3.12 on, isinstance() alone does not, and an engine would take the wrapper for a simpler algorithm."""

    def __instancecheck__(self, instance: object) -> bool:
        members = [name for name in vars(self) if not name.startswith("_")]
        return super().__instancecheck__(instance) or (
            getattr(self, "_is_protocol", False) and all(hasattr(instance, name) for name in members)
        )


# ---------------------------------------------------------------------------------------------------------------- rules


class Rule(Protocol):
    """An update rule: what `torch.optim` does, as a value. `update` is pure and returns the next weights and state.

    A rule that reads its own learning rate from a schedule counts its updates in its state.
    """

    def init(self, params: Tree) -> Any: ...

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]: ...


# ----------------------------------------------------------------------------------------------------------- algorithms


class Owner(Enum):
    """The owner of a field of an algorithm's State: it decides how the field is checked, saved and sent to a joiner."""

    SHARED = "shared"  # the same bits on every island: digested, saved once, sent to a joiner
    SHARDED = "sharded"  # a slice by rank: re-cut when the number of islands changes
    OWN = "own"  # this island's alone: saved per island, at its default for a joiner


def shared(*, donated: bool = False) -> Any:
    """Declares a State field that has the same bits on every island.

    `donated`: a round replaces the field. An engine that never repeats a round lets the update compute in its buffers.
    """
    return field(metadata={"owner": Owner.SHARED, "donated": donated})


def sharded(*, donated: bool = False) -> Any:
    """Declares a State field that holds this rank's slice. `donated`: see `shared`."""
    return field(metadata={"owner": Owner.SHARDED, "donated": donated})


def own(default: Any = None, *, donated: bool = False, residual: bool = False) -> Any:
    """Declares a State field that belongs to this island alone; a joiner starts with `default`. `donated`: see `shared`.

    `residual`: an error buffer, what exchanges left out so far. The island keeps it when it starts again from the shared weights.
    """
    return field(default=default, metadata={"owner": Owner.OWN, "donated": donated, "residual": residual})


def fields_owned(state: Any, owner: Owner) -> dict[str, Any]:
    """The fields of a State that were declared with this owner, by name."""
    assert is_dataclass(state), f"a State is a frozen dataclass, not {type(state).__name__}"
    undeclared = [f.name for f in fields(state) if "owner" not in f.metadata]
    assert not undeclared, f"{type(state).__name__}.{undeclared} must be declared shared(), sharded() or own()"
    return {f.name: getattr(state, f.name) for f in fields(state) if f.metadata["owner"] is owner}


@dataclass(frozen=True, slots=True)
class Work:
    """Which batches a replica reads. A replica keeps no data position of its own."""

    shard: int
    start: int  # position in the shard, in batches, or in pieces where batches are cut
    schedule: int  # position on the learning-rate schedule, in inner steps
    examples: int  # in the whole shard; the weight of a delta where islands differ in data
    pieces: int = 1  # that each batch is cut into
    before: int = 0  # steps of the same round that come before

    def after(self, steps: int) -> Work:
        """The rest of the round's work after some steps."""
        return replace(self, start=self.start + steps, schedule=self.schedule + steps, before=self.before + steps)


class Gradient(NamedTuple):
    """A sum of gradients; divide by `weight` for the mean."""

    sum: Tree  # of each batch's mean gradient times its weight
    weight: float  # the number of batches, or of pieces of batches, or of their tokens
    tokens: int  # read for it

    def mean(self) -> Tree:
        """The mean gradient, in the buffer of the sum, which can then no longer be read."""
        mean = self.sum.claim()
        return mean if self.weight in (0.0, 1.0) else mean.div_(self.weight)


Weigh = Literal["batches", "tokens"]


class Replica(Protocol):
    """This island's copy of the model, with its inner optimizer. Behind this interface is ordinary, fast PyTorch."""

    def load(self, params: Tree) -> None:
        """Load these weights: the whole model, or some pieces of it. The inner optimizer's state stays as it is."""

    def params(self) -> Tree:
        """The present weights, borrowed: they can be read until the replica computes or loads again. The engine copies those that a
        round returns in its State."""

    async def train(self, steps: int, work: Work) -> int:
        """Take `steps` optimizer steps on consecutive batches of `work`. Returns the tokens of these batches, as far as the engine
        knows them."""

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        """The gradient of the first batch of `work`, or of its first piece. No optimizer is involved.

        Args:
            at: weights to load first; None: those that the replica holds.
            onto: gradients to add it to. They are donated: the sum lies in their buffer.
            weigh: whether each batch weighs the same, or each token.
            wide: add up in single precision where the model has half.
        """


@runtime_checkable
class HasMoments(Protocol, metaclass=SeesDelegated):
    """A replica whose inner optimizer's moments can be exchanged."""

    def moments(self) -> dict[str, Tree]:
        """Copies of the moments by torch's names: exp_avg and exp_avg_sq of Adam, momentum_buffer of momentum, none of plain SGD or
        before the first step. A moment may cover some of the parameters only."""

    def load_moments(self, moments: Mapping[str, Tree]) -> None:
        """Replace the moments by these, which `moments` returned."""


class Codec(Protocol):
    """A short form of fp32 values, for an exchange. `atoll.optim.codecs` has them."""

    unit: ClassVar[int]
    """Values that are encoded together. What islands encode is cut at multiples of it, so that the bits are those of the whole."""
    gathers: ClassVar[bool]
    """Whether islands gather each other's encoded values instead of reducing them slice by slice."""

    def nbytes(self, numel: int) -> int:
        """Encoded size of this many values."""

    def encode(self, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """The bytes of a flat fp32 tensor. The seed is that of stochastic rounding."""

    def decode(self, data: torch.Tensor, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The fp32 values that these bytes stand for, in `out` if it is given. Raises ValueError for bytes of another number."""


class Encoding(NamedTuple):
    """How an island's tree is encoded in one exchange."""

    codec: Codec
    seed: int  # of this island in this exchange; the same on every engine


class Mean(NamedTuple):
    """The result of a mean over islands."""

    value: Tree  # the same bits on all islands that took part, perhaps the same object: only read it
    weight: float  # the sum of the weights that arrived; at 0 nothing did, and `value` is zero
    heard: bool  # whether this island took part; if not, the others continued without it, and it must not use `value`
    finite: bool = True  # whether every island's tree was
    unsent: Tree | None = None
    """With an encoding: the residual, what the codec left out, times this island's weight. The island adds it to its next tree,
    divided by that tree's weight. None if its tree is not in the mean, and the residual of the tree before still to be added."""
    late: bool = False  # whether a quorum ended the exchange before this island came; then no other exchange of the round is its


class Scattered(NamedTuple):
    """The result of a reduce-scatter.

    `value` is this rank's slice of the sum, borrowed from the exchanged buffer. A sharded step writes the new weights over it, for
    an all-gather to collect.
    """

    value: Tree
    weight: float  # the sum of the weights
    finite: bool  # whether every island's tree was; if not, no island may use its slice, though the slice itself may be finite


class PendingExchange(Protocol[T_co]):
    """A coroutine that runs in the background. Await it for its result."""

    def done(self) -> bool:
        """Whether it has finished."""

    def __await__(self) -> Generator[Any, Any, T_co]: ...


class Peers(Protocol):
    """The islands of this round, as equals. Calls match across islands in program order, and sums are in rank order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        """The next work for this island: `steps` positions of the schedule and `batches` (else `steps`) of the data, counted in
        pieces where batches are cut."""

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        """The weighted mean of every island's tree, which is donated. With `compare` the engine reports norms and cosines.

        With an encoding, trees travel encoded. The owner of a slice decodes every island's, its own too, adds them in rank order,
        and encodes the result once, so all islands read the same bits. The owner's `unsent` has the error of this second encoding,
        times the weights of all.
        """

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        """This rank's slice of the sum of every island's tree, and the sum of their weights, such as numbers of batches.

        Weights are summed, not multiplied. The tree is donated: the slice lies in its buffer, and so does the result of the
        all-gather that follows.

        Args:
            wide: sum in single precision what is sent in half.
            wire: the precision in which the tree is sent; None: its own.
        """

    async def all_gather(self, shard: Tree) -> Tree:
        """The whole tree of which every island holds a shard. All islands may get the same object: only read it."""

    async def total(self, number: float) -> float:
        """The sum of every island's number, such as the square of a norm of which each holds a part."""

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> PendingExchange[T]:
        """Run a coroutine that exchanges while this island computes. It runs up to its first exchange at once. Several may be under
        way: they share the link one after the other, in the order in which they were started. Until all of them are over, an island
        exchanges in the background only."""

    async def catch_up(self, state: S) -> S:
        """Fetch the shared fields, if this island missed an exchange and can be reached now; else `state` itself."""


class Algorithm(Protocol[S]):
    """What one island does. Its memory between rounds is its State, a frozen dataclass whose fields are declared `shared()`,
    `sharded()` or `own()`. The field `params` is the global weights, shared or sharded.

    If the State has a shared field `steps`, the run ends when its `whole_steps` reach the Run's steps. Without one, every round
    counts `steps_per_round`.

    An algorithm is a frozen dataclass. The engine fills in fields `optimizer` and `clip_norm` that are None from the Run, and gives
    schedules without a length the Run's."""

    @property
    def steps_per_round(self) -> int:
        """Inner steps that each island takes in one round."""

    def init(self, params: Tree, peers: Peers) -> S:
        """The State before the first round. Sends nothing."""

    async def round(self, state: S, replica: Replica, peers: Peers) -> S:
        """One round. `state` is not changed."""


def whole_steps(steps: float) -> int:
    """The whole steps in a sum of fractions.

    >>> whole_steps(12 + sum([1 / 3] * 3) - 1e-15)
    13
    """
    return math.floor(steps + 1e-9)


@runtime_checkable
class HoldsWeights(Protocol, metaclass=SeesDelegated):
    """An algorithm with sharded weights whose replicas keep the whole weights between rounds, so that no round gathers them anew.
    Each round leaves them in the replica; an engine loads them for a joiner, after a failed round, and when a run is resumed."""

    def held(self, state: Any) -> Tree:
        """This rank's slice of the weights that the replica holds between two rounds."""


@runtime_checkable
class Rebases(Protocol[S], metaclass=SeesDelegated):
    """An algorithm that can also train the devices of one island."""

    def rebase(self, state: S, params: Tree, peers: Peers) -> S:
        """The state with these weights, which the islands agreed on. Moments stay. `peers` are the devices of the island.

        `params` are the whole weights, or this rank's slice if the algorithm `HoldsWeights`. Their buffer is not kept.
        """


class Fragmented(Protocol[S]):
    """An algorithm whose round has several means, each of which advances the shared fields by itself. An elastic run commits each
    of them."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The steps of a round after which the islands send, in order."""

    def agreed(self, state: S, number: int, mean: Mean) -> S:
        """The state after the mean of this number in a round, which changes no other pieces of `params` than those of the mean.
        `state` is not changed, but the engine may donate its `params`: then the mean's pieces alone are written."""


# ---------------------------------------------------------------------------------------------- asynchronous algorithms


class Task(NamedTuple):
    """What a hub dispatches a worker with: the present weights, and the number of steps to take on which batches."""

    params: Tree
    steps: int
    work: Work


class Arrival(NamedTuple):
    """A worker's update, as the hub sees it."""

    delta: Tree  # the weights it was dispatched with minus those it reached
    dispatched: Tree  # the weights it was dispatched with
    staleness: int  # updates that the hub has applied since
    workers: int  # present now


class Hub(Protocol):
    """The server, seen from one worker in one round. If the plan has a codec, pulls and pushes travel encoded."""

    async def pull(self) -> Task:
        """The present weights, as the worker decodes them, and work."""

    async def push(self, delta: Tree) -> None:
        """Send the round's update: old weights minus new. It is donated. With a codec, what it left out of this worker's earlier
        updates is added first."""


class Correction(Protocol):
    """How a hub corrects a stale update before its rule applies it. Pure."""

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The delta to apply to `params`, the hub's present weights, times `weight`: the arrival's own Tree or a new one; None
        leaves the update out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a hub dispatches workers. `AsyncLocalSGD` has the same settings, and describes them."""

    steps: int  # of a round, for the fastest worker where `pace` is not even, else for all
    grace_s: SecondsOrInfinite = 0.0
    pace: Literal["even", "given", "measured"] = "even"
    speeds: tuple[float, ...] = ()
    shards: Literal["deficit", "visits"] = "deficit"
    ties: Literal["last", "chance"] = "last"
    codec: Codec | None = None  # of pulls and pushes; None: fp32
    feedback: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps < 1:
            raise ConfigError(f"inner_steps={self.steps}: a round needs at least 1 inner step. Use 1 to push after every step.")
        if not self.grace_s >= 0:
            raise ConfigError(
                f"grace_s={self.grace_s}: a hub can wait for 0 seconds or more. Use 0 to dispatch every worker at once, or inf to "
                f"wait for all of them."
            )
        if not all(1e-9 <= speed <= 1e9 for speed in self.speeds):
            raise ConfigError(
                f"speeds={shown(list(self.speeds))}: each is a positive number of steps per second, between 1e-9 and 1e9. Give a "
                f"very slow worker a small one."
            )
        if self.speeds and self.pace != "given":
            raise ConfigError(f"speeds are given, but pace={self.pace} does not use them. Use pace=given, or leave them out.")


@runtime_checkable
class AsyncAlgorithm(Protocol[S], metaclass=SeesDelegated):
    """What one worker does in a round, and what the hub does with its update. The memory of the hub's mathematics is a State with a
    field `params`, the global weights. The scheduler knows the workers, and inner optimizers stay with workers."""

    @property
    def plan(self) -> Plan:
        """How workers are dispatched."""

    def init(self, params: Tree) -> S:
        """The State before the first arrival."""

    async def round(self, replica: Replica, hub: Hub) -> None:
        """One worker's round."""

    def step(self, state: S, arrival: Arrival) -> S:
        """The hub's step for one arrival: pure. It returns the same State to leave an update out."""


# ------------------------------------------------------------------------------------------------- what is trained, and how


class Batches(Protocol):
    """A source of batches by position, without a cursor: a shard and a position give the same batch to any reader. Thread-safe."""

    @property
    def num_shards(self) -> int: ...

    def examples(self, shard: int) -> int:
        """In the shard."""

    def batch(self, shard: int, position: int) -> Any:
        """The batch at this position. A shard has no end: it starts again, in another order."""

    def tokens(self, batch: Any) -> int:
        """In the batch; for other data than text, whatever is counted."""


@runtime_checkable
class ReadsAhead(Protocol, metaclass=SeesDelegated):
    """Batches that can be prefetched to a device."""

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Any]:
        """Consecutive batches, copied to that device in advance."""


class Workload(Protocol):
    """What is trained: a module, its batches, its loss and its evaluation."""

    @property
    def batches(self) -> Batches: ...

    def module(self) -> torch.nn.Module:
        """A new module with initial weights, the same at every call."""

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss over a batch, as a scalar."""

    def evaluate(self, module: torch.nn.Module) -> Mapping[str, float]:
        """Measures on held-out data; has at least `loss`."""


class Sink(Protocol):
    """Takes events. Engines report, algorithms do not, and nothing prints."""

    def emit(self, event: Event) -> None: ...
