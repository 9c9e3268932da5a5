"""The text of `atoll report`: a table of sections, each with labelled lines, histograms and a table of workers or islands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.events import MEMORY_KINDS, LogDamaged
from atoll.telemetry.async_summary import AsynchronySummary, CountDistribution, WorkerTimes, read_asynchrony
from atoll.telemetry.event_log import read_events
from atoll.telemetry.summary import MemorySummary, ParticipationSummary, read_memory, read_participation
from atoll.telemetry.sync_summary import ExchangeLevel, IslandTimes, OverlapSummary, device_name, read_overlap, reports_overlap
from atoll.telemetry.units import human_bytes, human_count, human_percent, human_share, human_time, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_WIDTH = 30  # characters of the longest bar
_MAX_BARS = 10  # rows of a histogram
_SHOWN_DAMAGES = 5
_MAX_ROWS = 16  # workers, islands or shards that are listed


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """One kind of figures. A line whose text is None is left out; `lines`, `histograms` and `rows` take what `read` returns."""

    read: Callable[[Path], Any]  # the summary in a run's folder; None where the run has no such figures
    lines: Mapping[str, Callable[[Any], str | None]]
    histograms: Callable[[Any], list[str]] = lambda _: []
    rows: Callable[[Any], list[dict[str, str]]] = lambda _: []  # the table: each row has the cells by their headings


def report_sections(folder: str | Path) -> Iterator[RenderableType]:
    """The sections that apply to the run in a folder, finished or not, for rich to print."""
    for section in SECTIONS:
        summary = section.read(Path(folder))
        if summary is not None:
            yield render(section, summary)


def render(section: ReportSection, summary: Any) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [*section_lines(section, summary), *section.histograms(summary)]
    parts: list[RenderableType] = [Text("\n".join(lines), overflow="fold")] if lines else []
    rows = section.rows(summary)
    if rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in rows[0]:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)  # all columns fit into 80 characters
        for row in rows[:_MAX_ROWS]:
            table.add_row(*row.values())
        parts.append(table)
    if len(rows) > _MAX_ROWS:
        parts.append(f"and {plural(len(rows) - _MAX_ROWS, f'more {next(iter(rows[0]))}')}; --json has them all")
    return Group(*parts)


def section_lines(section: ReportSection, summary: Any) -> list[str]:
    """Each line with its label."""
    texts = {label: text(summary) for label, text in section.lines.items()}
    return [f"{label:<10} {text}" for label, text in texts.items() if text is not None]


def histogram(label: str, unit: str, distribution: CountDistribution) -> list[str]:
    """A bar per number, or per range of numbers where there are many, with its share.

    >>> print("\\n".join(histogram("staleness", "updates", CountDistribution.of({0: 3, 1: 1}))))
    <BLANKLINE>
    staleness  updates
            0  ██████████████████████████████ 75 %
            1  ██████████ 25 %
    """
    width = max(1, math.ceil((distribution.max + 1 - min(distribution.counts, default=0)) / _MAX_BARS))
    bars: dict[int, int] = {}
    for number, times in distribution.counts.items():
        bars[number // width] = bars.get(number // width, 0) + times
    total, most = sum(bars.values()), max(bars.values(), default=0)
    lines = ["", f"{label:>9}  {unit}"]
    for bar in range(min(bars, default=0), max(bars, default=-1) + 1):
        times = bars.get(bar, 0)
        name = f"{bar}" if width == 1 else f"{bar * width}-{(bar + 1) * width - 1}"
        lines.append(f"{name:>9}  {'█' * round(_BAR_WIDTH * times / most)} {human_percent(times / total)}")
    return lines


def _updates(summary: AsynchronySummary) -> str:
    if not summary.arrivals:
        return "no update has arrived at the hub yet"
    counts = {"left out": summary.left_out, "refused": summary.refused, "returned": summary.returned}
    return f"{summary.arrivals} arrived, {summary.applied} of them applied" + "".join(
        f", {count} {name}" for name, count in counts.items() if count
    )


def _shards(summary: AsynchronySummary) -> str | None:
    steps = summary.steps_per_shard
    if not steps:
        return None
    if len(steps) <= _MAX_ROWS:
        return ", ".join(f"{shard}: {human_count(count)}" for shard, count in steps.items()) + " steps"
    return f"{len(steps)}, with {human_count(min(steps.values()))} to {human_count(max(steps.values()))} steps each"


def _spread(distribution: CountDistribution, unit: str = "") -> str | None:
    return f"{distribution.mean:.3g}{unit} on average, at most {distribution.max}" if distribution.counts else None


def _worker_rows(summary: AsynchronySummary) -> list[dict[str, str]]:
    return [
        {"worker": str(worker.island), "rounds": human_count(worker.rounds), "steps": human_count(worker.steps)}
        | _time_cells(worker)
        for worker in (summary.workers if summary.arrivals else ())
    ]


def _time_cells(times: WorkerTimes | IslandTimes) -> dict[str, str]:
    """How long an island was present, and the share of each part of that time."""
    cells = {heading: human_share(getattr(times, field), times.present_s) for heading, field in times.time_parts.items()}
    return {"present": human_time(times.present_s), **cells}


def _memory(summary: MemorySummary) -> str:
    largest = summary.largest
    sizes = {kind: largest[f"{kind}_bytes"] for kind in MEMORY_KINDS}
    text = f"{human_bytes(largest['peak_bytes'])} per island at most: " + ", ".join(
        f"{kind} {human_bytes(size)}" for kind, size in sizes.items() if size
    )
    if summary.formula is None or summary.formula_bytes is None:
        return text
    return f"{text}; by the formula of the paper, {summary.formula} bytes per parameter, {human_bytes(summary.formula_bytes)}"


def _islands(summary: ParticipationSummary) -> str:
    share = human_share(summary.participating, summary.alive)
    return f"{summary.known} known; on average {summary.alive:.3g} alive and {summary.participating:.3g} participating ({share})"


def _commits(summary: ParticipationSummary) -> str:
    failed = summary.attempts - summary.commits
    outcome = f"after {plural(failed, 'failed attempt')}" if failed else "each at the first attempt"
    return f"{human_count(summary.commits)}, {outcome}"


def _level(level: ExchangeLevel | None, sender: str) -> str | None:
    if level is None:
        return None
    parts = [plural(level.exchanges, "exchange"), f"{human_bytes(level.sent_bytes)} per {sender}"]
    if level.hidden is not None:
        parts.append(f"{human_percent(level.hidden)} hidden" if level.background else "none hidden")
    if level.dropped_tokens is not None:
        parts.append(f"{human_count(level.dropped_tokens)} tokens dropped")
    return ", ".join(parts)


def _exchanges(summary: OverlapSummary) -> str | None:
    if summary.devices_per_island is not None or not summary.background:
        return None
    counts = f"{human_count(summary.exchanges)}, {human_count(summary.background)} of them in the background of computing"
    return f"{counts}, which hid {human_share(summary.hidden, 1.0)} of their time"


def _island_rows(summary: OverlapSummary) -> list[dict[str, str]]:
    devices, total = summary.devices_per_island, sum(island.batches for island in summary.islands)
    member, hidden = ("island", "hidden") if devices is None else ("device", "hidden inside")
    return [
        {
            member: device_name(island.island, devices),
            "batches": human_count(island.batches),
            "of all": human_share(island.batches, total),
            **_time_cells(island),
            hidden: human_share(island.hidden, 1.0),
        }
        for island in summary.islands
    ]


def _damages(events: Sequence[LogDamaged]) -> str:
    more = f"; and {plural(len(events) - _SHOWN_DAMAGES, 'more')}" if len(events) > _SHOWN_DAMAGES else ""
    return "; ".join(event.what for event in events[:_SHOWN_DAMAGES]) + more


ASYNCHRONY = ReportSection(
    read=read_asynchrony,
    lines={
        "updates": _updates,
        "staleness": lambda s: _spread(s.staleness),
        "windows": lambda s: f"{s.windows}, with {_spread(s.arrivals_per_window, ' arrivals')}" if s.windows else None,
        "shards": _shards,
    },
    histograms=lambda s: (
        [*histogram("staleness", "updates", s.staleness), *histogram("arrivals", "windows", s.arrivals_per_window)]
        if s.arrivals
        else []
    ),
    rows=_worker_rows,
)
MEMORY = ReportSection(read=read_memory, lines={"memory": _memory})
PARTICIPATION = ReportSection(
    read=read_participation,
    lines={
        "islands": _islands,
        "commits": _commits,
        "data": lambda s: f"{plural(s.delivered, 'lease')} delivered, each once; {human_count(s.returned)} assigned again",
        "refused": lambda s: plural(s.refused, "delta") if s.refused else None,
        "not saved": lambda s: plural(s.not_saved, "checkpoint") if s.not_saved else None,
    },
)
OVERLAP = ReportSection(
    read=lambda folder: read_overlap(folder) if reports_overlap(folder) else None,
    lines={
        "inside": lambda s: _level(s.inside, "device"),
        "between": lambda s: _level(s.between, "island"),
        "exchanges": _exchanges,
        "skipped": lambda s: f"{plural(s.skipped, 'update')}, because gradients were missing or not finite" if s.skipped else None,
        "failed": lambda s: f"{plural(s.failed, 'round')}, because an island missed the exchange" if s.failed else None,
    },
    rows=_island_rows,
)
LOG_DAMAGE = ReportSection(
    read=lambda folder: [event for event in read_events(folder / "events.jsonl") if isinstance(event, LogDamaged)] or None,
    lines={"damage": lambda s: f"events.jsonl lacks lines, and the figures above lack what they counted: {_damages(s)}"},
)
SECTIONS: Sequence[ReportSection] = (ASYNCHRONY, MEMORY, PARTICIPATION, OVERLAP, LOG_DAMAGE)
