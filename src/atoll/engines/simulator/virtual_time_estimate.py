"""The virtual time of a run on other links, without its training.

The virtual clock depends on the cluster, the algorithm and the bytes that islands send, and not on what the model learns. So the
simulator carries out the same algorithm on the same cluster, with a model that has as many parameters and computes next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from atoll.core.events import RoundFinished
from atoll.core.protocols import AsyncAlgorithm
from atoll.engines.simulator.launch import engine_of
from atoll.replica.evaluator import Evaluator
from atoll.replica.master_weights import initial_weights
from atoll.runs.cluster import Cluster, Link
from atoll.runs.run_settings import Run, dtype_of
from atoll.telemetry.sinks import MemorySink

_MAX_PARAMETERS = 100_000
"""A larger model is replaced by one of this size on links that are slower in proportion. Control messages, which do not shrink with
the model, change the time by less than 1 part in 1,000."""
_MAX_LOCAL_STEPS = 1_000  # Of all islands. A longer run is simulated up to here, and extrapolated at the pace of the second half.


def time_on_slower_links(run: Run, parameters: int, factor: float) -> float:
    """The virtual time of a run if every link between islands had 1/factor of its bandwidth. Latencies, and links inside islands,
    stay as they are."""
    return virtual_time(replace(run, cluster=_scaled_links(run.cluster, 1 / factor)), parameters)


def virtual_time(run: Run, parameters: int) -> float:
    """The virtual time of a run whose model has this number of trainable parameters. It is exact for runs of up to 1,000 local
    steps, and for longer synchronous ones whose rounds all take the same time."""
    size = min(parameters, _MAX_PARAMETERS)
    cluster = _scaled_links(run.cluster, size / parameters)
    if run.inside is not None:
        cluster = replace(cluster, inside=_scaled(cluster.inside, size / parameters))
    per_round = 1 if isinstance(run.algorithm, AsyncAlgorithm) else run.algorithm.steps_per_round
    rounds = max(4, _MAX_LOCAL_STEPS // (run.cluster.devices * per_round))
    steps = min(run.train.steps, rounds * per_round)
    precision = run.train.precision if run.train.precision == "all-bf16" else "fp32"  # of the weights
    train = replace(run.train, steps=steps, device="cpu", compile=False, together="apart", precision=precision)
    keep = replace(run.keep, evaluate_every=steps, save_every=steps)
    timed = replace(run.resolved, cluster=cluster, train=train, keep=keep)
    workload, dtype = _TimedWorkload(size, timed.shards, timed.train.batch_size), dtype_of(timed)
    sink = MemorySink()
    weights, evaluator = initial_weights(workload, "cpu", dtype), Evaluator(workload, "cpu", dtype)
    list(engine_of(timed, workload, weights, evaluator, sink, saves=False).train())
    ends = [(event.local_updates or event.steps, event.time_s) for event in sink.of(RoundFinished)]
    (done, end_s), (half_done, half_s) = ends[-1], ends[len(ends) // 2 - 1]
    times = run.train.steps / steps
    return end_s if times == 1 else end_s + (times - 1) * done * (end_s - half_s) / (done - half_done)


def _scaled_links(cluster: Cluster, share: float) -> Cluster:
    """The cluster with this share of the bandwidth between islands."""
    links = tuple(_scaled(link, share) for link in cluster.links)
    return replace(cluster, link=_scaled(cluster.link, share), links=links)


def _scaled(link: Link, share: float) -> Link:
    download = link.download_mbit_per_s
    return replace(
        link,
        bandwidth_mbit_per_s=link.bandwidth_mbit_per_s * share,
        download_mbit_per_s=None if download is None else download * share,
    )


@dataclass(frozen=True)
class _TimedWorkload:
    """One vector of parameters, whose loss is their mean. It is a Workload, and its own Batches of ones."""

    size: int
    num_shards: int
    batch_size: int

    @property
    def batches(self) -> _TimedWorkload:
        return self

    def examples(self, shard: int) -> int:
        return self.batch_size

    def batch(self, shard: int, position: int) -> Tensor:
        return torch.ones(self.batch_size)

    def tokens(self, batch: Tensor) -> int:
        return len(batch)

    def module(self) -> nn.Module:
        return nn.ParameterList([torch.zeros(self.size)])

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, nn.ParameterList)
        loss: Tensor = module[0].mean() * batch.mean()
        return loss

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}
