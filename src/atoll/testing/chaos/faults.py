"""What can go wrong, and when: values that a script or a seed gives, and that a file can hold."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError

LIGHTHOUSE = "lighthouse"
"""The name of the process that islands find each other by."""


class _Checked:
    """Refuses numbers that are none, or less than 0, and names that are no text."""

    def __post_init__(self) -> None:
        given: Any = self
        for field in fields(given):
            value = getattr(given, field.name)
            if field.type in ("float", "int") and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
                raise ConfigError(f"{field.name}={value!r} in {type(self).__name__}: it is a number, 0 or more. Give one.")
            if field.type == "str" and not isinstance(value, str):
                raise ConfigError(f"{field.name}={value!r} in {type(self).__name__}: it is a name. Give one.")
        check_types(self)  # last: it does not say whose field it is


@dataclass(frozen=True, kw_only=True)
class Kill(_Checked):
    """SIGKILL: a process ends without a word. Whoever keeps it going starts it again.

    Args:
        victim: the process, by its name: island-0000 and so on, or lighthouse; of a run on Ray hub, or worker-0 and so on.
    """

    victim: str


@dataclass(frozen=True, kw_only=True)
class Freeze(_Checked):
    """SIGSTOP, and SIGCONT later: a process is silent, and then goes on as if nothing had happened.

    Args:
        victim: the process, by its name.
        for_s: so long.
    """

    victim: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class FullDisk(_Checked):
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
class Cut(_Checked):
    """A line is down for a while, without a word to either end.

    Args:
        line: by its name; in a run that makes its lines itself, that of the process at its end.
        for_s: so long.
    """

    line: str
    for_s: float


@dataclass(frozen=True, kw_only=True)
class Slow(_Checked):
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
class At(_Checked):
    """A fault and its moment.

    Args:
        at_s: seconds after the run's first commit.
        fault: what happens then.
    """

    at_s: float
    fault: Fault


Spoilt = Literal["damage", "damage late", "damage told", "die", "die late", "nan", "huge"]


@dataclass(frozen=True, kw_only=True)
class Spoil(_Checked):
    """Something goes wrong with what an island brings to one round, inside its own process.

    Args:
        island: by its name.
        round: commits before it. If the island has no work in it, nothing is spoilt.
        how: damage flips a bit of what it sends of its delta, after it has told the checksums; damage late does so with what it
            sends of the mean; damage told has one other island hear that its delta weighs something else. die and die late are
            SIGKILL while it sends of its delta, or of the mean. nan has one number of its delta be none; huge makes its delta a
            million times as long.
    """

    island: str
    round: int
    how: Spoilt


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that is to go wrong in a run.

    Args:
        faults: from outside, by the time.
        spoils: inside islands, by the round.
    """

    faults: tuple[At, ...] = ()
    spoils: tuple[Spoil, ...] = ()

    @property
    def victims(self) -> set[str]:
        """All processes that something happens to."""
        processes = {one.fault.victim for one in self.faults if isinstance(one.fault, Kill | Freeze | FullDisk)}
        return processes | {spoil.island for spoil in self.spoils}

    @property
    def lines(self) -> set[str]:
        """All lines that something happens to."""
        return {one.fault.line for one in self.faults if isinstance(one.fault, Cut | Slow)}

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
            faults, spoils = map(list, (record.get("faults", []), record.get("spoils", [])))
            return Script(faults=tuple(map(_timed, faults)), spoils=tuple(_made(Spoil, one) for one in spoils))
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f'this is no script of faults: {error}. It is JSON: {{"faults": [...], "spoils": [...]}}.') from error

    @staticmethod
    def read(path: Path) -> Script:
        try:
            return Script.from_text(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"the script {path} cannot be read: {error.strerror}. Give a file that is there.") from error


_FAULTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Kill, Freeze, FullDisk, Cut, Slow)}


def _timed(record: Mapping[str, Any]) -> At:
    kind = str(record.get("fault"))
    if kind not in _FAULTS:
        raise ConfigError(f"fault={kind}: it is one of {', '.join(_FAULTS)}. Name one of these.")
    if "at_s" not in record:
        raise ConfigError(f"a {kind} has no at_s: seconds after the first commit. Say when it is to happen.")
    fault = _made(_FAULTS[kind], {key: value for key, value in record.items() if key not in ("at_s", "fault")})
    return At(at_s=record["at_s"], fault=fault)


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    wanted = [field.name for field in fields(kind)]
    if sorted(given) != sorted(wanted):
        raise ConfigError(f"{kind.__name__} is given {sorted(given)}, and has {wanted}. Give just these.")
    return kind(**given)


def at_random(
    *,
    seed: int,
    victims: Sequence[str] = (),
    lines: Sequence[str] = (),
    every_s: float,
    until_s: float,
    kinds: Sequence[type[Fault]] = (Kill,),
    for_s: float = 5.0,
    file_bytes: int = 1,
    mbit_per_s: float = 1.0,
) -> tuple[At, ...]:
    """Faults at even times: who and what is drawn from the seed, and the same seed draws the same.

    Args:
        seed: of the draws.
        victims: names of processes.
        lines: names of lines.
        every_s: between two faults, and before the first.
        until_s: none happens later, nor then.
        kinds: of Kill, Freeze, FullDisk, Cut and Slow; each as likely.
        for_s: how long a fault lasts that does not last for ever.
        file_bytes: of a FullDisk.
        mbit_per_s: of a Slow.
    """
    where = [lines if kind in (Cut, Slow) else victims for kind in kinds]
    if not where or not all(where) or not every_s > 0:
        raise ConfigError(
            f"kinds={[kind.__name__ for kind in kinds]}, victims={list(victims)}, lines={list(lines)}, every_s={every_s}: there is "
            f"at least one kind, and some time between two faults. Cut and Slow need lines, and the other kinds victims."
        )
    draw = random.Random(f"chaos {seed}")

    def drawn() -> Fault:
        victim, kind = draw.choice(victims) if victims else "", draw.choice(kinds)
        line = draw.choice(lines) if lines else ""
        made: dict[type[Fault], Fault] = {
            Kill: Kill(victim=victim),
            Freeze: Freeze(victim=victim, for_s=for_s),
            FullDisk: FullDisk(victim=victim, file_bytes=file_bytes, for_s=for_s),
            Cut: Cut(line=line, for_s=for_s),
            Slow: Slow(line=line, mbit_per_s=mbit_per_s, for_s=for_s),
        }
        return made[kind]

    moments = [every_s * number for number in range(1, max(1, -int(-until_s // every_s)))]
    return tuple(At(at_s=at_s, fault=drawn()) for at_s in moments)


def spoils_at_random(
    *, seed: int, islands: Sequence[str], every: int, until: int, hows: Sequence[Spoilt] = get_args(Spoilt)
) -> tuple[Spoil, ...]:
    """What goes wrong inside islands in even rounds: whose, and how, is drawn from the seed.

    Args:
        seed: of the draws.
        islands: by their names.
        every: rounds between two, and before the first.
        until: none happens in this round or later.
        hows: to draw from.
    """
    if not islands or not hows or every < 1:
        raise ConfigError(f"islands={list(islands)}, hows={list(hows)}, every={every}: somebody, somehow, every 1 or more rounds.")
    draw = random.Random(f"spoils {seed}")
    return tuple(Spoil(island=draw.choice(list(islands)), round=r, how=draw.choice(list(hows))) for r in range(every, until, every))
