"""The headlines of the studies with small batches, as one table for `docs/evidence.md`.

    python benchmarks/evidence_headline.py --docs docs/evidence.md

It runs no cells: the figures are those of the newest record of each paper. `--text` is the text of the records' commands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evidence_acco
import evidence_async
import evidence_diloco
import figure_text
from ablations import mild
from async_rows import DELAYED, NAIVE, SYNC
from atoll.core.errors import ConfigError
from cells import Outcome
from evidence import Evidence
from evidence_diloco_report import DILOCO_ROW, ONE
from record import RECORDS, Record, has_markers, markdown_table, replace_between, script, text_identity

MARKER = "evidence_headline"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One paper's part of the tables."""

    evidence: Evidence[Any]
    about: str  # above its rows
    rows: Mapping[str, str]  # descriptions of the rows, by label


def studies() -> list[Study]:
    """In the order of the papers, with the values of their plans."""
    diloco, hub, overlap = evidence_diloco.plan(False), evidence_async.plan(False), evidence_acco.plan(False)
    milder = f"outer rule {diloco.milder[0]:g}/{diloco.milder[1]:g}"
    return [
        Study(
            evidence=evidence_diloco.EVIDENCE,
            about=f"DiLoCo: {diloco.islands} islands, {diloco.steps:,} steps each, links of {diloco.mbit_per_s:g} Mbit/s",
            rows={
                ONE: f"one worker, with 1/{diloco.islands} of the tokens",
                f"H={diloco.lengths[-1]}": f"DiLoCo, exchange every {diloco.lengths[-1]} steps",
                mild(f"H={diloco.lengths[-1]}"): f"DiLoCo, exchange every {diloco.lengths[-1]} steps, {milder}",
                DILOCO_ROW: f"DiLoCo, exchange every {diloco.inner_steps} steps",
                mild(f"H={diloco.inner_steps}"): f"DiLoCo, exchange every {diloco.inner_steps} steps, {milder}",
                diloco.batch: f"{diloco.islands} times the batch: DDP, exchange every step",
            },
        ),
        Study(
            evidence=evidence_async.EVIDENCE,
            about=f"Asynchronous: {hub.islands} workers of very different speeds, {hub.steps * hub.islands:,} local "
            f"updates, links of {hub.mbit_per_s:g} Mbit/s",
            rows={
                SYNC: "DiLoCo, which waits for the slowest worker",
                NAIVE: "naive: DiLoCo's outer step at every arrival",
                DELAYED: "Delayed Nesterov with Dynamic Local Updates",
            },
        ),
        Study(
            evidence=evidence_acco.EVIDENCE,
            about=f"ACCO: {overlap.islands} islands, {overlap.steps:,} updates, links of {overlap.mbit_per_s:g} Mbit/s",
            rows={
                evidence_acco.DDP: "DDP",
                evidence_acco.ACCO: "ACCO",
                evidence_acco.DPU: "delayed parameter updates, with a warm-up",
            },
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    for page in options.docs:
        if not has_markers(page, MARKER):
            raise ConfigError(f"--docs {page}: there is no such file. Name pages with the markers of {MARKER}.")
    table = headline_table([(study, _outcomes(study, options)) for study in studies()])
    for page in options.docs:
        replace_between(page, MARKER, table)
    print(table)


def headline_table(found: Sequence[tuple[Study, Mapping[str, Outcome]]]) -> str:
    """All studies. Skips rows that were not run."""
    rows = []
    for study, outcomes in found:
        rows.append([f"**{study.about}**", "", "", ""])
        for label, description in study.rows.items():
            if label in outcomes:
                outcome = outcomes[label]
                rows.append([description, _loss(outcome), figure_text.bytes_text(outcome), figure_text.time_text(outcome)])
    return markdown_table(["", "validation loss", "sent per island", "virtual time"], rows)


def _loss(outcome: Outcome) -> str:
    """With as many digits as the seeds resolve."""
    loss = outcome.loss
    if loss is None:
        return figure_text.loss_text(outcome)[0]
    return f"{loss.mean:.3f}" + (f" ± {loss.std:.3f}" if loss.std is not None else "")


def _outcomes(study: Study, options: argparse.Namespace) -> dict[str, Outcome]:
    """The outcomes in the newest record of the study.

    Raises:
        ConfigError: there is no record, or it has none of the rows: an empty table would replace a full one.
    """
    name = study.evidence.name
    records = sorted(cells.parent for cells in options.records.glob(f"*_{name}/cells.jsonl"))
    if not records:
        raise ConfigError(f"{options.records} has no record of {name}. Make it with: python benchmarks/{name}.py --text TEXT")
    plan, record = replace(study.evidence.plan(False), text="text"), Record(records[-1])
    text = json.loads((record.path / "text.json").read_text("utf-8"))["text"]
    record.texts[plan.text] = text_identity(text)
    found = study.evidence.recorded(plan, record, options.seeds)
    if not study.rows.keys() & found.keys():
        raise ConfigError(
            f"the record {record.path} has no row of the headline, as one of --lr, --set or --quick. Remove it, or name a folder "
            f"of other records with --records."
        )
    return found


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="+",
        default=[],
        help=f"pages to update at their markers {MARKER}",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the records' headlines")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder of records")
    return parser


if __name__ == "__main__":
    script(main)
