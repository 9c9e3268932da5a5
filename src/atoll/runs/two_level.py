"""Two levels: an algorithm between islands, and another between the devices of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Gradient, Rebases, Weigh, Work
from atoll.optim.schedules import Schedule, at


def check_inside(algorithm: Algorithm[Any] | AsyncAlgorithm[Any], inside: Algorithm[Any]) -> None:
    """Refuses algorithms that cannot work together: one between islands, and one between the devices of each."""
    outer, inner = type(algorithm).__name__, type(inside).__name__
    if isinstance(algorithm, AsyncAlgorithm | Rebases):  # what can train the devices of an island does not train islands
        raise ConfigError(
            f"inside={inner} trains an island's devices between two agreements of islands, and {outer} has islands agree at every "
            f"gradient, or through a hub. Use algorithm=DiLoCo(...), or inside=none, so that all devices are equals."
        )
    if not isinstance(inside, Rebases):
        raise ConfigError(
            f"inside={inner} cannot go on from weights that islands agreed on: it has no `rebase`. "
            f"Use DDP, ZeRO1, FSDP, ACCO, DPU or WP inside."
        )
    if algorithm.steps_per_round % inside.steps_per_round:
        raise ConfigError(
            f"a round between islands has {algorithm.steps_per_round} steps, which is not a multiple of the "
            f"{inside.steps_per_round} of a round of {inner} inside. Use {inside.steps_per_round} steps, or a multiple."
        )


class TrainingOnlyReplica:
    """The Replica of an island whose devices have an algorithm of their own: it trains, and has no gradients."""

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        raise ConfigError(
            "an island whose devices have an algorithm of their own (inside) trains, and has no gradient to give. Use an "
            "algorithm between islands that trains, such as DiLoCo, or inside=none."
        )


def at_position(algorithm: Algorithm[Any], schedule: int) -> Algorithm[Any]:
    """The algorithm with its optimizer's rate as it is at this position of the schedule, which is the run's: rules count their own
    updates, and those of an island that came late would begin the schedule anew."""
    rule: Any = getattr(algorithm, "optimizer", None)
    lr = getattr(rule, "lr", None)
    if not isinstance(lr, Schedule):
        return algorithm
    paced: Algorithm[Any] = replace(algorithm, optimizer=replace(rule, lr=at(lr, schedule)))  # type: ignore[type-var]
    return paced
