"""The headlines of the three papers' evidence: a table of all for `docs/evidence.md`, and one of eight rows for the README.

    python benchmarks/evidence_headline.py --docs README.md docs/evidence.md

It runs no cells: the figures are those of the newest record of each paper. `--text` is the text of the records' commands.
"""

from __future__ import annotations

import argparse
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
from atoll.data.text import Text
from cells import Outcome, Row
from evidence import Evidence
from evidence_diloco_report import DILOCO_ROW, ONE
from record import RECORDS, Record, has_markers, markdown_table, replace_between, script

MARKER, BRIEF_MARKER = "evidence_headline", "evidence_brief"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One paper's part of the tables."""

    evidence: Evidence[Any]
    about: str  # above its rows
    rows: Mapping[str, str]  # descriptions of the rows, by label
    setting: str  # islands, work and links, in the README's table
    brief: Mapping[str, str]  # descriptions of the rows of the README's table, by label


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
            setting=f"{diloco.islands} islands, {diloco.steps:,} steps each, {diloco.mbit_per_s:g} Mbit/s",
            brief={
                ONE: f"one worker, 1/{diloco.islands} of the tokens",
                DILOCO_ROW: f"DiLoCo, exchange every {diloco.inner_steps} steps",
                mild(f"H={diloco.inner_steps}"): f"DiLoCo, exchange every {diloco.inner_steps} steps, {milder}",
                diloco.batch: "DDP, exchange every step",
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
            setting=f"{hub.islands} workers of very different speeds, {hub.steps * hub.islands:,} updates, "
            f"{hub.mbit_per_s:g} Mbit/s",
            brief={SYNC: "DiLoCo", DELAYED: "asynchronous: Delayed Nesterov, Dynamic Local Updates"},
        ),
        Study(
            evidence=evidence_acco.EVIDENCE,
            about=f"ACCO: {overlap.islands} islands, {overlap.steps:,} updates, links of {overlap.mbit_per_s:g} Mbit/s",
            rows={
                evidence_acco.DDP: "DDP",
                evidence_acco.ACCO: "ACCO",
                evidence_acco.DPU: "delayed parameter updates, with a warm-up",
            },
            setting=f"{overlap.islands} islands, {overlap.steps:,} updates, {overlap.mbit_per_s:g} Mbit/s",
            brief={evidence_acco.DDP: "DDP", evidence_acco.ACCO: "ACCO"},
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    markers = {page: BRIEF_MARKER if page.name == "README.md" else MARKER for page in options.docs}
    for page, marker in markers.items():
        if not has_markers(page, marker):
            raise ConfigError(f"--docs {page}: there is no such file. Name pages with the markers of {marker}.")
    found = [(study, _outcomes(study, options)) for study in studies()]
    tables = {MARKER: headline_table(found), BRIEF_MARKER: brief_table(found)}
    for page, marker in markers.items():
        replace_between(page, marker, tables[marker])
    print(tables[MARKER])


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


def brief_table(found: Sequence[tuple[Study, Mapping[str, Outcome]]]) -> str:
    """The README's rows. A study's first row names its setting."""
    rows = []
    for study, outcomes in found:
        for number, (label, description) in enumerate(study.brief.items()):
            outcome, setting = outcomes[label], "" if number else study.setting
            rows.append([setting, description, _loss(outcome), figure_text.bytes_text(outcome), figure_text.time_text(outcome)])
    return markdown_table(["setting", "method", "validation loss", "sent per island", "virtual time"], rows, left=2)


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
    plan, record = replace(study.evidence.plan(False), text=options.text), Record(records[-1])
    found = study.evidence.recorded(plan, record, options.seeds)
    if not study.rows.keys() & found.keys():
        raise ConfigError(
            f"--text {options.text}: the record {record.path} has no row of the headline with this text. Its cells name "
            f"{', '.join(_texts(record))}. Give that text. A record of --lr, --set or --quick has no headline."
        )
    return found


def _texts(record: Record) -> list[str]:
    """The texts of a record's cells."""
    data = [Row(recipe=cell["recipe"], settings=tuple(cell["settings"])).run(cell["seed"]).data for cell in record.cells]
    return sorted({text.corpus.removeprefix("prepared:") for text in data if isinstance(text, Text)})


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="+",
        default=[],
        help=f"pages to update: a README.md at its markers {BRIEF_MARKER}, others at {MARKER}",
    )
    parser.add_argument("--text", default="prepared/wiki", help="--text of the records' commands")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the records' headlines")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder of records")
    return parser


if __name__ == "__main__":
    script(main)
