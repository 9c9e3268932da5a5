"""What kills cost in loss: real islands are killed, and return. `joiner_moments.py` is the same question in the simulator.

    python benchmarks/elastic_losses.py     16 elastic runs

A small run of demo-diloco on two equal islands. An elastic island gets a SIGKILL while it sends its delta, after a third of the
rounds or after each third, and returns with empty inner moments or with its donor's. Steps sleep, so that a round takes about as
long as it does with a larger model, and the killed island misses few rounds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.events import Attended, RunFinished
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.run_lifecycle import run
from atoll.engines.warm_start_training import Cache
from atoll.runs.run_settings import Run
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import FaultScript, UpdateFault
from cells import Outcome, Row, key_of, seeds_parser, seeds_text
from figure_text import RULE, difference_text, loss_columns, loss_headings
from progress import CellProgress
from record import Record, markdown_table, open_record, script

ISLANDS, STEP_DELAY_S = 2, 0.2
COMMAND = ["benchmarks/elastic_losses.py"]
SIZE = ("cluster.islands=2", "cluster.step_time_s=[1.0]", "train.steps=300", "train.batch_size=16", "train.warm_start_steps=100")
NONE = "no kill"
KEPT = {"empty": "empty moments", "donor": "the donor's moments"}


@dataclass(frozen=True)
class Kills:
    """How often an elastic run is killed, and the moments with which killed islands return."""

    count: int
    moments: str = "empty"

    @property
    def label(self) -> str:
        words = {0: NONE, 1: "one kill, after a third of the rounds", 2: "two kills, one after each third"}[self.count]
        return f"{words}: {KEPT[self.moments]}" if self.count else words

    def row(self, base: Sequence[str]) -> Row:
        return Row(recipe="demo-diloco", base=(*SIZE, *base), settings=(f"train.joiner_moments={self.moments}",), name=self.label)


KILLS = (Kills(0), Kills(1), Kills(2), Kills(2, "donor"))
TWICE = (KILLS[2].label, KILLS[3].label)
"""Rows that differ in the moments alone."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "elastic_losses", "docs/elastic.md")
    parser.set_defaults(seeds=[0, 1, 2, 3])
    options = parser.parse_args(arguments)
    record = open_record(options, "elastic_losses")
    elastic = measure(record, options.seeds, tuple(options.set), quiet=options.quiet)
    sections = report(elastic, options.seeds, tuple(options.set))
    record.publish("What a kill costs in loss", sections, docs=(options.docs, "elastic_losses"))


# ------------------------------------------------------------------------------------------------------------------- the runs


def thirds(described: Run) -> list[int]:
    """The rounds in which islands are killed."""
    rounds = described.rounds(described.train.steps)
    return [rounds // 3, 2 * rounds // 3]


def measure(record: Record, seeds: Sequence[int], base: tuple[str, ...], *, quiet: bool) -> dict[str, Outcome]:
    """The elastic rows. Runs the cells that the record does not have."""
    wanted = {(kills, seed): f"{kills.count} kills {key_of(kills.row(base).run(seed))}" for seed in seeds for kills in KILLS}
    missing = [one for one, key in wanted.items() if record.get(key) is None]
    with tempfile.TemporaryDirectory() as temporary, CellProgress("elastic", len(missing), quiet=quiet) as progress:
        cache = Cache(Path(temporary) / "cache")
        for number, (kills, seed) in enumerate(missing):
            name = f"{kills.label}, seed {seed}"
            progress.begin(name)
            cell = after_kills(kills, kills.row(base).run(seed), Path(temporary) / str(number), cache)
            record.add(wanted[kills, seed], {"kills": kills.count, "moments": kills.moments, "seed": seed, **cell})
            record.log(f"{name}: {cell['val_loss']:.4f}")
            progress.end(f"{name}: {cell['val_loss']:.4f}")
    return {kills.label: Outcome(kills.row(base), tuple(record[wanted[kills, seed]] for seed in seeds)) for kills in KILLS}


def after_kills(kills: Kills, described: Run, folder: Path, cache: Cache) -> dict[str, object]:
    """The final loss of an elastic run with these kills, its rounds, and in how many of them an island was missing."""
    faults = tuple(
        UpdateFault(island=island_name(ISLANDS - 1 - number), round=after, kind="kill_in_delta")
        for number, after in enumerate(thirds(described)[: kills.count])
    )
    result = run(
        described,
        engine=Elastic(processes=ISLANDS, step_delay=STEP_DELAY_S if faults else 0.0, start_timeout_s=300.0),
        out=folder,
        command=COMMAND,
        cache=cache,
        faults=RunFaults(FaultScript(update_faults=faults)) if faults else None,
    )
    assert result is not None
    commits = [event for event in read_events(folder / "events.jsonl", [Attended]) if isinstance(event, Attended)]
    (end,) = [event for event in read_events(folder / "events.jsonl", [RunFinished]) if isinstance(event, RunFinished)]
    missed = sum(event.participating < ISLANDS for event in commits)
    return {"val_loss": result.val_loss, "digest": end.digest, "rounds": len(commits), "missed": missed, "load": os.getloadavg()[0]}


# ----------------------------------------------------------------------------------------------------------------- the report


def report(elastic: Mapping[str, Outcome], seeds: Sequence[int], base: tuple[str, ...]) -> list[str]:
    described = KILLS[0].row(base).run(0)
    after = thirds(described)
    words = (
        f"`demo-diloco` with {', '.join(f'`{one}`' for one in (*SIZE, *base))}: {described.rounds(described.train.steps)} rounds "
        f"without kills, {seeds_text(seeds)}. {RULE}"
    )
    table = markdown_table(
        [*loss_headings(NONE), "rounds", "of them with one island"],
        [
            [label, *loss_columns(outcome, elastic[NONE]), *(_span(outcome, figure) for figure in ("rounds", "missed"))]
            for label, outcome in elastic.items()
        ],
    )
    found, verdict = difference_text(elastic[TWICE[1]].loss, elastic[TWICE[0]].loss)
    loads = [summary["load"] for outcome in elastic.values() for summary in outcome.summaries]
    killed = (
        f"The script kills an island in its exchange of round {after[0]}, and with two kills the other one in that of round "
        f"{after[1]}. Islands sleep {STEP_DELAY_S:g} s per step in runs with kills. How many rounds the killed island misses "
        f"depends on how long it takes to start; the machine's load was {min(loads):.0f} to {max(loads):.0f}. Twice with the "
        f"donor's moments minus twice with empty ones: {found} (verdict: {verdict})."
    )
    return [words, f"## Elastic islands that are killed\n\n{killed}\n\n{table}"]


def _span(outcome: Outcome, figure: str) -> str:
    least, most = (of(summary[figure] for summary in outcome.summaries) for of in (min, max))
    return f"{least}" if least == most else f"{least} to {most}"


if __name__ == "__main__":
    script(main)
