"""One rank of a run on real processes.

Rank 0 has the run's folder: it creates or opens it, writes the log and evaluates. It publishes a RunPlan in the store, and other
ranks read it; they need nothing but the same data. All ranks write their parts of the checkpoints, and each a log of its own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.algorithms.zero import FSDP
from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Sink, Workload
from atoll.core.verified_files import open_to_append
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.liveness import ExchangeTimeout, exit_with, log_while_waiting, recorded_exit_reason, rotate_log, write_log_line
from atoll.engines.point_to_point import first_sentence
from atoll.engines.processes.engine import ProcessEngine, ProcessSetup
from atoll.engines.processes.fsdp import ShardedModel
from atoll.engines.processes.rank_context import RankContext, create_context
from atoll.engines.processes.sharded_checkpoints import ShardedCheckpoints
from atoll.engines.processes.spec import Processes, gpu_of_rank
from atoll.engines.rank_rendezvous import exchange_interface, wait_for_all, wait_for_keys
from atoll.engines.rank_store import TRUSTED, find_store, refuse_untrusted_network, spans_machines
from atoll.engines.run_lifecycle import Driver, Result, RunRequest, RunTask, discard
from atoll.engines.spec import read_spec
from atoll.engines.training_setup import loss_of, replica_of, replica_seed
from atoll.engines.warm_start_training import Prepared, WarmStart
from atoll.replica.evaluator import Evaluator
from atoll.replica.forward_backward import Loss
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run, device_of
from atoll.runs.workloads import partitioned_by_weights
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.event_log import explained

_PLAN = "plan"


def run_rank(request: RunRequest) -> Result | None:
    """Carry out a run as one of the processes that the launcher or torchrun started. Rank 0 returns the result."""
    known = _known_spec(request)
    held = ExitStack()
    # One rank of each machine writes to its console.
    screen = request.log if os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0" else discard
    try:
        trusted = known.network == "trusted"
        refuse_untrusted_network(spans=spans_machines(), trusted=trusted, setting="--set engine.network=trusted")
        store, rank, size = held.enter_context(join_ranks(known.start_timeout_s, screen))
        if rank == 0:
            plan, task = _publish_plan(store, request, size, held)
        else:
            plan = _read_plan(store, rank, known.start_timeout_s, screen)
            # A machine that does not see rank 0's folder keeps its files in a folder of its own.
            folder = RunFolder(request.out or plan.folder)
            task = RunTask(run=plan.run, spec=plan.spec, folder=folder, workload=request.workload)
            if screen is not discard:
                task = _with_console(task, rank)
                task.log(f"rank {rank} of {size}; log: {rank_log_path(folder.path, rank)}; rank 0 is on {plan.host}")
    except Exception as error:
        exit_with(error)
    run, spec = plan.run, plan.spec
    with open_rank_log(task.folder.path, rank, task.log) as log, held, recorded_exit_reason(store, rank, size):
        if plan.finished:
            dist.destroy_process_group()
            return task.reopen() if rank == 0 else None
        device = _choose_device(plan)  # before a process group initialises another GPU
        torch.set_num_threads(run.cluster.threads_per_island)
        limit = ExchangeTimeout(spec.exchange_timeout_s)
        log(f"rank {rank} of {size} on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s), {device}")
        log(f"timeouts: {spec.start_timeout_s:g} s outside of rounds; {limit.timeout_s:g} s for an exchange ({limit.reason})")
        inside = run.inside is not None
        devices = run.cluster.devices_per_island if inside else 1
        context = create_context(
            store, rank, size, devices=devices, inside=inside, backend=spec.backend, start_limit_s=spec.start_timeout_s, log=screen
        )
        driver = RankDriver(task, spec, context, device, log, limit)
        result = driver.carry_out()
        context.barrier()
        context.close()
        if rank != 0:
            task.log(f"finished: {driver.outcome}. The weights and figures of the run are in {plan.folder} on {plan.host}")
        return result


def _with_console(task: RunTask, rank: int) -> RunTask:
    """The task of the first rank of a further machine, which shows its progress there. What it prints otherwise goes to its log."""
    from rich.console import Console

    console = Console(file=os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", buffering=1))
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    return replace(task, sinks=[ConsoleSink(f"{task.run.recipe}, rank {rank}", console=console)], log=show)


def _known_spec(request: RunRequest) -> Processes:
    """The settings that hold on this rank until it has rank 0's plan: its timeout, and the network that the user trusts."""
    spec = request.spec
    if spec is None and request.out is not None and request.out.is_dir():
        spec = read_spec(request.out)
    return spec if isinstance(spec, Processes) else Processes()


# ------------------------------------------------------------------------------------------------------------------ the rank's log


def rank_log_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank-{rank}.log"


@contextmanager
def open_rank_log(folder: Path, rank: int, screen: Callable[[str], object] = discard) -> Iterator[Callable[[str], object]]:
    """A function that appends a line to the rank's log, which also takes what ranks other than rank 0 print. A rank that fails
    writes why, on its screen too, and exits at once."""
    path = rank_log_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate_log(path)
    with explained("write", path):
        opened = open_to_append(path)
    with TextIOWrapper(opened, encoding="utf-8") as file:
        console = {number: os.dup(number) for number in (1, 2)} if rank != 0 else {}
        for number in console:
            os.dup2(file.fileno(), number)
        try:
            yield lambda text: write_log_line(file, text)
        except BaseException as error:
            if rank != 0:
                screen(f"error: {' '.join(str(error).split())} (log: {path})")
            exit_with(error, file)
        finally:
            for number, before in console.items():
                sys.stdout.flush()
                os.dup2(before, number)
                os.close(before)


# ------------------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class RunPlan:
    """What all ranks are to do, as rank 0 publishes it."""

    run: Run  # fitted to the number of processes
    spec: Processes
    folder: Path
    finished: bool = False
    host: str = field(default_factory=platform.node)
    """The machine of rank 0."""

    def to_text(self) -> str:
        places = {"folder": str(self.folder), "finished": self.finished, "host": self.host}
        return json.dumps({"run": to_json(self.run), "spec": asdict(self.spec), **places})

    @staticmethod
    def from_text(text: str) -> RunPlan:
        record = json.loads(text)
        spec, folder = Processes(**record["spec"]), Path(record["folder"])
        return RunPlan(from_json(record["run"], hint=Run), spec, folder, record["finished"], record["host"])


def _publish_plan(store: Store, request: RunRequest, size: int, held: ExitStack) -> tuple[RunPlan, RunTask]:
    """On rank 0: open the run's folder, hold it, and publish what the ranks are to do, or why the run is refused."""
    try:
        if request.spec is not None:
            assert isinstance(request.spec, Processes)
            request = replace(request, spec=replace(request.spec, processes=size))
        task = held.enter_context(request.open())
        spec = task.spec
        assert isinstance(spec, Processes)
        spec = replace(spec, processes=size)
        task = replace(task, spec=spec, run=task.run if task.finished else spec.fitted(task.run))
        if not task.finished:
            task.log(spec.ignored_settings(task.run))
            task.log(f"outside of rounds a rank waits {spec.start_timeout_s:g} s for the others (engine.start_timeout_s)")
            if spans_machines():
                by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
                task.log(f"engine.network=trusted: {TRUSTED if by_torchrun else TRUSTED.partition(', and')[0]}")
        plan = RunPlan(task.run, spec, task.folder.path, task.finished)
    except Exception as error:
        store.set(_PLAN, json.dumps({"refused": str(error) or type(error).__name__}))
        raise
    store.set(_PLAN, plan.to_text())
    store.set_timeout(timedelta(seconds=spec.start_timeout_s))
    return plan, task


def _read_plan(store: Store, rank: int, limit_s: float, log: Callable[[str], object] = discard) -> RunPlan:
    why = f"it took longer than {limit_s:g} s"
    try:
        missing = wait_for_keys(store, {0: _PLAN}, "to load its data and publish the plan", limit_s, log)
        text = "" if missing else store.get(_PLAN).decode()
    except RuntimeError as error:
        text, why = "", first_sentence(str(error))
    if not text:
        raise ExchangeFailed(
            f"rank {rank} received no plan: rank 0 has ended, or takes longer than engine.start_timeout_s. ({why})"
        )
    refused = json.loads(text).get("refused")
    if refused is not None:
        raise ConfigError(f"rank 0 has refused the run: {refused}")
    plan = RunPlan.from_text(text)
    store.set_timeout(timedelta(seconds=plan.spec.start_timeout_s))
    return plan


@contextmanager
def join_ranks(timeout_s: float, log: Callable[[str], object] = discard) -> Iterator[tuple[Store, int, int]]:
    """Wait until all ranks have started, by the variables that torchrun set, and initialise the process group of all ranks. While
    the context is open, new groups use the same network interface.

    Yields:
        A store that all ranks see, this rank, and the number of ranks. The timeout holds for the store and the group.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        with log_while_waiting(
            log, f"waiting for the store of the ranks at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        ):
            found, rank, size = find_store(timeout_s)
    except RuntimeError as error:
        raise ExchangeFailed(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not find all others within {timeout_s:g} s. See that all "
            f"were started, that they reach rank 0's machine and have its address; or raise engine.start_timeout_s. "
            f"({first_sentence(str(error))})"
        ) from error
    store = PrefixStore("atoll", found)
    # Ranks that were started for other numbers may have the same rank, and then find the store of another use of it.
    wait_for_all(store, rank, size, timeout_s, log, found.underlying_store)
    with exchange_interface(store, rank, size, spans=spans_machines(), limit_s=timeout_s, log=log):
        dist.init_process_group("gloo", store=PrefixStore("torch", found), rank=rank, world_size=size, timeout=timeout)
        yield store, rank, size


def _choose_device(plan: RunPlan) -> str:
    """The device this rank computes on. Nothing may use a GPU before."""
    device = device_of(plan.run.resolved)
    if device != "cuda":
        return device
    local_rank, processes = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    number = gpu_of_rank(local_rank, processes, torch.cuda.device_count(), plan.spec.backend)
    torch.cuda.set_device(number)
    return f"cuda:{number}"


# ------------------------------------------------------------------------------------------------------------------ the driver


class RankDriver(Driver[ProcessEngine]):
    """Carries out one rank's part of a run."""

    def __init__(
        self,
        task: RunTask,
        spec: Processes,
        context: RankContext,
        device: str,
        log: Callable[[str], object],
        limit: ExchangeTimeout,
    ) -> None:
        super().__init__(task)
        self.leads = context.is_rank_zero
        self.outcome = ""
        """What this rank has done, in words, when it has trained."""
        self._spec, self._context, self._device, self._log, self._limit = spec, context, device, log, limit
        self._sharded = ShardedCheckpoints(self.folder.checkpoints, self.run.keep.checkpoints, context)

    def newest_checkpoint(self) -> Checkpoint | None:
        return self._sharded.newest()

    def prepare(self, sink: Sink, checkpoint: Checkpoint | None) -> Prepared:
        prepared = super().prepare(sink, checkpoint)
        others = self._context.differing_ranks("data", str(prepared.origin["data"]))
        if others:
            raise ConfigError(f"ranks {others} have data that differ from rank 0's. All ranks need the same: copy it there.")
        return prepared

    def make_warm_start(self, sink: Sink, *, resuming: bool) -> WarmStart:
        """Rank 0 makes the warm start and broadcasts it, unless all ranks computed the same weights. A resumed run takes its
        weights from the checkpoint, and needs the warm start's only if its data are partitioned by them."""
        context = self._context
        if context.is_rank_zero:
            warm = super().make_warm_start(sink, resuming=resuming)
            context.store.set("warm", json.dumps([warm.tokens, repr(warm.loss)]))
        else:
            tokens, loss = json.loads(context.get("warm", of=0))
            warm = WarmStart(self.preparation.initial_weights(), tokens, float(loss))
        by_weights = self.task.workload is None and partitioned_by_weights(self.run)
        if (by_weights or not resuming) and context.differing_ranks("begin", warm.params.digest()):
            mine = Tree(warm.params.layout, warm.params.flat.cpu().clone())
            context.all_ranks.broadcast(mine.flat)
            self._log(f"rank 0 broadcast its weights: {mine.flat.nbytes} bytes to each rank")
            warm = replace(warm, params=mine.to(warm.params.flat.device))
        return warm

    @contextmanager
    def open_engine(self, prepared: Prepared, evaluator: Evaluator | None, sink: Sink) -> Iterator[ProcessEngine]:
        run, context, device, workload = self.run, self._context, self._device, prepared.workload
        loss = loss_of(run, workload)
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        setup = ProcessSetup(
            params=prepared.warm_start.params.to(device),
            batches=workload.batches,
            make_replica=lambda number: replica_of(run, workload, loss, number, device),
            make_sharded=lambda mesh: _sharded_model(run, workload, loss, mesh, device, context.rank),
            pause_s=self._spec.delay_s(run, context.island),
            evaluate=evaluator or _refuse_evaluation,
            sink=sink,
            steps=run.train.steps,
            evaluate_every=run.rounds(run.keep.evaluate_every),
            save_every=run.rounds(run.keep.save_every),
        )
        engine = ProcessEngine(algorithm, context, setup, inside=run.inside, timeout=self._limit)
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: engine.close(wait=kind is None))
            yield engine
            self.outcome = f"{engine.steps_taken} steps in {engine.round} rounds, {engine.own_loss_text}"

    def restore(self, engine: ProcessEngine, checkpoint: Checkpoint) -> None:
        engine.restore(checkpoint.metadata["engine"], self._sharded.loader(checkpoint, engine.parts()))

    def write_checkpoint(self, engine: ProcessEngine, metadata: Mapping[str, Any]) -> None:
        self._sharded.save(engine.round, engine.parts(), {**metadata, "engine": engine.metadata()})
        self._log(f"saved round {engine.round}; an exchange may take {self._limit.timeout_s:g} s")
        rotate_log(rank_log_path(self.folder.path, self._context.rank), in_use=True)


def _sharded_model(run: Run, workload: Workload, loss: Loss, mesh: DeviceMesh, device: str, rank: int) -> ShardedModel:
    """A model that FSDP2 shards over the devices of an island."""
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
        seed=replica_seed(run, rank),
    )


def _refuse_evaluation(params: Tree, buffers: Mapping[str, Tensor]) -> Mapping[str, float]:
    raise AssertionError("rank 0 alone evaluates")
