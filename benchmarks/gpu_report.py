"""Verdicts, tables and a plot of what was measured on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from gpu_plan import FLOPS_FORMULA, WAYS, Cell, Plan, Shape, Way
from gpu_results import BARE, Found, Measured
from record import markdown_table

LEAST_SHARE, LEAST_GAIN = 0.97, 2.0
"""Of the bare loop's tokens per second that islands reach, and times that a stack is faster than one island after the other."""
ASKED_ISLANDS = (4, 8)
WITHIN_SPREAD = "**within the spread**"


def verdicts(found: Found) -> list[str]:
    """What was asked, and whether it holds here."""
    plan = found.plan
    lines = [line for shape, cells in plan.presets.items() for line in _share_lines(shape, cells, found)]
    lines += [line for shape, cells in plan.small.items() for line in _gain_lines(shape, cells, found)]
    lines += [line for shape, cells in plan.presets.items() for line in _filled_lines(shape, cells, found)]
    lines += [line for shape, cells in plan.groups.items() for line in _choice_lines(shape, cells, found)]
    lines += _loss_lines(found)
    return lines + [line for shape, cells in plan.presets.items() for line in _mfu_lines(shape, cells, found)]


# --------------------------------------------------------------------------------------------------------- against the bare loop


def _share_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    asked = [cell for cell in cells if cell.islands in ASKED_ISLANDS and cell.way == "apart"]
    measured = [one for cell in asked if (one := found.measured(cell))]
    if not measured:
        return []
    told = " and ".join(f"{one.share_words} with k={one.cell.islands}" for one in measured)
    shares = min(measured, key=lambda one: one.share).shares
    judged = WITHIN_SPREAD if min(shares) <= LEAST_SHARE <= max(shares) else _holds(min(shares) > LEAST_SHARE)
    judged += "" if len(measured) == len(ASKED_ISLANDS) else " so far"
    return [f"{judged}: {shape.words}: DiLoCo trains {told} of the bare loop's tokens per second (asked: {LEAST_SHARE})."]


def _mfu_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    if shape.name != "m150":
        return []
    used = {BARE: found.bare_mfu(shape)}
    apart = [one for cell in cells if cell.way == "apart" and (one := found.measured(cell))]
    used |= {f"atoll, k={one.cell.islands}": found.mfu(one) for one in apart}
    told = ", ".join(f"{name} {mfu:.1%}" for name, mfu in used.items() if mfu is not None)
    products = sorted({tera(peak) for one in (None, *apart) if (peak := found.product_flops_per_s(shape, one))})
    return [f"{shape.words}: model FLOP utilisation of {' and '.join(products)}: {told}."] if told and products else []


# ---------------------------------------------------------------------------------------------------------- ways against others


def _gain_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    each = _by_way(cells, found)
    gains = gains_of(each)
    if not gains:
        return []
    told = f"{shape.words}: stacked is so many times as fast as one island after the other: {_gains_words(gains)}"
    recorded = gains_of(each, "recorded")
    more = f" Where one island's passes are recorded, too: {_gains_words(recorded)}." if recorded else ""
    compared = [each[k, way] for k in gains for way in WAYS if (k, way) in each]
    holds = _holds(min(gains.values()) >= LEAST_GAIN)
    return [f"{holds}: {told} (asked: {LEAST_GAIN:g}).{more}{_runs_words(compared)}"]


def _filled_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    """What a stack gains where one island's batch fills the device. Nothing is asked of it."""
    each = _by_way(cells, found)
    gains = gains_of(each)
    if not gains:
        return []
    runs = _runs_words([each[k, way] for k in gains for way in ("apart", "stacked")])
    told = f"stacked is so many times as fast as one island after the other: {_gains_words(gains)}"
    return [f"{shape.words}, which fills the device: {told}.{runs}"]


def gains_of(each: Mapping[tuple[int, Way], Measured], over: Way = "apart") -> dict[int, float]:
    """How many times as fast a stack is as another way, by the number of islands."""
    return {
        k: one.tokens_per_s / each[k, over].tokens_per_s for (k, way), one in each.items() if way == "stacked" and (k, over) in each
    }


def _gains_words(gains: Mapping[int, float]) -> str:
    return ", ".join(f"{gain:.2f} with k={islands}" for islands, gain in gains.items())


def _choice_lines(shape: Shape, cells: Sequence[Cell], found: Found) -> list[str]:
    """What was chosen by measuring, and whether it is the fastest."""
    each = _by_way(cells, found)
    return [
        _choice_line(f"{shape.words}, k={k}", one, {other: each[k, other] for other in WAYS if (k, other) in each})
        for (k, way), one in each.items()
        if way == "auto"
    ]


def _choice_line(where: str, one: Measured, others: Mapping[Way, Measured]) -> str:
    """Of a cell that was left to be chosen, and of those to whom the way was told."""
    chosen: Way = one.found["chosen"]["way"]
    why, rate = one.found["chosen"]["why"], human_count(one.tokens_per_s)
    line = f"{where}: together=auto chose {chosen} ({why}) and trains {rate} tokens/s"
    if not others:
        return f"{line}."
    # The cell of `auto` stands for the chosen way, unless that way has a cell of its own.
    rivals = {chosen: one, **others}
    taken, fastest = rivals[chosen], max(rivals.values(), key=lambda rival: rival.tokens_per_s)
    overlaps = taken is not fastest and max(taken.rates) >= min(fastest.rates)
    judged = WITHIN_SPREAD if overlaps else _holds(taken is fastest)
    told = ", ".join(f"{way} {human_count(other.tokens_per_s)}" for way, other in others.items())
    return f"{judged}: {line}; asked for by name: {told} (asked: the fastest).{_runs_words([one, *others.values()])}"


def _loss_lines(found: Found) -> list[str]:
    """Whether all ways come to the same numbers: the same islands, from the same weights, on the same batches."""
    alike: dict[tuple[Shape, int, int, int], list[Measured]] = {}
    for one in found.all_measured():
        if one.losses:
            cell = one.cell
            alike.setdefault((cell.shape, cell.islands, cell.inner_steps, cell.turns), []).append(one)
    several = [ways for ways in alike.values() if len(ways) > 1]
    if not several:
        return []
    furthest = max(several, key=difference_in_steps)
    cell, losses, difference = furthest[0].cell, furthest[0].losses, difference_in_steps(furthest)
    of_loss = max(difference_of(ways) / min(ways[0].losses) for ways in several)
    return [
        f"{_holds(difference < 1)}: All ways give the same numbers within rounding: losses of a round differ between ways by "
        f"{difference:.2f} of what a step moves them at most (asked: less than one step, which is what a way would differ by "
        f"that lost one), over {len(several)} shapes and numbers of islands. It is most with {cell.shape.words}, "
        f"k={cell.islands}, whose loss lies between {min(losses):.4f} and {max(losses):.4f} in {len(losses)} rounds of "
        f"{cell.inner_steps} steps. As a share of the loss ways differ by {human_percent(of_loss)} at most."
    ]


def difference_of(ways: Sequence[Measured]) -> float:
    """The greatest between any two ways' losses of one round."""
    rounds: list[tuple[float, ...]] = list(zip(*(one.losses for one in ways), strict=True))
    return max(max(losses) - min(losses) for losses in rounds)


def difference_in_steps(ways: Sequence[Measured]) -> float:
    """The same, in what a step moves the loss: how far apart a way's rounds are, over all steps."""
    losses, cell = ways[0].losses, ways[0].cell
    step = (max(losses) - min(losses)) / (len(losses) * cell.inner_steps)
    return difference_of(ways) / step if step else math.inf


# ------------------------------------------------------------------------------------------------------------------------ words


def _by_way(cells: Sequence[Cell], found: Found) -> dict[tuple[int, Way], Measured]:
    return {(cell.islands, cell.way): one for cell in cells if (one := found.measured(cell))}


def _runs_words(compared: Sequence[Measured]) -> str:
    """A warning, where cells that are compared were measured in several runs."""
    runs = len({one.run for one in compared})
    return f" These cells were measured in {runs} runs, between which a device may change." if runs > 1 else ""


def _holds(it_does: bool) -> str:
    return "**holds here**" if it_does else "**does not hold here**"


def tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


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
