"""The overhead of the simulator in time, outer steps and memory, as ratios.

    python benchmarks/sim_overhead.py              all parts: a few minutes
    python benchmarks/sim_overhead.py --quick      smoke test at small sizes

The measurements of a comparison alternate and repeat; figures are medians of the ratios. Needs an idle machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from atoll.models.gpt import GPT
from atoll.telemetry.units import human_bytes, human_count
from cells import key_of
from progress import CellProgress
from record import Record, benchmark_parser, bullets, markdown_table, open_record, script
from sim_memory import MUST_HOLD_BYTES, measure
from sim_speed import COPY, DELTA, MEAN, SIMULATED, UPDATE, Contest, OuterStep, SpeedPlan

FEW, MANY = 4, 8  # islands, for memory


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `tiny`: a small decoder instead of the 20M one."""

    speed: SpeedPlan
    repeats: int
    tiny: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    parts = {"speed": _speed, "outer": _outer, "memory": _memory}
    parser = benchmark_parser(__doc__, "sim_overhead", quick=True)
    parser.add_argument("--steps", type=int, default=40, help="steps of each model, for speed; a multiple of 20")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--only", action="append", choices=list(parts), help="measure this part; repeatable; None: all")
    options = parser.parse_args(arguments)
    sizes, record = _sizes(options), open_record(options, "sim_overhead")
    sections = [
        part(sizes, record, quiet=options.quiet) for name, part in parts.items() if not options.only or name in options.only
    ]
    table = markdown_table(["what", "measured", "compared with", "ratio"], [row for section in sections for row in section.rows])
    outcome = f"## Outcome\n\n{bullets(section.sentence for section in sections)}"
    record.publish("The simulator's overhead", [outcome, f"## Figures\n\n{table}", *(section.note for section in sections)])


@dataclass(frozen=True, kw_only=True)
class Section:
    """The result of one measurement: a sentence, rows of the table, and a note on them."""

    sentence: str
    rows: list[list[str]]
    note: str


# ------------------------------------------------------------------------------------------------------------------ speed


def _speed(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    plan = sizes.speed
    keys = [f"speed {key_of(plan.run())} {number}" for number in range(sizes.repeats)]
    missing = [key for key in keys if record.get(key) is None]
    with Contest(plan) as contest, CellProgress("speed", len(missing), quiet=quiet) as progress:
        methods = list(contest.methods)
        if missing:
            progress.begin("warming up")
            for method in methods:
                contest.warm_up(method)
        for number, key in enumerate(missing, 1):
            seconds = {}
            progress.begin(f"measurement {number}")
            for done, method in enumerate(methods):
                progress.advance(done / len(methods), method)
                seconds[method] = contest.seconds(method)
            record.add(key, {"seconds": seconds})
            progress.end(f"measurement {number}: " + ", ".join(f"{method} {time_s:.1f} s" for method, time_s in seconds.items()))
    return speed_section(plan, [record[key]["seconds"] for key in keys])


def speed_section(plan: SpeedPlan, cells: Sequence[Mapping[str, float]]) -> Section:
    """Tokens per second of each method, and the simulator's over each bare loop's."""
    rates = {way: plan.tokens / median(cell[way] for cell in cells) for way in cells[0]}
    shares = {way: median(cell[way] / cell[SIMULATED] for cell in cells) for way in cells[0] if way != SIMULATED}
    strictest = min(shares, key=lambda way: shares[way])
    simulated = f"{human_count(rates[SIMULATED])} tokens/s"
    rows = [[SIMULATED, simulated, f"{way}: {human_count(rates[way])} tokens/s", f"{share:.2f}"] for way, share in shares.items()]
    return Section(
        sentence=f"Simulated DiLoCo on {plan.islands} islands trains {shares[strictest]:.2f} times the tokens per second of the "
        f"fastest bare loops ({strictest}).",
        rows=rows,
        note=f"Speed: {plan.islands} models, {plan.steps} steps each, H={plan.inner_steps}, one torch thread each; medians "
        f"of {len(cells)} measurements. A ratio above 1 means that the simulator is faster. The sentence has the lowest ratio.",
    )


# ------------------------------------------------------------------------------------------------------------- outer steps


def _outer(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    model, vocab_size = (GPT.tiny(), 257) if sizes.tiny else (GPT.m20(), 32_000)
    repeats = 4 * sizes.repeats  # each is short
    keys = [f"outer {model} {number}" for number in range(repeats)]
    missing = [key for key in keys if record.get(key) is None]
    with CellProgress("outer step", len(missing), quiet=quiet) as progress:
        if missing:
            progress.begin("warming up")
            step = OuterStep(model, vocab_size, islands=4)
            step.seconds()
            step.seconds()  # after two every buffer has been used once
        for number, key in enumerate(missing, 1):
            progress.begin(f"measurement {number}")
            times = step.seconds()
            record.add(key, {"params": step.params.numel, "islands": step.islands, "seconds": times})
            progress.end(f"measurement {number}: " + ", ".join(f"{what} {1000 * time_s:.1f} ms" for what, time_s in times.items()))
    return outer_section([record[key] for key in keys])


def outer_section(cells: Sequence[Mapping[str, Any]]) -> Section:
    """Each part and the sum, in copies of the weights."""
    params, islands = cells[0]["params"], cells[0]["islands"]
    times = [cell["seconds"] for cell in cells]
    parts = {f"{islands} deltas": [DELTA], f"mean of {islands}": [MEAN], "Nesterov's update": [UPDATE]}
    parts["whole outer step"] = [DELTA, MEAN, UPDATE]
    copy_s = f"one copy: {1000 * median(time[COPY] for time in times):.1f} ms"
    rows, ratio = [], 0.0
    for name, which in parts.items():
        ratio = median(sum(time[part] for part in which) / time[COPY] for time in times)
        taken_s = median(sum(time[part] for part in which) for time in times)
        rows.append([name, f"{1000 * taken_s:.1f} ms", copy_s, f"{ratio:.2f}"])
    reads = islands + 2  # every island's weights, the global ones, the momentum
    rows.append([*rows[-1][:2], f"a copy of each of the {reads} buffers it reads", f"{ratio / reads:.2f}"])
    return Section(
        sentence=f"An outer step over {islands} islands of {human_count(params)} parameters takes as long as {ratio:.1f} copies of "
        f"the weights.",
        rows=rows,
        note=f"Outer step: {human_count(params)} parameters, one thread, medians of {len(cells)}. A delta copies an island's "
        f"weights and subtracts them: two passes over memory. The step reads {reads} buffers of the weights' size. On a real "
        f"cluster each island computes one delta and the update.",
    )


# ------------------------------------------------------------------------------------------------------------------ memory


def _memory(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    counts = (FEW, MANY)
    keys = {islands: f"memory {islands}{' tiny' if sizes.tiny else ''}" for islands in counts}
    missing = [islands for islands in counts if record.get(keys[islands]) is None]
    with CellProgress("memory", len(missing), quiet=quiet) as progress:
        for islands in missing:
            progress.begin(f"{islands} islands in a separate process")
            found = record.add(keys[islands], measure(islands, tiny=sizes.tiny))
            progress.end(f"{islands} islands: {human_bytes(found['rss_bytes'])}, {human_bytes(found['peak_bytes'])} at the peak")
    return memory_section(record[keys[FEW]], record[keys[MANY]])


def memory_section(few: Mapping[str, Any], many: Mapping[str, Any]) -> Section:
    """The memory of a further island, over what it must hold."""
    further, must = many["islands"] - few["islands"], MUST_HOLD_BYTES * few["params"]
    each = {name: (many[name] - few[name]) / further for name in ("rss_bytes", "peak_bytes")}
    size, held, peak = human_count(few["params"]), each["rss_bytes"] / must, each["peak_bytes"] / must
    against = f"must hold: {human_bytes(must)}"
    return Section(
        sentence=f"A further island of {size} parameters takes {held:.2f} times the memory that it must hold, and {peak:.2f} times "
        f"at its peak.",
        rows=[
            ["a further island, after the round", human_bytes(each["rss_bytes"]), against, f"{held:.2f}"],
            ["a further island, at the peak", human_bytes(each["peak_bytes"]), against, f"{peak:.2f}"],
        ],
        note=f"Memory: that of a process with {many['islands']} islands minus that of one with {few['islands']}, per further "
        f"island, after one step. An island must hold weights, gradients and two moments: {MUST_HOLD_BYTES} bytes per parameter. "
        f"At the peak, in the exchange, it also holds its delta and its outer step.",
    )


def _sizes(options: argparse.Namespace) -> Sizes:
    if not options.quick:
        return Sizes(speed=SpeedPlan(steps=options.steps), repeats=options.repeats)
    small = ("model=GPT(layers=1,width=16,heads=2,head_size=8)", "data.seq_len=16", "data.limit_bytes=60000", "train.batch_size=2")
    plan = SpeedPlan(steps=4, inner_steps=2, more=(*small, "optimizer.lr=0.001"), processes=False)
    return Sizes(speed=plan, repeats=1, tiny=True)


if __name__ == "__main__":
    script(main)
