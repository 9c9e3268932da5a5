"""Carrying out a Run as one of many processes.

The first rank has the run's folder: it starts or opens it, writes the log and judges. The others learn from it what is to be done,
and need nothing but the same data. All write their checkpoints, and each a log of its own.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from atoll.algorithms.zero import FSDP
from atoll.core.errors import ConfigError
from atoll.core.events import Progress, Saved, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Sink, Workload
from atoll.engines.build import loss_of, replica_of, seed_of
from atoll.engines.checkpoints import Checkpoint, check_origin
from atoll.engines.driver import Execution, Result, digest_without_size
from atoll.engines.processes.engine import Intervals, ModelSetup, ProcessEngine
from atoll.engines.processes.fsdp import ShardedModel
from atoll.engines.processes.process_group import RankContext, create_context
from atoll.engines.processes.rank_log import RankLog, leave_at_once, own_log, telling_why
from atoll.engines.processes.run_plan import Order, Prepare, come_together, give_order, take_order
from atoll.engines.processes.sharded_checkpoints import ShardedCheckpoints
from atoll.engines.processes.spec import START_LIMIT_S, check_backend, own_gpu, pause_s
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.engines.warm_start import Cache, WarmStart, load_data, warm_up
from atoll.replica.evaluator import Evaluator
from atoll.replica.forward_backward import Loss
from atoll.replica.master_weights import initial_weights
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.workloads import fingerprint, island_workload, needs_weights, plain_workload
from atoll.telemetry.sinks import Fanout, NullSink


def take_part(
    prepare: Prepare,
    sinks: Callable[[Order], Sequence[Sink]],
    workload: Workload | None = None,
    *,
    folder: Path | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Result | None:
    """Carry out a run as one of the processes that torchrun started.

    Args:
        prepare: asked on the first rank: what is to be done.
        sinks: who takes the events, on the first rank.
        workload: what to train instead of the Run's model and data.
        folder: where this process's machine keeps its files, if not where the first rank's does.
        start_limit_s: how long the others are waited for until the first rank says how long.
    """
    cache, held = Cache(), ExitStack()
    try:
        store, rank, size = come_together(start_limit_s)
        if rank == 0:
            order = give_order(store, prepare, size, cache, held)
        else:
            told = take_order(store, rank)
            order = replace(told, folder=folder or told.folder)
    except Exception as error:
        leave_at_once(error)
    with own_log(order.folder, rank) as log, held, telling_why(store, rank, size):
        if order.finished:
            dist.destroy_process_group()
            return _reopened(order, workload, cache) if rank == 0 else None
        device = _take_device(order)  # before there is a group that would take another
        torch.set_num_threads(order.run.cluster.threads_per_island)
        limit = ExchangeTimeout(order.place.limit_s)
        _introduce(log, order, limit, f"rank {rank} of {size}", device)
        world = _joined(order, store, rank, size)
        share = Share(order, world, device, sinks(order) if world.is_rank_zero else (), workload, log, limit=limit, cache=cache)
        result = share.carry_out()
        world.barrier()
        world.close()
        return result


def _introduce(log: RankLog, order: Order, limit: ExchangeTimeout, name: str, device: str) -> None:
    """The first lines of a log: who writes it, and how long it waits for others."""
    log.say(f"{name} on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s), {device}")
    log.say(
        f"others are waited for {order.place.start_limit_s:g} s outside of rounds; an exchange may take {limit.timeout_s:g} s "
        f"({limit.reason})"
    )


def _take_device(order: Order) -> str:
    """Where this process computes. From now on that is what torch calls `cuda` here: nothing may touch a GPU before."""
    run, device = order.run.resolved, device_of(order.run.resolved)
    check_backend(run, order.place)
    if device != "cuda":
        return device
    local_rank, processes = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    number = own_gpu(local_rank, processes, torch.cuda.device_count(), order.place.backend)
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _joined(order: Order, store: Store, rank: int, size: int) -> RankContext:
    inside, cluster = order.run.inside is not None, order.run.cluster
    return create_context(
        store,
        rank,
        size,
        devices=cluster.devices_per_island if inside else 1,
        inside=inside,
        backend=order.place.backend,
        start_limit_s=order.place.start_limit_s,
    )


def _reopened(order: Order, workload: Workload | None, cache: Cache) -> Result:
    """A run that is finished, as it is."""
    return Execution(order.run, RunFolder(order.folder), workload, (), cache).resume()


class Share:
    """One process's share of a run.

    Args:
        order: what is to be done.
        world: this process among all.
        device: where it computes.
        sinks: who takes the events, on the first rank.
        workload: what to train instead of the Run's model and data.
        log: of this rank.
        limit: of exchanges.
        cache: keeps the data that are read.
    """

    def __init__(
        self,
        order: Order,
        world: RankContext,
        device: str,
        sinks: Sequence[Sink],
        workload: Workload | None,
        log: RankLog,
        *,
        limit: ExchangeTimeout,
        cache: Cache,
    ) -> None:
        self._run, self._place, self._folder = order.run.resolved, order.place, RunFolder(order.folder)
        self._world, self._device, self._limit = world, device, limit
        self._given, self._log, self._cache = workload, log, cache
        self._books = Execution(order.run, self._folder, workload, sinks, cache)
        """The first rank's log and figures; elsewhere it is not used."""
        self._checkpoints = ShardedCheckpoints(self._folder.checkpoints, self._run.keep.checkpoints, world)
        self._origin: dict[str, str | None] = {}

    def carry_out(self) -> Result | None:
        checkpoint = self._checkpoints.newest()
        with ExitStack() as stack:
            sink: Sink = NullSink()
            if self._world.is_rank_zero:
                self._books.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
                sink = stack.enter_context(Fanout(self._books.sinks(checkpoint)))
            engine, evaluator, warm_start_tokens = self._set_up(sink, checkpoint)
            stack.push(lambda kind, error, trace: engine.close(wait=kind is None))
            finished = engine.run(warm_start_tokens)
            params = engine.params()
            if evaluator is None:
                return None
            assert finished is not None, "the first rank keeps the figures"
            self._books.leave(params, engine.buffers(), finished, checkpoint)
        evaluator.load(params, engine.buffers())
        return self._books.result(evaluator, params)

    def _set_up(self, sink: Sink, checkpoint: Checkpoint | None) -> tuple[ProcessEngine, Evaluator | None, int]:
        """The engine, on the first rank what judges, and the tokens of the warm start, whose weights nobody keeps."""
        run, world = self._run, self._world
        plain = self._given or plain_workload(run, load_data(run, self._cache))
        if world.is_rank_zero and checkpoint is None:
            self._books.keep_what_is_read()
            sink.emit(self._books.started(plain, engine="dist"))
        warm = self._warm_start(plain, sink, resuming=checkpoint is not None)
        workload = self._given or island_workload(run, load_data(run, self._cache), warm.params)
        self._origin = {"run": digest_without_size(run), "data": fingerprint(workload)}
        world.check_equal("data", str(self._origin["data"]), "data")
        engine, evaluator = self._engine(workload, warm.params, sink)
        if checkpoint is not None:
            check_origin(checkpoint, self._origin, f"rank {self._world.rank}")
            engine.restore(checkpoint.metadata["engine"], self._checkpoints.loader(checkpoint, engine.parts()))
            sink.emit(Progress(phase="resume", done=engine.steps_taken, total=engine.steps, note=f"from round {checkpoint.round}"))
        return engine, evaluator, warm.tokens

    def _warm_start(self, plain: Workload, sink: Sink, *, resuming: bool) -> WarmStart:
        """Made by the first rank, and handed out. A run that goes on has the weights of its checkpoint, and needs those of the warm
        start only if its data are dealt out by them."""
        run, world, steps = self._run, self._world, self._run.train.warm_start_steps
        if world.is_rank_zero:
            warm = warm_up(run, plain, file=self._folder.warm_start, cache=None, sink=sink)
            if steps and not resuming:
                sink.emit(WarmStartFinished(steps=steps, tokens=warm.tokens, loss=warm.loss))
            world.set("warm", json.dumps([warm.tokens, repr(warm.loss)]))
        else:
            tokens, loss = json.loads(world.get("warm", of=0))
            warm = WarmStart(initial_weights(plain, self._device, dtype_of(run)), tokens, float(loss))
        deals_by_weights = self._given is None and needs_weights(run)
        return self._handed_out(warm) if deals_by_weights or not resuming else warm

    def _handed_out(self, warm: WarmStart) -> WarmStart:
        """The first rank's weights. Those that need no training everybody has made, if all came to the same."""
        world = self._world
        world.set(f"begin/{world.rank}", warm.params.digest())
        if any(world.get(f"begin/{rank}", of=rank) != world.get("begin/0", of=0) for rank in range(world.size)):
            mine = Tree(warm.params.layout, warm.params.flat.cpu().clone())
            world.all_ranks.broadcast(mine.flat)
            self._log.say(f"the first rank's weights were handed out: {mine.flat.nbytes} bytes to each")
            warm = replace(warm, params=mine.to(warm.params.flat.device))
        return warm

    def _engine(self, workload: Workload, params: Tree, sink: Sink) -> tuple[ProcessEngine, Evaluator | None]:
        run, world, device = self._run, self._world, self._device
        loss = loss_of(run, workload)
        evaluator = Evaluator(workload, device, dtype_of(run)) if world.is_rank_zero else None
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        setup = ModelSetup(
            params=params.to(device),
            batches=workload.batches,
            make_replica=lambda number: replica_of(run, workload, loss, number, device),
            make_sharded=lambda mesh: _sharded_of(run, workload, loss, mesh, device, world.rank),
            pause_s=pause_s(run, self._place, world.island),
        )
        intervals = Intervals(
            steps=run.train.steps,
            evaluate_every=run.rounds(run.keep.evaluate_every),
            save_every=run.rounds(run.keep.save_every),
        )
        engine = ProcessEngine(
            algorithm,
            world,
            setup,
            intervals,
            inside=run.inside,
            evaluate=evaluator or _judges_nothing,
            sink=sink,
            save=self._saver(sink),
            timeout=self._limit,
        )
        return engine, evaluator

    def _saver(self, sink: Sink) -> Callable[[ProcessEngine], None]:
        def save(engine: ProcessEngine) -> None:
            # Before it is written: a log is cut where its checkpoint says, and one that goes on must have this line as any other.
            sink.emit(Saved(round=engine.round, name=f"{engine.round:08}"))
            metadata: dict[str, Any] = {**self._origin, "engine": engine.metadata()}
            if self._world.is_rank_zero:
                metadata["events_bytes"] = self._books.log_bytes()
            self._checkpoints.save(engine.round, engine.parts(), metadata)
            self._log.say(f"saved round {engine.round}; an exchange may take {engine.timeout_s:g} s")

        return save


def _sharded_of(run: Run, workload: Workload, loss: Loss, mesh: DeviceMesh, device: str, rank: int) -> ShardedModel:
    """A model that FSDP2 cuts over the devices of an island."""
    assert isinstance(run.inside, FSDP)
    if run.train.precision == "all-bf16" or run.train.micro_batches > 1:
        raise ConfigError(
            "inside=FSDP with train.precision=all-bf16 or train.micro_batches: FSDP2 keeps its weights in fp32 and takes batches "
            "as they are. Use precision=bf16 and inside.accumulation, or inside=ZeRO1."
        )
    return ShardedModel(
        workload,
        mesh=mesh,
        algorithm=run.inside,
        device=device,
        bf16=run.train.precision == "bf16",
        loss=loss,
        seed=seed_of(run, rank),
    )


def _judges_nothing(params: Tree, buffers: Mapping[str, Tensor]) -> Mapping[str, float]:
    raise AssertionError("the first rank alone judges")
