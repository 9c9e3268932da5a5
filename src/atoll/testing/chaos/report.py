"""What became of a run that was broken: from its events, from what was done to it, and from what each island wrote down itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from atoll.core.errors import ConfigError
from atoll.core.events import Attended, Evaluated, Event, Leased, Refused, SaveFailed
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.faults import LIGHTHOUSE

CHAOS_LOG = "chaos.jsonl"
"""What was done to a run, in its folder."""
_PROCESS = re.compile(r"^[\d:]{8} \S+ on .* process (?P<pid>\d+),")
_COMMITTED = re.compile(r"^[\d:]{8} committed round (?P<round>\d+) of epoch (?P<epoch>\d+) as (?P<digest>[0-9a-f]+), (?P<work>.*)$")
WITH_WORK = "with work of its own"


class Committed(NamedTuple):
    """What one process of an island wrote down of a commit.

    Attributes:
        pid: of the process.
        round, epoch: of the commit.
        digest: of all that it holds alike with others.
        worked: whether its own work is in the commit.
    """

    pid: int
    round: int
    epoch: int
    digest: str
    worked: bool


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What followed a kill.

    Attributes:
        victim: who was killed.
        at_s: when, on the script's clock.
        commit_s: from then to the next commit of those who were left; none if there was none.
        back_s: to the first commit that has work of the victim's next process in it; none if there was none.
    """

    victim: str
    at_s: float
    commit_s: float | None
    back_s: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a run.

    Attributes:
        commits: that the log has.
        attempts: they took.
        known, alive, participating: means over the commits.
        participating_of_alive: the mean of the one over the other.
        delivered, returned: units of data that are in a commit, and that were leased in vain.
        data: what is wrong with the account of data; nothing if every unit is in exactly one commit.
        compared: lines of islands' own logs that could be held against the run's log, and others of the same commit.
        apart: commits after which an island held something else; nothing if all were equal to the bit.
        unseen: commits in islands' logs that the run's log does not have: of islands that were cut off right then, or of all of
            them before they died, and went on from a checkpoint.
        done: faults that were carried out, by kind.
        refused, not_saved: how many deltas and checkpoints.
        recoveries: after each kill of an island.
        loss: of the last evaluation.
    """

    commits: int
    attempts: int
    known: float
    alive: float
    participating: float
    participating_of_alive: float
    delivered: int
    returned: int
    data: tuple[str, ...]
    compared: int
    apart: tuple[str, ...]
    unseen: int
    done: Mapping[str, int]
    refused: int
    not_saved: int
    recoveries: tuple[Recovery, ...]
    loss: float | None

    @property
    def succeeded(self) -> float:
        """The share of attempts that became commits."""
        return self.commits / self.attempts if self.attempts else 0.0


def report_of(folder: Path, *, units: int | None = None) -> Report:
    """The report of the run in this folder.

    Args:
        folder: of the run.
        units: of data that were to be delivered, if that is known.
    """
    events = list(read_events(folder / "events.jsonl", [Attended, Leased, Evaluated, Refused, SaveFailed]))
    attended, leased = [e for e in events if isinstance(e, Attended)], [e for e in events if isinstance(e, Leased)]
    if not attended:
        raise ConfigError(f"{folder} has no commit of islands that come and go, so there is nothing to report. Let it run longer.")
    lines = {path.stem: list(told_in(path)) for path in sorted((folder / "logs").glob("*.log"))}
    actions = list(_actions(folder / CHAOS_LOG))
    compared, apart, unseen = compare(attended, lines)
    losses = [event.loss for event in events if isinstance(event, Evaluated)]
    return Report(
        commits=len(attended),
        attempts=sum(event.attempts for event in attended),
        known=fmean(event.known for event in attended),
        alive=fmean(event.alive for event in attended),
        participating=fmean(event.participating for event in attended),
        participating_of_alive=fmean(event.participating / event.alive for event in attended),
        delivered=sum(len(event.delivered) for event in leased),
        returned=sum(len(event.returned) for event in leased),
        data=tuple(exactly_once(leased, units=units)),
        compared=compared,
        apart=apart,
        unseen=unseen,
        done=dict(Counter(action["did"]["fault"] for action in actions if "did" in action)),
        refused=_count(events, Refused),
        not_saved=_count(events, SaveFailed),
        recoveries=tuple(recoveries(actions, lines)),
        loss=losses[-1] if losses else None,
    )


def _count(events: Iterable[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


def _actions(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text("utf-8").splitlines())


# ------------------------------------------------------------------------------------------------------------------- the data


def exactly_once(leased: Iterable[Leased], *, units: int | None = None) -> list[str]:
    """What is wrong with the account of data: units that are in two commits, or in none, though later ones of their shard are;
    and those that were dropped.

    >>> one = Leased(round=1, delivered=[[0, 0, 0, 10], [1, 1, 0, 10]], returned=[], virtual_time_s=None, wall_time_s=1.0)
    >>> two = Leased(round=2, delivered=[[0, 0, 20, 10], [1, 1, 0, 10]], returned=[], virtual_time_s=None, wall_time_s=2.0)
    >>> exactly_once([one, two])
    ['shard 0: batches 10 to 20 are in no commit', 'shard 1: batches 0 to 10 are in commits 1 and 2']
    """
    stretches: dict[int, list[tuple[int, int, int]]] = {}
    dropped: list[str] = []
    for event in leased:
        for _, shard, start, batches in [*event.delivered, *event.dropped]:
            stretches.setdefault(shard, []).append((start, start + batches, event.round))
        for _, shard, start, batches in event.dropped:
            dropped.append(f"shard {shard}: batches {start} to {start + batches} were refused too often, and dropped")
    found = [text for shard in sorted(stretches) for text in _wrong_in(shard, sorted(stretches[shard]))]
    count = sum(map(len, stretches.values())) - len(dropped)
    if units is not None and count + len(dropped) != units:
        found.append(f"{count} units are in commits, and {units} were to be")
    return [*found, *dropped]


def _wrong_in(shard: int, stretches: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    reached, by = 0, 0
    for start, stop, number in stretches:
        if start > reached:
            yield f"shard {shard}: batches {reached} to {start} are in no commit"
        elif start < reached:
            yield f"shard {shard}: batches {start} to {min(stop, reached)} are in commits {by} and {number}"
        reached, by = (stop, number) if stop > reached else (reached, by)


# ---------------------------------------------------------------------------------------------------------------- the digests


def told_in(path: Path) -> Iterator[Committed]:
    """What the processes of an island wrote down of commits."""
    pid = 0
    for text in path.read_text("utf-8", errors="replace").splitlines():
        if begun := _PROCESS.match(text):
            pid = int(begun["pid"])
        elif found := _COMMITTED.match(text):
            worked = found["work"] == WITH_WORK
            yield Committed(pid, int(found["round"]), int(found["epoch"]), found["digest"], worked)


def compare(attended: Iterable[Attended], lines: Mapping[str, Iterable[Committed]]) -> tuple[int, tuple[str, ...], int]:
    """How many lines could be compared; which islands held something else, and after which commit; and how many commits are
    nowhere but in islands' logs."""
    known = {(event.round, event.epoch): event.digest for event in attended}
    compared, apart, unseen = 0, [], 0
    for name, told in lines.items():
        for line in told:
            digest = known.get((line.round, line.epoch))
            if digest is None:
                unseen += 1
                continue
            compared += 1
            if digest != line.digest:
                apart.append(f"{name} held {line.digest} after round {line.round}, and the log has {digest}")
    return compared, tuple(apart), unseen


# --------------------------------------------------------------------------------------------------------------- the recovery


def recoveries(actions: Sequence[Mapping[str, Any]], lines: Mapping[str, Sequence[Committed]]) -> Iterator[Recovery]:
    """What followed each kill of an island."""
    seen = [(action["at_s"], action["saw"]["round"]) for action in actions if "saw" in action]
    for action in actions:
        done = action.get("did", {})
        if done.get("fault") != "Kill" or done["victim"] == LIGHTHOUSE or done["victim"] not in lines:
            continue
        at_s, after = action["at_s"], [moment for moment in seen if moment[0] > action["at_s"]]
        told = lines[done["victim"]]
        last = max((number for number, line in enumerate(told) if line.pid == done["pid"]), default=-1)
        worked = {line.round for line in told[last + 1 :] if line.worked}
        back_s = next((s for s, number in after if number in worked), None)
        yield Recovery(
            victim=done["victim"],
            at_s=at_s,
            commit_s=after[0][0] - at_s if after else None,
            back_s=back_s - at_s if back_s is not None else None,
        )
