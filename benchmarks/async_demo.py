"""The asynchronous demo over seeds: asynchronous training against DiLoCo on workers of very different speeds.

    python benchmarks/async_demo.py                    seeds 0, 1 and 2
    python benchmarks/async_demo.py --seeds 0 1        other seeds

All runs have the same number of local updates. The naive hub also runs at the other outer rates of the asynchronous paper's grid,
since a bad rate would put it at a disadvantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from cells import FIRST_DEMO, Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from claims import INTERVAL_RULE, Claim, claim_lines, higher, time_line
from curves import CAPTION, save_curves
from record import bullets, markdown_table, open_record, script

SYNC, DELAYED, NAIVE = "demo-diloco", "demo-async", "demo-async-naive"
RATES = (0.03, 0.1, 0.3, 0.7)
"""Outer learning rates of the paper's grid (its Table 5)."""
MOST_LOSS = 0.03
"""Allowed difference of the loss of Delayed Nesterov with Dynamic Local Updates above DiLoCo's."""
MOST_TIME = 0.4
"""Allowed share of DiLoCo's virtual time."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "async_demo")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="outer rates of the naive hub")
    options = parser.parse_args(arguments)
    record, rows = open_record(options, "async_demo"), all_rows((*FIRST_DEMO, *options.set), options.rates)
    kept = {"quiet": options.quiet, "curves": True, "processes": options.processes}
    outcomes = run_rows(rows, options.seeds, record, "asynchronous demo", **kept)
    drawn = dict.fromkeys([SYNC, DELAYED, NAIVE, best_naive(outcomes) or NAIVE])
    save_curves({label: outcomes[label] for label in drawn}, record.plot)
    record.publish(f"The asynchronous demo, {seeds_text(options.seeds)}", report(outcomes), plot=CAPTION)


def all_rows(base: tuple[str, ...], rates: Sequence[float]) -> dict[str, Row]:
    """The rows by label: the recipes, and the naive one at the other rates."""
    rows = {name: Row(recipe=name, base=base) for name in (SYNC, DELAYED, NAIVE)}
    own = rows[NAIVE].run(0)
    for rate in rates:
        row = Row(recipe=NAIVE, base=base, settings=(f"algorithm.outer.lr={rate!r}",), name=f"{NAIVE} at {rate:g}")
        if row.run(0) != own:
            rows[row.name] = row
    return rows


def naive_rates(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Outer rates of the naive rows, by label."""
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
    """The label of the naive row with the lowest mean loss; None if all diverged."""
    losses = {label: loss.mean for label in naive_rates(outcomes) if (loss := outcomes[label].loss) is not None}
    return min(losses, key=lambda label: losses[label]) if losses else None


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    best, rates = best_naive(outcomes), naive_rates(outcomes)
    lines = [sentence(label, outcomes) for label in (DELAYED, NAIVE)]
    if best is not None:
        all_rates = ", ".join(f"{rate:g}" for rate in sorted(rates.values()))
        lines.append(
            f"Of the outer rates {all_rates}, {rates[best]:g} gives the naive hub the lowest mean loss: "
            + ("the recipe's rate." if best == NAIVE else sentence(best, outcomes))
        )
    verdicts = [*claim_lines(claims(best), outcomes), time_line(outcomes, DELAYED, SYNC, MOST_TIME)]
    return [
        f"## Outcome\n\n{bullets(lines)}",
        f"## Claims\n\n{INTERVAL_RULE}\n\n{bullets(verdicts)}",
        f"## Rows\n\n{figure_text.RULE} Staleness: mean number of updates that an arrival had missed. All rows have the same "
        f"number of local updates; a hub stops at the arrival that reaches it, which may be a round "
        f"late.\n\n{_table(outcomes, best)}",
        commands_section(outcomes),
    ]


def sentence(label: str, outcomes: Mapping[str, Outcome]) -> str:
    """Loss and virtual time of a row, compared with the synchronous one."""
    mine, sync = outcomes[label], outcomes[SYNC]
    if mine.loss is None or sync.loss is None:
        return f"{label if mine.loss is None else SYNC} diverged."
    found, verdict = figure_text.difference_text(mine.loss, sync.loss)
    ratio, times = figure_text.time_ratio_text(mine, sync), (figure_text.time_text(mine), figure_text.time_text(sync))
    return (
        f"{label}: loss minus that of {SYNC} {found} (verdict: {verdict}), in {ratio} of its virtual time ({times[0]} against "
        f"{times[1]})."
    )


def claims(best: str | None) -> list[Claim]:
    """Claims about losses."""
    text = f"{DELAYED} ends at most {MOST_LOSS} above {SYNC}."
    naive = dict.fromkeys([NAIVE, best or NAIVE])
    return [
        Claim(text=text, terms=((1.0, DELAYED), (-1.0, SYNC)), below=MOST_LOSS),
        *(higher(f"{label} ends above {SYNC}.", label, SYNC) for label in naive),
    ]


def _table(outcomes: Mapping[str, Outcome], best: str | None) -> str:
    sync = outcomes[SYNC]
    headings = [*figure_text.loss_headings(SYNC), "virtual time", f"over {SYNC}'s"]
    headings += ["tokens", "sent per island", "utilisation", "staleness"]
    rows = []
    for label, outcome in outcomes.items():
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, sync), figure_text.tokens_text(outcome, sync)]
        costs = [figure_text.bytes_text(outcome), figure_text.utilisation_text(outcome), figure_text.staleness_text(outcome)]
        marked = f"{label} (the best rate)" if label == best else label
        rows.append([marked, *figure_text.loss_columns(outcome, sync), *time, *costs])
    return markdown_table(headings, rows)


if __name__ == "__main__":
    script(main)
