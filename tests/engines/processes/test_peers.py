"""An algorithm computes the same bits in real processes as in the simulator."""

import pytest

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.core.protocols import HoldsWeights
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.shared_and_sharded_state import donated, owned
from atoll.engines.timed_replica import ProcessReplica
from atoll.engines.training_setup import DataPositions
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, simulate

ALGORITHMS = [
    DDP(optimizer=AdamW(lr=0.1), accumulation=2, clip_norm=0.5),
    ZeRO1(optimizer=AdamW(lr=0.1), clip_norm=0.5),
    DiLoCo(inner_steps=3),
    DiLoCo(inner_steps=2, weighting="examples"),
    ACCO(optimizer=AdamW(lr=0.1), clip_norm=0.5),
    ACCO(optimizer=AdamW(lr=0.1), pieces_per_half=2, wire="bf16", sums="fp32", warmup=2),
    DPU(optimizer=SGD(lr=0.02), warmup=2),
    WP(optimizer=AdamW(lr=0.05)),
]


def run_rounds(group, algorithm, workload, rounds):
    """The weights in this rank's State after these rounds, and the payload that it sent."""
    collectives, thread = GroupCollectives(group, timeout_s=60.0, chunk_bytes=64), CommunicationThread()
    params, positions, done = Tree.of(workload.module()), DataPositions(workload.batches), 0
    replica = LocalReplica(workload, optimizer=SGD(lr=0.05), seed=collectives.rank)
    replica.load(params)

    def assign(steps, batches, pieces):
        return positions.assign(collectives.rank, batches, pieces, done)

    peers = ProcessPeers(collectives, thread, assign, params.layout)
    state = algorithm.init(params, peers)
    if isinstance(algorithm, HoldsWeights):
        replica.load(thread.run(peers.all_gather(algorithm.held(state))))
    before = collectives.sent_bytes
    for _ in range(rounds):
        state = owned(thread.run(algorithm.round(donated(state), ProcessReplica(replica), peers)))
        done += algorithm.steps_per_round
    thread.close()
    return Tree(state.params.layout, state.params.flat.clone()), collectives.sent_bytes - before


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_compute_the_simulators_weights_bit_for_bit(four, size):
    workload = Regression(hidden=3)
    for algorithm in ALGORITHMS:
        rounds = 6
        done = simulate(algorithm, steps=rounds * algorithm.steps_per_round, cluster=Cluster(islands=size), workload=workload)
        results = four.run(run_rounds, algorithm, workload, rounds, size=size)
        states = [params for params, _ in results]
        whole = states[0] if states[0].layout == done.params.layout else Tree.join(states)
        assert whole.equal(done.params), algorithm
        sent = sum(sent_bytes for _, sent_bytes in results)
        assert sent == size * done.finished.sent_bytes_per_island, algorithm
