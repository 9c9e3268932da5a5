"""The cells that a record holds of a plan, and figures computed from them."""

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
        """Seconds of each round that counts."""
        return list(self.found["round_s"])

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round that counts."""
        return [self.cell.tokens / round_s for round_s in self.rounds_s]

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def shares(self) -> list[float]:
        """Of the bare loop's tokens per second, turn by turn."""
        return [rate / other for rate, other in zip(self.rates, self._bare_rates, strict=True)]

    @property
    def share(self) -> float:
        return median(self.shares)

    @property
    def share_words(self) -> str:
        """With the least and the greatest."""
        return f"{self.share:.3f} ({min(self.shares):.3f} to {max(self.shares):.3f})"

    @property
    def bare_tokens_per_s(self) -> float:
        """Of the bare loop, in turn with these rounds."""
        return median(self._bare_rates)

    @property
    def outer_share(self) -> float:
        """Of a round: what comes after the last inner step."""
        outer_s: list[float] = self.found["outer_s"]
        return median(after_s / round_s for after_s, round_s in zip(outer_s, self.rounds_s, strict=True))

    @property
    def losses(self) -> list[float]:
        """Of training, round by round; empty in older records."""
        return list(self.found.get("losses", ()))

    @property
    def run(self) -> str | None:
        """When the process began that measured it; older records do not say."""
        return self.found.get("run")

    @property
    def _bare_rates(self) -> list[float]:
        bare_tokens = self.cell.shape.bare_steps * self.cell.shape.tokens
        return [bare_tokens / other_s for other_s in self.found["bare_s"]]


def bare_key(shape: Shape, turns: int) -> str:
    return f"{shape.key} bare turns={turns}x{shape.bare_steps}"


def matrix_key(size: int) -> str:
    return f"{MATRIX} {size}"


class Found:
    """What a record holds, of a plan and besides."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self._record = record
        self.plan = with_cells_of(plan, [cell["key"] for cell in record.cells])
        """With cells that were planned otherwise, so that the tables of a record stay what they are."""
        self.matrix: Mapping[str, Any] = record.get(matrix_key(plan.matrix)) or {}
        """The matrix product of the record's first run; nothing if it is still to come."""

    def measured(self, cell: Cell) -> Measured | None:
        """None if it was skipped, or is still to come."""
        found = self._record.get(cell.key)
        return None if found is None or "skipped" in found else Measured(cell, found)

    def all_measured(self) -> list[Measured]:
        """In the plan's order."""
        return [one for cells in self.plan.groups.values() for cell in cells if (one := self.measured(cell))]

    def skipped(self, cell: Cell) -> str:
        """Why it was."""
        return str(self._record[cell.key]["skipped"])

    def was_tried(self, cell: Cell) -> bool:
        """Whether there is a line about it."""
        return self._record.get(cell.key) is not None

    def bare(self, shape: Shape) -> Mapping[str, Any] | None:
        return self._record.get(bare_key(shape, self.plan.turns))

    def bare_tokens_per_s(self, shape: Shape) -> float | None:
        found = self.bare(shape)
        return None if found is None else median(shape.bare_steps * shape.tokens / turn_s for turn_s in found["bare_s"])

    def runs(self) -> set[str | None]:
        """When the processes began that measured something; None stands for those that did not say."""
        bare = [found for shape in self.plan.groups if (found := self.bare(shape))]
        lines = [*([self.matrix] if self.matrix else []), *bare, *(one.found for one in self.all_measured())]
        return {line.get("run") for line in lines}

    def product_flops_per_s(self, shape: Shape, one: Measured | None = None) -> float | None:
        """The matrix product's in the run that measured a cell of the shape. Where that does not say: in the run of the shape's
        bare loop, and without that in the record's first."""
        for found in (one.found if one else {}, self.bare(shape) or {}):
            if "product_flops_per_s" in found:
                return float(found["product_flops_per_s"])
        return self.matrix.get("flops_per_s")

    def mfu(self, one: Measured) -> float | None:
        """Model FLOP utilisation of a cell, against the matrix product."""
        shape = one.cell.shape
        return _utilisation(shape, one.tokens_per_s, self.product_flops_per_s(shape, one))

    def bare_mfu(self, shape: Shape) -> float | None:
        """The same of the bare loop."""
        return _utilisation(shape, self.bare_tokens_per_s(shape), self.product_flops_per_s(shape))


def _utilisation(shape: Shape, tokens_per_s: float | None, product_flops_per_s: float | None) -> float | None:
    if tokens_per_s is None or product_flops_per_s is None:
        return None
    return tokens_per_s * shape.flops_per_token / product_flops_per_s
