"""The driver: it takes a run from its description to its result, on every engine.

`run` and `resume` hand a RunRequest to the launcher of the chosen engine (`engines/<name>/launch.py`). The launcher opens the run's
folder (`RunRequest.open`) and carries the run out with a Driver: prepare data and warm start, build the engine, restore a
checkpoint, train, save, finish.

The event log and every bit of the weights are functions of the Run. A run that is killed at any moment and resumed therefore leaves
the same files as an uninterrupted one: the driver restores the newest checkpoint and truncates the log at its position.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from atoll.core.config.json_records import to_json, type_name
from atoll.core.config.type_checks import check_type
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Event, Progress, RunFinished, RunStarted, Saved, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Batches, Sink, Workload
from atoll.core.serialization import load_tree, read_tensors, save_tree, write_tensors, write_text
from atoll.data.text import LoadedText
from atoll.data.tokenizer import BPETokenizer
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.processes.spec import Processes
from atoll.engines.simulator.spec import Simulator
from atoll.engines.spec import EngineSpec, processes_started, read_spec, write_spec
from atoll.engines.warm_start_training import Cache, WarmStart, get_warm_start, load_data
from atoll.replica.evaluator import Evaluator
from atoll.replica.master_weights import initial_weights
from atoll.runs.folder import RunFolder, default_path, digest_of
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.validation import check_finetuning_inputs
from atoll.runs.workloads import data_fingerprint, partitioned_by_weights, sharded_workload, single_shard_workload
from atoll.telemetry.event_log import JsonlSink, read_events
from atoll.telemetry.sinks import Fanout, ResumableSink, TensorBoardSink
from atoll.telemetry.summary import Summary, read_summary


@dataclass(frozen=True)
class Result:
    """The figures of a run, the trained module, its weights, and the run's folder."""

    summary: Summary
    module: nn.Module
    params: Tree
    folder: Path

    @property
    def val_loss(self) -> float:
        return self.summary.val_loss


class Faults(Protocol):
    """Faults to inject into a run, to test a cluster; see `atoll.testing.chaos`."""

    def check(self, run: Run, spec: EngineSpec) -> None:
        """Refuse faults that do not fit the run."""
        ...

    def attach(self, task: RunTask) -> AbstractContextManager[Any]:
        """Inject the faults while the context is open. It yields what the engine's launcher asks for."""
        ...


def discard(line: str) -> None:
    """A log without a reader."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a user gives besides the Run and the engine's spec; see `run`."""

    workload: Workload | None = None
    sinks: Sequence[Sink] = ()
    log: Callable[[str], object] = discard
    cache: Cache = field(default_factory=Cache)
    faults: Faults | None = None

    def check_faults(self, run: Run, spec: EngineSpec) -> None:
        if self.faults is not None:
            self.faults.check(run, spec)


@dataclass(frozen=True, kw_only=True)
class RunTask(RunInputs):
    """A run, fitted to its engine, whose folder is open and locked."""

    run: Run
    spec: EngineSpec
    folder: RunFolder

    @property
    def finished(self) -> bool:
        return self.folder.finished

    def reopen(self) -> Result:
        """The result of a finished run, from its folder."""
        return Driver(self).reopen()


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunInputs):
    """A run that a user asks for: a new one, or one to resume if `run` is none. See `run` and `resume`."""

    run: Run | None
    spec: EngineSpec | None
    out: Path | None
    expected: Run | None = None
    command: Sequence[str] = ()

    @property
    def shows_progress(self) -> bool:
        """Whether the user watches: processes that are started for the run show their progress too."""
        return self.log is not discard

    @contextmanager
    def open(self) -> Iterator[RunTask]:
        """Create the folder of a new run, or open that of a run to resume, and hold its lock."""
        run, spec, folder = self._reopen() if self.run is None else self._create(self.run)
        with folder.lock():
            if self.run is None and not folder.finished:
                folder.append_source("resumed", self.command)
                write_spec(folder.path, spec)
            yield RunTask(run=run, spec=spec, folder=folder, **{f.name: getattr(self, f.name) for f in fields(RunInputs)})

    def _create(self, run: Run) -> tuple[Run, EngineSpec, RunFolder]:
        """Refuses what the engine cannot carry out before the folder exists."""
        spec = self.spec or Simulator()
        run = spec.fitted(run)
        self.check_faults(run, spec)
        _refuse_impossible(run.resolved, self.workload, self.cache)
        folder = RunFolder.create(self.out or default_path(run.recipe, run.seed), run, self.command)
        write_spec(folder.path, spec)
        self.log(f"folder: {folder.path}")
        return run, spec, folder

    def _reopen(self) -> tuple[Run, EngineSpec, RunFolder]:
        assert self.out is not None
        folder = RunFolder.open(self.out)
        saved = read_spec(folder.path)
        if self.spec is not None and self.spec.name != saved.name:
            raise ConfigError(
                f"--engine {self.spec.name} with --resume {self.out}: this run's engine is {saved.name}, and stays so. "
                f"Leave out --engine, or start a new run."
            )
        if self.expected is not None:
            folder.same_run(self.expected)
        _check_complete(self.workload)
        folder.check_workload(None if self.workload is None else type_name(type(self.workload)))
        spec = self.spec or saved
        self.check_faults(folder.run, spec)
        return folder.run, spec, folder


def run(
    run: Run,
    *,
    engine: EngineSpec | None = None,
    out: str | Path | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    cache: Cache | None = None,
    log: Callable[[str], object] = discard,
    faults: Faults | None = None,
) -> Result | None:
    """Carry out a Run in a new folder. The result is none on every rank but the first of a run under torchrun.

    Args:
        run: the run.
        engine: Simulator() by default; Processes(), Elastic() or Ray() for real processes.
        out: the run's folder; by default a new one under runs/.
        workload: trained instead of the Run's model and data. A warm start reads its first shard.
        sinks: further receivers of events.
        command: the command that started the run, for source.txt.
        cache: runs with the same cache share data and warm start.
        log: takes lines about processes that start and die.
        faults: to inject.
    """
    check_type("run", run, Run)
    check_type("engine", engine, EngineSpec | None)
    check_type("out", out, str | None)
    _check_complete(workload)
    request = RunRequest(
        run=run,
        spec=engine,
        out=None if out is None else Path(out).expanduser(),
        workload=workload,
        sinks=sinks,
        command=list(command or sys.argv),
        log=log,
        cache=cache or Cache(),
        faults=faults,
    )
    return _launch(request, engine or Simulator())


def resume(
    out: str | Path,
    *,
    engine: EngineSpec | None = None,
    expected: Run | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    log: Callable[[str], object] = discard,
    faults: Faults | None = None,
) -> Result | None:
    """Resume the run in this folder from its newest checkpoint, or from the start if there is none.

    Args:
        out: the run's folder.
        engine: with other settings than before, such as another number of processes; none: as before.
        expected: refuse the folder if its Run differs.
        workload: as it was given to `run`, if one was.
        sinks, command, log, faults: as in `run`.
    """
    check_type("out", out, str)
    check_type("engine", engine, EngineSpec | None)
    check_type("expected", expected, Run | None)
    path = Path(out).expanduser()
    request = RunRequest(
        run=None,
        spec=engine,
        out=path,
        expected=expected,
        workload=workload,
        sinks=sinks,
        command=list(command or sys.argv),
        log=log,
        faults=faults,
    )
    return _launch(request, engine or _spec_of(path))


def _spec_of(path: Path) -> EngineSpec:
    """The spec in a run's folder. Under torchrun only rank 0 needs the folder."""
    if processes_started() > 1 and not path.is_dir():
        return Processes()
    RunFolder.open(path)
    return read_spec(path)


def _launch(request: RunRequest, spec: EngineSpec) -> Result | None:
    start: Callable[[RunRequest], Result | None] = import_module(f"atoll.engines.{spec.name}.launch").start
    return start(request)


def _refuse_impossible(run: Run, workload: Workload | None, cache: Cache) -> None:
    """Refuse a run that this machine cannot carry out, before it has a folder."""
    device_of(run)
    for number in range(run.rounds(run.train.steps) if run.cluster.away else 0):
        run.cluster.present(number, run.rounds(run.train.steps))
    if workload is None:
        check_finetuning_inputs(run)
        data = load_data(run, cache)
        plain = single_shard_workload(run, data)
        if not partitioned_by_weights(run):  # else the data are partitioned by weights that are still to be trained
            sharded_workload(run, data, initial_weights(plain, device_of(run), dtype_of(run)))


def _check_complete(workload: Workload | None) -> None:
    """Refuse a workload that lacks a method now, not in the middle of a run."""
    check_type("workload", workload, Workload | None)
    if workload is not None:
        check_type("workload.batches", workload.batches, Batches)


@dataclass(frozen=True)
class Prepared:
    """What an engine starts from: data in shards, weights, and the digests of Run and data, which a checkpoint must match."""

    workload: Workload
    warm_start: WarmStart
    origin: Mapping[str, str | None]


class Driver:
    """Carries out one run in this process. Engines override `build` and `restore`, and what else is different for them."""

    leads = True
    """Whether this process writes the run's log and its figures. Exactly one does."""

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self.run = task.run.resolved
        self.folder = task.folder
        self.checkpoints: Any = Checkpoints(self.folder.checkpoints, keep=self.run.keep.checkpoints)
        self.event_log: JsonlSink | None = None
        self._began_s = time.perf_counter()

    # ------------------------------------------------------------------------------------------------------ one engine's own

    def build(self, prepared: Prepared, evaluator: Evaluator | None, sink: Sink) -> Any:
        """The engine. It has `steps`, `steps_taken`, `round`, `train`, which yields when a checkpoint is due, and `finish`."""
        raise AssertionError(f"{type(self).__name__} has no engine in this process")

    def restore(self, engine: Any, checkpoint: Checkpoint) -> None:
        """Have the engine continue from a checkpoint."""
        engine.restore(lambda part, like: self.checkpoints.load(checkpoint, part, like))

    def write_checkpoint(self, engine: Any, metadata: Mapping[str, Any]) -> None:
        self.checkpoints.save(engine.round, engine.parts(), metadata)

    def trained(self, engine: Any) -> tuple[Tree, Mapping[str, Tensor]]:
        """The weights and buffers that the engine ends with."""
        return engine.params, engine.buffers()

    def close(self, engine: Any, *, failed: bool) -> None:
        """Release what the engine holds."""

    def make_evaluator(self, workload: Workload) -> Evaluator:
        return Evaluator(workload, device_of(self.run), dtype_of(self.run))

    def make_warm_start(self, plain: Workload, sink: Sink, *, resuming: bool) -> WarmStart:
        """The weights of the start: trained by one replica, or read from the folder or the cache."""
        cache = self.task.cache if self.task.workload is None else None
        return get_warm_start(self.run, plain, file=self.folder.warm_start, cache=cache, sink=sink)

    def run_digest(self) -> str:
        return digest_of(to_json(self.run))

    # ------------------------------------------------------------------------------------------------------------- the run

    def carry_out(self) -> Result | None:
        checkpoint = self.checkpoints.newest()
        with ExitStack() as stack:
            sink: Sink = Fanout([])
            if self.leads:
                self.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
                sink = stack.enter_context(Fanout(self.open_sinks(checkpoint)))
            prepared = self.prepare(sink, checkpoint)
            evaluator = self.make_evaluator(prepared.workload) if self.leads else None
            engine = self.build(prepared, evaluator, sink)
            stack.push(lambda kind, error, trace: self.close(engine, failed=kind is not None))
            if checkpoint is not None:
                self.restore(engine, checkpoint)
                sink.emit(
                    Progress(phase="resume", done=engine.steps_taken, total=engine.steps, note=f"from round {checkpoint.round}")
                )
            with closing(engine.train()) as checkpoints_due:
                for _ in checkpoints_due:
                    self._save(engine, prepared.origin, sink)
            finished = engine.finish(prepared.warm_start.tokens)
            params, buffers = self.trained(engine)
            if evaluator is None:
                return None
            self.write_final(params, buffers, finished, checkpoint)
        return self.result(evaluator, params, buffers)

    def prepare(self, sink: Sink, checkpoint: Checkpoint | None) -> Prepared:
        """Load the data and make the warm start. A new run's log begins with them."""
        task, run = self.task, self.run
        plain = self.single_shard_workload()
        if checkpoint is None and self.leads:
            self.write_inputs()
            sink.emit(self.started(plain))
        warm = self.make_warm_start(plain, sink, resuming=checkpoint is not None)
        if checkpoint is None and run.train.warm_start_steps:
            sink.emit(WarmStartFinished(steps=run.train.warm_start_steps, tokens=warm.tokens, loss=warm.loss))
        workload = task.workload or sharded_workload(run, load_data(run, task.cache), warm.params)
        prepared = Prepared(workload, warm, {"run": self.run_digest(), "data": data_fingerprint(workload)})
        if checkpoint is not None:
            check_origin(checkpoint, prepared.origin, self.folder.path)
        return prepared

    def _save(self, engine: Any, origin: Mapping[str, str | None], sink: Sink) -> None:
        """Save a checkpoint of the engine's round."""
        # The event comes first: the log is truncated where its checkpoint says, and must hold this line then too.
        sink.emit(Saved(round=engine.round, name=Checkpoints.name(engine.round)))
        position = {"events_bytes": self.event_log.position()} if self.event_log is not None else {}
        self.write_checkpoint(engine, {**position, **origin})

    # ------------------------------------------------------------------------------------------------------------- its parts

    def single_shard_workload(self) -> Workload:
        """What plain training reads: all data, in one shard."""
        return self.task.workload or single_shard_workload(self.run, load_data(self.run, self.task.cache))

    def open_sinks(self, checkpoint: Checkpoint | None) -> list[Sink]:
        """The receivers of events: the log, truncated at the checkpoint, TensorBoard if asked for, and the user's."""
        self.event_log = JsonlSink(self.folder.events, append_at=checkpoint.metadata["events_bytes"] if checkpoint else None)
        for sink in self.task.sinks if checkpoint else ():
            if isinstance(sink, ResumableSink):
                sink.recall(read_events(self.folder.events))
        sinks: list[Sink] = [self.event_log]
        if self.run.keep.tensorboard:
            replay = read_events(self.folder.events) if checkpoint else None
            sinks.append(TensorBoardSink(self.folder.path / "tensorboard", replay=replay))
        return [*sinks, *self.task.sinks]

    def write_inputs(self) -> None:
        """Write the name of the user's workload, or the tokenizer, so that the model can be used without its text."""
        if self.task.workload is not None:
            write_text(self.folder.workload, f"{type_name(type(self.task.workload))}\n")
            return
        data = load_data(self.run, self.task.cache)
        if isinstance(data, LoadedText) and isinstance(data.tokenizer, BPETokenizer):
            write_text(self.folder.tokenizer, data.tokenizer.text)

    def started(self, workload: Workload) -> Event:
        run = self.run
        inside = "" if run.inside is None else f" over {type(run.inside).__name__}"
        return RunStarted(
            recipe=run.recipe,
            algorithm=type(run.algorithm).__name__ + inside,
            islands=run.effective_cluster.islands,
            params=sum(p.numel() for p in workload.module().parameters() if p.requires_grad),
            steps=run.train.steps,
            seed=run.seed,
            engine=self.task.spec.name,
            devices_per_island=None if run.inside is None else run.cluster.devices_per_island,
        )

    def write_final(
        self, params: Tree, buffers: Mapping[str, Tensor], finished: RunFinished, checkpoint: Checkpoint | None
    ) -> None:
        """Write the trained weights."""
        self.note(
            "finished", wall_time_s=time.perf_counter() - self._began_s, resumed_from_round=checkpoint.round if checkpoint else 0
        )
        if buffers:
            write_tensors(self.folder.final_buffers, buffers)
        save_tree(self.folder.final, params, {"recipe": self.run.recipe, "round": str(finished.rounds)})

    def result(self, evaluator: Evaluator, params: Tree, buffers: Mapping[str, Tensor]) -> Result:
        """Write the summary, which marks the run as finished."""
        evaluator.load(params, buffers)
        summary = read_summary(self.folder.path)
        write_text(self.folder.summary, summary.to_json() + "\n")
        return Result(summary, evaluator.module, params, self.folder.path)

    def reopen(self) -> Result:
        """The result of a finished run, without training."""
        buffers = read_tensors(self.folder.final_buffers)[0] if self.folder.final_buffers.exists() else {}
        evaluator = Evaluator(self.single_shard_workload(), dtype=dtype_of(self.run))
        return self.result(evaluator, load_tree(self.folder.final), buffers)

    def note(self, what: str, **figures: float) -> None:
        """Append figures that depend on the machine to a file of their own."""
        try:
            with self.folder.timing.open("a") as file:
                file.write(json.dumps({"what": what, "unix_time_s": time.time(), **figures}) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"could not write {self.folder.timing}: {error.strerror}. Free disk space there, then resume."
            ) from error


def digest_without_islands(run: Run) -> str:
    """The digest of a Run's settings but for the number of islands, which may change on resume."""
    plain = to_json(run)
    plain["cluster"]["islands"] = None
    return digest_of(plain)
