"""What was measured on a GPU, in bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure
from gpu_found import BARE, Found, Measured
from gpu_plan import WAYS, Way

_WAYS: dict[Way, str] = dict(zip((*WAYS, "auto"), COLOURS, strict=False))


def figure(found: Found) -> Any:
    """Tokens per second: a panel for each model and batch that was measured, a bar for each number of islands and way, side by
    side for each number, and a line for the bare loop."""
    bars = {shape: [one for cell in cells if (one := found.measured(cell))] for shape, cells in found.plan.groups.items()}
    shapes = [shape for shape, measured in bars.items() if measured]
    drawn, panels = new_figure(max(1, len(shapes)))
    drawn.set_size_inches(max(7.0, 2.4 * len(shapes)), 4)
    for panel, shape in zip(panels, shapes, strict=False):
        _draw_bars(panel, bars[shape])
        rate = found.bare_tokens_per_s(shape)
        if rate is not None:
            panel.axhline(rate / 1e3, color="#555555", linewidth=1.2, linestyle="--")
        panel.set_title(shape.words, fontsize=11)
        panel.set_xlabel("islands", fontsize=11)
    panels[0].set_ylabel("thousand tokens per second")
    drawn_ways = {one.cell.way for measured in bars.values() for one in measured}
    for way, colour in _WAYS.items():
        if way in drawn_ways:
            panels[0].bar(0, 0, color=colour, label=way)
    panels[0].plot([], [], color="#555555", linewidth=1.2, linestyle="--", label=BARE)
    drawn.legend(loc="outside upper center", ncols=5, frameon=False)
    return drawn


def _draw_bars(panel: Any, measured: Sequence[Measured]) -> None:
    counts = sorted({one.cell.islands for one in measured})
    groups = [sorted((one for one in measured if one.cell.islands == count), key=_place) for count in counts]
    width = 0.8 / max(map(len, groups))
    for at, group in enumerate(groups):
        for place, one in enumerate(group):
            side = place - (len(group) - 1) / 2
            panel.bar(at + width * side, one.tokens_per_s / 1e3, width, color=_WAYS[one.cell.way])
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])


def _place(one: Measured) -> int:
    """Of a bar among those of other ways."""
    return list(_WAYS).index(one.cell.way)
