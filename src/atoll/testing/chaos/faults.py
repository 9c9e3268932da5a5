"""Faults as values: what fails, when, and a JSON file format for scripts of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from atoll.core.config.type_checks import WideInt, check_types
from atoll.core.errors import ConfigError

LIGHTHOUSE = "lighthouse"
"""Name of the process that islands find each other by."""
CHAOS_LOG = "chaos.jsonl"
"""File in the run's folder that lists the injected faults."""


class _ValidatedFields:
    """Refuses values of other types than the declared ones, and negative numbers."""

    def __post_init__(self) -> None:
        try:
            check_types(self)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from error
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value >= 0:
                raise ConfigError(f"{type(self).__name__}: {name}={value!r} is not a number of 0 or more. Give one.")


@dataclass(frozen=True, kw_only=True)
class Kill(_ValidatedFields):
    """SIGKILL of the process with this name: lighthouse, island-0000 and so on; in a run on Ray hub, worker-0 and so on."""

    victim: str


@dataclass(frozen=True, kw_only=True)
class Freeze(_ValidatedFields):
    """SIGSTOP of one process, and SIGCONT after `for_s` seconds."""

    victim: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class FullDisk(_ValidatedFields):
    """One process cannot write a file longer than `file_bytes` for `for_s` seconds, as on a full disk."""

    victim: str
    file_bytes: WideInt
    for_s: float


@dataclass(frozen=True, kw_only=True)
class Cut(_ValidatedFields):
    """A link drops every packet for `for_s` seconds; neither end gets an error. A run names its links after its processes."""

    link: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class CutOneWay(_ValidatedFields):
    """A link drops every packet that its process sends for `for_s` seconds; the process still receives."""

    link: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class CutPair(_ValidatedFields):
    """Two processes do not reach each other for `for_s` seconds, while each reaches all others. Neither gets an error."""

    link: str
    other: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class Slow(_ValidatedFields):
    """A link is shaped to `mbit_per_s` in each direction for `for_s` seconds."""

    link: str
    mbit_per_s: float
    for_s: float


LinkFault = Cut | CutOneWay | CutPair | Slow
ExternalFault = Kill | Freeze | FullDisk | LinkFault
"""A fault that is injected into a process or a link from outside."""
FAULTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(ExternalFault)}


@dataclass(frozen=True, kw_only=True)
class TimedFault(_ValidatedFields):
    """A fault and its time, in seconds after the run's first commit (of a run on Ray: first arrived update)."""

    at_s: float
    fault: ExternalFault


UpdateFaultKind = Literal["corrupt_delta", "corrupt_mean", "corrupt_weight", "kill_in_delta", "kill_in_mean", "nan", "huge"]


@dataclass(frozen=True, kw_only=True)
class UpdateFault(_ValidatedFields):
    """A fault inside an island's own process, in its update of the round after `round` commits, if it has work in it.

    corrupt_delta flips a bit of the delta that the island sends, after it has sent the checksums; corrupt_mean flips a bit of the
    mean that it sends; corrupt_weight sends a wrong weight of the delta to one peer. kill_in_delta and kill_in_mean are SIGKILL
    while the island sends its delta, or the mean. nan sets one number of the delta to NaN; huge multiplies the delta by a million.
    """

    island: str
    round: int
    kind: UpdateFaultKind


@dataclass(frozen=True, kw_only=True)
class FaultScript:
    """All faults of a run: those by time, from outside, and those by round, inside islands."""

    faults: tuple[TimedFault, ...] = ()
    update_faults: tuple[UpdateFault, ...] = ()

    @property
    def victims(self) -> set[str]:
        """Names of all processes that the script hits."""
        processes = {one.fault.victim for one in self.faults if isinstance(one.fault, Kill | Freeze | FullDisk)}
        return processes | {fault.island for fault in self.update_faults}

    @property
    def links(self) -> set[str]:
        """Names of all links that the script hits."""
        faults = [one.fault for one in self.faults if isinstance(one.fault, LinkFault)]
        return {fault.link for fault in faults} | {fault.other for fault in faults if isinstance(fault, CutPair)}

    def check_names(self, processes: Sequence[str]) -> None:
        """Refuse faults of processes that the run does not start. Links are named after the processes that they connect."""
        unknown = sorted((self.victims | self.links) - set(processes))
        if unknown:
            raise ConfigError(
                f"a fault script names {', '.join(unknown)}; the run starts {', '.join(processes)}. Name one of these."
            )

    def to_text(self) -> str:
        """As JSON."""
        faults = [{"at_s": one.at_s, **fault_record(one.fault)} for one in self.faults]
        return json.dumps({"faults": faults, "update_faults": [asdict(one) for one in self.update_faults]})

    @staticmethod
    def from_text(text: str) -> FaultScript:
        try:
            record = json.loads(text)
            faults, update_faults = map(list, (record.get("faults", []), record.get("update_faults", [])))
            timed, updates = map(_timed_fault, faults), (_record(UpdateFault, one) for one in update_faults)
            return FaultScript(faults=tuple(timed), update_faults=tuple(updates))
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f'this is no fault script: {error}. Write JSON: {{"faults": [...], "update_faults": [...]}}.'
            ) from error

    @staticmethod
    def read(path: Path) -> FaultScript:
        try:
            return FaultScript.from_text(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"the fault script {path} cannot be read: {error.strerror}. Give the path of an existing file."
            ) from error


def fault_record(fault: ExternalFault) -> dict[str, Any]:
    """As in a script and in the chaos log."""
    return {"fault": type(fault).__name__, **asdict(fault)}


def _timed_fault(record: Mapping[str, Any]) -> TimedFault:
    kind = str(record.get("fault"))
    if kind not in FAULTS:
        raise ConfigError(f"fault={kind}: it must be one of {', '.join(FAULTS)}. Give one of these.")
    if "at_s" not in record:
        raise ConfigError(f"a {kind} has no at_s: seconds after the first commit. Give its time.")
    fault = _record(FAULTS[kind], {key: value for key, value in record.items() if key not in ("at_s", "fault")})
    return TimedFault(at_s=record["at_s"], fault=fault)


def _record(kind: type[Any], given: Mapping[str, Any]) -> Any:
    expected = [field.name for field in fields(kind)]
    if sorted(given) != sorted(expected):
        raise ConfigError(f"{kind.__name__} has the fields {sorted(given)}; it needs exactly {expected}. Give these.")
    return kind(**given)


def random_faults(
    *,
    seed: int,
    victims: Sequence[str] = (),
    links: Sequence[str] = (),
    every_s: float,
    until_s: float,
    kinds: Sequence[type[ExternalFault]] = (Kill,),
    for_s: float = 5.0,
) -> tuple[TimedFault, ...]:
    """Draws one fault for each multiple of `every_s` below `until_s`, uniformly from `kinds` and from the names of processes in
    `victims` or of links in `links`. The same seed draws the same faults. Every fault but Kill lasts `for_s` seconds; a
    FullDisk allows files of 1 byte, and a Slow link 1 Mbit/s."""
    where = [links if kind in get_args(LinkFault) else victims for kind in kinds]
    if not where or not all(where) or not every_s > 0 or (CutPair in kinds and len(links) < 2):
        raise ConfigError(
            f"kinds={[kind.__name__ for kind in kinds]}, victims={list(victims)}, links={list(links)}, every_s={every_s}: give at "
            f"least one kind, and every_s above 0. Cut and Slow need links, CutPair needs two, and the other kinds victims."
        )
    random_state = random.Random(f"chaos {seed}")

    def draw() -> ExternalFault:
        victim, kind = random_state.choice(victims) if victims else "", random_state.choice(kinds)
        link = random_state.choice(links) if links else ""
        values = {"victim": victim, "link": link, "for_s": for_s, "file_bytes": 1, "mbit_per_s": 1.0}
        if kind is CutPair:
            values["other"] = random_state.choice([one for one in links if one != link])
        drawn: ExternalFault = FAULTS[kind.__name__](**{field.name: values[field.name] for field in fields(kind)})
        return drawn

    times = [every_s * number for number in range(1, max(1, -int(-until_s // every_s)))]
    return tuple(TimedFault(at_s=at_s, fault=draw()) for at_s in times)


def random_update_faults(
    *, seed: int, islands: Sequence[str], every: int, until: int, kinds: Sequence[UpdateFaultKind] = get_args(UpdateFaultKind)
) -> tuple[UpdateFault, ...]:
    """Draws island and kind of one update fault for each multiple of `every` rounds below `until`."""
    if not islands or not kinds or every < 1:
        raise ConfigError(f"islands={list(islands)}, kinds={list(kinds)}, every={every}: give an island, a kind, and every >= 1.")
    draw = random.Random(f"spoils {seed}")
    return tuple(
        UpdateFault(island=draw.choice(list(islands)), round=round, kind=draw.choice(list(kinds)))
        for round in range(every, until, every)
    )
