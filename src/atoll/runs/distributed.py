"""Carrying out a Run as one of many processes.

The first rank has the run's folder: it starts or opens it, writes the log and judges. The others learn from it what is to be done,
and need nothing but the same data. All write their checkpoints, and each a log of its own.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.algorithms.fsdp import FSDP
from atoll.engines.dist.clock import Limit
from atoll.engines.dist.engine import DistEngine
from atoll.engines.dist.fsdp import ShardedModel
from atoll.engines.dist.world import World, join, meet
from atoll.engines.evaluator import Evaluator
from atoll.engines.local import Loss
from atoll.engines.masters import initial
from atoll.errors import CheckpointError, ConfigError
from atoll.events import Progress, Saved, WarmStartFinished
from atoll.protocols import Algorithm, Sink, Workload
from atoll.runs.build import loss_of, replica_of
from atoll.runs.checkpoint import Checkpoint
from atoll.runs.execute import Execution, Result, digest_of
from atoll.runs.folder import RunFolder
from atoll.runs.logs import RankLog, leave_at_once, own_log
from atoll.runs.orders import Order
from atoll.runs.place import START_LIMIT_S
from atoll.runs.plain import to_json
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.sharded_checkpoint import ShardedCheckpoints
from atoll.runs.warm import Cache, WarmStart, load_data, warm_up
from atoll.runs.workloads import fingerprint, island_workload, plain_workload
from atoll.telemetry.fanout import Fanout
from atoll.tree import Tree


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
        leave_at_once(error)
    with own_log(order.folder, rank) as log:
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
        log.say(f"rank {rank} of {size} on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        with ExitStack() as stack:
            opened = RunFolder(order.folder)
            if world.first:
                stack.enter_context(opened.lock())
            result = _Share(order, opened, world, limit, sinks(order) if world.first else (), workload, log).carry_out()
        world.meet()
        world.close()
        return result


class _Share:
    """One process's share of a run."""

    def __init__(
        self,
        order: Order,
        folder: RunFolder,
        world: World,
        limit: Limit,
        sinks: Sequence[Sink],
        workload: Workload | None,
        log: RankLog,
    ) -> None:
        self._run, self._place = order.run.resolved, order.place
        self._folder, self._world, self._limit = folder, world, limit
        self._given, self._log = workload, log
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
            engine.restore(checkpoint.metadata["engine"], self._checkpoints.loader(checkpoint, engine.parts()))
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
            tokens, loss = json.loads(world.word("warm", of=0))
            warm = WarmStart(initial(plain, device_of(run), dtype_of(run)), tokens, float(loss))
        world.leave_word(f"begin/{world.rank}", warm.params.digest())
        if any(world.word(f"begin/{rank}", of=rank) != world.word("begin/0", of=0) for rank in range(world.size)):
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
            self._log.say(f"saved round {engine.round}; an exchange may take {engine.limit_s:g} s")

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
