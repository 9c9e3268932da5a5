"""The cost of a hub's step, in copies of the buffers that it reads and writes.

    python benchmarks/hub_step.py              20M parameters: a minute
    python benchmarks/hub_step.py --quick      in miniature, to see whether it works

A copy of a buffer into one that is there is what memory can do. A step is measured against one copy of each buffer that it touches:
weights, gradient, sum and, where it is refreshed, momentum. The readable form is `update`; the fused form is `update_in_place`,
with weights that are not donated, since workers may still hold them. A whole push is all that the hub does besides: it refuses an
update that is not finite, and sends the worker off again. Rules take turns, window by window, each next to its own copies; the
median of the ratios counts. Leave the machine alone meanwhile."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from atoll.algorithms.async_hub import AsyncHub, Push
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.flat_tree import Tree, free_buffer_pool
from atoll.core.pytree import recycle
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.replica.local_replica import torch_threads
from atoll.telemetry.units import human_count
from progress import Watch, timed
from record import Record, default_path, markdown_table, script

ARRIVALS = 4
"""Of a window."""
ALLOWED = 1.5
"""What the fused form is allowed to cost, as a ratio."""
FUSED, READABLE, WHOLE = "fused", "readable", "fused, whole push"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A rule in one of its forms.

    Attributes:
        name: for the table.
        rule: the hub's; or an algorithm that does more with an update than its rule does.
        touched: how many buffers each arrival of a window reads or writes.
        form: readable or fused; or all that a hub does with a push, fused: it looks at the update, steps, and sends the worker off.
    """

    name: str
    rule: Any
    touched: tuple[int, ...]
    form: str

    @property
    def key(self) -> str:
        return f"{self.name}, {self.form}"


def ways() -> list[Way]:
    """Every rule in both forms. Weights, gradient, momentum: 3; weights, gradient, sum: 3; gradient and sum alone: 2."""
    nesterov = Nesterov(lr=0.7, momentum=0.9)
    rules = {
        "Nesterov": (nesterov, (3,) * ARRIVALS),
        f"DelayedNesterov({ARRIVALS})": (DelayedNesterov(lr=0.7, momentum=0.9, period=ARRIVALS), (3,) * (ARRIVALS - 1) + (4,)),
        f"Buffered(Nesterov, {ARRIVALS})": (Buffered(rule=nesterov, size=ARRIVALS), (2,) * (ARRIVALS - 1) + (4,)),
    }
    weighted = {
        "SGD at 1/k": AsyncLocalSGD(inner_steps=1, outer=SGD(lr=0.7), weight="1/k"),
        "Nesterov at 1/k": AsyncLocalSGD(inner_steps=1, outer=nesterov, weight="1/k"),
        "Nesterov at 1/k, Polynomial": AsyncLocalSGD(inner_steps=1, outer=nesterov, weight="1/k", correction=Polynomial()),
        "Nesterov, DelayCompensation": AsyncLocalSGD(inner_steps=1, outer=nesterov, correction=DelayCompensation(strength=0.5)),
    }
    touched = (2, 3, 3, 4)  # the last also reads the weights that the worker was sent off with
    return [
        *(
            Way(name=name, rule=rule, touched=touched, form=form)
            for name, (rule, touched) in rules.items()
            for form in (READABLE, FUSED, WHOLE)
        ),
        *(
            Way(name=name, rule=algorithm, touched=(count,) * ARRIVALS, form=WHOLE)
            for (name, algorithm), count in zip(weighted.items(), touched, strict=True)
        ),
    ]


class Bench:
    """Buffers of a model with this many parameters, and a hub that steps with them.

    Args:
        params: of the model.
    """

    def __init__(self, params: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._start = Tree.of({"w": torch.randn(params, generator=generator)})
        self._gradients = [Tree.of({"w": 1e-3 * torch.randn(params, generator=generator)}) for _ in range(2)]
        self._sources = [self._start, *self._gradients]
        self._room = [torch.empty_like(tree.flat) for tree in self._sources]

    def seconds(self, way: Way) -> dict[str, Any]:
        """One copy, and each step of one window after another that only warms up; on one thread."""
        with torch_threads(1):
            window = self._pushes(way) if way.form == WHOLE else self._steps(way)
            next(window)
            copy_s, _ = timed(self._copies)
            steps_s = next(window)
            window.close()
        return {"copy_s": copy_s / len(self._sources), "steps_s": steps_s}

    def _copies(self) -> None:
        for room, tree in zip(self._room, self._sources, strict=True):
            room.copy_(tree.flat)

    def _steps(self, way: Way) -> Iterator[list[float]]:
        """Windows of the rule alone."""
        update = way.rule.update_in_place if way.form == FUSED else way.rule.update
        hub = (self._start.copy(), way.rule.init(self._start))
        try:
            while True:
                steps_s = []
                for gradient in self._arriving():
                    before = hub
                    taken_s, hub = timed(lambda before=before, gradient=gradient: update(before[0], gradient, before[1]))
                    recycle([before], [hub])  # as an engine does with what neither the hub nor a worker holds any more
                    steps_s.append(taken_s)
                yield steps_s
        finally:
            recycle([hub], [])

    def _pushes(self, way: Way) -> Iterator[list[float]]:
        """Windows of a hub with as many workers, each of which comes once in a window."""
        algorithm = way.rule if isinstance(way.rule, AsyncLocalSGD) else AsyncLocalSGD(inner_steps=1, outer=way.rule)
        hub = AsyncHub(algorithm, self._start.copy(), examples=[1], updates=10**9, draw=lambda round: 0.0)
        rounds = {worker: worker for worker in range(ARRIVALS) if hub.join(worker, 0.0)}
        for now_s in itertools.count(1):
            steps_s = []
            for worker, gradient in enumerate(self._arriving()):
                push = Push(worker, rounds[worker], gradient.copy().donate())
                taken_s, outcomes = timed(lambda push=push, now_s=now_s: hub.push(push, float(now_s), None))
                rounds |= {outcome.worker: outcome.round for outcome in outcomes if isinstance(outcome, Dispatch)}
                steps_s.append(taken_s)
            yield steps_s

    def _arriving(self) -> Iterator[Tree]:
        return (self._gradients[arrival % len(self._gradients)] for arrival in range(ARRIVALS))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    params, repeats = (100_000, 2) if options.quick else (options.params, options.repeats)
    record = Record(options.record or default_path("hub_step" + ("_quick" if options.quick else "")))
    cells = _measured(record, params, repeats, quiet=options.quiet)
    sentence, table = outcome(cells)
    note = (
        f"{human_count(params)} parameters in float32, one thread; medians of {repeats} windows of {ARRIVALS} arrivals. Copies: "
        f"buffers that a step touches (weights, gradient, sum, momentum), on average over a window. Ratio: a step's time over that "
        f"of so many copies. At a window's last arrival momentum and sum change; Nesterov has windows of one arrival."
    )
    readme = record.write("What a hub's step costs", [f"## Outcome\n\n- {sentence}", f"## Figures\n\n{table}", note])
    print(f"{table}\n\n{sentence}\n\nrecord: {readme}")


def _measured(record: Record, params: int, repeats: int, *, quiet: bool) -> dict[str, list[dict[str, Any]]]:
    """For each way its cells. Ways take turns, so that a slow minute hits all of them."""
    keys = {(way.key, number): f"{params} {way.key} {number}" for number in range(repeats) for way in ways()}
    missing = [number for number in range(repeats) if any(record.get(keys[way.key, number]) is None for way in ways())]
    with Watch("hub step", len(missing), quiet=quiet) as watch:
        bench = Bench(params) if missing else None
        for number in missing:
            watch.begin(f"measurement {number + 1}")
            for done, way in enumerate(ways()):
                watch.advance(done / len(ways()), way.key)
                if bench is not None and record.get(keys[way.key, number]) is None:
                    record.add(keys[way.key, number], {"way": way.key, "params": params, **bench.seconds(way)})
            watch.end(f"measurement {number + 1} of {repeats}")
    free_buffer_pool()
    return {way.key: [record[keys[way.key, number]] for number in range(repeats)] for way in ways()}


def outcome(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, str]:
    """A sentence about the dearest fused rule, and the table."""
    rows, fused = [], {}
    for way in ways():
        mine = cells[way.key]
        mean = median(sum(cell["steps_s"]) / (sum(way.touched) * cell["copy_s"]) for cell in mine)
        last = median(cell["steps_s"][-1] / (way.touched[-1] * cell["copy_s"]) for cell in mine)
        step_s, copy_s = median(fmean(cell["steps_s"]) for cell in mine), median(cell["copy_s"] for cell in mine)
        figures = [f"{1000 * step_s:.1f} ms", f"{1000 * copy_s:.1f} ms", f"{fmean(way.touched):g}", f"{mean:.2f}", f"{last:.2f}"]
        rows.append([way.name, way.form, *figures])
        if way.form != READABLE:
            fused[f"{way.name}, {way.form}"] = max(mean, last)
    dearest = max(fused, key=lambda name: fused[name])
    verdict = "within" if fused[dearest] <= ALLOWED else "beyond"
    sentence = (
        f"The dearest fused step takes {fused[dearest]:.2f} times the copy of the buffers that it reads and writes ({dearest}): "
        f"{verdict} the {ALLOWED} that it is allowed."
    )
    headings = ["rule", "form", "a step", "a copy", "copies", "ratio", "ratio at the last arrival"]
    return sentence, markdown_table(headings, rows, left=2)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--params", type=int, default=20_000_000, help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each rule and form")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether everything works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_hub_step")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
