"""Rows, spans, moments and counters in the JSON that ui.perfetto.dev and chrome://tracing read.

A trace viewer draws processes (`pid`), each with named rows (`tid`). Times go in as seconds and come out as microseconds.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Where a span is drawn: a process and a row of it."""

    process: int
    row: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that lasted, in whole nanoseconds: integers do not overlap by a rounding error.

    Attributes:
        filler: whether it only fills the time that nothing else on its row takes, as waiting does.
    """

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any]
    filler: bool = False


@dataclass(kw_only=True)
class Timeline:
    """Collects what is to be drawn, in any order."""

    process_names: dict[int, str] = field(default_factory=dict)
    row_names: dict[Row, str] = field(default_factory=dict)
    _spans: dict[Row, list[Span]] = field(default_factory=dict)
    _moments: list[dict[str, Any]] = field(default_factory=list)
    _counts: list[tuple[int, int, int]] = field(default_factory=list)
    _gauges: list[dict[str, Any]] = field(default_factory=list)

    def span(
        self, row: Row, start_s: float, end_s: float, name: str, category: str, args: dict[str, Any], *, filler: bool = False
    ) -> None:
        span = Span(start_ns=_ns(start_s), end_ns=_ns(end_s), name=name, category=category, args=args, filler=filler)
        self._spans.setdefault(row, []).append(span)

    def moment(self, row: Row, at_s: float, name: str, args: dict[str, Any], *, across: bool = False) -> None:
        """Something that happened at once; drawn across all rows, or on its own."""
        scope = "g" if across else "t"
        record = {"ph": "i", "pid": row.process, "tid": row.row, "ts": _us(_ns(at_s)), "name": name, "s": scope, "args": args}
        self._moments.append(record)

    def count(self, process: int, at_s: float, amount: int) -> None:
        """Adds to the process's counter of bytes sent."""
        self._counts.append((_ns(at_s), process, amount))

    def gauge(self, process: int, at_s: float, name: str, value: float) -> None:
        """The process's counter of that name stands at this value from now on."""
        self._gauges.append({"ph": "C", "pid": process, "ts": _us(_ns(at_s)), "name": name, "args": {name: value}})

    @property
    def empty(self) -> bool:
        return not self._spans and not self._moments

    def write(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, record in enumerate(self._records()):
                file.write((",\n" if number else "") + json.dumps(_plain(record), allow_nan=False))
            file.write("\n]}\n")

    def _records(self) -> Iterator[dict[str, Any]]:
        for process, name in self.process_names.items():
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        for row, name in self.row_names.items():
            yield {"ph": "M", "pid": row.process, "tid": row.row, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": row.process, "tid": row.row, "name": "thread_sort_index", "args": {"sort_index": row.row}}
        for row, spans in self._spans.items():
            for span in without_overlaps(spans):
                when = {"ts": _us(span.start_ns), "dur": _us(span.end_ns - span.start_ns)}
                what = {"name": span.name, "cat": span.category, "args": span.args}
                yield {"ph": "X", "pid": row.process, "tid": row.row, **when, **what}
        yield from self._moments
        totals: dict[int, int] = {}
        for at_ns, process, amount in sorted(self._counts):
            totals[process] = totals.get(process, 0) + amount
            yield {"ph": "C", "pid": process, "ts": _us(at_ns), "name": "bytes sent", "args": {"bytes": totals[process]}}
        yield from self._gauges


def without_overlaps(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, each cut to begin where the one before it ends; fillers lose whatever another span takes.

    An island may have joined the queue for an exchange while the one before was still under way: it waited only from its end.
    """
    ordered = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    solid = _one_after_another([span for span in ordered if not span.filler])
    starts = [span.start_ns for span in solid]
    pieces = [piece for span in ordered if span.filler for piece in _gaps(span, solid, starts)]
    return _one_after_another(sorted([*solid, *pieces], key=lambda span: (span.start_ns, span.end_ns)))


def _one_after_another(ordered: Sequence[Span]) -> list[Span]:
    kept: list[Span] = []
    free_ns = 0
    for span in ordered:
        start_ns = max(span.start_ns, free_ns)
        if start_ns < span.end_ns or start_ns == span.start_ns == span.end_ns:
            kept.append(span if start_ns == span.start_ns else replace(span, start_ns=start_ns))
            free_ns = span.end_ns
    return kept


def _gaps(span: Span, solid: Sequence[Span], starts: Sequence[int]) -> Iterator[Span]:
    """The pieces of a filler that lie between the others."""
    free_ns = span.start_ns
    for other in solid[max(0, bisect_right(starts, span.start_ns) - 1) :]:
        if other.start_ns >= span.end_ns:
            break
        if other.start_ns > free_ns:
            yield replace(span, start_ns=free_ns, end_ns=other.start_ns)
        free_ns = max(free_ns, other.end_ns)
    if free_ns < span.end_ns:
        yield replace(span, start_ns=free_ns)


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity; a loss may be either."""
    args = record["args"].items()
    return {**record, "args": {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in args}}
