"""The demo with overlapped exchanges, over seeds: does the overlap of communication and computation change the loss?

    python benchmarks/acco_demo.py                    seeds 0, 1 and 2, two cells in parallel
    python benchmarks/acco_demo.py --seeds 0 1        other seeds
    python benchmarks/acco_demo.py --variants         DPU with other warm-ups, lengths and batches, in the workload of the ablations

All runs commit the same samples in the same number of updates. The script compares data-parallel training with ACCO and with older
methods that overlap the exchange: delayed updates (DPU), with and without the warm-up of ZeRO-Offload, and weight prediction (WP).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from atoll.telemetry.units import human_percent
from cells import FIRST_DEMO, Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from claims import INTERVAL_RULE, Claim, claim_lines, higher, mean_loss_line
from curves import CAPTION, save_curves
from record import bullets, markdown_table, open_record, script
from workload import Workload

DDP, ZERO1, ACCO, DPU, WP = "demo-ddp", "demo-zero1", "demo-acco", "demo-dpu", "demo-wp"
ACCO_WARM, DPU_COLD = "demo-acco, warm-up", "demo-dpu, no warm-up"
WARMUP = 40
"""ZeRO-Offload's, in updates."""
MOST_LOSS = 0.02
"""Allowed difference between the losses of ACCO and data-parallel training."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "acco_demo", "docs/acco.md")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="updates of the rows with a warm-up")
    parser.add_argument("--variants", action="store_true", help="run the variants of DPU, into a record of their own")
    options = parser.parse_args(arguments)
    if options.variants:
        _run_variants(options)
        return
    rows = all_rows((*FIRST_DEMO, *options.set), options.warmup)
    record = open_record(options, "acco_demo")
    kept = {"quiet": options.quiet, "curves": True, "islands": True, "processes": options.processes}
    outcomes = run_rows(rows, options.seeds, record, "demo with overlapped exchanges", **kept)
    save_curves({label: outcomes[label] for label in (DDP, ACCO, DPU, WP)}, record.plot)
    title = f"The demo with overlapped exchanges, {seeds_text(options.seeds)}"
    record.publish(title, report(outcomes), plot=CAPTION, docs=(options.docs, "acco_demo"))


def all_rows(base: tuple[str, ...], warmup: int = WARMUP) -> dict[str, Row]:
    """The rows by label: the recipes, and the paper's variants."""
    warm = (f"algorithm.warmup={warmup}",)
    rows = {name: Row(recipe=name, base=base) for name in (DDP, ZERO1, ACCO)}
    rows[ACCO_WARM] = Row(recipe=ACCO, base=base, settings=warm, name=ACCO_WARM)
    rows[DPU] = Row(recipe=DPU, base=base, settings=warm, name=DPU)
    rows[DPU_COLD] = Row(recipe=DPU, base=base, settings=("algorithm.warmup=0",), name=DPU_COLD)
    rows[WP] = Row(recipe=WP, base=base)
    return rows


def claims() -> list[Claim]:
    """A bound on ACCO's loss, and the paper's claims about the other methods."""
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


# ---------------------------------------------------------------------------------------------------------- variants of DPU

DPU_PLAN = Workload(steps=600)
DPU_500, DPU_TWICE, DPU_HALF = "DPU, warm-up of 500", "DPU, twice the length", "DPU, half of the batch"


def variant_rows(plan: Workload, more: tuple[str, ...] = ()) -> dict[str, Row]:
    """DDP and DPU in the workload of the ablations, and the paper's variants of DPU."""

    def row(label: str, recipe: str, algorithm: str, *settings: str) -> Row:
        return Row(recipe=recipe, base=(*plan.settings(algorithm, "[0.1]"), *more), settings=settings, name=label)

    twice, dpu = f"train.steps={2 * plan.steps}", f"DPU(warmup={min(WARMUP, plan.steps - 1)})"
    return {
        DDP: row(DDP, DDP, "DDP()"),
        DPU: row(DPU, DPU, dpu),
        DPU_500: row(DPU_500, DPU, dpu, f"algorithm.warmup={min(500, plan.steps - 1)}"),
        DPU_TWICE: row(DPU_TWICE, DPU, dpu, twice),
        DPU_HALF: row(DPU_HALF, DPU, dpu, twice, f"train.batch_size={plan.batch_size // 2}"),
    }


def variant_claims() -> list[Claim]:
    nearly = f"Twice the length nearly closes DPU's gap to DDP (at most {MOST_LOSS} above)."
    return [
        higher("DPU ends above DDP (the paper: clearly).", DPU, DDP),
        higher("DPU ends above DDP also with a warm-up of 500 updates.", DPU_500, DDP),
        Claim(text=nearly, terms=((1.0, DPU_TWICE), (-1.0, DDP)), below=MOST_LOSS),
        higher("DPU with half of the batch and twice the updates ends above DDP (figure 10).", DPU_HALF, DDP),
    ]


def _run_variants(options: argparse.Namespace) -> None:
    record = open_record(options, "acco_variants")
    rows = variant_rows(DPU_PLAN, tuple(options.set))
    outcomes = run_rows(rows, options.seeds, record, "variants of DPU", quiet=options.quiet, processes=options.processes)
    about = (
        f"{figure_text.decoder_text(outcomes[DDP])} on {DPU_PLAN.islands} islands: {DPU_PLAN.warm_start} steps of warm start, then "
        f"{DPU_PLAN.steps} updates of {DPU_PLAN.batch_size} sequences per island. {INTERVAL_RULE}"
    )
    sections = [
        f"## Claims\n\n{about}\n\n{bullets(claim_lines(variant_claims(), outcomes))}",
        f"## Rows\n\n{table(outcomes)}",
        commands_section(outcomes),
    ]
    record.publish("DPU: warm-up, length and batch", sections, docs=(options.docs, "acco_variants"))


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    time = f"{ACCO} takes {figure_text.time_ratio_text(outcomes[ACCO], outcomes[DDP])} of the virtual time of {DDP}."
    return [
        "## Outcome\n\n" + bullets([mean_loss_line(outcomes, ACCO, DDP, MOST_LOSS), time, same_work_line(outcomes)]),
        f"## Claims\n\n{INTERVAL_RULE}\n\n{bullets(claim_lines(claims(), outcomes))}",
        f"## Rows\n\n{figure_text.RULE} Updates: commits that changed the weights. Hidden: the share of the exchanges' time during "
        f"which an island computed, mean over islands. Rows with a warm-up hide nothing in their first {_warmup(outcomes[DPU])} "
        f"updates.\n\n{table(outcomes)}",
        commands_section(outcomes),
    ]


def same_work_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether all rows commit the same number of tokens and updates."""
    ended = [outcome for outcome in outcomes.values() if outcome.summaries]
    updates, tokens = ({outcome.mean(name) for outcome in ended} for name in ("outer_steps", "tokens"))
    if len(updates) == len(tokens) == 1:
        return f"All rows commit {tokens.pop():,.0f} tokens in {updates.pop():,.0f} updates."
    return "**Rows commit different numbers** of updates or tokens: see the table."


def table(outcomes: Mapping[str, Outcome]) -> str:
    reference = outcomes[DDP]
    headings = [*figure_text.loss_headings(DDP), "updates", "tokens"]
    headings += ["virtual time", f"over {DDP}'s", "sent per island", "utilisation", "hidden"]
    rows = []
    for label, outcome in outcomes.items():
        work = [figure_text.updates_text(outcome), figure_text.tokens_text(outcome, reference)]
        time = [figure_text.time_text(outcome), figure_text.time_ratio_text(outcome, reference)]
        costs = [figure_text.bytes_text(outcome), figure_text.utilisation_text(outcome), hidden_text(outcome)]
        rows.append([label, *figure_text.loss_columns(outcome, reference), *work, *time, *costs])
    return markdown_table(headings, rows)


def hidden_text(outcome: Outcome) -> str:
    """The share of the exchanges' time during which islands computed."""
    times = [island for islands in outcome.islands for island in islands]
    exchanged_s = sum(island["exchanged_s"] for island in times)
    return human_percent(sum(island["hidden_s"] for island in times) / exchanged_s) if exchanged_s else "-"


def _warmup(outcome: Outcome) -> int:
    algorithm: Any = outcome.row.run(0).algorithm
    warmup: int = algorithm.warmup
    return warmup


if __name__ == "__main__":
    script(main)
