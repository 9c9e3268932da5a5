"""Carrying out a Run: a folder, a warm start, the engine, and what is left behind.

The event log and every bit of the weights are functions of the Run. So a run that was killed at any moment and resumed leaves what
one leaves that was never stopped: it goes on from the newest checkpoint, and what was logged after that checkpoint is cut.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.core.config.json_records import from_json, full_name, to_json
from atoll.core.config.type_checks import check_type
from atoll.core.errors import AtollError, CheckpointError, ConfigError
from atoll.core.events import Event, Progress, RunFinished, RunStarted, Saved, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Batches, Sink, Workload
from atoll.core.serialization import load_tree, read_tensors, save_tree, write_tensors
from atoll.data.text import LoadedText
from atoll.data.tokenizer import BPETokenizer
from atoll.engines.build import Engine, engine_of
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.warm_start import Cache as Cache
from atoll.engines.warm_start import WarmStart, load_data, warm_up
from atoll.replica.evaluator import Evaluator
from atoll.replica.master_weights import initial_weights
from atoll.runs.finetuning import check_given
from atoll.runs.folder import RunFolder, default_path, write_text
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.workloads import Loaded, fingerprint, island_workload, needs_weights, plain_workload
from atoll.telemetry.event_log import JsonlSink, read_events
from atoll.telemetry.sinks import Fanout, ResumableSink, TensorBoardSink
from atoll.telemetry.summary import Summary, read_summary

TOKENIZER = "tokenizer.json"
"""The tokenizer of the run's text; none for bytes."""
WORKLOAD = "workload.txt"
"""Names the workload that was trained instead of the Run's own model and data."""


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        summary: its figures.
        module: the trained module.
        params: its weights.
        folder: the run's folder.
    """

    summary: Summary
    module: nn.Module
    params: Tree
    folder: Path

    @property
    def val_loss(self) -> float:
        return self.summary.val_loss


def run(
    run: Run,
    *,
    out: str | Path | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    cache: Cache | None = None,
) -> Result:
    """Carries out a Run in a new folder.

    Args:
        run: what to do.
        out: the folder; by default a new one under runs/.
        workload: what to train instead of the Run's model and data. A warm start then reads its first shard.
        sinks: who else takes the events.
        command: how the run was asked for, for the record.
        cache: give several runs the same one, and they share data and warm start.
    """
    check_type("run", run, Run)
    check_type("out", out, str | None)
    cache = cache or Cache()
    refuse_impossible(run.resolved, workload, cache)
    path = Path(out or default_path(run.recipe, run.seed)).expanduser()
    folder = RunFolder.create(path, to_json(run), list(command or sys.argv))
    with folder.lock():
        return Execution(run, folder, workload, sinks, cache).start()


def resume(
    out: str | Path,
    *,
    expected: Run | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
) -> Result:
    """Goes on with the run in this folder, from its newest checkpoint or else from the start.

    Args:
        out: the run's folder.
        expected: refuse the folder if its run is another.
        workload: as it was given to `run`, if one was.
        sinks: who else takes the events.
        command: how the run was asked for, for the record.
    """
    check_type("out", out, str)
    check_type("expected", expected, Run | None)
    folder = RunFolder.open(Path(out))
    if expected is not None:
        folder.same_run(to_json(expected))
    with folder.lock():
        folder.resumed(list(command or sys.argv))
        return Execution(from_json(folder.run_json), folder, workload, sinks, Cache()).resume()


class Execution:
    """One process's share of a run."""

    def __init__(self, given: Run, folder: RunFolder, workload: Workload | None, sinks: Sequence[Sink], cache: Cache) -> None:
        self._run = given.resolved
        self._folder = folder
        self._given_workload = workload
        self._sinks = sinks
        self._cache = cache
        self._buffers_file = folder.path / "final_buffers.safetensors"
        self._checkpoints = Checkpoints(folder.checkpoints, keep=given.keep.checkpoints)
        self._log: JsonlSink | None = None
        self._origin: dict[str, str | None] = {}
        self._began = time.perf_counter()

    def start(self) -> Result:
        self.keep_what_is_read()
        self.note("started")
        return self._carry_out(None)

    def keep_what_is_read(self) -> None:
        """The name of a workload that was given; else the tokenizer, so that the model can be used without the text."""
        if self._given_workload is not None:
            write_text(self._folder.path / WORKLOAD, f"{full_name(type(self._given_workload))}\n")
            return
        data = self._data()
        if isinstance(data, LoadedText) and isinstance(data.tokenizer, BPETokenizer):
            write_text(self._folder.path / TOKENIZER, data.tokenizer.text)

    def resume(self) -> Result:
        check_workload(self._folder, self._given_workload)
        if is_finished(self._folder):
            return self._reopen()
        checkpoint = self._checkpoints.newest()
        self.note("resumed", round=checkpoint.round if checkpoint else 0)
        return self._carry_out(checkpoint)

    def _carry_out(self, checkpoint: Checkpoint | None) -> Result:
        with Fanout(self.sinks(checkpoint)) as sink:
            warm = self._warm_up(sink, silent=checkpoint is not None)
            workload = self._given_workload or island_workload(self._run, self._data(), warm.params)
            self._origin = {"run": digest_of(to_json(self._run)), "data": fingerprint(workload)}
            engine, evaluator = engine_of(self._run, workload, warm.params, sink, self._saver(sink))
            if checkpoint is not None:
                check_origin(checkpoint, self._origin, self._folder.path)
                engine.restore(lambda part, like: self._checkpoints.load(checkpoint, part, like))
                sink.emit(
                    Progress(
                        phase="resume",
                        done=engine.accounting.totals.steps,
                        total=engine.steps,
                        note=f"from round {checkpoint.round}",
                    )
                )
            finished = engine.run(warm.tokens)
            self.leave(engine.params, engine.buffers(), finished, checkpoint)
        evaluator.load(engine.params, engine.buffers())
        return self.result(evaluator, engine.params)

    # ------------------------------------------------------------------------------------------------------- the beginning

    def sinks(self, checkpoint: Checkpoint | None) -> list[Sink]:
        """Who takes the events of a run that begins, or goes on from a checkpoint."""
        return [self._open_log(checkpoint), *self._more_sinks(resuming=checkpoint is not None), *self._sinks]

    def log_bytes(self) -> int:
        """How long the log is."""
        assert self._log is not None, "the log is not open"
        return self._log.position()

    def _open_log(self, checkpoint: Checkpoint | None) -> JsonlSink:
        self._log = JsonlSink(self._folder.events, append_at=checkpoint.metadata["events_bytes"] if checkpoint else None)
        for sink in self._sinks if checkpoint else ():
            if isinstance(sink, ResumableSink):
                sink.recall(read_events(self._folder.events))
        return self._log

    def _more_sinks(self, *, resuming: bool) -> list[Sink]:
        if not self._run.keep.tensorboard:
            return []
        return [TensorBoardSink(self._folder.path / "tensorboard", replay=read_events(self._folder.events) if resuming else None)]

    def _data(self) -> Loaded:
        return load_data(self._run, self._cache)

    def _plain(self) -> Workload:
        return self._given_workload or plain_workload(self._run, self._data())

    def _warm_up(self, sink: Sink, *, silent: bool) -> WarmStart:
        plain, steps = self._plain(), self._run.train.warm_start_steps
        if not silent:
            sink.emit(self.started(plain))
        shared = self._cache if self._given_workload is None else None
        warm = warm_up(self._run, plain, file=self._folder.warm_start, cache=shared, sink=sink)
        if steps and not silent:
            sink.emit(WarmStartFinished(steps=steps, tokens=warm.tokens, loss=warm.loss))
        return warm

    def started(self, workload: Workload, engine: str = "sim") -> Event:
        run = self._run
        params = sum(p.numel() for p in workload.module().parameters() if p.requires_grad)
        name = type(run.algorithm).__name__
        if run.inside is not None:
            name += f" over {type(run.inside).__name__}"
        return RunStarted(
            recipe=run.recipe,
            algorithm=name,
            islands=run.world.islands,
            params=params,
            steps=run.train.steps,
            seed=run.seed,
            engine=engine,
            devices_per_island=None if run.inside is None else run.cluster.devices_per_island,
        )

    # ------------------------------------------------------------------------------------------------------------- the end

    def _saver(self, sink: Sink) -> Callable[[Engine], None]:
        def save(engine: Engine) -> None:
            # Before it is written: a log is cut where its checkpoint says, and one that goes on must have this line as any other.
            sink.emit(Saved(round=engine.round, name=f"{engine.round:08}"))
            self._checkpoints.save(engine.round, engine.parts(), {"events_bytes": self.log_bytes(), **self._origin})

        return save

    def leave(self, params: Tree, buffers: Mapping[str, Tensor], finished: RunFinished, checkpoint: Checkpoint | None) -> None:
        """What is left behind of a run that is over."""
        self.note(
            "finished", wall_time_s=time.perf_counter() - self._began, resumed_from_round=checkpoint.round if checkpoint else 0
        )
        if buffers:
            write_tensors(self._buffers_file, buffers)
        save_tree(self._folder.final, params, {"recipe": self._run.recipe, "round": str(finished.rounds)})

    def result(self, evaluator: Evaluator, params: Tree) -> Result:
        summary = read_summary(self._folder.path)
        write_text(self._folder.summary, summary.to_json() + "\n")
        return Result(summary, evaluator.module, params, self._folder.path)

    def _reopen(self) -> Result:
        """A finished run again, without running it."""
        params = load_tree(self._folder.final)
        evaluator = Evaluator(self._plain(), dtype=dtype_of(self._run))
        buffers = read_tensors(self._buffers_file)[0] if self._buffers_file.exists() else {}
        evaluator.load(params, buffers)
        return self.result(evaluator, params)

    def note(self, what: str, **figures: float) -> None:
        """What depends on the machine goes into a file of its own."""
        try:
            with self._folder.timing.open("a") as file:
                file.write(json.dumps({"what": what, "unix_time_s": time.time(), **figures}) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"could not write {self._folder.timing}: {error.strerror}. Make room there, then resume."
            ) from error


def is_finished(folder: RunFolder) -> bool:
    """Whether nothing is left to do."""
    try:
        read_summary(folder.path)
    except AtollError:
        return False
    return folder.final.exists()


def refuse_impossible(run: Run, workload: Workload | None, cache: Cache) -> None:
    """What cannot be run is refused before there is a folder."""
    device_of(run)
    for number in range(run.rounds(run.train.steps) if run.cluster.away else 0):
        run.cluster.present(number, run.rounds(run.train.steps))
    check_complete(workload)
    if workload is None:
        check_given(run)
        data = load_data(run, cache)
        plain = plain_workload(run, data)
        if not needs_weights(run):  # which are still to be trained
            island_workload(run, data, initial_weights(plain, device_of(run), dtype_of(run)))


def check_complete(workload: Workload | None) -> None:
    """Refuses a workload that lacks something: it would be missed in the middle of a run."""
    check_type("workload", workload, Workload | None)
    if workload is not None:
        check_type("workload.batches", workload.batches, Batches)


def check_workload(folder: RunFolder, given: Workload | None) -> None:
    """A run of a workload of its own is gone on with, and looked at, with that workload alone."""
    check_complete(given)
    mark = folder.path / WORKLOAD
    name = mark.read_text().strip() if mark.exists() else None
    if name is not None and given is None:
        raise ConfigError(
            f"{folder.path} trained a workload of its own, {name}, which its settings do not describe. Go on from Python: "
            f"atoll.resume({str(folder.path)!r}, workload=...)."
        )
    if name is None and given is not None:
        raise ConfigError(f"{folder.path} trained its own model on its own data, not a {type(given).__name__}. Leave out workload.")


def digest_of(plain: Any) -> str:
    """Of plain data."""
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_without_size(run: Run) -> str:
    """Of a Run's settings but for the number of islands: another number may go on with it."""
    plain = to_json(run)
    plain["cluster"]["islands"] = None
    return digest_of(plain)
