"""The cost of a hub's scheduler, without training: which worker is dispatched when, with which shard and how many steps.

    python benchmarks/hub_schedule.py              100,000 arrivals from 1,000 workers: two minutes
    python benchmarks/hub_schedule.py --quick      smoke test at small sizes

The driver is a heap of finishing times, as in the simulator. Each setting runs twice: once as it is, for the time, and once with
timers around its parts, for the profile.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from atoll.algorithms.async_scheduler import Decision, Dispatch, Scheduler
from atoll.algorithms.shard_sampler import ShardSampler
from atoll.core.protocols import Plan, Work
from atoll.runs.cluster import draw
from atoll.telemetry.units import human_count, human_percent
from progress import CellProgress, Stopwatch
from record import Record, benchmark_parser, markdown_table, open_record, script

ALLOWED_S = 20.0
"""Allowed for 100,000 arrivals from 1,000 workers."""
STEPS = 50
"""Per round of the fastest worker."""
DRAWING, CHOOSING, ASSIGNING, OWN = "drawing", "choosing", "handing out", "windows, pace"  # names in records
PARTS = (DRAWING, CHOOSING, ASSIGNING, OWN, "driver")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is scheduled."""

    arrivals: int = 100_000
    workers: int = 1_000  # of different speeds; there are as many shards, of different sizes


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The hub's settings."""

    pace: Literal["even", "measured"]  # measured: Dynamic Local Updates from measured speeds
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
    """A hub's scheduler without an end, with the simulator's random numbers."""
    return Scheduler(setting.plan, examples_of(size), updates=_ENDLESS, draw=_draw)


def examples_of(size: Size) -> list[int]:
    """Examples of each shard; unequal, so that their shares are unequal."""
    return [100 + number % 7 for number in range(size.workers)]


def drive(scheduler: Scheduler, size: Size) -> float:
    """All workers join, and then arrive in order of their finishing times. Returns the seconds that this takes."""
    step_s = [0.5 + 2 * (7919 * number % size.workers) / size.workers for number in range(size.workers)]
    out: list[tuple[float, int, int]] = []

    def push_dispatched(decisions: Sequence[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Dispatch):
                heapq.heappush(out, (one.time_s + one.steps * step_s[one.worker], one.round, one.worker))

    start = time.perf_counter()
    for worker in range(size.workers):
        push_dispatched(scheduler.join_all({worker: None}, 0.0, version=0))
    for version in range(size.arrivals):
        now_s, _, worker = heapq.heappop(out)
        push_dispatched(scheduler.tick(now_s, version, next_s=now_s))
        push_dispatched(scheduler.arrive(worker, now_s, version + 1, next_s=out[0][0] if out else math.inf)[1])
    return time.perf_counter() - start


_ENDLESS = 2**62


def _draw(number: int) -> float:
    return draw(0, "shard", number)


# ------------------------------------------------------------------------------------------------------------ the profile


class TimedShards(ShardSampler):
    """A sampler whose calls are timed."""

    def __init__(self, setting: Setting, size: Size, timer: Stopwatch) -> None:
        super().__init__(examples_of(size), setting.plan.shards, setting.plan.ties)
        self._timer = timer

    def choose(self, last: int, draw: Callable[[], float]) -> int:
        return self._timer.around(CHOOSING, lambda: super(TimedShards, self).choose(last, draw))

    def assign(self, shard: int, steps: int) -> Work:
        return self._timer.around(ASSIGNING, lambda: super(TimedShards, self).assign(shard, steps))


class TimedScheduler(Scheduler):
    """A scheduler whose own work, shards and random numbers are timed."""

    def __init__(self, setting: Setting, size: Size, timer: Stopwatch) -> None:
        super().__init__(setting.plan, examples_of(size), _ENDLESS, lambda number: timer.around(DRAWING, lambda: _draw(number)))
        self.shards = TimedShards(setting, size, timer)
        self._timer = timer

    def arrive(
        self, worker: int, now_s: float, version: int, next_s: float | None, seconds: float | None = None
    ) -> tuple[int, list[Decision]]:
        return self._timer.around(OWN, lambda: super(TimedScheduler, self).arrive(worker, now_s, version, next_s, seconds))

    def tick(self, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        return self._timer.around(OWN, lambda: super(TimedScheduler, self).tick(now_s, version, next_s))


def shares(setting: Setting, size: Size) -> dict[str, float]:
    """Shares of the time by part. The driver has the rest, the timers' own time included."""
    timer = Stopwatch()
    whole_s = drive(TimedScheduler(setting, size, timer), size)
    found = {part: timer.seconds.get(part, 0.0) / whole_s for part in PARTS[:-1]}
    return {**found, PARTS[-1]: 1 - sum(found.values())}


# ------------------------------------------------------------------------------------------------------------- the report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "hub_schedule", quick=True)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    options = parser.parse_args(arguments)
    size, repeats = (Size(arrivals=500, workers=20), 1) if options.quick else (Size(), options.repeats)
    record = open_record(options, "hub_schedule")
    cells = _measured(record, size, repeats, quiet=options.quiet)
    sentence, table = outcome(cells, size)
    note = (
        f"{size.arrivals:,} arrivals from {size.workers:,} workers with as many shards, on one thread; medians of {repeats}. "
        f"Shares of a run with timers: drawing random numbers, choosing shards by deficit, assigning positions in them, the "
        f"scheduler's own work (windows, pace), and the driver's heap of finishing times."
    )
    record.publish("The cost of a hub's scheduler", [f"## Outcome\n\n- {sentence}", f"## Figures\n\n{table}", note])


def _measured(record: Record, size: Size, repeats: int, *, quiet: bool) -> dict[str, list[dict[str, Any]]]:
    """The cells of each setting. Settings alternate, so that a disturbance affects all of them."""
    keys = {
        (number, one.name): f"{size.arrivals} {size.workers} {one.name} {number}" for number in range(repeats) for one in settings()
    }
    missing = [at for at, key in keys.items() if record.get(key) is None]
    by_name = {one.name: one for one in settings()}
    with CellProgress("hub schedule", len(missing), quiet=quiet) as progress:
        for number, name in missing:
            progress.begin(f"{name}, measurement {number + 1}")
            scheduler = scheduler_of(by_name[name], size)
            seconds = drive(scheduler, size)
            progress.advance(0.5, "profile")
            cell = {"seconds": seconds, "windows": scheduler.windows, "shares": shares(by_name[name], size)}
            record.add(keys[number, name], {"setting": name, "arrivals": size.arrivals, "workers": size.workers, **cell})
            progress.end(f"{name}, measurement {number + 1} of {repeats}: {seconds:.2f} s")
    return {name: [record[keys[number, name]] for number in range(repeats)] for name in by_name}


def outcome(cells: Mapping[str, Sequence[Mapping[str, Any]]], size: Size) -> tuple[str, str]:
    """The verdict on the slowest setting, and the table."""
    rows, taken_s = [], {}
    for name, mine in cells.items():
        taken_s[name] = median(cell["seconds"] for cell in mine)
        split = [human_percent(median(cell["shares"][part] for cell in mine)) for part in PARTS]
        rate, windows = human_count(size.arrivals / taken_s[name]), f"{mine[0]['windows']:,}"
        rows.append([name, f"{taken_s[name]:.2f} s", f"{rate}/s", windows, *split])
    slowest = max(taken_s, key=lambda name: taken_s[name])
    sentence = f"{size.arrivals:,} arrivals from {size.workers:,} workers take at most {taken_s[slowest]:.2f} s ({slowest})"
    if size == Size():
        sentence += f": {'within' if taken_s[slowest] <= ALLOWED_S else 'beyond'} the allowed {ALLOWED_S:g} s"
    return f"{sentence}.", markdown_table(
        ["setting", "seconds", "arrivals", "windows", "drawing", "choosing", "assigning", "windows, pace", "driver"], rows
    )


if __name__ == "__main__":
    script(main)
