"""The toy of the asynchronous paper's authors: a perceptron classifies mixtures of Gaussians, on four unequal workers.

All choices are those of their notebook: each round has a new inner optimizer, whose first step is at the peak of the schedule; a
worker gets a shard among those with the fewest visits; momentum is heavy-ball where the runs are called Nesterov's; each arrival
has a weight of sqrt(k)/k = 0.5. Links take no time. `--set model.hidden=128` makes a run quick.
"""

from __future__ import annotations

import math
from typing import Any

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.core.protocols import Algorithm, AsyncAlgorithm
from atoll.data.gaussians import Gaussians
from atoll.models.mlp import MLP
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import Momentum
from atoll.runs.cluster import Cluster, Link
from atoll.runs.run_settings import Keep, Run, Train


def toy_async() -> Run:
    """The authors' asynchronous toy: heavy-ball momentum at every arrival."""
    algorithm = AsyncLocalSGD(
        inner_steps=20,
        outer=Momentum(lr=0.07, momentum=0.9),
        weight="sqrt(k)/k",
        grace_s=0.5,
        shards="visits",
        ties="chance",
    )
    return _toy("toy-async", algorithm)


def toy_sync() -> Run:
    """The authors' synchronous toy: heavy-ball momentum on the mean of the workers."""
    return _toy("toy-sync", DiLoCo(inner_steps=20, outer=Momentum(lr=0.5, momentum=0.9)))


def _toy(name: str, algorithm: Algorithm[Any] | AsyncAlgorithm[Any]) -> Run:
    phases = 100  # of 20 steps for each worker
    return Run(
        recipe=name,
        model=MLP(),
        data=Gaussians(),
        algorithm=algorithm,
        optimizer=AdamW(lr=Cosine(lr=2e-4, floor=1e-6), betas=(0.9, 0.999), weight_decay=1e-3, decay="all"),
        train=Train(steps=20 * phases, batch_size=32, clip_norm=None, fresh_optimizer=True, peak_first=True),
        cluster=Cluster(islands=4, step_time_s="very", link=Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)),
        keep=Keep(evaluate_every=200, save_every=1000),
    )
