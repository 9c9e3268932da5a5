"""The cost of elasticity: when no island fails, and when one is killed.

    python benchmarks/elastic_cost.py             about thirteen minutes on two idle cores; leave the machine alone meanwhile
    python benchmarks/elastic_cost.py --quick     in miniature, to see whether it works here

When nothing fails: the same Run by two processes with `--elastic` and with plain `--engine dist`, in turn, and the time of a round
by their own logs; and once with a larger model and hardly any steps, to see what a commit costs. When one is killed: two islands,
one of which dies by SIGKILL in the middle of its steps, shortly before they are over, or in the middle of the exchange; and early
in a round that is longer than it takes to start again, so that it is back while the other still trains, and must not be waited for.
How long after the end of its own steps the other commits, by its own clock; and whether weights and outer momentum of both are the
same bits once the dead one is back, all of them fetched and compared.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from elastic_runs import Size, deaths_in, killed, kills_at, round_times
from progress import Watch
from record import Record, default_path, fill, markdown_table, script

MOST_COST, MOST_DELAY_S = 0.03, 2.0
HEAVY = {elastic: f"heavy, {'elastic' if elastic else 'plain'}" for elastic in (True, False)}
TRAINING, EARLY, MEETING = "killed in training", "killed early", "killed in the exchange"
PLAN: dict[str, Any] = {
    "pairs": 3,
    "calm": Size(layers=4, width=128, seq_len=64, batch_size=8, inner_steps=2, rounds=10, asleep_s=2.5),
    "heavy": Size(layers=8, width=512, seq_len=32, batch_size=1, inner_steps=2, rounds=12),
    "train": Size(layers=2, width=64, seq_len=32, batch_size=4, inner_steps=10, rounds=32, asleep_s=2.5),
    "moments_s": [8.3, 22.0, 35.1, 48.8, 61.9],
    "long": Size(layers=2, width=64, seq_len=32, batch_size=4, inner_steps=10, rounds=7, asleep_s=15.0),
    "early_s": [1.5, 48.0],
    "meet": Size(layers=2, width=768, seq_len=16, batch_size=1, inner_steps=1, rounds=27, asleep_s=2.0),
    "deaths": [3, 9, 15, 21],
}
QUICK: dict[str, Any] = {
    "pairs": 1,
    "calm": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=3),
    "heavy": Size(layers=1, width=32, seq_len=16, batch_size=2, inner_steps=2, rounds=3),
    "train": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=14, asleep_s=1.0),
    "moments_s": [2.5],
    "long": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=3, asleep_s=8.0),
    "early_s": [0.5],
    "meet": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=14, asleep_s=1.0),
    "deaths": [2],
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    record = Record(options.record or default_path("elastic_cost" + ("_quick" if options.quick else "")))
    plan = QUICK if options.quick else PLAN
    cells = measure(record, plan, options.runs, quiet=options.quiet)
    sections = [calm_section(cells, plan), *killed_sections(cells, plan)]
    readme = record.write("What it costs that islands may come and go", sections)
    fill(options.docs, "elastic_cost", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def measure(record: Record, plan: Mapping[str, Any], runs: Path | None, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """All cells, by name; those that the record does not have are made."""
    todo = {name: make for name, make in _cells(plan).items() if record.get(_key(name, plan)) is None}
    with tempfile.TemporaryDirectory() as temporary, Watch("elastic cost", len(todo), quiet=quiet) as watch:
        for name, make in todo.items():
            watch.begin(name)
            cell = make((runs or Path(temporary)) / name.replace(" ", "_"))
            record.add(_key(name, plan), cell)
            watch.end(f"{name}: " + (f"{cell['round_s']:.3f} s a round" if "round_s" in cell else f"{len(cell['deaths'])} deaths"))
    return {name: record[_key(name, plan)] for name in _cells(plan)}


def _cells(plan: Mapping[str, Any]) -> dict[str, Callable[[Path], dict[str, Any]]]:
    cells: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for pair in range(plan["pairs"]):
        for elastic in (pair % 2 == 0, pair % 2 == 1):  # in turn, and who comes first in turn too
            name = f"{'elastic' if elastic else 'plain'} {pair}"
            cells[name] = lambda folder, elastic=elastic: round_times(plan["calm"], folder, elastic=elastic)  # type: ignore[misc]
    for elastic, name in HEAVY.items():
        cells[name] = lambda folder, elastic=elastic: round_times(plan["heavy"], folder, elastic=elastic)  # type: ignore[misc]
    cells[TRAINING] = lambda folder: killed(plan["train"], folder, kills_at(plan["moments_s"]))
    cells[EARLY] = lambda folder: killed(plan["long"], folder, kills_at(plan["early_s"]))
    cells[MEETING] = lambda folder: killed(plan["meet"], folder, deaths_in(plan["deaths"]))
    return cells


def _key(name: str, plan: Mapping[str, Any]) -> str:
    of: dict[str, tuple[str, str | None]] = dict.fromkeys(HEAVY.values(), ("heavy", None))
    of |= {TRAINING: ("train", "moments_s"), EARLY: ("long", "early_s"), MEETING: ("meet", "deaths")}
    size, script_of = of.get(name, ("calm", None))
    return f"{name}: {plan[size]} {plan[script_of] if script_of else ''}"


# ------------------------------------------------------------------------------------------------------------------- in words


def calm_section(cells: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    pairs = [(cells[f"elastic {pair}"], cells[f"plain {pair}"]) for pair in range(plan["pairs"])]
    costs = [one["round_s"] / two["round_s"] - 1 for one, two in pairs]
    rows = [
        [str(n), f"{e['round_s']:.3f}", f"{p['round_s']:.3f}", f"{cost:+.1%}", f"{e['exchange_s']:.3f}", f"{p['exchange_s']:.3f}"]
        for n, ((e, p), cost) in enumerate(zip(pairs, costs, strict=True))
    ]
    headings = ["pair", "elastic, s a round", "plain, s a round", "cost", "elastic, s of it exchanging", "plain"]
    same = all(one["digest"] == two["digest"] for one, two in pairs)
    size: Size = plan["calm"]
    words = (
        f"Two islands, {size.model.num_params(256):,} parameters, rounds of {size.inner_steps} steps, with "
        f"{size.asleep_s:g} s asleep in them to play larger ones; medians over the {size.rounds - 1} rounds after the first. Fault "
        f"tolerance costs {median(costs):+.1%} of a round (median of the pairs; "
        f"asked for: less than {MOST_COST:.0%}): {_verdict(median(costs) < MOST_COST)}. The weights at the end are "
        f"{'the same bits' if same else '**not the same**'} with both."
    )
    return f"## When nothing fails\n\n{words}\n\n{markdown_table(headings, rows)}\n\n{heavy_words(cells, plan)}"


def heavy_words(cells: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """What a commit of a larger model costs, and for how short rounds that is too much."""
    elastic, plain, size = cells[HEAVY[True]], cells[HEAVY[False]], plan["heavy"]
    more_s = elastic["round_s"] - plain["round_s"]
    enough = (
        f"within {MOST_COST:.0%} of rounds of {more_s / MOST_COST:.0f} s and longer" if more_s > 0 else "nothing that could be seen"
    )
    return (
        f"A commit of {size.model.num_params(256):,} parameters, in rounds of {size.inner_steps} small steps without sleep: a "
        f"round takes {elastic['round_s']:.3f} s against {plain['round_s']:.3f} s, of which {elastic['exchange_s']:.3f} s against "
        f"{plain['exchange_s']:.3f} s exchanging. Checksums, votes and the published state cost {more_s:+.3f} s a commit: {enough}."
    )


def killed_sections(cells: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    killed_ones = [cells[name] for name in (TRAINING, EARLY, MEETING)]
    rows = []
    for cell in killed_ones[:2]:
        for into_s, death in zip(cell["into_round_s"], cell["deaths"], strict=False):
            back = ", and back before its end" if cell is cells[EARLY] and death["alive"] > 1 else ""
            rows.append([f"{into_s:.1f} s into the round{back}", *_death(death)])
    hows = ["while deltas are under way", "while the mean is under way"]
    for number, death in enumerate(cells[MEETING]["deaths"]):
        rows.append([hows[number // 2 % 2], *_death(death)])
    delays = [death["delay_s"] for cell in killed_ones for death in cell["deaths"]]
    twins = [twin for cell in killed_ones for twin in cell["twins"]]
    equal = bool(twins) and all(twin["equal"] for twin in twins)
    sound = not any(cell["data"] or cell["apart"] for cell in killed_ones)
    words = (
        f"One of two islands is killed, {len(delays)} times. The other commits at most {max(delays):.2f} s after the end of its "
        f"own steps (asked for: at most {MOST_DELAY_S:g} s): {_verdict(max(delays) <= MOST_DELAY_S)}. {len(twins)} times the dead "
        f"one came back and all tensors of both, weights and outer momentum, were fetched and compared: "
        f"{'the same bits each time' if equal else '**not the same**'}. Data and digests of the runs: "
        f"{'nothing is lost, twice or apart' if sound else '**see the cells**'}."
    )
    headings = ["killed", "its steps, s", "commit after them, s", "attempts", "both again after, s"]
    return [f"## When one is killed\n\n{words}\n\n" + markdown_table(headings, rows)]


def _death(death: Mapping[str, Any]) -> list[str]:
    back = f"{death['back_s']:.1f}" if death["back_s"] is not None else "-"
    return [f"{death['steps_s']:.2f}", f"{death['delay_s']:.2f}", str(death["attempts"]), back]


def _verdict(holds: bool) -> str:
    return "it holds" if holds else "**it does not hold**"


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether it works")
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here; None: they are removed")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_elastic_cost")
    parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables, such as docs/chaos.md")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
