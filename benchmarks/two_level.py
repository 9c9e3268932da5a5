"""Two levels over seeds: ACCO between the devices of an island and DiLoCo between islands, against each alone on the same cluster.

    python benchmarks/two_level.py                    seeds 0, 1 and 2, two cells in parallel
    python benchmarks/two_level.py --seeds 0 1        other seeds

The cluster has four islands of two devices, with fast links inside and slow links between islands. Without an algorithm inside, the
eight devices form one flat ring in which the simulator takes every hop for a slow one: DiLoCo on eight islands of one device, and
ZeRO-1, which exchanges every gradient. Real libraries reduce inside first. So ZeRO-1 has a row for the best case of such a
collective: one ring of four islands, each of which computes the batches of both its devices in the time of one, as if the links
inside cost nothing. This favours ZeRO-1. All runs train on the same number of tokens, in the same number of inner steps and
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import figure_text
from atoll.telemetry.units import human_bytes, human_count, human_percent
from cells import FIRST_TWO_LEVEL, Outcome, Row, commands_section, run_rows, seeds_parser, seeds_text
from curves import CAPTION, save_curves
from record import bullets, markdown_table, open_record, script

TWO = "demo-two-level"
ZERO1_INSIDE, DILOCO, FLAT = f"{TWO}, ZeRO-1 inside", "DiLoCo alone, 8 islands", "ZeRO-1 alone, a flat ring of 8"
BETWEEN = "ZeRO-1 alone, one ring between islands"


def main(arguments: Sequence[str] | None = None) -> None:
    options = seeds_parser(__doc__, "two_level", "docs/two_levels.md").parse_args(arguments)
    rows = all_rows((*FIRST_TWO_LEVEL, *options.set))
    record = open_record(options, "two_level")
    kept = {"quiet": options.quiet, "curves": True, "processes": options.processes}
    outcomes = run_rows(rows, options.seeds, record, "two levels", **kept)
    save_curves(outcomes, record.plot)
    title = f"Two levels, {seeds_text(options.seeds)}"
    record.publish(title, report(outcomes), plot=CAPTION, docs=(options.docs, "two_level"))


def all_rows(base: tuple[str, ...]) -> dict[str, Row]:
    """The rows by label: the recipe, and other algorithms on the same cluster."""
    settings = {
        TWO: (),
        ZERO1_INSIDE: ("inside=ZeRO1",),
        DILOCO: ("inside=none",),
        FLAT: ("inside=none", "algorithm=ZeRO1"),
    }
    rows = {label: Row(recipe=TWO, base=_applicable(base, label), settings=made, name=label) for label, made in settings.items()}
    rows[BETWEEN] = Row(recipe="demo-zero1", base=_applicable(base, BETWEEN), settings=islands_as_devices(rows[TWO]), name=BETWEEN)
    return rows


def islands_as_devices(two: Row) -> tuple[str, ...]:
    """Each island as one device that reads the batches of all its devices, also in the warm start, in the time of one."""
    run = two.run(0)
    devices, train = run.cluster.devices_per_island, run.train
    times_s = ",".join(repr(run.cluster.step_time(island, run.seed)) for island in range(run.cluster.islands))
    return (
        f"cluster.step_time_s=[{times_s}]",
        f"train.batch_size={devices * train.batch_size}",
        f"train.warm_start_steps={train.warm_start_steps // devices}",
    )


def _applicable(base: tuple[str, ...], label: str) -> tuple[str, ...]:
    """The settings that apply to a row: ZeRO-1 has none of DiLoCo, an island of one device none of devices."""
    foreign = {FLAT: ("algorithm.",), BETWEEN: ("algorithm.", "inside", "cluster.inside", "cluster.devices_per_island")}
    return tuple(setting for setting in base if not setting.startswith(foreign.get(label, ())))


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    between, *others = (sentence(label, outcomes) for label in (BETWEEN, FLAT, DILOCO, ZERO1_INSIDE))
    lines = [between, flat_line(outcomes), *others, same_work_line(outcomes), dropped_line(outcomes)]
    return [
        f"## Outcome\n\n{bullets(lines)}",
        f"## Rows\n\n{figure_text.RULE} Over slow links: payload that an island sends to other islands. In a flat ring that is "
        f"what one device sends, since the devices of an island are neighbours and one of them sends to the next island. Inside: "
        f"payload per device over the links of its island. One ring between islands: ZeRO-1 that reduces inside first, if the "
        f"links inside cost nothing; an island reads the batches of its devices as one, also in the warm "
        f"start.\n\n{table(outcomes)}",
        commands_section(outcomes),
    ]


def sentence(label: str, outcomes: Mapping[str, Outcome]) -> str:
    """Two levels compared with another row: time, bytes and loss."""
    mine, other = outcomes[TWO], outcomes[label]
    if mine.loss is None or other.loss is None:
        return f"{TWO if mine.loss is None else label} diverged."
    found, verdict = figure_text.difference_text(mine.loss, other.loss)
    times = f"{figure_text.time_text(mine)} against {figure_text.time_text(other)}"
    time = f"{figure_text.time_ratio_text(mine, other)} of its virtual time ({times})"
    return (
        f"Compared with {label}, {TWO} takes {time} and sends {figure_text.bytes_ratio_text(mine, other)} of its bytes over slow "
        f"links. Loss minus its loss: {found} (verdict: {verdict})."
    )


def flat_line(outcomes: Mapping[str, Outcome]) -> str:
    """The cost of the flat ring for ZeRO-1, which is not due to two levels."""
    ratio = figure_text.time_ratio(outcomes[FLAT], outcomes[BETWEEN])
    if ratio is None:
        return "ZeRO-1 alone diverged."
    return (
        f"ZeRO-1 takes {ratio:.2f} times as long on a flat ring of all devices, with slow hops only, as on one ring between "
        f"islands: this part of the next difference is due to the ring, not to the algorithm."
    )


def same_work_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether all rows train on the same number of tokens."""
    tokens = {outcome.tokens for outcome in outcomes.values() if outcome.summaries}
    if len(tokens) == 1:
        return f"All rows train on {tokens.pop():,.0f} tokens, the warm start included."
    return "**Rows train on different numbers** of tokens: see the table."


def dropped_line(outcomes: Mapping[str, Outcome]) -> str:
    """The tokens that ACCO computes in vain when its weights are replaced."""
    dropped, tokens = (outcomes[TWO].mean(name) for name in ("inside_dropped_tokens", "tokens"))
    if dropped is None or not tokens:
        return f"{TWO} diverged."
    return (
        f"{TWO} discards {human_count(dropped)} tokens ({human_percent(dropped / tokens)} of those it trains on): every device "
        f"has computed half a batch when an outer step replaces its weights."
    )


def table(outcomes: Mapping[str, Outcome]) -> str:
    mine = outcomes[TWO]
    headings = [*figure_text.loss_headings(TWO), "tokens", "virtual time", "over slow links", "inside", "utilisation"]
    rows = []
    for label, outcome in outcomes.items():
        costs = [
            figure_text.time_text(outcome),
            figure_text.bytes_text(outcome),
            inside_text(outcome),
            figure_text.utilisation_text(outcome),
        ]
        rows.append([label, *figure_text.loss_columns(outcome, mine), figure_text.tokens_text(outcome, mine), *costs])
    return markdown_table(headings, rows)


def inside_text(outcome: Outcome) -> str:
    """Bytes of a device to the others of its island; a dash without an algorithm inside."""
    sent = [summary["inside_bytes_per_device"] for summary in outcome.summaries if "inside_bytes_per_device" in summary]
    return human_bytes(sum(sent) / len(sent)) if sent else "-"


if __name__ == "__main__":
    script(main)
