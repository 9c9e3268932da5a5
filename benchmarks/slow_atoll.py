"""atoll's algorithms on real processes, one round at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Algorithm, HoldsWeights
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.shared_and_sharded_state import donated, owned
from atoll.engines.timed_replica import ProcessReplica
from atoll.engines.training_setup import DataPositions
from atoll.optim.codecs import CODECS, CodecName
from atoll.replica.local_replica import LocalReplica
from slow_island import INNER, IslandGroup, Spec, workload_of

FRAGMENTS, OVERLAP, MIXING = 6, 5, 0.5
"""Of streaming. When a fragment arrives, half of the distance that it has moved since it left is mixed away."""


def streaming(inner_steps: int, codec: CodecName) -> Streaming:
    """Streaming DiLoCo, with fewer fragments and less overlap in rounds that are too short for them."""
    fragments, overlap = min(FRAGMENTS, inner_steps), min(OVERLAP, inner_steps - 1)
    return Streaming(inner_steps=inner_steps, fragments=fragments, overlap=overlap, mixing=MIXING, codec=codec)


def bytes_only(codec: CodecName, inner_steps: int) -> DiLoCo:
    """DiLoCo that exchanges after every step."""
    return DiLoCo(inner_steps=1, codec=codec)


ALGORITHMS: Mapping[str, Callable[[int], Algorithm[Any]]] = {
    "DDP": lambda inner_steps: DDP(optimizer=INNER),
    "ZeRO-1": lambda inner_steps: ZeRO1(optimizer=INNER),
    "DiLoCo": lambda inner_steps: DiLoCo(inner_steps=inner_steps),
    "ACCO": lambda inner_steps: ACCO(optimizer=INNER),
    "DiLoCo, int4": lambda inner_steps: DiLoCo(inner_steps=inner_steps, codec="int4"),
    "streaming": lambda inner_steps: streaming(inner_steps, "fp32"),
    "streaming, int4": lambda inner_steps: streaming(inner_steps, "int4"),
    **{f"bytes of {codec}": partial(bytes_only, codec) for codec in CODECS},
}
"""By name, from the inner steps per round of DiLoCo and streaming. The last ones have short rounds, and only their bytes count."""


class AtollLoop:
    """An algorithm of atoll. A slow_island.Loop."""

    def __init__(self, name: str, spec: Spec, group: IslandGroup) -> None:
        self._algorithm = ALGORITHMS[name](spec.inner_steps)
        self.steps_per_round = self._algorithm.steps_per_round
        self.exchanges_per_round = 2 if name == "ACCO" else 1
        collectives = GroupCollectives(group.new_group(), timeout_s=spec.limit_s)
        self._thread = CommunicationThread()
        workload = workload_of(spec)
        params, positions = Tree.of(workload.module()), DataPositions(workload.batches)
        replica = LocalReplica(workload, optimizer=INNER)
        replica.load(params)
        self._replica = ProcessReplica(replica)
        self._peers = ProcessPeers(
            collectives, self._thread, lambda steps, batches, pieces: positions.assign(0, batches, pieces, 0), params.layout
        )
        self._state = self._algorithm.init(params, self._peers)
        if isinstance(self._algorithm, HoldsWeights):
            replica.load(self._thread.run(self._peers.all_gather(self._algorithm.held(self._state))))

    def round(self) -> None:
        before = self._state
        self._state = owned(self._thread.run(self._algorithm.round(donated(before), self._replica, self._peers)))
        recycle([before, *self._peers.results], [self._state])
        self._peers.results.clear()

    def close(self) -> None:
        self._thread.close()


class Exchange:
    """A reduce-scatter and an all-gather of the weights, without computation."""

    def __init__(self, spec: Spec, group: IslandGroup) -> None:
        self._collectives = GroupCollectives(group.new_group(), timeout_s=spec.limit_s)
        self._flat = Tree.of(workload_of(spec).module()).flat

    def __call__(self) -> None:
        self._collectives.all_gather_numbers(1.0, 1.0)
        self._collectives.reduce_scatter(self._flat, [1.0] * self._collectives.size)
        self._collectives.all_gather(self._flat)
