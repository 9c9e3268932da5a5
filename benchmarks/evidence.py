"""A paper's claims on one GPU and real text, as a command that resumes cell by cell.

The text is a folder that `atoll data prepare` wrote, for instance of a Wikipedia dump with a vocabulary of its own:

    atoll data prepare files:TEXT --tokenizer bpe:16384 --out prepared/wiki
    atoll data prepare files:DOMAINS --tokenizer prepared/wiki/tokenizer.json --out prepared/domains

Rows of the headline have three seeds, and all others one, whose verdicts say so. With `--minutes` no further cell is begun after so
long: give the same command with the same `--record` again to go on, on another day or another machine. What needs a GPU is left out
where there is none, and tables are made of a record that has at least the default's cell.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import figure_text
from ablations import DEFAULT, Group, brief_table, table
from async_demo import curves_figure
from atoll.core.errors import ConfigError
from atoll.runs.run import Run
from atoll.telemetry.plot_style import save_figure
from cells import Outcome, Row, carry_out, key_of
from claims import Claim, claims_section
from record import Record, default_path, fill, same_texts
from seed_statistics import Sample, Scatter, scatter
from workload import Workload

P = TypeVar("P", bound="OnGpu")


@dataclass(frozen=True, kw_only=True)
class OnGpu(Workload):
    """What all rows train, unless they say otherwise: a decoder of the 20M preset's shape on prepared text.

    Attributes:
        text: the folder of the prepared text.
        domains: the folder of prepared text from several domains; none leaves out rows that need it.
        seq_len: tokens of a sequence.
        eval_batches: to judge on.
        lr: the inner rule's highest rate.
        floor: to which share of it the rate falls.
        device: cuda, or cpu in miniature.
        latency_s: of every island's line.
        mbit_per_s: of every island's line.
        evaluate_every: steps between evaluations.
    """

    text: str = ""
    domains: str | None = None
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
    lr: float = 0.002
    floor: float = 0.1
    device: str = "cuda"
    latency_s: float = 0.03
    mbit_per_s: float = 100
    evaluate_every: int = 1000000

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
        plan: makes the workload, in miniature if asked.
        groups: all tables; the first is the headline.
        standing: rows that are run whatever is chosen, by label; the default is among them, also under its own name.
        called: the default's own name, with which rows are compared where nothing else is said.
        headline: labels of rows that are run with three seeds.
        introduction: what stands before the tables, from the plan and the default's outcome.
        reading: how rows come from the default, whose command follows.
        claims: what the paper says.
        plot: draws what is worth it of these rows into a file, and says what it shows; None if there is nothing to draw.
        share: heads the column of shares of virtual time.
        verdicts: further lines about claims that are not of losses.
    """

    name: str
    title: str
    about: str
    plan: Callable[[bool], P]
    groups: Callable[[P], list[Group]]
    standing: Callable[[P], dict[str, Row]]
    called: str
    headline: Callable[[P], Sequence[str]]
    introduction: Callable[[P, Outcome], str]
    reading: str
    claims: Callable[[P], list[Claim]]
    plot: Callable[[P, Mapping[str, Outcome], Path], str | None]
    share: str = ""
    verdicts: Callable[[P, Mapping[str, Outcome]], list[str]] = lambda plan, outcomes: []

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Runs what is asked for on the command line."""
        options = self._parser().parse_args(arguments)
        _check(options)
        domains = None if options.domains is None else str(options.domains)
        plan = replace(self.plan(options.quick), text=str(options.text), domains=domains, more=tuple(options.set))
        if options.lr is not None:
            plan = replace(plan, lr=options.lr)
        if options.quick:
            plan = replace(plan, device="cpu")
        chosen = [group for group in self.groups(plan) if not options.only or group.name in options.only]
        record = Record(options.record or default_path(self.name + ("_quick" if options.quick else "")))
        until_s = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        how = {"quiet": options.quiet, "processes": options.processes, "until_s": until_s, "can": _can_run_here}
        texts = {name: folder for name, folder in (("text", options.text), ("domains", options.domains)) if folder is not None}
        same_texts(record, texts)
        self.carried_out(plan, chosen, record, options.seeds, warm=record.path / "warm", **how)
        # Whatever was chosen to be run, all that is there is told.
        outcomes = self.carried_out(plan, self.groups(plan), record, options.seeds, quiet=True, can=lambda run: False)
        if DEFAULT in outcomes:
            self._report(plan, outcomes, record, options.docs)
        else:
            first = options.seeds[0]
            asked = [row.run(first) for group in chosen for row in group.rows.values()]
            _wait_for_default(self.standing(plan)[DEFAULT].run(first), asked, record)

    def carried_out(self, plan: P, chosen: Sequence[Group], record: Record, seeds: Sequence[int], **how: Any) -> dict[str, Outcome]:
        """What came of the rows of these groups and of the standing ones, by label; those that were not run are not there.

        Args:
            plan: the workload.
            chosen: groups.
            record: where cells are kept.
            seeds: of the headline; other rows have the first.
            how: as for `carry_out`.
        """
        rows = dict(self.standing(plan))
        for group in chosen:
            rows |= group.rows
        headline = set(self.headline(plan))
        runs = {label: key_of(row.run(seeds[0])) for label, row in rows.items()}
        several = {runs[label] for label in rows if label in headline}  # by what they come to: rows of one Run share their cells
        own = {row: seeds if runs[label] in several else seeds[:1] for label, row in rows.items()}
        found = carry_out(list(own), own, record, self.title, curves=True, **how)
        return {label: found[row] for label, row in rows.items() if found[row].summaries or found[row].errors}

    def _report(self, plan: P, outcomes: Mapping[str, Outcome], record: Record, docs: Path | None) -> None:
        groups = self.groups(plan)
        shown = [present for group in groups if len((present := _present(group, outcomes, self.called)).rows) > 1]
        missing = sum(label not in outcomes for group in groups for label in group.rows)
        told = self.introduction(plan, outcomes[DEFAULT])
        waiting = [f"**{missing} rows have not been run yet.**"] if missing else []
        again = f"{self.reading}\n\n```\n{outcomes[DEFAULT].row.command}\n```\n\n{figure_text.RULE}"
        claimed = self._claimed(plan, outcomes)
        sections = [f"## What was run\n\n{told}\n\n{again}", *waiting]
        sections += [*(_risen(table(group, outcomes, self.share)) for group in shown), claimed]
        drawn = self.plot(plan, outcomes, record.plot)
        readme = record.write(self.title, sections if drawn is None else [*sections, f"![{drawn}]({record.plot.name})"])
        brief = [_risen(brief_table(group, outcomes, self.share)) for group in shown]
        fill(docs, self.name, [f"{told}\n\n```sh\n{record.command}\n```", *waiting, claimed, *brief], record)
        print("\n\n".join(sections))
        print(f"\nrecord: {readme}")

    def _claimed(self, plan: P, outcomes: Mapping[str, Outcome]) -> str:
        """What the paper says, and whether it holds here."""
        told = claims_section(self.claims(plan), outcomes, common_scatter(outcomes))
        return "\n- ".join([_risen(told), *self.verdicts(plan, outcomes)])

    def _parser(self) -> argparse.ArgumentParser:
        first = self.about.splitlines()[0]
        parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        names = [group.name for group in self.groups(replace(self.plan(True), domains="."))]
        parser.add_argument("--text", type=Path, required=True, help="a folder that `atoll data prepare` wrote")
        parser.add_argument("--domains", type=Path, help="such a folder of several domains, for shards that differ")
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the headline; other rows have the first")
        parser.add_argument("--only", action="append", choices=names, help="run this table; may be given several times; None: all")
        parser.add_argument("--minutes", type=float, help="begin no further cell after so long")
        parser.add_argument("--processes", type=int, default=1, help="cells at a time, which share the device: it waits less")
        parser.add_argument("--quick", action="store_true", help="in miniature on the CPU, to see whether everything works")
        parser.add_argument("--lr", type=float, help="the inner rule's highest rate; None: the plan's")
        parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
        parser.add_argument("--record", type=Path, help=f"the record's folder; None: records/<today>_{self.name}")
        parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables")
        parser.add_argument("--quiet", action="store_true", help="no progress")
        return parser


def common_scatter(outcomes: Mapping[str, Outcome]) -> Scatter | None:
    """How much all rows scatter that have several seeds and train the default's model on its text. Rows of one Run are one."""
    default = outcomes[DEFAULT].row.run(0)
    several: dict[str, Sample] = {}
    for outcome in outcomes.values():
        run, loss = outcome.row.run(0), outcome.loss
        if loss is not None and loss.std is not None and (run.model, run.data) == (default.model, default.data):
            several[key_of(run)] = loss
    return scatter(list(several.values()))


def _check(options: argparse.Namespace) -> None:
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: it is at least 1. Use 1, or some more to fill a GPU, such as 6.")
    if options.minutes is not None and options.minutes < 0:
        raise ConfigError(f"--minutes {options.minutes:g}: it is at least 0. Use 0 to make the tables alone.")


def _wait_for_default(default: Run, asked: Sequence[Run], record: Record) -> None:
    """Says how the default's cell comes, without which there are no tables.

    Raises:
        ConfigError: there is no GPU here, which it needs, and so do rows that were asked for.
    """
    if _can_run_here(default):
        print("the default's cell is not there yet; give the same command again to go on")
    elif all(map(_can_run_here, asked)):
        print("the default's cell is not there yet, and needs CUDA; give the same command again where there is one to go on")
    else:
        raise ConfigError(
            f"rows need CUDA, torch sees none here, and the record {record.path} has no default's cell to make tables with. Use a "
            f"machine with CUDA, or --quick on a CPU, or give a --record whose tables are to be made again, with the --text, --lr "
            f"and --set of its command."
        )


def _risen(section: str) -> str:
    """A section of ablations, as one of a record."""
    return section.replace("### ", "## ", 1)


def _can_run_here(run: Run) -> bool:
    """So that what needs no GPU can be made anywhere, and the tables of what is there."""
    return run.train.device != "cuda" or torch.cuda.is_available()


def _present(group: Group, outcomes: Mapping[str, Outcome], default: str) -> Group:
    """The part of a group that has been run."""
    compared = group.against or dict.fromkeys(group.rows, default)
    against = {label: other for label, other in compared.items() if other in outcomes}
    if not against:
        against = {"": ""}  # none of them is compared with anything: not all with the default
    timed = {label: other for label, other in group.timed.items() if other in outcomes}
    rows = {label: row for label, row in group.rows.items() if label in outcomes}
    return replace(group, rows=rows, against=against, timed=timed)


def plot_curves(labels: Sequence[str], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Draws loss against virtual time of the rows with these labels; None if there are fewer than two."""
    drawn = {label: outcomes[label] for label in labels if label in outcomes and outcomes[label].curves}
    if len(drawn) < 2:
        return None
    save_figure(curves_figure, drawn, path)
    return "loss against virtual time"
