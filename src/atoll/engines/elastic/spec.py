"""The spec of an elastic run: islands are processes that may join, die and rejoin while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import ConfigError
from atoll.engines.process_spec import ProcessSpec
from atoll.runs.run_settings import Run
from atoll.runs.validation import check_devices_share_batch


@dataclass(frozen=True, kw_only=True)
class Elastic(ProcessSpec):
    """Train on islands that join and leave, each a process, with a quorum by torchft.

    Args:
        processes: islands to start here; none: the islands of the run's cluster. A new run divides its work by this number; on
            resume, or when more islands join, the work stays the same.
        step_delay: each island sleeps this multiple of `cluster.step_time_s` per batch; none: no delay.
        quorum_timeout_s: the quorum waits this long for an island that sends heartbeats and does not join the exchange.
        start_timeout_s: the first islands wait this long for all that were started.
        heartbeat_timeout_s: an island without a heartbeat for this long leaves the quorum. Islands send ten heartbeats a second; a
            congested link may delay them.
        max_delta_ratio: a delta is refused if its norm exceeds the recent norms by this factor.
        listen: HOST:PORT of the run's rendezvous; islands of other machines must reach it. Port 0 takes a free one.
        devices: of each island. They share each of its batches, and its steps equal those of one device.
        rescue_dir: a joiner that ends with the newest state, and reaches no island with the run's folder, saves the state in this
            new folder; none: atoll-rescue-RECIPE-DATE in its working directory.
    """

    name: ClassVar[str] = "elastic"
    resizable: ClassVar[bool] = True

    processes: int | None = None
    step_delay: float | None = None
    quorum_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 1.0
    max_delta_ratio: float = 25.0
    listen: str = "127.0.0.1:0"
    devices: int = 1
    rescue_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        host, port = self.host, self.listen.rpartition(":")[2]
        is_address = bool(host) and ":" not in host and port.isdecimal() and int(port) < 1 << 16
        connects = "islands connect to this address, so it must be one that this machine has, such as 192.0.2.7, or its name"
        stalls = "at least 0.5, since islands send ten heartbeats a second. Leave it out for 1, or raise it for links that stall"
        self.check(
            ("devices", self.devices >= 1, "an island has at least 1. Leave it out for 1"),
            ("quorum_timeout_s", self.quorum_timeout_s > 0, "seconds, more than 0"),
            ("start_timeout_s", self.start_timeout_s >= 0, "seconds, 0 or more"),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s >= 0.5, stalls),
            ("listen", is_address, "it is HOST:PORT over IPv4, such as 192.0.2.7:7000; port 0 is a free one"),
            ("listen", host != "0.0.0.0", connects),
            ("max_delta_ratio", self.max_delta_ratio > 1, "more than 1. Use inf to refuse only non-finite deltas"),
        )

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def fitted(self, run: Run) -> Run:
        """The run planned for the islands that are started, and its data cut as before."""
        self.refuse_asynchronous(run, "a quorum of islands commits")
        if run.inside is not None or run.cluster.devices_per_island > 1:
            raise ConfigError(
                f"cluster.devices_per_island={run.cluster.devices_per_island} with --engine elastic: an island is one process "
                f"there. Use cluster.devices_per_island=1 and engine.devices, or --engine processes."
            )
        if not getattr(run.algorithm, "averages_once", True):
            raise ConfigError(
                f"{run.algorithm} with --engine elastic: a commit is one mean of deltas. Use merge=mean and moments=own, or "
                f"--engine processes."
            )
        if run.resolved.train.precision == "all-bf16":
            raise ConfigError(
                "train.precision=all-bf16 with --engine elastic: deltas are differences of fp32 weights. Use bf16 or fp32."
            )
        check_devices_share_batch(run, self.devices)
        return self.on_processes(run, self.processes or run.cluster.islands)


def check_address(address: str) -> None:
    """Refuse what is no address of a run, or not several of them with commas between.

    >>> check_address("localhost")
    Traceback (most recent call last):
    atoll.core.errors.ConfigError: --join localhost: it is HOST:PORT, ...
    """
    for one in address.split(","):
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"--join {address}: it is HOST:PORT, the address that the run printed when it started.")


@dataclass(frozen=True)
class JoinInfo:
    """What a joiner fetches from the rendezvous."""

    run: Run  # fitted to the planned islands
    spec: Elastic
    lighthouse: str  # its address
    first: tuple[str, str] | None = None  # of a standby rendezvous: the addresses of the run's own registry and lighthouse

    def places(self, address: str) -> tuple[tuple[str, str], ...]:
        """The addresses of registry and lighthouse, in the order in which islands use them, where this is what the rendezvous at
        `address` has published."""
        here = (address, self.lighthouse)
        return (here,) if self.first is None or self.first == here else (self.first, here)

    def to_text(self) -> str:
        record = {"run": to_json(self.run), "spec": asdict(self.spec), "lighthouse": self.lighthouse, "first": self.first}
        return json.dumps(record)

    @staticmethod
    def from_text(text: str) -> JoinInfo:
        record = json.loads(text)
        first = tuple(map(str, record["first"])) if record.get("first") else None
        return JoinInfo(from_json(record["run"]), Elastic(**record["spec"]), record["lighthouse"], first)  # type: ignore[arg-type]


def check_same_origin(own: Mapping[str, str | None], other: Mapping[str, str | None], name: str) -> None:
    """Refuse to train with the island of this name unless settings, data and versions are the same: other data would be counted
    twice, and other versions compute other bits."""
    for key, label in (("run", "settings"), ("data", "data"), ("atoll", "version of atoll"), ("torch", "version of torch")):
        if own[key] != other.get(key):
            raise ConfigError(
                f"the {label} of this island ({own[key]}) and of {name} ({other.get(key)}) differ. All islands of a run need the "
                f"same. Copy them from {name}."
            )
