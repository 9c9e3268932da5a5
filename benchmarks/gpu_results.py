"""The cells of a record, and figures computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from gpu_plan import Cell, Plan, Shape, with_cells_of
from record import Record

MATRIX, BARE = "matrix product", "bare loop"


@dataclass(frozen=True)
class Measured:
    """A cell's figures."""

    cell: Cell
    found: Mapping[str, Any]

    @property
    def rounds_s(self) -> list[float]:
        """Seconds of each round after the warm-up."""
        return list(self.found["round_s"])

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round after the warm-up."""
        return [self.cell.tokens / round_s for round_s in self.rounds_s]

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def shares(self) -> list[float]:
        """Tokens per second over the bare loop's, turn by turn."""
        return [rate / other for rate, other in zip(self.rates, self._bare_rates, strict=True)]

    @property
    def share(self) -> float:
        return median(self.shares)

    @property
    def share_text(self) -> str:
        """With the range."""
        return f"{self.share:.3f} ({min(self.shares):.3f} to {max(self.shares):.3f})"

    @property
    def bare_tokens_per_s(self) -> float:
        """The bare loop's, in turn with these rounds."""
        return median(self._bare_rates)

    @property
    def outer_share(self) -> float:
        """The share of a round after the last inner step."""
        outer_s: list[float] = self.found["outer_s"]
        return median(after_s / round_s for after_s, round_s in zip(outer_s, self.rounds_s, strict=True))

    @property
    def losses(self) -> list[float]:
        """Training losses by round; empty in older records."""
        return list(self.found.get("losses", ()))

    @property
    def run(self) -> str | None:
        """The start time of the process that measured it; None in older records."""
        return self.found.get("run")

    @property
    def _bare_rates(self) -> list[float]:
        bare_tokens = self.cell.shape.bare_steps * self.cell.shape.tokens
        return [bare_tokens / other_s for other_s in self.found["bare_s"]]


def bare_key(shape: Shape, turns: int) -> str:
    return f"{shape.key} bare turns={turns}x{shape.bare_steps}"


def matrix_key(size: int) -> str:
    return f"{MATRIX} {size}"


class Results:
    """The cells of a record, those of a plan and others."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self._record = record
        self.plan = with_cells_of(plan, [cell["key"] for cell in record.cells])
        """With the record's other cells, so that its tables stay the same when the plan changes."""
        self.matrix: Mapping[str, Any] = record.get(matrix_key(plan.matrix)) or {}
        """The matrix product of the record's first run; empty if not measured."""

    def measured(self, cell: Cell) -> Measured | None:
        """None if the cell was skipped, or not measured."""
        found = self._record.get(cell.key)
        return None if found is None or "skipped" in found else Measured(cell, found)

    def all_measured(self) -> list[Measured]:
        """In the plan's order."""
        return [one for cells in self.plan.groups.values() for cell in cells if (one := self.measured(cell))]

    def skipped(self, cell: Cell) -> str:
        """Why the cell was skipped."""
        return str(self._record[cell.key]["skipped"])

    def was_tried(self, cell: Cell) -> bool:
        """Whether the cell was measured or skipped."""
        return self._record.get(cell.key) is not None

    def bare(self, shape: Shape) -> Mapping[str, Any] | None:
        return self._record.get(bare_key(shape, self.plan.turns))

    def bare_tokens_per_s(self, shape: Shape) -> float | None:
        found = self.bare(shape)
        return None if found is None else median(shape.bare_steps * shape.tokens / turn_s for turn_s in found["bare_s"])

    def runs(self) -> set[str | None]:
        """The start times of the processes that measured cells; None in older records."""
        bare = [found for shape in self.plan.groups if (found := self.bare(shape))]
        lines = [*([self.matrix] if self.matrix else []), *bare, *(one.found for one in self.all_measured())]
        return {line.get("run") for line in lines}

    def product_flops_per_s(self, shape: Shape, one: Measured | None = None) -> float | None:
        """The matrix product's FLOP/s in the run of a cell; if unknown, in the run of the shape's bare loop; else in the record's
        first run."""
        for found in (one.found if one else {}, self.bare(shape) or {}):
            if "product_flops_per_s" in found:
                return float(found["product_flops_per_s"])
        return self.matrix.get("flops_per_s")

    def mfu(self, one: Measured) -> float | None:
        """Model FLOP utilisation of a cell, relative to the matrix product."""
        shape = one.cell.shape
        return _utilisation(shape, one.tokens_per_s, self.product_flops_per_s(shape, one))

    def bare_mfu(self, shape: Shape) -> float | None:
        """The same for the bare loop."""
        return _utilisation(shape, self.bare_tokens_per_s(shape), self.product_flops_per_s(shape))


def _utilisation(shape: Shape, tokens_per_s: float | None, product_flops_per_s: float | None) -> float | None:
    if tokens_per_s is None or product_flops_per_s is None:
        return None
    return tokens_per_s * shape.flops_per_token / product_flops_per_s
