"""Two levels over seeds: ACCO between the devices of an island and DiLoCo between islands, against each alone on the same cluster.

    python benchmarks/two_level.py                    seeds 0, 1 and 2, two cells at a time
    python benchmarks/two_level.py --seeds 0 1        other seeds

The cluster has four islands of two devices, fast lines inside and slow ones between. Without an algorithm inside, the eight devices
are equals on one ring: DiLoCo over eight islands of one device, and ZeRO-1, which agrees on every gradient. Every run trains on as
many tokens, in as many inner steps of as many samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import wording
from async_demo import curves_figure
from atoll.telemetry.drawing import save_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from cells import Outcome, Row, carry_out
from page import fill
from record import Record, default_path, markdown_table, script

TWO = "demo-two-level"
ZERO1_INSIDE, DILOCO, ZERO1 = f"{TWO}, ZeRO-1 inside", "DiLoCo alone, 8 islands", "ZeRO-1 alone, a ring of 8"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    rows = all_rows(tuple(options.set))
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
        ZERO1: ("inside=none", "algorithm=ZeRO1"),
    }
    return {label: Row(recipe=TWO, base=_fitting(base, label), settings=made, name=label) for label, made in settings.items()}


def _fitting(base: tuple[str, ...], label: str) -> tuple[str, ...]:
    """Settings of DiLoCo are nothing to ZeRO-1."""
    return tuple(setting for setting in base if label != ZERO1 or not setting.startswith("algorithm."))


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The sections of the record."""
    told = [sentence(label, outcomes) for label in outcomes if label != TWO]
    return [
        "## Outcome\n\n" + "\n".join(f"- {line}" for line in [*told, same_work_line(outcomes), dropped_line(outcomes)]),
        f"## Rows\n\n{wording.RULE} Over the slow line: payload that each island's line carries; of a ring of equals, what one "
        f"device sends, since of the devices of an island, which are neighbours there, one sends to the next island. Inside: "
        f"payload per device over the lines within its island.\n\n{table(outcomes)}",
        "## Commands\n\n```\n" + "\n".join(dict.fromkeys(outcome.row.command for outcome in outcomes.values())) + "\n```",
    ]


def sentence(label: str, outcomes: Mapping[str, Outcome]) -> str:
    """The two levels against another row: time, bytes and loss."""
    mine, other = outcomes[TWO], outcomes[label]
    if mine.loss is None or other.loss is None:
        return f"{TWO if mine.loss is None else label} diverged."
    found, verdict = wording.difference_text(mine.loss, other.loss)
    time = (
        f"{wording.time_ratio_text(mine, other)} of its virtual time ({wording.time_text(mine)} against {wording.time_text(other)})"
    )
    return (
        f"Against {label}: {TWO} takes {time}, sends {wording.bytes_ratio_text(mine, other)} of its bytes over the slow lines, and "
        f"ends {found} from its loss (verdict: {verdict})."
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
        against = ("-", "-") if outcome is mine else wording.difference_text(mine.loss, outcome.loss)
        costs = [wording.time_text(outcome), wording.bytes_text(outcome), inside_text(outcome), wording.busy_text(outcome)]
        rows.append([label, *wording.loss_text(outcome), *against, wording.tokens_text(outcome, mine), *costs])
    return markdown_table(headings, rows)


def inside_text(outcome: Outcome) -> str:
    """Bytes of a device to the others of its island; a dash where all devices are equals."""
    sent = [summary["inside_bytes_per_device"] for summary in outcome.summaries if "inside_bytes_per_device" in summary]
    return human_bytes(sum(sent) / len(sent)) if sent else "-"


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--processes", type=int, default=2, help="cells that run at a time")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_two_level")
    parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables, such as docs/two_levels.md")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
