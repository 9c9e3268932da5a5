"""Carrying out an asynchronous Run on Ray.

This process drives: it has the run's folder, makes the warm start, shows what happens and judges. The hub, beside it on the same
machine, writes the log and the checkpoints; workers need nothing but the same data.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import check_type
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Progress, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Sink, Workload
from atoll.core.serialization import save_tree
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.driver import Execution, Result, check_workload, digest_of, is_finished, refuse_impossible
from atoll.engines.processes.spec import refuse_too_many_devices
from atoll.engines.ray import bootstrap
from atoll.engines.ray.engine import RayEngine, WorkerPoolSpec
from atoll.engines.ray.messages import HubProcessSpec, HubSettings, LostRounds, dtype_name, tree_bytes
from atoll.engines.ray.process_parts import BEGIN, FolderStorage, Made, breaking, lost_after, outlast_hub
from atoll.engines.ray.spec import (
    Ray,
    gpus_each,
    on_workers,
    places_of,
    plan_of,
    read_ray,
    refuse_strangers,
    write_ray,
)
from atoll.engines.ray.worker import WorkerProcessSpec
from atoll.engines.warm_start import Cache, WarmStart, load_data, warm_up
from atoll.replica.evaluator import Evaluator
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.workloads import fingerprint, island_workload, needs_weights, plain_workload
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.sinks import Fanout

if TYPE_CHECKING:
    from atoll.testing.chaos.faults import FaultScript

_PUBLISHED = 8
"""Weights that lie in the object store besides a delta of each worker: those published last, and those that wait to be judged."""


def run_on_ray(
    place: Ray,
    run: Run,
    *,
    out: str | Path | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    say: Callable[[str], object] = lambda line: None,
    chaos: FaultScript | None = None,
) -> Result:
    """Carries out a Run on Ray, in a new folder.

    Args:
        place: how many workers, and how.
        run: what to do; `processes` overrides the number of its islands.
        out: the folder; by default a new one under runs/.
        workload: what to train instead of the Run's model and data. It is sent to the workers: it must be one that can be pickled.
        sinks: who else takes the events.
        command: how the run was asked for, for the record.
        say: takes lines on workers and hubs that die.
        chaos: what is to go wrong with it, on purpose.
    """
    check_type("place", place, Ray)
    check_type("run", run, Run)
    path = Path(out or default_path(run.recipe, run.seed))
    folder = create_ray_folder(place, run, path, command or sys.argv, workload, chaos=chaos)
    return drive(folder, place, workload=workload, sinks=sinks, say=say, chaos=chaos)


def drive(
    folder: RunFolder,
    place: Ray,
    *,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    say: Callable[[str], object] = lambda line: None,
    chaos: FaultScript | None = None,
) -> Result:
    """Carries out the run of a folder, from its newest checkpoint or from the start."""
    with folder.lock():
        return _Drive(folder, place, workload, sinks, say, chaos).carry_out()


def create_ray_folder(
    place: Ray,
    run: Run,
    path: Path,
    command: Sequence[str],
    workload: Workload | None = None,
    *,
    chaos: FaultScript | None = None,
) -> RunFolder:
    """A new folder for this run. What is impossible is refused before it is there."""
    bootstrap.check_installed()
    if place.address is not None:
        bootstrap.check_reachable(place.address)
    mine = on_workers(run, place.processes or run.cluster.devices)
    refuse_strangers(chaos, place, mine)
    _refuse_devices(mine, place, workload)
    refuse_impossible(mine.resolved, workload, Cache())
    folder = RunFolder.create(path.expanduser(), to_json(mine), list(command))
    write_ray(folder.path, place)
    return folder


def _refuse_devices(run: Run, place: Ray, workload: Workload | None) -> None:
    """Refuse more devices than a batch has examples, or this machine has GPUs."""
    if workload is None:
        refuse_too_many_devices(run, place.devices)
    _gpus(run, place)


def _gpus(run: Run, place: Ray) -> float:
    """Of each worker: as many as it has devices, or on this machine alone a part of one, where there are fewer than workers."""
    if device_of(run.resolved) != "cuda":
        return 0.0
    here = place.address is None
    return gpus_each(places_of(run, place), place.devices, torch.cuda.device_count()) if here else float(place.devices)


def resume_on_ray(
    out: str | Path,
    place: Ray | None = None,
    *,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
    say: Callable[[str], object] = lambda line: None,
    chaos: FaultScript | None = None,
) -> Result:
    """Goes on with a run on Ray, from the hub's newest checkpoint, by as many workers or others; see `run_on_ray`."""
    folder = RunFolder.open(Path(out).expanduser())
    before = read_ray(folder.path)
    if before is None:
        raise ConfigError(f"{folder.path} is no run on Ray. Use atoll.resume, or atoll.resume_on.")
    with folder.lock():
        check_workload(folder, workload)
        if is_finished(folder):
            return Execution(from_json(folder.run_json), folder, workload, (), Cache()).resume()
        refuse_strangers(chaos, place or before, from_json(folder.run_json))
        _refuse_devices(from_json(folder.run_json), place or before, workload)
        folder.resumed(list(command or sys.argv))
        write_ray(folder.path, place or before)
        return _Drive(folder, place or before, workload, sinks, say, chaos).carry_out()


class _Drive:
    """One process's share of a run: the one that drives it."""

    def __init__(
        self,
        folder: RunFolder,
        place: Ray,
        workload: Workload | None,
        sinks: Sequence[Sink],
        say: Callable[[str], object],
        chaos: FaultScript | None,
    ) -> None:
        given = from_json(folder.run_json)
        self._run, self._place, self._folder, self._given, self._say = given.resolved, place, folder, workload, say
        self._workers = place.processes or self._run.world.islands
        self._most = places_of(self._run, place)
        self._chaos = chaos
        self._cache = Cache()
        self._books = Execution(given, folder, workload, sinks, self._cache)

    def carry_out(self) -> Result:
        outlast_hub(self._folder.path, limit_s=self._place.limit_s, say=self._say)  # before anything is read of what it writes
        checkpoint = Checkpoints(self._folder.checkpoints, keep=self._run.keep.checkpoints).newest()
        lost = self._lost(checkpoint)
        self._books.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
        log, *others = self._books.sinks(checkpoint)
        with Fanout(others) as sink:
            warm, workload = self._prepare(Fanout([log, *others]), checkpoint)
            begin_bytes = self._books.log_bytes()
            assert isinstance(log, JsonlSink)
            log.close()  # from now on it is the hub's
            evaluator = Evaluator(workload, device_of(self._run), dtype_of(self._run))
            with self._ray(warm.params) as ray:
                chaos, hub = breaking(self._chaos, self._folder.path), self._hub_spec(warm, workload, begin_bytes, lost)
                shown = sink if chaos is None else Fanout([sink, chaos])
                engine = self._engine(ray, warm, workload, evaluator, shown, hub)
                over = False
                try:
                    with chaos or nullcontext():  # what is broken is mended before the hub is asked to save
                        finished, params, buffers = engine.run()
                    over = True
                finally:
                    engine.close(save=not over)
            self._books.leave(params, buffers, finished, checkpoint)
        evaluator.load(params, buffers)
        return self._books.result(evaluator, params)

    # ------------------------------------------------------------------------------------------------------- the beginning

    def _lost(self, checkpoint: Checkpoint | None) -> LostRounds:
        """What the log has that no checkpoint knows of, before it is cut off."""
        lost = lost_after(self._folder.events, checkpoint.metadata["events_bytes"] if checkpoint else 0)
        if checkpoint is None and lost.rounds:
            raise CheckpointError(
                f"{self._folder.path} has no checkpoint, but its log has {lost.rounds} rounds. "
                f"The run would begin again, and lose them. Put {self._folder.checkpoints} back, or start anew in another folder."
            )
        return lost

    def _prepare(self, sink: Sink, checkpoint: Checkpoint | None) -> tuple[WarmStart, Workload]:
        """The warm start, and what is trained."""
        run = self._run
        (self._folder.path / "logs").mkdir(exist_ok=True)
        plain = self._given or plain_workload(run, load_data(run, self._cache))
        if checkpoint is None:
            self._books.keep_what_is_read()
            sink.emit(self._books.started(plain, engine="ray"))
        warm = warm_up(run, plain, file=self._folder.warm_start, cache=None, sink=sink)
        if run.train.warm_start_steps and checkpoint is None:
            sink.emit(WarmStartFinished(steps=run.train.warm_start_steps, tokens=warm.tokens, loss=warm.loss))
        save_tree(self._folder.path / BEGIN, warm.params)
        workload = self._given or island_workload(run, load_data(run, self._cache), warm.params)
        if checkpoint is not None:
            check_origin(checkpoint, self._origin(workload), self._folder.path)
            sink.emit(Progress(phase="resume", done=0, total=run.train.steps, note=f"from round {checkpoint.round}"))
        return warm, workload

    def _origin(self, workload: Workload) -> dict[str, str | None]:
        return {"run": digest_of(to_json(self._run)), "data": fingerprint(workload)}

    @contextmanager
    def _ray(self, params: Tree) -> Iterator[Any]:
        if self._place.address is not None:
            with bootstrap.cluster(self._place.address) as ray:
                yield ray
            return
        store_bytes = (_PUBLISHED + self._most) * params.nbytes
        gpus = torch.cuda.device_count() if device_of(self._run) == "cuda" else 0
        with bootstrap.own_ray(cpus=self._most + 2, gpus=gpus, store_bytes=store_bytes, folder=self._folder.path) as ray:
            yield ray

    def _engine(
        self,
        ray: Any,
        warm: WarmStart,
        workload: Workload,
        evaluator: Evaluator,
        sink: Sink,
        hub: HubProcessSpec,
    ) -> RayEngine:
        run, dealt = self._run, self._given is None and needs_weights(self._run)
        make = partial(Made, run, (ray.put(tree_bytes(warm.params)),) if dealt else (), self._given, self._place.devices)
        return RayEngine(
            ray=ray,
            hub=hub,
            workers=WorkerPoolSpec(
                workers=self._workers,
                max_workers=self._most,
                worker=lambda worker, incarnation: self._worker_spec(worker, incarnation, make),
                cpus=1.0 if self._place.address is None else float(run.cluster.threads_per_island * self._place.devices),
                gpus=_gpus(run, self._place),
            ),
            evaluate=evaluator,
            sink=sink,
            steps=run.train.steps,
            timeout_s=self._place.limit_s,
            log=self._say,
        )

    def _hub_spec(self, warm: WarmStart, workload: Workload, begin_bytes: int, lost: LostRounds) -> HubProcessSpec:
        run, batches = self._run, workload.batches
        assert isinstance(run.algorithm, AsyncAlgorithm)
        plan, speeds = plan_of(run, self._place)
        islands = run.world.islands
        settings = HubSettings(
            algorithm=run.algorithm,
            plan=plan,
            examples=tuple(batches.examples(shard) for shard in range(batches.num_shards)),
            updates=run.train.steps * islands,
            seed=run.seed,
            islands=islands,
            max_workers=max(islands, self._most),
            evaluate_every=run.keep.evaluate_every * islands,
            speeds=speeds,
            devices=self._place.devices,
        )
        return HubProcessSpec(
            settings=settings,
            layout=warm.params.layout,
            dtype=dtype_name(warm.params),
            workers=self._workers,
            save_every_s=self._place.save_every_s,
            begin_bytes=begin_bytes,
            lost=lost,
            session=secrets.token_hex(8),
            storage=FolderStorage(self._folder.path.absolute(), run.keep.checkpoints, self._origin(workload)),
            fingerprint=str(fingerprint(workload)),
            threads=run.cluster.threads_per_island,
            warm_start_tokens=warm.tokens,
        )

    def _worker_spec(self, worker: int, incarnation: int, make: Callable[[], Made]) -> WorkerProcessSpec:
        run, pace = self._run, self._place.pace or 0.0
        assert isinstance(run.algorithm, AsyncAlgorithm)
        return WorkerProcessSpec(
            worker=worker,
            incarnation=incarnation,
            algorithm=run.algorithm,
            load=make,
            threads=run.cluster.threads_per_island,
            pause_s=pace * run.world.step_time(worker, run.seed),
            timeout_s=self._place.limit_s,
            log=(self._folder.path / "logs" / f"worker-{worker}.log").absolute(),
        )
