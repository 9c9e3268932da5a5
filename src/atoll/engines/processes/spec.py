"""Where a Run is carried out: in one process under a virtual clock, or by real processes. It is no part of the Run, which says what
is done; a run's folder remembers it, so that the run goes on in the same way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import AsyncAlgorithm
from atoll.runs.folder import write_text
from atoll.runs.run import Run, device_of

PLACE = "engine.json"
START_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Dist:
    """Real processes, on torch.distributed.

    Args:
        processes: how many; none: as many as the run's cluster has devices.
        pace: each batch takes so many times the cluster's step time longer, asleep; none: computing takes what it takes.
        limit_s: how long an exchange may take; none derives it from how long rounds take.
        start_limit_s: how long others are waited for outside of rounds: to come, to read their data, to evaluate and to save.
        backend: what carries weights: gloo, or nccl between GPUs.
    """

    processes: int | None = None
    pace: float | None = None
    limit_s: float | None = None
    start_limit_s: float = START_LIMIT_S
    backend: Literal["gloo", "nccl"] = "gloo"

    def __post_init__(self) -> None:
        check_types(self)
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes={self.processes}: at least 1. Leave it out for as many as the cluster has devices.")
        if self.pace is not None and not self.pace >= 0:
            raise ConfigError(f"pace={self.pace}: it is 0 or more. Leave it out so that computing takes what it takes.")
        if self.limit_s is not None and not self.limit_s > 0:
            raise ConfigError(f"limit_s={self.limit_s}: it is more than 0 seconds. Leave it out to derive it.")
        if not self.start_limit_s > 0:
            raise ConfigError(f"start_limit_s={self.start_limit_s}: it is more than 0 seconds. Leave it out for an hour.")


def write_place(folder: Path, place: Dist) -> None:
    write_text(folder / PLACE, json.dumps({"engine": "dist", **asdict(place)}) + "\n")


def engine_in(folder: Path) -> tuple[str, dict[str, Any]]:
    """The engine that this folder's run is carried out by, and its settings. The simulator has none of its own."""
    path = folder / PLACE
    if not path.is_file():
        return "sim", {}
    record = json.loads(path.read_text("utf-8"))
    return record.pop("engine"), record


def read_place(folder: Path) -> Dist | None:
    """How this folder's run is carried out by a fixed number of processes; none if it is not."""
    engine, settings = engine_in(folder)
    return Dist(**settings) if engine == "dist" else None


def place_of(folder: Path) -> Dist:
    """How this folder's run is carried out by real processes."""
    place = read_place(folder)
    if place is None:
        raise ConfigError(f"{folder} is no run of real processes. Use atoll.resume.")
    return place


def placed(run: Run, processes: int) -> Run:
    """The run on so many processes: with as many islands as they make up, and its data cut as it was."""
    devices = run.cluster.devices_per_island
    if processes % devices:
        raise ConfigError(
            f"processes={processes} cannot be islands of cluster.devices_per_island={devices} devices each. Use a multiple of it."
        )
    if isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(
            f"{type(run.algorithm).__name__} has a hub and workers that come when they can, and --engine dist has rounds that all "
            f"take part in. Use --engine ray or sim, or an algorithm such as DiLoCo."
        )
    # A run that is resumed by another number of processes reads the shards that it began with.
    data = replace(run.data, shards=run.data.shards or processes)
    return replace(run, cluster=replace(run.cluster, islands=processes // devices), data=data)


def started_together(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun, or something like it, has started of which this is one; 1 if it stands alone.

    >>> started_together({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "first.example"})
    2
    """
    size = environment.get("WORLD_SIZE", "")
    told = "RANK" in environment and ("TORCHELASTIC_RUN_ID" in environment or "MASTER_ADDR" in environment)
    return int(size) if told and size.isdecimal() else 1


def refuse_copies(instead: str) -> None:
    """Refuse to simulate in each of several processes: every one of them would carry out the whole run.

    Args:
        instead: what to do so that they work together, as a sentence; empty if they cannot.
    """
    processes = started_together()
    if processes > 1:
        raise ConfigError(
            f"torchrun, or something like it, started {processes} processes (WORLD_SIZE={os.environ['WORLD_SIZE']}, "
            f"RANK={os.environ['RANK']}), and a simulated cluster is one process: each would carry out all of it. "
            f"{instead}{'Or start' if instead else 'Start'} it once, without torchrun."
        )


def check_backend(run: Run, place: Dist) -> None:
    """NCCL knows GPUs alone."""
    if place.backend == "nccl" and device_of(run) != "cuda":
        raise ConfigError(
            f"backend=nccl carries weights between GPUs, and with train.device={run.train.device} this run computes on the CPU "
            f"here. Use backend=gloo, or train.device=cuda."
        )


def own_gpu(local_rank: int, processes: int, gpus: int, backend: str) -> int:
    """Which GPU of its machine a process computes on: one of its own as far as there are some; else they share them.

    Args:
        local_rank: of the process, among those of its machine.
        processes: of this run on its machine.
        gpus: that the machine has.
        backend: what carries weights.
    """
    if backend == "nccl" and processes > gpus:
        raise ConfigError(
            f"{processes} processes on a machine with {gpus} GPU(s): NCCL wants one for each of them. Use backend=gloo, which lets "
            f"them share, or start {gpus} there."
        )
    return local_rank % gpus


def pause_s(run: Run, place: Dist, island: int) -> float:
    """How long a process of this island sleeps for each batch. Where devices have no algorithm of their own, each is an island."""
    return (place.pace or 0.0) * run.world.step_time(island, run.seed)


def ignored(run: Run, place: Dist) -> str:
    """What real machines do not take from the cluster's settings, in one line."""
    cluster = run.cluster
    what = ["cluster.link", *(["cluster.step_time_s"] if place.pace is None else [])]
    what += ["lost messages"] if cluster.loses_messages else []
    what += ["islands that come and go"] if cluster.away or cluster.pool != "constant" else []
    return f"{', '.join(what)}: ignored, since real processes compute and talk as fast as they can."


def in_full(run: Run) -> str | None:
    """That this machine computes in single precision though bfloat16 was asked for, in one line; none where it does not."""
    if run.train.precision != "bf16" or device_of(run) != "cpu":
        return None
    return f"train.precision=bf16: ignored, since train.device={run.train.device} finds no CUDA device here. It computes in fp32."


def refuse_too_many_devices(run: Run, devices: int) -> None:
    """Refuse batches of which not every device of an island, or worker, would have an example.

    Args:
        run: says how large batches are.
        devices: that share out each of them.
    """
    pieces = devices * run.train.micro_batches
    if run.train.batch_size < pieces:
        each = f", in {run.train.micro_batches} pieces each" if run.train.micro_batches > 1 else ""
        raise ConfigError(
            f"train.batch_size={run.train.batch_size}: {devices} devices share out each batch{each}, so that it needs at least "
            f"{pieces} examples. Use larger batches, or fewer --devices."
        )
