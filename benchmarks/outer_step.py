"""The cost of DiLoCo's outer step between two processes on one machine, against its lower bound.

    python benchmarks/outer_step.py              50M parameters: a minute or two
    python benchmarks/outer_step.py --quick      smoke test at small sizes

The lower bound is one all-reduce of a flat buffer by gloo and one fused step of torch's SGD with Nesterov's momentum on it. An
outer step is everything between the last inner step of a round and the first of the next: a process reads the weights, averages the
delta with the other process, applies the outer rule, and loads the new weights. torchft's outer step is that of its
`local_sgd.DiLoCo`, quorum and vote included. The three alternate; figures are medians of the ratios. One torch thread each. Needs
an idle machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from atoll.models.gpt import GPT
from atoll.telemetry.units import human_count, human_percent
from outer_atoll import PARTS, OuterStep
from progress import CellProgress, timed
from record import benchmark_parser, holds_text, markdown_table, open_record, script
from slow_baselines import IslandInfo, Torchft

MODEL, VOCAB = GPT(layers=12, width=576, heads=9, head_size=64), 4096
SMALL = GPT(layers=2, width=32, heads=2, head_size=16)
BOUND, OURS, THEIRS = "the least", "atoll", "torchft"  # names in records
ALLOWED = 1.25
"""The allowed ratio to the lower bound."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """A model, and the number of turns after a warm-up turn."""

    model: GPT
    turns: int

    @property
    def params(self) -> int:
        return self.model.num_params(VOCAB)


class LowerBound:
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
    """Seconds of each turn, and of the parts of atoll's, in one of the processes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torchft's servers log a page per step
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ours = OuterStep(group, plan.model, VOCAB)
    model = plan.model.build(VOCAB, seq_len=8, seed=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients its step only calls torchft
    theirs = Torchft(model, inner, 1, IslandInfo(rank, size, LOCALHOST, dist.FileStore(store, size)))
    steps: dict[str, Callable[[], object]] = {BOUND: LowerBound(plan.params), OURS: ours.round, THEIRS: inner.step}
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
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of `tests`
    from tests.process_pool import ProcessPool

    parser = benchmark_parser(__doc__, "outer_step", quick=True)
    parser.add_argument("--turns", type=int, default=15, help="measurements of each")
    options = parser.parse_args(arguments)
    plan = Plan(SMALL, 2) if options.quick else Plan(MODEL, options.turns)
    record = open_record(options, "outer_step")
    key = f"{plan.params} parameters, {plan.turns} turns"
    if record.get(key) is None:
        with CellProgress("outer step", 1, quiet=options.quiet) as progress:
            progress.begin(key)
            with closing(ProcessPool(2)) as both, tempfile.TemporaryDirectory() as folder:
                record.add(key, {"params": plan.params, "ranks": both.run(measured, plan, f"{folder}/torchft")})
            progress.end(key)
    record.publish("The cost of an outer step", sections_of(record[key]))


# -------------------------------------------------------------------------------------------------------------- the report


def sections_of(cell: dict[str, Any]) -> list[str]:
    """The verdict, all three times, and the parts of atoll's."""
    seconds = {name: slower(cell["ranks"], "seconds", name) for name in (BOUND, OURS, THEIRS)}
    ratios = {name: median(a / b for a, b in zip(times_s, seconds[BOUND], strict=True)) for name, times_s in seconds.items()}
    line = (
        f"{holds_text(ratios[OURS] <= ALLOWED)}: atoll's outer step takes {ratios[OURS]:.2f} times the lower bound (allowed: at "
        f"most {ALLOWED}), and torchft's {ratios[THEIRS]:.2f}."
    )
    rows = [
        ["lower bound" if name == BOUND else name, f"{median(times_s):.3f}", f"{ratios[name]:.2f}"]
        for name, times_s in seconds.items()
    ]
    note = (
        f"{human_count(cell['params'])} parameters in float32, two processes on loopback, one torch thread each; medians of "
        f"{len(seconds[OURS])} turns, of the slower process in each. Lower bound: one flat all-reduce of gloo and one fused step."
    )
    parts = {name: median(slower(cell["ranks"], "parts", name)) for name in PARTS}
    whole_s = median(seconds[OURS])
    where = [[name, f"{part_s:.3f}", human_percent(part_s / whole_s)] for name, part_s in parts.items()]
    return [
        f"## Outcome\n\n- {line}",
        f"## Figures\n\n{note}\n\n{markdown_table(['', 'seconds', 'over the lower bound'], rows)}",
        f"## Parts of atoll's outer step\n\n{markdown_table(['part', 'seconds', 'share'], where)}",
    ]


def slower(ranks: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    """Seconds of each turn of the slower process, for which the other waits."""
    return [max(both) for both in zip(*(rank[kind][name] for rank in ranks), strict=True)]


if __name__ == "__main__":
    script(main)
