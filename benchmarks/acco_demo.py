"""The demo with overlapped exchanges, over seeds: does the overlap of communication and computation change the loss?

    python benchmarks/acco_demo.py                    seeds 0, 1 and 2, two cells at a time
    python benchmarks/acco_demo.py --seeds 0 1        other seeds

Every run commits the same samples in as many updates. ACCO is compared with data-parallel training, and so are the older ways to
hide an exchange: the delayed update (DPU), with and without the warm-up of ZeRO-Offload, and weight prediction (WP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from async_demo import curves_figure
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_percent
from cells import LAN, Outcome, Row, carry_out, seeds_parser
from claims import Claim, higher, judged
from record import Record, default_path, fill, markdown_table, script

DDP, ZERO1, ACCO, DPU, WP = "demo-ddp", "demo-zero1", "demo-acco", "demo-dpu", "demo-wp"
ACCO_WARM, DPU_COLD = "demo-acco, warm-up", "demo-dpu, no warm-up"
WARMUP = 40
"""Of ZeRO-Offload, in updates."""
MOST_LOSS = 0.02
"""How far from data-parallel training ACCO may end."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "acco_demo", "docs/acco.md")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="of rows with one, in updates")
    options = parser.parse_args(arguments)
    rows = all_rows((*LAN, *options.set), options.warmup)
    record = Record(options.record or default_path("acco_demo"))
    done = carry_out(
        list(rows.values()),
        options.seeds,
        record,
        "demo with hidden exchanges",
        quiet=options.quiet,
        curves=True,
        islands=True,
        processes=options.processes,
    )
    outcomes = {label: done[row] for label, row in rows.items()}
    sections = report(outcomes)
    drawn = {label: outcomes[label] for label in (DDP, ACCO, DPU, WP) if outcomes[label].curves}
    save_figure(curves_figure, drawn, record.plot)
    title = f"The demo with hidden exchanges, over seeds {', '.join(map(str, options.seeds))}"
    readme = record.write(title, [*sections, f"![loss against virtual time]({record.plot.name})"])
    fill(options.docs, "acco_demo", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def all_rows(base: tuple[str, ...], warmup: int = WARMUP) -> dict[str, Row]:
    """The rows by label: the recipes, and what the paper tries besides."""
    warm = (f"algorithm.warmup={warmup}",)
    rows = {name: Row(recipe=name, base=base) for name in (DDP, ZERO1, ACCO)}
    rows[ACCO_WARM] = Row(recipe=ACCO, base=base, settings=warm, name=ACCO_WARM)
    rows[DPU] = Row(recipe=DPU, base=base, settings=warm, name=DPU)
    rows[DPU_COLD] = Row(recipe=DPU, base=base, settings=("algorithm.warmup=0",), name=DPU_COLD)
    rows[WP] = Row(recipe=WP, base=base)
    return rows


def claims() -> list[Claim]:
    """What is asked of ACCO, and what the paper says of the others."""
    within = f"ACCO ends within {MOST_LOSS} of DDP (the paper: the curves are one)."
    return [
        Claim(text=within, terms=((1.0, ACCO), (-1.0, DDP)), above=-MOST_LOSS, below=MOST_LOSS),
        Claim(text="ZeRO-1 is DDP.", terms=((1.0, ZERO1), (-1.0, DDP)), above=-0.005, below=0.005),
        higher("DPU ends above DDP without a warm-up (the paper: clearly).", DPU_COLD, DDP),
        higher("DPU ends above DDP also with ZeRO-Offload's warm-up (the paper: it is not enough).", DPU, DDP),
        higher("WP ends above DDP (the paper: it is worse early on).", WP, DDP),
        higher("DPU ends above ACCO.", DPU, ACCO),
        higher("WP ends above ACCO.", WP, ACCO),
    ]


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    asked = [line for claim in claims() if (line := judged(claim, outcomes)) is not None]
    return [
        "## Outcome\n\n" + _listed([mean_line(outcomes), same_work_line(outcomes)]),
        "## Claims\n\nA claim holds if all of the 95 % interval is where it says, does not hold if none of it is, and else lies "
        "within the spread.\n\n" + _listed(asked),
        f"## Rows\n\n{figure_text.RULE} Updates: commits that changed the weights. Hidden: the share of the exchanges during which "
        f"an island computed, on average. Rows with a warm-up hide nothing in their first {_warmup(outcomes[DPU])} updates."
        f"\n\n{table(outcomes)}",
        "## Commands\n\n```\n" + "\n".join(dict.fromkeys(outcome.row.command for outcome in outcomes.values())) + "\n```",
    ]


def mean_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether the means of ACCO and DDP are as close as asked."""
    mine, theirs = outcomes[ACCO].loss, outcomes[DDP].loss
    if mine is None or theirs is None:
        return f"{ACCO if mine is None else DDP} diverged."
    apart = mine.mean - theirs.mean
    verdict = "holds here" if abs(apart) <= MOST_LOSS else "does not hold here"
    ratio = figure_text.time_ratio_text(outcomes[ACCO], outcomes[DDP])
    return (
        f"**{verdict}**: the mean validation loss of ACCO is within {MOST_LOSS} of DDP's. It is {apart:+.4f} away "
        f"({mine.mean:.4f} against {theirs.mean:.4f}), in {ratio} of DDP's virtual time."
    )


def same_work_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether all rows commit the same samples in as many updates."""
    ended = [outcome for outcome in outcomes.values() if outcome.summaries]
    updates, tokens = ({outcome.mean(name) for outcome in ended} for name in ("outer_steps", "tokens"))
    if len(updates) == len(tokens) == 1:
        return f"All rows commit {tokens.pop():,.0f} tokens in {updates.pop():,.0f} updates."
    return "**Rows differ** in what they commit: see updates and tokens below."


def table(outcomes: Mapping[str, Outcome]) -> str:
    reference = outcomes[DDP]
    headings = ["row", "val loss", "least to greatest", f"against {DDP}", "verdict", "updates", "tokens"]
    headings += ["virtual time", f"of {DDP}'s", "sent per island", "busy", "hidden"]
    rows = []
    for label, outcome in outcomes.items():
        against = ("-", "-") if outcome is reference else figure_text.difference_text(outcome.loss, reference.loss)
        updates = outcome.mean("outer_steps")
        work = ["-" if updates is None else f"{updates:.0f}", figure_text.tokens_text(outcome, reference)]
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, reference)]
        costs = [figure_text.bytes_text(outcome), figure_text.busy_text(outcome), hidden_text(outcome)]
        rows.append([label, *figure_text.loss_text(outcome), *against, *work, *time, *costs])
    return markdown_table(headings, rows)


def hidden_text(outcome: Outcome) -> str:
    """The share of all exchanges during which islands computed."""
    times = [island for islands in outcome.islands for island in islands]
    exchanged_s = sum(island["exchanged_s"] for island in times)
    return human_percent(sum(island["hidden_s"] for island in times) / exchanged_s) if exchanged_s else "-"


def _warmup(outcome: Outcome) -> int:
    """In updates."""
    algorithm: Any = outcome.row.run(0).algorithm
    warmup: int = algorithm.warmup
    return warmup


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


if __name__ == "__main__":
    script(main)
