"""How a Run is carried out on Ray: by a hub and workers that come when they can."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import AsyncAlgorithm, Plan
from atoll.engines.processes.spec import PLACE, engine_in
from atoll.runs.folder import write_text
from atoll.runs.run import Run

if TYPE_CHECKING:
    from atoll.testing.chaos.faults import FaultScript

LOCAL = "local"
"""Said for an address: this machine, also where the run was on a cluster before."""


@dataclass(frozen=True, kw_only=True)
class Ray:
    """A hub and workers, on Ray.

    Args:
        address: of a Ray cluster that exists, host and port; none starts one on this machine, for this run alone.
        processes: how many workers; none: as many as the run's cluster has devices.
        devices: of each worker, on one machine: they share out each of its batches, and its steps are those of one device.
        most: how many there may be, if the Ray cluster has room for more or gets it later. None: no more than those.
        pace: each batch takes so many times the cluster's step time longer, asleep; the grace window is so many times as long too.
            None: computing takes what it takes.
        save_every_s: seconds between two checkpoints of the hub.
        limit_s: how long a hub that does not answer is waited for.
    """

    address: str | None = None
    processes: int | None = None
    devices: int = 1
    most: int | None = None
    pace: float | None = None
    save_every_s: float = 30.0
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes={self.processes}: at least 1. Leave it out for as many as the cluster has devices.")
        if self.devices < 1:
            raise ConfigError(f"devices={self.devices}: a worker has at least 1. Leave it out for one.")
        if self.most is not None and self.most < (self.processes or 1):
            raise ConfigError(
                f"most={self.most}: at least as many as there are workers ({self.processes or 1}). Leave it out for no more."
            )
        if self.pace is not None and not self.pace >= 0:
            raise ConfigError(f"pace={self.pace}: it is 0 or more. Leave it out so that computing takes what it takes.")
        if not self.save_every_s > 0:
            raise ConfigError(f"save_every_s={self.save_every_s}: it is more than 0 seconds. Leave it out for 30.")
        if not self.limit_s > 0:
            raise ConfigError(f"limit_s={self.limit_s}: it is more than 0 seconds. Leave it out for 300.")


def write_ray(folder: Path, place: Ray) -> None:
    write_text(folder / PLACE, json.dumps({"engine": "ray", **asdict(place)}) + "\n")


def read_ray(folder: Path) -> Ray | None:
    """How this folder's run is carried out on Ray; none if it is not."""
    engine, settings = engine_in(folder)
    return Ray(**settings) if engine == "ray" else None


def with_said(place: Ray | None, said: Mapping[str, Any]) -> Ray:
    """The place with what was said now; what was not said is as it was. The address `local` is none: a Ray of the run's own."""
    given: dict[str, Any] = {name: None if value == LOCAL else value for name, value in said.items() if value is not None}
    return replace(place or Ray(), **given)


def on_workers(run: Run, workers: int) -> Run:
    """The run on so many workers, with its data cut as they were."""
    if not isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(
            f"{type(run.algorithm).__name__} has rounds that all islands take part in, and --engine ray has a hub and workers that "
            f"come when they can. Use --engine dist, or an algorithm such as AsyncLocalSGD (recipe demo-async)."
        )
    devices = run.cluster.devices_per_island
    if workers % devices:
        raise ConfigError(
            f"processes={workers} cannot be islands of cluster.devices_per_island={devices} devices each, of which every one is a "
            f"worker. Use a multiple of it."
        )
    data = replace(run.data, shards=run.data.shards or workers)
    return replace(run, cluster=replace(run.cluster, islands=workers // devices), data=data)


def places_of(run: Run, place: Ray) -> int:
    """How many workers there may be."""
    return max(place.processes or run.world.islands, place.most or 0)


def refuse_strangers(script: FaultScript | None, place: Ray, run: Run) -> None:
    """Refuse a script of what cannot happen to this run."""
    if script is not None:
        from atoll.testing.chaos.ray_faults import check_ray_script

        check_ray_script(script, places_of(run, place))


def plan_of(run: Run, place: Ray) -> tuple[Plan, tuple[float, ...]]:
    """How workers are sent off on real machines, and their speeds, where they are given.

    With a pace, machines play the cluster's: its speeds hold, and a grace window is as many times as long as a step. Without one,
    nobody knows how fast machines are, and speeds that were to be the cluster's are measured.
    """
    assert isinstance(run.algorithm, AsyncAlgorithm)
    plan, pace = run.algorithm.plan, place.pace
    if pace:
        step_times = [run.world.step_time(number, run.seed) * pace for number in range(run.world.islands)]
        plays = plan.pace == "given" and not plan.speeds
        return replace(plan, grace_s=plan.grace_s * pace), tuple(1 / time_s for time_s in step_times) if plays else ()
    if plan.pace == "given" and not plan.speeds:
        plan = replace(plan, pace="measured")
    return plan, ()


def gpus_each(workers: int, devices: int, gpus: int) -> float:
    """How many of a machine's GPUs each of so many workers asks for: its devices; or, of one device, a part of a GPU where there
    are fewer GPUs than workers.

    >>> gpus_each(3, 1, gpus=2), gpus_each(2, 1, gpus=4), gpus_each(2, 2, gpus=4)
    (0.5, 1.0, 2.0)
    """
    if devices == 1:
        return 1.0 / max(1, math.ceil(workers / gpus))
    if workers * devices > gpus:
        raise ConfigError(
            f"{workers} workers of {devices} devices each need {workers * devices} GPUs, and this machine has {gpus}. Use fewer "
            f"--processes or --devices, or --ray-address."
        )
    return float(devices)


def devices_beside(device: str, count: int) -> list[str]:
    """What a worker of so many devices has besides its own.

    >>> devices_beside("cuda", 3), devices_beside("cpu", 2)
    (['cuda:1', 'cuda:2'], ['cpu'])
    """
    return [f"cuda:{number}" if device.startswith("cuda") else "cpu" for number in range(1, count)]


def told(run: Run, place: Ray) -> str:
    """What real machines do with the cluster's settings, in one line."""
    assert isinstance(run.algorithm, AsyncAlgorithm)
    cluster, given = run.cluster, run.algorithm.plan
    what = ["cluster.link", *([] if place.pace else ["cluster.step_time_s"])]
    what += ["lost messages"] if cluster.loses_messages else []
    what += ["islands that come and go"] if cluster.outages else []
    line = f"{', '.join(what)}: ignored, since real processes compute and talk as fast as they can."
    plan, _ = plan_of(run, place)
    if plan.grace_s != given.grace_s:
        line += f" The grace window is {plan.grace_s:g} s ({place.pace:g} times algorithm.grace_s)."
    if plan.pace != given.pace:
        line += " Speeds are measured."
    return f"{line} The hub saves every {place.save_every_s:g} s (--save-every), not by keep.save_every."
