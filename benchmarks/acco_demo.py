"""The demo with overlapped exchanges, over seeds: does the overlap of communication and computation change the loss?

    python benchmarks/acco_demo.py                    seeds 0, 1 and 2, two cells in parallel
    python benchmarks/acco_demo.py --seeds 0 1        other seeds

All runs commit the same samples in the same number of updates. The script compares data-parallel training with ACCO and with older
methods that overlap the exchange: delayed updates (DPU), with and without the warm-up of ZeRO-Offload, and weight prediction (WP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import figure_text
from atoll.telemetry.units import human_percent
from cells import FIRST_DEMO, Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from claims import INTERVAL_RULE, Claim, claim_lines, higher, mean_loss_line
from curves import CAPTION, save_curves
from record import bullets, markdown_table, open_record, script

DDP, ZERO1, ACCO, DPU, WP = "demo-ddp", "demo-zero1", "demo-acco", "demo-dpu", "demo-wp"
ACCO_WARM, DPU_COLD = "demo-acco, warm-up", "demo-dpu, no warm-up"
WARMUP = 40
"""ZeRO-Offload's, in updates."""
MOST_LOSS = 0.02
"""Allowed difference between the losses of ACCO and data-parallel training."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "acco_demo", "docs/acco.md")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="updates of the rows with a warm-up")
    options = parser.parse_args(arguments)
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
