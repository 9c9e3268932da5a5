"""The cost of a hub's step, in copies of the buffers that it reads and writes.

    python benchmarks/hub_step.py              20M parameters: a minute
    python benchmarks/hub_step.py --quick      smoke test at small sizes

The lower bound is one copy of each buffer that the step touches, into an existing buffer: weights, gradient, sum and, at its
update, momentum. The readable form is `update`; the fused form is `update_in_place`, with weights that are not donated, since
workers may still hold them. A whole push is all that the hub does: it rejects an update that is not finite, steps, and dispatches
the worker. Rules alternate window by window, each beside its own copies; figures are medians of the ratios. Needs an idle machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.flat_tree import Tree, free_buffer_pool
from atoll.core.nested_trees import recycle
from atoll.engines.async_hub import AsyncHub, Push
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.replica.local_replica import torch_threads
from atoll.telemetry.units import human_count
from progress import CellProgress, timed
from record import Record, benchmark_parser, markdown_table, open_record, script

ARRIVALS = 4
"""Per window."""
ALLOWED = 1.5
"""The allowed ratio of the fused form."""
FUSED, READABLE, WHOLE = "fused", "readable", "fused, whole push"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A rule in one of its forms."""

    name: str
    rule: Any  # the hub's; or an algorithm that does more with an update than its rule
    touched: tuple[int, ...]  # buffers that each arrival of a window reads or writes
    form: str  # readable, fused, or a whole push

    @property
    def key(self) -> str:
        return f"{self.name}, {self.form}"


def subjects() -> list[Subject]:
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
    touched = (2, 3, 3, 4)  # the last also reads the weights that the worker started from
    return [
        *(
            Subject(name=name, rule=rule, touched=touched, form=form)
            for name, (rule, touched) in rules.items()
            for form in (READABLE, FUSED, WHOLE)
        ),
        *(
            Subject(name=name, rule=algorithm, touched=(count,) * ARRIVALS, form=WHOLE)
            for (name, algorithm), count in zip(weighted.items(), touched, strict=True)
        ),
    ]


class Bench:
    """Buffers of a model, and a hub that steps with them.

    Args:
        params: of the model.
    """

    def __init__(self, params: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._start = Tree.of({"w": torch.randn(params, generator=generator)})
        self._gradients = [Tree.of({"w": 1e-3 * torch.randn(params, generator=generator)}) for _ in range(2)]
        self._sources = [self._start, *self._gradients]
        self._buffers = [torch.empty_like(tree.flat) for tree in self._sources]

    def seconds(self, subject: Subject) -> dict[str, Any]:
        """Seconds of one copy, and of each step of one window after a warm-up window, on one thread."""
        with torch_threads(1):
            window = self._pushes(subject) if subject.form == WHOLE else self._steps(subject)
            next(window)
            copy_s, _ = timed(self._copies)
            steps_s = next(window)
            window.close()
        return {"copy_s": copy_s / len(self._sources), "steps_s": steps_s}

    def _copies(self) -> None:
        for buffer, tree in zip(self._buffers, self._sources, strict=True):
            buffer.copy_(tree.flat)

    def _steps(self, subject: Subject) -> Iterator[list[float]]:
        """Windows of the rule alone."""
        update = subject.rule.update_in_place if subject.form == FUSED else subject.rule.update
        hub = (self._start.copy(), subject.rule.init(self._start))
        try:
            while True:
                steps_s = []
                for gradient in self._arriving():
                    before = hub
                    taken_s, hub = timed(lambda before=before, gradient=gradient: update(before[0], gradient, before[1]))
                    recycle([before], [hub])  # as an engine does with released buffers
                    steps_s.append(taken_s)
                yield steps_s
        finally:
            recycle([hub], [])

    def _pushes(self, subject: Subject) -> Iterator[list[float]]:
        """Windows of a hub with as many workers as arrivals; each worker arrives once per window."""
        algorithm = subject.rule if isinstance(subject.rule, AsyncLocalSGD) else AsyncLocalSGD(inner_steps=1, outer=subject.rule)
        hub = AsyncHub(algorithm, self._start.copy(), examples=[1], updates=10**9, draw=lambda round: 0.0)
        rounds = {worker: worker for worker in range(ARRIVALS) if hub.join_all({worker: None}, 0.0)}
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
    parser = benchmark_parser(__doc__, "hub_step", quick=True)
    parser.add_argument("--params", type=int, default=20_000_000, help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each rule and form")
    options = parser.parse_args(arguments)
    params, repeats = (100_000, 2) if options.quick else (options.params, options.repeats)
    record = open_record(options, "hub_step")
    cells = _measured(record, params, repeats, quiet=options.quiet)
    sentence, table = outcome(cells)
    note = (
        f"{human_count(params)} parameters in float32, one thread; medians of {repeats} windows of {ARRIVALS} arrivals. Copies: "
        f"buffers that a step touches (weights, gradient, sum, momentum), mean over a window. Ratio: the time of a step over that "
        f"of the copies. At a window's last arrival momentum and sum change; Nesterov has windows of one arrival."
    )
    record.publish("The cost of a hub's step", [f"## Outcome\n\n- {sentence}", f"## Figures\n\n{table}", note])


def _measured(record: Record, params: int, repeats: int, *, quiet: bool) -> dict[str, list[dict[str, Any]]]:
    """The cells of each rule and form. They alternate, so that a disturbance affects all of them."""
    keys = {(subject.key, number): f"{params} {subject.key} {number}" for number in range(repeats) for subject in subjects()}
    missing = [number for number in range(repeats) if any(record.get(keys[subject.key, number]) is None for subject in subjects())]
    with CellProgress("hub step", len(missing), quiet=quiet) as progress:
        bench = Bench(params) if missing else None
        for number in missing:
            progress.begin(f"measurement {number + 1}")
            for done, subject in enumerate(subjects()):
                progress.advance(done / len(subjects()), subject.key)
                if bench is not None and record.get(keys[subject.key, number]) is None:
                    record.add(keys[subject.key, number], {"way": subject.key, "params": params, **bench.seconds(subject)})
            progress.end(f"measurement {number + 1} of {repeats}")
    free_buffer_pool()
    return {subject.key: [record[keys[subject.key, number]] for number in range(repeats)] for subject in subjects()}


def outcome(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, str]:
    """The verdict on the most expensive fused rule, and the table."""
    rows, fused = [], {}
    for subject in subjects():
        mine = cells[subject.key]
        mean = median(sum(cell["steps_s"]) / (sum(subject.touched) * cell["copy_s"]) for cell in mine)
        last = median(cell["steps_s"][-1] / (subject.touched[-1] * cell["copy_s"]) for cell in mine)
        step_s, copy_s = median(fmean(cell["steps_s"]) for cell in mine), median(cell["copy_s"] for cell in mine)
        figures = [
            f"{1000 * step_s:.1f} ms",
            f"{1000 * copy_s:.1f} ms",
            f"{fmean(subject.touched):g}",
            f"{mean:.2f}",
            f"{last:.2f}",
        ]
        rows.append([subject.name, subject.form, *figures])
        if subject.form != READABLE:
            fused[f"{subject.name}, {subject.form}"] = max(mean, last)
    slowest = max(fused, key=lambda name: fused[name])
    verdict = "within" if fused[slowest] <= ALLOWED else "beyond"
    sentence = (
        f"The most expensive fused step ({slowest}) takes {fused[slowest]:.2f} times as long as the copies of the buffers that it "
        f"reads and writes: {verdict} the allowed {ALLOWED}."
    )
    headings = ["rule", "form", "step", "copy", "copies", "ratio", "ratio at the last arrival"]
    return sentence, markdown_table(headings, rows, left=2)


if __name__ == "__main__":
    script(main)
