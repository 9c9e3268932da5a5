"""Where the islands' time went, as a section of a report, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.telemetry.device_events import device_name
from atoll.telemetry.island_times import IslandTimes
from atoll.telemetry.overlap import Level, OverlapSummary
from atoll.telemetry.units import human_bytes, human_count, human_percent, human_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_LISTED = 16  # with more islands or devices than this, some stand for all


def overlap_section(summary: OverlapSummary) -> RenderableType:
    """A line on the exchanges of each level and one on what went wrong, and a row per island, or per device where these have an
    algorithm of their own: what it computed, and where its time went."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text("\n".join(overlap_headlines(summary))), _table(summary), *_unlisted(summary))


def overlap_headlines(summary: OverlapSummary) -> list[str]:
    """How much of the exchanges was hidden, which updates were skipped and which rounds were void, as far as there is any."""
    lines = []
    if summary.inside is not None and summary.between is not None:
        lines += [f"inside     {_level(summary.inside, 'device')}", f"between    {_level(summary.between, 'island')}"]
    elif summary.background:
        share = "-" if summary.hidden is None else human_percent(summary.hidden)
        told = f"{human_count(summary.exchanges)}, {human_count(summary.background)} of them behind the computing"
        lines.append(f"exchanges  {told}, which hid {share} of their time")
    if summary.skipped:
        lines.append(
            f"skipped    {_counted(summary.skipped, 'update')}, because somebody's gradients were not finite, or nobody had any"
        )
    if summary.failed:
        lines.append(f"void       {_counted(summary.failed, 'round')}, because somebody was not heard")
    return lines


def _level(level: Level, sender: str) -> str:
    """The exchanges of one level: how many, what a device or an island sent, how much was hidden, and what was dropped."""
    parts = [_counted(level.exchanges, "exchange"), f"{human_bytes(level.sent_bytes)} per {sender}"]
    if level.hidden is not None:
        parts.append(f"{human_percent(level.hidden)} hidden" if level.background else "none hidden")
    if level.dropped_tokens is not None:
        parts.append(f"{human_count(level.dropped_tokens)} tokens dropped")
    return ", ".join(parts)


def _table(summary: OverlapSummary) -> Table:
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (
        "island" if summary.devices_per_island is None else "device",
        "batches",
        "of all",
        "present",
        "computing",
        "talking",
        "waiting",
        "hidden" if summary.devices_per_island is None else "hidden inside",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    total = sum(island.batches for island in summary.islands)
    for island in summary.islands[:_LISTED]:
        result.add_row(device_name(island.island, summary.devices_per_island), *_cells(island, total))
    return result


def _cells(island: IslandTimes, total_batches: float) -> Iterator[str]:
    yield human_count(island.batches)
    yield human_percent(island.batches / total_batches) if total_batches else "-"
    yield human_time(island.present_s)
    for part_s in (island.computed_s, island.talked_s, island.waited_s):
        yield human_percent(part_s / island.present_s) if island.present_s else "-"
    yield human_percent(island.hidden) if island.hidden is not None else "-"


def _unlisted(summary: OverlapSummary) -> list[str]:
    more, what = len(summary.islands) - _LISTED, "island" if summary.devices_per_island is None else "device"
    return [f"and {_counted(more, f'more {what}')}; --json has them all"] if more > 0 else []


def _counted(count: int, what: str) -> str:
    return f"{human_count(count)} {what}" + ("s" if count != 1 else "")
