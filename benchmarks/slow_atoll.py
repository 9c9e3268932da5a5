"""atoll's algorithms on real processes, one round at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, HoldsWeights
from atoll.core.pytree import recycle
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.replicated_state import donated, owned
from atoll.engines.training_setup import DataPositions
from atoll.replica.local_replica import LocalReplica
from slow_island import INNER, Meeting, Spec, workload_of

ALGORITHMS: Mapping[str, Callable[[int], Algorithm[Any]]] = {
    "DDP": lambda inner_steps: DDP(optimizer=INNER),
    "ZeRO-1": lambda inner_steps: ZeRO1(optimizer=INNER),
    "DiLoCo": lambda inner_steps: DiLoCo(inner_steps=inner_steps),
    "ACCO": lambda inner_steps: ACCO(optimizer=INNER),
}
"""By name, given the inner steps of a round, which only DiLoCo looks at."""


class Ours:
    """An algorithm of atoll. A slow_island.Loop."""

    def __init__(self, name: str, spec: Spec, meeting: Meeting) -> None:
        self._algorithm = ALGORITHMS[name](spec.inner_steps)
        self.steps_per_round = self._algorithm.steps_per_round
        self.exchanges_per_round = 2 if name == "ACCO" else 1
        self.wire, self._line = GroupCollectives(meeting.new_group(), timeout_s=spec.limit_s), CommunicationThread()
        workload = workload_of(spec)
        params, dealing = Tree.of(workload.module()), DataPositions(workload.batches)
        replica = LocalReplica(workload, optimizer=INNER)
        replica.load(params)
        self._replica = ProcessReplica(replica)
        self._peers = ProcessPeers(
            self.wire, self._line, lambda steps, batches, pieces: dealing.assign(0, batches, pieces, 0), params.layout
        )
        self._state = self._algorithm.init(params, self._peers)
        if isinstance(self._algorithm, HoldsWeights):
            replica.load(self._line.run(self._peers.all_gather(self._algorithm.held(self._state))))

    def round(self) -> None:
        before = self._state
        self._state = owned(self._line.run(self._algorithm.round(donated(before), self._replica, self._peers)))
        recycle([before, *self._peers.results], [self._state])
        self._peers.results.clear()

    def close(self) -> None:
        self._line.close()


class Exchange:
    """A reduce-scatter and an all-gather of the weights, with nothing to compute."""

    def __init__(self, spec: Spec, meeting: Meeting) -> None:
        self._wire = GroupCollectives(meeting.new_group(), timeout_s=spec.limit_s)
        self._flat = Tree.of(workload_of(spec).module()).flat

    def __call__(self) -> None:
        self._wire.all_gather_numbers(1.0, 1.0)
        self._wire.reduce_scatter(self._flat, [1.0] * self._wire.size)
        self._wire.all_gather(self._flat)
