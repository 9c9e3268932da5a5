"""Who was there, of islands that come and go: a run's log in a few lines and a figure.

The figure needs the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.errors import AtollError
from atoll.core.events import Attended, Event, Leased, Refused, SaveFailed
from atoll.telemetry.event_log import read_events
from atoll.telemetry.figures import COLOURS, new_figure, save_figure, time_unit
from atoll.telemetry.units import human_count, human_percent


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Attributes:
    commits: so far.
    attempts: they took.
    known: islands that ever took part.
    alive, participating: means over the commits.
    delivered: units of data that are in a commit.
    returned: that were leased in vain, and leased again.
    refused: deltas.
    not_saved: checkpoints.
    """

    commits: int
    attempts: int
    known: int
    alive: float
    participating: float
    delivered: int
    returned: int
    refused: int
    not_saved: int

    @property
    def lines(self) -> list[str]:
        """In words."""
        share = human_percent(self.participating / self.alive) if self.alive else "-"
        again = self.attempts - self.commits
        lines = [
            f"islands    {self.known} known; {self.alive:.3g} alive and {self.participating:.3g} taking part on average ({share})",
            f"commits    {human_count(self.commits)}"
            + (f", of which {again} attempt{'s' if again != 1 else ''} failed first" if again else ", each at the first attempt"),
            f"data       {human_count(self.delivered)} units delivered, each once; {human_count(self.returned)} leased again",
        ]
        if self.refused:
            lines.append(f"refused    {self.refused} delta{'s' if self.refused != 1 else ''}")
        if self.not_saved:
            lines.append(f"not saved  {self.not_saved} checkpoint{'s' if self.not_saved != 1 else ''}")
        return lines


def read_attendance(folder: str | Path) -> Attendance | None:
    """Of the run in this folder; none if its islands do not come and go, or have committed nothing yet."""
    return attendance(read_events(Path(folder) / "events.jsonl", kinds=(Attended, Leased, Refused, SaveFailed)))


def attendance(events: Iterable[Event]) -> Attendance | None:
    """Of these events."""
    events = list(events)
    attended = [event for event in events if isinstance(event, Attended)]
    leased = [event for event in events if isinstance(event, Leased)]
    if not attended:
        return None
    return Attendance(
        commits=len(attended),
        attempts=sum(event.attempts for event in attended),
        known=attended[-1].known,
        alive=fmean(event.alive for event in attended),
        participating=fmean(event.participating for event in attended),
        delivered=sum(len(event.delivered) for event in leased),
        returned=sum(len(event.returned) for event in leased),
        refused=sum(isinstance(event, Refused) for event in events),
        not_saved=sum(isinstance(event, SaveFailed) for event in events),
    )


def plot_attendance(folder: str | Path, path: str | Path) -> Path:
    """Islands known, alive and taking part over time, and what became of the data, as .png, .svg or .pdf."""
    return save_figure(attendance_figure, folder, path)


def attendance_figure(folder: str | Path) -> Any:
    """What plot_attendance writes, as a matplotlib Figure."""
    events = list(read_events(Path(folder) / "events.jsonl", kinds=(Attended, Leased)))
    attended = [event for event in events if isinstance(event, Attended)]
    leased = [event for event in events if isinstance(event, Leased)]
    if not attended:
        raise AtollError(f"the run in {folder} has no commit of islands that come and go. Draw it with plot_run.")
    figure, (islands, data) = new_figure(2, share_x=True)
    unit, scale = time_unit(attended[-1].time_s)
    times = [event.time_s / scale for event in attended]
    for name, colour in (("known", "#bbbbbb"), ("alive", COLOURS[1]), ("participating", COLOURS[0])):
        islands.step(times, [getattr(event, name) for event in attended], where="post", label=name, color=colour)
    islands.set_ylabel("islands")
    islands.set_ylim(bottom=0)
    islands.legend()
    data.step(times, _running(len(event.delivered) for event in leased), where="post", label="delivered", color=COLOURS[0])
    data.step(times, _running(len(event.returned) for event in leased), where="post", label="leased again", color=COLOURS[1])
    data.set_ylabel("units of data")
    data.legend()
    for panel in (islands, data):
        panel.set_xlabel(f"wall time ({unit})")
    return figure


def _running(counts: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for count in counts:
        total += count
        sums.append(total)
    return sums
