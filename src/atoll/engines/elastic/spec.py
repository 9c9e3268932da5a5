"""How an elastic run is carried out, and what whoever joins it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.engines.processes.spec import PLACE, engine_in
from atoll.runs.folder import write_text
from atoll.runs.run import Run

ENGINE = "elastic"
JOIN_LIMIT_S = 600.0
GATHER_S = 60.0
SILENT_S, LEAST_SILENT_S = 1.0, 0.5
REFUSED = 25.0


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Islands that come and go, each a process.

    Args:
        processes: islands that are started here; none: as many as the run's cluster has. For so many the work of a new run is
            planned; if others go on with it, or more join, the work stays the same.
        pace: each batch takes so many times the cluster's step time longer, asleep; none: computing takes what it takes.
        limit_s: how long an island that is alive, and does not come to a meeting, is waited for by the others.
        gather_s: how long those who begin wait for all that were started.
        silent_s: an island that is not heard for so long is not waited for. Islands are heard ten times a second; a line that is
            full, or loses much, may hold that up for longer.
        refused_above: a delta that is so many times longer than deltas were lately is refused.
        host: the address that the lighthouse and the islands here listen on. Others must be able to reach it.
        port: of the run; 0 takes one that is free.
        devices: of each island. They share out each of its batches, and its steps are those of one device.
    """

    processes: int | None = None
    pace: float | None = None
    limit_s: float = JOIN_LIMIT_S
    gather_s: float = GATHER_S
    silent_s: float = SILENT_S
    refused_above: float = REFUSED
    host: str = "127.0.0.1"
    port: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes={self.processes}: at least 1. Leave it out for as many as the cluster has.")
        if self.devices < 1:
            raise ConfigError(f"devices={self.devices}: an island has at least 1. Leave it out for one.")
        if self.pace is not None and not self.pace >= 0:
            raise ConfigError(f"pace={self.pace}: it is 0 or more. Leave it out so that computing takes what it takes.")
        if not self.limit_s > 0 or not self.gather_s >= 0:
            raise ConfigError(f"limit_s={self.limit_s}, gather_s={self.gather_s}: seconds, the first of them more than 0.")
        if not self.silent_s >= LEAST_SILENT_S:
            raise ConfigError(
                f"silent_s={self.silent_s}: at least {LEAST_SILENT_S}, as islands are heard ten times a second. Leave it out for "
                f"{SILENT_S:g}, or give more for lines that stall."
            )
        if self.host in ("", "0.0.0.0") or ":" in self.host:
            raise ConfigError(
                f"host={self.host}: islands are told this address, and reach it over IPv4. Give one that this machine has, such as "
                f"192.0.2.7, or its name."
            )
        if not self.refused_above > 1:
            raise ConfigError(f"refused_above={self.refused_above}: it is more than 1. Use inf to refuse what is not finite alone.")


def write_elastic(folder: Path, place: Elastic) -> None:
    write_text(folder / PLACE, json.dumps({"engine": ENGINE, **asdict(place)}) + "\n")


def read_elastic(folder: Path) -> Elastic | None:
    """How this folder's run is carried out by islands that come and go; none if it is not."""
    engine, settings = engine_in(folder)
    return Elastic(**settings) if engine == ENGINE else None


def check_address(address: str) -> None:
    """Refuse what is no address of a run.

    >>> check_address("localhost")
    Traceback (most recent call last):
    atoll.core.errors.ConfigError: localhost is no address of a run: it is HOST:PORT. ...
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address} is no address of a run: it is HOST:PORT. Give the one that the run said when it was started.")


@dataclass(frozen=True)
class JoinInfo:
    """What the rendezvous tells a joiner.

    Attributes:
        run: the Run, placed on the planned islands.
        place: how.
        lighthouse: its address.
    """

    run: Run
    place: Elastic
    lighthouse: str

    def to_text(self) -> str:
        return json.dumps({"run": to_json(self.run), "place": asdict(self.place), "lighthouse": self.lighthouse})

    @staticmethod
    def from_text(text: str) -> JoinInfo:
        record = json.loads(text)
        return JoinInfo(from_json(record["run"]), Elastic(**record["place"]), record["lighthouse"])


def check_alike(mine: Mapping[str, str | None], theirs: Mapping[str, str | None], name: str) -> None:
    """Refuse to take part with another text or version than the island of this name has: it would train on examples that others
    train on too, or compute other bits than they do."""
    for what, found in (("run", "settings"), ("data", "data"), ("atoll", "version of atoll"), ("torch", "version of torch")):
        if mine[what] != theirs.get(what):
            raise ConfigError(
                f"the {found} here ({mine[what]}) and there, on {name} ({theirs.get(what)}), are not the same. All islands of a "
                f"run have the same. Bring here what is there."
            )
