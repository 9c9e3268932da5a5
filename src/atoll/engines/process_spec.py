"""What the specs of the engines on real processes have in common: their checks, and how a run is fitted to processes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from atoll.core.config.type_checks import check_types, shown_text
from atoll.core.errors import ConfigError
from atoll.core.protocols import AsyncAlgorithm
from atoll.runs.run_settings import Run

_LONGEST_DELAY_S = 86_400.0
LEAST_TIMEOUT_S = 0.001
"""The least limit of a wait: sockets count milliseconds."""


class ProcessSpec:
    """The base of a spec whose engine starts processes."""

    name: ClassVar[str]
    stops_processes: ClassVar[bool] = True
    runs_on_ranks: ClassVar[bool] = False
    processes: int | None
    step_delay: float | None

    def __post_init__(self) -> None:
        check_types(self)
        per_device = "at least 1. Leave it out for one per device of the cluster"
        self.check(
            ("processes", self.processes is None or self.processes >= 1, per_device),
            ("step_delay", self.step_delay is None or self.step_delay >= 0, "it is 0 or more. Leave it out for no delay"),
        )

    def check(self, *rules: tuple[str, bool, str]) -> None:
        """Refuse a setting that breaks a rule: its name, whether its value is allowed, and which values are."""
        for name, allowed, rule in rules:
            if not allowed:
                value = getattr(self, name)
                raise ConfigError(f"engine.{name}={'none' if value is None else shown_text(str(value))}: {rule}.")

    def refuse_asynchronous(self, run: Run, rounds: str) -> None:
        if isinstance(run.algorithm, AsyncAlgorithm):
            raise ConfigError(
                f"{type(run.algorithm).__name__} has a hub and workers, and --engine {self.name} has rounds that {rounds}. "
                f"Use --engine ray or simulator, or an algorithm such as DiLoCo."
            )

    def on_processes(self, run: Run, processes: int) -> Run:
        """The run with the islands that these processes make up. Its data keep the shards that it began with when another number of
        processes resumes it."""
        devices = run.cluster.devices_per_island
        if any(getattr(algorithm, "buckets", 1) > 1 for algorithm in (run.algorithm, run.inside)):
            raise ConfigError(
                f"buckets with --engine {self.name}: the simulator models exchanges during the backward pass, and processes "
                f"exchange after it. Use buckets=1."
            )
        if processes % devices:
            raise ConfigError(
                f"processes={processes} cannot be islands of cluster.devices_per_island={devices} devices. Use a multiple of it."
            )
        data = replace(run.data, shards=run.data.shards or processes)
        fitted = replace(run, cluster=replace(run.cluster, islands=processes // devices), data=data)
        cluster = fitted.effective_cluster
        delay_s = (self.step_delay or 0.0) * max(cluster.step_time(island, run.seed) for island in range(cluster.islands))
        if delay_s > _LONGEST_DELAY_S:
            raise ConfigError(
                f"engine.step_delay={self.step_delay} times cluster.step_time_s: a process would sleep for {delay_s:g} s per "
                f"batch. At most {_LONGEST_DELAY_S:,.0f} s is possible. Lower one of them."
            )
        return fitted

    def delay_s(self, run: Run, island: int) -> float:
        """Seconds that a process of this island sleeps per batch."""
        return (self.step_delay or 0.0) * run.effective_cluster.step_time(island, run.seed)

    def ignored_settings(self, run: Run) -> str:
        """The cluster settings that real processes ignore, in one line."""
        cluster = run.cluster
        ignored = ["cluster.link", *(["cluster.step_time_s"] if not self.step_delay else [])]
        ignored += ["lost messages"] if cluster.loses_messages else []
        ignored += ["absences of islands"] if cluster.away or cluster.outages or cluster.pool != "constant" else []
        return f"{', '.join(ignored)}: ignored, since real processes compute and exchange as fast as they can."
