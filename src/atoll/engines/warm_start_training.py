"""The data of a run, and its warm start, which one replica trains before the clock starts. Several runs can share both."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.config.json_records import to_json
from atoll.core.errors import CheckpointError, TrainingDiverged
from atoll.core.events import Progress
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink, Work, Workload
from atoll.core.serialization import read_tree, save_tree
from atoll.core.verified_files import json_digest
from atoll.data.text_dataset import Text
from atoll.engines.training_setup import loss_of, matrix_products, replica_of
from atoll.optim.schedules import WSD, at
from atoll.replica.local_replica import torch_threads
from atoll.replica.master_weights import initial_weights
from atoll.runs.run_settings import Run, device_of, dtype_of
from atoll.runs.workloads import LoadedData, data_fingerprint, sharded_workload, single_shard_workload, unpartitioned

_PROGRESS_STEPS = 10  # steps between two progress events


class Cache:
    """Data and warm starts that several runs share, by what they depend on. Warm starts are files in `folder`, for other processes
    and later runs; without a folder they are kept in memory alone."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._values: dict[str, Any] = {}

    def get(self, depends_on: Sequence[Any], make: Callable[[], Any]) -> Any:
        key = _key(depends_on)
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def file(self, depends_on: Sequence[Any]) -> Path | None:
        name = blake2b(_key(depends_on).encode(), digest_size=12).hexdigest()
        return None if self._folder is None else self._folder / f"{name}.safetensors"


def _key(depends_on: Sequence[Any]) -> str:
    return json.dumps([to_json(part) for part in depends_on], sort_keys=True)


def load_data(run: Run, cache: Cache, log: Callable[[str], object] = lambda line: None) -> LoadedData:
    """The run's data, loaded once for all runs that share the cache. `log` takes lines while long files are verified."""
    load = partial(run.data.load, log) if isinstance(run.data, Text) else run.data.load
    loaded: LoadedData = cache.get([unpartitioned(run.data)], load)
    return replace(loaded, settings=run.data)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class WarmStart:
    """Weights after the warm start; the initial ones if it has no steps."""

    params: Tree
    tokens: int  # read by the warm start
    loss: float  # mean over the last tenth of its steps


@dataclass(frozen=True)
class Prepared:
    """What an engine starts from: data in shards, weights, and the digests of Run and data, which a checkpoint must match."""

    workload: Workload
    warm_start: WarmStart
    origin: Mapping[str, str | None]


@dataclass(frozen=True)
class RunPreparation:
    """Loads the data of a resolved run, and gets its warm start. `workload` is trained instead of the Run's model and data."""

    run: Run
    workload: Workload | None = None
    cache: Cache = field(default_factory=Cache)
    log: Callable[[str], object] = lambda line: None

    @cached_property
    def data(self) -> LoadedData:
        return load_data(self.run, self.cache, self.log)

    @cached_property
    def single_shard(self) -> Workload:
        """What plain training reads: all data, in one shard."""
        return self.workload or single_shard_workload(self.run, self.data)

    def sharded(self, params: Tree) -> Workload:
        """What the islands read. Some partitions of the data depend on the weights of the warm start."""
        return self.workload or sharded_workload(self.run, self.data, params)

    def initial_weights(self) -> Tree:
        return initial_weights(self.single_shard, device_of(self.run), dtype_of(self.run))

    def warm_start(self, file: Path, sink: Sink) -> WarmStart:
        """The warm start from `file` in the run's folder or from the cache, or else trained now and written to the folder."""
        run, cache, workload = self.run, self.cache, self.single_shard

        def train() -> WarmStart:
            return train_warm_start(run, workload, sink)

        data = str(data_fingerprint(workload))
        if run.train.warm_start_steps and file.exists() and (found := _read(file, device_of(run), data)) is not None:
            return found
        if not run.train.warm_start_steps:
            return train()
        cacheable = self.workload is None  # the settings do not describe a user's workload
        warm: WarmStart = cache.get(_depends_on(run), lambda: _cached(run, cache, data, train)) if cacheable else train()
        _write(file, warm, data)
        return warm

    def prepared(self, warm: WarmStart, *, resizable: bool) -> Prepared:
        """The data in shards, with the warm start. `resizable`: see `run_digest`."""
        workload = self.sharded(warm.params)
        origin = {"run": run_digest(self.run, resizable=resizable), "data": data_fingerprint(workload)}
        return Prepared(workload, warm, origin)


def run_digest(run: Run, *, resizable: bool) -> str:
    """Identifies a resolved Run in its checkpoints, without the number of islands if that may change."""
    plain = to_json(run)
    if resizable:
        plain["cluster"]["islands"] = None
    return json_digest(plain)


def _cached(run: Run, cache: Cache, data: str, train: Callable[[], WarmStart]) -> WarmStart:
    """The warm start in the cache's folder. The first process to write it decides its bits: on a GPU two warm starts differ."""
    file = cache.file([*_depends_on(run), data])
    if file is None:
        return train()
    found = _read(file, device_of(run), data) if file.exists() else None
    if found is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        mine = file.with_name(f"{file.stem}.{os.getpid()}")
        _write(mine, train(), data)
        try:
            os.link(mine, file)  # unlike a rename, it keeps a file that another process has written meanwhile
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(mine, file)
        mine.unlink(missing_ok=True)
        found = _read(file, device_of(run), data)
    assert found is not None, "the name of the file has the digest of the data"
    return found


def train_warm_start(run: Run, workload: Workload, sink: Sink) -> WarmStart:
    """Train one replica with the inner rule at a constant rate after a warm-up. The run's schedule starts after it."""
    steps, initial = run.train.warm_start_steps, initial_weights(workload, device_of(run), dtype_of(run))
    if steps == 0:
        return WarmStart(initial, 0, float("nan"))
    replica = replica_of(_warm_start_run(run), workload, loss_of(run, workload), island=-1)
    replica.load(initial)
    losses: list[float] = []
    tokens = 0
    with torch_threads(run.cluster.threads_per_island), matrix_products(run):
        for start in range(0, steps, _PROGRESS_STEPS):
            count = min(_PROGRESS_STEPS, steps - start)
            trained = replica.train(count, Work(shard=0, start=start, schedule=start, examples=0))
            losses += trained.losses
            for step, loss in enumerate(trained.losses):
                if not math.isfinite(loss):
                    raise TrainingDiverged(
                        f"the loss is {loss} at step {start + step} of the warm start. Nothing was saved. Lower "
                        f"train.warm_start_lr or the optimizer's rate, or set train.clip_norm."
                    )
            tokens += trained.tokens
            sink.emit(Progress(phase="warm start", done=start + count, total=steps, note=f"loss {losses[-1]:.3f}"))
    return WarmStart(replica.params(), tokens, fmean(losses[-max(1, steps // 10) :]))


def _warm_start_run(run: Run) -> Run:
    """The run with the warm start's schedule, at the given rate or the highest of the run's own, and without rounds that reset
    anything."""
    steps = run.train.warm_start_steps
    rate = run.train.warm_start_lr or max(at(run.optimizer.lr, step) for step in range(run.schedule_steps))
    warmup = getattr(run.optimizer.lr, "warmup", 0)  # as long as the run's own
    schedule = WSD(lr=rate, steps=steps, warmup=min(warmup, steps), decay=0)
    train = replace(run.train, fresh_optimizer=False, peak_first=False)
    return replace(run, optimizer=replace(run.optimizer, lr=schedule), train=train)


def _depends_on(run: Run) -> list[Any]:
    """All settings that decide a warm start. The number of steps after it does not."""
    warm = _warm_start_run(run)
    # The replica computes by itself, and its rate is in the schedule.
    train = replace(warm.train, steps=1, together="auto", warm_start_lr=None)
    return [run.model, unpartitioned(run.data), warm.optimizer, train, run.cluster.threads_per_island, run.seed]


def _write(path: Path, warm: WarmStart, data: str) -> None:
    save_tree(path, warm.params, {"tokens": str(warm.tokens), "loss": repr(warm.loss), "data": data})


def _read(path: Path, device: str, data: str) -> WarmStart | None:
    """The warm start in a file; None if it read other data. Raises CheckpointError if the file is damaged or holds none."""
    params, metadata = read_tree(path)
    try:
        tokens, loss = int(metadata["tokens"]), float(metadata["loss"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} holds no warm start ({error!r}). Remove it: it is made again.") from error
    return WarmStart(params.to(device), tokens, loss) if metadata.get("data") == data else None
