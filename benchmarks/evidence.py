"""A paper's claims on one GPU and real text, as a command that resumes cell by cell.

The text is a folder that `atoll data prepare` wrote, for instance a Wikipedia dump with its own vocabulary:

    atoll data prepare files:TEXT --tokenizer bpe:16384 --out prepared/wiki
    atoll data prepare files:DOMAINS --tokenizer prepared/wiki/tokenizer.json --out prepared/domains

Rows of the headline have three seeds, all others one; verdicts mark rows with one seed. `--minutes` starts no cell after that time:
the same command with the same `--record` continues, on another day or another machine. `--dry-run` lists the
missing cells. Without a GPU the script skips the cells that need one, and writes the tables of a record that has at least the
default's cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import figure_text
from ablations import DEFAULT, Group, table
from atoll.core.errors import ConfigError
from atoll.runs.run_settings import Run
from cells import Outcome, Row, key_of, limits, run_rows, study_parser
from claims import Claim, claims_section
from curves import CAPTION, save_curves
from record import Record, check_texts, missing_text, open_record
from seed_statistics import Sample, Scatter, scatter
from workload import Workload

P = TypeVar("P", bound="OnGpu")


@dataclass(frozen=True, kw_only=True)
class OnGpu(Workload):
    """What rows train, unless a row changes it: a decoder of the 20M preset's shape on prepared text."""

    text: str = ""  # the folder of the prepared text
    domains: str | None = None  # the folder of prepared text from several domains; None: no rows that need it
    steps: int = 1500
    warm_start: int = 1000
    inner_steps: int = 100
    islands: int = 8
    model: str = "layers=6,width=256,heads=4,head_size=64,tied=false"
    large: str = "layers=3,width=896,heads=16,head_size=64"
    seq_len: int = 256
    eval_batches: int = 64
    batch_size: int = 16
    warmup: int = 100
    lr: float = 0.002  # the inner optimizer's peak rate
    floor: float = 0.1  # the final rate, as a share of the peak
    device: str = "cuda"
    latency_s: float = 0.03  # of every link
    mbit_per_s: float = 100  # of every link
    evaluate_every: int = 1000000  # steps

    def reading(self, folder: str) -> str:
        """The setting that reads a prepared text."""
        return f"data=Text(corpus='prepared:{folder}',seq_len={self.seq_len},eval_batches={self.eval_batches})"

    def settings(self, algorithm: str, step_time_s: str) -> tuple[str, ...]:
        fast = "device=cuda,precision=bf16,compile=true,together=stacked" if self.device == "cuda" else "device=cpu"
        return (
            f"model=GPT({self.model})",
            self.reading(self.text),
            f"algorithm={algorithm}",
            f"optimizer=AdamW(lr=Cosine(lr={self.lr:g},warmup={self.warmup},floor={self.floor * self.lr:g}),betas=[0.9,0.95],"
            "weight_decay=0.1)",
            f"train=Train(steps={self.steps},batch_size={self.batch_size},warm_start_steps={self.warm_start},{fast})",
            f"cluster=Cluster(islands={self.islands},step_time_s={step_time_s},"
            f"link=Link(latency_s={self.latency_s},bandwidth_mbit_per_s={self.mbit_per_s}))",
            f"keep=Keep(evaluate_every={self.evaluate_every},save_every=1000000)",
            *self.more,
        )


@dataclass(frozen=True, kw_only=True)
class Evidence(Generic[P]):
    """A paper's tables.

    Attributes:
        name: of the record.
        title: of the record's page.
        about: the script's docstring, whose first line `--help` shows.
        plan: makes the workload, of small sizes for `--quick`.
        groups: all tables; the first is the headline.
        standing: rows that always run, by label; the default is among them, also under its own label.
        default: the default's own label. Rows are compared with it where a group names no other row.
        headline: labels of rows with three seeds.
        introduction: text before the tables, from the plan and the default's outcome.
        reading: how rows differ from the default, whose command follows.
        claims: the paper's claims.
        plot: draws some of the rows into a file and returns a caption; None if there is nothing to draw.
        share: heading of the column of virtual time over another row's.
        verdicts: further verdicts, on claims that are not about losses.
    """

    name: str
    title: str
    about: str
    plan: Callable[[bool], P]
    groups: Callable[[P], list[Group]]
    standing: Callable[[P], dict[str, Row]]
    default: str
    headline: Callable[[P], Sequence[str]]
    introduction: Callable[[P, Outcome], str]
    reading: str
    claims: Callable[[P], list[Claim]]
    plot: Callable[[P, Mapping[str, Outcome], Path], str | None]
    share: str = ""
    verdicts: Callable[[P, Mapping[str, Outcome]], list[str]] = lambda plan, outcomes: []

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Runs the command."""
        options = self._parser().parse_args(arguments)
        how = limits(options)
        domains = None if options.domains is None else str(options.domains)
        plan = replace(self.plan(options.quick), text=str(options.text), domains=domains, more=tuple(options.set))
        if options.lr is not None:
            plan = replace(plan, lr=options.lr)
        if options.quick:
            plan = replace(plan, device="cpu")
        chosen = [group for group in self.groups(plan) if not options.only or group.name in options.only]
        record = open_record(options, self.name)
        texts = {name: folder for name, folder in (("text", options.text), ("domains", options.domains)) if folder is not None}
        check_texts(record, texts, needed=not options.dry_run)
        if options.dry_run:
            listed: list[str] = []
            self.run(plan, chosen, record, options.seeds, listed=listed)
            print(missing_text(listed))
            return
        self.run(plan, chosen, record, options.seeds, warm=record.path / "warm", can_run=_can_run_here, **how)
        outcomes = self.recorded(plan, record, options.seeds)  # all that the record holds, also of groups that were not chosen
        if DEFAULT in outcomes:
            self._report(plan, outcomes, record)
        else:
            first = options.seeds[0]
            chosen_runs = [row.run(first) for group in chosen for row in group.rows.values()]
            _report_missing_default(self.standing(plan)[DEFAULT].run(first), chosen_runs, record)

    def recorded(self, plan: P, record: Record, seeds: Sequence[int]) -> dict[str, Outcome]:
        """The outcomes that a record holds, by label. Runs nothing."""
        return self.run(plan, self.groups(plan), record, seeds, quiet=True, can_run=lambda run: False)

    def run(self, plan: P, chosen: Sequence[Group], record: Record, seeds: Sequence[int], **how: Any) -> dict[str, Outcome]:
        """Runs missing cells of these groups and of the standing rows, and returns the outcomes of the rows that have cells.

        Args:
            plan: the workload.
            chosen: groups.
            record: holds the cells.
            seeds: of the headline; other rows have the first.
            how: further arguments of `run_rows`.
        """
        rows = dict(self.standing(plan))
        for group in chosen:
            rows |= group.rows
        headline = set(self.headline(plan))
        keys = {label: key_of(row.run(seeds[0])) for label, row in rows.items()}
        several = {keys[label] for label in rows if label in headline}  # by key, since rows with the same Run share their cells
        seeds_of = {label: seeds if keys[label] in several else seeds[:1] for label in rows}
        found = run_rows(rows, seeds_of, record, self.title, curves=True, **how)
        return {label: outcome for label, outcome in found.items() if outcome.summaries or outcome.errors}

    def _report(self, plan: P, outcomes: Mapping[str, Outcome], record: Record) -> None:
        groups = self.groups(plan)
        shown = [present for group in groups if len((present := _present(group, outcomes, self.default)).rows) > 1]
        missing = sum(label not in outcomes for group in groups for label in group.rows)
        introduction = self.introduction(plan, outcomes[DEFAULT])
        incomplete = [f"**{missing} rows have not been run yet.**"] if missing else []
        setting = f"{self.reading}\n\n```\n{outcomes[DEFAULT].row.command}\n```\n\n{figure_text.RULE}"
        claims = _promoted(claims_section(self.claims(plan), outcomes, common_scatter(outcomes)))
        claims = "\n- ".join([claims, *self.verdicts(plan, outcomes)])
        sections = [f"## Setting\n\n{introduction}\n\n{setting}", *incomplete]
        sections += [*(_promoted(table(group, outcomes, self.share)) for group in shown), claims]
        record.publish(self.title, sections, plot=self.plot(plan, outcomes, record.plot) or "")

    def _parser(self) -> argparse.ArgumentParser:
        names = [group.name for group in self.groups(replace(self.plan(True), domains="."))]
        parser = study_parser(self.about, self.name, names)
        parser.add_argument("--domains", type=Path, help="such a folder of several domains, for unequal shards")
        parser.add_argument("--lr", type=float, help="the inner optimizer's peak rate; None: the plan's")
        return parser


def common_scatter(outcomes: Mapping[str, Outcome]) -> Scatter | None:
    """The scatter of rows with several seeds and the default's model and text. Rows with the same Run count once."""
    default = outcomes[DEFAULT].row.run(0)
    several: dict[str, Sample] = {}
    for outcome in outcomes.values():
        run, loss = outcome.row.run(0), outcome.loss
        if loss is not None and loss.std is not None and (run.model, run.data) == (default.model, default.data):
            several[key_of(run)] = loss
    return scatter(list(several.values()))


def _report_missing_default(default: Run, chosen: Sequence[Run], record: Record) -> None:
    """Explains how to get the default's cell, without which there are no tables.

    Raises:
        ConfigError: the default and chosen rows need a GPU, and there is none.
    """
    if _can_run_here(default):
        print("the default's cell is missing; repeat the command to continue")
    elif all(map(_can_run_here, chosen)):
        print("the default's cell is missing, and needs CUDA; repeat the command on a machine with CUDA to continue")
    else:
        raise ConfigError(
            f"rows need CUDA, torch sees none here, and the record {record.path} has no cell of the default for the tables. Use a "
            f"machine with CUDA, or --quick on a CPU, or give a --record whose tables are to be written again, with the --text, "
            f"--lr and --set of its command."
        )


def _promoted(section: str) -> str:
    """A section of ablations, as a section of a record."""
    return section.replace("### ", "## ", 1)


def _can_run_here(run: Run) -> bool:
    """Whether there is a GPU, or the run needs none."""
    return run.train.device != "cuda" or torch.cuda.is_available()


def _present(group: Group, outcomes: Mapping[str, Outcome], default: str) -> Group:
    """The rows of a group that have been run."""
    compared = group.against or dict.fromkeys(group.rows, default)
    against = {label: other for label, other in compared.items() if other in outcomes}
    if not against:
        against = {"": ""}  # an empty mapping would mean: all are compared with the default
    timed = {label: other for label, other in group.timed.items() if other in outcomes}
    rows = {label: row for label, row in group.rows.items() if label in outcomes}
    return replace(group, rows=rows, against=against, timed=timed)


def plot_curves(labels: Sequence[str], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Draws loss against virtual time of the rows with these labels; None if fewer than two have curves."""
    drawn = {label: outcomes[label] for label in labels if label in outcomes and outcomes[label].curves}
    if len(drawn) < 2:
        return None
    save_curves(drawn, path)
    return CAPTION
