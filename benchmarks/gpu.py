"""The speed of simulated islands on one GPU, compared with a bare compiled PyTorch loop.

    python benchmarks/gpu.py --text FOLDER                    all algorithms on real text, then DiLoCo on random tokens, by model
    python benchmarks/gpu.py                                  DiLoCo alone: about twenty minutes of an H200
    python benchmarks/gpu.py --presets m150                   one model, and small batches
    python benchmarks/gpu.py --only presets --minutes 4       starts no cell after 4 minutes; the same command continues
    python benchmarks/gpu.py --quick                          smoke test at small sizes, also on a CPU

With `--text`, a folder that `atoll data prepare` wrote, `gpu_algorithms.py` measures first, into a record of its own.

For each preset: tokens per second, model FLOP utilisation relative to a matrix product of the same run, and memory, of a bare loop
and of DiLoCo on 1, 4, 8 and 64 islands, if they fit into memory. With small batches, which do not fill a device: islands one after
the other (apart), the same with recorded passes (CUDA graphs), all stacked in one pass, and the mode that the simulator chooses by
measurement (auto); with one batch that fills the device, all of these but recorded passes. The losses show whether all modes
compute the same. The bare loop and DiLoCo's rounds alternate. Needs an idle device.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import gpu_algorithms
from atoll.core.errors import AtollError, ConfigError
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_bytes, human_count
from gpu_device import device_name, free_bytes, free_memory, is_cuda, product_flops_per_s
from gpu_loops import Bare, Subject, measure_islands
from gpu_plan import FLOPS_FORMULA, PRESETS, Cell, Plan, Shape, plan_of, quick_plan, sizes_given
from gpu_report import figure, sections_of
from gpu_results import MATRIX, Measured, Results, bare_key, matrix_key
from progress import CellProgress
from record import Record, benchmark_parser, fill, missing_text, open_record, script


class Measuring:
    """Measures the cells that a record does not hold.

    Args:
        plan: all cells.
        record: holds the cells.
        device: where to compute.
        progress: shows the progress.
        until_s: start no cell after this time of `time.monotonic`.
        free: the free bytes of a device; None: not limited.
    """

    def __init__(
        self,
        plan: Plan,
        record: Record,
        device: str,
        progress: CellProgress,
        until_s: float = math.inf,
        free: Callable[[str], int | None] = free_bytes,
    ) -> None:
        self._plan, self._record, self._device, self._progress = plan, record, device, progress
        self._until_s, self._free = until_s, free
        self._run = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._product_flops_per_s: float | None = None  # of this run
        self.failed: list[str] = []

    def all(self) -> None:
        """
        Raises:
            ConfigError: the record is of another device, and there are cells to measure.
        """
        if self._record.get(matrix_key(self._plan.matrix)) is None:
            self._product()
        for shape, cells in self._plan.groups.items():
            missing = [cell for cell in cells if self._record.get(cell.key) is None]
            if (missing or self._record.get(bare_key(shape, self._plan.turns)) is None) and not self._is_late():
                self._check_device()
                self._product()
                self._shape(shape, missing)

    def _is_late(self) -> bool:
        return time.monotonic() >= self._until_s

    def _check_device(self) -> None:
        here = device_name(self._device)
        there = self._record[matrix_key(self._plan.matrix)].get("device", here)
        if here != there:
            raise ConfigError(
                f"--record {self._record.path}: it was measured on {there}, and this is {here}. The figures of a record are of "
                f"one device: use another --record here, or continue this one there."
            )

    def _product(self) -> float:
        """Measured once per run, first. The record's own cell is that of its first run."""
        if self._product_flops_per_s is None:
            self._progress.begin(MATRIX)
            found = self._product_flops_per_s = product_flops_per_s(self._device, self._plan.matrix, self._plan.product_s)
            result, key = f"{MATRIX}: {found / 1e12:.3g} TFLOP/s", matrix_key(self._plan.matrix)
            if self._record.get(key) is None:
                about = {"device": device_name(self._device), "flops_per_token": FLOPS_FORMULA}
                self._record.add(key, {"flops_per_s": found, "product_s": self._plan.product_s, **about, "run": self._run})
                self._progress.end(result)
            else:
                self._progress.log(result)
        return self._product_flops_per_s

    def _add(self, key: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a cell, with what is needed to compare it with other runs."""
        return self._record.add(key, {**found, "product_flops_per_s": self._product(), "run": self._run})

    def _shape(self, shape: Shape, missing: Sequence[Cell]) -> None:
        """Measures the missing cells of one model and batch, with one compiled loss."""
        self._progress.begin(f"{shape.label}: compiling")
        try:
            subject, bare = self._bare_loop(shape)
        except Exception as error:  # other shapes may not fail
            self._progress.log(self._failure(f"{shape.label}, bare loop", error))
            return
        for cell in missing:
            if self._is_late():
                self._progress.log("the time is over: the same command continues from here")
                return
            self._progress.begin(f"{shape.label}, {cell.label}")
            self._progress.end(f"{shape.label}, {cell.label}: {self._cell(cell, subject, bare)}")

    def _bare_loop(self, shape: Shape) -> tuple[Subject, Bare]:
        """The workload, and the bare loop after its warm-up and measurement."""
        key = bare_key(shape, self._plan.turns)
        free_memory(self._device)
        subject = Subject(shape, self._device)
        bare = Bare(subject)
        bare.warm_up()
        if self._record.get(key) is None:
            found = self._add(key, bare.measured(self._plan.turns))
            rate = shape.bare_steps * shape.tokens / min(found["bare_s"])
            self._progress.end(f"{shape.label}, bare loop: {human_count(rate)} tokens/s at best")
        return subject, bare

    def _cell(self, cell: Cell, subject: Subject, bare: Bare) -> str:
        """Measures a cell, unless it is too large. Returns the result as text."""
        try:
            free_memory(self._device)
            free = self._free(self._device)
            if free is not None and cell.estimated_bytes > free:
                needs = f"needs about {human_bytes(cell.estimated_bytes)}, and {human_bytes(free)} are free"
                return self._skipped(cell, needs)
            found = Measured(cell, self._add(cell.key, measure_islands(cell, subject, bare)))
        except torch.OutOfMemoryError:
            return self._skipped(cell, "did not fit into memory")
        except Exception as error:  # other cells may not fail
            return self._failure(f"{cell.shape.label}, {cell.label}", error)
        return f"{human_count(found.tokens_per_s)} tokens/s, {found.share:.3f} of the bare loop's"

    def _skipped(self, cell: Cell, why: str) -> str:
        self._add(cell.key, {"skipped": why})
        return f"skipped: {why}"

    def _failure(self, what: str, error: Exception) -> str:
        """Prints the traceback. Adds no cell, so that the same command tries again."""
        traceback.print_exception(error, file=sys.stderr)
        message = f"{type(error).__name__} {str(error).partition(chr(10))[0]}"
        self.failed.append(f"{what} ({message})")
        return f"failed: {message}"


PARTS = ("algorithms", "presets", "small")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    begun_s = time.monotonic()
    if options.text is not None and (not options.only or "algorithms" in options.only):
        gpu_algorithms.main(_of_algorithms(options))
    elif "algorithms" in (options.only or ()):
        raise ConfigError("--only algorithms: name the text that they read, --text FOLDER.")
    if not options.only or {"presets", "small"} & {*options.only}:
        _by_model(options, begun_s)


def _of_algorithms(options: argparse.Namespace) -> list[str]:
    """The arguments of the part with all algorithms."""
    named = {"text": options.text, "record": options.algorithms_record, "docs": options.docs, "device": options.device}
    given = [part for name, value in named.items() if value is not None for part in (f"--{name}", str(value))]
    switches = [f"--{name.replace('_', '-')}" for name in ("quick", "quiet", "dry_run") if getattr(options, name)]
    return [*given, "--minutes", str(options.minutes), *switches]


def _by_model(options: argparse.Namespace, begun_s: float) -> None:
    """The part with DiLoCo alone, by model and batch."""
    device, plan = options.device or ("cuda" if torch.cuda.is_available() else "cpu"), _plan(options)
    record = open_record(options, "gpu")
    if options.dry_run:
        print(missing_text(_missing(plan, record)))
        return
    able = options.quick or (is_cuda(device) and torch.cuda.is_available())
    if not able and record.get(matrix_key(plan.matrix)) is None:
        raise ConfigError(
            f"--device {device}: this script measures a GPU, and torch sees none here. Use one, or --quick on a CPU, or give a "
            f"--record whose tables are to be written again."
        )
    # The same number everywhere: torch compiles a loss again for another number of threads.
    torch.set_num_threads(1)
    until_s = begun_s + 60 * options.minutes if able else -math.inf
    with CellProgress("gpu", len(_missing(plan, record)), quiet=options.quiet) as progress:
        measuring = Measuring(plan, record, device, progress, until_s)
        measuring.all()
    results = Results(plan, record)
    sections = sections_of(plan, results, record[matrix_key(plan.matrix)]["device"])
    save_figure(figure, results, record.plot)
    record.publish("Islands on one GPU", sections, plot="tokens per second")
    fill(options.docs, "gpu", sections[:1], record)  # the page has the outcome alone
    if measuring.failed:
        raise AtollError(f"some cells failed, and the record has the others: {'; '.join(measuring.failed)}")


def _missing(plan: Plan, record: Record) -> list[str]:
    keys = [matrix_key(plan.matrix), *(bare_key(shape, plan.turns) for shape in plan.groups)]
    keys += [cell.key for cells in plan.groups.values() for cell in cells]
    return [key for key in keys if record.get(key) is None]


def _plan(options: argparse.Namespace) -> Plan:
    if options.turns < 1 or options.inner_steps < 1:
        raise ConfigError(f"--turns {options.turns} --inner-steps {options.inner_steps}: both are at least 1. Use 3 and 25.")
    plan = (
        quick_plan(options.islands)
        if options.quick
        else plan_of(
            options.presets,
            sizes_given(options.batches),
            inner_steps=options.inner_steps,
            turns=options.turns,
            islands=options.islands,
        )
    )
    unwanted = {"presets", "small"} - set(options.only or ("presets", "small"))
    return replace(plan, presets={} if "presets" in unwanted else plan.presets, small={} if "small" in unwanted else plan.small)


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, "gpu", page="docs/evidence.md", quick=True, dry=True)
    parser.add_argument("--text", type=Path, help="a prepared text, on which all algorithms are measured; None: they are not")
    parser.add_argument("--algorithms-record", type=Path, help="their record's folder; None: records/<today>_gpu_algorithms")
    parser.add_argument(
        "--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS), help="models, in the order of measurement"
    )
    parser.add_argument("--batches", nargs="+", default=[], metavar="NAME=N", help="other batch sizes per island")
    parser.add_argument("--islands", type=int, nargs="+", help="numbers of islands; None: 1, 4, 8 and 64")
    parser.add_argument("--inner-steps", type=int, default=25, help="inner steps per round; fewer with more than 8 islands")
    parser.add_argument("--turns", type=int, default=3, help="turns per cell, after a warm-up; fewer with more than 8 islands")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part; None: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no cell after this time")
    parser.add_argument("--device", help="None: cuda if there is one")
    return parser


if __name__ == "__main__":
    script(main)
