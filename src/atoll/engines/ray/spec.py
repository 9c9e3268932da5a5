"""The spec of a run on Ray: a hub and workers that pull, train and push at their own speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from atoll.core.config.type_checks import Timeout
from atoll.core.errors import ConfigError
from atoll.core.protocols import AsyncAlgorithm, Plan
from atoll.engines.process_spec import LEAST_TIMEOUT_S, ProcessSpec
from atoll.runs.run_settings import Run
from atoll.runs.settings_validation import check_devices_share_batch


@dataclass(frozen=True, kw_only=True)
class Ray(ProcessSpec):
    """Train asynchronously with a hub and workers, which are Ray actors.

    Args:
        address: HOST:PORT of an existing Ray cluster; none starts one on this machine for this run.
        network: loopback: an existing cluster is joined on the loopback interface alone; trusted: it may be one of several
            machines, and everyone on that network can read and change the run, and execute commands on the cluster's machines.
        processes: number of workers; none: one per device of the run's cluster.
        devices: number of devices of each worker, on one machine. They share each of its batches, and its steps equal those of one
            device.
        max_workers: more workers start while the Ray cluster has room, up to this number; none: no more than `processes`.
        step_delay: each worker sleeps this multiple of `cluster.step_time_s` per batch, and the grace window scales with it; none:
            no delay.
        save_every_s: seconds between two checkpoints of the hub.
        hub_timeout_s: workers and the driver wait this long for a hub that does not answer.
    """

    name: ClassVar[str] = "ray"
    resizable: ClassVar[bool] = False

    address: str | None = None
    network: Literal["loopback", "trusted"] = "loopback"
    processes: int | None = None
    devices: int = 1
    max_workers: int | None = None
    step_delay: float | None = None
    save_every_s: Timeout = 30.0
    hub_timeout_s: Timeout = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most, least_s = self.processes or 1, self.max_workers, f"it is more than 0 seconds, at least {LEAST_TIMEOUT_S}"
        self.check(
            ("devices", self.devices >= 1, "a worker has at least 1. Leave it out for 1"),
            ("max_workers", most is None or most >= least, f"at least engine.processes={least}. Leave it out for no more"),
            ("save_every_s", self.save_every_s >= LEAST_TIMEOUT_S, f"{least_s}. Leave it out for 30"),
            ("hub_timeout_s", self.hub_timeout_s >= LEAST_TIMEOUT_S, f"{least_s}. Leave it out for 300"),
        )

    @property
    def is_trusted(self) -> bool:
        return self.network == "trusted"

    def fitted(self, run: Run) -> Run:
        """The run with the workers that are started, and its data cut as before."""
        if not isinstance(run.algorithm, AsyncAlgorithm):
            raise ConfigError(
                f"{type(run.algorithm).__name__} has rounds that all islands take part in, and --engine ray has a hub and workers. "
                f"Use --engine processes, or an algorithm such as AsyncLocalSGD (recipe demo-async)."
            )
        check_devices_share_batch(run, self.devices)
        return self.on_processes(run, self.processes or run.cluster.devices)

    def expected_workers(self, run: Run) -> int:
        """The number of workers that the run starts with."""
        return self.processes or run.effective_cluster.islands

    def worker_slots(self, run: Run) -> int:
        """The largest number of workers at one time."""
        return max(self.expected_workers(run), self.max_workers or 0)

    def plan(self, run: Run) -> tuple[Plan, tuple[float, ...]]:
        """The hub's plan on real machines, and the workers' speeds where they are known.

        With a step delay the workers emulate the cluster, so its speeds hold and the grace window scales with the delay. Without
        one, speeds are measured.
        """
        assert isinstance(run.algorithm, AsyncAlgorithm)
        plan, delay, cluster = run.algorithm.plan, self.step_delay, run.effective_cluster
        by_cluster = plan.pace == "given" and not plan.speeds
        if not delay:
            return replace(plan, pace="measured") if by_cluster else plan, ()
        step_times = [cluster.step_time(number, run.seed) * delay for number in range(cluster.islands if by_cluster else 0)]
        return replace(plan, grace_s=plan.grace_s * delay), tuple(1 / time_s for time_s in step_times)

    def ignored_settings(self, run: Run) -> str:
        """The settings that real machines ignore or change, in one line."""
        assert isinstance(run.algorithm, AsyncAlgorithm)
        line, given, (plan, _) = super().ignored_settings(run), run.algorithm.plan, self.plan(run)
        if plan.grace_s != given.grace_s:
            line += f" The grace window is {plan.grace_s:g} s ({self.step_delay:g} times algorithm.grace_s)."
        if plan.pace != given.pace:
            line += " Speeds are measured."
        return f"{line} The hub saves every {self.save_every_s:g} s (engine.save_every_s); keep.save_every is ignored."


def gpus_per_worker(workers: int, devices: int, gpus: int) -> float:
    """GPUs that each worker of a machine requests: one per device, or a fraction of one if workers outnumber GPUs.

    >>> gpus_per_worker(3, 1, gpus=2), gpus_per_worker(2, 1, gpus=4), gpus_per_worker(2, 2, gpus=4)
    (0.5, 1.0, 2.0)
    """
    if devices == 1:
        return 1.0 / max(1, math.ceil(workers / gpus))
    if workers * devices > gpus:
        raise ConfigError(
            f"{workers} workers of {devices} devices each need {workers * devices} GPUs, and this machine has {gpus}. Use fewer "
            f"engine.processes or engine.devices, or engine.address of a cluster."
        )
    return float(devices)


def further_devices(device: str, count: int) -> list[str]:
    """The devices of a worker of `count` devices besides its first.

    >>> further_devices("cuda", 3), further_devices("cpu", 2)
    (['cuda:1', 'cuda:2'], ['cpu'])
    """
    return [f"cuda:{number}" if device.startswith("cuda") else "cpu" for number in range(1, count)]
