"""Before the clock starts: data that are loaded and a warm start that is made, once for all runs on the same work."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.config.json_records import to_json
from atoll.core.errors import TrainingDiverged
from atoll.core.events import Progress
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink, Work, Workload
from atoll.core.serialization import load_tree, read_tensors, save_tree
from atoll.engines.training_setup import loss_of, replica_of
from atoll.optim.schedules import WSD, at
from atoll.replica.local_replica import torch_threads
from atoll.replica.master_weights import initial_weights
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.workloads import Loaded, dealt, fingerprint, whole

_STRETCH = 10  # steps between two signs of life


class Cache:
    """What several runs on the same work need make only once: data and warm starts, by what they depend on.

    Args:
        folder: where warm starts are kept, for other processes and for later; none keeps them in memory alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def get(self, depends_on: Sequence[Any], make: Callable[[], Any]) -> Any:
        key = _key(depends_on)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def file(self, depends_on: Sequence[Any]) -> Path | None:
        """Where what depends on this is kept."""
        name = blake2b(_key(depends_on).encode(), digest_size=12).hexdigest()
        return None if self._folder is None else self._folder / f"{name}.safetensors"


def _key(depends_on: Sequence[Any]) -> str:
    return json.dumps([to_json(part) for part in depends_on], sort_keys=True)


@dataclass(frozen=True, eq=False)
class WarmStart:
    """Weights after plain training by one island, before the clock starts.

    Attributes:
        params: the weights; the initial ones if nothing was trained.
        tokens: that were read.
        loss: mean over the last tenth of the steps.
    """

    params: Tree
    tokens: int
    loss: float


def load_data(run: Run, cache: Cache) -> Loaded:
    """The run's data, read or made once for all runs that share the cache."""
    return dealt(cache.get([whole(run.data)], run.data.load), run.data)


def warm_up(run: Run, plain: Workload, *, file: Path, cache: Cache | None, sink: Sink) -> WarmStart:
    """The warm start: from the run's folder, from a run that shared it, or made now and kept in the folder.

    Args:
        run: the run, resolved.
        plain: what plain training reads.
        file: where the run's folder keeps it.
        cache: what runs share; none to share nothing.
        sink: takes signs of life.
    """

    def make() -> WarmStart:
        return warm_start(run, plain, lambda done, total, loss: sink.emit(_warming(done, total, loss)))

    origin = str(fingerprint(plain))
    if _is_of(file, origin):
        return _read(file, device_of(run))
    if not run.train.warm_start_steps:
        return make()
    warm: WarmStart = make() if cache is None else cache.get(_depends_on(run), lambda: _common(run, cache, origin, make))
    _write(file, warm, origin)
    return warm


def _common(run: Run, cache: Cache, origin: str, make: Callable[[], WarmStart]) -> WarmStart:
    """The one that whoever was first has left in the cache's folder. On a GPU no two that are made have the same bits."""
    file = cache.file([*_depends_on(run), origin])
    if file is None:
        return make()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        mine = file.with_name(f"{file.stem}.{os.getpid()}")
        _write(mine, make(), origin)
        try:
            os.link(mine, file)  # unlike a rename, it leaves what another has put there meanwhile
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(mine, file)
        mine.unlink(missing_ok=True)
    return _read(file, device_of(run))


def warm_start(run: Run, workload: Workload, progress: Callable[[int, int, float], None]) -> WarmStart:
    """Plain training of one replica: the inner rule at a constant rate after a warm-up. The schedule proper comes later."""
    steps, begin = run.train.warm_start_steps, initial_weights(workload, device_of(run), dtype_of(run))
    if steps == 0:
        return WarmStart(begin, 0, float("nan"))
    replica = replica_of(_plain(run), workload, loss_of(run, workload), island=-1)
    replica.load(begin)
    losses: list[float] = []
    tokens = 0
    with torch_threads(run.cluster.threads_per_island):
        for start in range(0, steps, _STRETCH):
            count = min(_STRETCH, steps - start)
            trained = replica.train(count, Work(shard=0, start=start, schedule=start, examples=0))
            losses += trained.losses
            for step, loss in enumerate(trained.losses):
                if not math.isfinite(loss):
                    raise TrainingDiverged(
                        f"the loss is {loss} at step {start + step} of the warm start. Nothing was saved. Lower "
                        f"train.warm_start_lr or the optimizer's rate, or set train.clip_norm."
                    )
            tokens += trained.tokens
            progress(start + count, steps, losses[-1])
    return WarmStart(replica.params(), tokens, fmean(losses[-max(1, steps // 10) :]))


def warm_start_rate(run: Run) -> float:
    """The learning rate of the warm start: given, or the highest of the run's schedule."""
    return run.train.warm_start_lr or max(at(run.optimizer.lr, step) for step in range(run.schedule_steps))


def _plain(run: Run) -> Run:
    """The run as plain training sees it: another schedule, and no rounds, so nothing that begins with each of them."""
    steps = run.train.warm_start_steps
    warmup = getattr(run.optimizer.lr, "warmup", 0)  # the schedule's own, once more
    schedule = WSD(lr=warm_start_rate(run), steps=steps, warmup=min(warmup, steps), decay=0)
    train = replace(run.train, fresh_optimizer=False, peak_first=False)
    return replace(run, optimizer=replace(run.optimizer, lr=schedule), train=train)


def _depends_on(run: Run) -> list[Any]:
    """All that decides a warm start. The number of steps of what comes after it does not."""
    plain = _plain(run)
    # One replica computes by itself; and the rate is in the schedule by now, given or not.
    train = replace(plain.train, steps=1, together="auto", warm_start_lr=None)
    return [run.model, whole(run.data), plain.optimizer, train, run.cluster.threads_per_island, run.seed]


def _warming(done: int, total: int, loss: float) -> Progress:
    return Progress(phase="warm start", done=done, total=total, note=f"loss {loss:.3f}")


def _is_of(file: Path, origin: str) -> bool:
    """Whether there is a warm start on these data."""
    return file.exists() and read_tensors(file)[1].get("data") == origin


def _write(path: Path, warm: WarmStart, origin: str) -> None:
    save_tree(path, warm.params, {"tokens": str(warm.tokens), "loss": repr(warm.loss), "data": origin})


def _read(path: Path, device: str) -> WarmStart:
    _, metadata = read_tensors(path)
    return WarmStart(load_tree(path).to(device), int(metadata["tokens"]), float(metadata["loss"]))
