"""Two levels over seeds: ACCO between the devices of an island and DiLoCo between islands, against each alone on the same cluster.

    python benchmarks/two_level.py                    seeds 0, 1 and 2, two cells at a time
    python benchmarks/two_level.py --seeds 0 1        other seeds

The cluster has four islands of two devices, fast lines inside and slow ones between. Without an algorithm inside, the eight devices
are equals on one flat ring, in which every hop is taken to be a slow one: DiLoCo over eight islands of one device, and ZeRO-1,
which agrees on every gradient. Real libraries reduce inside first. So ZeRO-1 has a row with what such a collective would take at
best: one ring between four islands, each of which computes the batches of both its devices in the time of one, as if the lines
inside cost nothing. This flatters ZeRO-1, and is what two levels are compared with first. Every run trains on as many tokens, in as
many inner steps of as many samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import figure_text
from async_demo import curves_figure
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from cells import LAN, Outcome, Row, carry_out, seeds_parser
from record import Record, default_path, fill, markdown_table, script

TWO = "demo-two-level"
ZERO1_INSIDE, DILOCO, FLAT = f"{TWO}, ZeRO-1 inside", "DiLoCo alone, 8 islands", "ZeRO-1 alone, a flat ring of 8"
BETWEEN = "ZeRO-1 alone, one ring between islands"


def main(arguments: Sequence[str] | None = None) -> None:
    options = seeds_parser(__doc__, "two_level", "docs/two_levels.md").parse_args(arguments)
    rows = all_rows((*LAN, *options.set))
    record = Record(options.record or default_path("two_level"))
    kept = {"quiet": options.quiet, "curves": True, "processes": options.processes}
    done = carry_out(list(rows.values()), options.seeds, record, "two levels", **kept)
    outcomes = {label: done[row] for label, row in rows.items()}
    sections = report(outcomes)
    save_figure(curves_figure, {label: one for label, one in outcomes.items() if one.curves}, record.plot)
    title = f"Two levels, over seeds {', '.join(map(str, options.seeds))}"
    readme = record.write(title, [*sections, f"![loss against virtual time]({record.plot.name})"])
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")
    if fill(options.docs, "two_level", sections, record):
        print(f"page: {options.docs}")


def all_rows(base: tuple[str, ...]) -> dict[str, Row]:
    """The rows by label: the recipe, and what else the same cluster can do."""
    settings = {
        TWO: (),
        ZERO1_INSIDE: ("inside=ZeRO1",),
        DILOCO: ("inside=none",),
        FLAT: ("inside=none", "algorithm=ZeRO1"),
    }
    rows = {label: Row(recipe=TWO, base=_fitting(base, label), settings=made, name=label) for label, made in settings.items()}
    rows[BETWEEN] = Row(recipe="demo-zero1", base=_fitting(base, BETWEEN), settings=islands_as_devices(rows[TWO]), name=BETWEEN)
    return rows


def islands_as_devices(two: Row) -> tuple[str, ...]:
    """Each island as one device that reads the batches of all its devices, also in the warm start, and takes as long as one."""
    run = two.run(0)
    devices, train = run.cluster.devices_per_island, run.train
    times_s = ",".join(repr(run.cluster.step_time(island, run.seed)) for island in range(run.cluster.islands))
    return (
        f"cluster.step_time_s=[{times_s}]",
        f"train.batch_size={devices * train.batch_size}",
        f"train.warm_start_steps={train.warm_start_steps // devices}",
    )


def _fitting(base: tuple[str, ...], label: str) -> tuple[str, ...]:
    """Settings of DiLoCo are nothing to ZeRO-1, and those of devices nothing to islands of one."""
    foreign = {FLAT: ("algorithm.",), BETWEEN: ("algorithm.", "inside", "cluster.inside", "cluster.devices_per_island")}
    return tuple(setting for setting in base if not setting.startswith(foreign.get(label, ())))


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    told = [sentence(label, outcomes) for label in (BETWEEN, FLAT, DILOCO, ZERO1_INSIDE)]
    lines = [told[0], flat_line(outcomes), *told[1:], same_work_line(outcomes), dropped_line(outcomes)]
    return [
        "## Outcome\n\n" + "\n".join(f"- {line}" for line in lines),
        f"## Rows\n\n{figure_text.RULE} Over the slow line: payload that each island's line carries; of a ring of equals, what one "
        f"device sends, since of the devices of an island, which are neighbours there, one sends to the next island. Inside: "
        f"payload per device over the lines within its island. One ring between islands: what ZeRO-1 would take that reduces "
        f"inside first, if the lines inside cost nothing; an island reads the batches of its devices as one, also in the warm "
        f"start.\n\n{table(outcomes)}",
        "## Commands\n\n```\n" + "\n".join(dict.fromkeys(outcome.row.command for outcome in outcomes.values())) + "\n```",
    ]


def sentence(label: str, outcomes: Mapping[str, Outcome]) -> str:
    """The two levels against another row: time, bytes and loss."""
    mine, other = outcomes[TWO], outcomes[label]
    if mine.loss is None or other.loss is None:
        return f"{TWO if mine.loss is None else label} diverged."
    found, verdict = figure_text.difference_text(mine.loss, other.loss)
    times = f"{figure_text.time_text(mine)} against {figure_text.time_text(other)}"
    time = f"{figure_text.time_ratio_text(mine, other)} of its virtual time ({times})"
    return (
        f"Against {label}: {TWO} takes {time}, sends {figure_text.bytes_ratio_text(mine, other)} of its bytes over the slow lines, "
        f"and ends {found} from its loss (verdict: {verdict})."
    )


def flat_line(outcomes: Mapping[str, Outcome]) -> str:
    """How much the flat ring costs ZeRO-1, which two levels have no part in."""
    ratio = figure_text.time_ratio(outcomes[FLAT], outcomes[BETWEEN])
    if ratio is None:
        return "ZeRO-1 alone diverged."
    return (
        f"ZeRO-1 takes {ratio:.2f} times as long on a flat ring of all devices, every hop of which is a slow one, as on one ring "
        f"between islands: that much of the difference below is the ring's, not the algorithm's."
    )


def same_work_line(outcomes: Mapping[str, Outcome]) -> str:
    """Whether all rows train on as many tokens."""
    tokens = {outcome.tokens for outcome in outcomes.values() if outcome.summaries}
    if len(tokens) == 1:
        return f"All rows train on {tokens.pop():,.0f} tokens, the warm start included."
    return "**Rows differ** in the tokens that they train on: see below."


def dropped_line(outcomes: Mapping[str, Outcome]) -> str:
    """What it costs to put new weights under ACCO."""
    dropped, tokens = (outcomes[TWO].mean(name) for name in ("inside_dropped_tokens", "tokens"))
    if dropped is None or not tokens:
        return f"{TWO} diverged."
    return (
        f"{TWO} computes {human_count(dropped)} tokens in vain ({human_percent(dropped / tokens)} of those it trains on): half a "
        f"batch of every device waits when islands agree on other weights."
    )


def table(outcomes: Mapping[str, Outcome]) -> str:
    mine = outcomes[TWO]
    headings = ["row", "val loss", "least to greatest", f"{TWO} minus it", "verdict", "tokens", "virtual time"]
    headings += ["over the slow line", "inside", "busy"]
    rows = []
    for label, outcome in outcomes.items():
        against = ("-", "-") if outcome is mine else figure_text.difference_text(mine.loss, outcome.loss)
        costs = [
            figure_text.time_text(outcome),
            figure_text.bytes_text(outcome),
            inside_text(outcome),
            figure_text.busy_text(outcome),
        ]
        rows.append([label, *figure_text.loss_text(outcome), *against, figure_text.tokens_text(outcome, mine), *costs])
    return markdown_table(headings, rows)


def inside_text(outcome: Outcome) -> str:
    """Bytes of a device to the others of its island; a dash where all devices are equals."""
    sent = [summary["inside_bytes_per_device"] for summary in outcome.summaries if "inside_bytes_per_device" in summary]
    return human_bytes(sum(sent) / len(sent)) if sent else "-"


if __name__ == "__main__":
    script(main)
