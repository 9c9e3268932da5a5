"""What became of a run with a hub that was broken: from its events, and from what was done to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.events import (
    Arrived,
    Dispatched,
    Evaluated,
    Event,
    HubRestarted,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    SaveFailed,
)
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.report import CHAOS_LOG

E = TypeVar("E", bound=Event)
_KINDS = (Arrived, Dispatched, Evaluated, HubRestarted, IslandJoined, IslandLeft, Refused, Returned, SaveFailed)


@dataclass(frozen=True, kw_only=True)
class HubReport:
    """What became of a run with a hub.

    Attributes:
        done: faults that were carried out, by kind.
        skipped: faults that were not, and why.
        arrived, applied: updates that reached the hub, and those of them that moved its weights.
        local_updates: inner steps in those that arrived.
        twice: what is wrong with the account of updates; nothing if each counts once.
        refused, returned: updates that were not taken, and rounds that ended without one: their data were given out again.
        left, came: how often a worker died or went, and how often one came after the beginning.
        anew: how often of these a place was left and taken in one moment: by a worker that began anew, since a new hub had lost
            its last round, or by one that had taken the place of another while there was no hub.
        restarts: how often a hub died and another went on, as far as the log has it: one that dies before it has saved anything
            takes the line with it.
        lost_rounds, lost_local_updates: updates that were lost with those hubs, and were done again, and the inner steps in them.
        not_saved: how many checkpoints.
        loss: of the last evaluation.
    """

    done: Mapping[str, int]
    skipped: tuple[str, ...]
    arrived: int
    applied: int
    local_updates: int
    twice: tuple[str, ...]
    refused: int
    returned: int
    left: int
    came: int
    anew: int
    restarts: int
    lost_rounds: int
    lost_local_updates: int
    not_saved: int
    loss: float | None


def hub_report_of(folder: Path) -> HubReport:
    """The report of the run in this folder."""
    events = list(read_events(folder / "events.jsonl", _KINDS))
    arrived, restarts = _of(events, Arrived), _of(events, HubRestarted)
    if not arrived:
        raise ConfigError(f"{folder} has no update that reached a hub, so there is nothing to report. Let it run longer.")
    done, skipped = _actions(folder / CHAOS_LOG)
    losses = [event.loss for event in _of(events, Evaluated)]
    return HubReport(
        done=done,
        skipped=skipped,
        arrived=len(arrived),
        applied=sum(event.applied for event in arrived),
        local_updates=sum(event.steps for event in arrived),
        twice=tuple(counted_once(events)),
        refused=len(_of(events, Refused)),
        returned=len(_of(events, Returned)),
        left=len(_of(events, IslandLeft)),
        came=len(_of(events, IslandJoined)),
        anew=_anew(events),
        restarts=len(restarts),
        lost_rounds=sum(event.lost_rounds for event in restarts),
        lost_local_updates=sum(event.lost_local_updates for event in restarts),
        not_saved=len(_of(events, SaveFailed)),
        loss=losses[-1] if losses else None,
    )


def _of(events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _actions(path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """What was done, by kind, and what was skipped."""
    actions = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    done = Counter(str(action["did"]["fault"]) for action in actions if "did" in action)
    return dict(done), tuple(_skip(action["skipped"]) for action in actions if "skipped" in action)


def _skip(fault: Mapping[str, Any]) -> str:
    return f"{fault['fault']} of {fault['victim']} ({fault['why']} on this machine)"


def _anew(events: Iterable[Event]) -> int:
    """How often a place was left and taken in one moment."""
    went = {(event.island, event.time_s) for event in _of(events, IslandLeft)}
    return sum((event.island, event.time_s) in went for event in _of(events, IslandJoined))


def counted_once(events: Sequence[Event]) -> Iterator[str]:
    """What is wrong with the account of updates: those that arrived twice, batches that are in two of them, and a hub whose weights
    moved more often, or less, than updates were applied."""
    begun = {event.round: event for event in _of(events, Dispatched)}
    rounds, read, version = set[int](), dict[tuple[int, int], int](), 0
    for event in _of(events, Arrived):
        version += event.applied
        if event.version != version:
            yield f"round {event.round}: the hub had applied {event.version} updates after it, and the log has {version}"
            version = event.version
        if event.round in rounds:
            yield f"round {event.round} of worker {event.island} arrived twice"
            continue
        rounds.add(event.round)
        if event.round not in begun:
            yield f"round {event.round} of worker {event.island} arrived, and nobody was sent off with it"
            continue
        sent = begun[event.round]
        batches = [(sent.shard, sent.start + step) for step in range(event.steps)]
        for other in sorted({read[batch] for batch in batches if batch in read}):
            yield f"rounds {other} and {event.round} have the same batches of shard {sent.shard}"
        read.update(dict.fromkeys(batches, event.round))


def hub_in_words(report: HubReport) -> str:
    """What became of a run with a hub, a line each.

    >>> some = {"refused": 0, "returned": 2, "left": 3, "came": 3, "anew": 2, "restarts": 1, "lost_rounds": 3, "not_saved": 0}
    >>> counts = {"arrived": 60, "applied": 60, "local_updates": 240, "lost_local_updates": 12, "loss": 2.5, **some}
    >>> print(hub_in_words(HubReport(done={"Kill": 2, "Freeze": 1}, skipped=(), twice=(), **counts)))
    faults        2 Kill, 1 Freeze
    updates       60 arrived, 60 of them applied, with 240 local updates: none twice; 0 refused, 2 rounds given out again
    workers       left 3 times, came 3 times (2 times in one moment: a new hub did not know who was there)
    hub           restarted 1 times; 3 updates (12 local ones) lost with it and done again; 0 checkpoints not saved
    loss          2.5000
    """
    kinds = ", ".join(f"{count} {name}" for name, count in report.done.items()) or "none"
    skipped = f"; skipped: {', '.join(report.skipped)}" if report.skipped else ""
    lines = [
        ("faults", kinds + skipped),
        (
            "updates",
            f"{report.arrived} arrived, {report.applied} of them applied, with {report.local_updates} local updates: "
            f"{'; '.join(report.twice) or 'none twice'}; {report.refused} refused, {report.returned} rounds given out again",
        ),
        (
            "workers",
            f"left {report.left} times, came {report.came} times ({report.anew} times in one moment: a new hub did not know who "
            f"was there)",
        ),
        (
            "hub",
            f"restarted {report.restarts} times; {report.lost_rounds} updates ({report.lost_local_updates} local ones) lost with "
            f"it and done again; {report.not_saved} checkpoints not saved",
        ),
        ("loss", "none was measured" if report.loss is None else f"{report.loss:.4f}"),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
