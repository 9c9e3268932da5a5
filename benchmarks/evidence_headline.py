"""The headlines of the studies with small batches, as one table for `docs/evidence.md`.

    python benchmarks/evidence_headline.py --docs docs/evidence.md

It runs no cells: the figures are those of the record of each paper that has most cells of the headline, the newest of equals.
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
    """The outcomes in the record that has most cells of the study's rows, the newest of equals: one that was begun later and not
    finished does not replace a complete one.

    Raises:
        ConfigError: there is no record, or it has none of the rows: an empty table would replace a full one.
    """
    name = study.evidence.name
    paths = sorted((cells.parent for cells in options.records.glob(f"*_{name}/cells.jsonl")), reverse=True)
    if not paths:
        raise ConfigError(f"{options.records} has no record of {name}. Make it with: python benchmarks/{name}.py --text TEXT")
    found = max((_recorded(study, path, options.seeds) for path in paths), key=lambda outcomes: _cells_of(study, outcomes))
    if not _cells_of(study, found):
        shown = ", ".join(map(str, paths))
        raise ConfigError(
            f"no record of {name} has a row of the headline ({shown}), as if all were made with --lr, --set or --quick. Make one "
            f"with: python benchmarks/{name}.py --text TEXT, or name a folder of other records with --records."
        )
    return found


def _recorded(study: Study, path: Path, seeds: Sequence[int]) -> dict[str, Outcome]:
    """The outcomes in one record."""
    plan, record = replace(study.evidence.plan(False), text="text"), Record(path)
    text = json.loads((path / "text.json").read_text("utf-8"))["text"]
    record.texts[plan.text] = text_identity(text)
    return study.evidence.recorded(plan, record, seeds)


def _cells_of(study: Study, outcomes: Mapping[str, Outcome]) -> int:
    """How many cells the rows of the headline have."""
    rows = (outcomes[label] for label in study.rows if label in outcomes)
    return sum(len(outcome.summaries) + len(outcome.errors) for outcome in rows)


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
