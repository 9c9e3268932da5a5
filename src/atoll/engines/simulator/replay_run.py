"""Replaying a finished asynchronous run from its folder, and how near that comes to the weights it left."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.config.json_records import type_name
from atoll.core.errors import ConfigError
from atoll.core.events import Progress
from atoll.core.protocols import AsyncAlgorithm, Sink, Workload
from atoll.core.serialization import load_tree
from atoll.engines.simulator.replay import replay
from atoll.engines.training_setup import loss_of, replica_of
from atoll.engines.warm_start import Cache, load_data, warm_up
from atoll.replica.local_replica import torch_threads
from atoll.runs.folder import RunFolder
from atoll.runs.run import device_of
from atoll.runs.workloads import island_workload, plain_workload
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sinks import Fanout

TOLERANCE = 1e-5
"""Largest difference over largest weight. On the machine that ran it, with as many threads, it is 0."""


@dataclass(frozen=True)
class ReplayResult:
    """What a replay came to.

    Attributes:
        folder: of the run.
        rounds: that arrived.
        local_updates: in them.
        workers: that brought some.
        largest: difference between a weight of the replay and of the run.
        relative: the same over the largest weight of the run.
        tolerance: what `relative` may be.
        same_bits: whether there is no difference at all.
    """

    folder: str
    rounds: int
    local_updates: int
    workers: int
    largest: float
    relative: float
    tolerance: float
    same_bits: bool

    @property
    def agrees(self) -> bool:
        return self.relative <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}

    def __str__(self) -> str:
        found = "the same bits" if self.same_bits else f"{self.relative:.2g} of the largest weight"
        return (
            f"replayed {self.rounds} rounds ({self.local_updates} local updates) of {self.workers} workers in the log's order: "
            f"largest difference {self.largest:.3g} ({found}); tolerance {self.tolerance:g}: "
            f"{'agrees' if self.agrees else 'DOES NOT AGREE'}"
        )


def replay_run(folder: str | Path, *, workload: Workload | None = None, sink: Sink | None = None) -> ReplayResult:
    """Computes a finished asynchronous run once more from its log, and compares the weights.

    Args:
        folder: of the run.
        workload: as it was given to the run, if one was.
        sink: takes signs of life.
    """
    opened = RunFolder.open(Path(folder).expanduser())
    opened.check_workload(None if workload is None else type_name(type(workload)))
    run, out = opened.run.resolved, sink or Fanout([])
    if not isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(f"{folder} ran {type(run.algorithm).__name__}: only runs with a hub have a schedule to replay.")
    if not opened.finished:
        raise ConfigError(f"{folder} is not finished, so there are no weights to compare with. Go on: atoll run --resume {folder}")
    cache = Cache()
    plain = workload or plain_workload(run, load_data(run, cache))
    warm = warm_up(run, plain, file=opened.warm_start, cache=None, sink=out)
    mine = workload or island_workload(run, load_data(run, cache), warm.params)
    loss = loss_of(run, mine)
    with torch_threads(run.cluster.threads_per_island):
        found = replay(
            read_events(opened.events),
            algorithm=run.algorithm,
            params=warm.params,
            batches=mine.batches,
            make_replica=lambda number: replica_of(run, mine, loss, number),
            progress=lambda done, total: out.emit(Progress(phase="replay", done=done, total=total)),
        )
    final = load_tree(opened.final).to(device_of(run))
    largest, greatest = (found.params - final).flat.abs().max().item(), final.flat.abs().max().item()
    return ReplayResult(
        folder=str(opened.path),
        rounds=found.rounds,
        local_updates=found.local_updates,
        workers=found.workers,
        largest=largest,
        relative=largest / greatest if greatest else largest,
        tolerance=TOLERANCE,
        same_bits=found.params.same_bits(final),
    )
