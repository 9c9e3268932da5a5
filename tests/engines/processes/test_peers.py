"""An algorithm computes the same bits in real processes as in the simulator, and queued exchanges record when they began."""

import threading

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
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


def flags_of_mean(group, nonfinite):
    """What a mean reports where one rank's tree is not finite at one position."""
    collectives, thread, recorded = GroupCollectives(group, timeout_s=60.0, chunk_bytes=8), CommunicationThread(), []
    tree = Tree.of({"w": torch.ones(9)})
    peers = ProcessPeers(collectives, thread, lambda *counts: None, tree.layout, on_exchange=recorded.append)
    if collectives.rank == 1:
        tree.flat[nonfinite] = float("nan")
    finite = thread.run(peers.mean(tree)).finite
    thread.close()
    (one,) = recorded
    return finite, (list(one.nonfinite), one.unusable, one.control_bytes)


@pytest.mark.parametrize("position", [0, 4, 8])
def test_every_rank_learns_of_a_tree_that_is_not_finite(four, position):
    assert four.run(flags_of_mean, position, size=3) == [(False, ([1], True, 2 * 2 * 8))] * 3


class Clock:
    """Stands still but for exchanges, each of which takes a second."""

    time_s = 0.0

    def now_s(self):
        return self.time_s


class OneRank:
    """A group of one rank. Its exchanges begin when both are queued."""

    rank, size, sent_bytes, control_bytes, timeout_s = 0, 1, 0, 0, 60.0

    def __init__(self, clock):
        self.clock, self.both_queued = clock, threading.Event()

    def all_gather_numbers(self, *numbers):
        assert self.both_queued.wait(30)
        self.clock.time_s += 1
        return [list(numbers)]


def test_an_exchange_behind_another_begins_when_that_is_over():
    clock, thread, recorded = Clock(), CommunicationThread(), []
    group, layout = OneRank(clock), Layout.of({"w": torch.zeros(1)})
    peers = ProcessPeers(group, thread, lambda *counts: None, layout, clock=clock, on_exchange=recorded.append)

    async def both():
        flights = [peers.background(peers.total(number)) for number in (3.0, 4.0)]
        group.both_queued.set()
        return [await flight for flight in flights]

    assert thread.run(both()) == [3.0, 4.0]
    assert [(one.arrived_s, one.start_s, one.end_s) for one in recorded] == [(0.0, 0.0, 1.0), (0.0, 1.0, 2.0)]
    thread.close()
