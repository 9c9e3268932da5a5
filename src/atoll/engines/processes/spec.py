"""The spec of a run on real processes: a fixed number of ranks on torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.core.config.type_checks import Timeout
from atoll.core.errors import ConfigError
from atoll.engines.network_interfaces import is_dialled
from atoll.engines.process_spec import LEAST_TIMEOUT_S, ProcessSpec
from atoll.runs.run_settings import Run, device_of


@dataclass(frozen=True, kw_only=True)
class Processes(ProcessSpec):
    """Train on real processes.

    Args:
        processes: number of ranks; none: one per device of the run's cluster.
        step_delay: each rank sleeps this multiple of `cluster.step_time_s` per batch, to emulate slow machines; none: no delay.
        exchange_timeout_s: limit of one exchange; none derives it from the measured rounds.
        start_timeout_s: limit of every wait outside of rounds: for ranks to start, to read their data, to evaluate and to save.
        backend: transport of weights between ranks: gloo, or nccl between GPUs.
        network: loopback: all ranks run on one machine, and nothing listens beyond its loopback interface; trusted: ranks of
            several machines connect over the network, and everyone on it can read and change the run. torch's transport has no
            authentication and no encryption, and torch's launcher executes what it receives.
        nodes: number of machines, on each of which you start this command; torchrun's machines do not count.
        node: the number of this machine, from 0 on.
        address: HOST:PORT of the first machine, where the ranks of all machines meet.
    """

    name: ClassVar[str] = "processes"
    resizable: ClassVar[bool] = True
    stops_processes: ClassVar[bool] = False  # the launcher catches signals itself
    runs_on_ranks: ClassVar[bool] = True

    processes: int | None = None
    step_delay: float | None = None
    exchange_timeout_s: Timeout | None = None
    start_timeout_s: Timeout = 3600.0
    backend: Literal["gloo", "nccl"] = "gloo"
    network: Literal["loopback", "trusted"] = "loopback"
    nodes: int = 1
    node: int = 0
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        timeout_s, least = self.exchange_timeout_s, f"it is more than 0 seconds, at least {LEAST_TIMEOUT_S}"
        self.check(
            ("exchange_timeout_s", timeout_s is None or timeout_s >= LEAST_TIMEOUT_S, f"{least}. Leave it out to derive it"),
            ("start_timeout_s", self.start_timeout_s >= LEAST_TIMEOUT_S, f"{least}. Leave it out for 3600"),
            ("nodes", self.nodes >= 1, "at least 1. Leave it out if all ranks run on this machine"),
            ("node", 0 <= self.node < self.nodes, f"it is 0 on the first machine, and less than engine.nodes={self.nodes}"),
            (
                "address",
                is_dialled(self.address) if self.address else self.nodes == 1,
                f"with engine.nodes={self.nodes} it is HOST:PORT of the first machine, such as first.example:29500",
            ),
            (
                "processes",
                self.nodes == 1 or (self.processes is not None and self.processes % self.nodes == 0),
                f"with engine.nodes={self.nodes} it is the number of all ranks, a multiple of it. Give --processes",
            ),
        )

    def fitted(self, run: Run) -> Run:
        """The run with the islands that these processes make up, and its data cut as before."""
        self.refuse_asynchronous(run, "all islands take part in")
        fitted = self.on_processes(run, self.processes or run.cluster.devices)
        quorum: int | None = getattr(run.algorithm, "quorum", None)
        if quorum is not None and quorum < fitted.effective_cluster.islands:
            raise ConfigError(
                f"algorithm.quorum={quorum} with --engine processes: its exchanges need every process. Use algorithm.quorum=none, "
                f"or the simulator, or --engine elastic."
            )
        if self.backend == "nccl" and device_of(fitted.resolved) != "cuda":
            raise ConfigError(
                f"engine.backend=nccl connects GPUs, and with train.device={run.train.device} this run computes on the CPU here. "
                f"Use engine.backend=gloo, or train.device=cuda."
            )
        return fitted


def gpu_of_rank(local_rank: int, processes: int, gpus: int, backend: str) -> int:
    """The GPU of its machine that a rank computes on: one of its own while there are enough, else a shared one. `local_rank` and
    `processes` are those of this run on that machine."""
    if backend == "nccl" and processes > gpus:
        raise ConfigError(
            f"{processes} processes on a machine with {gpus} GPU(s): NCCL needs one GPU per process. Use engine.backend=gloo, "
            f"which shares GPUs, or start {gpus} there."
        )
    return local_rank % gpus
