"""The speed of every algorithm in the simulator on one GPU, compared with a bare compiled PyTorch loop in the same process.

    python benchmarks/gpu.py --text FOLDER --only algorithms  the same, as a part of all speeds
    python benchmarks/gpu_algorithms.py --text FOLDER         all rows: less than ten minutes of an H200
    python benchmarks/gpu_algorithms.py --quick               smoke test at small sizes, also on a CPU

FOLDER is what `atoll data prepare` wrote; without it tokens are random. The workload: 6 layers, width 256, 4 heads of 64, tied,
sequences of 256, 128 of them per island and step, 4 islands. Each row trains through the engine that `atoll run` uses, in turn with
the bare loop; a turn ends when all islands together have computed its steps. A row is judged by the median of its turns against one
figure of the bare loop for all rows: the fastest of the medians that stand beside the rows. Two further rows compare the defaults
(precision=auto, compile=auto) with fp32-strict without compiling. Needs an idle device; the tables of a record need none.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Arranged, Event, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import ReadsAhead, Workload
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.launch import engine_of
from atoll.engines.training_setup import matrix_products
from atoll.engines.warm_start_training import RunPreparation
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.evaluator import Evaluator
from atoll.runs.run_settings import Run, Train, candidates, choose_computing, here
from atoll.telemetry.units import human_count
from gpu_device import device_name, free_memory, is_cuda, seconds, synchronize
from gpu_loops import Subject
from gpu_plan import Shape
from progress import CellProgress
from record import (
    Record,
    benchmark_parser,
    bullets,
    check_texts,
    holds_text,
    markdown_table,
    missing_text,
    open_record,
    replace_between,
    script,
)
from sim_speed import fused_adamw

LEAST_SHARE = 0.95
"""Required: tokens per second over the bare loop's."""
AGREED, MOST_WARM_TURNS = 0.02, 12
"""The bare loop is warm once two turns in a row differ by at most this share, or after so many turns."""
RULE, CLIP_NORM = AdamW(lr=1e-3), 1.0
ASYNC = "AsyncLocalSGD(inner_steps={h},outer=DelayedNesterov(lr=0.7,momentum=0.9,period=4),pace=given,grace_s=0.5)"
ALGORITHMS = {
    "DiLoCo": "DiLoCo(inner_steps={h})",
    "ACCO": "ACCO()",
    "asynchronous, Delayed Nesterov and DyLU": ASYNC,
    "DDP": "DDP()",
    "DPU": "DPU(warmup=1)",
    "WP": "WP(warmup=1)",
    "ZeRO-1": "ZeRO1()",
    "Streaming": "Streaming(inner_steps={h})",
    "eager updates": "Eager(inner_steps={h})",
}
DEFAULTS, STRICT = "DiLoCo, defaults", "DiLoCo, fp32-strict, not compiled"
NAMES = (*ALGORITHMS, DEFAULTS, STRICT)
DEFAULT_STEPS, DEFAULT_WARM_START = 3_000, 1_000
"""The run for which `auto` chooses in the row of the defaults."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The workload, and the length of a measurement."""

    model: str = "layers=6,width=256,heads=4,head_size=64,tied=true"
    batch_size: int = 128
    seq_len: int = 256
    vocab_size: int = 8_192  # of random tokens
    islands: int = 4
    turn_steps: int = 50  # of each island, and of DiLoCo's round
    turns: int = 3

    @property
    def label(self) -> str:
        return f"{self.model} {self.batch_size}x{self.seq_len} k={self.islands} turns={self.turns}x{self.turn_steps}"


QUICK = Sizes(
    model="layers=1,width=16,heads=2,head_size=8,tied=true", batch_size=4, seq_len=16, vocab_size=64, turn_steps=4, turns=2
)


class Rows:
    """The runs of all rows, with their workload.

    Args:
        text: the folder of a prepared text; None: random tokens.
        device: where to compute.
    """

    def __init__(self, sizes: Sizes, text: Path | None, device: str) -> None:
        self.sizes, self.text, self.device = sizes, text, device
        self.tokens = "random tokens" if text is None else "prepared text"  # text.json in the record says which

    @cached_property
    def workload(self) -> Workload:
        """What the rows and the bare loop train."""
        sizes = self.sizes
        preparation = RunPreparation(self._run("DDP()", Train(steps=1, batch_size=sizes.batch_size, device=self._on)).resolved)
        if self.text is not None:
            return preparation.sharded(Tree.of({}))
        model = preparation.run.model
        assert isinstance(model, GPT)
        shape = {"batch_size": sizes.batch_size, "seq_len": sizes.seq_len, "vocab_size": sizes.vocab_size, "bare_steps": 1}
        return Subject(Shape(name="rows", model=model, **shape), self.device)

    @property
    def _on(self) -> Any:
        return "cuda" if is_cuda(self.device) else "cpu"

    def _run(self, algorithm: str, train: Train) -> Run:
        sizes = self.sizes
        corpus = "stdlib" if self.text is None else f"prepared:{self.text}"
        settings = [
            f"model=GPT({sizes.model})",
            f"data=Text(corpus='{corpus}',seq_len={sizes.seq_len},eval_batches=1)",
            f"algorithm={algorithm.format(h=sizes.turn_steps)}",
            "cluster.step_time_s=very" if "Async" in algorithm else "cluster.step_time_s=[1.0]",
            f"cluster.islands={sizes.islands}",
            "cluster.threads_per_island=1",
        ]
        recipe = replace(recipes.demo_ddp(), optimizer=RULE, train=replace(train, clip_norm=CLIP_NORM))
        return override(recipe, settings, candidates)

    def all(self) -> dict[str, Run]:
        """The run of each row."""
        sizes, fast = self.sizes, ("bf16", True) if is_cuda(self.device) else ("fp32", False)
        runs = {name: self.run(algorithm, *fast) for name, algorithm in ALGORITHMS.items()}
        steps = {"steps": DEFAULT_STEPS, "warm_start_steps": DEFAULT_WARM_START}
        longer = Train(**steps, batch_size=sizes.batch_size, device=self._on)
        asked = self._run("DDP()", longer)
        chosen = choose_computing(asked, here(asked))[0]
        runs[DEFAULTS] = self.run(ALGORITHMS["DiLoCo"], chosen.precision, chosen.compile is True)
        runs[STRICT] = self.run(ALGORITHMS["DiLoCo"], "fp32-strict", False)
        return runs

    def run(self, algorithm: str, precision: Any, compiled: bool) -> Run:
        # Arrivals of an asynchronous run pass a turn's end by up to a round, so it has more turns than are measured.
        turns = 1 + self.sizes.turns + (2 if "Async" in algorithm else 0)
        train = Train(
            steps=turns * self.sizes.turn_steps,
            batch_size=self.sizes.batch_size,
            device=self._on,
            precision=precision,
            compile=compiled,
        )
        return self._run(algorithm, train).resolved

    def key(self, name: str, run: Run) -> str:
        return f"{self._begin(name)}{run.train.precision} compile={run.train.compile}"

    def _begin(self, name: str) -> str:
        return f"{name} | {self.sizes.label} | {self.tokens} | "

    def recorded(self, record: Record) -> dict[str, dict[str, Any]]:
        """The cells of the rows, by name, whatever the precision that the defaults chose on the record's device."""
        cells = [(name, cell) for name in NAMES for cell in record.cells if cell["key"].startswith(self._begin(name))]
        return dict(cells)


class BareLoop:
    """A loop without a framework on the workload's first shard: its batches, autocast, clipping, fused AdamW."""

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device, self._on_gpu = workload, device, is_cuda(device)
        self._module = workload.module().to(device)
        self._optimizer = fused_adamw(self._module, RULE)
        self._loss: Callable[[nn.Module, Any], Tensor] = workload.loss
        if self._on_gpu:
            self._loss = torch.compile(workload.loss, dynamic=False)
        self._position = 0

    def steps(self, number: int) -> None:
        for batch in self._batches(number):
            with torch.autocast("cuda", torch.bfloat16, enabled=self._on_gpu):
                loss = self._loss(self._module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), CLIP_NORM, foreach=self._on_gpu)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._position += number

    def _batches(self, number: int) -> Iterator[Any]:
        batches = self._workload.batches
        if self._on_gpu and isinstance(batches, ReadsAhead):
            return batches.ahead(0, self._position, number, self._device)
        return (batches.batch(0, self._position + step) for step in range(number))

    def turn_s(self, number: int) -> float:
        """Seconds per step of a turn."""
        return seconds(self._device, lambda: self.steps(number)) / number


class TurnTimer:
    """A sink that times turns of an engine. Between two turns, and before the first, it runs one of the bare loop."""

    def __init__(self, sizes: Sizes, device: str, bare: BareLoop) -> None:
        self._sizes, self._device, self._bare = sizes, device, bare
        self.engine: SimEngine | AsyncSimEngine | None = None
        self._start_s, self._steps_at_start = 0.0, -1
        self.found: dict[str, Any] = {"step_s": [], "bare_step_s": [], "arranged": ""}

    def emit(self, event: Event) -> None:
        if isinstance(event, Arranged):
            self.found["arranged"] = f"{event.how}: {event.why}"
        if isinstance(event, RoundFinished) and len(self.found["step_s"]) < self._sizes.turns:
            self._end_round()

    def _computed(self) -> int:
        """Steps that all islands have computed, also those of rounds that have not arrived."""
        engine = self.engine
        assert engine is not None
        members: Any = engine.workers.values() if isinstance(engine, AsyncSimEngine) else engine.islands.values()
        return sum(member.replica.steps_taken for member in members)

    def _end_round(self) -> None:
        steps, turn = self._computed(), self._sizes.turn_steps * self._sizes.islands
        if steps < turn or (self._steps_at_start >= 0 and steps < self._steps_at_start + turn):
            return  # the warm-up, or this turn, goes on
        synchronize(self._device)
        if self._steps_at_start >= 0:
            self.found["step_s"].append((time.perf_counter() - self._start_s) / (steps - self._steps_at_start))
        if len(self.found["step_s"]) < self._sizes.turns:
            self.found["bare_step_s"].append(self._bare.turn_s(self._sizes.turn_steps))
            self._start_s, self._steps_at_start = time.perf_counter(), steps


def measure(run: Run, workload: Workload, sizes: Sizes, device: str, bare: BareLoop) -> dict[str, Any]:
    """Seconds per island and step of each turn, and of the bare loop's turns before them."""
    timer = TurnTimer(sizes, device, bare)
    params = Tree.of(workload.module().to(device))
    with matrix_products(run):
        evaluator = Evaluator(workload, device)
        # Memory is counted in the first rounds, which are most of these few.
        engine = engine_of(run, workload, params, evaluator, timer, saves=False, count_memory=False)
        timer.engine = engine
        for _ in engine.train():
            pass
    timer.found["bare_step_s"] = timer.found["bare_step_s"][: len(timer.found["step_s"])]
    return timer.found


# ----------------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Figures:
    """The figures of a row."""

    found: dict[str, Any]
    tokens: int  # of a step of one island

    @property
    def shares(self) -> list[float]:
        """Tokens per second over the bare loop's, turn by turn."""
        return [bare / own for bare, own in zip(self.found["bare_step_s"], self.found["step_s"], strict=True)]

    @property
    def bare_step_s(self) -> float:
        """The bare loop's median beside this row."""
        return median(self.found["bare_step_s"])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.found["step_s"])

    def share(self, bare_step_s: float) -> float:
        """Tokens per second over those of a bare loop with this step time."""
        return bare_step_s / median(self.found["step_s"])


def sections(rows: Rows, figures: dict[str, Figures], device: str, missing: Sequence[str]) -> list[str]:
    bare_s = min((one.bare_step_s for one in figures.values()), default=1.0)
    lines = [
        f"{holds_text(one.share(bare_s) >= LEAST_SHARE)}: {name} trains {one.share(bare_s):.3f} of the tokens per second of the "
        f"bare loop at its fastest (required: {LEAST_SHARE}); {median(one.shares):.3f} ({min(one.shares):.3f} to "
        f"{max(one.shares):.3f}) of those of the bare loop beside it, turn by turn."
        for name, one in figures.items()
        if name in ALGORITHMS
    ]
    if DEFAULTS in figures and STRICT in figures:
        fast, strict = figures[DEFAULTS], figures[STRICT]
        settings = f"precision={fast.found['precision']}, compile={str(fast.found['compile']).lower()} here"
        lines.append(f"The defaults ({settings}) train {fast.tokens_per_s / strict.tokens_per_s:.2f} times as fast as fp32-strict.")
    table = [
        [
            name,
            human_count(one.tokens_per_s),
            f"{one.share(bare_s):.3f}",
            human_count(one.tokens / one.bare_step_s),
            f"{median(one.shares):.3f}",
            f"{min(one.shares):.3f} to {max(one.shares):.3f}",
            one.found["arranged"] or "-",
        ]
        for name, one in figures.items()
    ]
    note = (
        f"On {device}, {rows.tokens}; {rows.sizes.label}. Medians of turns after a warm-up of one turn, which compiles. The bare "
        f"loop at its fastest is the best of its medians beside the rows: {human_count(_tokens(rows.sizes) / bare_s)} tokens/s. "
        f"Bare loop: one model, fused AdamW, clipping and, on a GPU, a compiled loss in bfloat16."
    )
    left = [f"Not measured yet: {', '.join(missing)}."] if missing else []
    headings = ["", "tokens/s", "share of the fastest bare loop", "bare loop beside it", "share", "range", "how islands compute"]
    outcome = bullets(lines) or "No row has been measured yet."
    return [f"## Outcome\n\n{outcome}", f"## Figures\n\n{note}\n\n{markdown_table(headings, table)}", *left]


def page_text(figures: dict[str, Figures], missing: Sequence[str], tokens: int) -> str:
    """The same in short, for a page: whether all algorithms reach the required share, and a table."""
    bare_s = [one.bare_step_s for one in figures.values()]
    below = [name for name, one in figures.items() if name in ALGORITHMS and one.share(min(bare_s)) < LEAST_SHARE]
    unknown = [name for name in missing if name in ALGORITHMS]
    reasons = [f"{', '.join(below)} {'does' if len(below) == 1 else 'do'} not reach it"] if below else []
    reasons += [f"not measured for want of device time: {', '.join(unknown)}"] if unknown else []
    shown = f"**It is not shown**: {'; '.join(reasons)}." if reasons else "**Every algorithm reaches it.**"
    rows = [
        [
            name,
            human_count(one.tokens_per_s),
            f"{one.share(min(bare_s)):.2f}",
            f"{median(one.shares):.2f} ({min(one.shares):.2f} to {max(one.shares):.2f})",
        ]
        for name, one in figures.items()
    ]
    slowest, fastest = (human_count(tokens / step_s) for step_s in (max(bare_s), min(bare_s)))
    spread = (
        f"The bare loop's own speed varied between rows, from {slowest} to {fastest} tokens per second, so its fastest median is "
        f"the one to compare with:"
    )
    headings = ["", "tokens per second", "over the fastest bare loop", "over the bare loop beside it"]
    return f"{shown} {spread}\n\n{markdown_table(headings, rows)}"


# ---------------------------------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    record = open_record(options, "gpu_algorithms")
    if options.text is not None:
        check_texts(record, {"text": options.text}, needed=not options.dry_run)
    rows = Rows(QUICK if options.quick else Sizes(), options.text, device)
    failed: list[str] = []
    if options.dry_run:
        print(missing_text([name for name in NAMES if name not in rows.recorded(record)]))
        return
    if options.quick or is_cuda(device):
        failed = _measure(rows, record, options)
    elif not rows.recorded(record):
        raise ConfigError(
            f"--device {device}: this script measures a GPU, torch sees none here, and the record {record.path} has no row for the "
            f"tables. Use a GPU, or --quick on a CPU, or --record with the folder of a record and its --text."
        )
    figures = {name: Figures(cell, _tokens(rows.sizes)) for name, cell in rows.recorded(record).items()}
    left = [name for name in NAMES if name not in figures]
    made = sections(rows, figures, _recorded_device(record) or device_name(device), left)
    record.publish("Algorithms on one GPU", made)
    if options.docs is not None and figures:
        replace_between(options.docs, "gpu_algorithms", page_text(figures, left, _tokens(rows.sizes)))
    if failed:
        raise AtollError(f"some rows failed, and the record has the others: {'; '.join(failed)}")


def _recorded_device(record: Record) -> str | None:
    """The device that measured the record's cells; None if it has none. Cells of 2026-11-18 do not name it; `source.txt` does."""
    named = [cell["device"] for cell in record.cells if "device" in cell]
    source = record.path / "source.txt"
    if not named and record.cells and source.exists():
        named = [line.removeprefix("cuda: ") for line in source.read_text("utf-8").splitlines() if line.startswith("cuda: ")]
    return named[0] if named else None


def _measure(rows: Rows, record: Record, options: argparse.Namespace) -> list[str]:
    """Measures the missing rows until the time ends. Returns those that failed.

    Raises:
        ConfigError: the record is of another device, and there are rows to measure.
    """
    device, failed = rows.device, list[str]()
    runs = rows.all()
    keys = {name: rows.key(name, run) for name, run in runs.items()}
    until_s = time.monotonic() + 60 * options.minutes
    missing = [name for name in runs if record.get(keys[name]) is None]
    here, there = device_name(device), _recorded_device(record)
    if missing and there not in (None, here):
        raise ConfigError(
            f"the record {record.path} was measured on {there}, and this device is {here}. A record is of one device: use another "
            f"--record here, or continue this one there."
        )
    with CellProgress("gpu_algorithms", len(missing), quiet=options.quiet) as progress:
        bare: BareLoop | None = None
        for name in missing:
            if time.monotonic() >= until_s:
                progress.log("the time is over: the same command continues from here")
                break
            progress.begin(name)
            try:
                free_memory(device)
                bare = bare or _warm(BareLoop(rows.workload, device), rows.sizes)
                found = _add(record, keys[name], runs[name], here, measure(runs[name], rows.workload, rows.sizes, device, bare))
                shares = Figures(found, _tokens(rows.sizes)).shares
                progress.end(f"{name}: {median(shares):.3f} of the tokens per second of the bare loop beside it")
            except Exception as error:  # other rows may not fail
                traceback.print_exception(error, file=sys.stderr)
                failed.append(f"{name} ({type(error).__name__} {str(error).partition(chr(10))[0]})")
                progress.end(f"{name}: failed")
    return failed


def _warm(bare: BareLoop, sizes: Sizes) -> BareLoop:
    """Until two turns in a row agree: the first ones compile, and the device's clock changes."""
    before_s = bare.turn_s(sizes.turn_steps)
    for _ in range(MOST_WARM_TURNS):
        now_s = bare.turn_s(sizes.turn_steps)
        if abs(now_s - before_s) <= AGREED * before_s:
            break
        before_s = now_s
    return bare


def _add(record: Record, key: str, run: Run, device: str, found: dict[str, Any]) -> dict[str, Any]:
    return record.add(key, {**found, "precision": run.train.precision, "compile": run.train.compile, "device": device})


def _tokens(sizes: Sizes) -> int:
    return sizes.batch_size * sizes.seq_len


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, "gpu_algorithms", page="docs/evidence.md", quick=True, dry=True)
    parser.add_argument("--text", type=Path, help="the folder of a text that `atoll data prepare` wrote; None: random tokens")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no row after this time")
    parser.add_argument("--device", help="None: cuda if there is one")
    return parser


if __name__ == "__main__":
    script(main)
