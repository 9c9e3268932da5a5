"""The cost of DiLoCo's outer step between two processes on one machine, against its lower bound.

    python benchmarks/outer_step.py              50M parameters: a minute or two
    python benchmarks/outer_step.py --quick      in miniature, to see whether it works

The least is one all-reduce of a flat buffer by gloo and one fused step of torch's SGD with Nesterov's momentum on it. An outer
step is everything between the last inner step of a round and the first of the next: the weights are read, the delta is taken and
averaged, the outer rule steps, and the new weights are loaded. torchft's is what its `local_sgd.DiLoCo` does in that place, a
quorum and a vote included. They take turns, next to each other; the median of the ratios counts. One torch thread each. Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from atoll.models.gpt import GPT
from atoll.telemetry.units import human_count, human_percent
from atoll.testing.processes import processes
from outer_atoll import PARTS, OuterStep
from progress import Watch, timed
from record import Record, default_path, markdown_table, script
from slow_baselines import Seat, Torchft

MODEL, VOCAB = GPT(layers=12, width=576, heads=9, head_size=64), 4096
SMALL = GPT(layers=2, width=32, heads=2, head_size=16)
FLOOR, OURS, THEIRS = "the least", "atoll", "torchft"
ALLOWED = 1.3
"""Times the least."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """What is measured: a model, and how many turns after one that warms up."""

    model: GPT
    turns: int

    @property
    def params(self) -> int:
        return self.model.num_params(VOCAB)


class Floor:
    """One flat all-reduce, and one fused update."""

    def __init__(self, params: int) -> None:
        self._weights = torch.nn.Parameter(torch.ones(params))
        self._weights.grad = torch.full((params,), 1e-3)
        self._optimizer = torch.optim.SGD([self._weights], lr=0.7, momentum=0.9, nesterov=True, fused=True)

    def __call__(self) -> None:
        assert self._weights.grad is not None
        dist.all_reduce(self._weights.grad)
        self._optimizer.step()


def measured(group: dist.ProcessGroup, plan: Plan, store: str) -> dict[str, Any]:
    """Seconds of each turn, and of the parts of ours, in one of the processes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torchft's servers write a page about every step
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ours = OuterStep(group, plan.model, VOCAB)
    model = plan.model.build(VOCAB, seq_len=8, seed=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients its step does nothing but call torchft
    theirs = Torchft(model, inner, 1, Seat(rank, size, LOCALHOST, dist.FileStore(store, size)))
    steps: dict[str, Callable[[], object]] = {FLOOR: Floor(plan.params), OURS: ours.round, THEIRS: inner.step}
    found: dict[str, Any] = {"seconds": {name: [] for name in steps}, "parts": {name: [] for name in PARTS}}
    for turn in range(1 + plan.turns):
        for name, step in steps.items():
            dist.barrier()
            taken_s, _ = timed(step)
            if turn:
                found["seconds"][name].append(taken_s)
        theirs.check()
        parts = ours.take_parts()
        if turn:
            for name, part_s in parts.items():
                found["parts"][name].append(part_s)
    ours.close()
    theirs.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    plan = Plan(SMALL, 2) if options.quick else Plan(MODEL, options.turns)
    record = Record(options.record or default_path("outer_step" + ("_quick" if options.quick else "")))
    key = f"{plan.params} parameters, {plan.turns} turns"
    with Watch("outer step", int(record.get(key) is None), quiet=options.quiet) as watch:
        if record.get(key) is None:
            watch.begin(key)
            with processes(2) as both, tempfile.TemporaryDirectory() as folder:
                record.add(key, {"params": plan.params, "ranks": both.run(measured, plan, f"{folder}/torchft")})
            watch.end(key)
    sections = sections_of(record[key])
    readme = record.write("What an outer step costs", sections)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


# -------------------------------------------------------------------------------------------------------------- the report


def sections_of(cell: dict[str, Any]) -> list[str]:
    """Of a record: whether ours is cheap enough, all three, and where ours spends its time."""
    seconds = {name: slower(cell["ranks"], "seconds", name) for name in (FLOOR, OURS, THEIRS)}
    ratios = {name: median(a / b for a, b in zip(times_s, seconds[FLOOR], strict=True)) for name, times_s in seconds.items()}
    verdict = "**holds here**" if ratios[OURS] <= ALLOWED else "**does not hold here**"
    line = (
        f"{verdict}: atoll's outer step takes {ratios[OURS]:.2f} times the least (asked: at most {ALLOWED}), and torchft's "
        f"{ratios[THEIRS]:.2f}."
    )
    rows = [[name, f"{median(times_s):.3f}", f"{ratios[name]:.2f}"] for name, times_s in seconds.items()]
    note = (
        f"{human_count(cell['params'])} parameters in float32, two processes on loopback, one torch thread each; medians of "
        f"{len(seconds[OURS])} turns, of the slower process in each. The least: one flat all-reduce of gloo and one fused step."
    )
    parts = {name: median(slower(cell["ranks"], "parts", name)) for name in PARTS}
    whole_s = median(seconds[OURS])
    where = [[name, f"{part_s:.3f}", human_percent(part_s / whole_s)] for name, part_s in parts.items()]
    return [
        f"## Outcome\n\n- {line}",
        f"## Figures\n\n{note}\n\n{markdown_table(['', 'seconds', 'over the least'], rows)}",
        f"## Where atoll's goes\n\n{markdown_table(['part', 'seconds', 'share'], where)}",
    ]


def slower(ranks: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    """Seconds of each turn, of the process that took longer: the other waits for it."""
    return [max(both) for both in zip(*(rank[kind][name] for rank in ranks), strict=True)]


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="measurements of each")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether it works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_outer_step")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
