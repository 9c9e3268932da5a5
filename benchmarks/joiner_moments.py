"""What a kill costs in loss, and how much of it are the inner moments of the island that returns; in the simulator.

    python benchmarks/joiner_moments.py               eight seeds, one cell after the other: about seven minutes of one idle core
    python benchmarks/joiner_moments.py --seeds 0 1   other seeds

demo-diloco's workload at half its length and a quarter of its batch, on two equal islands. A killed island is away for one round,
whose data the simulator loses. It returns with the agreed weights, and with inner moments that are empty, or its donor's, or its
donor's of a run that averages them on the clocks of DES-LOC. In one row no island is killed and one delta is lost: that island
keeps its moments. In another no island is killed and the run is a round shorter: it trains on as many tokens as one with two kills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import figure_text
from atoll.core.errors import ConfigError
from cells import Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from record import bullets, markdown_table, open_record, script

ROUNDS, INNER_STEPS = 15, 20
BASE = (
    "cluster.islands=2",
    "cluster.step_time_s=[1.0]",
    f"train.steps={ROUNDS * INNER_STEPS}",
    "train.batch_size=16",
    "train.warm_start_steps=75",
    "keep.evaluate_every=1000000",
    "keep.save_every=1000000",
)
DONOR = ("train.joiner_moments=donor",)
AVERAGED = ("algorithm.moments=averaged", "algorithm.moment_rounds=[3,6]")
MOMENTS: dict[str, tuple[str, ...]] = {"empty": (), "donor's": DONOR, "averaged": (*AVERAGED, *DONOR)}
"""What an island returns with."""
KILLS = {"one kill in round 5": (5,), "one kill in round 13": (13,), "two kills in rounds 5 and 10": (5, 10)}
"""Rounds count from 0."""
NONE, NONE_AVERAGED, LOST = "no kill", "no kill, averaged moments", "no kill, the delta of round 5 lost"
SHORTER = f"no kill, {ROUNDS - 1} rounds"
"""A round of both islands has the tokens that two kills cost. A run has whole rounds, so none has the tokens of one kill."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "joiner_moments", "docs/elastic.md")
    parser.set_defaults(seeds=list(range(8)), processes=1)
    options = parser.parse_args(arguments)
    if len(options.seeds) < 2:
        raise ConfigError(f"--seeds {options.seeds[0]}: one seed has no interval. Give two or more.")
    rows = all_rows((*BASE, *options.set))
    record = open_record(options, "joiner_moments")
    how = {"quiet": options.quiet, "processes": options.processes}
    outcomes = run_rows(rows, options.seeds, record, "moments of joiners", **how)
    title = f"What a kill costs in loss, {seeds_text(options.seeds)}"
    record.publish(title, report(outcomes), docs=(options.docs, "joiner_moments"))


def all_rows(base: tuple[str, ...]) -> dict[str, Row]:
    """The rows by label."""
    settings = {NONE: (), NONE_AVERAGED: AVERAGED, LOST: ("cluster.lost=[Lost(island=1,round=5)]",)}
    settings |= {SHORTER: (f"train.steps={(ROUNDS - 1) * INNER_STEPS}",)}
    for kills, rounds in KILLS.items():
        away = ",".join(f"Away(island=1,start={start},stop={start + 1})" for start in rounds)
        settings |= {label(kills, held): (f"cluster.away=[{away}]", *more) for held, more in MOMENTS.items()}
    return {name: Row(recipe="demo-diloco", base=base, settings=more, name=name) for name, more in settings.items()}


def label(kills: str, moments: str) -> str:
    return f"{kills}, {moments} moments"


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    return [
        "## Outcome\n\n" + bullets([*(kills_sentence(kills, outcomes) for kills in KILLS), *controls(outcomes)]),
        f"## Rows\n\n{ROUNDS} rounds of {INNER_STEPS} steps on two equal islands; rounds count from 0. {figure_text.RULE}\n\n"
        + table(outcomes),
        commands_section(outcomes),
    ]


def kills_sentence(kills: str, outcomes: Mapping[str, Outcome]) -> str:
    """What the kills cost with empty moments, and what other moments change."""
    empty = outcomes[label(kills, "empty")]
    found = [f"{kills} with empty moments: {_difference(empty, outcomes[NONE])} against no kill"]
    for moments in list(MOMENTS)[1:]:
        found.append(f"{moments} moments instead of empty ones: {_difference(outcomes[label(kills, moments)], empty)}")
    return "; ".join(found) + "."


def controls(outcomes: Mapping[str, Outcome]) -> list[str]:
    return [
        f"A lost delta of an island that keeps its moments: {_difference(outcomes[LOST], outcomes[NONE])}.",
        f"Averaged moments without a kill: {_difference(outcomes[NONE_AVERAGED], outcomes[NONE])}.",
        f"As many tokens as two kills leave, without a kill: {_difference(outcomes[SHORTER], outcomes[NONE])}; "
        f"{[*KILLS][-1]} against that run: "
        + "; ".join(
            f"{moments} moments {_difference(outcomes[label([*KILLS][-1], moments)], outcomes[SHORTER])}" for moments in MOMENTS
        )
        + ".",
    ]


def _difference(one: Outcome, two: Outcome) -> str:
    found, verdict = figure_text.difference_text(one.loss, two.loss)
    return f"{found} ({verdict})"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Every row against the run without a kill, and against the row of the same kills with empty moments."""
    headings = [*figure_text.loss_headings(NONE), "minus empty moments", "verdict", "tokens", "sent per island"]
    rows = []
    for name, outcome in outcomes.items():
        empty = next((outcomes[label(kills, "empty")] for kills in KILLS if name.startswith(f"{kills},")), outcome)
        more = ("-", "-") if outcome is empty else figure_text.difference_text(outcome.loss, empty.loss)
        costs = [figure_text.tokens_text(outcome, outcomes[NONE]), figure_text.bytes_text(outcome)]
        rows.append([name, *figure_text.loss_columns(outcome, outcomes[NONE]), *more, *costs])
    return markdown_table(headings, rows)


if __name__ == "__main__":
    script(main)
