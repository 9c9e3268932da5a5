"""Several runs side by side: rows, a table for the terminal, one sentence, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.core.errors import ConfigError
from atoll.telemetry.comparison_text import Row, bytes_ratio, losses_as_text, on_both_clocks, reference, verdict
from atoll.telemetry.labels import RunName, distinct_labels
from atoll.telemetry.summary import read_settings, read_summary
from atoll.telemetry.units import human_accuracy, human_bytes, human_count, human_percent, human_time, human_times

if TYPE_CHECKING:
    from rich.table import Table

_ROOMY = 8  # more columns than this stand closer together
_WIDTH = 80  # and so do those that would not fit into so many characters
_NAME = 28  # names of more characters than this may be broken
_SHORT = 16  # names of more characters than this are in no heading


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Finished runs side by side, in the order given."""

    rows: tuple[Row, ...]

    @property
    def most(self) -> Row:
        """The run that sent most: the others are measured against it."""
        return reference(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The sentence, which run sent most, and per run its label, its bytes as a share of the most, and its summary."""
        runs = [
            {"label": row.label, "share_of_most_bytes": bytes_ratio(row, self.most), **row.summary.to_dict()} for row in self.rows
        ]
        return {"sentence": sentence(self), "most_bytes": self.most.label, "runs": runs}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False)


def comparison(folders: Sequence[str | Path]) -> Comparison:
    """Reads the runs in these folders. All must be finished."""
    if not folders:
        raise ConfigError("no run folders were given, so there is nothing to compare. Give one folder or more.")
    summaries = [read_summary(folder) for folder in folders]
    labels = distinct_labels([RunName(recipe=s.recipe, seed=s.seed, folder=s.run_dir, engine=s.engine) for s in summaries])
    rows = zip(labels, summaries, folders, strict=True)
    return Comparison(rows=tuple(Row(label=label, summary=s, data=_data(folder)) for label, s, folder in rows))


def sentence(comparison: Comparison) -> str:
    """What the figures mean at a glance, in one sentence."""
    return verdict(comparison.rows)


def table(comparison: Comparison) -> Table:
    """For the terminal."""
    from rich import box
    from rich.table import Table

    short = len(comparison.most.label) <= _SHORT
    headings, rows = _headings(comparison, comparison.most.label if short else "the most"), _cells(comparison)
    crowded = len(headings) > _ROOMY or _width(headings, rows) > _WIDTH
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if crowded else 1, 0, 0), pad_edge=False, show_edge=not crowded)
    for number, heading in enumerate(headings):
        # On a narrow terminal algorithms give way, then names that are very long, figures never; headings take several lines so
        # that all fit into 80 columns.
        kept = number > 1 or (number == 0 and all(len(row.label) <= _NAME for row in comparison.rows))
        side: Literal["left", "right"] = "left" if number < 2 else "right"
        lines = heading.replace(" ", "\n") if crowded else _in_two(heading)
        result.add_column(lines, justify=side, no_wrap=kept, overflow="fold")
    for name, algorithm, *figures in rows:
        # A clock's name stands below its time where there is little room.
        result.add_row(name, algorithm, *(figure.replace(" (", "\n(") if crowded else figure for figure in figures))
    return result


def _in_two(heading: str) -> str:
    return "\n".join(heading.rsplit(" ", 1))


def _width(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How wide a roomy table is, with two characters for each column between them and at its edges."""
    columns = zip(headings, *rows, strict=True)
    return sum(2 + max(map(len, [*_in_two(heading).split("\n"), *cells])) for heading, *cells in columns)


def markdown(comparison: Comparison) -> str:
    """A Markdown table with the sentence below it."""
    headings = _headings(comparison, comparison.most.label)
    lines = [_markdown_row(headings), "|---|---|" + "---:|" * (len(headings) - 2)]
    lines += [_markdown_row(cells) for cells in _cells(comparison)]
    return "\n".join([*lines, "", sentence(comparison), ""])


def _data(folder: str | Path) -> dict[str, Any]:
    """What was read and judged on. How it was dealt out to islands is what runs are compared for, so it is left out."""
    data = read_settings(folder).get("data")
    if not isinstance(data, dict):
        return {}
    kept = {key: value for key, value in data.items() if key not in ("partition", "shards")}
    return kept | {"type": str(kept["type"]).rpartition(".")[2]} if "type" in kept else kept


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _headings(comparison: Comparison, most: str) -> list[str]:
    """With what the run that sent most is called."""
    against = [f"against {most}"] if len(comparison.rows) > 1 else []
    accuracy = ["accuracy"] if _judged_by_accuracy(comparison) else []
    memory = ["peak memory"] if _differ_in_memory(comparison) else []
    return [
        "run",
        "algorithm",
        "val loss",
        *accuracy,
        "tokens",
        "sent per island",
        *against,
        _time_heading(comparison),
        "busy",
        *memory,
    ]


def _cells(comparison: Comparison) -> list[list[str]]:
    losses, rows = losses_as_text(comparison.rows), []
    for row in comparison.rows:
        summary = row.summary
        accuracy = human_accuracy(summary.val_accuracy) if summary.val_accuracy is not None else "-"
        memory = human_bytes(summary.memory.largest.peak_bytes) if summary.memory is not None else "-"
        rows.append(
            [
                row.label,
                summary.algorithm,
                losses[row.label],
                *([accuracy] if _judged_by_accuracy(comparison) else []),
                human_count(summary.tokens),
                human_bytes(summary.sent_bytes_per_island),
                *([_times_less(row, comparison.most)] if len(comparison.rows) > 1 else []),
                _time(row, comparison),
                human_percent(summary.utilisation) if summary.utilisation is not None else "-",
                *([memory] if _differ_in_memory(comparison) else []),
            ]
        )
    return rows


def _time_heading(comparison: Comparison) -> str:
    return "time" if on_both_clocks(comparison.rows) else f"{comparison.rows[0].summary.clock} time"


def _time(row: Row, comparison: Comparison) -> str:
    """With the name of its clock, where the heading cannot name one for all."""
    summary = row.summary
    if summary.time_s is None:
        return "-"
    return human_time(summary.time_s) + (f" ({summary.clock})" if on_both_clocks(comparison.rows) else "")


def _judged_by_accuracy(comparison: Comparison) -> bool:
    """Whether any run has an accuracy; then all show theirs, or that they have none."""
    return any(row.summary.val_accuracy is not None for row in comparison.rows)


def _differ_in_memory(comparison: Comparison) -> bool:
    """Whether there is something to compare: islands of different runs held more or less at most, or some hold shares."""
    counted = [row.summary.memory for row in comparison.rows if row.summary.memory is not None]
    differ = len({memory.largest.peak_bytes for memory in counted}) > 1
    return len(comparison.rows) > 1 and (differ or any(memory.sharded for memory in counted))


def _times_less(row: Row, most: Row) -> str:
    if row is most:
        return "the most"
    ratio = bytes_ratio(row, most)
    if ratio is None or ratio == 1:
        return "the same"
    return f"{human_times(1 / ratio)}x less" if ratio else "nothing"
