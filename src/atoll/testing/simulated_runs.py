"""Small workloads, and a whole simulated run of one in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.events import Event, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Workload
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.optim.sgd import SGD
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import InnerRule, LocalReplica, RoundStart
from atoll.runs.cluster import Cluster
from atoll.telemetry.sinks import MemorySink

RegressionBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RegressionBatches:
    """Noisy points of a plane, in shards. With `full_batch` each batch is the whole shard."""

    num_shards: int = 4
    shard_examples: int = 32
    batch_size: int = 8
    dimensions: int = 5
    full_batch: bool = False
    seed: int = 0

    @cached_property
    def _points(self) -> RegressionBatch:
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.num_shards, self.shard_examples, self.dimensions, generator=generator)
        plane = torch.linspace(-1, 1, self.dimensions)
        noise = 0.1 * torch.randn(self.num_shards, self.shard_examples, generator=generator)
        return inputs, inputs @ plane + 0.5 + noise

    def examples(self, shard: int) -> int:
        return self.shard_examples

    def batch(self, shard: int, position: int) -> RegressionBatch:
        inputs, targets = self._points
        if self.full_batch:
            return inputs[shard], targets[shard]
        chosen = (torch.arange(self.batch_size) + position * self.batch_size) % self.shard_examples
        return inputs[shard][chosen], targets[shard][chosen]

    def tokens(self, batch: RegressionBatch) -> int:
        return len(batch[0])

    def all_examples(self) -> RegressionBatch:
        inputs, targets = self._points
        return inputs.flatten(0, 1), targets.flatten()


@dataclass(frozen=True)
class Regression:
    """A linear model, or one with a hidden layer and dropout, on `RegressionBatches`."""

    batches: RegressionBatches = RegressionBatches()
    hidden: int = 0
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def module(self) -> nn.Module:
        generator = torch.Generator().manual_seed(1)
        size = self.batches.dimensions
        layers: list[nn.Module] = [nn.Linear(size, self.hidden or 1)]
        if self.hidden:
            layers += [nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.hidden, 1)]
        module = nn.Sequential(*layers).to(self.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=self.dtype) / size**0.5)
        return module

    def loss(self, module: nn.Module, batch: RegressionBatch) -> Tensor:
        inputs, targets = batch
        error: Tensor = module(inputs.to(self.dtype)).squeeze(1) - targets.to(self.dtype)
        return error.square().mean()

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(module, self.batches.all_examples()))}


class Recorder(MemorySink):
    """Keeps events, and gives the lines that events.jsonl would have."""

    def lines(self) -> list[str]:
        return [event.to_json() for event in self.events if event.recorded]


class SimulatedRun(Recorder):
    """The result of `simulate`: all events, the last of them, the final weights and the engine."""

    def __init__(self, engine: SimEngine | AsyncSimEngine, events: list[Event], finished: RunFinished) -> None:
        self.engine, self.params, self.events, self.finished = engine, engine.params, events, finished


def simulator(
    algorithm: Algorithm[Any] | AsyncAlgorithm[Any],
    *,
    steps: int,
    workload: Workload | None = None,
    inner: InnerRule | None = None,
    cluster: Cluster | None = None,
    params: Tree | None = None,
    clip_norm: float | None = None,
    fresh_optimizer: bool = False,
    gives_moments: bool = False,
    seed: int = 0,
    evaluate_every: int = 1,
    save_every: int | None = None,
    sink: Recorder | None = None,
    inside: Algorithm[Any] | None = None,
) -> tuple[SimEngine | AsyncSimEngine, Recorder]:
    """An engine ready to run, and its sink. By default: a linear model, inner SGD(0.05), four equal islands.

    With an asynchronous algorithm, `evaluate_every` and `save_every` count local updates. `inside` is the algorithm
    between the devices of one island, if the cluster has several per island.
    """
    what: Workload = workload or Regression()
    sink = sink or Recorder()
    setup = SimSetup(
        cluster=cluster or Cluster(islands=4),
        params=params or Tree.of(what.module()),
        batches=what.batches,
        make_replica=lambda island: LocalReplica(
            what,
            optimizer=inner or SGD(lr=0.05),
            clip_norm=clip_norm,
            round_start=RoundStart(fresh_optimizer),
            seed=1000 * seed + island,
        ),
        evaluate=Evaluator(what),
        sink=sink,
        steps=steps,
        seed=seed,
        evaluate_every=evaluate_every,
        save_every=save_every,
        gives_moments=gives_moments,
    )
    if isinstance(algorithm, AsyncAlgorithm):
        return AsyncSimEngine(algorithm, setup), sink
    return SimEngine(algorithm, setup, inside=inside), sink


def simulate(algorithm: Algorithm[Any] | AsyncAlgorithm[Any], *, steps: int, **options: Any) -> SimulatedRun:
    """Run `simulator(...)` to its end."""
    engine, sink = simulator(algorithm, steps=steps, **options)
    return SimulatedRun(engine, sink.events, run_engine(engine))


def run_engine(engine: Any, save: Callable[[Any], object] = lambda engine: None) -> Any:
    """Train with an engine to its end and return its figures. Where a checkpoint is due, it calls `save(engine)`."""
    with closing(engine.train()) as due:
        for _ in due:
            save(engine)
    return engine.finish()
