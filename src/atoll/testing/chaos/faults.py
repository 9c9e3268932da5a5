"""What can go wrong, and when: values that a script or a seed gives, and that a file can hold."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from atoll.checks import check_types
from atoll.errors import ConfigError

LIGHTHOUSE = "lighthouse"
"""The name of the process that islands find each other by."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL: a process ends without a word. Whoever keeps it going starts it again.

    Args:
        victim: the process, by its name: island-0000 and so on, or lighthouse.
    """

    victim: str


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """SIGSTOP, and SIGCONT later: a process is silent, and then goes on as if nothing had happened.

    Args:
        victim: the process, by its name.
        for_s: so long.
    """

    victim: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class FullDisk:
    """A process cannot write files any longer than they may be, as if there were no more room.

    Args:
        victim: the process, by its name.
        file_bytes: so long a file may become.
        for_s: so long.
    """

    victim: str
    file_bytes: int
    for_s: float


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A line is down for a while, without a word to either end.

    Args:
        line: by its name.
        for_s: so long.
    """

    line: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A line is shaped for a while.

    Args:
        line: by its name.
        mbit_per_s: the rate, each way.
        for_s: so long.
    """

    line: str
    mbit_per_s: float
    for_s: float


Fault = Kill | Freeze | FullDisk | Cut | Slow
"""What is done to a process or a line from outside."""


@dataclass(frozen=True, kw_only=True)
class At:
    """A fault and its moment.

    Args:
        at_s: seconds after the run's first commit.
        fault: what happens then.
    """

    at_s: float
    fault: Fault


Spoilt = Literal["damage", "damage late", "die", "die late", "nan", "huge"]


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """Something goes wrong with what an island brings to one round, inside its own process.

    Args:
        island: by its name.
        round: commits before it. If the island has no work in it, nothing is spoilt.
        how: damage flips a bit of what it sends of its delta, after it has told the checksums; damage late does so with what it
            sends of the mean. die and die late are SIGKILL at the same moments. nan has one number of its delta be none; huge
            makes its delta a million times as long.
    """

    island: str
    round: int
    how: Spoilt

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that is to go wrong in a run.

    Args:
        faults: from outside, by the time.
        spoils: inside islands, by the round.
    """

    faults: tuple[At, ...] = ()
    spoils: tuple[Spoil, ...] = ()

    def to_text(self) -> str:
        """As JSON.

        >>> script = Script(faults=(At(at_s=5.0, fault=Kill(victim="island-0001")),))
        >>> script.to_text()
        '{"faults": [{"at_s": 5.0, "fault": "Kill", "victim": "island-0001"}], "spoils": []}'
        >>> Script.from_text(script.to_text()) == script
        True
        """
        faults = [{"at_s": one.at_s, "fault": type(one.fault).__name__, **asdict(one.fault)} for one in self.faults]
        return json.dumps({"faults": faults, "spoils": [asdict(one) for one in self.spoils]})

    @staticmethod
    def from_text(text: str) -> Script:
        try:
            record = json.loads(text)
            faults, spoils = record.get("faults", []), record.get("spoils", [])
        except (ValueError, AttributeError) as error:
            raise ConfigError(f'this is no script of faults: {error}. It is JSON: {{"faults": [...], "spoils": [...]}}.') from error
        timed = tuple(At(at_s=float(one["at_s"]), fault=_fault(one)) for one in faults)
        return Script(faults=timed, spoils=tuple(_made(Spoil, one) for one in spoils))

    @staticmethod
    def read(path: Path) -> Script:
        try:
            return Script.from_text(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"the script {path} cannot be read: {error.strerror}. Give a file that is there.") from error


_FAULTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Kill, Freeze, FullDisk, Cut, Slow)}


def _fault(record: Mapping[str, Any]) -> Fault:
    if record.get("fault") not in _FAULTS:
        raise ConfigError(f"fault={record.get('fault')!r}: it is one of {', '.join(_FAULTS)}. Name one of these.")
    given = {key: value for key, value in record.items() if key not in ("at_s", "fault")}
    made: Fault = _made(_FAULTS[record["fault"]], given)
    return made


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    wanted = [field.name for field in fields(kind)]
    if sorted(given) != sorted(wanted):
        raise ConfigError(f"{kind.__name__} is given {sorted(given)}, and has {wanted}. Give just these.")
    return kind(**given)


def at_random(
    *, seed: int, victims: Sequence[str], every_s: float, until_s: float, kinds: Sequence[type[Fault]] = (Kill,), for_s: float = 5.0
) -> tuple[At, ...]:
    """Faults of processes at even times: who and what is drawn from the seed, and the same seed draws the same.

    Args:
        seed: of the draws.
        victims: names of processes.
        every_s: between two faults, and before the first.
        until_s: none happens later, nor then.
        kinds: Kill, Freeze, or both.
        for_s: how long a process is frozen.
    """
    strange = [kind.__name__ for kind in kinds if kind not in (Kill, Freeze)]
    if strange or not victims or not every_s > 0:
        raise ConfigError(
            f"kinds={strange}, victims={list(victims)}, every_s={every_s}: Kill or Freeze, of somebody, now and then."
        )
    draw = random.Random(f"chaos {seed}")
    moments = [every_s * number for number in range(1, max(1, -int(-until_s // every_s)))]
    return tuple(At(at_s=at_s, fault=_drawn(draw, victims, kinds, for_s)) for at_s in moments)


def _drawn(draw: random.Random, victims: Sequence[str], kinds: Sequence[type[Fault]], for_s: float) -> Fault:
    victim, kind = draw.choice(list(victims)), draw.choice(list(kinds))
    return Freeze(victim=victim, for_s=for_s) if kind is Freeze else Kill(victim=victim)
