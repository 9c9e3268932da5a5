"""Islands that fail repeatedly for ten minutes or longer, against the same run without faults.

    python benchmarks/soak.py                                 8 islands, a kill every 20 s: about twenty minutes
    python benchmarks/soak.py --minutes 60 --every 10         longer, with more kills
    python benchmarks/soak.py --kinds Kill Freeze FullDisk    islands also freeze or have a full disk
    python benchmarks/soak.py --kinds Kill Freeze FullDisk Cut Slow UpdateFault --lighthouse     all faults
    python benchmarks/soak.py --islands 32 --minutes 32 --every 28 --sleep 4 --round 5 --inner-steps 5 --seed 2 --faults-only \
        --kinds Kill Freeze CutOneWay CutPair --lighthouse    over 125 faults an hour
    python benchmarks/soak.py --quick                         smoke test at small sizes

The seed decides which island is killed; the supervisor restarts it at once. After each commit every island logs the digest of its
state in its own log, and the script compares the logs. It checks the data units from the events. Islands sleep for most of a round,
so that two cores suffice for many of them and their restarts. Faults of links need network namespaces (Linux, as root): each island
then has its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure
from atoll.testing.chaos.faults import FAULTS
from progress import CellProgress
from record import Record, benchmark_parser, markdown_table, open_record, script
from soak_run import UPDATE_FAULTS, Soak, soak_cell

LEAST_SUCCEEDED, LEAST_PARTICIPATING, MOST_DIFFERENCE, LEAST_INJECTED = 0.97, 30 / 32, 0.05, 0.95
FAULTY, CALM = "with faults", "left alone"  # keys in records


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    soak = _soak(options)
    record = open_record(options, "soak")
    names = (FAULTY,) if options.faults_only else (FAULTY, CALM)
    cells = measure(record, soak, names, options.runs, quiet=options.quiet)
    sections = sections_of(cells[FAULTY], cells.get(CALM), soak)
    save_figure(figure, cells, record.plot)
    title = f"{soak.islands} islands, {' or '.join(soak.kinds)} every {soak.every_s:g} s"
    record.publish(title, sections, plot="islands and loss over time", docs=(options.docs, "soak"))


def measure(record: Record, soak: Soak, names: Sequence[str], runs: Path | None, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """The cells of these names. Measures those that the record does not have."""
    keys = {name: f"{name}: {soak.about()}" for name in names}
    missing = [name for name, key in keys.items() if record.get(key) is None]
    with tempfile.TemporaryDirectory() as temporary, CellProgress("soak", len(missing), quiet=quiet) as progress:
        for name in missing:
            progress.begin(name)
            folder = (runs or Path(temporary)) / name.replace(" ", "_")
            cell = soak_cell(soak, folder, broken=name == FAULTY, advance=progress.advance)
            record.add(keys[name], cell)
            progress.end(
                f"{name}: {cell['report']['commits']} commits in {cell['seconds']:.0f} s, loss {cell['report']['loss']:.4f}"
            )
    return {name: record[key] for name, key in keys.items()}


# ----------------------------------------------------------------------------------------------------------------- the report


def sections_of(faulty: Mapping[str, Any], calm: Mapping[str, Any] | None, soak: Soak) -> list[str]:
    report, cells = faulty["report"], [faulty, *([calm] if calm is not None else [])]
    rows = [[claim, figure, "yes" if holds else "**no**"] for claim, figure, holds in checks(faulty, calm, soak)]
    commit_s = [one["commit_s"] for one in report["recoveries"] if one["commit_s"] is not None]
    back_s = [one["back_s"] for one in report["recoveries"] if one["back_s"] is not None]
    setting = (
        f"{soak.islands} islands of {soak.run.model.num_params(256):,} parameters, rounds of {soak.inner_steps} steps "
        f"({soak.asleep_s:g} s of sleep). {_faults(report)}: a fault every {soak.every_s:g} s for {soak.minutes:g} minutes. "
        f"Shares are of the commits in that time, all other figures of the whole run. Load averages over five minutes, before and "
        f"after: {_loads(faulty)} with faults" + (f", {_loads(calm)} without." if calm is not None else ".")
    )
    attempts = (
        "Attempts are the commits and the attempts that failed before them, as the island that wrote the log counted them: a "
        "quorum had formed, and then a member did not answer, the exchange broke off, or the vote found a difference. Waiting for "
        "a quorum is no attempt."
    )
    only_faulty = ["-"] * (len(cells) - 1)
    figures = [
        ["commits, attempts", *(f"{c['report']['commits']}, {c['report']['attempts']}" for c in cells)],
        ["seconds from the first commit to the last", *(f"{c['seconds']:.0f}" for c in cells)],
        ["seconds from a commit to the next (mean)", *(f"{c['seconds'] / max(1, len(c['attended']) - 1):.2f}" for c in cells)],
        ["islands known, alive, participating (means)", *(_three(c["report"]) for c in cells)],
        ["units of data delivered, returned", *(f"{c['report']['delivered']}, {c['report']['returned']}" for c in cells)],
        ["tokens", *(f"{c['tokens']:,}" for c in cells)],
        ["final loss", *(f"{c['report']['loss']:.4f}" for c in cells)],
        ["seconds from a kill to the next commit (median, maximum)", _spread(commit_s), *only_faulty],
        ["seconds until the victim's work is in a commit again (median, maximum)", _spread(back_s), *only_faulty],
        ["commits that only one island has seen", *(str(c["report"]["unseen"]) for c in cells)],
    ]
    return [
        f"## Outcome\n\n{setting}\n\n" + markdown_table(["claim", "measured", "holds"], rows, left=3),
        "## Figures\n\n" + markdown_table(["", FAULTY, CALM][: 1 + len(cells)], figures) + f"\n\n{attempts}",
    ]


def checks(faulty: Mapping[str, Any], calm: Mapping[str, Any] | None, soak: Soak) -> list[tuple[str, str, bool]]:
    """Claims about the run with faults: claim, measured, and whether it holds."""
    report, faults = faulty["report"], sum(faulty["report"]["done"].values())
    # Every participating island logs its digest, unless a fault hits it between its vote and that line: then it fetches the state.
    participations = sum(row[3] for row in faulty["attended"])
    # A run that takes longer than planned has no faults at its end: that time does not count.
    with_faults = [row for row in faulty["attended"] if row[0] - faulty["attended"][0][0] <= soak.minutes * 60]
    succeeded, participating = len(with_faults) / sum(row[4] for row in with_faults), fmean(row[3] for row in with_faults)
    least = LEAST_PARTICIPATING * soak.islands
    data = "; ".join(report["data"]) or f"{report['delivered']} units, each in one commit; {report['returned']} leased again"
    equal = "; ".join(report["apart"]) or f"{report['compared']} digests of {participations} in the islands' logs, all equal"
    complete = report["compared"] >= max(1, participations - faults)
    hour = faults / soak.minutes * 60
    claims = [
        (
            f"the faults of the script were injected (at least {LEAST_INJECTED:.0%})",
            f"{faults} of {report['planned']}: {hour:.0f} an hour",
            faults >= LEAST_INJECTED * report["planned"],
        ),
        ("all islands bitwise equal after each commit", equal, not report["apart"] and complete),
        (f"at least {LEAST_SUCCEEDED:.0%} of commits succeed", f"{succeeded:.1%}", succeeded >= LEAST_SUCCEEDED),
        (f"at least {least:g} of {soak.islands} islands participate on average", f"{participating:.2f}", participating >= least),
        ("every unit of data in exactly one commit", data, not report["data"]),
    ]
    if calm is not None:
        difference, same_tokens = abs(report["loss"] - calm["report"]["loss"]), bool(faulty["tokens"] == calm["tokens"])
        claim = f"final losses within {MOST_DIFFERENCE} at equal tokens"
        claims.append((claim, f"{difference:.4f}", same_tokens and difference <= MOST_DIFFERENCE))
    return claims


def _faults(report: Mapping[str, Any]) -> str:
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(report["done"].items()))
    skipped = f", and skipped {len(report['skipped'])}" if report["skipped"] else ""
    return f"The injector made {done}{skipped}"


def _three(report: Mapping[str, Any]) -> str:
    return ", ".join(f"{report[name]:.2f}" for name in ("known", "alive", "participating"))


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"


def _loads(cell: Mapping[str, Any]) -> str:
    return " and ".join(f"{load:.1f}" for load in cell["load"])


def figure(cells: Mapping[str, Mapping[str, Any]]) -> Any:
    """Islands and loss over time, with ticks for kills."""
    drawn, (islands, loss) = new_figure(2)
    faulty = cells[FAULTY]
    zero_s = faulty["attended"][0][0]
    times_s = [row[0] - zero_s for row in faulty["attended"]]
    for column, name in ((1, "known"), (2, "alive"), (3, "participating")):
        islands.step(times_s, [row[column] for row in faulty["attended"]], where="post", label=name, color=COLOURS[column - 1])
    kills_s = [one["at_s"] for one in faulty["report"]["recoveries"]]
    for panel in (islands, loss):
        panel.set_xlabel("seconds after the first commit")
        panel.plot(kills_s, [0.02] * len(kills_s), "|", color="black", transform=panel.get_xaxis_transform(), label="kill")
    islands.set_ylim(0, max(row[1] for row in faulty["attended"]) + 1)
    islands.set_ylabel("islands")
    for (name, cell), colour in zip(cells.items(), (COLOURS[1], COLOURS[0]), strict=False):
        start_s = cell["attended"][0][0]
        loss.plot([row[0] - start_s for row in cell["losses"]], [row[2] for row in cell["losses"]], label=name, color=colour)
    loss.set_ylabel("validation loss")
    for panel in (islands, loss):
        panel.legend(frameon=False)
    return drawn


def _soak(options: argparse.Namespace) -> Soak:
    soak = Soak(
        islands=options.islands,
        minutes=options.minutes,
        every_s=options.every,
        seed=options.seed,
        asleep_s=options.sleep,
        round_s=options.round,
        inner_steps=options.inner_steps,
        kinds=tuple(options.kinds),
        lighthouse=options.lighthouse,
    )
    small = {"islands": 2, "minutes": 0.1, "every_s": 4.0, "asleep_s": 0.4, "inner_steps": 2, "layers": 1, "width": 8, "for_s": 1.0}
    return replace(soak, **small) if options.quick else soak


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, "soak", page="docs/chaos.md", quick=True)
    parser.add_argument("--minutes", type=float, default=Soak.minutes, help="duration of each of the two runs")
    parser.add_argument("--islands", type=int, default=Soak.islands, help="number of islands, each a process")
    parser.add_argument("--every", type=float, default=Soak.every_s, help="seconds between two faults")
    parser.add_argument("--sleep", type=float, default=Soak.asleep_s, help="seconds that an island sleeps in a round")
    parser.add_argument("--round", type=float, help="seconds that a round is assumed to take; None: 1.2 times its sleep")
    parser.add_argument("--faults-only", action="store_true", help="leave out the run without faults, and the comparison of losses")
    parser.add_argument("--inner-steps", type=int, default=Soak.inner_steps, help="of a round")
    parser.add_argument("--kinds", nargs="+", choices=[*FAULTS, UPDATE_FAULTS], default=list(Soak.kinds), help="kinds of faults")
    parser.add_argument("--lighthouse", action="store_true", help="faults also hit the lighthouse")
    parser.add_argument("--seed", type=int, default=Soak.seed, help="seed of weights, data and faults")
    parser.add_argument("--runs", type=Path, help="keep the run folders here; None: remove them")
    return parser


if __name__ == "__main__":
    script(main)
