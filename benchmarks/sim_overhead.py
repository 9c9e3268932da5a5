"""The overhead of the simulator in time, outer steps and memory, as ratios.

    python benchmarks/sim_overhead.py              everything: some minutes
    python benchmarks/sim_overhead.py --quick      in miniature, to see whether it works

Machines are noisy, so what is compared is measured in turn, again and again, and the median of the ratios counts. Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atoll.models.gpt import GPT
from atoll.telemetry.units import human_bytes, human_count
from cells import key_of
from progress import Watch
from record import Record, default_path, markdown_table, script
from sim_memory import MUST_HOLD_BYTES, measure
from sim_speed import COPY, DELTA, MEAN, SIMULATED, UPDATE, Contest, OuterStep, SpeedPlan

FEW, MANY = 4, 8  # islands, for memory


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `tiny` stands for a small decoder where the 20M one is measured otherwise."""

    speed: SpeedPlan
    repeats: int
    tiny: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    sizes = _sizes(options)
    record = Record(options.record or default_path("sim_overhead" + ("_quick" if options.quick else "")))
    parts = {"speed": _speed, "outer": _outer, "memory": _memory}
    told = [part(sizes, record, quiet=options.quiet) for name, part in parts.items() if not options.only or name in options.only]
    rows = [row for section in told for row in section.rows]
    table = markdown_table(["what", "measured", "against", "ratio"], rows)
    outcome = "## Outcome\n\n" + "\n".join(f"- {section.sentence}" for section in told)
    readme = record.write("What the simulator costs", [outcome, f"## Figures\n\n{table}", *(section.note for section in told)])
    print(f"{table}\n")
    print("\n".join(section.sentence for section in told))
    print(f"\nrecord: {readme}")


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one measurement came to: a sentence, rows of the table, and how to read them."""

    sentence: str
    rows: list[list[str]]
    note: str


# ------------------------------------------------------------------------------------------------------------------ speed


def _speed(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    plan = sizes.speed
    keys = [f"speed {key_of(plan.run())} {number}" for number in range(sizes.repeats)]
    missing = [key for key in keys if record.get(key) is None]
    with Contest(plan) as contest, Watch("speed", len(missing), quiet=quiet) as watch:
        ways = list(contest.ways)
        if missing:
            watch.begin("warming up")
            for way in ways:
                contest.warm_up(way)
        for number, key in enumerate(missing, 1):
            seconds = {}
            watch.begin(f"measurement {number}")
            for done, way in enumerate(ways):
                watch.advance(done / len(ways), way)
                seconds[way] = contest.seconds(way)
            record.add(key, {"seconds": seconds})
            watch.end(f"measurement {number}: " + ", ".join(f"{way} {time_s:.1f} s" for way, time_s in seconds.items()))
    return speed_section(plan, [record[key]["seconds"] for key in keys])


def speed_section(plan: SpeedPlan, cells: Sequence[Mapping[str, float]]) -> Section:
    """Tokens per second of each way, and the simulator's as a share of each bare loop's."""
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
        f"of {len(cells)} measurements. A ratio above 1 means that the simulator is faster. The claim is about the strictest.",
    )


# ------------------------------------------------------------------------------------------------------------- outer steps


def _outer(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    model, vocab_size = (GPT.tiny(), 257) if sizes.tiny else (GPT.m20(), 32_000)
    repeats = 4 * sizes.repeats  # they are short
    keys = [f"outer {model} {number}" for number in range(repeats)]
    missing = [key for key in keys if record.get(key) is None]
    with Watch("outer step", len(missing), quiet=quiet) as watch:
        if missing:
            watch.begin("warming up")
            step = OuterStep(model, vocab_size, islands=4)
            step.seconds()
            step.seconds()  # only then has every buffer been used once, and none is fresh any more
        for number, key in enumerate(missing, 1):
            watch.begin(f"measurement {number}")
            times = step.seconds()
            record.add(key, {"params": step.params.numel, "islands": step.islands, "seconds": times})
            watch.end(f"measurement {number}: " + ", ".join(f"{what} {1000 * time_s:.1f} ms" for what, time_s in times.items()))
    return outer_section([record[key] for key in keys])


def outer_section(cells: Sequence[Mapping[str, Any]]) -> Section:
    """Each part and the whole, in copies of the weights."""
    params, islands = cells[0]["params"], cells[0]["islands"]
    times = [cell["seconds"] for cell in cells]
    parts = {f"{islands} deltas": [DELTA], f"mean of {islands}": [MEAN], "Nesterov's update": [UPDATE]}
    parts["outer step in all"] = [DELTA, MEAN, UPDATE]
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
        f"weights and subtracts them: two passes over memory. It reads {reads} buffers, each as large as the weights. On a real "
        f"cluster each island computes one delta, and the update.",
    )


# ------------------------------------------------------------------------------------------------------------------ memory


def _memory(sizes: Sizes, record: Record, *, quiet: bool) -> Section:
    counts = (FEW, MANY)
    keys = {islands: f"memory {islands}{' tiny' if sizes.tiny else ''}" for islands in counts}
    missing = [islands for islands in counts if record.get(keys[islands]) is None]
    with Watch("memory", len(missing), quiet=quiet) as watch:
        for islands in missing:
            watch.begin(f"{islands} islands in a process of their own")
            found = record.add(keys[islands], measure(islands, tiny=sizes.tiny))
            watch.end(f"{islands} islands: {human_bytes(found['rss_bytes'])}, {human_bytes(found['peak_bytes'])} at the peak")
    return memory_section(record[keys[FEW]], record[keys[MANY]])


def memory_section(few: Mapping[str, Any], many: Mapping[str, Any]) -> Section:
    """What a further island costs, against what it must hold."""
    further, must = many["islands"] - few["islands"], MUST_HOLD_BYTES * few["params"]
    each = {name: (many[name] - few[name]) / further for name in ("rss_bytes", "peak_bytes")}
    size, held, peak = human_count(few["params"]), each["rss_bytes"] / must, each["peak_bytes"] / must
    against = f"must hold: {human_bytes(must)}"
    return Section(
        sentence=f"A further island of {size} parameters takes {held:.2f} times the memory that it must hold, and {peak:.2f} times "
        f"at the peak.",
        rows=[
            ["a further island, after the round", human_bytes(each["rss_bytes"]), against, f"{held:.2f}"],
            ["a further island, at the peak", human_bytes(each["peak_bytes"]), against, f"{peak:.2f}"],
        ],
        note=f"Memory: that of a process with {many['islands']} islands less that of one with {few['islands']}, for each further "
        f"island, after one step. It must hold weights, gradients and two moments: {MUST_HOLD_BYTES} bytes a parameter. At the "
        f"peak, in the exchange, there are its delta and its outer step besides.",
    )


def _sizes(options: argparse.Namespace) -> Sizes:
    if not options.quick:
        return Sizes(speed=SpeedPlan(steps=options.steps), repeats=options.repeats)
    small = ("model=GPT(layers=1,width=16,heads=2,head_size=8)", "data.seq_len=16", "data.limit_bytes=60000", "train.batch_size=2")
    plan = SpeedPlan(steps=4, inner_steps=2, more=(*small, "optimizer.lr=0.001"), processes=False)
    return Sizes(speed=plan, repeats=1, tiny=True)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each model, for speed; a multiple of 20")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--only", action="append", choices=["speed", "outer", "memory"], help="this part; None: all")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether everything works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_sim_overhead")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
