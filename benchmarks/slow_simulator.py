"""The simulator's prediction for a measured link and step time.

Virtual time depends on the step time, the link, and the bytes sent, not on what is computed. So the prediction uses a module with
the real number of weights and almost no computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.events import RoundFinished
from atoll.core.protocols import Algorithm
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import simulate

ROUNDS, SETTLED = 4, 2
"""Simulated rounds, and the first in steady state: before it ACCO computes a half-batch without an exchange."""


class Weights(nn.Module):
    """A module of weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(count))


@dataclass(frozen=True)
class _EmptyBatches:
    """Batches of two empty examples, so that they can be halved."""

    num_shards: int = 1

    def examples(self, shard: int) -> int:
        return 2

    def batch(self, shard: int, position: int) -> Tensor:
        return torch.zeros(2, 1)

    def tokens(self, batch: Tensor) -> int:
        return len(batch)


@dataclass(frozen=True)
class WeightsOnly:
    """A workload with weights and almost no computation. A protocols.Workload."""

    count: int
    batches: _EmptyBatches = _EmptyBatches()

    def module(self) -> nn.Module:
        return Weights(self.count)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, Weights)
        return module.weights[0] * 0.0

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}


class Prediction(NamedTuple):
    """A round of an algorithm between two islands."""

    round_s: float
    sent_bytes: float  # by an island, with control bytes
    busiest_second_bytes: float  # payload


def predicted(algorithm: Algorithm[Any], *, params: int, step_s: float, mbit_per_s: float, latency_s: float) -> Prediction:
    """The simulator's virtual seconds of a round, and its bytes, of which control bytes are a part: on a wire they are payload."""
    link = Link(latency_s=latency_s, bandwidth_mbit_per_s=mbit_per_s)
    steps = ROUNDS * algorithm.steps_per_round
    cluster = Cluster(islands=2, step_time_s=(step_s,), link=link)
    done = simulate(algorithm, steps=steps, workload=WeightsOnly(params), cluster=cluster, evaluate_every=ROUNDS)
    first, *_, last = done.of(RoundFinished)[SETTLED - 1 :]
    rounds = last.round - first.round
    sent = last.sent_bytes_per_island - first.sent_bytes_per_island
    control = done.finished.control_bytes_per_island / done.finished.rounds
    round_s = float(last.virtual_time_s - first.virtual_time_s) / rounds
    return Prediction(round_s, sent / rounds + control, float(done.finished.busiest_second_bytes or 0))
