"""The hub: the scheduler together with the weights that it dispatches. A parameter server without sockets and without a clock.

The hub applies an update when it is pushed, before it dispatches workers again. A refused update changes no weight: the scheduler
abandons its round and dispatches the worker again, unless the run is done.

>>> import torch
>>> from atoll.algorithms.async_local_sgd import AsyncLocalSGD
>>> from atoll.optim.sgd import SGD
>>> weights = Tree.of({"w": torch.ones(2)})
>>> hub = AsyncHub(AsyncLocalSGD(inner_steps=3, outer=SGD(lr=1.0)), weights, examples=[10], updates=6, draw=lambda round: 0.0)
>>> [first] = hub.join_all({0: None}, now_s=0.0)
>>> first.steps, first.work.start
(3, 0)
>>> applied, closed, second = hub.push(Push(0, first.round, weights * 0.5), now_s=1.5, next_s=None)
>>> hub.params["w"], second.work.start
(tensor([0.5000, 0.5000]), 3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Decision, Dispatch, Scheduler
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import WeightLeases
from atoll.core.protocols import Arrival, AsyncAlgorithm, Task
from atoll.engines.hub_encoding import decode_weights, encode_weights
from atoll.optim.in_place import HubStep


class Push(NamedTuple):
    """A worker's update: how far it moved in which round, and how many seconds it computed, where that is known."""

    worker: int
    round: int
    delta: Tree
    seconds: float | None = None


class Applied(NamedTuple):
    """The hub accepted an update. `counted` is false if the algorithm left it out as too stale. `moved` is false if the weights
    did not change, as with a rule that buffers several updates."""

    dispatch: Dispatch
    window: int
    time_s: float
    version: int
    staleness: int
    counted: bool
    moved: bool
    norm: float


class Refusal(NamedTuple):
    """The hub refused an update. `known` is whether the worker was in that round, so that the hub dispatched it again."""

    worker: int
    round: int
    time_s: float
    reason: str
    known: bool


Outcome = Applied | Refusal | Dispatch | ClosedWindow | AbandonedRound


class AsyncHub:
    """A `Scheduler` with the weights that it dispatches, which the algorithm steps. The initial weights are donated: their buffer
    returns to the pool when no worker reads them any more."""

    def __init__(
        self, algorithm: AsyncAlgorithm[Any], params: Tree, *, examples: Sequence[int], updates: int, draw: Callable[[int], float]
    ) -> None:
        self.algorithm = algorithm
        self.state = algorithm.init(params)
        self._step = HubStep(algorithm, self.state)
        self.scheduler = Scheduler(algorithm.plan, examples, updates, draw)
        self.version = 0  # updates applied so far
        self._dispatched = WeightLeases()
        """Of each worker in a round, the weights it was dispatched with. With a codec it keeps them until its next round."""
        self._codec = algorithm.plan.codec
        self.encoded: dict[int, Tensor] = {}
        """What a worker is sent to have the weights of its round from those of its last one. Others are sent them whole."""

    @property
    def params(self) -> Tree:
        params: Tree = self.state.params
        return params

    @property
    def done(self) -> bool:
        """Whether the run has reached its local updates."""
        return self.scheduler.done

    def task(self, dispatch: Dispatch) -> Task:
        """What a dispatched worker receives."""
        return Task(self._dispatched.leased[dispatch.worker], dispatch.steps, dispatch.work)

    def task_bytes(self, worker: int) -> int:
        """Bytes of the weights that a dispatched worker receives, as they travel."""
        return self.encoded[worker].nbytes if worker in self.encoded else self.params.nbytes

    def update_bytes(self, *, encoded: bool = True) -> int:
        """Bytes of an update as it travels. One that is not finite is not encoded."""
        return self.params.nbytes if self._codec is None or not encoded else self._codec.nbytes(self.params.numel)

    # ------------------------------------------------------------------------------------------------------------- events

    def join_all(self, speeds: Mapping[int, float | None], now_s: float) -> list[Outcome]:
        """Workers join, with their speeds in steps per second where the driver knows them. The hub dispatches them from the present
        weights, whether a window is open or not."""
        return self._lease_weights(self.scheduler.join_all(speeds, now_s, self.version))

    def leave(self, worker: int, now_s: float, next_s: float | None = None) -> list[Outcome]:
        """A worker leaves, or has died."""
        decisions = self.scheduler.leave(worker, now_s, self.version, next_s)
        self._dispatched.end(worker, self.state)
        self.encoded.pop(worker, None)
        return self._lease_weights(decisions)

    def give_up(self, worker: int, now_s: float) -> list[Outcome]:
        """A worker's update was lost: its round is abandoned, and the worker dispatched again."""
        return self._lease_weights(self.scheduler.redispatch(worker, now_s, self.version))

    def tick(self, now_s: float, next_s: float | None = None) -> list[Outcome]:
        """Time has passed. A driver that does not know the next arrival ticks at `scheduler.deadline_s`."""
        return self._lease_weights(self.scheduler.tick(now_s, self.version, next_s))

    def push(self, push: Push, now_s: float, next_s: float | None) -> list[Outcome]:
        """A worker's update has arrived; `next_s` is when the earliest *other* worker can arrive.

        The buffer of a donated delta returns to the pool.
        """
        dispatch = self.scheduler.open_dispatch(push.worker, push.round)
        reason, norm = self._check(push, dispatch)
        if reason is not None or dispatch is None:
            again = dispatch is not None and not self.done
            refusal = Refusal(push.worker, push.round, now_s, reason or "", known=again)
            return [refusal, *(self.give_up(push.worker, now_s) if again else [])]
        before = self.tick(now_s, now_s)  # a window past its deadline dispatches its workers with the weights before this update
        staleness = self.version - dispatch.version
        arrival = Arrival(push.delta, self._dispatched.leased[push.worker], staleness, len(self.scheduler.workers))
        old = self.state
        self.state, temporary = self._step(old, arrival)
        counted, moved = self.state is not old, self.state.params is not old.params
        self.version += counted
        self._dispatched.recycle([old.params, *temporary], self.state)
        window, after = self.scheduler.arrive(push.worker, now_s, self.version, next_s, push.seconds)
        if self._codec is None:
            self._dispatched.end(push.worker, self.state)
        applied = Applied(dispatch, window, now_s, self.version, staleness, counted, moved, norm)
        return [*before, applied, *self._lease_weights(after)]

    def _check(self, push: Push, dispatch: Dispatch | None) -> tuple[str | None, float]:
        """Why the hub refuses an update, if it does, and the norm of its delta, if that could be computed."""
        if self.done:
            return "the run has reached its local updates", math.nan
        worker = self.scheduler.workers.get(push.worker)
        if worker is None:
            return f"worker {push.worker} is not one of the {len(self.scheduler.workers)} present workers", math.nan
        if dispatch is None:
            now = "waits in a window" if worker.dispatch is None else f"is in round {worker.dispatch.round}"
            return f"round {push.round} is not open: worker {push.worker} {now}. It was delivered twice, or abandoned", math.nan
        if push.delta.layout != self.params.layout:
            return f"its delta is {push.delta!r}, and the hub's weights are {self.params!r}", math.nan
        norm = push.delta.rough_norm()
        return (None if math.isfinite(norm) else f"its delta is not finite (norm {norm})"), norm

    def _lease_weights(self, decisions: Sequence[Decision]) -> list[Outcome]:
        """Leases the present weights to workers that are dispatched now."""
        for decision in decisions:
            if isinstance(decision, Dispatch):
                weights = self._weights_of(decision)
                self._dispatched.end(decision.worker, self.state)
                self._dispatched.lease(decision.worker, weights)
        return list(decisions)

    def _weights_of(self, dispatch: Dispatch) -> Tree:
        """The weights that a worker is dispatched with: the present ones, as it will decode them."""
        held = self._dispatched.leased.get(dispatch.worker)
        if self._codec is None or held is None:
            return self.params
        self.encoded[dispatch.worker] = data = encode_weights(self._codec, self.params, held, dispatch.round)
        return decode_weights(self._codec, held, data)

    # ------------------------------------------------------------------------------------------------------------- saving

    def pin_weights(self) -> list[Tree]:
        """The present weights and those leased to workers. None of their buffers is reused before `unpin_weights`."""
        pinned = list({id(tree): tree for tree in (self.params, *self._dispatched.leased.values())}.values())
        self._dispatched.pin(pinned)
        return pinned

    def unpin_weights(self, pinned: Sequence[Tree]) -> None:
        self._dispatched.unpin(pinned, self.state)

    def to_parts(self) -> dict[str, Any]:
        """All of its state: the algorithm's, the weights that workers were dispatched with (each once), and plain data."""
        names: dict[int, str] = {}  # of each version, by its Tree
        leased = [(worker, tree, names.setdefault(id(tree), f"{len(names)}")) for worker, tree in self._dispatched.leased.items()]
        return {
            "state": self.state,
            "versions": {name: tree for _, tree, name in leased},
            "encoded": {f"{worker}": data for worker, data in self.encoded.items()},
            "plain": {
                "version": self.version,
                "leased": [[worker, name] for worker, _, name in leased],
                "scheduler": self.scheduler.to_parts(),
            },
        }

    def from_parts(self, state: Any, versions: Mapping[str, Tree], encoded: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        self.state = state
        self.encoded = {int(worker): data for worker, data in encoded.items()}
        self.version = plain["version"]
        self._dispatched = WeightLeases({worker: versions[name] for worker, name in plain["leased"]})
        self.scheduler.from_parts(plain["scheduler"])
