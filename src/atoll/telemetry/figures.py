"""What all figures have in common: how they look, how an axis is labelled, how they are written.

Needs the extra `plot`. A figure is made as an object and written to a file; pyplot, and with it the user's own backend and open
figures, is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require

T = TypeVar("T")

_DPI = 150
_FORMATS = (".png", ".svg", ".pdf")
# The palette of Okabe and Ito, told apart also by readers who do not see red or green; without its yellow, too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def save_figure(draw: Callable[[T], Any], what: T, path: str | Path) -> Path:
    """Draws and writes, as .png, .svg or .pdf by the path's ending; its folder is made if need be."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(_FORMATS)}: a figure is written in one of these formats. Rename it.")
    figure = draw(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def new_figure(panels: int, *, share_x: bool = False, share_y: bool = False) -> tuple[Any, list[Any]]:
    """A figure and its panels. At 1800 pixels for three panels, its letters can still be read when it is shown at 900."""
    matplotlib_figure = require("matplotlib.figure", extra="plot", purpose="figures")
    figure = matplotlib_figure.Figure(figsize=(5 if panels == 1 else 4 * panels, 4), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, panels, squeeze=False, sharex=share_x, sharey=share_y)[0])
    for panel in axes:
        panel.grid(color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=11)
        panel.xaxis.label.set_size(12)
        panel.yaxis.label.set_size(12)
    return figure, axes


def format_axis(panel: Any, text: Callable[[float], str] | None, *, logarithmic: bool = False) -> None:
    """Few ticks, with letters for thousands and millions."""
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    if logarithmic:
        low, high = panel.get_xlim()
        # Over few decades the powers of ten alone would be too few ticks.
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 3.0), numticks=5))
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        panel.xaxis.set_major_locator(ticker.MaxNLocator(nbins=4))
    if text is not None:
        panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(text(value))))


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for an axis of times, and how many seconds it has.

    >>> time_unit(90.0), time_unit(600.0), time_unit(86_400.0)
    (('s', 1.0), ('min', 60.0), ('h', 3600.0))
    """
    return ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)


def short(text: str) -> str:
    """A figure without zeros after its point, which ticks do not need.

    >>> short("1.00 MB"), short("2.50 MB"), short("100 B")
    ('1 MB', '2.5 MB', '100 B')
    """
    number, _, unit = text.partition(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number} {unit}".strip()
