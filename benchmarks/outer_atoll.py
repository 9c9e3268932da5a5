"""An outer step of atoll's DiLoCo between processes, with timers around its parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Work
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.shared_and_sharded_state import donated, owned
from atoll.engines.training_setup import TrainingOnlyReplica
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.sgd import Nesterov
from atoll.replica.local_replica import LocalReplica
from decoder_workload import DecoderWorkload
from progress import Stopwatch

READ, EXCHANGE, UPDATE, LOAD, REST = (
    "weights are read",
    "exchange of the mean",
    "outer rule",
    "weights are loaded",
    "delta, and the rest",
)
PARTS = (READ, REST, EXCHANGE, UPDATE, LOAD)
LIMIT_S = 120.0


class Idle(TrainingOnlyReplica):
    """A replica that takes no steps, so that a round is only its outer step. A protocols.Replica."""

    def __init__(self, replica: LocalReplica, timer: Stopwatch) -> None:
        self._replica, self._timer = replica, timer

    def load(self, params: Tree) -> None:
        self._timer.around(LOAD, lambda: self._replica.load(params))

    def params(self) -> Tree:
        return self._timer.around(READ, self._replica.borrowed)

    async def train(self, steps: int, work: Work) -> int:
        return 0


@dataclass(frozen=True)
class TimedRule:
    """A rule whose updates are timed. A protocols.Rule."""

    rule: Nesterov = Nesterov(lr=0.7, momentum=0.9)
    timer: Stopwatch = field(default_factory=Stopwatch)

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
        return self.timer.around(UPDATE, lambda: self.rule.update(params, gradient, state))


class OuterStep:
    """Rounds of DiLoCo without inner steps, in one of several processes."""

    def __init__(self, group: dist.ProcessGroup, model: GPT, vocab_size: int) -> None:
        workload = DecoderWorkload.of(model, vocab_size=vocab_size)
        params = Tree.of(workload.module())
        self._timer, self._thread = Stopwatch(), CommunicationThread()
        group_of_thread = dist.new_group(backend="gloo")
        assert isinstance(group_of_thread, dist.ProcessGroup)
        work = Work(shard=0, start=0, schedule=0, examples=1)
        self._peers = ProcessPeers(
            GroupCollectives(group_of_thread, timeout_s=LIMIT_S),
            self._thread,
            lambda steps, batches, pieces: work,
            params.layout,
            on_exchange=lambda exchange: self._timer.add(EXCHANGE, exchange.end_s - exchange.arrived_s),
            on_similarity=lambda similarity: None,  # the engine compares deltas, too
        )
        self._replica = Idle(LocalReplica(workload, optimizer=AdamW()), self._timer)
        self._algorithm = DiLoCo(inner_steps=1, outer=TimedRule(timer=self._timer))
        self._state = self._algorithm.init(params, self._peers)

    def round(self) -> None:
        """One outer step, which reuses the buffers of the previous State, as in the engine."""
        before, start_s = self._state, time.perf_counter()
        round = self._algorithm.round(donated(before, shared=True), self._replica, self._peers)
        self._state = owned(self._thread.run(round))
        recycle([before, *self._peers.results], [self._state])
        self._peers.results.clear()
        whole_s = time.perf_counter() - start_s
        self._timer.add(REST, whole_s - sum(self._timer.seconds.values()))

    def take_parts(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        taken, self._timer.seconds = self._timer.seconds, {}
        return taken

    def close(self) -> None:
        self._thread.close()
