"""Four islands, one four times slower: ACCO with free batches against data-parallel training with equally large batches.

    python benchmarks/acco_unequal.py                 seeds 0, 1 and 2, two cells in parallel
    python benchmarks/acco_unequal.py --seeds 0 1     other seeds

The demo's model, text and links, with half its batch: ACCO's free batch is 3.25 batches of each island here, and with the demo's 16
sequences too few updates would remain (docs/log.md has that result). ACCO accumulates what the islands compute during an exchange.
A short run measures how much that is. DDP then accumulates the nearest whole number of batches, so that both have updates of equal
size. Both read the same number of tokens, with the same learning rate per sample: the same warm-up and the same cosine over the
same tokens. The peak rate is DDP's best of a few on the first seed. Two more rows: DDP with an exchange after every batch, and ACCO
without overlap while the rate warms up (`algorithm.warmup`). No verdict uses the latter: its early updates are smaller than DDP's,
which helps it, and DDP's accumulation is fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from atoll.telemetry.units import human_percent
from cells import FIRST_DEMO, Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from claims import Claim, claim_lines, mean_loss_line, time_line
from curves import CAPTION, save_curves
from record import bullets, holds_text, markdown_table, open_record, script

ACCO, WARM, DDP, OFTEN = "ACCO, free", "ACCO, free, warm-up", "DDP, accumulating", "DDP, every batch"
STEP_TIMES_S = (1.0, 1.0, 1.0, 4.0)
BATCH = ("train.batch_size=8", "train.warm_start_steps=450")
"""Half the demo's batch in twice its steps: the same tokens."""
STEPS = 1800
RATES = (0.025, 0.05, 0.1)
MOST_LOSS, MOST_TIME, SAME_BATCH = 0.03, 0.45, 0.1
"""Allowed for ACCO: loss above DDP's, share of its virtual time, and relative difference of samples per update."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    record = open_record(options, "acco_unequal")
    plan = Plan(steps=options.steps, base=(*FIRST_DEMO, *options.set))
    kept = {"quiet": options.quiet, "curves": True, "islands": True, "processes": options.processes}

    probe = run_rows({ACCO: plan.probe()}, options.seeds[:1], record, "samples per update of ACCO", **kept)[ACCO]
    measured = samples_per_update(probe, plan)
    accumulation = max(1, round(measured))
    tried = {rate: plan.ddp(rate, accumulation) for rate in options.rates}
    found = run_rows(tried, options.seeds[:1], record, "DDP's learning rate", **kept)
    losses = {rate: outcome.loss.mean for rate, outcome in found.items() if outcome.loss is not None}
    best = min(losses, key=lambda rate: losses[rate], default=options.rates[0])
    rows = {ACCO: plan.acco(best), DDP: tried[best], OFTEN: plan.ddp(best, 1), WARM: plan.acco(best, warm=True)}
    outcomes = run_rows(rows, options.seeds, record, "ACCO and DDP", **kept)
    sections = report(outcomes, plan, measured=measured, accumulation=accumulation, losses=losses, best=best)
    save_curves(outcomes, record.plot)
    title = f"Four islands, one four times slower, {seeds_text(options.seeds)}"
    record.publish(title, sections, plot=CAPTION, docs=(options.docs, "acco_unequal"))


class Plan:
    """The rows.

    Args:
        steps: mean batches per island.
        base: further settings of every row.
    """

    def __init__(self, *, steps: int, base: tuple[str, ...]) -> None:
        self.steps = steps
        islands = ",".join(map(str, STEP_TIMES_S))
        self.base = (f"cluster.islands={len(STEP_TIMES_S)}", f"cluster.step_time_s=[{islands}]", *BATCH, *base)

    @property
    def warmup(self) -> int:
        """Of the learning rate, and of ACCO in its row with a warm-up, in batches of each island."""
        return max(1, min(120, self.steps // 4))

    def acco(self, rate: float, *, warm: bool = False) -> Row:
        """Islands compute until their exchange is complete. Learning rate and end of the run depend on samples."""
        more = (f"algorithm.warmup={self.warmup}",) if warm else ()
        return self._row(WARM if warm else ACCO, "demo-acco-free", rate, batches=1, steps=self.steps, more=more)

    def ddp(self, rate: float, accumulation: int) -> Row:
        """The same samples, with this many batches per island and update."""
        settings = () if accumulation == 1 else (f"algorithm.accumulation={accumulation}",)
        label = f"{OFTEN if accumulation == 1 else DDP}, at {rate:g}"
        return self._row(label, "demo-ddp", rate, batches=accumulation, steps=round(self.steps / accumulation), more=settings)

    def probe(self) -> Row:
        """A short run of ACCO: how much an island computes does not depend on the learning rate."""
        return self._row("probe", "demo-acco-free", RATES[0], batches=1, steps=min(2 * self.warmup, self.steps))

    def _row(self, label: str, recipe: str, rate: float, *, batches: int, steps: int, more: tuple[str, ...] = ()) -> Row:
        warmup = max(1, round(self.warmup / batches))  # in updates
        lr = f"Cosine(lr={rate!r},steps={steps},warmup={warmup},floor={rate / 40!r})"
        rule = f"algorithm.optimizer=AdamW(lr={lr},betas=[0.9,0.95],weight_decay=0.1)"  # the Run's optimizer trains the warm start
        return Row(recipe=recipe, base=self.base, settings=(f"train.steps={steps}", *more, rule), name=label)

    def batch_tokens(self, row: Row) -> int:
        """Tokens of one batch of each island."""
        run: Any = row.run(0)
        tokens: int = run.cluster.islands * run.train.batch_size * run.data.seq_len
        return tokens


def samples_per_update(outcome: Outcome, plan: Plan) -> float:
    """The mean, in batches of each island."""
    tokens, updates = outcome.mean("tokens"), outcome.mean("outer_steps")
    return tokens / updates / plan.batch_tokens(outcome.row) if tokens and updates else 0.0


# ------------------------------------------------------------------------------------------------------------- the report


def report(
    outcomes: Mapping[str, Outcome],
    plan: Plan,
    *,
    measured: float,
    accumulation: int,
    losses: Mapping[float, float],
    best: float,
) -> list[str]:
    """The sections of the record."""
    claim = Claim(text=f"{ACCO} ends at most {MOST_LOSS} above {DDP}.", terms=((1.0, ACCO), (-1.0, DDP)), below=MOST_LOSS)
    sizes = {label: samples_per_update(one, plan) for label, one in outcomes.items()}
    verdicts = [time_line(outcomes, ACCO, DDP, MOST_TIME), mean_loss_line(outcomes, ACCO, DDP, MOST_LOSS), batch_line(sizes)]
    tried = ", ".join(f"{rate:g} ends at {loss:.4f}" for rate, loss in losses.items()) or "all diverged"
    return [
        f"## Outcome\n\n{bullets([*verdicts, *claim_lines([claim], outcomes)])}",
        f"## Setting\n\nIn a short run ACCO commits {measured:.2f} batches per island and update, so DDP accumulates "
        f"{accumulation}: both have updates of about the same size. Both have the same learning rate per sample. The peak rate is "
        f"DDP's best on the first seed: {tried}. Used: {best:g}.",
        f"## With a warm-up\n\n{warm_text(outcomes, plan, accumulation)}",
        f"## Rows\n\n{figure_text.RULE} Batches: mean per island and update.\n\n{table(outcomes, sizes)}",
        "## Idle time\n\nShares of each island's time, and its batches, mean over seeds. Hidden: the share of its exchanges' time "
        f"during which it computed.\n\n{idle_table(outcomes)}",
        commands_section(outcomes),
    ]


def warm_text(outcomes: Mapping[str, Outcome], plan: Plan, accumulation: int) -> str:
    """About the row with a warm-up."""
    difference, verdict = figure_text.difference_text(outcomes[WARM].loss, outcomes[DDP].loss)
    ratio = figure_text.time_ratio_text(outcomes[WARM], outcomes[DDP])
    return (
        f"In the row with a warm-up ACCO's first {plan.warmup} commits have no overlap and one batch per island, where DDP's have "
        f"{accumulation}. So ACCO starts with more and smaller updates, **which helps it**. DDP cannot have the same ramp, since "
        f"its accumulation is fixed, so no verdict uses this row. Its loss minus that of {DDP}: {difference} (verdict: {verdict}), "
        f"in {ratio} of its virtual time."
    )


def batch_line(sizes: Mapping[str, float]) -> str:
    """Whether updates of both have about the same size.

    >>> batch_line({ACCO: 3.25, DDP: 3.0})
    '**holds here**: samples per update agree within 10 %: 3.25 and 3.00 batches per island.'
    """
    acco, ddp = sizes[ACCO], sizes[DDP]
    holds = holds_text(bool(ddp) and abs(acco / ddp - 1) <= SAME_BATCH)
    return f"{holds}: samples per update agree within {human_percent(SAME_BATCH)}: {acco:.2f} and {ddp:.2f} batches per island."


def table(outcomes: Mapping[str, Outcome], sizes: Mapping[str, float]) -> str:
    reference = outcomes[DDP]
    headings = [*figure_text.loss_headings(DDP), "updates", "batches", "tokens"]
    headings += ["virtual time", "over DDP's", "sent per island", "utilisation"]
    rows = []
    for label, outcome in outcomes.items():
        work = [figure_text.updates_text(outcome), f"{sizes[label]:.2f}", figure_text.tokens_text(outcome, reference)]
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, reference)]
        costs = [figure_text.bytes_text(outcome), figure_text.utilisation_text(outcome)]
        rows.append([label, *figure_text.loss_columns(outcome, reference), *work, *time, *costs])
    return markdown_table(headings, rows)


def idle_table(outcomes: Mapping[str, Outcome]) -> str:
    """One line per row and island."""
    rows = []
    for label, outcome in outcomes.items():
        for island, step_s in enumerate(STEP_TIMES_S):
            times = [seed[island] for seed in outcome.islands]
            if not times:
                continue
            total = {name: sum(each[name] for each in times) for name in times[0]}
            shares = [total[name] / total["present_s"] for name in ("computed_s", "talked_s", "waited_s")]
            hidden = human_percent(total["hidden_s"] / total["exchanged_s"]) if total["exchanged_s"] else "-"
            batches = f"{total['batches'] / len(times):.1f}"
            rows.append([label, f"{island} ({step_s:g} s per batch)", batches, *map(human_percent, shares), hidden])
    return markdown_table(["row", "island", "batches", "computing", "exchanging", "waiting", "hidden"], rows, left=2)


def _parser() -> argparse.ArgumentParser:
    parser = seeds_parser(__doc__, "acco_unequal", "docs/acco.md")
    parser.add_argument("--steps", type=int, default=STEPS, help="mean batches per island")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="peak learning rates to try for DDP")
    return parser


if __name__ == "__main__":
    script(main)
