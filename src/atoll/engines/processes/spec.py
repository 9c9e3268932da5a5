"""The spec of a run on real processes: a fixed number of ranks on torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import AsyncAlgorithm
from atoll.runs.run import Run, device_of


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Train on real processes.

    Args:
        processes: number of ranks; none: one per device of the run's cluster.
        step_delay: each rank sleeps this multiple of `cluster.step_time_s` per batch, to emulate slow machines; none: no delay.
        exchange_timeout_s: limit of one exchange; none derives it from the measured rounds.
        start_timeout_s: limit of every wait outside of rounds: for ranks to start, to read their data, to evaluate and to save.
        backend: transport of weights between ranks: gloo, or nccl between GPUs.
    """

    name: ClassVar[str] = "processes"

    processes: int | None = None
    step_delay: float | None = None
    exchange_timeout_s: float | None = None
    start_timeout_s: float = 3600.0
    backend: Literal["gloo", "nccl"] = "gloo"

    def __post_init__(self) -> None:
        check_types(self)
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"engine.processes={self.processes}: at least 1. Leave it out for one per device of the cluster.")
        if self.step_delay is not None and not self.step_delay >= 0:
            raise ConfigError(f"engine.step_delay={self.step_delay}: it is 0 or more. Leave it out for no delay.")
        if self.exchange_timeout_s is not None and not self.exchange_timeout_s > 0:
            raise ConfigError(
                f"engine.exchange_timeout_s={self.exchange_timeout_s}: it is more than 0 seconds. Leave it out to derive it."
            )
        if not self.start_timeout_s > 0:
            raise ConfigError(f"engine.start_timeout_s={self.start_timeout_s}: it is more than 0 seconds. Leave it out for 3600.")

    def fitted(self, run: Run) -> Run:
        """The run with the islands that these processes make up, and its data cut as before."""
        processes = self.processes or run.cluster.devices
        if isinstance(run.algorithm, AsyncAlgorithm):
            raise ConfigError(
                f"{type(run.algorithm).__name__} has a hub and workers, and --engine {self.name} has rounds that all islands take "
                f"part in. Use --engine ray or simulator, or an algorithm such as DiLoCo."
            )
        devices = run.cluster.devices_per_island
        if processes % devices:
            raise ConfigError(
                f"processes={processes} cannot be islands of cluster.devices_per_island={devices} devices. Use a multiple of it."
            )
        # Data keep the shards that the run began with when another number of processes resumes it.
        data = replace(run.data, shards=run.data.shards or processes)
        fitted = replace(run, cluster=replace(run.cluster, islands=processes // devices), data=data)
        if self.backend == "nccl" and device_of(fitted.resolved) != "cuda":
            raise ConfigError(
                f"engine.backend=nccl connects GPUs, and with train.device={run.train.device} this run computes on the CPU here. "
                f"Use engine.backend=gloo, or train.device=cuda."
            )
        return fitted

    def delay_s(self, run: Run, island: int) -> float:
        """Seconds that a rank of this island sleeps per batch."""
        return (self.step_delay or 0.0) * run.effective_cluster.step_time(island, run.seed)

    def ignored_settings(self, run: Run) -> str:
        """The cluster settings that real processes ignore, in one line."""
        cluster = run.cluster
        ignored = ["cluster.link", *(["cluster.step_time_s"] if self.step_delay is None else [])]
        ignored += ["lost messages"] if cluster.loses_messages else []
        ignored += ["absences of islands"] if cluster.away or cluster.pool != "constant" else []
        return f"{', '.join(ignored)}: ignored, since real processes compute and exchange as fast as they can."


def gpu_of_rank(local_rank: int, processes: int, gpus: int, backend: str) -> int:
    """The GPU of its machine that a rank computes on: one of its own while there are enough, else a shared one. `local_rank` and
    `processes` are those of this run on that machine."""
    if backend == "nccl" and processes > gpus:
        raise ConfigError(
            f"{processes} processes on a machine with {gpus} GPU(s): NCCL needs one GPU per process. Use engine.backend=gloo, "
            f"which shares GPUs, or start {gpus} there."
        )
    return local_rank % gpus
