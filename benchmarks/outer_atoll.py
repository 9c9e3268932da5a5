"""An outer step of atoll's DiLoCo between processes, with a timer around each part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Weigh, Work
from atoll.core.pytree import recycle
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.replicated_state import donated, owned
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.sgd import Nesterov
from atoll.replica.local_replica import LocalReplica
from atoll.testing.simulated_runs import DecoderWorkload

T = TypeVar("T")
READ, EXCHANGE, UPDATE, LOAD, REST = (
    "weights are read",
    "exchange of the mean",
    "outer rule",
    "weights are loaded",
    "delta, and the rest",
)
PARTS = (READ, REST, EXCHANGE, UPDATE, LOAD)
LIMIT_S = 120.0


class Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, time_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time_s

    def around(self, name: str, do: Callable[[], T]) -> T:
        start_s = time.perf_counter()
        result = do()
        self.add(name, time.perf_counter() - start_s)
        return result


class Idle:
    """A replica that takes no steps, so that a round is its outer step and nothing else. A protocols.Replica."""

    def __init__(self, replica: LocalReplica, clock: Clock) -> None:
        self._replica, self._clock = replica, clock

    def load(self, params: Tree) -> None:
        self._clock.around(LOAD, lambda: self._replica.load(params))

    def params(self) -> Tree:
        return self._clock.around(READ, self._replica.borrowed)

    async def train(self, steps: int, work: Work) -> None:
        pass

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        raise NotImplementedError("DiLoCo asks for no gradients")


@dataclass(frozen=True)
class TimedRule:
    """A rule with a clock around it. A protocols.Rule."""

    rule: Nesterov = Nesterov(lr=0.7, momentum=0.9)
    clock: Clock = field(default_factory=Clock)

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
        return self.clock.around(UPDATE, lambda: self.rule.update(params, gradient, state))


class OuterStep:
    """Rounds of DiLoCo without inner steps, in one of several processes."""

    def __init__(self, group: dist.ProcessGroup, model: GPT, vocab_size: int) -> None:
        workload = DecoderWorkload.of(model, vocab_size=vocab_size)
        params = Tree.of(workload.module())
        self._clock, self._line = Clock(), CommunicationThread()
        wire_group = dist.new_group(backend="gloo")
        assert isinstance(wire_group, dist.ProcessGroup)
        work = Work(shard=0, start=0, schedule=0, examples=1)
        self._peers = ProcessPeers(
            GroupCollectives(wire_group, timeout_s=LIMIT_S),
            self._line,
            lambda steps, batches, pieces: work,
            params.layout,
            on_exchange=lambda exchange: self._clock.add(EXCHANGE, exchange.end_s - exchange.arrived_s),
            on_similarity=lambda similarity: None,  # the engine compares deltas too, and reads no State twice
        )
        self._replica = Idle(LocalReplica(workload, optimizer=AdamW()), self._clock)
        self._algorithm = DiLoCo(inner_steps=1, outer=TimedRule(clock=self._clock))
        self._state = self._algorithm.init(params, self._peers)

    def round(self) -> None:
        """Reuse the buffers of the State that the engine has released."""
        before, start_s = self._state, time.perf_counter()
        round = self._algorithm.round(donated(before, shared=True), self._replica, self._peers)
        self._state = owned(self._line.run(round))
        recycle([before, *self._peers.results], [self._state])
        self._peers.results.clear()
        whole_s = time.perf_counter() - start_s
        self._clock.add(REST, whole_s - sum(self._clock.seconds.values()))

    def take_parts(self) -> dict[str, float]:
        """Seconds of each part since they were last asked for."""
        taken, self._clock.seconds = self._clock.seconds, {}
        return taken

    def close(self) -> None:
        self._line.close()
