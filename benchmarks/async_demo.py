"""The asynchronous demo over seeds: asynchronous training against DiLoCo on workers of very different speeds.

    python benchmarks/async_demo.py                    seeds 0, 1 and 2
    python benchmarks/async_demo.py --seeds 0 1        other seeds

Every run takes as many local updates. The naive hub is also tried at the other outer rates of the asynchronous paper's grid, so
that it is not beaten for a rate that does not suit it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import figure_text
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure, time_unit
from cells import LAN, Outcome, Row, carry_out
from claims import Claim, judged
from record import Record, default_path, markdown_table, script

SYNC, DELAYED, NAIVE = "demo-diloco", "demo-async", "demo-async-naive"
RATES = (0.03, 0.1, 0.3, 0.7)
"""Outer learning rates of the paper's grid (its Table 5)."""
MOST_LOSS = 0.03
"""By how much Delayed Nesterov with Dynamic Local Updates may end above DiLoCo."""
MOST_TIME = 0.4
"""What share of DiLoCo's virtual time it may take."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    rows = all_rows((*LAN, *options.set), options.rates)
    record = Record(options.record or default_path("async_demo"))
    done = carry_out(list(rows.values()), options.seeds, record, "asynchronous demo", quiet=options.quiet, curves=True)
    outcomes = {label: done[row] for label, row in rows.items()}
    sections = report(outcomes, rows)
    save_figure(curves_figure, _drawn(outcomes), record.plot)
    title = f"The demo without waiting, over seeds {', '.join(map(str, options.seeds))}"
    readme = record.write(title, [*sections, f"![loss against virtual time]({record.plot.name})"])
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def all_rows(base: tuple[str, ...], rates: Sequence[float]) -> dict[str, Row]:
    """The rows by label: the recipes, and the naive one at each rate that is not its own."""
    rows = {name: Row(recipe=name, base=base) for name in (SYNC, DELAYED, NAIVE)}
    own = rows[NAIVE].run(0)
    for rate in rates:
        row = Row(recipe=NAIVE, base=base, settings=(f"algorithm.outer.lr={rate!r}",), name=f"{NAIVE} at {rate:g}")
        if row.run(0) != own:
            rows[row.name] = row
    return rows


def naive_rates(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """The outer rates of the naive rows, by label."""
    return {label: outer_rate(one.row) for label, one in outcomes.items() if one.row.recipe == NAIVE}


def outer_rate(row: Row) -> float:
    """
    >>> outer_rate(Row(recipe="demo-async-naive"))
    0.7
    """
    algorithm: Any = row.run(0).algorithm
    rate: float = algorithm.outer.lr
    return rate


def best_naive(outcomes: Mapping[str, Outcome]) -> str | None:
    """The label of the naive row whose mean loss is lowest; None if all of them diverged."""
    losses = {label: loss.mean for label in naive_rates(outcomes) if (loss := outcomes[label].loss) is not None}
    return min(losses, key=lambda label: losses[label]) if losses else None


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome], rows: Mapping[str, Row]) -> list[str]:
    """The sections of the record."""
    best, rates = best_naive(outcomes), naive_rates(outcomes)
    told = [sentence(label, outcomes) for label in (DELAYED, NAIVE)]
    if best is not None:
        tried = ", ".join(f"{rate:g}" for rate in sorted(rates.values()))
        told.append(
            f"Of the outer rates {tried} the naive hub's best, by the mean over seeds, is {rates[best]:g}: "
            + ("its recipe's own." if best == NAIVE else sentence(best, outcomes))
        )
    asked = [line for claim in claims(best) if (line := judged(claim, outcomes)) is not None]
    return [
        "## Outcome\n\n" + _listed(told),
        "## What was asked\n\nA claim about losses holds if all of the 95 % interval is where it says.\n\n"
        + _listed([*asked, time_line(outcomes)]),
        f"## Rows\n\n{figure_text.RULE} Staleness: updates that an arrival had missed, on average. All rows take as many local "
        f"updates; a hub stops with the arrival that reaches them, up to a round later.\n\n{_table(outcomes, best)}",
        "## Commands\n\n```\n" + "\n".join(dict.fromkeys(row.command for row in rows.values())) + "\n```",
    ]


def sentence(label: str, outcomes: Mapping[str, Outcome]) -> str:
    """Where a row ends, and in what time."""
    mine, sync = outcomes[label], outcomes[SYNC]
    if mine.loss is None or sync.loss is None:
        return f"{label if mine.loss is None else SYNC} diverged."
    found, verdict = figure_text.difference_text(mine.loss, sync.loss)
    words = {
        "none": "these seeds show no difference",
        "lower": "lower",
        "higher": "higher",
        "one seed": "one seed only, so no verdict",
    }
    ratio, times = figure_text.time_ratio_text(mine, sync), (figure_text.time_text(mine), figure_text.time_text(sync))
    return f"{label} ends {found} from {SYNC} ({words[verdict]}) in {ratio} of its virtual time ({times[0]} against {times[1]})."


def claims(best: str | None) -> list[Claim]:
    """What is asked of the losses."""
    text = f"{DELAYED} ends at most {MOST_LOSS} above {SYNC}."
    asked = [Claim(text=text, terms=((1.0, DELAYED), (-1.0, SYNC)), below=MOST_LOSS)]
    naive = [NAIVE] if best in (None, NAIVE) else [NAIVE, best]
    return asked + [Claim(text=f"{label} ends above {SYNC}.", terms=((1.0, label), (-1.0, SYNC)), above=0.0) for label in naive]


def time_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether the time is within what is allowed. Virtual time is the same for every seed, so there is nothing to spread."""
    ratio = figure_text.time_ratio(outcomes[DELAYED], outcomes[SYNC])
    if ratio is None:
        return f"**diverged**: {DELAYED} takes at most {MOST_TIME} of {SYNC}'s virtual time."
    verdict = "holds here" if ratio <= MOST_TIME else "does not hold here"
    return f"**{verdict}**: {DELAYED} takes at most {MOST_TIME} of {SYNC}'s virtual time. It takes {ratio:.3f}."


def _table(outcomes: Mapping[str, Outcome], best: str | None) -> str:
    sync = outcomes[SYNC]
    headings = ["row", "val loss", "least to greatest", f"against {SYNC}", "verdict", "virtual time", f"of {SYNC}'s"]
    headings += ["tokens", "sent per island", "busy", "staleness"]
    rows = []
    for label, outcome in outcomes.items():
        against = ("-", "-") if outcome is sync else figure_text.difference_text(outcome.loss, sync.loss)
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, sync), figure_text.tokens_text(outcome, sync)]
        costs = [figure_text.bytes_text(outcome), figure_text.busy_text(outcome), figure_text.staleness_text(outcome)]
        marked = f"{label} (the best rate)" if label == best else label
        rows.append([marked, *figure_text.loss_text(outcome), *against, *time, *costs])
    return markdown_table(headings, rows)


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


# --------------------------------------------------------------------------------------------------------------- the plot


def _drawn(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The rows that are drawn, each once: the naive one at its own rate, and at its best if that is another."""
    best = best_naive(outcomes)
    labels = dict.fromkeys([SYNC, DELAYED, NAIVE, best or NAIVE])
    return {label: outcomes[label] for label in labels if outcomes[label].curves}


def curves_figure(outcomes: Mapping[str, Outcome]) -> Any:
    """Loss against virtual time, a line per seed."""
    longest_s = max((point[0] for outcome in outcomes.values() for curve in outcome.curves for point in curve), default=1.0)
    unit, unit_s = time_unit(longest_s)
    figure, (panel,) = new_figure(1)
    figure.set_size_inches(7, 4.4)
    for colour, (label, outcome) in zip(COLOURS, outcomes.items(), strict=False):
        for number, curve in enumerate(outcome.curves):
            times, losses = [time_s / unit_s for time_s, _, _ in curve], [loss for _, _, loss in curve]
            panel.plot(times, losses, color=colour, linewidth=1.4, alpha=0.8, label=None if number else label)
            panel.plot(times[-1:], losses[-1:], color=colour, marker="o", markersize=4)
    panel.set_xlabel(f"virtual time ({unit})")
    panel.set_ylabel("validation loss")
    if outcomes:
        panel.legend(frameon=False, fontsize=10, title="a line per seed, to its end")
    return figure


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="outer rates of the naive hub")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_async_demo")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
