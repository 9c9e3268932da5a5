"""What was asked about islands on a GPU, and whether it holds here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from atoll.telemetry.units import human_count, human_percent
from gpu_found import BARE, Found, Measured
from gpu_plan import WAYS, Cell, Shape, Way

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
    # A way that nobody was told to take was measured where it was chosen.
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
