"""What was measured on a GPU, in words, tables and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from atoll.telemetry.drawing import COLOURS, new_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from gpu_plan import FLOPS_FORMULA, WAYS, Cell, Plan, Shape, Way
from record import Record, markdown_table

LEAST_SHARE, LEAST_GAIN = 0.97, 2.0
"""Of the bare loop's tokens per second that islands reach, and times that a stack is faster than one island after the other."""
ASKED_ISLANDS = (4, 8)
MATRIX, BARE = "matrix product", "bare loop"
_WAYS = dict(zip(WAYS, COLOURS, strict=False))


@dataclass(frozen=True)
class Measured:
    """A cell's figures."""

    cell: Cell
    found: Mapping[str, Any]

    @property
    def rounds_s(self) -> list[float]:
        """Seconds of each round that counts."""
        return list(self.found["round_s"])

    @property
    def tokens_per_s(self) -> float:
        return median(self.cell.tokens / round_s for round_s in self.rounds_s)

    @property
    def share(self) -> float:
        """Of the bare loop's tokens per second, turn by turn."""
        bare_tokens = self.cell.shape.bare_steps * self.cell.shape.tokens
        bare_s: list[float] = self.found["bare_s"]
        turns = zip(self.rounds_s, bare_s, strict=True)
        return median((self.cell.tokens / round_s) / (bare_tokens / other_s) for round_s, other_s in turns)

    @property
    def bare_tokens_per_s(self) -> float:
        """Of the bare loop, in turn with these rounds."""
        bare_tokens = self.cell.shape.bare_steps * self.cell.shape.tokens
        return median(bare_tokens / other_s for other_s in self.found["bare_s"])

    @property
    def outer_share(self) -> float:
        """Of a round: what comes after the last inner step."""
        outer_s: list[float] = self.found["outer_s"]
        return median(after_s / round_s for after_s, round_s in zip(outer_s, self.rounds_s, strict=True))


def bare_key(shape: Shape, turns: int) -> str:
    return f"{shape.key} bare turns={turns}x{shape.bare_steps}"


def matrix_key(size: int) -> str:
    return f"{MATRIX} {size}"


class Found:
    """What a record holds of a plan."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self._plan, self._record = plan, record
        matrix = record.get(matrix_key(plan.matrix))
        self.peak_flops_per_s: float | None = matrix["flops_per_s"] if matrix else None

    def measured(self, cell: Cell) -> Measured | None:
        """None if it was skipped, or is still to come."""
        found = self._record.get(cell.key)
        return None if found is None or "skipped" in found else Measured(cell, found)

    def skipped(self, cell: Cell) -> str:
        """Why it was."""
        return str(self._record[cell.key]["skipped"])

    def was_tried(self, cell: Cell) -> bool:
        """Whether there is a line about it."""
        return self._record.get(cell.key) is not None

    def bare(self, shape: Shape) -> Mapping[str, Any] | None:
        return self._record.get(bare_key(shape, self._plan.turns))

    def bare_tokens_per_s(self, shape: Shape) -> float | None:
        found = self.bare(shape)
        return None if found is None else median(shape.bare_steps * shape.tokens / turn_s for turn_s in found["bare_s"])

    def product_flops_per_s(self, shape: Shape) -> float | None:
        """The matrix product's, in the run that measured the shape's bare loop; without it the record's first."""
        found = self.bare(shape) or {}
        return found.get("product_flops_per_s", self.peak_flops_per_s)

    def mfu(self, shape: Shape, tokens_per_s: float | None) -> float | None:
        """Model FLOP utilisation, against the matrix product."""
        product = self.product_flops_per_s(shape)
        return None if tokens_per_s is None or product is None else tokens_per_s * shape.flops_per_token / product


# ------------------------------------------------------------------------------------------------------------------ verdicts


def verdicts(plan: Plan, found: Found) -> list[str]:
    """What was asked, and whether it holds here."""
    lines = [line for shape, cells in plan.presets.items() for line in _share_lines(shape, cells, found)]
    lines += [line for shape, cells in plan.small.items() for line in _gain_lines(shape, cells, found)]
    return lines + [line for shape, cells in plan.presets.items() for line in _mfu_lines(shape, cells, found)]


def _share_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    shares = {cell.islands: one.share for cell in cells if cell.islands in ASKED_ISLANDS and (one := found.measured(cell))}
    if not shares:
        return []
    told = " and ".join(f"{share:.3f} with k={islands}" for islands, share in shares.items())
    holds = _holds(min(shares.values()) >= LEAST_SHARE) + ("" if len(shares) == len(ASKED_ISLANDS) else " so far")
    return [f"{holds}: {shape.words}: DiLoCo trains {told} of the bare loop's tokens per second (asked: {LEAST_SHARE})."]


def _gain_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    gains = gains_of(cells, found)
    if not gains:
        return []
    told = ", ".join(f"{gain:.2f} with k={islands}" for islands, gain in gains.items())
    line = f"{shape.words}: stacked is so many times as fast as one island after the other: {told} (asked: {LEAST_GAIN:g})."
    recorded = ", ".join(f"{gain:.2f} with k={islands}" for islands, gain in gains_of(cells, found, "recorded").items())
    more = f" Where one island's passes are recorded, too: {recorded}." if recorded else ""
    return [f"{_holds(min(gains.values()) >= LEAST_GAIN)}: {line}{more}"]


def gains_of(cells: Sequence[Cell], found: Found, over: Way = "apart") -> dict[int, float]:
    """How many times as fast a stack is as another way, by the number of islands."""
    each = {(cell.islands, cell.way): one.tokens_per_s for cell in cells if (one := found.measured(cell))}
    return {k: each[k, "stacked"] / each[k, over] for k, way in each if way == "stacked" and (k, over) in each}


def _mfu_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    if shape.name != "m150":
        return []
    used = {BARE: found.mfu(shape, found.bare_tokens_per_s(shape))}
    used |= {f"atoll, k={cell.islands}": found.mfu(shape, one.tokens_per_s) for cell in cells if (one := found.measured(cell))}
    told = ", ".join(f"{name} {mfu:.1%}" for name, mfu in used.items() if mfu is not None)
    peak = found.product_flops_per_s(shape)
    return [f"{shape.words}: model FLOP utilisation of {_tera(peak)}: {told}."] if told and peak else []


def _holds(it_does: bool) -> str:
    return "**holds here**" if it_does else "**does not hold here**"


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


# -------------------------------------------------------------------------------------------------------------------- tables

HEADINGS = [
    "",
    "H",
    "tokens/s",
    "bare loop's in turn",
    "of the bare loop",
    "FLOP utilisation",
    "after the inner steps",
    "memory",
    "before",
]


def sections_of(plan: Plan, found: Found, device: str) -> list[str]:
    """Of a record."""
    lines = verdicts(plan, found)
    outcome = "\n".join(f"- {line}" for line in lines) or "Nothing that is asked about was measured yet."
    tried = {shape: [cell for cell in cells if found.was_tried(cell)] for shape, cells in plan.groups.items()}
    groups = [_group(shape, tried[shape], found) for shape in (*plan.presets, *plan.small) if tried[shape] or found.bare(shape)]
    waiting = [line for shape, cells in plan.groups.items() for line in _waiting(shape, cells, tried[shape])]
    left = [f"Not measured yet: {'; '.join(waiting)}."] if waiting else []
    return [f"## Outcome\n\n{outcome}", f"## Figures\n\n{_note(plan, found, device)}", *left, *groups]


def _waiting(shape: Shape, cells: Sequence[Cell], tried: Sequence[Cell]) -> list[str]:
    """What is still to be measured of a shape, in words."""
    labels = [cell.label for cell in cells if cell not in tried]
    if len(labels) == len(cells):
        return [shape.words]
    return [f"{shape.words} with {' and '.join(labels)}"] if labels else []


def _note(plan: Plan, found: Found, device: str) -> str:
    peak = found.peak_flops_per_s
    product = f"a product of two {plan.matrix} x {plan.matrix} matrices in bfloat16"
    return (
        f"On {device}, in one process. The bare loop and rounds of DiLoCo (H inner steps of every island, and the outer step) take "
        f"turns; medians of {plan.turns} after one that warms up, ratios turn by turn. Both have fused AdamW and clipping and, on "
        f"a GPU, a compiled loss with forward passes in bfloat16: one and the same where islands are apart. Recorded passes are "
        f"compiled by themselves and replayed at one go, of one island or stacked, of all. FLOP utilisation is against {product}: "
        f"{_tera(peak) if peak else 'not measured yet'}. FLOPs: {FLOPS_FORMULA}. After the inner steps: the share of a round that "
        f"the exchange, the outer step and the simulator's checks take. Memory: the most that was allocated while it trained; "
        f"before: until the end of the first round, compiling included. What a stack's recorded pass works in counts there alone."
    )


def _group(shape: Shape, cells: Sequence[Cell], found: Found) -> str:
    rows, bare = [], found.bare(shape)
    if bare:
        rate = found.bare_tokens_per_s(shape)
        rows.append([BARE, "-", _count(rate), "-", "1", _percent(found.mfu(shape, rate)), "-", *_memory(bare)])
    for cell in cells:
        one = found.measured(cell)
        if one is None:
            rows.append([cell.label, str(cell.inner_steps), found.skipped(cell), *["-"] * (len(HEADINGS) - 3)])
            continue
        rate = one.tokens_per_s
        figures = [
            _count(rate),
            _count(one.bare_tokens_per_s),
            f"{one.share:.3f}",
            _percent(found.mfu(shape, rate)),
            _percent(one.outer_share),
        ]
        rows.append([cell.label, str(cell.inner_steps), *figures, *_memory(one.found)])
    size = f"{human_count(shape.params)} parameters, {shape.flops_per_token / 1e6:.4g} MFLOPs a token."
    product = found.product_flops_per_s(shape)
    if product is not None and product != found.peak_flops_per_s:
        size += f" In a later run, in which the matrix product reached {_tera(product)}."
    return f"### {shape.words}\n\n{size}\n\n{markdown_table(HEADINGS, rows)}"


def _count(rate: float | None) -> str:
    return "-" if rate is None else human_count(rate)


def _percent(share: float | None) -> str:
    return "-" if share is None else human_percent(share)


def _memory(found: Mapping[str, Any]) -> list[str]:
    return ["-" if found[kind] is None else human_bytes(found[kind]) for kind in ("peak_bytes", "begin_bytes")]


# ---------------------------------------------------------------------------------------------------------------------- bars


def figure(plan: Plan, found: Found) -> Any:
    """Tokens per second: a panel for each model and batch that was measured, a bar for each number of islands and way, side by
    side for each number, and a line for the bare loop."""
    bars = {shape: [one for cell in cells if (one := found.measured(cell))] for shape, cells in (plan.presets | plan.small).items()}
    shapes = [shape for shape, measured in bars.items() if measured]
    drawn, panels = new_figure(max(1, len(shapes)))
    drawn.set_size_inches(max(5.0, 2.4 * len(shapes)), 4)
    for panel, shape in zip(panels, shapes, strict=False):
        _draw_bars(panel, bars[shape])
        rate = found.bare_tokens_per_s(shape)
        if rate is not None:
            panel.axhline(rate / 1e3, color="#555555", linewidth=1.2, linestyle="--")
        panel.set_title(shape.words, fontsize=11)
        panel.set_xlabel("islands", fontsize=11)
    panels[0].set_ylabel("thousand tokens per second")
    for way, colour in _WAYS.items():
        panels[0].bar(0, 0, color=colour, label=way)
    panels[0].plot([], [], color="#555555", linewidth=1.2, linestyle="--", label="bare loop")
    drawn.legend(loc="outside upper center", ncols=4, frameon=False)
    return drawn


def _draw_bars(panel: Any, measured: Sequence[Measured]) -> None:
    counts = sorted({one.cell.islands for one in measured})
    ways = [way for way in WAYS if any(one.cell.way == way for one in measured)]
    for one in measured:
        side = ways.index(one.cell.way) - (len(ways) - 1) / 2
        at, width = counts.index(one.cell.islands) + 0.8 * side / len(ways), 0.8 / len(ways)
        panel.bar(at, one.tokens_per_s / 1e3, width, color=_WAYS[one.cell.way])
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])
