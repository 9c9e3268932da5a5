"""What the faults cost a run: from its event log, from the chaos log, and from the islands' own logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.events import (
    Arrived,
    Attended,
    Dispatched,
    Evaluated,
    Event,
    HubRestarted,
    IslandJoined,
    IslandLeft,
    Leased,
    Refused,
    Returned,
    SaveFailed,
)
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.faults import CHAOS_LOG, LIGHTHOUSE

E = TypeVar("E", bound=Event)
_PROCESS_LINE = re.compile(r"^[\d:]{8} \S+ on .* process (?P<pid>\d+),")
_COMMIT_LINE = re.compile(
    r"^[\d:]{8} committed round (?P<round>\d+) of epoch (?P<epoch>\d+) as (?P<digest>[0-9a-f]+), (?P<work>.*)$"
)
_WITH_WORK = "with work of its own"


@dataclass(frozen=True, kw_only=True)
class _FaultReport:
    """Common to both reports."""

    injected: Mapping[str, int]  # faults, by kind
    skipped: tuple[str, ...]  # faults, with the reasons
    refused: int  # updates
    not_saved: int  # checkpoints
    loss: float | None  # of the last evaluation

    def _fault_row(self) -> tuple[str, str]:
        kinds = ", ".join(f"{count} {name}" for name, count in self.injected.items()) or "none"
        return "faults", kinds + (f"; skipped: {', '.join(self.skipped)}" if self.skipped else "")


def _read_logs(folder: Path, kinds: Iterable[type[Event]]) -> tuple[list[Event], list[dict[str, Any]]]:
    """The run's events of these kinds and of those in every report, and the lines of the chaos log."""
    chaos = folder / CHAOS_LOG
    actions = map(json.loads, chaos.read_text("utf-8").splitlines()) if chaos.exists() else ()
    return list(read_events(folder / "events.jsonl", [*kinds, Evaluated, Refused, SaveFailed])), list(actions)


def _common_fields(events: Sequence[Event], actions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    skipped = [action["skipped"] for action in actions if "skipped" in action]
    losses = [event.loss for event in _of(events, Evaluated)]
    return {
        "injected": dict(Counter(str(action["injected"]["fault"]) for action in actions if "injected" in action)),
        "skipped": tuple(f"{one['fault']} of {one['victim']} ({one['why']} on this machine)" for one in skipped),
        "refused": len(_of(events, Refused)),
        "not_saved": len(_of(events, SaveFailed)),
        "loss": losses[-1] if losses else None,
    }


def _of(events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def report_text(report: ElasticReport | HubReport) -> str:
    """One line of text per row of the report."""
    return "\n".join(f"{name:<14}{text}" for name, text in report.rows())


@dataclass(frozen=True, kw_only=True)
class KillRecovery:
    """How an elastic run recovered from a kill. Times are in seconds after it, and None if there was no such commit."""

    victim: str
    at_s: float  # of the kill, on the script's clock
    commit_s: float | None  # the next commit of the other islands
    back_s: float | None  # the first commit with work of the victim's next process


@dataclass(frozen=True, kw_only=True)
class ElasticReport(_FaultReport):
    """What the faults cost an elastic run. Numbers of islands are means over the commits."""

    commits: int
    attempts: int  # that the commits took
    known: float  # islands
    alive: float
    participating: float
    participating_of_alive: float
    delivered: int  # units of data in a commit
    returned: int  # units that were leased in vain
    data: tuple[str, ...]  # violations of "each unit of data is in exactly one commit"
    compared: int  # state digests in islands' own logs that were compared with the event log
    diverged: tuple[str, ...]  # islands with another state than the event log after a commit
    # Commits in islands' logs that the event log lacks: of an island that was cut off at that moment, or of islands that all died
    # and resumed from a checkpoint.
    unseen: int
    recoveries: tuple[KillRecovery, ...]  # one for each kill of an island

    @property
    def succeeded(self) -> float:
        """The share of attempts that became commits."""
        return self.commits / self.attempts if self.attempts else 0.0

    def rows(self) -> Iterator[tuple[str, str]]:
        yield self._fault_row()
        tries = f"{self.commits} in {self.attempts} attempts ({100 * self.succeeded:.0f} % succeeded)"
        yield "commits", f"{tries}; {self.refused} deltas refused, {self.not_saved} checkpoints not saved"
        present = f"{self.known:.2f} known, {self.alive:.2f} alive, {self.participating:.2f} participating on average"
        yield "islands", f"{present} ({self.participating_of_alive:.3f} of those alive)"
        data = "; ".join(self.data) or "each in exactly one commit"
        yield "data", f"{self.delivered} units delivered, {self.returned} leased again: {data}"
        yield "equal bits", f"{self.compared} digests of islands' own logs compared, {'; '.join(self.diverged) or 'none differs'}"
        if self.recoveries:
            commit_s, back_s = _seconds(r.commit_s for r in self.recoveries), _seconds(r.back_s for r in self.recoveries)
            yield (
                "recovery",
                f"after a kill the other islands commit {commit_s}, and the killed island delivers work again {back_s}",
            )


def _seconds(times: Iterable[float | None]) -> str:
    known = [one for one in times if one is not None]
    return f"within {median(known):.1f} s (median; at most {max(known):.1f} s)" if known else "never"


class LoggedCommit(NamedTuple):
    """A commit in an island's own log."""

    pid: int  # of the island's process
    round: int
    epoch: int
    digest: str  # of the replicated state
    worked: bool  # whether the commit has work of this island


def elastic_report(folder: Path, *, units: int | None = None) -> ElasticReport:
    """The report of the elastic run in this folder. `units` of data were to be delivered, if known."""
    events, actions = _read_logs(folder, [Attended, Leased])
    attended, leased = _of(events, Attended), _of(events, Leased)
    if not attended:
        raise ConfigError(f"{folder} has no commit of elastic islands, so there is nothing to report. Let it run longer.")
    commits = {path.stem: list(logged_commits(path)) for path in sorted((folder / "logs").glob("*.log"))}
    compared, diverged, unseen = compare_digests(attended, commits)
    return ElasticReport(
        commits=len(attended),
        attempts=sum(event.attempts for event in attended),
        known=fmean(event.known for event in attended),
        alive=fmean(event.alive for event in attended),
        participating=fmean(event.participating for event in attended),
        participating_of_alive=fmean(event.participating / event.alive for event in attended),
        delivered=sum(len(event.delivered) for event in leased),
        returned=sum(len(event.returned) for event in leased),
        data=tuple(exactly_once_violations(leased, units=units)),
        compared=compared,
        diverged=diverged,
        unseen=unseen,
        recoveries=tuple(kill_recoveries(actions, commits)),
        **_common_fields(events, actions),
    )


def exactly_once_violations(leased: Iterable[Leased], *, units: int | None = None) -> list[str]:
    """Units of data that are in two commits, or in none although later units of their shard are, and dropped units."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    dropped: list[str] = []
    for event in leased:
        for _, shard, start, batches in [*event.delivered, *event.dropped]:
            spans.setdefault(shard, []).append((start, start + batches, event.round))
        for _, shard, start, batches in event.dropped:
            dropped.append(f"shard {shard}: batches {start} to {start + batches} were refused too often, and dropped")
    found = [text for shard in sorted(spans) for text in _shard_violations(shard, sorted(spans[shard]))]
    count = sum(map(len, spans.values())) - len(dropped)
    if units is not None and count + len(dropped) != units:
        found.append(f"{count} units are in commits; {units} were expected")
    return [*found, *dropped]


def _shard_violations(shard: int, spans: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    reached, by = 0, 0
    for start, stop, number in spans:
        if start > reached:
            yield f"shard {shard}: batches {reached} to {start} are in no commit"
        elif start < reached:
            yield f"shard {shard}: batches {start} to {min(stop, reached)} are in commits {by} and {number}"
        reached, by = (stop, number) if stop > reached else (reached, by)


def logged_commits(path: Path) -> Iterator[LoggedCommit]:
    """The commits in an island's own log."""
    pid = 0
    for text in path.read_text("utf-8", errors="replace").splitlines():
        if process := _PROCESS_LINE.match(text):
            pid = int(process["pid"])
        elif commit := _COMMIT_LINE.match(text):
            worked = commit["work"] == _WITH_WORK
            yield LoggedCommit(pid, int(commit["round"]), int(commit["epoch"]), commit["digest"], worked)


def compare_digests(
    attended: Iterable[Attended], commits: Mapping[str, Iterable[LoggedCommit]]
) -> tuple[int, tuple[str, ...], int]:
    """The number of compared digests, the islands whose digest differs, and the number of commits that only an island's log has."""
    expected = {(event.round, event.epoch): event.digest for event in attended}
    compared, diverged, unseen = 0, [], 0
    for name, logged in commits.items():
        for commit in logged:
            digest = expected.get((commit.round, commit.epoch))
            if digest is None:
                unseen += 1
                continue
            compared += 1
            if digest != commit.digest:
                diverged.append(f"{name} held {commit.digest} after round {commit.round}, and the log has {digest}")
    return compared, tuple(diverged), unseen


def kill_recoveries(actions: Sequence[Mapping[str, Any]], commits: Mapping[str, Sequence[LoggedCommit]]) -> Iterator[KillRecovery]:
    """The recovery from each kill of an island."""
    observed = [(action["at_s"], action["observed"]["round"]) for action in actions if "observed" in action]
    for action in actions:
        fault = action.get("injected", {})
        if fault.get("fault") != "Kill" or fault["victim"] == LIGHTHOUSE or fault["victim"] not in commits:
            continue
        at_s, after = action["at_s"], [moment for moment in observed if moment[0] > action["at_s"]]
        logged = commits[fault["victim"]]
        last = max((number for number, commit in enumerate(logged) if commit.pid == fault["pid"]), default=-1)
        worked = {commit.round for commit in logged[last + 1 :] if commit.worked}
        back_s = next((s for s, number in after if number in worked), None)
        yield KillRecovery(
            victim=fault["victim"],
            at_s=at_s,
            commit_s=after[0][0] - at_s if after else None,
            back_s=back_s - at_s if back_s is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class HubReport(_FaultReport):
    """What the faults cost a run with a hub."""

    arrived: int  # updates that reached the hub
    applied: int  # of them, those that moved its weights
    local_updates: int  # inner steps in the arrived updates
    violations: tuple[str, ...]  # of "each update counts once"
    returned: int  # rounds that ended without an update; the hub dispatched their data again
    left: int  # workers
    joined: int  # workers, after the start
    # Workers that left and joined at the same time: a restarted hub had lost the worker's last round, or another worker had taken
    # the slot while there was no hub.
    rejoined: int
    restarts: int  # of the hub, in the log. A hub that dies before its first checkpoint leaves no entry
    lost_rounds: int  # updates that were lost with hubs, and computed again
    lost_local_updates: int  # their inner steps

    def rows(self) -> Iterator[tuple[str, str]]:
        yield self._fault_row()
        updates = f"{self.arrived} arrived, {self.applied} of them applied, with {self.local_updates} local updates"
        once = "; ".join(self.violations) or "none twice"
        yield "updates", f"{updates}: {once}; {self.refused} refused, {self.returned} rounds dispatched again"
        rejoined = f"{self.rejoined} at the same time: a restarted hub had another record of them"
        yield "workers", f"{self.left} left, {self.joined} joined ({rejoined})"
        lost = f"{self.lost_rounds} updates ({self.lost_local_updates} local updates) lost and computed again"
        yield "hub", f"{self.restarts} restarts; {lost}; {self.not_saved} checkpoints not saved"
        yield "loss", "not measured" if self.loss is None else f"{self.loss:.4f}"


def hub_report(folder: Path) -> HubReport:
    """The report of the run with a hub in this folder."""
    events, actions = _read_logs(folder, [Arrived, Dispatched, HubRestarted, IslandJoined, IslandLeft, Returned])
    arrived, restarts, joined = _of(events, Arrived), _of(events, HubRestarted), _of(events, IslandJoined)
    if not arrived:
        raise ConfigError(f"{folder} has no update that reached a hub, so there is nothing to report. Let it run longer.")
    left = [(event.island, event.time_s) for event in _of(events, IslandLeft)]
    return HubReport(
        arrived=len(arrived),
        applied=sum(event.applied for event in arrived),
        local_updates=sum(event.steps for event in arrived),
        violations=tuple(update_violations(events)),
        returned=len(_of(events, Returned)),
        left=len(left),
        joined=len(joined),
        rejoined=sum((event.island, event.time_s) in left for event in joined),
        restarts=len(restarts),
        lost_rounds=sum(event.lost_rounds for event in restarts),
        lost_local_updates=sum(event.lost_local_updates for event in restarts),
        **_common_fields(events, actions),
    )


def update_violations(events: Sequence[Event]) -> Iterator[str]:
    """Updates that arrived twice or were never dispatched, batches that are in two updates, and a hub version that differs from the
    number of applied updates."""
    dispatched = {event.round: event for event in _of(events, Dispatched)}
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
        if event.round not in dispatched:
            yield f"round {event.round} of worker {event.island} arrived without a dispatch"
            continue
        dispatch = dispatched[event.round]
        batches = [(dispatch.shard, dispatch.start + step) for step in range(event.steps)]
        for other in sorted({read[batch] for batch in batches if batch in read}):
            yield f"rounds {other} and {event.round} have the same batches of shard {dispatch.shard}"
        read.update(dict.fromkeys(batches, event.round))
