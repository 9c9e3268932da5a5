"""The same text of an algorithm gives the same bits under the virtual clock and in real processes."""

import pytest

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero1 import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.processes import played
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_processes_give_the_simulators_weights_to_the_bit(four, size):
    workload = Regression(hidden=3)
    for algorithm in ALGORITHMS:
        rounds = 6
        done = simulate(algorithm, steps=rounds * algorithm.steps_per_round, cluster=Cluster(islands=size), workload=workload)
        played_ = four.run(played, algorithm, workload, rounds, size=size)
        states = [params for params, _ in played_]
        whole = states[0] if states[0].layout == done.params.layout else Tree.join(states)
        assert whole.equal(done.params), algorithm
        sent = sum(sent_bytes for _, sent_bytes in played_)
        assert sent == size * done.finished.sent_bytes_per_island, algorithm
