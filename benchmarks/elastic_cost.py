"""The cost of elasticity: when no island fails, and when one is killed.

    python benchmarks/elastic_cost.py             about twenty minutes on two idle cores
    python benchmarks/elastic_cost.py --quick     smoke test at small sizes
    python benchmarks/elastic_cost.py --commits   only the cost of a commit of 25M parameters, and of TLS

Without failures: the same Run on two processes with `--engine elastic` and with `--engine processes`, in turn, with the round times
of their event logs; and in the same way with a larger model and few steps, for the cost of a commit beyond the same exchange on
processes. `elastic_transports.py` tells apart what TLS adds to it. With failures: two islands, one of which
gets a SIGKILL in the middle of its steps, shortly before their end, or in the middle of the exchange; and early in a round that is
longer than a restart, so that the killed island is back while the other still trains, and must not be waited for. The script
measures how long after its own steps the survivor commits. After the killed island's return it fetches weights and outer momentum
of both and compares the bits. `elastic_losses.py` measures what kills cost in loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from elastic_runs import Size, deaths_in, killed, kills_at, round_times
from elastic_transports import Plan, transport_costs, transport_section
from progress import CellProgress
from record import Record, benchmark_parser, markdown_table, open_record, script

MOST_COST, MOST_DELAY_S, MOST_COMMIT_S = 0.03, 2.0, 0.1
KINDS = {True: "elastic", False: "plain"}
TLS_COST = "transports"
TRAINING, EARLY, MEETING = "killed in training", "killed early", "killed in the exchange"
PLAN: dict[str, Any] = {
    "pairs": 3,
    "heavy_pairs": 5,
    "calm": Size(layers=4, width=128, seq_len=64, batch_size=8, inner_steps=2, rounds=10, asleep_s=2.5),
    "heavy": Size(layers=8, width=512, seq_len=32, batch_size=1, inner_steps=2, rounds=12),
    "transports": Plan(25_000_000, 15),
    "train": Size(layers=2, width=64, seq_len=32, batch_size=4, inner_steps=10, rounds=32, asleep_s=2.5),
    "moments_s": [8.3, 22.0, 35.1, 48.8, 61.9],
    "long": Size(layers=2, width=64, seq_len=32, batch_size=4, inner_steps=10, rounds=7, asleep_s=15.0),
    "early_s": [1.5, 48.0],
    "meet": Size(layers=2, width=768, seq_len=16, batch_size=1, inner_steps=1, rounds=27, asleep_s=2.0),
    "deaths": [3, 9, 15, 21],
}
QUICK: dict[str, Any] = {
    "pairs": 1,
    "heavy_pairs": 2,
    "calm": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=3),
    "heavy": Size(layers=1, width=32, seq_len=16, batch_size=2, inner_steps=2, rounds=3),
    "transports": Plan(10_000, 2),
    "train": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=14, asleep_s=1.0),
    "moments_s": [2.5],
    "long": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=3, asleep_s=8.0),
    "early_s": [0.5],
    "meet": Size(layers=1, width=16, seq_len=16, batch_size=2, inner_steps=2, rounds=14, asleep_s=1.0),
    "deaths": [2],
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "elastic_cost", page="docs/chaos.md", quick=True)
    parser.add_argument("--runs", type=Path, help="keep the run folders here; None: remove them")
    parser.add_argument("--commits", action="store_true", help="measure only the cost of a commit and of TLS; changes no page")
    options = parser.parse_args(arguments)
    record = open_record(options, "elastic_cost")
    plan = QUICK if options.quick else PLAN
    cells = measure(record, plan, options.runs, commits=options.commits, quiet=options.quiet)
    commits = commit_section(cells, plan)
    if options.commits:
        record.publish("The cost of a commit", [commits])
        return
    sections = [f"{calm_section(cells, plan)}\n\n{commits}", killed_section(cells)]
    record.publish("The cost of elasticity", sections, docs=(options.docs, "elastic_cost"))


def measure(record: Record, plan: Mapping[str, Any], runs: Path | None, *, commits: bool, quiet: bool) -> dict[str, dict[str, Any]]:
    """All cells, by name, or those of `commit_section`. Measures those that the record does not have."""
    cells = {name: cell for name, cell in _cells(plan).items() if not commits or name == TLS_COST or name.startswith("heavy")}
    missing = {name: make for name, make in cells.items() if record.get(_key(name, plan)) is None}
    with tempfile.TemporaryDirectory() as temporary, CellProgress("elastic cost", len(missing), quiet=quiet) as progress:
        for name, make in missing.items():
            progress.begin(name)
            cell = make((runs or Path(temporary)) / name.replace(" ", "_"))
            record.add(_key(name, plan), cell)
            progress.end(f"{name}: {cell['round_s']:.3f} s per round" if "round_s" in cell else name)
    return {name: record[_key(name, plan)] for name in cells}


def _cells(plan: Mapping[str, Any]) -> dict[str, Callable[[Path], dict[str, Any]]]:
    cells: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for size, before, pairs in (("calm", "", plan["pairs"]), ("heavy", "heavy ", plan["heavy_pairs"])):
        for pair in range(pairs):
            for elastic in (pair % 2 == 0, pair % 2 == 1):  # in turn, with alternating order
                cells[f"{before}{KINDS[elastic]} {pair}"] = partial(round_times, plan[size], elastic=elastic)
    cells[TLS_COST] = lambda folder: transport_costs(plan["transports"])
    cells[TRAINING] = lambda folder: killed(plan["train"], folder, kills_at(plan["moments_s"]))
    cells[EARLY] = lambda folder: killed(plan["long"], folder, kills_at(plan["early_s"]))
    cells[MEETING] = lambda folder: killed(plan["meet"], folder, deaths_in(plan["deaths"]))
    return cells


def _key(name: str, plan: Mapping[str, Any]) -> str:
    of: dict[str, tuple[str, str | None]] = {TLS_COST: ("transports", None), TRAINING: ("train", "moments_s")}
    of |= {EARLY: ("long", "early_s"), MEETING: ("meet", "deaths")}
    size, script_of = of.get(name, ("heavy" if name.startswith("heavy") else "calm", None))
    return f"{name}: {plan[size]} {plan[script_of] if script_of else ''}"


# ----------------------------------------------------------------------------------------------------------------- the report


def _pairs(cells: Mapping[str, Mapping[str, Any]], before: str, pairs: int) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return [(cells[f"{before}{KINDS[True]} {pair}"], cells[f"{before}{KINDS[False]} {pair}"]) for pair in range(pairs)]


def _pair_table(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], heading: str, costs: Sequence[str]) -> str:
    rows = [
        [str(n), f"{e['round_s']:.3f}", f"{p['round_s']:.3f}", cost, f"{e['exchange_s']:.3f}", f"{p['exchange_s']:.3f}"]
        for n, ((e, p), cost) in enumerate(zip(pairs, costs, strict=True))
    ]
    kinds = ["elastic, s per round", "processes, s per round", heading, "elastic, s exchanging", "processes, s exchanging"]
    return markdown_table(["pair", *kinds], rows)


def calm_section(cells: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    pairs = _pairs(cells, "", plan["pairs"])
    costs = [one["round_s"] / two["round_s"] - 1 for one, two in pairs]
    same = all(one["digest"] == two["digest"] for one, two in pairs)
    size: Size = plan["calm"]
    words = (
        f"Two islands, {size.model.num_params(256):,} parameters, rounds of {size.inner_steps} steps with {size.asleep_s:g} s of "
        f"sleep, which stands for the computation of a larger model; medians over the {size.rounds - 1} rounds after the first. "
        f"Fault tolerance costs {median(costs):+.1%} of a round (median of the pairs; allowed: less than {MOST_COST:.0%}): "
        f"{_verdict(median(costs) < MOST_COST)}. The final weights of both are {'the same bits' if same else '**not the same**'}."
    )
    return f"## Without failures\n\n{words}\n\n{_pair_table(pairs, 'cost', [f'{cost:+.1%}' for cost in costs])}"


def commit_section(cells: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """The cost of a commit of a larger model, the rounds for which it is within the bound, and the cost of TLS."""
    pairs, size = _pairs(cells, "heavy ", plan["heavy_pairs"]), plan["heavy"]
    costs_s = [one["round_s"] - two["round_s"] for one, two in pairs]
    more_s = median(costs_s)
    enough = f"within {MOST_COST:.0%} of rounds of {more_s / MOST_COST:.1f} s and longer" if more_s > 0 else "no measurable cost"
    words = (
        f"A commit of {size.model.num_params(256):,} parameters, in rounds of {size.inner_steps} small steps without sleep. "
        f"Checksums, votes and the published state cost {more_s:+.3f} s beyond the same round on processes (median of the pairs; "
        f"allowed: at most {MOST_COMMIT_S:g} s): {_verdict(more_s <= MOST_COMMIT_S)}. That is {enough}."
    )
    table = _pair_table(pairs, "cost, s", [f"{cost_s:+.3f}" for cost_s in costs_s])
    return f"### A commit of a larger model\n\n{words}\n\n{table}\n\n{transport_section(cells[TLS_COST])}"


def killed_section(cells: Mapping[str, Mapping[str, Any]]) -> str:
    killed_cells = [cells[name] for name in (TRAINING, EARLY, MEETING)]
    rows = []
    for cell in killed_cells[:2]:
        for into_s, death in zip(cell["into_round_s"], cell["deaths"], strict=False):
            back = ", back before its end" if cell is cells[EARLY] and death["alive"] > 1 else ""
            rows.append([f"{into_s:.1f} s into the round{back}", *_death_columns(death)])
    moments = ["while it sends its delta", "while it receives the mean"]
    for number, death in enumerate(cells[MEETING]["deaths"]):
        rows.append([moments[number // 2 % 2], *_death_columns(death)])
    delays = [death["delay_s"] for cell in killed_cells for death in cell["deaths"]]
    twins = [twin for cell in killed_cells for twin in cell["twins"]]
    equal = bool(twins) and all(twin["equal"] for twin in twins)
    sound = not any(cell["data"] or cell["apart"] for cell in killed_cells)
    words = (
        f"The script kills one of two islands, {len(delays)} times. The survivor commits at most {max(delays):.2f} s after the end "
        f"of its own steps (allowed: at most {MOST_DELAY_S:g} s): {_verdict(max(delays) <= MOST_DELAY_S)}. After {len(twins)} "
        f"returns the script fetched all tensors of both islands, weights and outer momentum: "
        f"{'the same bits each time' if equal else '**not the same**'}. Data units and digests: "
        f"{'none is lost, committed twice or different' if sound else '**see the cells**'}."
    )
    headings = ["killed", "survivor's steps, s", "commit after them, s", "attempts", "both again after, s"]
    return f"## With failures\n\n{words}\n\n{markdown_table(headings, rows)}"


def _death_columns(death: Mapping[str, Any]) -> list[str]:
    back = f"{death['back_s']:.1f}" if death["back_s"] is not None else "-"
    return [f"{death['steps_s']:.2f}", f"{death['delay_s']:.2f}", str(death["attempts"]), back]


def _verdict(holds: bool) -> str:
    return "it holds" if holds else "**it does not hold**"


if __name__ == "__main__":
    script(main)
