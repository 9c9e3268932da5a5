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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from atoll.core.config.json_records import type_name
from atoll.core.config.type_checks import check_type
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Progress, RunFinished, RunStarted, Saved, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Batches, Sink, Workload
from atoll.core.serialization import load_tree, read_tensors, save_tree, write_tensors
from atoll.core.verified_files import expanded, is_verified, open_to_append, write_text
from atoll.data.text_dataset import LoadedText
from atoll.data.tokenizer import BPETokenizer
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.simulator.spec import Simulator
from atoll.engines.spec import EngineSpec, read_spec, refuse_torchrun, saved_spec, write_spec
from atoll.engines.training_setup import matrix_products
from atoll.engines.user_code import LoopWorkload, load_user_code
from atoll.engines.warm_start_training import Cache, Prepared, RunPreparation, WarmStart
from atoll.replica.evaluator import Evaluator
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run_settings import Run, check_recorded_precision, choose_computing, device_of, dtype_of, here
from atoll.runs.settings_validation import check_model_inputs
from atoll.runs.workloads import partitioned_by_weights
from atoll.telemetry.event_log import JsonlSink, clock_of, log_damage, read_events
from atoll.telemetry.sinks import Fanout, ResumableSink, TensorBoardSink, import_tensorboard
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

    def attach(self, task: RunTask) -> AbstractContextManager[Any]:
        """Inject the faults while the context is open. It yields what the engine's launcher asks for."""


def discard(line: str) -> None:
    """A log without a reader."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a user gives besides the Run and the engine's spec; see `run`."""

    workload: Workload | None = None
    code: str = ""
    """By which other processes load the workload; empty if it lives in this process."""
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

    @cached_property
    def preparation(self) -> RunPreparation:
        return RunPreparation(self.run.resolved, self.workload, self.cache, self.log)

    def reopen(self) -> Result:
        """The result of a finished run, from its folder."""
        buffers = read_tensors(self.folder.final_buffers)[0] if self.folder.final_buffers.exists() else {}
        evaluator = Evaluator(self.preparation.single_shard, dtype=dtype_of(self.run.resolved))
        return RunResults(self).result(evaluator, load_tree(self.folder.final), buffers)

    def injecting(self, without: Any = None) -> AbstractContextManager[Any]:
        """Injects the user's faults while the context is open; yields `without` if there are none."""
        return nullcontext(without) if self.faults is None else self.faults.attach(self)


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunInputs):
    """A run that a user asks for: a new one, or one to resume if `run` is none. See `run` and `resume`."""

    run: Run | None
    spec: EngineSpec | None
    out: Path | None
    command: Sequence[str] = ()

    @contextmanager
    def open(self) -> Iterator[RunTask]:
        """Create the folder of a new run, or open that of a run to resume, and hold its lock."""
        run, spec, folder = self._reopen() if self.run is None else self._create(self.run)
        with folder.lock():
            if self.run is None and not folder.finished:
                folder.append_source("resumed", self.command)
                folder.unseal()
                write_spec(folder.path, spec)
            yield RunTask(run=run, spec=spec, folder=folder, **{f.name: getattr(self, f.name) for f in fields(RunInputs)})

    def _create(self, run: Run) -> tuple[Run, EngineSpec, RunFolder]:
        """Refuses what the engine cannot carry out before the folder exists. The folder records the precision and the compilation
        that are chosen here, so that a resumed run keeps them on any device."""
        spec = self.spec or Simulator()
        run = spec.fitted(run)
        islands = None if isinstance(spec, Simulator) else 1
        train, notice = choose_computing(run, here(run), islands=islands, own_workload=self.workload is not None)
        run = replace(run, train=train)
        self.check_faults(run, spec)
        _refuse_impossible(RunPreparation(run.resolved, self.workload, self.cache, self.log))
        folder = RunFolder.create(self.out or default_path(run.recipe, run.seed), run, self.command)
        write_spec(folder.path, spec)
        self.log(f"folder: {folder.path}")
        if notice:
            self.log(notice)
        return run, spec, folder

    def _reopen(self) -> tuple[Run, EngineSpec, RunFolder]:
        assert self.out is not None
        folder = RunFolder.open(self.out)
        saved = check_resumable(folder, self.spec, self.workload)
        self._log_unverified(folder)
        spec = self.spec or saved
        self.check_faults(folder.run, spec)
        if not folder.finished:
            check_recorded_precision(folder.run, here(folder.run))
        return folder.run, spec, folder

    def _log_unverified(self, folder: RunFolder) -> None:
        """Log which files of the folder have no digest, and a log with holes. An engine that needs the whole log refuses it."""
        unverified = [path.name for path in (folder.settings, folder.engine) if not is_verified(path)]
        if unverified:
            self.log(f"{' and '.join(unverified)} in {folder.path} cannot be verified: an older version of atoll wrote no digests")
        if folder.checkpoints.is_dir() and (damage := log_damage(folder.events)) is not None:
            self.log(f"{damage}: what it held of earlier rounds is lost for reports")


def run(
    run: Run,
    *,
    engine: EngineSpec | None = None,
    out: str | Path | None = None,
    workload: Workload | str | None = None,
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
        workload: trained instead of the Run's model and data. A warm start reads its first shard. With Elastic() it is the name of
            a function, as "FILE.py:NAME" or "MODULE:NAME", which every island calls: without parameters it returns the workload;
            with one it is a training loop, for `atoll.run_islands`, which Ray() takes, too.
        sinks: further receivers of events.
        command: the command that started the run, for source.txt.
        cache: runs with the same cache share data and warm start.
        log: takes lines about processes that start and die.
        faults: to inject.
    """
    check_type("run", run, Run)
    return _launch(run, engine, out, workload, sinks, command, log, faults, cache or Cache())


def resume(
    out: str | Path,
    *,
    engine: EngineSpec | None = None,
    workload: Workload | str | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    log: Callable[[str], object] = discard,
    faults: Faults | None = None,
) -> Result | None:
    """Resume the run in this folder from its newest checkpoint, or from the start if there is none.

    Args:
        out: the run's folder.
        engine: with other settings than before, such as another number of processes; none: as before.
        workload: as it was given to `run`, if one was.
        sinks, command, log, faults: as in `run`.
    """
    check_type("out", out, str)
    return _launch(None, engine, out, workload, sinks, command, log, faults, Cache())


def _launch(
    run: Run | None,
    engine: EngineSpec | None,
    out: str | Path | None,
    workload: Workload | str | None,
    sinks: Sequence[Sink],
    command: Sequence[str] | None,
    log: Callable[[str], object],
    faults: Faults | None,
    cache: Cache,
) -> Result | None:
    """Have the engine's launcher start the run, or resume the run in `out`."""
    check_type("engine", engine, EngineSpec | None)
    check_type("out", out, str | None)
    code = ""
    if isinstance(workload, str):
        own = load_user_code(workload)
        workload, code = own.open(), own.name
    check_type("workload", workload, Workload | None)
    if workload is not None:  # a missing method is refused now, not in the middle of a run
        check_type("workload.batches", workload.batches, Batches)
    path, line = None if out is None else expanded(out), list(command or sys.argv)
    spec = engine or (Simulator() if run is not None or path is None else saved_spec(path))
    if isinstance(workload, LoopWorkload) and spec.name not in ("elastic", "ray"):
        raise ConfigError(
            f"{code} is a training loop, and the engine {spec.name} trains workloads. Use --engine elastic, or ray for an "
            f"asynchronous algorithm; or give a function without parameters, which returns a Workload."
        )
    if isinstance(workload, LoopWorkload) and run is not None and run.train.warm_start_steps:
        raise ConfigError(
            f"train.warm_start_steps={run.train.warm_start_steps} with the loop {code}: a warm start needs a workload. Use "
            f"train.warm_start_steps=0."
        )
    given: dict[str, Any] = {"workload": workload, "code": code, "sinks": sinks, "log": log, "cache": cache, "faults": faults}
    request = RunRequest(run=run, spec=engine, out=path, command=line, **given)
    if not spec.runs_on_ranks:
        refuse_torchrun(spec)
    start: Callable[[RunRequest], Result | None] = import_module(f"atoll.engines.{spec.name}.launch").start
    return start(request)


def _refuse_impossible(preparation: RunPreparation) -> None:
    """Refuse a run that this machine cannot carry out, before it has a folder."""
    run = preparation.run
    device_of(run)
    run.cluster.check_presence(run.rounds(run.train.steps))
    if run.keep.tensorboard:
        import_tensorboard()
    if preparation.workload is None:
        check_model_inputs(run)
        weights = preparation.initial_weights()
        if not partitioned_by_weights(run):  # else the data are partitioned by weights that are still to be trained
            preparation.sharded(weights)


def check_resumable(folder: RunFolder, spec: EngineSpec | None, workload: Workload | None) -> EngineSpec:
    """Refuses another engine or another workload than the run of this folder has. Returns its engine."""
    saved = read_spec(folder.path)
    if spec is not None and spec.name != saved.name:
        raise ConfigError(
            f"--engine {spec.name} with --resume {folder.path}: this run's engine is {saved.name}, and stays so. "
            f"Leave out --engine, or start a new run."
        )
    folder.check_workload(None if workload is None else type_name(type(workload)))
    return saved


class RunResults:
    """Writes what a run leaves in its folder, besides its checkpoints and the events of its rounds."""

    def __init__(self, task: RunTask) -> None:
        self.task, self.run, self.folder = task, task.run.resolved, task.folder
        self._began_s = time.perf_counter()

    def begin(self, sink: Sink) -> None:
        """Write the name of the user's workload, or the tokenizer, so that the model can be used without its text. Then begin the
        log."""
        run, preparation = self.run, self.task.preparation
        if preparation.workload is not None:
            write_text(self.folder.workload, f"{type_name(type(preparation.workload))}\n")
        else:
            data = preparation.data
            if isinstance(data, LoadedText) and isinstance(data.tokenizer, BPETokenizer):
                write_text(self.folder.tokenizer, data.tokenizer.text)
        inside = "" if run.inside is None else f" over {type(run.inside).__name__}"
        started = RunStarted(
            recipe=run.recipe,
            algorithm=type(run.algorithm).__name__ + inside,
            islands=run.effective_cluster.islands,
            params=sum(p.numel() for p in preparation.single_shard.module().parameters() if p.requires_grad),
            steps=run.train.steps,
            seed=run.seed,
            engine=self.task.spec.name,
            devices_per_island=None if run.inside is None else run.cluster.devices_per_island,
        )
        sink.emit(started)

    def warm_started(self, warm: WarmStart, sink: Sink) -> None:
        if self.run.train.warm_start_steps:
            sink.emit(WarmStartFinished(steps=self.run.train.warm_start_steps, tokens=warm.tokens, loss=warm.loss))

    def write_final(
        self, params: Tree, buffers: Mapping[str, Tensor], finished: RunFinished, checkpoint: Checkpoint | None
    ) -> None:
        """Write the trained weights. `checkpoint` is the one that this process continued from."""
        round = checkpoint.round if checkpoint else 0
        self.note("finished", wall_time_s=time.perf_counter() - self._began_s, resumed_from_round=round)
        self.folder.unseal()  # digests of results that these replace
        if buffers:
            write_tensors(self.folder.final_buffers, buffers)
        save_tree(self.folder.final, params, {"recipe": self.run.recipe, "round": str(finished.rounds)})

    def result(self, evaluator: Evaluator, params: Tree, buffers: Mapping[str, Tensor]) -> Result:
        """Write the summary, and the digests of the folder's files, which mark the run as finished."""
        evaluator.load(params, buffers)
        summary = read_summary(self.folder.path)
        write_text(self.folder.summary, summary.to_json() + "\n")
        self.folder.seal()
        return Result(summary, evaluator.module, params, self.folder.path)

    def note(self, what: str, **figures: float) -> None:
        """Append figures that depend on the machine to a file of their own."""
        try:
            with open_to_append(self.folder.timing) as file:
                file.write(json.dumps({"what": what, "unix_time_s": time.time(), **figures}).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(
                f"could not write {self.folder.timing}: {error.strerror}. Free disk space there, then resume."
            ) from error


class Engine(Protocol):
    """What the driver asks of an engine. Only the engine's own driver knows what it saves and how it continues from that."""

    @property
    def steps_taken(self) -> int: ...

    @property
    def round(self) -> int: ...

    @property
    def params(self) -> Tree:
        """The global weights."""

    def buffers(self) -> Mapping[str, Tensor]: ...

    def train(self) -> Iterator[None]:
        """Train to the end. Yields when a checkpoint is due."""

    def finish(self, warm_start_tokens: int) -> RunFinished | None:
        """The figures of the run, in the process that leads."""


E = TypeVar("E", bound=Engine)


class Driver(ABC, Generic[E]):
    """Carries out one run in this process. Each engine has a driver that opens it, saves it, and overrides what else differs."""

    leads = True
    """Whether this process writes the run's log and its figures. Exactly one does."""

    def __init__(self, task: RunTask) -> None:
        self.task, self.run, self.folder = task, task.run.resolved, task.folder
        self.preparation, self.results = task.preparation, RunResults(task)
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep=self.run.keep.checkpoints)
        self.event_log: JsonlSink | None = None

    # ------------------------------------------------------------------------------------------------------ one engine's own

    @abstractmethod
    def open_engine(self, prepared: Prepared, evaluator: Evaluator | None, sink: Sink) -> AbstractContextManager[E]:
        """The engine, and what it holds while it trains. Only the process that leads has an evaluator."""

    def restore(self, engine: E, checkpoint: Checkpoint) -> None:
        """Have the engine continue from a checkpoint."""

    def write_checkpoint(self, engine: E, metadata: Mapping[str, Any]) -> None:
        """Save what the engine needs to continue."""

    def newest_checkpoint(self) -> Checkpoint | None:
        return self.checkpoints.newest()

    def make_warm_start(self, sink: Sink, *, resuming: bool) -> WarmStart:
        """The weights of the start: trained by one replica, or read from the folder or the cache."""
        return self.preparation.warm_start(self.folder.warm_start, sink)

    # ------------------------------------------------------------------------------------------------------------- the run

    def carry_out(self) -> Result | None:
        checkpoint = self.newest_checkpoint()
        with ExitStack() as stack:
            stack.enter_context(matrix_products(self.run))
            if self.leads:
                self.results.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
            sink = stack.enter_context(Fanout(self.open_sinks(checkpoint) if self.leads else self.task.sinks))
            prepared = self.prepare(sink, checkpoint)
            evaluator = Evaluator(prepared.workload, device_of(self.run), dtype_of(self.run)) if self.leads else None
            with self.open_engine(prepared, evaluator, sink) as engine:
                if checkpoint is not None:
                    self.restore(engine, checkpoint)
                    note = f"from round {checkpoint.round}"
                    sink.emit(Progress(phase="resume", done=engine.steps_taken, total=self.run.train.steps, note=note))
                with closing(engine.train()) as checkpoints_due:  # type: ignore[type-var]
                    for _ in checkpoints_due:
                        self._save(engine, prepared.origin, sink)
                finished = engine.finish(prepared.warm_start.tokens)
                params, buffers = engine.params, engine.buffers()
            if evaluator is None or finished is None:
                return None
            self.results.write_final(params, buffers, finished, checkpoint)
        return self.results.result(evaluator, params, buffers)

    def prepare(self, sink: Sink, checkpoint: Checkpoint | None) -> Prepared:
        """Load the data and make the warm start. A new run's log begins with them."""
        if self.leads and (checkpoint is None or (self.event_log is not None and not self.event_log.has_beginning)):
            self.results.begin(sink)
        warm = self.make_warm_start(sink, resuming=checkpoint is not None)
        if checkpoint is None:
            self.results.warm_started(warm, sink)
        prepared = self.preparation.prepared(warm, resizable=self.task.spec.resizable)
        if checkpoint is not None:
            check_origin(checkpoint, prepared.origin, self.folder.path)
        return prepared

    def open_sinks(self, checkpoint: Checkpoint | None) -> list[Sink]:
        """The receivers of events: the log, truncated at the checkpoint, TensorBoard if asked for, and the user's."""
        path, dated = self.folder.events, clock_of(self.task.spec.name) == "wall"
        if checkpoint is None:
            self.event_log = JsonlSink(path, dated=dated, digested=True)
        else:
            self.event_log = JsonlSink.at_record(path, checkpoint.metadata, dated=dated)
        for sink in self.task.sinks if checkpoint else ():
            if isinstance(sink, ResumableSink):
                sink.recall(read_events(self.folder.events))
        sinks: list[Sink] = [self.event_log]
        if self.run.keep.tensorboard:
            replay = read_events(self.folder.events) if checkpoint else None
            sinks.append(TensorBoardSink(self.folder.path / "tensorboard", replay=replay))
        return [*sinks, *self.task.sinks]

    def _save(self, engine: E, origin: Mapping[str, str | None], sink: Sink) -> None:
        """Save a checkpoint of the engine's round."""
        # The event comes first: the log is truncated where its checkpoint says, and must hold this line then too.
        sink.emit(Saved(round=engine.round, name=Checkpoints.name(engine.round)))
        position = self.event_log.position_record() if self.event_log is not None else {}
        self.write_checkpoint(engine, {**position, **origin})
