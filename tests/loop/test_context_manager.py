"""A plain loop inside of `atoll.islands` gives the same bits as the simulator."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.replica.forward_backward import split_batch
from atoll.runs.cluster import Cluster
from atoll.telemetry.summary import read_summary
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate


class UnequalBatches(RegressionBatches):
    """Batches of one size with unequal numbers of tokens."""

    def tokens(self, batch):
        return 1 + int((batch[1] > 0.5).sum())


WORKLOAD = Regression(hidden=3, batches=UnequalBatches())
USER_STEPS = [
    DiLoCo(inner_steps=3),
    DiLoCo(inner_steps=2, weighting="examples"),
    DiLoCo(inner_steps=3, weighting="tokens", codec="int8"),
    DiLoCo(inner_steps=1, outer=SGD(lr=1.0)),
    DiLoCo(inner_steps=2, codec="bf16-stochastic"),
    DiLoCo(inner_steps=2, codec="topk", feedback=0.95, outer=SGD(lr=1.0)),
]
OVERLAPPING = [
    Eager(inner_steps=2),
    Streaming(inner_steps=4, fragments=2, overlap=1),
    Streaming(inner_steps=4, fragments=3, overlap=4, mixing=0.25, codec="int4"),  # several fragments are under way
    Streaming(inner_steps=3, fragments=2, overlap=0, codec="bf16-stochastic"),
]
ALGORITHM_STEPS = [
    DDP(optimizer=AdamW(lr=0.1), accumulation=2, clip_norm=0.5),
    ZeRO1(optimizer=AdamW(lr=0.1), clip_norm=0.5),
    ACCO(optimizer=AdamW(lr=0.1), clip_norm=0.5),
    ACCO(optimizer=AdamW(lr=0.1), pieces_per_half=2, sums="fp32", warmup=2),
    DPU(optimizer=SGD(lr=0.02), warmup=2),
    WP(optimizer=AdamW(lr=0.05)),
]
ROUNDS = 6


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def train(islands, model, optimizer, steps, batches=WORKLOAD.batches):
    """A user's loop, on the batches that a run would assign."""
    for step in range(steps):
        batch = batches.batch(rank(), step)
        loss = WORKLOAD.loss(model, batch)
        loss.backward()
        islands.log(loss.item(), WORKLOAD.batches.tokens(batch))
        optimizer.step()
        optimizer.zero_grad()


def trained(group, algorithms):
    """The module's weights after each algorithm, and the bytes that this process sent."""
    found = []
    for algorithm in algorithms:
        model = WORKLOAD.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.islands(model, optimizer, algorithm, examples=WORKLOAD.batches.examples(0)) as islands:
            train(islands, model, optimizer, ROUNDS * algorithm.inner_steps)
        assert islands.rounds == ROUNDS
        found.append((Tree.of(model), islands.sent_bytes))
    return found


def overlapped(group, algorithms):
    """The agreed weights after the last whole round, and those that the exit leaves in the module."""
    found = []
    for algorithm in algorithms:
        model = WORKLOAD.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.islands(model, optimizer, algorithm) as islands:
            train(islands, model, optimizer, ROUNDS * algorithm.inner_steps)
            agreed = Tree.of(islands.weights())
        found.append((agreed, Tree.of(model)))
    return found


def stepped(group, algorithms):
    found = []
    for algorithm in algorithms:
        model = WORKLOAD.module()
        pieces, accumulation = getattr(algorithm, "pieces", 1), getattr(algorithm, "accumulation", 1)
        with atoll.islands(model, None, algorithm) as islands:
            for position in range(ROUNDS * accumulation):
                for piece in split_batch(WORKLOAD.batches.batch(rank(), position), pieces):
                    WORKLOAD.loss(model, piece).backward()
                    islands.step()
        assert islands.rounds == ROUNDS
        found.append(Tree.of(model))
    return found


def simulated(algorithm, islands):
    return simulate(
        algorithm, steps=ROUNDS * algorithm.steps_per_round, workload=WORKLOAD, inner=SGD(lr=0.05), cluster=Cluster(islands=islands)
    )


def test_if_the_user_steps_weights_and_bytes_equal_the_simulators(two, three):
    for size, processes in ((2, two), (3, three)):
        for algorithm, *found in zip(USER_STEPS, *processes.run(trained, USER_STEPS), strict=True):
            expected = simulated(algorithm, size)
            assert all(params.equal(expected.params) for params, _ in found), algorithm
            assert sum(sent for _, sent in found) == size * expected.finished.sent_bytes_per_island


def test_weights_of_algorithms_that_exchange_during_a_round_equal_the_simulators(two):
    for algorithm, *found in zip(OVERLAPPING, *two.run(overlapped, OVERLAPPING), strict=True):
        expected = simulated(algorithm, 2).params
        assert all(agreed.equal(expected) for agreed, _ in found), algorithm
        (before, one), (_, other) = found
        assert one.equal(other)
        assert not one.equal(before), "the exit agrees on what was not agreed on yet"


def test_if_the_algorithm_steps_the_weights_equal_the_simulators(two, three):
    for size, processes in ((2, two), (3, three)):
        for algorithm, *found in zip(ALGORITHM_STEPS, *processes.run(stepped, ALGORITHM_STEPS), strict=True):
            expected = simulated(algorithm, size).params
            assert all(params.equal(expected) for params in found), algorithm


def test_one_process_is_one_island_without_a_network():
    for algorithm, (params, sent) in zip(USER_STEPS, trained(None, USER_STEPS), strict=True):
        assert params.equal(simulated(algorithm, 1).params)
        assert sent == 0
    for algorithm, params in zip(ALGORITHM_STEPS, stepped(None, ALGORITHM_STEPS), strict=True):
        assert params.equal(simulated(algorithm, 1).params)
    assert not dist.is_initialized()


def test_the_code_of_the_documentation_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs/own_loop.md"
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert capsys.readouterr().out == "64 7 0\n"
    assert names["islands"].rounds == read_summary("logged").rounds == 7
