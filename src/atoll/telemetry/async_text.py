"""The figures of an asynchronous run as a section of a report, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from atoll.telemetry.async_summary import AsynchronySummary, Spread, WorkerTimes
from atoll.telemetry.units import human_count, human_percent, human_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BAR = 30  # characters of the longest bar
_BARS = 10  # at most so many rows in a histogram
_LISTED = 16  # with more workers or shards than this, some stand for all


def asynchrony_section(summary: AsynchronySummary) -> RenderableType:
    """Updates, staleness, windows and shards in a line each, two histograms, and where each worker's time went."""
    from rich.console import Group
    from rich.text import Text

    lines = [*headlines(summary), ""]
    lines += histogram("staleness", "updates", summary.staleness)
    lines += ["", *histogram("arrivals", "windows", summary.arrivals_per_window)]
    return Group(Text("\n".join(lines), no_wrap=True, overflow="fold"), _workers(summary.workers), *_unlisted(summary.workers))


def headlines(summary: AsynchronySummary) -> list[str]:
    """A line each on updates, staleness, windows and shards."""
    updates = f"{summary.arrivals} arrived, {summary.applied} of them applied"
    for count, name in ((summary.left_out, "left out"), (summary.refused, "refused"), (summary.returned, "returned")):
        updates += f", {count} {name}" if count else ""
    return [
        f"updates    {updates}",
        f"staleness  {_mean(summary.staleness)} on average, at most {summary.staleness.max}",
        f"windows    {summary.windows}, with {_mean(summary.arrivals_per_window)} arrivals on average, "
        f"at most {summary.arrivals_per_window.max}",
        f"shards     {_shards(summary.steps_per_shard)}",
    ]


def histogram(what: str, of: str, spread: Spread) -> list[str]:
    """A bar per number, or per range of numbers where there are many, with its share.

    >>> print("\\n".join(histogram("staleness", "updates", Spread.of({0: 3, 1: 1}))))
    staleness  updates
            0  ██████████████████████████████ 75 %
            1  ██████████ 25 %
    """
    width = max(1, math.ceil((spread.max + 1 - min(spread.counts, default=0)) / _BARS))
    bars: dict[int, int] = {}
    for number, times in spread.counts.items():
        bars[number // width] = bars.get(number // width, 0) + times
    total, most = sum(bars.values()), max(bars.values(), default=0)
    lines = [f"{what:>9}  {of}"]
    for bar in range(min(bars, default=0), max(bars, default=-1) + 1):
        times = bars.get(bar, 0)
        name = f"{bar}" if width == 1 else f"{bar * width}-{(bar + 1) * width - 1}"
        lines.append(f"{name:>9}  {'█' * round(_BAR * times / most)} {human_percent(times / total)}")
    return lines


def _mean(spread: Spread) -> str:
    return f"{spread.mean:.3g}"


def _shards(steps: Mapping[int, int]) -> str:
    if not steps:
        return "no steps have arrived yet"
    if len(steps) <= _LISTED:
        return ", ".join(f"{shard}: {human_count(count)}" for shard, count in steps.items()) + " steps"
    least, most = min(steps.values()), max(steps.values())
    return f"{len(steps)} of them, with {human_count(least)} to {human_count(most)} steps each"


def _workers(workers: tuple[WorkerTimes, ...]) -> Table:
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("worker", "rounds", "steps", "present", "computing", "waiting", "talking", "no result"):
        result.add_column(heading, justify="right", no_wrap=True)
    for worker in workers[:_LISTED]:
        result.add_row(*_cells(worker))
    return result


def _cells(worker: WorkerTimes) -> Iterator[str]:
    yield from (str(worker.island), human_count(worker.rounds), human_count(worker.steps), human_time(worker.present_s))
    for part_s in (worker.computed_s, worker.waited_s, worker.talked_s, worker.unfinished_s):
        yield human_percent(part_s / worker.present_s) if worker.present_s else "-"


def _unlisted(workers: tuple[WorkerTimes, ...]) -> list[str]:
    more = len(workers) - _LISTED
    return [f"and {more} more workers; --json has them all"] if more > 0 else []
