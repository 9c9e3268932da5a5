"""The asynchronous paper's tables and ablations on one small workload, and which of its claims hold there.

    python benchmarks/async_ablations.py                           all of them, three seeds: about twenty minutes on two cores
    python benchmarks/async_ablations.py --only level --only k     some of them
    python benchmarks/async_ablations.py --quick                   smoke test of all of them

Rows are in `async_rows.py`. Tables go into the record and, after a complete run, into docs/async_local_sgd.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import figure_text
from ablations import Group, Study
from async_rows import (
    DDP,
    DELAYED,
    DILOCO,
    NAIVE,
    ONE,
    QUICK,
    SAME_TOKENS,
    SYNC,
    TOY_ASYNC,
    TOY_SYNC,
    Plan,
    groups,
    pair,
    standing,
)
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure, time_unit
from cells import Outcome, seeds_text
from claims import Claim, alike, costs, gains_little, higher, lower, without_scatter
from record import script

_LEVELS = {"none": (41.35, 44.27, 41.27), "slight": (41.35, 44.38, 41.27), "moderate": (41.35, 44.29, 41.09)}
_LEVELS |= {"very": (41.35, 44.27, 41.13)}
_COUNTS = {4: (41.35, 44.27, 41.13), 8: (41.23, 44.23, 41.02), 16: (41.25, 44.23, 40.98)}
_BATCHES = {4: 42.47, 8: 41.28, 16: 40.60}
_LARGE = (24.55, 25.64, 24.53)
"""The paper's perplexities of DiLoCo, naive and DN+DyLU. `_BATCHES`: of the larger batch."""
_BOUND = 0.5
"""Per cent of perplexity that "no worse" and "no help" allow."""


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims about these rows. A row in several tables has one claim, under its level."""
    places = {level: (f"at the level {level}", _LEVELS[level]) for level in plan.levels}
    places |= {f"k={count}": (f"with {count} workers", _COUNTS[count]) for count in plan.counts if count != plan.islands}
    places["large"] = ("with a larger model", _LARGE)
    return [
        *(_naive_is_worse(label, *place) for label, place in places.items()),
        alike(
            "Naive is as bad with equal workers (44.27 at none and at very; bound 1 %).",
            f"{plan.levels[0]}, {NAIVE}",
            f"{plan.levels[-1]}, {NAIVE}",
            1.0,
        ),
        *(_delayed_is_no_worse(label, *place) for label, place in places.items()),
        *(_against_batch(count) for count in plan.counts),
        *remedies(),
        *pairs(),
        alike("c=0.1 ends as c=0 does (41.16 against 41.13; bound 1 %).", "c=0.1", "c=0", 1.0),
        higher("The toy: with momentum, asynchronous is worse than synchronous (figure 9).", TOY_ASYNC, TOY_SYNC),
    ]


def _naive_is_worse(label: str, where: str, figures: tuple[float, float, float]) -> Claim:
    sync, naive, _ = figures
    return higher(f"Naive is worse than sync {where} ({_against(naive, sync)}).", f"{label}, {NAIVE}", f"{label}, {SYNC}")


def _delayed_is_no_worse(label: str, where: str, figures: tuple[float, float, float]) -> Claim:
    sync, _, delayed = figures
    text = f"{DELAYED} is no worse than sync {where} ({_against(delayed, sync)}; bound {_BOUND} %)."
    return costs(text, f"{label}, {DELAYED}", f"{label}, {SYNC}", _BOUND)


def _against_batch(count: int) -> Claim:
    """In the paper DN+DyLU is better up to 8 workers; with 16 the larger batch is better."""
    delayed, batch = _COUNTS[count][2], _BATCHES[count]
    better, one, two = delayed < batch, f"k={count}, {DELAYED}", f"k={count}, {count}x batch"
    text = f"{DELAYED} is {'better' if better else 'worse'} than {count} times the batch ({_against(delayed, batch)})."
    return (lower if better else higher)(text, one, two, (ONE, two))


def _against(one: float, two: float) -> str:
    """
    >>> _against(44.27, 41.35)
    '44.27 against 41.35, +7.1 %'
    """
    return f"{one:.2f} against {two:.2f}, {100 * (one / two - 1):+.1f} %"


def remedies() -> list[Claim]:
    """Claims about the remedies that the paper compares, each on top of naive."""
    known = {"Polynomial": "the polynomial discount", "Polynomial, 10": "the one with a threshold", "compensation": "compensation"}
    return [
        lower("A polynomial discount helps naive (marginally).", "Polynomial", NAIVE),
        gains_little(f"A threshold adds nothing to it (bound {_BOUND} %).", "Polynomial, 10", "Polynomial", _BOUND),
        gains_little(f"Delay compensation does not help naive (bound {_BOUND} %).", "compensation", NAIVE, _BOUND),
        *(lower(f"A buffer is the best known remedy: better than {name}.", "buffer", label) for label, name in known.items()),
        lower("Delayed Nesterov alone is better than a buffer, without DyLU or a window for either.", "DN", "buffer"),
        lower(f"{DELAYED} is better than a buffer with DyLU and the same window.", DELAYED, "buffer+DyLU+window"),
        lower(f"{DELAYED} is better than outer SGD with DyLU and the same window.", DELAYED, "outer SGD+DyLU+window"),
    ]


def pairs() -> list[Claim]:
    """Claims about pairs of inner and outer rules."""
    (sgd, sgd_async), (nesterov, nesterov_async) = pair("AdamW", "SGD"), pair("AdamW", "Nesterov")
    adam, adam_async = pair("AdamW", "Adam")
    others = {"SGD": sgd_async, "momentum": pair("AdamW", "Momentum")[1]}
    return [
        lower("With outer SGD, asynchronous is better than synchronous.", sgd_async, sgd),
        higher("With outer Nesterov, asynchronous is worse than synchronous.", nesterov_async, nesterov),
        lower("Outer Nesterov is better than outer Adam, synchronous.", nesterov, adam),
        lower("Outer Nesterov is better than outer Adam, at every arrival.", nesterov_async, adam_async),
        *(
            alike(f"At every arrival, outer Nesterov and outer {name} end alike (bound 1 %).", nesterov_async, label, 1.0)
            for name, label in others.items()
        ),
        without_scatter(lower("Inner AdamW is better than inner SGD, with outer Nesterov.", nesterov, pair("SGD", "Nesterov")[0])),
    ]


def introduction(plan: Plan, seeds: Sequence[int], default: Outcome) -> str:
    diloco = next(setting for setting in plan.base(DILOCO) if setting.startswith("algorithm="))
    return (
        f"{figure_text.decoder_text(default)} on "
        f"{plan.islands} workers of very different speeds: {plan.warm_start} steps of warm start, then "
        f"{plan.steps} per worker, {plan.steps * plan.islands} local updates in total; {seeds_text(seeds)}. The command runs "
        f"{DELAYED}, Delayed Nesterov with Dynamic Local Updates. A row adds the settings it shows (a row of recipe {DILOCO} has "
        f"`{diloco}` instead, and one of recipe {DDP} has `algorithm=DDP()`):\n\n```\n{default.row.command}\n```\n\n"
        f"{figure_text.RULE}\n\nTokens include the warm start. A hub stops at the arrival that reaches the number of local "
        f"updates, which may be a round late; the verdict has the ratio of tokens only if they differ by more than "
        f"{100 * SAME_TOKENS:g} %. Bytes sent are the mean per worker. The last column is the virtual time over that of "
        f"synchronous training on the same workers."
    )


def plot_levels(groups: Sequence[Group], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss and virtual time of the three methods by level."""
    group = next((group for group in groups if group.name == "level"), None)
    if group is None:
        return None
    levels = [label.removesuffix(f", {SYNC}") for label in group.rows if label.endswith(f", {SYNC}")]
    save_figure(lambda found: _levels_figure(levels, found), outcomes, path)
    return "loss and virtual time by level"


def _levels_figure(levels: Sequence[str], outcomes: Mapping[str, Outcome]) -> Any:
    """Means with bars for the range; methods are side by side, so that bars do not cover each other."""
    figure, (losses, times) = new_figure(2)
    longest_s = max((outcomes[f"{level}, {SYNC}"].mean("virtual_time_s") or 0.0 for level in levels), default=0.0)
    unit, unit_s = time_unit(longest_s)
    for number, (method, marker) in enumerate(((SYNC, "s"), (NAIVE, "^"), (DELAYED, "o"))):
        colour, style = COLOURS[number], {"linestyle": "", "marker": marker, "markersize": 6}
        for at, level in enumerate(levels):
            outcome, place, label = outcomes[f"{level}, {method}"], at + 0.14 * (number - 1), None if at else method
            if outcome.loss is not None:
                loss = outcome.loss
                bars = [[loss.mean - loss.low], [loss.high - loss.mean]]
                losses.errorbar(place, loss.mean, yerr=bars, color=colour, capsize=3, label=label, **style)
            if (time_s := outcome.mean("virtual_time_s")) is not None:
                times.plot([place], [time_s / unit_s], color=colour, label=label, **style)
    for panel in (losses, times):
        panel.set_xticks(range(len(levels)), levels)
        panel.set_xlabel("heterogeneity of the workers")
        panel.grid(visible=False, axis="x")
    losses.set_ylabel("validation loss (bars: over seeds)")
    times.set_ylabel(f"virtual time ({unit})")
    times.set_ylim(bottom=0)
    times.legend(frameon=False, fontsize=11)
    return figure


STUDY = Study(
    name="async_ablations",
    title="Asynchronous Local-SGD's ablations",
    about=__doc__ or "",
    page="async_local_sgd.md",
    plan=Plan(),
    quick=QUICK,
    groups=groups,
    standing=standing,
    introduction=introduction,
    claims=claims,
    plot=plot_levels,
    share="of sync's",
)


def main(arguments: Sequence[str] | None = None) -> None:
    STUDY.main(arguments)


if __name__ == "__main__":
    script(main)
