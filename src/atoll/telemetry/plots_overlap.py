"""The figure of a run whose exchanges are hidden: who computes, exchanges and waits in the last rounds, and over the whole run.

Needs the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import AtollError
from atoll.core.events import Computed, Event, Exchanged, RoundFinished, RunStarted
from atoll.core.optional_imports import require
from atoll.telemetry.clocks import Clock, read_clock
from atoll.telemetry.device_events import by_device, device_name
from atoll.telemetry.event_log import read_events
from atoll.telemetry.figures import COLOURS, new_figure, save_figure, short, time_unit
from atoll.telemetry.island_times import IslandTimes, Stretch
from atoll.telemetry.overlap import read_overlap
from atoll.telemetry.units import human_count

_ROUNDS = 4  # so many of the last are drawn
_LANES = 16  # with more islands than this, the first stand for all
_COMPUTING, _HIDDEN, _TALKING, _WAITING = COLOURS[0], COLOURS[2], COLOURS[1], "#bbbbbb"


class Lane(NamedTuple):
    """What one island did in the last rounds."""

    computing: list[Stretch]
    hidden: list[Stretch]
    talking: list[Stretch]


def plot_overlap(folder: str | Path, path: str | Path) -> Path:
    """The last rounds as a timeline, where each island's time went, and how much it computed, as .png, .svg or .pdf."""
    return save_figure(overlap_figure, folder, path)


def overlap_figure(folder: str | Path) -> Any:
    """What plot_overlap writes, as a matplotlib Figure."""
    summary = read_overlap(folder)
    if summary is None or not summary.exchanges:
        what = "has a hub, at which islands do not meet" if summary is None else "has exchanged nothing yet"
        raise AtollError(f"the run in {folder} {what}, so there is no overlap to draw. Draw it with plot_run.")
    events = read_events(Path(folder) / "events.jsonl", kinds=(RunStarted, Computed, Exchanged, RoundFinished))
    lanes, devices = last_rounds(by_device(events)), summary.devices_per_island
    figure, (timeline, times, batches) = new_figure(3)
    _draw_lanes(timeline, {device_name(number, devices): lane for number, lane in lanes.items()}, read_clock(folder))
    timeline.set_ylabel("island" if devices is None else "island.device")
    _draw_times(times, summary.islands)
    _draw_batches(batches, summary.islands)
    for panel in (times, batches):
        _name_islands(panel, devices)
    return figure


def last_rounds(events: Iterable[Event], rounds: int = _ROUNDS) -> dict[int, Lane]:
    """What each island did in the last rounds that are over; if none is, in what there is."""
    kept: list[list[Computed | Exchanged]] = []
    open_round: list[Computed | Exchanged] = []
    for event in events:
        if isinstance(event, Computed | Exchanged):
            open_round.append(event)
        elif isinstance(event, RoundFinished):
            kept, open_round = [*kept[1 - rounds :], open_round] if rounds > 1 else [open_round], []
    lanes: dict[int, Lane] = {}
    for event in (event for group in kept or [open_round] for event in group):
        if isinstance(event, Computed):
            _lane(lanes, event.island).computing.append((event.start_s, event.end_s))
            continue
        for island, arrived_s in zip(event.islands, event.arrived_s, strict=True):
            lane = _lane(lanes, island)
            (lane.hidden if event.background else lane.talking).append((max(arrived_s, event.start_s), event.end_s))
    return dict(sorted(lanes.items()))


def _lane(lanes: dict[int, Lane], island: int) -> Lane:
    return lanes.setdefault(island, Lane([], [], []))


def _draw_lanes(panel: Any, lanes: dict[str, Lane], clock: Clock) -> None:
    """Two bars for each island: above what it computed, below its exchanges. Where the upper one has a gap, it was idle."""
    drawn = dict(list(lanes.items())[:_LANES])
    everything = [stretch for lane in drawn.values() for part in lane for stretch in part]
    begin_s, end_s = min(start for start, _ in everything), max(end for _, end in everything)
    unit, unit_s = time_unit(end_s - begin_s)
    bars = (
        ("computing", "computing", _COMPUTING, -0.4, 0.4),
        ("exchange, in the background", "hidden", _HIDDEN, 0.05, 0.3),
        ("exchange, nothing else", "talking", _TALKING, 0.05, 0.3),
    )
    for name, part, colour, below, height in bars:
        if any(getattr(lane, part) for lane in drawn.values()):
            panel.plot([], [], color=colour, linewidth=6, label=name)
        for place, lane in enumerate(drawn.values()):
            spans = [((start - begin_s) / unit_s, (end - start) / unit_s) for start, end in getattr(lane, part)]
            panel.broken_barh(spans, (place + below, height), facecolors=colour, edgecolors="white", linewidth=0.4)
    panel.set_yticks(range(len(drawn)), list(drawn))
    panel.set_ylim(len(drawn) - 0.5, -0.5)  # the first island is on top
    panel.set_xlabel(f"{clock} time of the last rounds ({unit})")
    panel.grid(visible=False, axis="y")
    panel.legend(frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_times(panel: Any, islands: Sequence[IslandTimes]) -> None:
    """Where each island's time went: a stack of shares."""
    here = [island for island in islands if island.present_s > 0]
    numbers, below = [island.island for island in here], [0.0] * len(here)
    parts = (("computing", "computed_s", _COMPUTING), ("talking", "talked_s", _TALKING), ("waiting", "waited_s", _WAITING))
    for name, field, colour in parts:
        shares = [100 * getattr(island, field) / island.present_s for island in here]
        panel.bar(numbers, shares, bottom=below, color=colour, width=0.8, label=name)
        below = [one + two for one, two in zip(below, shares, strict=True)]
    hidden = [(island.island, 100 * island.hidden) for island in here if island.hidden is not None]
    if hidden:
        marks = {"linestyle": "", "marker": "D", "color": _HIDDEN, "markeredgecolor": "white", "clip_on": False, "zorder": 3}
        where = "" if here[0].inside_exchanged_s is None else " inside"
        panel.plot(*zip(*hidden, strict=True), label=f"of its exchanges{where} hidden", **marks)
    panel.set_ylabel("its time (%)")
    panel.legend(frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _draw_batches(panel: Any, islands: Sequence[IslandTimes]) -> None:
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    panel.bar([island.island for island in islands], [island.batches for island in islands], color=_COMPUTING, width=0.8)
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(human_count(value))))
    panel.set_ylabel("batches computed")


def _name_islands(panel: Any, devices: int | None) -> None:
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    panel.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: device_name(round(value), devices)))
    panel.set_xlabel("island" if devices is None else "island.device")
    panel.grid(visible=False, axis="x")
