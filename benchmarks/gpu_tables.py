"""What was measured on a GPU, in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.telemetry.units import human_bytes, human_count, human_percent
from gpu_found import BARE, Found
from gpu_plan import FLOPS_FORMULA, Cell, Plan, Shape
from gpu_verdicts import tera, verdicts
from record import markdown_table

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
    """Of a record, and of what is planned."""
    outcome = "\n".join(f"- {line}" for line in verdicts(found)) or "Nothing that is asked about was measured yet."
    tried = {shape: [cell for cell in cells if found.was_tried(cell)] for shape, cells in found.plan.groups.items()}
    groups = [_group(shape, cells, found) for shape, cells in tried.items() if cells or found.bare(shape)]
    waiting = [line for shape, cells in plan.groups.items() for line in _waiting(shape, cells, tried[shape])]
    otherwise = any(cell not in plan.groups.get(shape, ()) for shape, cells in tried.items() for cell in cells)
    planned = ", as it is planned now" if otherwise else ""
    left = [f"Not measured yet{planned}: {'; '.join(waiting)}."] if waiting else []
    return [f"## Outcome\n\n{outcome}", f"## Figures\n\n{_note(plan, found, device)}", *left, *groups]


def _waiting(shape: Shape, cells: Sequence[Cell], tried: Sequence[Cell]) -> list[str]:
    """What is still to be measured of a shape, in words."""
    labels = [cell.label for cell in cells if cell not in tried]
    if len(labels) == len(cells):
        return [shape.words]
    return [f"{shape.words} with {' and '.join(labels)}"] if labels else []


def _note(plan: Plan, found: Found, device: str) -> str:
    return " ".join(
        [
            f"On {device}, {_processes(found)}. The bare loop and rounds of DiLoCo (H inner steps of every island, and the outer "
            f"step) take turns; medians of {plan.turns} turns, or of fewer where islands are many, after one that warms up; ratios "
            f"turn by turn, with the least and the greatest.",
            "Tokens are random, and lie on the device: what reading text takes is not in it. Both have fused AdamW and clipping "
            "and, on a GPU, a compiled loss with forward passes in bfloat16: one and the same where islands are apart. Recorded "
            "passes are compiled by themselves and replayed at one go, of one island or stacked, of all; auto is the one of these "
            "that the simulator measures to be fastest.",
            _large_note(found),
            _product_note(plan, found),
            f"FLOPs: {FLOPS_FORMULA}. After the inner steps: the share of a round that the exchange, the outer step and the "
            f"simulator's checks take.",
            _memory_note(found),
        ]
    )


def _processes(found: Found) -> str:
    runs = found.runs()
    if None in runs:
        return "in one process or in several, one after the other"
    return "in one process" if len(runs) == 1 else f"in {len(runs)} processes, one after the other"


def _large_note(found: Found) -> str:
    stacked = [cell for cells in found.plan.presets.values() for cell in cells if cell.way == "stacked" and found.was_tried(cell)]
    if not stacked:
        return "Large batches are not stacked: they fill the device."
    return "Of large batches one is stacked, to see what that gains; the others are not, since they fill the device."


def _product_note(plan: Plan, found: Found) -> str:
    against = f"FLOP utilisation is against a product of two {plan.matrix} x {plan.matrix} matrices in bfloat16"
    if not found.matrix:
        return f"{against}, not measured yet."
    reached = tera(found.matrix["flops_per_s"])
    if "product_s" not in found.matrix:  # an older record
        return f"{against}, the fastest of some turns: {reached}."
    return (
        f"{against} in the same process: {reached} in the first. It is repeated for {found.matrix['product_s']:g} s, and the "
        f"median of the later half of turns counts: a device that has worked for a while is slower than one that has rested."
    )


def _memory_note(found: Found) -> str:
    """Older records do not know what recorded passes keep."""
    pools = any("pool_bytes" in one.found for one in found.all_measured())
    kept = ", together with what recorded passes keep to work in" if pools else ""
    alone = "" if pools else " What a stack's recorded pass works in counts there alone."
    return (
        f"Memory: the most that was allocated while it trained{kept}; before: until the end of the first round, compiling "
        f"included.{alone}"
    )


def _group(shape: Shape, cells: Sequence[Cell], found: Found) -> str:
    rows, bare = [], found.bare(shape)
    products = [found.product_flops_per_s(shape)]
    if bare:
        rate = found.bare_tokens_per_s(shape)
        rows.append([BARE, "-", _count(rate), "-", "1", _percent(found.bare_mfu(shape)), "-", *_memory(bare)])
    for cell in cells:
        one = found.measured(cell)
        if one is None:
            rows.append([cell.label, str(cell.inner_steps), found.skipped(cell), *["-"] * (len(HEADINGS) - 3)])
            continue
        products.append(found.product_flops_per_s(shape, one))
        figures = [
            _count(one.tokens_per_s),
            _count(one.bare_tokens_per_s),
            one.share_words,
            _percent(found.mfu(one)),
            _percent(one.outer_share),
        ]
        rows.append([cell.label, str(cell.inner_steps), *figures, *_memory(one.found)])
    size = f"{human_count(shape.params)} parameters, {shape.flops_per_token / 1e6:.4g} MFLOPs a token."
    later = sorted({product for product in products if product is not None} - {found.matrix.get("flops_per_s")})
    if later:
        some = "some of it " if found.matrix.get("flops_per_s") in products else ""
        size += f" Measured {some}in a later process, in which the matrix product reached {' and '.join(map(tera, later))}."
    return f"### {shape.words}\n\n{size}\n\n{markdown_table(HEADINGS, rows)}"


def _count(rate: float | None) -> str:
    return "-" if rate is None else human_count(rate)


def _percent(share: float | None) -> str:
    return "-" if share is None else human_percent(share)


def _memory(found: Mapping[str, Any]) -> list[str]:
    return ["-" if found[kind] is None else human_bytes(found[kind]) for kind in ("peak_bytes", "begin_bytes")]
