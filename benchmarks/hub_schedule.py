"""The cost of a hub's scheduler, without training: which worker is dispatched when, with which shard and how many steps.

    python benchmarks/hub_schedule.py              100,000 arrivals from 1,000 workers: two minutes
    python benchmarks/hub_schedule.py --quick      in miniature, to see whether it works

The driver is a heap of finishing times, as a simulator has it. Each setting is run twice: once as it is, which is the time that
counts, and once with a clock around its parts, which says where the time goes and costs a little itself.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from atoll.algorithms.async_scheduler import Decision, Dispatch, Scheduler
from atoll.algorithms.shard_sampler import ShardSampler
from atoll.core.protocols import Plan, Work
from atoll.runs.cluster import draw
from atoll.telemetry.units import human_count, human_percent
from progress import Watch
from record import Record, default_path, markdown_table, script

T = TypeVar("T")

ALLOWED_S = 20.0
"""What 100,000 arrivals from 1,000 workers may take."""
STEPS = 50
"""Of the fastest worker's round."""
DRAWING, CHOOSING, ASSIGNING, OWN = "drawing", "choosing", "handing out", "windows, pace"
PARTS = (DRAWING, CHOOSING, ASSIGNING, OWN, "driver")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is scheduled.

    Attributes:
        arrivals: in all.
        workers: of different speeds; there are as many shards, of different sizes.
    """

    arrivals: int = 100_000
    workers: int = 1_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the hub is set.

    Attributes:
        pace: even, or measured: Dynamic Local Updates by what was seen.
        grace_s: how long it waits for others.
    """

    pace: Literal["even", "measured"]
    grace_s: float

    @property
    def name(self) -> str:
        return f"pace {self.pace}, grace {self.grace_s:g} s"

    @property
    def plan(self) -> Plan:
        return Plan(steps=STEPS, grace_s=self.grace_s, pace=self.pace, speeds=(), shards="deficit", ties="last")


def settings() -> list[Setting]:
    return [Setting(pace=pace, grace_s=grace_s) for pace in ("even", "measured") for grace_s in (0.0, 1.0)]


# ------------------------------------------------------------------------------------------------------------ the driver


def scheduler_of(setting: Setting, size: Size) -> Scheduler:
    """A hub's scheduler that never comes to an end, with the simulator's chance."""
    return Scheduler(setting.plan, examples_of(size), updates=_ENDLESS, draw=_chance)


def examples_of(size: Size) -> list[int]:
    """Of each shard; unequal, so that their shares are."""
    return [100 + number % 7 for number in range(size.workers)]


def drive(scheduler: Scheduler, size: Size) -> float:
    """Lets all workers join, and then arrive in order of their finishing times. Seconds that it took."""
    step_s = [0.5 + 2 * (7919 * number % size.workers) / size.workers for number in range(size.workers)]
    out: list[tuple[float, int, int]] = []

    def send_off(decisions: Sequence[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Dispatch):
                heapq.heappush(out, (one.time_s + one.steps * step_s[one.worker], one.round, one.worker))

    start = time.perf_counter()
    for worker in range(size.workers):
        send_off(scheduler.join(worker, 0.0, version=0))
    for version in range(size.arrivals):
        now_s, _, worker = heapq.heappop(out)
        send_off(scheduler.tick(now_s, version, next_s=now_s))
        send_off(scheduler.arrive(worker, now_s, version + 1, next_s=out[0][0] if out else math.inf)[1])
    return time.perf_counter() - start


_ENDLESS = 2**62


def _chance(number: int) -> float:
    return draw(0, "shard", number)


# -------------------------------------------------------------------------------------------------- where the time goes


class Clock:
    """Adds up the time that calls take, by name, without that of the calls within them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within_s: list[float] = []

    def around(self, name: str, call: Callable[[], T]) -> T:
        self._within_s.append(0.0)
        start = time.perf_counter()
        result = call()
        taken_s = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + taken_s - self._within_s.pop()
        if self._within_s:
            self._within_s[-1] += taken_s
        return result


class TimedShards(ShardSampler):
    """A sampler with a clock around what a scheduler asks of them."""

    def __init__(self, setting: Setting, size: Size, clock: Clock) -> None:
        super().__init__(examples_of(size), setting.plan.shards, setting.plan.ties)
        self._clock = clock

    def choose(self, last: int, draw: Callable[[], float]) -> int:
        return self._clock.around(CHOOSING, lambda: super(TimedShards, self).choose(last, draw))

    def assign(self, shard: int, steps: int) -> Work:
        return self._clock.around(ASSIGNING, lambda: super(TimedShards, self).assign(shard, steps))


class TimedScheduler(Scheduler):
    """A scheduler with a clock around its own work, its shards and its chance."""

    def __init__(self, setting: Setting, size: Size, clock: Clock) -> None:
        super().__init__(setting.plan, examples_of(size), _ENDLESS, lambda number: clock.around(DRAWING, lambda: _chance(number)))
        self.shards = TimedShards(setting, size, clock)
        self._clock = clock

    def arrive(
        self, worker: int, now_s: float, version: int, next_s: float | None, seconds: float | None = None
    ) -> tuple[int, list[Decision]]:
        return self._clock.around(OWN, lambda: super(TimedScheduler, self).arrive(worker, now_s, version, next_s, seconds))

    def tick(self, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        return self._clock.around(OWN, lambda: super(TimedScheduler, self).tick(now_s, version, next_s))


def shares(setting: Setting, size: Size) -> dict[str, float]:
    """Of the whole time, by part. The driver has what is left, and with it the clock's own time."""
    clock = Clock()
    whole_s = drive(TimedScheduler(setting, size, clock), size)
    found = {part: clock.seconds.get(part, 0.0) / whole_s for part in PARTS[:-1]}
    return {**found, PARTS[-1]: 1 - sum(found.values())}


# ------------------------------------------------------------------------------------------------------------- the report


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    size, repeats = (Size(arrivals=500, workers=20), 1) if options.quick else (Size(), options.repeats)
    record = Record(options.record or default_path("hub_schedule" + ("_quick" if options.quick else "")))
    cells = _measured(record, size, repeats, quiet=options.quiet)
    sentence, table = outcome(cells, size)
    note = (
        f"{size.arrivals:,} arrivals from {size.workers:,} workers with as many shards, on one thread; medians of {repeats}. "
        f"Shares are of a run with a clock around the parts: the chance for shards, their choice by deficit, positions in them, "
        f"the scheduler's own work (windows, pace), and the driver's heap of finishing times."
    )
    readme = record.write("What scheduling costs a hub", [f"## Outcome\n\n- {sentence}", f"## Figures\n\n{table}", note])
    print(f"{table}\n\n{sentence}\n\nrecord: {readme}")


def _measured(record: Record, size: Size, repeats: int, *, quiet: bool) -> dict[str, list[dict[str, Any]]]:
    """For each setting its cells. Settings take turns, so that a slow minute hits all of them."""
    keys = {
        (number, one.name): f"{size.arrivals} {size.workers} {one.name} {number}" for number in range(repeats) for one in settings()
    }
    missing = [at for at, key in keys.items() if record.get(key) is None]
    by_name = {one.name: one for one in settings()}
    with Watch("hub schedule", len(missing), quiet=quiet) as watch:
        for number, name in missing:
            watch.begin(f"{name}, measurement {number + 1}")
            scheduler = scheduler_of(by_name[name], size)
            seconds = drive(scheduler, size)
            watch.advance(0.5, "where the time goes")
            cell = {"seconds": seconds, "windows": scheduler.windows, "shares": shares(by_name[name], size)}
            record.add(keys[number, name], {"setting": name, "arrivals": size.arrivals, "workers": size.workers, **cell})
            watch.end(f"{name}, measurement {number + 1} of {repeats}: {seconds:.2f} s")
    return {name: [record[keys[number, name]] for number in range(repeats)] for name in by_name}


def outcome(cells: Mapping[str, Sequence[Mapping[str, Any]]], size: Size) -> tuple[str, str]:
    """A sentence about the slowest setting, and the table."""
    rows, taken_s = [], {}
    for name, mine in cells.items():
        taken_s[name] = median(cell["seconds"] for cell in mine)
        split = [human_percent(median(cell["shares"][part] for cell in mine)) for part in PARTS]
        rate, windows = human_count(size.arrivals / taken_s[name]), f"{mine[0]['windows']:,}"
        rows.append([name, f"{taken_s[name]:.2f} s", f"{rate}/s", windows, *split])
    slowest = max(taken_s, key=lambda name: taken_s[name])
    told = f"{size.arrivals:,} arrivals from {size.workers:,} workers take at most {taken_s[slowest]:.2f} s ({slowest})"
    if size == Size():
        told += f": {'within' if taken_s[slowest] <= ALLOWED_S else 'beyond'} the {ALLOWED_S:g} s that they are allowed"
    return f"{told}.", markdown_table(["setting", "seconds", "arrivals", "windows", *PARTS], rows)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether everything works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_hub_schedule")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
