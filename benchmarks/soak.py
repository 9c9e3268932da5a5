"""Islands that are killed repeatedly for ten minutes, against the same run without faults.

    python benchmarks/soak.py                                 8 islands, a kill every 20 s: some twenty minutes in all
    python benchmarks/soak.py --minutes 60 --every 10         longer, and worse
    python benchmarks/soak.py --kinds Kill Freeze FullDisk    frozen too, and without room on the disk
    python benchmarks/soak.py --kinds Kill Freeze FullDisk Cut Slow UpdateFault --lighthouse     all that the kit can do
    python benchmarks/soak.py --quick                         in miniature, to see whether it works here

Who is killed is drawn from the seed; the supervisor starts it again at once. Every island writes down the digest of what it holds
after each commit in a log of its own, and these are compared: nobody is trusted. The account of data is added up from the events.
Islands sleep for most of a round, so that eight of them, and the starts of those that were killed, find room on two cores. Lines
can be cut and slow where network namespaces can be made (Linux, as root): each island is then in one of its own.
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
from progress import Watch
from record import Record, default_path, fill, markdown_table, script
from soak_run import KINDS, UPDATE_FAULTS, Soak, carried_out

LEAST_SUCCEEDED, LEAST_PARTICIPATING, MOST_APART = 0.90, 7 / 8, 0.05
BROKEN, ALONE = "with kills", "left alone"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    soak = _soak(options)
    record = Record(options.record or default_path("soak" + ("_quick" if options.quick else "")))
    cells = measure(record, soak, options.runs, quiet=options.quiet)
    sections = sections_of(cells[BROKEN], cells[ALONE], soak)
    save_figure(figure, cells, record.plot)
    readme = record.write(
        f"{soak.islands} islands, {' or '.join(soak.kinds)} of one every {soak.every_s:g} s",
        [*sections, f"![the run]({record.plot.name})"],
    )
    fill(options.docs, "soak", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def measure(record: Record, soak: Soak, runs: Path | None, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """Both cells; those that the record does not have are made."""
    keys = {name: f"{name}: {soak.about()}" for name in (BROKEN, ALONE)}
    todo = [name for name, key in keys.items() if record.get(key) is None]
    with tempfile.TemporaryDirectory() as temporary, Watch("soak", len(todo), quiet=quiet) as watch:
        for name in todo:
            watch.begin(name)
            folder = (runs or Path(temporary)) / name.replace(" ", "_")
            cell = carried_out(soak, folder, broken=name == BROKEN, advance=watch.advance)
            record.add(keys[name], cell)
            watch.end(f"{name}: {cell['report']['commits']} commits in {cell['seconds']:.0f} s, loss {cell['report']['loss']:.4f}")
    return {name: record[key] for name, key in keys.items()}


# --------------------------------------------------------------------------------------------------------------- what it found


def sections_of(broken: Mapping[str, Any], alone: Mapping[str, Any], soak: Soak) -> list[str]:
    report = broken["report"]
    rows = [[claim, figure, "yes" if holds else "**no**"] for claim, figure, holds in checks(broken, alone, soak)]
    commit_s = [one["commit_s"] for one in report["recoveries"] if one["commit_s"] is not None]
    back_s = [one["back_s"] for one in report["recoveries"] if one["back_s"] is not None]
    words = (
        f"{soak.islands} islands of {soak.run.model.num_params(256):,} parameters, rounds of {soak.inner_steps} steps "
        f"({soak.asleep_s:g} s asleep). {_done(report)}, one every {soak.every_s:g} s for "
        f"{soak.minutes:g} minutes; shares are of the commits in that time, all else is of the whole run. Load "
        f"averages over five minutes, before and after: {_loads(broken)} with kills, {_loads(alone)} without."
    )
    figures = [
        ["commits, attempts", *(f"{c['report']['commits']}, {c['report']['attempts']}" for c in (broken, alone))],
        ["seconds from the first commit to the last", *(f"{c['seconds']:.0f}" for c in (broken, alone))],
        ["islands known, alive, participating (means)", *(_three(c["report"]) for c in (broken, alone))],
        ["units delivered, returned", *(f"{c['report']['delivered']}, {c['report']['returned']}" for c in (broken, alone))],
        ["tokens", *(f"{c['tokens']:,}" for c in (broken, alone))],
        ["final loss", *(f"{c['report']['loss']:.4f}" for c in (broken, alone))],
        ["seconds from a kill to the next commit (median, most)", _spread(commit_s), "-"],
        ["seconds until the victim's work is in a commit again (median, most)", _spread(back_s), "-"],
        ["commits that one island alone had seen", *(str(c["report"]["unseen"]) for c in (broken, alone))],
    ]
    return [
        f"## Outcome\n\n{words}\n\n" + markdown_table(["what is asked", "what came out", "holds"], rows, left=3),
        "## Figures\n\n" + markdown_table(["", BROKEN, ALONE], figures),
    ]


def checks(broken: Mapping[str, Any], alone: Mapping[str, Any], soak: Soak) -> list[tuple[str, str, bool]]:
    """What is asked of the run with kills, what came out, and whether it holds."""
    report = broken["report"]
    # Everybody who takes part writes down what it holds; whoever is killed right then may not come to it.
    expected = sum(row[3] for row in broken["attended"]) - report["done"].get("Kill", 0)
    # A run that takes longer than planned ends in peace: that time is not to count.
    stormy = [row for row in broken["attended"] if row[0] - broken["attended"][0][0] <= soak.minutes * 60]
    succeeded, participating = len(stormy) / sum(row[4] for row in stormy), fmean(row[3] / row[2] for row in stormy)
    apart = abs(report["loss"] - alone["report"]["loss"])
    data = "; ".join(report["data"]) or f"{report['delivered']} units, each in one commit; {report['returned']} leased again"
    equal = "; ".join(report["apart"]) or f"{report['compared']} digests in islands' own logs, none differs"
    return [
        ("every island equal to the bit after each commit", equal, not report["apart"] and report["compared"] >= max(1, expected)),
        (f"at least {LEAST_SUCCEEDED:.0%} of commits succeed", f"{succeeded:.1%}", succeeded >= LEAST_SUCCEEDED),
        (
            "participating over alive at least 7/8 on average",
            f"{participating:.3f}",
            participating >= LEAST_PARTICIPATING,
        ),
        ("every unit of data in exactly one commit", data, not report["data"]),
        (f"final loss within {MOST_APART} at equal tokens", f"{apart:.4f} apart", _alike(broken, alone) and apart <= MOST_APART),
    ]


def _done(report: Mapping[str, Any]) -> str:
    kills = report["done"].get("Kill", 0)
    others = [f"{count} {kind}" for kind, count in report["done"].items() if kind != "Kill"]
    return " and ".join([f"{kills} kills", *others]) + " of islands"


def _alike(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return bool(one["tokens"] == two["tokens"])


def _three(report: Mapping[str, Any]) -> str:
    return ", ".join(f"{report[name]:.2f}" for name in ("known", "alive", "participating"))


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"


def _loads(cell: Mapping[str, Any]) -> str:
    return " and ".join(f"{load:.1f}" for load in cell["load"])


def figure(cells: Mapping[str, Mapping[str, Any]]) -> Any:
    """Who was there, and the loss, over time; kills are ticks below."""
    drawn, (who, loss) = new_figure(2)
    broken = cells[BROKEN]
    zero_s = broken["attended"][0][0]
    times_s = [row[0] - zero_s for row in broken["attended"]]
    for column, name in ((1, "known"), (2, "alive"), (3, "participating")):
        who.step(times_s, [row[column] for row in broken["attended"]], where="post", label=name, color=COLOURS[column - 1])
    kills_s = [one["at_s"] for one in broken["report"]["recoveries"]]
    for panel in (who, loss):
        panel.set_xlabel("seconds after the first commit")
        panel.plot(kills_s, [0.02] * len(kills_s), "|", color="black", transform=panel.get_xaxis_transform(), label="kill")
    who.set_ylim(0, max(row[1] for row in broken["attended"]) + 1)
    who.set_ylabel("islands")
    for name, cell, colour in ((BROKEN, broken, COLOURS[1]), (ALONE, cells[ALONE], COLOURS[0])):
        begun_s = cell["attended"][0][0]
        loss.plot([row[0] - begun_s for row in cell["losses"]], [row[2] for row in cell["losses"]], label=name, color=colour)
    loss.set_ylabel("validation loss")
    for panel in (who, loss):
        panel.legend(frameon=False)
    return drawn


def _soak(options: argparse.Namespace) -> Soak:
    asked = Soak(
        islands=options.islands,
        minutes=options.minutes,
        every_s=options.every,
        seed=options.seed,
        kinds=tuple(options.kinds),
        lighthouse=options.lighthouse,
    )
    small = {"islands": 2, "minutes": 0.1, "every_s": 4.0, "asleep_s": 0.4, "inner_steps": 2, "layers": 1, "width": 8, "for_s": 1.0}
    return replace(asked, **small) if options.quick else asked


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=Soak.minutes, help="of each of the two runs")
    parser.add_argument("--islands", type=int, default=Soak.islands, help="each a process")
    parser.add_argument("--every", type=float, default=Soak.every_s, help="seconds between two faults")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, UPDATE_FAULTS], default=list(Soak.kinds), help="of faults")
    parser.add_argument("--lighthouse", action="store_true", help="it is a victim too")
    parser.add_argument("--seed", type=int, default=Soak.seed, help="of weights, data and faults")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether it works")
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here; None: they are removed")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_soak")
    parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables, such as docs/chaos.md")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
