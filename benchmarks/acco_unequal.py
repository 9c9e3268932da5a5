"""Four islands, one four times slower: ACCO with free batches against data-parallel training with equally large batches.

    python benchmarks/acco_unequal.py                 seeds 0, 1 and 2, two cells at a time
    python benchmarks/acco_unequal.py --seeds 0 1     other seeds

The demo's model, text and lines, with half its batch: a free batch here is worth 3.25 of each island's, and with the demo's 16
sequences too few updates would be left (docs/log.md has what they came to). ACCO accumulates freely, so that its batch is what the
islands get done during an exchange. How many samples that is is measured first, on a short run; DDP then accumulates as many
batches as come closest to it, so that updates of both are alike from the first to the last. Both read as many tokens, and their
learning rate goes by samples: the same warm-up and the same cosine over the same tokens. The peak is the best for DDP, among a few,
on the first seed, and ACCO has to take it as it is. DDP that talks after every batch stands beside them, and ACCO that hides
nothing while the rate warms up (`algorithm.warmup`). Nothing is judged by the latter: its early updates are smaller than DDP's,
which helps it, and DDP, whose accumulation is fixed, cannot be given the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from async_demo import curves_figure
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_percent
from cells import LAN, Outcome, Row, carry_out, seeds_parser
from claims import Claim, judged
from record import Record, default_path, fill, markdown_table, script

ACCO, WARM, DDP, OFTEN = "ACCO, free", "ACCO, free, warm-up", "DDP, accumulating", "DDP, every batch"
STEP_TIMES_S = (1.0, 1.0, 1.0, 4.0)
BATCH = ("train.batch_size=8", "train.warm_start_steps=450")
"""Half the demo's, in twice its steps: as many tokens."""
STEPS = 1800
RATES = (0.025, 0.05, 0.1)
MOST_LOSS, MOST_TIME, SAME_BATCH = 0.03, 0.45, 0.1
"""By how much ACCO may end above DDP, in what share of its virtual time, and how far their samples per update may lie apart."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    record = Record(options.record or default_path("acco_unequal"))
    plan = Plan(steps=options.steps, base=(*LAN, *options.set))

    def run(rows: Sequence[Row], seeds: Sequence[int], title: str) -> dict[Row, Outcome]:
        told, processes = options.quiet, options.processes
        return carry_out(rows, seeds, record, title, quiet=told, curves=True, islands=True, processes=processes)

    probe = plan.probe()
    measured = samples_per_update(run([probe], options.seeds[:1], "how large free batches are")[probe], plan)
    accumulation = max(1, round(measured))
    tried = {rate: plan.ddp(rate, accumulation) for rate in options.rates}
    found = run(list(tried.values()), options.seeds[:1], "DDP's learning rate")
    losses = {rate: loss.mean for rate, row in tried.items() if (loss := found[row].loss) is not None}
    best = min(losses, key=lambda rate: losses[rate], default=options.rates[0])
    rows = {ACCO: plan.acco(best), DDP: tried[best], OFTEN: plan.ddp(best, 1), WARM: plan.acco(best, warm=True)}
    done = run(list(rows.values()), options.seeds, "ACCO and DDP")
    outcomes = {label: done[row] for label, row in rows.items()}
    sections = report(outcomes, plan, measured=measured, accumulation=accumulation, losses=losses, best=best)
    save_figure(curves_figure, {label: one for label, one in outcomes.items() if one.curves}, record.plot)
    title = f"Four islands, one four times slower, over seeds {', '.join(map(str, options.seeds))}"
    readme = record.write(title, [*sections, f"![loss against virtual time]({record.plot.name})"])
    fill(options.docs, "acco_unequal", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


class Plan:
    """The rows.

    Args:
        steps: batches per island, if all were equally fast.
        base: further settings of every row.
    """

    def __init__(self, *, steps: int, base: tuple[str, ...]) -> None:
        self.steps = steps
        islands = ",".join(map(str, STEP_TIMES_S))
        self.base = (f"cluster.islands={len(STEP_TIMES_S)}", f"cluster.step_time_s=[{islands}]", *BATCH, *base)

    @property
    def warmup(self) -> int:
        """Of the learning rate, and of ACCO in the row that has one, in batches of each island."""
        return max(1, min(120, self.steps // 4))

    def acco(self, rate: float, *, warm: bool = False) -> Row:
        """Islands go on until their exchange is over; the learning rate and the end of the run go by samples."""
        more = (f"algorithm.warmup={self.warmup}",) if warm else ()
        return self._row(WARM if warm else ACCO, "demo-acco-free", rate, batches=1, steps=self.steps, more=more)

    def ddp(self, rate: float, accumulation: int) -> Row:
        """As many samples, in so many batches per island and update."""
        settings = () if accumulation == 1 else (f"algorithm.accumulation={accumulation}",)
        label = f"{OFTEN if accumulation == 1 else DDP}, at {rate:g}"
        return self._row(label, "demo-ddp", rate, batches=accumulation, steps=round(self.steps / accumulation), more=settings)

    def probe(self) -> Row:
        """A short run of ACCO: who gets how much done does not depend on the learning rate."""
        return self._row("probe", "demo-acco-free", RATES[0], batches=1, steps=min(2 * self.warmup, self.steps))

    def _row(self, label: str, recipe: str, rate: float, *, batches: int, steps: int, more: tuple[str, ...] = ()) -> Row:
        warmup = max(1, round(self.warmup / batches))  # in updates
        lr = f"Cosine(lr={rate!r},steps={steps},warmup={warmup},floor={rate / 40!r})"
        rule = f"algorithm.optimizer=AdamW(lr={lr},betas=[0.9,0.95],weight_decay=0.1)"  # the run's own trains the warm start
        return Row(recipe=recipe, base=self.base, settings=(f"train.steps={steps}", *more, rule), name=label)

    def batch_tokens(self, row: Row) -> int:
        """Of one batch of each island."""
        run: Any = row.run(0)
        tokens: int = run.cluster.islands * run.train.batch_size * run.data.seq_len
        return tokens


def samples_per_update(outcome: Outcome, plan: Plan) -> float:
    """On average, in batches of each island."""
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
    text = f"{ACCO} ends at most {MOST_LOSS} above DDP that accumulates."
    judgement = judged(Claim(text=text, terms=((1.0, ACCO), (-1.0, DDP)), below=MOST_LOSS), outcomes)
    sizes = {label: samples_per_update(one, plan) for label, one in outcomes.items()}
    tried = ", ".join(f"{rate:g} ends at {loss:.4f}" for rate, loss in losses.items()) or "all of them diverged"
    return [
        "## Outcome\n\n" + _listed([time_line(outcomes), loss_line(outcomes), batch_line(sizes), *filter(None, [judgement])]),
        f"## How it was set\n\nA short run of ACCO commits {measured:.2f} batches per island and update, so DDP accumulates "
        f"{accumulation}: updates of both are alike from the first to the last. The learning rate goes by samples for both and is "
        f"DDP's best of those tried on the first seed: {tried}. Taken: {best:g}.",
        f"## With a warm-up\n\n{warm_text(outcomes, plan, accumulation)}",
        f"## Rows\n\n{figure_text.RULE} Batches: per island and update, on average.\n\n{table(outcomes, sizes)}",
        "## Who idles\n\nShares of each island's time, and how many batches it computed, on average over seeds. Hidden: the share "
        f"of its exchanges during which it computed.\n\n{idle_table(outcomes)}",
        "## Commands\n\n```\n" + "\n".join(outcome.row.command for outcome in outcomes.values()) + "\n```",
    ]


def time_line(outcomes: Mapping[str, Outcome]) -> str:
    ratio = figure_text.time_ratio(outcomes[ACCO], outcomes[DDP])
    if ratio is None:
        return f"**diverged**: ACCO takes at most {MOST_TIME} of DDP's virtual time."
    verdict = "holds here" if ratio <= MOST_TIME else "does not hold here"
    return f"**{verdict}**: ACCO takes at most {MOST_TIME} of DDP's virtual time. It takes {ratio:.3f}."


def loss_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether the mean losses are as close as asked."""
    mine, theirs = outcomes[ACCO].loss, outcomes[DDP].loss
    if mine is None or theirs is None:
        return f"{ACCO if mine is None else DDP} diverged."
    apart = mine.mean - theirs.mean
    verdict = "holds here" if abs(apart) <= MOST_LOSS else "does not hold here"
    return f"**{verdict}**: the mean losses of the two are within {MOST_LOSS}. ACCO's is {apart:+.4f} away from DDP's."


def warm_text(outcomes: Mapping[str, Outcome], plan: Plan, accumulation: int) -> str:
    """The row with a warm-up, which has an advantage besides."""
    apart, verdict = figure_text.difference_text(outcomes[WARM].loss, outcomes[DDP].loss)
    ratio = figure_text.time_ratio_text(outcomes[WARM], outcomes[DDP])
    return (
        f"In the row with a warm-up ACCO hides nothing for its first {plan.warmup} commits, which hold one batch per island where "
        f"DDP's hold {accumulation}. So it begins with more and smaller updates, **and this helps it**. DDP with the same ramp "
        f"would tell how much, but is not possible: its accumulation is fixed. So nothing is judged by this row. It ends {apart} "
        f"from DDP that accumulates (verdict: {verdict}), in {ratio} of its virtual time."
    )


def batch_line(sizes: Mapping[str, float]) -> str:
    """Whether updates of both are as large as each other.

    >>> batch_line({ACCO: 3.25, DDP: 3.0})
    '**holds here**: samples per update agree within 10 %: 3.25 batches per island against 3.00.'
    """
    mine, theirs = sizes[ACCO], sizes[DDP]
    agree = bool(theirs) and abs(mine / theirs - 1) <= SAME_BATCH
    verdict = "holds here" if agree else "does not hold here"
    share = human_percent(SAME_BATCH)
    return f"**{verdict}**: samples per update agree within {share}: {mine:.2f} batches per island against {theirs:.2f}."


def table(outcomes: Mapping[str, Outcome], sizes: Mapping[str, float]) -> str:
    reference = outcomes[DDP]
    headings = ["row", "val loss", "least to greatest", f"against {DDP}", "verdict", "updates", "batches", "tokens"]
    headings += ["virtual time", "of DDP's", "sent per island", "busy"]
    rows = []
    for label, outcome in outcomes.items():
        against = ("-", "-") if outcome is reference else figure_text.difference_text(outcome.loss, reference.loss)
        updates = outcome.mean("outer_steps")
        work = ["-" if updates is None else f"{updates:.0f}", f"{sizes[label]:.2f}", figure_text.tokens_text(outcome, reference)]
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, reference)]
        costs = [figure_text.bytes_text(outcome), figure_text.busy_text(outcome)]
        rows.append([label, *figure_text.loss_text(outcome), *against, *work, *time, *costs])
    return markdown_table(headings, rows)


def idle_table(outcomes: Mapping[str, Outcome]) -> str:
    """A line for each row and island."""
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
            rows.append([label, f"{island} ({step_s:g} s a batch)", batches, *map(human_percent, shares), hidden])
    return markdown_table(["row", "island", "batches", "computing", "talking", "waiting", "hidden"], rows, left=2)


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = seeds_parser(__doc__, "acco_unequal", "docs/acco.md")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches per island, if all were equally fast")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="peaks that are tried for DDP")
    return parser


if __name__ == "__main__":
    script(main)
