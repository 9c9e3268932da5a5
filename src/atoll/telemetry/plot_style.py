"""The common look of all plots, and how they are written to a file. Needs the extra `plot`.

pyplot is never imported, so the user's backend and open figures stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require

T = TypeVar("T")

_DPI = 150
_FORMATS = (".png", ".svg", ".pdf")
FONT_SIZE = 13  # a figure of three panels shown 800 pixels wide then has letters of 9 points
# The palette of Okabe and Ito, which colour-blind readers can distinguish; without its yellow, too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#bbbbbb"


def can_draw(warn: Callable[[str], object]) -> bool:
    """Whether matplotlib can be imported. If not, `warn` takes a line on how to install it."""
    try:
        require("matplotlib.figure", extra="plot", purpose="figures")
    except ConfigError as error:
        warn(f"no plots: {error}")
        return False
    return True


def save_figure(draw: Callable[[T], Any], what: T, path: str | Path) -> Path:
    """Draws and writes a figure as .png, .svg or .pdf, by the suffix of the path, and creates the folder."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(_FORMATS)}, the formats of a figure. Rename it.")
    figure = draw(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def new_figure(panels: int, titles: Sequence[str] = (), *, share_x: bool = False, share_y: bool = False) -> tuple[Any, list[Any]]:
    """A figure and its panels of 4 by 4 inches, plus their titles: up to three in a row, four in two rows."""
    matplotlib_figure = require("matplotlib.figure", extra="plot", purpose="figures")
    rows, columns = (2, 2) if panels == 4 else (1, panels)
    size = (5 if panels == 1 else 4 * columns, (4.25 if titles else 4) * rows)
    figure = matplotlib_figure.Figure(figsize=size, layout="constrained", facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y).flat)
    for panel, title in zip(axes, titles, strict=False):
        panel.set_title(title, loc="left", fontsize=FONT_SIZE)
    for panel in axes:
        panel.grid(color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=FONT_SIZE)
        panel.xaxis.label.set_size(FONT_SIZE)
        panel.yaxis.label.set_size(FONT_SIZE)
    return figure, axes


def add_legend(figure: Any) -> None:
    """One legend above all panels, in one row if it fits; a label that several panels share appears once."""
    handles = {label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    widths = [0.55 * FONT_SIZE * len(label) + 62 for label in handles]  # in points, with the handle and the space between
    width = 72 * figure.get_figwidth()
    columns = len(widths) if sum(widths) <= width else max(1, int(width / max(widths)))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=FONT_SIZE)


def format_axis(axis: Any, text: Callable[[float], str] | None = None, *, whole: bool = False, log: bool = False) -> None:
    """Few ticks with this text; `whole`: on whole numbers only; `log`: on a logarithmic axis."""
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    if log:
        low, high = axis.get_view_interval()
        # Over a few decades the powers of ten alone would be too few ticks.
        axis.set_major_locator(ticker.LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 3.0), numticks=5))
        axis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.set_major_locator(ticker.MaxNLocator(nbins=5 if whole else 4, integer=whole))
    if text is not None:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _without_zeros(text(value))))


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit of an axis of times, and its length in seconds.

    >>> time_unit(90.0), time_unit(600.0), time_unit(86_400.0)
    (('s', 1.0), ('min', 60.0), ('h', 3600.0))
    """
    return ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)


def _without_zeros(text: str) -> str:
    """
    >>> _without_zeros("1.00 MB"), _without_zeros("2.50 MB"), _without_zeros("100 B"), _without_zeros("1.0")
    ('1 MB', '2.5 MB', '100 B', '1.0')
    """
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.')} {unit}" if unit and "." in number else text
