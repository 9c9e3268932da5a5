"""What the faults cost a run: from its event log, from the chaos log, and from the islands' own logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from atoll.core import events as ev
from atoll.core.errors import ConfigError
from atoll.telemetry.async_summary import AsynchronySummary, read_asynchrony
from atoll.telemetry.event_log import read_events, read_kind
from atoll.telemetry.summary import ParticipationSummary, read_participation
from atoll.testing.chaos.faults import CHAOS_LOG, LIGHTHOUSE

_PROCESS_LINE = re.compile(r"^\S+ \S+ on .* process (?P<pid>\d+),")
_COMMIT_LINE = re.compile(r"^\S+ committed round (?P<round>\d+) of epoch (?P<epoch>\d+) as (?P<digest>[0-9a-f]+), (?P<work>.*)$")
_WITH_WORK = "with work of its own"


@dataclass(frozen=True, kw_only=True)
class _FaultReport:
    """Common to both reports."""

    injected: Mapping[str, int]  # faults, by kind; those of the lighthouse apart
    skipped: tuple[str, ...]  # faults, with the reasons
    loss: float | None  # of the last evaluation

    def _fault_row(self) -> tuple[str, str]:
        kinds = ", ".join(f"{count} {name}" for name, count in self.injected.items()) or "none"
        return "faults", kinds + (f"; skipped: {', '.join(self.skipped)}" if self.skipped else "")


def _read_actions(folder: Path) -> list[dict[str, Any]]:
    """The lines of the chaos log."""
    log = folder / CHAOS_LOG
    return list(map(json.loads, log.read_text("utf-8").splitlines())) if log.exists() else []


def _kind(fault: Mapping[str, Any]) -> str:
    return f"{fault['fault']}{' of the lighthouse' if fault.get('victim') == LIGHTHOUSE else ''}"


def _common_fields(folder: Path) -> dict[str, Any]:
    actions = _read_actions(folder)
    skipped = [action["skipped"] for action in actions if "skipped" in action]
    losses = [event.loss for event in read_kind(folder, ev.Evaluated)]
    return {
        "injected": dict(Counter(_kind(action["injected"]) for action in actions if "injected" in action)),
        "skipped": tuple(f"{one['fault']} of {one['victim']} ({one['why']} on this machine)" for one in skipped),
        "loss": losses[-1] if losses else None,
    }


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
class ElasticReport(ParticipationSummary, _FaultReport):
    """What the faults cost an elastic run."""

    participating_of_alive: float  # mean over commits
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
        present = f"{self.known} known, {self.alive:.2f} alive, {self.participating:.2f} participating on average"
        yield "islands", f"{present} ({self.participating_of_alive:.3f} of those alive)"
        data = "; ".join(self.data) or "each in exactly one commit"
        yield "data", f"{self.delivered} units delivered, {self.returned} leased again: {data}"
        yield "equal bits", f"{self.compared} digests of islands' own logs compared, {'; '.join(self.diverged) or 'none differs'}"
        if self.recoveries:
            commit_s, back_s = _seconds(r.commit_s for r in self.recoveries), _seconds(r.back_s for r in self.recoveries)
            recovery = f"after a kill the other islands commit {commit_s}, and the killed island delivers work again {back_s}"
            yield "recovery", recovery


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
    participation = read_participation(folder)
    if participation is None:
        raise ConfigError(f"{folder} has no commit of elastic islands, so there is nothing to report. Let it run longer.")
    attended = read_kind(folder, ev.Attended)
    commits = {path.stem: list(logged_commits(path)) for path in sorted((folder / "logs").glob("*.log"))}
    compared, diverged, unseen = compare_digests(attended, commits)
    return ElasticReport(
        participating_of_alive=fmean(event.participating / event.alive for event in attended),
        data=tuple(exactly_once_violations(read_kind(folder, ev.Leased), units=units)),
        compared=compared,
        diverged=diverged,
        unseen=unseen,
        recoveries=tuple(kill_recoveries(_read_actions(folder), commits)),
        **vars(participation),
        **_common_fields(folder),
    )


def exactly_once_violations(leased: Iterable[ev.Leased], *, units: int | None = None) -> list[str]:
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
    attended: Iterable[ev.Attended], commits: Mapping[str, Iterable[LoggedCommit]]
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
class HubReport(AsynchronySummary, _FaultReport):
    """What the faults cost a run with a hub."""

    violations: tuple[str, ...]  # of "each update counts once"
    left: int  # workers
    joined: int  # workers, after the start
    # Workers that left and joined at the same time: a restarted hub had lost the worker's last round, or another worker had taken
    # the slot while there was no hub.
    rejoined: int
    restarts: int  # of the hub, in the log. A hub that dies before its first checkpoint leaves no entry
    lost_rounds: int  # updates that were lost with hubs, and computed again
    lost_local_updates: int  # their inner steps
    not_saved: int  # checkpoints

    def rows(self) -> Iterator[tuple[str, str]]:
        yield self._fault_row()
        local_updates = sum(self.steps_per_shard.values())
        updates = f"{self.arrivals} arrived, {self.applied} of them applied, with {local_updates} local updates"
        once = "; ".join(self.violations) or "none twice"
        yield "updates", f"{updates}: {once}; {self.refused} refused, {self.returned} rounds dispatched again"
        rejoined = f"{self.rejoined} at the same time: a restarted hub had another record of them"
        yield "workers", f"{self.left} left, {self.joined} joined ({rejoined})"
        lost = f"{self.lost_rounds} updates ({self.lost_local_updates} local updates) lost and computed again"
        yield "hub", f"{self.restarts} restarts; {lost}; {self.not_saved} checkpoints not saved"
        yield "loss", "not measured" if self.loss is None else f"{self.loss:.4f}"


def hub_report(folder: Path) -> HubReport:
    """The report of the run with a hub in this folder."""
    hub, restarts = read_asynchrony(folder), read_kind(folder, ev.HubRestarted)
    if hub is None or not hub.arrivals:
        raise ConfigError(f"{folder} has no update that reached a hub, so there is nothing to report. Let it run longer.")
    joined = [(event.island, event.time_s) for event in read_kind(folder, ev.IslandJoined)]
    left = [(event.island, event.time_s) for event in read_kind(folder, ev.IslandLeft)]
    return HubReport(
        violations=tuple(update_violations(read_events(folder / "events.jsonl", [ev.Arrived, ev.Dispatched]))),
        left=len(left),
        joined=len(joined),
        rejoined=sum(moment in left for moment in joined),
        restarts=len(restarts),
        lost_rounds=sum(event.lost_rounds for event in restarts),
        lost_local_updates=sum(event.lost_local_updates for event in restarts),
        not_saved=len(read_kind(folder, ev.SaveFailed)),
        **vars(hub),
        **_common_fields(folder),
    )


def update_violations(events: Iterable[ev.Event]) -> Iterator[str]:
    """Updates that arrived twice or were never dispatched, batches that are in two updates, and a hub version that differs from the
    number of applied updates."""
    dispatched: dict[int, ev.Dispatched] = {}
    rounds, read, version = set[int](), dict[tuple[int, int], int](), 0
    for event in events:
        if isinstance(event, ev.Dispatched):
            dispatched[event.round] = event
        if not isinstance(event, ev.Arrived):
            continue
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
