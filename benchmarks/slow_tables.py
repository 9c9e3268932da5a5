"""Tables and verdicts of slow_link.py: rates, the crossover, and the simulator's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure
from atoll.telemetry.units import human_bytes, human_count, human_percent
from record import bullets, holds_text, markdown_table
from slow_atoll import FRAGMENTS, MIXING, OVERLAP
from slow_probe import HEADER_BYTES

BYTES_WITHIN, TIME_WITHIN, ACCO_WITHIN = 0.01, 0.10, 1.10
"""Allowed: atoll's bytes from the formula, predictions from measurements, and ACCO over the longer of its two parts."""
LEAST_ROUNDS, SLOWEST = 5, 10.0
BUSY_WITHIN, LEAST_BUSY = 0.05, 0.95
"""Allowed: busy shares from the simulator's. Required: of streaming with int4, on the slowest link."""
DENSE, STREAMED = "atoll DiLoCo", "atoll streaming, int4"
EXCHANGES = (DENSE, "atoll DiLoCo, int4", "atoll streaming", STREAMED)
BYTES = "atoll bytes"
"""How the names of methods begin of which only the bytes count."""
Cell = Mapping[str, Any]


def sections_of(cells: Sequence[Cell], params: int, inner_steps: int) -> list[str]:
    """The sections of a record."""
    rows = [cell for cell in cells if cell["method"] != "crossover"]
    crossing = [cell for cell in cells if cell["method"] == "crossover"]
    lines = [
        line
        for line in (
            *exchange_lines(rows),
            bytes_line(rows),
            rounds_line(rows),
            *map(crossing_line, crossing),
            predicted_line(rows),
            *failed_lines(rows),
        )
        if line
    ]
    sections = [f"## Outcome\n\n{bullets(lines)}"] if lines else []
    sections += [rates_section(rows, params, inner_steps)] if rows else []
    sections += [crossing_section(cell) for cell in crossing if "error" not in cell]
    return [*sections, method_section(cells)]


# ------------------------------------------------------------------------------------------------------------------ verdicts


def busy(cell: Cell, round_s: float) -> float:
    """The share of a round's time that its steps take, by their time alone: above 1 if that was measured in a disturbance."""
    return float(cell["steps"] * cell["step_s"] / round_s)


def exchange_lines(rows: Sequence[Cell]) -> list[str]:
    """Whether streaming with int4 keeps islands busy, and whether the simulator's busy shares are those measured."""
    found = {(cell["method"], cell["rate"]): cell for cell in rows if cell["method"] in EXCHANGES and "predicted_s" in cell}
    lines = []
    if (DENSE, SLOWEST) in found and (STREAMED, SLOWEST) in found:
        dense, streamed = (busy(found[name, SLOWEST], found[name, SLOWEST]["round_s"]) for name in (DENSE, STREAMED))
        lines.append(
            f"{holds_text(streamed >= LEAST_BUSY)}: at {SLOWEST:g} Mbit/s streaming with int4 computes for "
            f"{human_percent(streamed)} of the time (required: {human_percent(LEAST_BUSY)}), where DiLoCo in fp32 "
            f"computes for {human_percent(dense)}. A fragment travels while an island takes {OVERLAP} of a round's "
            f"{found[STREAMED, SLOWEST]['steps']} steps, and {human_percent(1 - MIXING)} of their "
            f"distance is dropped when it arrives."
        )
    shares = {
        name: (busy(cell, cell["round_s"]), busy(cell, cell["predicted_s"])) for name, cell in found.items() if name[1] is not None
    }
    if shares:
        (method, rate), (share, expected) = max(shares.items(), key=lambda item: abs(item[1][0] - item[1][1]))
        lines.append(
            f"{holds_text(abs(share - expected) <= BUSY_WITHIN)}: busy shares of DiLoCo and streaming are within "
            f"{human_percent(BUSY_WITHIN)} of the simulator's. The largest difference is {method} at {rate:g} Mbit/s: "
            f"{human_percent(share)} measured, {human_percent(expected)} predicted."
        )
    return lines


def failed_lines(rows: Sequence[Cell]) -> list[str]:
    """A verdict on each cell that failed: those on bytes, times and busy shares are about the others."""
    failed = [cell for cell in rows if "error" in cell]
    return [f"{holds_text(False)}: {cell['method']}, {_rate(cell['rate'])}, failed: {cell['error']}." for cell in failed]


def bytes_line(rows: Sequence[Cell]) -> str:
    """Whether atoll's algorithms send the formula's bytes."""
    ours = [cell for cell in rows if "predicted_s" in cell and cell["method"].startswith("atoll")]
    if not ours:
        return ""
    furthest, method = max((abs(over_formula(cell) - 1), cell["method"]) for cell in ours)
    return (
        f"{holds_text(furthest <= BYTES_WITHIN)}: payload on the wire is within {human_percent(BYTES_WITHIN)} of the formula for "
        f"atoll's algorithms and every codec, at every rate. The largest difference is {human_percent(furthest)}, of {method}."
    )


def rounds_line(rows: Sequence[Cell]) -> str:
    """Whether DiLoCo runs on the slowest link."""
    slow = [cell for cell in rows if cell["method"] == "atoll DiLoCo" and cell["rate"] == SLOWEST]
    if not slow:
        return ""
    turns = [] if "error" in slow[0] else slow[0]["all"][0]["rounds"]["atoll DiLoCo"]
    rounds = sum(len(turn["round_s"]) for turn in turns)
    return (
        f"{holds_text(rounds >= LEAST_ROUNDS)}: atoll's DiLoCo completes {rounds} rounds at {SLOWEST:g} Mbit/s without a time-out."
    )


def crossing_line(cell: Cell) -> str:
    """Whether ACCO hides its exchanges where they take as long as computation."""
    if "error" in cell:
        return f"{holds_text(False)}: at the crossover, {cell['error']}."
    step_s, both_s = cell["step_s"], 2 * cell["exchange_s"]
    longer_s = max(step_s, both_s)
    (_, acco_s), (rival, rival_s) = cell["update_s"].items()
    return (
        f"{holds_text(acco_s <= ACCO_WITHIN * longer_s and acco_s < rival_s)}: at {cell['mbit_per_s']:.0f} Mbit/s, where the "
        f"computation of a batch takes {step_s:.2f} s and two exchanges {both_s:.2f} s, an update of ACCO takes {acco_s:.2f} s, "
        f"{acco_s / longer_s:.2f} times the longer of the two (allowed: at most {ACCO_WITHIN:.2f}), and one of {rival} "
        f"{rival_s:.2f} s."
    )


def predicted_line(rows: Sequence[Cell]) -> str:
    """Whether the simulator's predictions are within the bound."""
    timed = [cell for cell in rows if "predicted_s" in cell and cell["rate"] is not None and BYTES not in cell["method"]]
    ratios = {(cell["method"], cell["rate"]): against(cell) for cell in timed}
    if not ratios:
        return ""
    method, rate = furthest = max(ratios, key=lambda name: abs(ratios[name] - 1))
    return (
        f"{holds_text(abs(ratios[furthest] - 1) <= TIME_WITHIN)}: from the measured step time and link the simulator predicts the "
        f"time of a round within 10 % at every shaped rate. The largest error is {method} at {rate:g} Mbit/s: "
        f"{ratios[furthest]:.3f} of the measured time."
    )


# -------------------------------------------------------------------------------------------------------------------- tables


def rates_section(rows: Sequence[Cell], params: int, inner_steps: int) -> str:
    """One table per rate."""
    parts = [
        f"## By rate\n\nTwo islands, {human_count(params)} parameters in float32; a round of DiLoCo has {inner_steps} inner steps. "
        f"Times are in seconds. Utilisation: the time of an inner step alone over its time here. Bytes: payload that islands sent "
        f"over the formula's (DDP and ZeRO-1 {human_bytes(4 * params)} per step, DiLoCo as much per round, ACCO twice as much per "
        f"update; a codec's exact count; and 8 bytes for each control number). Predicted: the simulator's time of a round over "
        f"the measured one. Busiest second: the most payload of an island within any second, as the simulator has it from the "
        f"same step time and link. Streaming: {FRAGMENTS} fragments, overlap {OVERLAP}, mixing {MIXING:g}. Of rows with "
        f"`bytes` only the bytes count: they exchange after every step."
    ]
    for rate in dict.fromkeys(cell["rate"] for cell in rows):
        here = [cell for cell in rows if cell["rate"] == rate]
        lines = [cell["line"] for cell in here if "line" in cell]
        carries = f", measured payload {fmean(line['mbit_per_s'] for line in lines):.4g}" if lines else ""
        title = "Unshaped" if rate is None else _rate(rate)
        table = markdown_table(
            ["", "inner step", "alone", "utilisation", "bytes", "predicted", "busiest second"], [_row(cell) for cell in here]
        )
        parts.append(f"**{title}{carries if rate is not None else ''}**\n\n{table}")
    return "\n\n".join(parts)


def _rate(rate: float | None) -> str:
    return "unshaped" if rate is None else f"{rate:g} Mbit/s"


def _row(cell: Cell) -> list[str]:
    if "error" in cell:
        return [f"{cell['method']}: failed, {cell['error']}", *["-"] * 6]
    step_s = cell["round_s"] / cell["steps"]
    predicted = f"{against(cell):.3f}" if "predicted_s" in cell and cell["rate"] is not None else "-"
    return [
        cell["method"],
        seconds(step_s),
        seconds(cell["step_s"]),
        human_percent(busy(cell, cell["round_s"])),
        f"{over_formula(cell):.3f}",
        predicted,
        human_bytes(cell["busiest_second_bytes"]) if "busiest_second_bytes" in cell and cell["rate"] is not None else "-",
    ]


def crossing_section(cell: Cell) -> str:
    """The figures at the crossover."""
    rows = [
        ["a batch, on both islands at the same time (c)", seconds(cell["step_s"])],
        ["two exchanges (2m)", seconds(2 * cell["exchange_s"])],
        *([f"an update of {name}", seconds(update_s)] for name, update_s in cell["update_s"].items()),
    ]
    note = (
        f"At {cell['mbit_per_s']:.1f} Mbit/s, batches of {cell['batch_size']} sequences; medians of the turns of one run. An "
        f"exchange is a reduce-scatter and an all-gather."
    )
    return f"## The crossover\n\n{note}\n\n{markdown_table(['', 'seconds'], rows)}"


def method_section(cells: Sequence[Cell]) -> str:
    tries = [cell["tries"] for cell in cells]
    unsteady = [cell["unsteady"] for cell in cells if "unsteady" in cell]
    return (
        "## Method\n\nEach island is a process with one torch thread in its own network namespace; a veth pair connects them, and "
        "`tbf` shapes what each end sends (burst 4 ms of the rate, at least 120 kB; packets of at most 1 ms; a queue that drops no "
        "packet). An inner step alone is forward, backward and a fused AdamW, on both islands at the same time. The measured "
        "payload of a link is the throughput of plain sockets in both directions at the same time, in the same cell. Times are "
        f"medians over rounds of the slower island's. Payload is `tx_bytes - {HEADER_BYTES} x tx_packets` of the interface, in "
        "which a packet that a card would segment counts once, with one header. It includes gloo's own headers. torch's DDP "
        "and ZeroRedundancyOptimizer (parameters as views of buckets) and torchft's DiLoCo (its Manager and lighthouse, with its "
        "own time limits) train the same model on the same batches. The simulator does not model the time of "
        "optimizers beyond an inner step's own, nor cores "
        "that computation and the network stack share. A cell with unsteady steps alone was disturbed by other load, and is "
        f"measured again, up to three times; the steadiest counts. {len(tries)} cells took {sum(tries)} measurements; in the least "
        f"steady of those that count, four of five steps alone are within {human_percent(max(unsteady, default=0.0))} of the "
        f"shortest."
    )


# ------------------------------------------------------------------------------------------------------------------- figures


def over_formula(cell: Cell) -> float:
    """Payload of all islands over the formula's."""
    return float(sum(cell["payload_bytes"]) / sum(cell["formula_bytes"]))


def against(cell: Cell) -> float:
    """The simulator's time of a round over the measured one."""
    return float(cell["predicted_s"] / cell["round_s"])


def seconds(time_s: float) -> str:
    """
    >>> seconds(0.41251), seconds(17.25)
    ('0.413', '17.2')
    """
    return f"{time_s:.3f}" if time_s < 10 else f"{time_s:.1f}"


def figure(rows: Sequence[Cell]) -> Any:
    """Seconds per inner step against the rate."""
    drawn, (panel,) = new_figure(1)
    drawn.set_size_inches(7.5, 4.6)
    shaped = sorted((cell for cell in rows if cell["rate"]), key=lambda cell: float(cell["rate"]))
    for number, method in enumerate(dict.fromkeys(cell["method"] for cell in shaped)):
        mine = [(cell["rate"], cell["round_s"] / cell["steps"]) for cell in shaped if cell["method"] == method]
        style = "-" if method.startswith("atoll") else "--"
        panel.plot(*zip(*mine, strict=True), style, marker="o", markersize=4, color=COLOURS[number % len(COLOURS)], label=method)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("Mbit/s")
    panel.set_ylabel("seconds per inner step")
    if shaped:
        panel.legend(frameon=False, fontsize=9)
    return drawn
