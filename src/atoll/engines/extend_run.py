"""A finished run that trains for more steps, in a new folder.

The new folder begins with a checkpoint of the finished run, its log up to there, and a Run with more steps; then it is resumed like
any other. The finished run stays as it is. A run that is extended by N steps goes through the same weights as one that had them
from the beginning: the checkpoint is the newest at which no learning rate has yet depended on the end of the run. A cosine over
the whole run has depended on it since its warm-up, so such a run cannot be extended.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.events import RoundFinished, RunStarted
from atoll.core.protocols import AsyncAlgorithm
from atoll.core.verified_files import expanded, new_folder
from atoll.engines.checkpoints import Checkpoint, Checkpoints
from atoll.engines.spec import EngineSpec, read_spec, write_spec
from atoll.engines.warm_start_training import run_digest
from atoll.optim.schedules import WSD, Cosine, Schedule, at
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run_settings import Run
from atoll.telemetry.event_log import JsonlSink, clock_of, read_events_of, read_kind

_ENGINES = ("simulator", "processes")


def extend(folder: str | Path, steps: int, out: str | Path | None = None, command: Sequence[str] = ()) -> Path:
    """A new folder in which a finished run trains for `steps` more inner steps, once it is resumed.

    Args:
        folder: of the finished run, which is not changed.
        steps: inner steps per island, a multiple of those of a round.
        out: the new folder; by default one under runs/.
        command: the command that extends it, for source.txt.

    Raises:
        ConfigError: the run is not finished, or its schedule, its engine or its cluster does not allow it.
    """
    finished = RunFolder.open(expanded(folder))
    old, spec = finished.run, read_spec(finished.path)
    if steps < 1:
        raise ConfigError(f"--extend {steps}: give the number of steps to add, 1 or more.")
    if not finished.finished:
        raise ConfigError(f"{folder} is not finished, and only a finished run is extended. Resume it: atoll run --resume {folder}")
    check_can_go_on(finished.path, old, spec)
    assert not isinstance(old.algorithm, AsyncAlgorithm), "those are refused"
    per_round = old.algorithm.steps_per_round
    if steps % per_round:
        fit = max(1, round(steps / per_round)) * per_round
        raise ConfigError(
            f"--extend {steps} is no multiple of the {per_round} inner steps of a round: the last round would be cut short. Use "
            f"--extend {fit}."
        )
    new = replace(old, train=replace(old.train, steps=old.train.steps + steps))
    checkpoint = _start_of(finished, old, new)
    target = expanded(out or default_path(new.recipe, new.seed))
    with new_folder(target) as unfinished:
        _write(RunFolder.create(unfinished, new, command), finished, spec, checkpoint)
    return target


def check_can_go_on(folder: Path, run: Run, spec: EngineSpec) -> None:
    """Refuse a run that cannot be extended: its engine, its algorithm or its cluster ends it in a way of its own."""
    if spec.name not in _ENGINES or isinstance(run.algorithm, AsyncAlgorithm):
        what = f"on {spec.name}" if spec.name not in _ENGINES else f"of {type(run.algorithm).__name__}"
        raise ConfigError(
            f"{folder} is a run {what}, which winds down before its end: leases or workers are left without work. Only synchronous "
            f"runs on {' and '.join(_ENGINES)} are extended. Start a new run with more train.steps."
        )
    if run.cluster.pool != "constant":
        raise ConfigError(
            f"{folder} has cluster.pool={run.cluster.pool}, which is spread over the whole run: with more steps, islands would "
            f"have joined and left at other times. Start a new run with more train.steps."
        )


def _start_of(folder: RunFolder, old: Run, new: Run) -> Checkpoint:
    """The newest checkpoint up to which both runs have the same learning rates. Raises ConfigError if there is none."""
    checkpoints = Checkpoints(folder.checkpoints, keep=old.keep.checkpoints)
    steps_at = {event.round: event.steps for event in read_kind(folder.path, RoundFinished)}
    saved = {number: steps_at[number] for number in checkpoints.rounds() if number in steps_at}
    if not saved:
        raise ConfigError(f"{folder.path} has no checkpoints any more, and a run is extended from one. Start a new run.")
    clocks = list(_schedules(old, new))
    for clock in clocks:
        clock.check_has_not_ended(folder.path)
    for number in sorted(saved, reverse=True):
        if all(clock.agree_until(saved[number] / old.train.steps) for clock in clocks):
            return checkpoints.at(number)
    clock = next(clock for clock in clocks if not clock.agree_until(min(saved.values()) / old.train.steps))
    raise ConfigError(
        f"{folder.path}: {clock.path} is a {type(clock.before).__name__} as long as the run, and the rates before its oldest "
        f"checkpoint, at step {min(saved.values())}, have depended on its end. A run can be extended if its rate is constant, if "
        f"it is a WSD and a checkpoint lies before its decay (the newest {old.keep.checkpoints} are kept), or if it is a Cosine "
        f"with `steps` of its own beyond the run's end. Start a new run with train.steps={new.train.steps}."
    )


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """A learning-rate schedule in the run as it was, and in the longer one; and how many positions of it a whole run has."""

    path: str
    before: Schedule
    after: Schedule
    positions_before: int
    positions_after: int

    def agree_until(self, fraction: float) -> bool:
        """Whether both give the same rates over this fraction of the old run."""
        done = math.ceil(self.positions_before * fraction - 1e-9)
        return self.before == self.after or all(at(self.before, step) == at(self.after, step) for step in range(done))

    def check_has_not_ended(self, folder: Path) -> None:
        """Refuse a schedule of a fixed length that is shorter than the longer run."""
        if self.before != self.after or not isinstance(self.after, Cosine | WSD) or self.after.steps is None:
            return
        if self.after.steps < self.positions_after and not (isinstance(self.after, WSD) and self.after.decay == 0):
            raise ConfigError(
                f"{folder}: {self.path} is a {type(self.after).__name__} of {self.after.steps} steps, and the extended run would "
                f"have {self.positions_after}. Extend it to no more than the schedule's end, or start a new run with a longer one."
            )


def _schedules(old: Run, new: Run) -> Iterator[_Clock]:
    """The schedules of the inner optimizer, and of the rules of the algorithms, which count rounds."""
    one, two = old.resolved, new.resolved
    inner = old.schedule_steps, new.schedule_steps
    for name in ("optimizer", "algorithm", "inside"):
        for path, before, after in _rates(getattr(one, name), getattr(two, name), name):
            rounds = "optimizer" not in path.split(".")
            length = (one.rounds(old.train.steps), two.rounds(new.train.steps)) if rounds else inner
            yield _Clock(path=path, before=before, after=after, positions_before=length[0], positions_after=length[1])


def _rates(before: Any, after: Any, path: str) -> Iterator[tuple[str, Schedule, Schedule]]:
    """The schedules in a rule or an algorithm, with their paths."""
    if isinstance(before, Schedule):
        yield path, before, after
    elif is_dataclass(before) and not isinstance(before, type):
        for name in (field.name for field in fields(before)):
            yield from _rates(getattr(before, name), getattr(after, name), f"{path}.{name}")


def _write(target: RunFolder, finished: RunFolder, spec: EngineSpec, checkpoint: Checkpoint) -> None:
    write_spec(target.path, spec)
    for file in (finished.warm_start, finished.tokenizer, finished.workload):
        if file.exists():
            shutil.copyfile(file, target.path / file.name)
    log = _write_log(target, finished, spec, checkpoint.metadata)
    metadata = {**checkpoint.metadata, **log, "run": run_digest(target.run.resolved, resizable=spec.resizable)}
    with Checkpoints(target.checkpoints, keep=1).writing(checkpoint.round, metadata) as folder:
        for name in checkpoint.files:
            shutil.copyfile(checkpoint.path / name, folder / name)


def _write_log(target: RunFolder, finished: RunFolder, spec: EngineSpec, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Write the events up to the checkpoint, with the new number of steps. Returns where the log ends, for the checkpoint."""
    with JsonlSink(target.events, dated=clock_of(spec.name) == "wall", digested=True) as sink:
        for event in read_events_of(finished.events, metadata):
            sink.emit(replace(event, steps=target.run.train.steps) if isinstance(event, RunStarted) else event)
        return sink.position_record()
