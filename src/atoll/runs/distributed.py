"""Carrying out a Run as one of many processes.

The first rank has the run's folder: it starts or opens it, writes the log and judges. The others learn from it what is to be done,
and need nothing but the same data. All write their checkpoints, and each a log of its own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.algorithms.fsdp import FSDP
from atoll.engines.dist.clock import Limit
from atoll.engines.dist.engine import DistEngine
from atoll.engines.dist.fsdp import ShardedModel
from atoll.engines.dist.world import World, is_started, join, meet
from atoll.engines.evaluator import Evaluator
from atoll.engines.local import Loss
from atoll.engines.masters import initial
from atoll.errors import AtollError, CheckpointError, ConfigError
from atoll.events import Progress, Saved, WarmStartFinished
from atoll.protocols import Algorithm, Sink, Workload
from atoll.runs.build import loss_of, replica_of
from atoll.runs.checkpoint import Checkpoint
from atoll.runs.execute import Execution, Result, digest_of, is_finished, refuse_impossible, resume
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.launch import launch, log_of
from atoll.runs.place import START_LIMIT_S, Dist, placed, read_place, write_place
from atoll.runs.plain import from_json, to_json
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.sharded_checkpoint import ShardedCheckpoints
from atoll.runs.warm import Cache, WarmStart, load_data, warm_up
from atoll.runs.workloads import fingerprint, island_workload, plain_workload
from atoll.telemetry.fanout import Fanout
from atoll.tree import Tree


@dataclass(frozen=True)
class Order:
    """What all processes are to do, as the first rank tells it.

    Attributes:
        run: the Run, placed on so many processes.
        place: how.
        folder: of the run.
    """

    run: Run
    place: Dist
    folder: Path

    def to_text(self) -> str:
        place = {name: getattr(self.place, name) for name in self.place.__dataclass_fields__}
        return json.dumps({"run": to_json(self.run), "place": place, "folder": str(self.folder)})

    @staticmethod
    def from_text(text: str) -> Order:
        record = json.loads(text)
        return Order(from_json(record["run"]), Dist(**record["place"]), Path(record["folder"]))


def run_on(
    place: Dist,
    run: Run,
    *,
    out: str | Path | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
) -> Result | None:
    """Carries out a Run by real processes, in a new folder.

    In a process that torchrun started, this is one of them: the first rank is given the result, the others none. Else the processes
    are started here, by the command `atoll`, and the result is that of the first.

    Args:
        place: how many processes, and how.
        run: what to do; `processes` overrides the number of its islands.
        out: the folder; by default a new one under runs/.
        workload: what to train instead of the Run's model and data; under torchrun only.
        sinks: who else takes the events, on the first rank; under torchrun only.
        command: how the run was asked for, for the record.
    """
    folder = Path(out or default_path(run.recipe, run.seed)).expanduser()
    command = list(command or sys.argv)
    if is_started():
        return take_part(
            start_order(run, place, folder, command, workload),
            lambda order: sinks,
            workload,
            folder=folder if out else None,
            start_limit_s=place.start_limit_s,
        )
    if workload is not None or sinks:
        raise ConfigError(
            "a workload or sinks of your own live in this process, and the processes that are started here would not have them. "
            "Start this script by torchrun, or leave them out."
        )
    start_here(create_folder(run, place, folder, command), place)
    return resume(folder, command=command)


def resume_on(out: str | Path, place: Dist | None = None, *, command: Sequence[str] | None = None) -> Result | None:
    """Goes on with a run of real processes, by the same number of them or another; see `run_on`."""
    folder, command = Path(out).expanduser(), list(command or sys.argv)
    place = place or read_place(folder)
    if place is None:
        raise ConfigError(f"{out} is no run of real processes. Use atoll.resume.")
    if is_started():
        return take_part(resume_order(folder, place, command), lambda order: (), folder=folder, start_limit_s=place.start_limit_s)
    if not is_finished(RunFolder.open(folder)):
        start_here(folder, place)
    return resume(folder, command=command)


def create_folder(run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None) -> Path:
    """A new folder for this run on so many processes as the place says. What is impossible is refused before it is there."""
    mine = placed(run, place.processes or run.cluster.devices)
    refuse_impossible(mine.resolved, workload, Cache())
    RunFolder.create(folder, to_json(mine), list(command))
    write_place(folder, place)
    return folder


def start_here(folder: Path, place: Dist, *, quiet: bool = True) -> None:
    """Have processes on this machine go on with the run in this folder, and wait for them."""
    mine = from_json(RunFolder.open(folder).run_json)
    processes = place.processes or mine.cluster.devices
    placed(mine, processes)
    write_place(folder, place)
    launch(processes, ["run", "--resume", str(folder), *(["--quiet"] if quiet else [])], folder)


def take_part(
    prepare: Callable[[int], Order],
    sinks: Callable[[Order], Sequence[Sink]],
    workload: Workload | None = None,
    *,
    folder: Path | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Result | None:
    """Carry out a run as one of the processes that torchrun started.

    Args:
        prepare: asked on the first rank, with the number of processes: what is to be done. It makes or opens the run's folder.
        sinks: who takes the events, on the first rank.
        workload: what to train instead of the Run's model and data.
        folder: where this process's machine keeps its files, if not where the first rank's does.
        start_limit_s: how long the others are waited for outside of rounds.
    """
    store, rank, size = meet(start_limit_s)
    try:
        if rank == 0:
            order = prepare(size)
            store.set("order", order.to_text())
        else:
            told = Order.from_text(store.get("order").decode())
            order = replace(told, folder=folder or told.folder)
    except Exception as error:
        _leave_at_once(error, None)
    with _own_log(order.folder, rank):
        limit = Limit(order.place.limit_s)
        run = order.run.resolved
        torch.set_num_threads(run.cluster.threads_per_island)
        devices = run.cluster.devices_per_island if run.inside is not None else 1
        world = join(
            store,
            rank,
            size,
            devices=devices,
            inside=run.inside is not None,
            backend=order.place.backend,
            start_limit_s=order.place.start_limit_s,
        )
        _say(f"rank {rank} of {size} on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        with ExitStack() as stack:
            opened = RunFolder(order.folder)
            if world.first:
                stack.enter_context(opened.lock())
            result = _Share(order, opened, world, limit, sinks(order) if world.first else (), workload).carry_out()
        world.meet()
        world.close()
        return result


def start_order(
    run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None
) -> Callable[[int], Order]:
    """What begins a new run, in a new folder."""

    def prepare(size: int) -> Order:
        here = replace(place, processes=size)
        create_folder(run, here, folder, command, workload)
        return Order(placed(run, size), here, folder)

    return prepare


def resume_order(folder: Path, place: Dist, command: Sequence[str]) -> Callable[[int], Order]:
    """What goes on with a run, perhaps by another number of processes."""

    def prepare(size: int) -> Order:
        opened = RunFolder.open(folder)
        opened.resumed(list(command))
        here = replace(place, processes=size)
        write_place(folder, here)
        return Order(placed(from_json(opened.run_json), size), here, folder)

    return prepare


class _Share:
    """One process's share of a run."""

    def __init__(
        self, order: Order, folder: RunFolder, world: World, limit: Limit, sinks: Sequence[Sink], workload: Workload | None
    ) -> None:
        self._run, self._place = order.run.resolved, order.place
        self._folder, self._world, self._limit = folder, world, limit
        self._given = workload
        self._books = Execution(order.run, folder, workload, sinks, Cache())
        """The first rank's log and figures; elsewhere it is not used."""
        self._checkpoints = ShardedCheckpoints(folder.checkpoints, self._run.keep.checkpoints, world)
        self._origin: dict[str, str | None] = {}
        self._cache = Cache()

    def carry_out(self) -> Result | None:
        checkpoint = self._checkpoints.newest()
        with ExitStack() as stack:
            sink: Sink = _Silent()
            if self._world.first:
                self._books.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
                sink = stack.enter_context(Fanout(self._books.sinks(checkpoint)))
            engine, evaluator, warm = self._set_up(sink, checkpoint)
            stack.callback(engine.close)
            finished = engine.run(warm.tokens)
            params = engine.params()
            if not self._world.first:
                return None
            assert finished is not None
            self._books.leave(params, engine.buffers(), finished, checkpoint)
        evaluator.load(params, engine.buffers())
        return self._books.result(evaluator, params)

    def _set_up(self, sink: Sink, checkpoint: Checkpoint | None) -> tuple[DistEngine, Evaluator, WarmStart]:
        run, world = self._run, self._world
        plain = self._given or plain_workload(run, load_data(run, self._cache))
        if world.first and checkpoint is None:
            self._books.keep_what_is_read()
            sink.emit(self._books.started(plain, engine="dist"))
        warm = self._warm_start(plain, sink, silent=checkpoint is not None)
        workload = self._given or island_workload(run, load_data(run, self._cache), warm.params)
        self._origin = {"run": _digest_without_size(run), "data": fingerprint(workload)}
        world.agreed("data", str(self._origin["data"]), "data")
        engine, evaluator = self._engine(workload, warm.params, sink)
        if checkpoint is not None:
            self._check_origin(checkpoint)
            engine.restore(checkpoint.metadata["engine"], self._checkpoints.loader(checkpoint))
            sink.emit(Progress(phase="resume", done=engine.steps_taken, total=engine.steps, note=f"from round {checkpoint.round}"))
        return engine, evaluator, warm

    def _warm_start(self, plain: Workload, sink: Sink, *, silent: bool) -> WarmStart:
        """Made by the first rank, and handed out. Weights that need no training are made by everybody, if all come to the same."""
        run, world, steps = self._run, self._world, self._run.train.warm_start_steps
        if world.first:
            warm = warm_up(run, plain, file=self._folder.warm_start, cache=None, sink=sink)
            if steps and not silent:
                sink.emit(WarmStartFinished(steps=steps, tokens=warm.tokens, loss=warm.loss))
            world.leave_word("warm", json.dumps([warm.tokens, repr(warm.loss)]))
        else:
            tokens, loss = json.loads(world.word("warm"))
            warm = WarmStart(initial(plain, device_of(run), dtype_of(run)), tokens, float(loss))
        world.leave_word(f"begin/{world.rank}", warm.params.digest())
        if any(world.word(f"begin/{rank}") != world.word("begin/0") for rank in range(world.size)):
            mine = Tree(warm.params.layout, warm.params.flat.cpu().clone())
            world.everybody.hand_out(mine.flat)
            warm = WarmStart(mine.to(warm.params.flat.device), warm.tokens, warm.loss)
        return warm

    def _engine(self, workload: Workload, params: Tree, sink: Sink) -> tuple[DistEngine, Evaluator]:
        run, world = self._run, self._world
        loss, device = loss_of(run, workload), _device(run, world)
        evaluator = Evaluator(workload, device, dtype_of(run))
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        pause_s = (self._place.pace or 0.0) * run.cluster.step_time(world.island, run.seed)
        engine = DistEngine(
            algorithm=algorithm,
            world=world,
            params=params.to(device),
            batches=workload.batches,
            make_replica=lambda number: replica_of(run, workload, loss, number, device),
            make_sharded=lambda mesh: _sharded_of(run, workload, loss, mesh, device),
            evaluate=evaluator,
            sink=sink,
            steps=run.train.steps,
            inside=run.inside,
            evaluate_every=run.rounds(run.keep.evaluate_every),
            save=self._saver(sink),
            save_every=run.rounds(run.keep.save_every),
            limit=self._limit,
            pause_s=pause_s,
        )
        return engine, evaluator

    def _saver(self, sink: Sink) -> Callable[[DistEngine], None]:
        def save(engine: DistEngine) -> None:
            sink.emit(Saved(round=engine.round, name=f"{engine.round:08}"))
            metadata: dict[str, Any] = {**self._origin, "engine": engine.plain()}
            if self._world.first:
                metadata["events_bytes"] = self._books.log_bytes()
            self._checkpoints.save(engine.round, engine.parts(), metadata)
            _say(f"saved round {engine.round}; an exchange may take {engine.limit_s:g} s")

        return save

    def _check_origin(self, checkpoint: Checkpoint) -> None:
        for what, found in (("run", "its settings"), ("data", "its data or how they are dealt out")):
            if checkpoint.metadata.get(what) != self._origin[what]:
                raise CheckpointError(
                    f"{checkpoint.path} was saved by another run: {found} differ from what rank {self._world.rank} has now. Bring "
                    f"back what it was saved with, or start afresh in another folder."
                )


def _sharded_of(run: Run, workload: Workload, loss: Loss, mesh: DeviceMesh, device: str) -> ShardedModel:
    """A model that FSDP2 cuts over the devices of an island."""
    assert isinstance(run.inside, FSDP)
    if run.train.precision == "all-bf16" or run.train.micro_batches > 1:
        raise ConfigError(
            "inside=FSDP with train.precision=all-bf16 or train.micro_batches: FSDP2 keeps its weights in fp32 and takes batches "
            "as they are. Use precision=bf16 and inside.accumulation, or inside=ZeRO1."
        )
    return ShardedModel(workload, mesh=mesh, algorithm=run.inside, device=device, bf16=run.train.precision == "bf16", loss=loss)


class _Silent:
    """Takes events on ranks that report nothing."""

    def emit(self, event: Any) -> None:
        pass


def _device(run: Run, world: World) -> str:
    """On a GPU of its own, as far as there are some; else processes share them."""
    device = device_of(run)
    if device != "cuda":
        return device
    number = world.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _digest_without_size(run: Run) -> str:
    """Of a Run's settings but for the number of islands: another number may go on with it."""
    plain = to_json(run)
    plain["cluster"]["islands"] = None
    return digest_of(plain)


# ------------------------------------------------------------------------------------------------------------------- logs


def _say(text: str) -> None:
    """Into this rank's log."""
    if _LOG:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=_LOG[0], flush=True)


_LOG: list[Any] = []
"""The log of this process, which has one."""


@contextmanager
def _own_log(folder: Path, rank: int) -> Iterator[None]:
    """Each rank has a log of its own; the first alone has the console as well. A rank that fails says why and is gone at once:
    its communication may hang, and must not keep it."""
    path = log_of(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as log:
        _LOG.append(log)
        console = {number: os.dup(number) for number in (1, 2)} if rank != 0 else {}
        for number in console:
            os.dup2(log.fileno(), number)
        try:
            yield
        except BaseException as error:
            _leave_at_once(error, log)
        finally:
            _LOG.clear()
            for number, before in console.items():
                sys.stdout.flush()
                os.dup2(before, number)
                os.close(before)


def _leave_at_once(error: BaseException, log: Any) -> None:
    known = isinstance(error, AtollError)
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {' '.join(str(error).split())}"
    for file in {id(file): file for file in (log, sys.stderr) if file is not None}.values():
        if not known and not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error, file=file)
        if file is log or not isinstance(error, KeyboardInterrupt):
            print(text, file=file, flush=True)
    sys.stdout.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 2 if known else 1)
