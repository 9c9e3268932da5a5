"""Verdicts, tables and a plot of the GPU benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from gpu_plan import FLOPS_FORMULA, MODES, Cell, Mode, Plan, Shape
from gpu_results import BARE, Measured, Results
from record import bullets, holds_text, markdown_table

LEAST_SHARE, LEAST_GAIN = 0.97, 2.0
"""Required: tokens per second over the bare loop's, and those of a stack over one island after the other."""
JUDGED_ISLANDS = (4, 8)
WITHIN_SPREAD = "**within the spread**"


def verdicts(results: Results) -> list[str]:
    """The verdicts."""
    plan = results.plan
    lines = [line for shape, cells in plan.presets.items() for line in _share_lines(shape, cells, results)]
    lines += [line for shape, cells in plan.small.items() for line in _gain_lines(shape, cells, results)]
    lines += [line for shape, cells in plan.presets.items() for line in _filled_lines(shape, cells, results)]
    lines += [line for shape, cells in plan.groups.items() for line in _choice_lines(shape, cells, results)]
    lines += _loss_lines(results)
    return lines + [line for shape, cells in plan.presets.items() for line in _mfu_lines(shape, cells, results)]


# ----------------------------------------------------------------------------------------------- compared with the bare loop


def _share_lines(shape: Shape, cells: Sequence[Cell], results: Results) -> list[str]:
    judged = [cell for cell in cells if cell.islands in JUDGED_ISLANDS and cell.mode == "apart"]
    measured = [one for cell in judged if (one := results.measured(cell))]
    if not measured:
        return []
    measured_shares = " and ".join(f"{one.share_text} with k={one.cell.islands}" for one in measured)
    shares = min(measured, key=lambda one: one.share).shares
    verdict = WITHIN_SPREAD if min(shares) <= LEAST_SHARE <= max(shares) else holds_text(min(shares) > LEAST_SHARE)
    verdict += "" if len(measured) == len(JUDGED_ISLANDS) else " so far"
    return [
        f"{verdict}: {shape.label}: DiLoCo trains {measured_shares} of the bare loop's tokens per second (required: {LEAST_SHARE})."
    ]


def _mfu_lines(shape: Shape, cells: Sequence[Cell], results: Results) -> list[str]:
    if shape.name != "m150":
        return []
    used = {BARE: results.bare_mfu(shape)}
    apart = [one for cell in cells if cell.mode == "apart" and (one := results.measured(cell))]
    used |= {f"atoll, k={one.cell.islands}": results.mfu(one) for one in apart}
    listed = ", ".join(f"{name} {mfu:.1%}" for name, mfu in used.items() if mfu is not None)
    products = sorted({tera(peak) for one in (None, *apart) if (peak := results.product_flops_per_s(shape, one))})
    return [f"{shape.label}: model FLOP utilisation of {' and '.join(products)}: {listed}."] if listed and products else []


# --------------------------------------------------------------------------------------------------------- modes compared


def _gain_lines(shape: Shape, cells: Sequence[Cell], results: Results) -> list[str]:
    each = _by_mode(cells, results)
    gains = gains_of(each)
    if not gains:
        return []
    recorded = gains_of(each, "recorded")
    more = f" Compared with recorded passes: {_gains_text(recorded)}." if recorded else ""
    compared = [each[k, mode] for k in gains for mode in MODES if (k, mode) in each]
    holds = holds_text(min(gains.values()) >= LEAST_GAIN)
    return [f"{holds}: {shape.label}: {_gain_text(gains)} (required: {LEAST_GAIN:g}).{more}{_runs_text(compared)}"]


def _filled_lines(shape: Shape, cells: Sequence[Cell], results: Results) -> list[str]:
    """The gain of a stack where one island's batch fills the device. It has no verdict."""
    each = _by_mode(cells, results)
    gains = gains_of(each)
    if not gains:
        return []
    runs = _runs_text([each[k, mode] for k in gains for mode in ("apart", "stacked")])
    return [f"{shape.label}, which fills the device: {_gain_text(gains)}.{runs}"]


def gains_of(each: Mapping[tuple[int, Mode], Measured], over: Mode = "apart") -> dict[int, float]:
    """Tokens per second of a stack over those of another mode, by the number of islands."""
    return {
        k: one.tokens_per_s / each[k, over].tokens_per_s
        for (k, mode), one in each.items()
        if mode == "stacked" and (k, over) in each
    }


def _gain_text(gains: Mapping[int, float]) -> str:
    return f"speed of stacked over one island after the other: {_gains_text(gains)}"


def _gains_text(gains: Mapping[int, float]) -> str:
    return ", ".join(f"{gain:.2f} with k={islands}" for islands, gain in gains.items())


def _choice_lines(shape: Shape, cells: Sequence[Cell], results: Results) -> list[str]:
    """The mode that auto chose, and whether it is the fastest."""
    each = _by_mode(cells, results)
    return [
        _choice_line(f"{shape.label}, k={k}", one, {other: each[k, other] for other in MODES if (k, other) in each})
        for (k, mode), one in each.items()
        if mode == "auto"
    ]


def _choice_line(where: str, one: Measured, others: Mapping[Mode, Measured]) -> str:
    """Compares the cell of auto with those of the named modes."""
    chosen: Mode = one.found["chosen"]["way"]
    why, rate = one.found["chosen"]["why"], human_count(one.tokens_per_s)
    line = f"{where}: together=auto chose {chosen} ({why}) and trains {rate} tokens/s"
    if not others:
        return f"{line}."
    # The cell of `auto` stands for the chosen mode, unless that mode has a cell of its own.
    rivals = {chosen: one, **others}
    taken, fastest = rivals[chosen], max(rivals.values(), key=lambda rival: rival.tokens_per_s)
    overlaps = taken is not fastest and max(taken.rates) >= min(fastest.rates)
    verdict = WITHIN_SPREAD if overlaps else holds_text(taken is fastest)
    named = ", ".join(f"{mode} {human_count(other.tokens_per_s)}" for mode, other in others.items())
    return f"{verdict}: {line}; named modes: {named} (required: the fastest).{_runs_text([one, *others.values()])}"


def _loss_lines(results: Results) -> list[str]:
    """Whether all modes compute the same: the same islands, from the same weights, on the same batches."""
    alike: dict[tuple[Shape, int, int, int], list[Measured]] = {}
    for one in results.all_measured():
        if one.losses:
            cell = one.cell
            alike.setdefault((cell.shape, cell.islands, cell.inner_steps, cell.turns), []).append(one)
    several = [modes for modes in alike.values() if len(modes) > 1]
    if not several:
        return []
    furthest = max(several, key=difference_in_steps)
    cell, losses, difference = furthest[0].cell, furthest[0].losses, difference_in_steps(furthest)
    of_loss = max(difference_of(modes) / min(modes[0].losses) for modes in several)
    return [
        f"{holds_text(difference < 1)}: all modes compute the same within rounding: the losses of a round differ between modes by "
        f"at most {difference:.2f} of the change per step (required: less than one step, the difference of a mode that lost a "
        f"step), over {len(several)} shapes and numbers of islands. The largest difference is with {cell.shape.label}, "
        f"k={cell.islands}, whose loss is between {min(losses):.4f} and {max(losses):.4f} in {len(losses)} rounds of "
        f"{cell.inner_steps} steps. Relative to the loss, modes differ by at most {human_percent(of_loss)}."
    ]


def difference_of(modes: Sequence[Measured]) -> float:
    """The largest difference between two modes' losses of one round."""
    rounds: list[tuple[float, ...]] = list(zip(*(one.losses for one in modes), strict=True))
    return max(max(losses) - min(losses) for losses in rounds)


def difference_in_steps(modes: Sequence[Measured]) -> float:
    """The same, in units of the loss change per step: the range of a mode's losses over its steps."""
    losses, cell = modes[0].losses, modes[0].cell
    step = (max(losses) - min(losses)) / (len(losses) * cell.inner_steps)
    return difference_of(modes) / step if step else math.inf


# ----------------------------------------------------------------------------------------------------------------------- tables


def _by_mode(cells: Sequence[Cell], results: Results) -> dict[tuple[int, Mode], Measured]:
    return {(cell.islands, cell.mode): one for cell in cells if (one := results.measured(cell))}


def _runs_text(compared: Sequence[Measured]) -> str:
    """A warning if the compared cells were measured in several runs."""
    runs = len({one.run for one in compared})
    return f" These cells were measured in {runs} runs, between which the device's speed may change." if runs > 1 else ""


def tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


HEADINGS = [
    "",
    "H",
    "tokens/s",
    "bare loop's",
    "over the bare loop's",
    "FLOP utilisation",
    "outer share",
    "memory",
    "memory before",
]


def sections_of(plan: Plan, results: Results, device: str) -> list[str]:
    """The sections of a record."""
    outcome = bullets(verdicts(results)) or "The cells of the verdicts have not been measured yet."
    tried = {shape: [cell for cell in cells if results.was_tried(cell)] for shape, cells in results.plan.groups.items()}
    groups = [_group(shape, cells, results) for shape, cells in tried.items() if cells or results.bare(shape)]
    missing = [line for shape, cells in plan.groups.items() for line in _missing(shape, cells, tried[shape])]
    otherwise = any(cell not in plan.groups.get(shape, ()) for shape, cells in tried.items() for cell in cells)
    planned = " of the present plan" if otherwise else ""
    left = [f"Not measured yet{planned}: {'; '.join(missing)}."] if missing else []
    return [f"## Outcome\n\n{outcome}", f"## Figures\n\n{_note(plan, results, device)}", *left, *groups]


def _missing(shape: Shape, cells: Sequence[Cell], tried: Sequence[Cell]) -> list[str]:
    """The cells of a shape that have not been measured."""
    labels = [cell.label for cell in cells if cell not in tried]
    if len(labels) == len(cells):
        return [shape.label]
    return [f"{shape.label} with {' and '.join(labels)}"] if labels else []


def _note(plan: Plan, results: Results, device: str) -> str:
    return " ".join(
        [
            f"On {device}, {_processes(results)}. The bare loop and rounds of DiLoCo (H inner steps of every island, and the outer "
            f"step) alternate; medians of {plan.turns} turns, or of fewer with many islands, after a warm-up; ratios turn by turn, "
            f"with their range.",
            "Tokens are random and lie on the device: the time of reading text is not included. Both have fused AdamW and clipping "
            "and, on a GPU, a compiled loss with forward passes in bfloat16, the same for the bare loop and for islands that are "
            "apart. Recorded passes are CUDA graphs, of one island or, stacked, of all islands; auto is the mode that the "
            "simulator measures to be fastest.",
            _large_note(results),
            _product_note(plan, results),
            f"FLOPs: {FLOPS_FORMULA}. Outer share: the share of a round after the inner steps: the exchange, the outer step and "
            f"the simulator's checks.",
            _memory_note(results),
        ]
    )


def _processes(results: Results) -> str:
    runs = results.runs()
    if None in runs:
        return "in one or more processes, one after the other"
    return "in one process" if len(runs) == 1 else f"in {len(runs)} processes, one after the other"


def _large_note(results: Results) -> str:
    stacked = [
        cell for cells in results.plan.presets.values() for cell in cells if cell.mode == "stacked" and results.was_tried(cell)
    ]
    if not stacked:
        return "Large batches are not stacked: they fill the device."
    return "One large batch is stacked for comparison; the others are not, since they fill the device."


def _product_note(plan: Plan, results: Results) -> str:
    against = f"FLOP utilisation is relative to a product of two {plan.matrix} x {plan.matrix} matrices in bfloat16"
    if not results.matrix:
        return f"{against}, not measured yet."
    reached = tera(results.matrix["flops_per_s"])
    if "product_s" not in results.matrix:  # in an older record
        return f"{against}, the fastest of several turns: {reached}."
    return (
        f"{against} in the same process: {reached} in the first. It repeats for {results.matrix['product_s']:g} s, and the "
        f"median of the second half of its turns counts: a device under load is slower than an idle one."
    )


def _memory_note(results: Results) -> str:
    """Older records do not have the pools of recorded passes."""
    pools = any("pool_bytes" in one.found for one in results.all_measured())
    kept = ", with the pools of recorded passes" if pools else ""
    excluded = "" if pools else " Only this includes the working memory of a stack's recorded pass."
    return (
        f"Memory: the peak of allocated bytes during training{kept}; before: up to the end of the first round, compilation "
        f"included.{excluded}"
    )


def _group(shape: Shape, cells: Sequence[Cell], results: Results) -> str:
    rows, bare = [], results.bare(shape)
    products = [results.product_flops_per_s(shape)]
    if bare:
        rate = results.bare_tokens_per_s(shape)
        rows.append([BARE, "-", _count(rate), "-", "1", _percent(results.bare_mfu(shape)), "-", *_memory(bare)])
    for cell in cells:
        one = results.measured(cell)
        if one is None:
            rows.append([cell.label, str(cell.inner_steps), results.skipped(cell), *["-"] * (len(HEADINGS) - 3)])
            continue
        products.append(results.product_flops_per_s(shape, one))
        figures = [
            _count(one.tokens_per_s),
            _count(one.bare_tokens_per_s),
            one.share_text,
            _percent(results.mfu(one)),
            _percent(one.outer_share),
        ]
        rows.append([cell.label, str(cell.inner_steps), *figures, *_memory(one.found)])
    size = f"{human_count(shape.params)} parameters, {shape.flops_per_token / 1e6:.4g} MFLOPs per token."
    later = sorted({product for product in products if product is not None} - {results.matrix.get("flops_per_s")})
    if later:
        some = "partly " if results.matrix.get("flops_per_s") in products else ""
        size += f" Measured {some}in a later process, in which the matrix product reached {' and '.join(map(tera, later))}."
    return f"### {shape.label}\n\n{size}\n\n{markdown_table(HEADINGS, rows)}"


def _count(rate: float | None) -> str:
    return "-" if rate is None else human_count(rate)


def _percent(share: float | None) -> str:
    return "-" if share is None else human_percent(share)


def _memory(found: Mapping[str, Any]) -> list[str]:
    return ["-" if found[kind] is None else human_bytes(found[kind]) for kind in ("peak_bytes", "begin_bytes")]


_COLOURS: dict[Mode, str] = dict(zip((*MODES, "auto"), COLOURS, strict=False))


def figure(results: Results) -> Any:
    """Tokens per second: one panel per model and batch, one bar per number of islands and mode, and a line for the bare loop."""
    bars = {shape: [one for cell in cells if (one := results.measured(cell))] for shape, cells in results.plan.groups.items()}
    shapes = [shape for shape, measured in bars.items() if measured]
    drawn, panels = new_figure(max(1, len(shapes)))
    drawn.set_size_inches(max(7.0, 2.4 * len(shapes)), 4)
    for panel, shape in zip(panels, shapes, strict=False):
        _draw_bars(panel, bars[shape])
        rate = results.bare_tokens_per_s(shape)
        if rate is not None:
            panel.axhline(rate / 1e3, color="#555555", linewidth=1.2, linestyle="--")
        panel.set_title(shape.label, fontsize=11)
        panel.set_xlabel("islands", fontsize=11)
    panels[0].set_ylabel("thousand tokens per second")
    drawn_modes = {one.cell.mode for measured in bars.values() for one in measured}
    for mode, colour in _COLOURS.items():
        if mode in drawn_modes:
            panels[0].bar(0, 0, color=colour, label=mode)
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
            panel.bar(at + width * side, one.tokens_per_s / 1e3, width, color=_COLOURS[one.cell.mode])
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])


def _place(one: Measured) -> int:
    """The position of a bar among those of other modes."""
    return list(_COLOURS).index(one.cell.mode)
