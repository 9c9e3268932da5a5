"""What DiLoCo's evidence trains, and the values that its rows run through."""

from __future__ import annotations

from dataclasses import dataclass

from cells import Row
from diloco_rows import DILOCO
from evidence import OnGpu


def nesterov(rate: float, momentum: float) -> str:
    """An outer rule, as a setting names it."""
    return f"Nesterov(lr={rate},momentum={momentum})"


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload, and the values that rows run through.

    Attributes:
        lengths: of rounds, in inner steps.
        counts: of islands.
        rates: of the inner rule, as multiples of that of all other rows.
        batches: sizes of other batches. Larger ones have a third of the steps, in rounds half as long.
        outer: learning rate and momentum of the outer rule of all rows that name no other: the paper's.
        milder: those of one for few rounds.
        longer: how many times as long some rows are trained.
        small: sizes of a smaller decoder.
        ramp: how many islands there are over equal parts of a run.
        separate: islands of the text of several domains, of which it has at least as many.
    """

    steps: int = 3000
    floor: float = 0.0
    lengths: tuple[int, ...] = (50, 100, 500)
    counts: tuple[int, ...] = (1, 4, 8)
    rates: tuple[float, ...] = (0.5, 2.0)
    batches: tuple[int, ...] = (4, 64)
    outer: tuple[float, float] = (0.7, 0.9)
    milder: tuple[float, float] = (0.9, 0.7)
    longer: int = 3
    small: str = "layers=4,width=128,heads=2,head_size=64"
    ramp: tuple[int, ...] = (1, 2, 3, 4, 4, 5, 5, 6, 7, 8)
    separate: int = 6

    def row(self, name: str, *settings: str, recipe: str = DILOCO) -> Row:
        algorithm = f"DiLoCo(inner_steps={self.inner_steps},outer={nesterov(*self.outer)})" if recipe == DILOCO else "DDP()"
        return Row(recipe=recipe, base=self.settings(algorithm, step_time_s="[0.1]"), settings=settings, name=name)

    def length(self, steps: int) -> Row:
        """Rounds of so many steps."""
        return self.row(f"H={steps}", f"algorithm.inner_steps={steps}")

    @property
    def longest(self) -> str:
        """The label of the longest rounds."""
        return f"H={self.lengths[-1]}"

    @property
    def batch(self) -> str:
        """The label of the baseline."""
        return f"{self.islands}x batch"

    @property
    def updates(self) -> str:
        """The label of one worker that trains for longer."""
        return f"{self.islands}x updates"


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=8,
        warm_start=2,
        inner_steps=4,
        islands=4,
        longer=2,
        lengths=(2, 4, 8),
        counts=(1, 2, 4),
        rates=(2.0,),
        batches=(1, 4),
        ramp=(1, 4),
        model="layers=1,width=16,heads=2,head_size=8",
        small="layers=1,width=8,heads=1,head_size=8",
        seq_len=16,
        eval_batches=2,
        batch_size=2,
        warmup=2,
    )
