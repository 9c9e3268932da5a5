"""A whole simulated run in one call, for tests and experiments with algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.core.events import Event, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Workload
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.engine import SimEngine
from atoll.optim.sgd import SGD
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.workloads import Regression


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def lines(self) -> list[str]:
        return [event.to_json() for event in self.events if event.recorded]


@dataclass(frozen=True)
class Simulated:
    """What came of it."""

    params: Tree
    engine: SimEngine | AsyncSimEngine
    events: list[Event]
    finished: RunFinished

    def of(self, *kinds: type[Event]) -> list[Any]:
        """The events of these kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]


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
    seed: int = 0,
    evaluate_every: int = 1,
    save: Callable[[Any], None] | None = None,
    sink: Recorder | None = None,
    inside: Algorithm[Any] | None = None,
) -> tuple[SimEngine | AsyncSimEngine, Recorder]:
    """An engine ready to run, and the sink it reports to. By default: a linear model, inner SGD(0.05), four equal islands.

    Of an asynchronous algorithm, `evaluate_every` counts local updates, and every hub step is saved. `inside` is what the devices
    of an island do together, where the cluster has several in each.
    """
    what: Workload = workload or Regression()
    sink = sink or Recorder()
    options: dict[str, Any] = {
        "cluster": cluster or Cluster(islands=4),
        "params": params or Tree.of(what.module()),
        "batches": what.batches,
        "make_replica": lambda island: LocalReplica(
            what, optimizer=inner or SGD(lr=0.05), clip_norm=clip_norm, fresh_optimizer=fresh_optimizer, seed=1000 * seed + island
        ),
        "evaluate": Evaluator(what),
        "sink": sink,
        "steps": steps,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "save": save,
    }
    if isinstance(algorithm, AsyncAlgorithm):
        return AsyncSimEngine(algorithm=algorithm, **options), sink
    return SimEngine(algorithm=algorithm, inside=inside, **options), sink


def simulate(algorithm: Algorithm[Any] | AsyncAlgorithm[Any], *, steps: int, **options: Any) -> Simulated:
    """Runs `simulator(...)` to its end."""
    engine, sink = simulator(algorithm, steps=steps, **options)
    finished = engine.run()
    return Simulated(engine.params, engine, sink.events, finished)
