"""Names for runs that stand side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunName:
    """What a run can be called by."""

    recipe: str
    seed: int
    folder: str
    engine: str = "sim"


def distinct_labels(names: Sequence[RunName]) -> list[str]:
    """The recipes; where runs share one, what tells them apart: the seed, the engine, both, or else the folder.

    >>> distinct_labels([RunName(recipe="ddp", seed=0, folder="a"), RunName(recipe="diloco", seed=0, folder="b")])
    ['ddp', 'diloco']
    >>> distinct_labels([RunName(recipe="ddp", seed=0, folder="a"), RunName(recipe="ddp", seed=1, folder="b")])
    ['ddp (seed 0)', 'ddp (seed 1)']
    >>> distinct_labels([RunName(recipe="ddp", seed=0, folder=engine, engine=engine) for engine in ("sim", "dist")])
    ['ddp (sim)', 'ddp (dist)']
    """
    ways = [
        [name.recipe for name in names],
        [f"{name.recipe} (seed {name.seed})" for name in names],
        [f"{name.recipe} ({name.engine})" for name in names],
        [f"{name.recipe} (seed {name.seed}, {name.engine})" for name in names],
        [f"{name.recipe} ({Path(name.folder).name})" for name in names],
    ]
    # All runs take the same form, so that nobody asks why one shows its seed and another does not.
    distinct = (labels for labels in ways if len(set(labels)) == len(labels))
    return next(distinct, [f"{number}. {name.folder}" for number, name in enumerate(names, start=1)])
