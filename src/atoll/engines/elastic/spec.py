"""The spec of an elastic run: islands are processes that may join, die and rejoin while the run goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import OrInfinite, Timeout, hints_of, shown_text
from atoll.core.errors import ConfigError, one_line
from atoll.core.verified_files import json_digest, sealed, unsealed
from atoll.engines.elastic.gateway_protocol import wire_version
from atoll.engines.network_interfaces import LOOPBACK, is_dialled, is_loopback
from atoll.engines.process_spec import LEAST_TIMEOUT_S, ProcessSpec
from atoll.runs.run_settings import Run
from atoll.runs.settings_validation import check_devices_share_batch

LEAST_WINDOW_S = 2.0
"""The shortest window of a quorum. An island that has to wait asks again after up to 1 s, and shorter windows would miss it."""
JOIN_INFO = "join_info.json"
"""In the run's folder: what its rendezvous publishes to joiners."""
NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
"""Names of islands: they are parts of addresses and of ids."""
PLANNED = re.compile(r"island-([0-9]{4}|[1-9][0-9]{4,})")
"""Names of the islands that a run starts itself, on the machine with its folder."""


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
        listen: HOST:PORT of the run's rendezvous, the one port that islands of other machines must reach. Port 0 takes a free one.
        advertise: HOST:PORT that other machines dial if it is not `listen`, such as a router's forwarded port; several with commas
            between them.
        network: tls: islands of other machines are authenticated and encrypted, and dial `listen` alone; trusted: any machine that
            reaches the ports is admitted, and islands connect to each other on any port.
        devices: number of devices of each island. They share each of its batches, and its steps equal those of one device.
        join_timeout_s: of a joiner: how long it looks for a run whose name or address appears late; 0: it tries once.
        rescue_dir: a joiner without a copy that ends with the newest state, and reaches no island with the run's folder, saves the
            state in this new folder, with a number behind its name if it exists; none: atoll-rescue-RECIPE-DATE-PID in its
            working directory.
    """

    name: ClassVar[str] = "elastic"
    resizable: ClassVar[bool] = True

    processes: int | None = None
    step_delay: float | None = None
    quorum_timeout_s: Timeout = 600.0
    start_timeout_s: Timeout = 60.0
    heartbeat_timeout_s: Timeout = 1.0
    max_delta_ratio: OrInfinite = 25.0
    listen: str = f"{LOOPBACK}:0"
    advertise: str = ""
    network: Literal["tls", "trusted"] = "tls"
    devices: int = 1
    join_timeout_s: Timeout = 0.0
    rescue_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        host, is_address = self.host, is_dialled(self.listen, least_port=0)
        connects = "islands connect to this address, so it must be one that this machine has, such as 192.0.2.7, or its name"
        dialled = "other machines dial HOST:PORT, such as 203.0.113.5:7000. Set engine.advertise to addresses like that"
        stalls = "at least 0.5, since islands send ten heartbeats a second. Leave it out for 1, or raise it for links that stall"
        self.check(
            ("devices", self.devices >= 1, "an island has at least 1. Leave it out for 1"),
            ("quorum_timeout_s", self.quorum_timeout_s >= LEAST_TIMEOUT_S, f"seconds, at least {LEAST_TIMEOUT_S}"),
            ("start_timeout_s", self.start_timeout_s >= 0, "seconds, 0 or more"),
            ("join_timeout_s", self.join_timeout_s >= 0, "seconds, 0 or more. Leave it out to look for the run once"),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s >= 0.5, stalls),
            ("listen", is_address, "it is HOST:PORT over IPv4, such as 192.0.2.7:7000; port 0 is a free one"),
            ("listen", host != "0.0.0.0" or self.network == "tls", connects),
            ("listen", host != "0.0.0.0" or bool(self.advertise), f"{connects}; or name in engine.advertise what others dial"),
            ("advertise", not self.advertise or all(map(is_dialled, self.addresses)), dialled),
            ("advertise", not self.advertise or self.network == "tls", "islands of a trusted network dial engine.listen"),
            ("max_delta_ratio", self.max_delta_ratio > 1, "more than 1. Use inf to refuse only non-finite deltas"),
        )

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def addresses(self) -> tuple[str, ...]:
        """What other machines dial."""
        return tuple(one.strip() for one in self.advertise.split(",")) if self.advertise else (self.listen,)

    @property
    def secured(self) -> bool:
        """Whether other machines take part, through a gateway that authenticates them."""
        return self.network == "tls" and (bool(self.advertise) or not is_loopback(self.host))

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
                f"{run.algorithm} with --engine elastic: a commit is one mean of deltas. Use merge=mean and moments=own of DiLoCo, "
                f"or Streaming, or --engine processes."
            )
        self._check_quorum(run)
        if run.resolved.train.precision == "all-bf16":
            raise ConfigError(
                "train.precision=all-bf16 with --engine elastic: deltas are differences of fp32 weights. Use bf16 or fp32."
            )
        check_devices_share_batch(run, self.devices)
        return self.on_processes(run, self.processes or run.cluster.islands)

    def _check_quorum(self, run: Run) -> None:
        quorum, islands, algorithm = quorum_of(run), self.processes or run.cluster.islands, cast("Any", run.algorithm)
        if quorum is None or quorum >= islands:
            return
        if 2 * quorum <= islands:
            raise ConfigError(
                f"algorithm.quorum={quorum} of {islands} islands with --engine elastic: only a majority of them commits. Use "
                f"algorithm.quorum={islands // 2 + 1} or more."
            )
        if algorithm.late != "dropped":
            raise ConfigError(
                f"algorithm.late={algorithm.late} with --engine elastic: an island that a commit left out fetches the state, "
                f"and another trains on its data. Use algorithm.late=dropped."
            )


def quorum_of(run: Run) -> int | None:
    """The deltas that a round waits for; None: those of all islands."""
    quorum: int | None = getattr(getattr(run, "algorithm", None), "quorum", None)
    return quorum


def check_address(address: str) -> None:
    """Refuse what is no address of a run, or not several of them with commas between.

    >>> check_address("localhost")
    Traceback (most recent call last):
    atoll.core.errors.ConfigError: --join localhost: it is HOST:PORT, ...
    """
    if not all(map(is_dialled, address.split(","))):
        raise ConfigError(
            f"--join {shown_text(address)}: it is HOST:PORT over IPv4, such as 192.0.2.7:7000, the address that the run printed "
            f"when it started, or a join file. Copy it from there."
        )


def check_server(address: str) -> None:
    """Refuse what is no address of one registry or lighthouse."""
    if not is_dialled(address):
        raise ConfigError(f"{shown_text(address)} is no address of a registry or a lighthouse: it is HOST:PORT over IPv4.")


def island_name(number: int) -> str:
    """The name of an island that the run starts: names sort as numbers do."""
    return f"island-{number:04d}"


def is_island_address(address: str, name: str) -> bool:
    """Whether the island of this name may have this address: HOST:PORT; or, in a run with a gateway, `island:NAME`, and with a port
    behind it if the run starts that island itself. The gateway leads to NAME what the identity with this name accepts, so an island
    cannot have an address at which another one answers.

    >>> addresses = "192.0.2.7:7000", "island:box-1", "island:box-2", "island:box-1:7000", "box-1", ""
    >>> [is_island_address(one, "box-1") for one in addresses]
    [True, True, False, False, False, False]
    >>> addresses = "island:island-0001:7000", "island:island-0001", "island:island-0001:0"
    >>> [is_island_address(one, "island-0001") for one in addresses]
    [True, False, False]
    """
    if not address.startswith("island:"):
        return is_dialled(address)
    given, colon, port = address.removeprefix("island:").partition(":")
    is_planned = PLANNED.fullmatch(name) is not None
    return given == name and bool(colon) == is_planned and (not colon or is_dialled(f"{LOOPBACK}:{port}"))


@dataclass(frozen=True)
class JoinInfo:
    """What a joiner fetches from the rendezvous."""

    run: Run  # fitted to the planned islands
    spec: Elastic
    lighthouse: str  # its address
    registry: str = ""  # its address, where the run has a gateway: these two then listen on loopback
    run_id: str = ""
    first: tuple[str, str] | None = None  # of a standby rendezvous: the addresses of the run's own registry and lighthouse

    def places(self, address: str) -> tuple[tuple[str, str], ...]:
        """The addresses of registry and lighthouse, in the order in which islands use them, where this is what the rendezvous at
        `address` has published."""
        here = (address, self.lighthouse)
        return (here,) if self.first is None or self.first == here else (self.first, here)

    @property
    def run_digest(self) -> str:
        """Of the Run as islands train it. A resumed run has the same; its engine's settings may differ."""
        return json_digest(to_json(self.run))

    @property
    def straggler_s(self) -> float:
        """How long the lighthouse waits for islands that are alive, after the first that asks for a quorum."""
        quorum, run = quorum_of(self.run), cast("Any", self.run)
        waits_for_all = quorum is None or quorum >= run.effective_cluster.islands
        return self.spec.quorum_timeout_s if waits_for_all else max(LEAST_WINDOW_S, run.algorithm.grace_s)

    @staticmethod
    def read(folder: Path) -> JoinInfo:
        """What the last start of the run wrote into its folder. Raises ConfigError if this version can read nothing there."""
        path = folder / JOIN_INFO
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror or error}). Each start of an elastic run writes it: start the run again."
            ) from error
        return JoinInfo.from_text(text)

    @staticmethod
    def former(folder: Path) -> JoinInfo | None:
        """What the last start of the run wrote into its folder; None if this version can read nothing there."""
        with suppress(ConfigError):
            return JoinInfo.read(folder)
        return None

    def to_text(self) -> str:
        record = {"run": to_json(self.run), "spec": asdict(self.spec), "atoll": wire_version(), "first": self.first}
        return sealed({**record, "lighthouse": self.lighthouse, "registry": self.registry, "run_id": self.run_id})

    @staticmethod
    def from_text(text: str | bytes) -> JoinInfo:
        """What `to_text` wrote. Raises ConfigError if this is of another version of atoll, or anything else."""
        try:
            record = unsealed(text)
            if record["atoll"] != wire_version():
                theirs = shown_text(str(record["atoll"]))
                raise ConfigError(
                    f"the run is of atoll {theirs}, and this is atoll {wire_version()}. All islands of a run need the same "
                    f"version: install {theirs} here."
                )
            settings = {name: from_json(value, name, hints_of(Elastic)[name]) for name, value in record["spec"].items()}
            lighthouse, registry, run_id = (str(record[name]) for name in ("lighthouse", "registry", "run_id"))
            first = None
            if record["first"] is not None:
                own_registry, own_lighthouse = map(str, record["first"])
                check_server(own_registry)
                check_server(own_lighthouse)
                first = own_registry, own_lighthouse
            spec = Elastic(**settings)
            for one in (lighthouse, *filter(None, [registry])):
                check_server(one)
            if spec.secured and not all(is_loopback(one.rpartition(":")[0]) for one in (lighthouse, registry)):
                raise ValueError(f"behind a gateway a registry and a lighthouse are on {LOOPBACK}")
            return JoinInfo(from_json(record["run"], hint=Run), spec, lighthouse, registry, run_id, first)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"what describes the run to a joiner cannot be read ({one_line(error)}). Start the run again with this version of "
                f"atoll, {wire_version()}."
            ) from error


def check_same_origin(own: Mapping[str, str | None], other: Mapping[str, str | None], name: str) -> None:
    """Refuse to train with the island of this name unless settings, data and versions are the same: other data would be counted
    twice, and other versions compute other bits."""
    labels = {"run": "settings", "data": "data", "code": "workload's file"}
    for key, label in {**labels, "atoll": "version of atoll", "torch": "version of torch"}.items():
        mine, theirs = own.get(key), other.get(key)
        if mine != theirs:
            raise ConfigError(
                f"the {label} of this island ({mine}) and of {name} ({theirs}) differ. All islands of a run need the same. "
                f"Copy them from {name}."
            )
