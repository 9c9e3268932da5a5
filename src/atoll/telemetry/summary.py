"""What a run came to, read from its folder alone: run.json, events.jsonl and timing.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, CheckpointError
from atoll.core.events import Evaluated, RunFinished, RunStarted
from atoll.telemetry.async_summary import AsynchronySummary, read_asynchrony
from atoll.telemetry.clocks import Clock, clock_of
from atoll.telemetry.event_log import read_events
from atoll.telemetry.event_text import perplexity
from atoll.telemetry.memory import MemorySummary, read_memory
from atoll.telemetry.overlap import OverlapSummary, read_overlap, worth_telling
from atoll.telemetry.running_totals import Tally


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished run in figures. Counts and times start at the end of the warm start.

    Attributes:
        params: trainable parameters of the model.
        tokens: trained on by all islands together; `warm_start_tokens` come on top.
        outer_steps: exchanges that changed the global weights.
        val_loss: of the final global weights, in nats; `val_perplexity` is its exponential.
        virtual_time_s: on the simulated cluster's clock; None where the cluster was real.
        wall_time_s: on a real cluster, of the whole run; of a simulated one, how long the process that finished it worked, which
            says nothing about the cluster. None where it was not noted.
        sent_bytes_per_island: payload, mean over islands; control bytes apart.
        utilisation: time spent computing over time passed, mean over islands.
        resumed_from_round: where the process that finished the run began; 0 if it was never resumed.
        digest: of the final global weights.
        engine: what ran it: sim, where `virtual_time_s` counts, or dist, where `wall_time_s` does.
        val_accuracy: of the final global weights, in [0, 1]; None where it was not measured.
        inside_bytes_per_device: payload over the lines inside islands, mean over devices; None where islands have no inside.
        inside_dropped_tokens: tokens whose gradients waited in a device when its island was given other weights; None likewise.
        asynchrony: staleness, windows, workers and shards of an asynchronous run; None for a synchronous one.
        overlap: where each island's time went, if it was measured, exchanges were hidden behind the computing, or something went
            wrong; else None.
        memory: what each island held in live tensors at most, and the paper's formula; None where it was not counted.
    """

    recipe: str
    algorithm: str
    islands: int
    params: int
    tokens: int
    warm_start_tokens: int
    local_updates: int
    outer_steps: int
    val_loss: float
    val_perplexity: float
    virtual_time_s: float | None
    wall_time_s: float | None
    sent_bytes_per_island: float
    control_bytes_per_island: float
    utilisation: float | None
    resumed_from_round: int
    run_dir: str
    seed: int
    rounds: int
    steps: int
    digest: str
    engine: str = "sim"
    val_accuracy: float | None = None
    inside_bytes_per_device: float | None = None
    inside_dropped_tokens: int | None = None
    asynchrony: AsynchronySummary | None = None
    overlap: OverlapSummary | None = None
    memory: MemorySummary | None = None

    @property
    def clock(self) -> Clock:
        """Which of the two times counts."""
        return clock_of(self.engine)

    @property
    def time_s(self) -> float | None:
        """On the clock that counts."""
        return self.virtual_time_s if self.clock == "virtual" else self.wall_time_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the attributes' names; NaN and infinity as strings. From `val_accuracy` on, only what has a value."""
        record = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        for name in ("val_accuracy", "inside_bytes_per_device", "inside_dropped_tokens", "asynchrony", "overlap", "memory"):
            if record[name] is None:
                del record[name]
        return record

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is, finished or not. What is not known yet is None."""

    recipe: str
    algorithm: str | None
    islands: int | None
    params: int | None
    seed: int | None
    round: int | None
    """The last round that all islands finished."""
    steps: int
    steps_total: int | None
    tokens: int
    loss: float | None
    val_loss: float | None
    virtual_time_s: float | None
    wall_time_s: float | None
    """On real machines; None under a virtual clock."""
    sent_bytes_per_island: float | None
    utilisation: float | None
    finished: bool
    run_dir: str


def read_summary(folder: str | Path) -> Summary:
    """The summary of a finished run. A run that is not finished raises an AtollError that says how to resume it."""
    folder = Path(folder)
    log = folder / "events.jsonl"
    started = finished = evaluated = None
    for event in read_events(log, kinds=(RunStarted, Evaluated, RunFinished)) if log.exists() else ():
        started = event if isinstance(event, RunStarted) else started
        evaluated = event if isinstance(event, Evaluated) else evaluated
        finished = event if isinstance(event, RunFinished) else finished
    if finished is None:
        raise AtollError(_unfinished(folder))
    if started is None:
        raise CheckpointError(f"{log} ends with RunFinished but has no RunStarted. Restore the beginning of it.")
    return _summary(folder, started, finished, evaluated)


def read_progress(folder: str | Path) -> RunProgress:
    """What is known about a run so far. Needs run.json; the log may still be empty or missing."""
    folder = Path(folder)
    run = read_settings(folder)
    tally = Tally()
    if (folder / "events.jsonl").exists():
        for event in read_events(folder / "events.jsonl"):
            tally.take(event)
    start, last, evaluation = tally.started, tally.round, tally.evaluation
    return RunProgress(
        recipe=start.recipe if start else str(run.get("recipe", folder.name)),
        algorithm=start.algorithm if start else None,
        islands=last.islands if last else start.islands if start else None,
        params=start.params if start else None,
        seed=start.seed if start else run.get("seed"),
        round=last.round if last else None,
        steps=last.steps if last else 0,
        steps_total=start.steps if start else None,
        tokens=last.tokens if last else 0,
        loss=last.loss if last else None,
        val_loss=evaluation.metrics.get("loss") if evaluation else None,
        virtual_time_s=last.virtual_time_s if last else None,
        wall_time_s=last.wall_time_s if last else None,
        sent_bytes_per_island=last.sent_bytes_per_island if last else None,
        utilisation=tally.utilisation(last.time_s) if last else None,
        finished=tally.finished is not None,
        run_dir=str(folder),
    )


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The Run in a folder, as plain data."""
    path = Path(folder) / "run.json"
    try:
        run = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a run's folder: {path.name} cannot be read ({error.strerror}). Give a folder that `atoll run` wrote."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Restore it.") from error
    if not isinstance(run, dict):
        raise CheckpointError(f"{path} holds a {type(run).__name__}, not an object. Restore it.")
    return run


def _summary(folder: Path, started: RunStarted, finished: RunFinished, evaluated: Evaluated | None) -> Summary:
    process_s, resumed_from_round = _timing(folder)
    # Of the final weights, like the loss: an earlier evaluation's accuracy would be another model's.
    last = evaluated.metrics if evaluated is not None and evaluated.local_updates == finished.local_updates else {}
    return Summary(
        recipe=started.recipe,
        algorithm=started.algorithm,
        islands=started.islands,
        params=started.params,
        tokens=finished.tokens,
        warm_start_tokens=finished.warm_start_tokens,
        local_updates=finished.local_updates,
        outer_steps=finished.outer_steps,
        val_loss=finished.val_loss,
        val_perplexity=perplexity(finished.val_loss),
        virtual_time_s=finished.virtual_time_s,
        wall_time_s=process_s if finished.wall_time_s is None else finished.wall_time_s,
        sent_bytes_per_island=finished.sent_bytes_per_island,
        control_bytes_per_island=finished.control_bytes_per_island,
        utilisation=finished.utilisation,
        resumed_from_round=resumed_from_round,
        run_dir=str(folder),
        seed=started.seed,
        rounds=finished.rounds,
        steps=finished.steps,
        digest=finished.digest,
        engine=started.engine,
        val_accuracy=last.get("accuracy"),
        inside_bytes_per_device=finished.inside_bytes_per_device,
        inside_dropped_tokens=finished.inside_dropped_tokens,
        asynchrony=read_asynchrony(folder),
        overlap=read_overlap(folder) if worth_telling(folder) else None,
        memory=read_memory(folder),
    )


def _timing(folder: Path) -> tuple[float | None, int]:
    """Wall-clock seconds of the last process and the round that it began at, from timing.jsonl."""
    wall_time_s, resumed_from_round = None, 0
    path = folder / "timing.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a kill, and then appended to on resume: wall-clock figures are not worth failing for
        if not isinstance(record, dict):
            continue
        if record.get("what") == "resumed":
            resumed_from_round = int(record.get("round") or 0)
        elif record.get("what") == "finished":
            wall_time_s = record.get("wall_time_s")
            resumed_from_round = int(record.get("resumed_from_round") or resumed_from_round)
    return wall_time_s, resumed_from_round


def _unfinished(folder: Path) -> str:
    progress = read_progress(folder)
    if progress.round is None:
        reached = "no round is finished"
    else:
        total = f" of {progress.steps_total}" if progress.steps_total is not None else ""
        reached = f"its last finished round is {progress.round} (step {progress.steps}{total})"
    return f"the run in {folder} ({progress.recipe}) is not finished: {reached}. Resume it with `atoll run --resume {folder}`."


def _plain(value: Any) -> Any:
    if isinstance(value, MemorySummary | AsynchronySummary | OverlapSummary):
        return value.to_dict()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
