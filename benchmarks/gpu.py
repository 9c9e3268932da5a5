"""How fast simulated islands train on one GPU, against a bare compiled PyTorch loop.

    python benchmarks/gpu.py                                  everything: about twenty minutes of an H200
    python benchmarks/gpu.py --presets m150                   one model, and small batches
    python benchmarks/gpu.py --only presets --minutes 4       begins no further cell after so long; the same command goes on
    python benchmarks/gpu.py --quick                          in miniature, also on a CPU, to see whether it works

For each preset: tokens per second, model FLOP utilisation against a matrix product of the same run, and memory, of a bare loop and
of DiLoCo on 1, 4, 8 and 64 islands, where that many fit into memory. With small batches, which do not fill a device: islands
one after the other (apart), the same with recorded passes, all stacked in one pass, and what the simulator chooses by measuring
(auto); with one batch that does, all of these but recorded passes. Losses tell whether all ways give the same numbers. The bare
loop and DiLoCo's rounds take turns. Leave the device alone meanwhile.
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

from atoll.core.errors import AtollError, ConfigError
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_bytes, human_count
from gpu_device import free_bytes, is_cuda, product_flops_per_s, tidy
from gpu_loops import Bare, Subject, islands_measured
from gpu_plan import FLOPS_FORMULA, PRESETS, Cell, Plan, Shape, plan_of, quick_plan, sizes_given
from gpu_report import figure, sections_of
from gpu_results import MATRIX, Found, Measured, bare_key, matrix_key
from progress import Watch
from record import Record, default_path, fill, script


class Measuring:
    """Makes the cells that a record does not hold yet.

    Args:
        plan: all cells.
        record: where they are kept.
        device: where everything is computed.
        watch: is told how far it is.
        until_s: on `time.monotonic`'s clock: no cell begins later.
        room: how many bytes are free on a device; None if nobody needs to ask.
    """

    def __init__(
        self,
        plan: Plan,
        record: Record,
        device: str,
        watch: Watch,
        until_s: float = math.inf,
        room: Callable[[str], int | None] = free_bytes,
    ) -> None:
        self._plan, self._record, self._device, self._watch = plan, record, device, watch
        self._until_s, self._room = until_s, room
        self._run = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._product_flops_per_s: float | None = None
        """Of this run."""
        self.failed: list[str] = []

    def all(self) -> None:
        """
        Raises:
            ConfigError: the record is another device's, and there is something to measure.
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
                f"--record {self._record.path}: it was measured on {there}, and this is {here}. Figures of one record are of one "
                f"device: use another --record here, or go on with this one there."
            )

    def _product(self) -> float:
        """Measured once a run, before anything else. The record's own line is that of its first run."""
        if self._product_flops_per_s is None:
            self._watch.begin(MATRIX)
            found = self._product_flops_per_s = product_flops_per_s(self._device, self._plan.matrix, self._plan.product_s)
            told, key = f"{MATRIX}: {found / 1e12:.3g} TFLOP/s", matrix_key(self._plan.matrix)
            if self._record.get(key) is None:
                about = {"device": device_name(self._device), "flops_per_token": FLOPS_FORMULA}
                self._record.add(key, {"flops_per_s": found, "product_s": self._plan.product_s, **about, "run": self._run})
                self._watch.end(told)
            else:
                self._watch.say(told)
        return self._product_flops_per_s

    def _add(self, key: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Writes down what this run measured, with what is needed to compare it with other runs."""
        return self._record.add(key, {**found, "product_flops_per_s": self._product(), "run": self._run})

    def _shape(self, shape: Shape, missing: Sequence[Cell]) -> None:
        """Everything about one model and batch, with one compiled loss."""
        self._watch.begin(f"{shape.words}: compiling")
        try:
            subject, bare = self._begun(shape)
        except Exception as error:  # the other shapes may do better
            self._watch.say(self._failure(f"{shape.words}, bare loop", error))
            return
        for cell in missing:
            if self._is_late():
                self._watch.say("time is up: the same command goes on from here")
                return
            self._watch.begin(f"{shape.words}, {cell.label}")
            self._watch.end(f"{shape.words}, {cell.label}: {self._cell(cell, subject, bare)}")

    def _begun(self, shape: Shape) -> tuple[Subject, Bare]:
        """What is trained, and the bare loop, warm, and measured by itself."""
        key = bare_key(shape, self._plan.turns)
        tidy(self._device)
        subject = Subject(shape, self._device)
        bare = Bare(subject)
        bare.warm_up()
        if self._record.get(key) is None:
            found = self._add(key, bare.measured(self._plan.turns))
            rate = shape.bare_steps * shape.tokens / min(found["bare_s"])
            self._watch.end(f"{shape.words}, bare loop: {human_count(rate)} tokens/s at best")
        return subject, bare

    def _cell(self, cell: Cell, subject: Subject, bare: Bare) -> str:
        """Measures it, unless it is too large. What came of it, in words."""
        try:
            tidy(self._device)
            free = self._room(self._device)
            if free is not None and cell.estimated_bytes > free:
                needs = f"would take about {human_bytes(cell.estimated_bytes)}, and {human_bytes(free)} are free"
                return self._skipped(cell, needs)
            found = Measured(cell, self._add(cell.key, islands_measured(cell, subject, bare)))
        except torch.OutOfMemoryError:
            return self._skipped(cell, "did not fit into memory")
        except Exception as error:  # the other cells may do better, and a device is not lent for long
            return self._failure(f"{cell.shape.words}, {cell.label}", error)
        return f"{human_count(found.tokens_per_s)} tokens/s, {found.share:.3f} of the bare loop's"

    def _skipped(self, cell: Cell, why: str) -> str:
        self._add(cell.key, {"skipped": why})
        return f"skipped: {why}"

    def _failure(self, what: str, error: Exception) -> str:
        """It is told in full at once, and nothing is written down: the same command tries again."""
        traceback.print_exception(error, file=sys.stderr)
        said = f"{type(error).__name__} {str(error).partition(chr(10))[0]}"
        self.failed.append(f"{what} ({said})")
        return f"failed: {said}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    device, plan = options.device or ("cuda" if torch.cuda.is_available() else "cpu"), _plan(options)
    record = Record(options.record or default_path("gpu" + ("_quick" if options.quick else "")))
    able = options.quick or (is_cuda(device) and torch.cuda.is_available())
    if not able and record.get(matrix_key(plan.matrix)) is None:
        raise ConfigError(
            f"--device {device}: this measures a GPU, and torch sees none here. Use one, or --quick on a CPU, or give a --record "
            f"whose tables are to be made again."
        )
    # One everywhere: a loss that was compiled with so many threads around it is compiled anew for another number.
    torch.set_num_threads(1)
    until_s = time.monotonic() + 60 * options.minutes if able else -math.inf
    with Watch("gpu", _missing(plan, record), quiet=options.quiet) as watch:
        measuring = Measuring(plan, record, device, watch, until_s)
        measuring.all()
    found = Found(plan, record)
    sections = sections_of(plan, found, record[matrix_key(plan.matrix)]["device"])
    save_figure(figure, found, record.plot)
    readme = record.write("Islands on one GPU", [*sections, f"![tokens per second]({record.plot.name})"])
    fill(options.docs, "gpu", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")
    if measuring.failed:
        raise AtollError(f"some cells failed, and the record has the others: {'; '.join(measuring.failed)}")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if is_cuda(device) else "a CPU"


def _missing(plan: Plan, record: Record) -> int:
    keys = [matrix_key(plan.matrix), *(bare_key(shape, plan.turns) for shape in plan.groups)]
    keys += [cell.key for cells in plan.groups.values() for cell in cells]
    return sum(record.get(key) is None for key in keys)


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
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS), help="in the order of measuring")
    parser.add_argument("--batches", nargs="+", default=[], metavar="NAME=N", help="other sequences in an island's batch")
    parser.add_argument("--islands", type=int, nargs="+", help="only with so many; None: 1, 4, 8 and 64")
    parser.add_argument("--inner-steps", type=int, default=25, help="of a round; fewer of more than 8 islands")
    parser.add_argument("--turns", type=int, default=3, help="of each cell, after one that warms up; fewer of more than 8 islands")
    parser.add_argument("--only", action="append", choices=["presets", "small"], help="this part; None: both")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no cell after so long")
    parser.add_argument("--device", help="None: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether it works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_gpu")
    parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
