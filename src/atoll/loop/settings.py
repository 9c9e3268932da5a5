"""What a user asks for, and what of it cannot be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from atoll.core.config.type_checks import check_type, check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, HoldsWeights
from atoll.engines.processes.island_role import check_sliced
from atoll.loop.optimizer import counted
from atoll.loop.replica import Form


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `atoll.islands`, which says what they mean."""

    model: nn.Module
    optimizer: Any
    """A torch optimizer, or what is wrapped round one; none for an algorithm that steps by itself."""
    algorithm: Any
    mesh: DeviceMesh | None = None
    limit_s: float | None = None
    finish: Literal["together", "alone"] = "together"
    examples: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        name = type(self.algorithm).__name__
        if isinstance(self.algorithm, AsyncAlgorithm) and not isinstance(self.algorithm, type):
            raise ConfigError(
                f"{name} has a hub and no rounds in step: it cannot be wrapped round a loop. Use DiLoCo, ACCO, DDP or ZeRO1 here."
            )
        check_type("algorithm", self.algorithm, Algorithm[Any])
        self._check_optimizer(name)
        if self.limit_s is not None and not self.limit_s > 0:
            raise ConfigError(f"limit_s={self.limit_s}: it is more than 0 seconds. Leave it out to have it derived.")
        if self.examples is not None and self.examples < 1:
            raise ConfigError(f"examples={self.examples}: an island has at least 1. Leave it out where all weigh the same.")
        if getattr(self.algorithm, "weighting", "uniform") == "examples" and self.examples is None:
            raise ConfigError(
                'weighting="examples" needs to know how many this island has: give islands(..., examples=len(dataset)).'
            )
        if self.finish == "alone" and self.sharded:
            raise ConfigError(
                f'finish="alone" with {name}: its state lies in slices, one on each island, and an island that leaves would take '
                f'its slice along. Use finish="together".'
            )
        self._check_module()

    def _check_optimizer(self, name: str) -> None:
        kind = type(self.optimizer).__name__
        given = f"the class {self.optimizer.__name__}" if isinstance(self.optimizer, type) else kind
        if self.form == "train":
            if not isinstance(self.counted, torch.optim.Optimizer) or not hasattr(self.counted, "_optimizer_step_post_hooks"):
                raise ConfigError(
                    f"{name} was given {given} for an optimizer, and counts the steps of a torch optimizer of yours: "
                    f"islands(model, optimizer, {name}(...))."
                )
            return
        if self.optimizer is not None:
            raise ConfigError(
                f"{name} steps by itself, with the rule in it, and was given a {kind} besides. Give none, "
                f"islands(model, None, {name}(optimizer=atoll.AdamW(lr=...))), and call islands.step() after loss.backward()."
            )
        if self.algorithm.optimizer is None:
            raise ConfigError(f"{name} has no optimizer to step with: {name}(optimizer=atoll.AdamW(lr=...)).")

    def _check_module(self) -> None:
        if self.mesh is not None:
            if self.form == "gradient":
                raise ConfigError(
                    f"{type(self.algorithm).__name__} with a mesh: gradients of several devices are not taken together yet. Use "
                    f"DiLoCo with a mesh, or one process per island."
                )
            check_sliced(self.algorithm)
            return
        if isinstance(self.model, DistributedDataParallel) and self.model.process_group.size() > 1:
            raise ConfigError(
                f"the model is wrapped in DistributedDataParallel over {self.model.process_group.size()} processes, "
                f"which talk after every step. Give the model itself, or a mesh that says which processes are one island."
            )

    @property
    def counted(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps are counted, without what it may be wrapped in."""
        return None if self.optimizer is None else counted(self.optimizer)

    @property
    def form(self) -> Form:
        """Algorithms that step by themselves have a field for the rule they do it with."""
        return "gradient" if hasattr(self.algorithm, "optimizer") else "train"

    @property
    def how_to_step(self) -> str:
        """What a user calls in the block."""
        name = type(self.algorithm).__name__
        if self.form == "gradient":
            return f"{name} steps by itself: call islands.step() after each loss.backward(), and no optimizer of your own."
        return (
            f"{name} counts the steps of the {type(self.optimizer).__name__} that atoll.islands was given: call its step() after "
            f"loss.backward(). Steps that a GradScaler skips do not count."
        )

    @property
    def sharded(self) -> bool:
        """Whether the algorithm's State lies in slices."""
        return isinstance(self.algorithm, HoldsWeights)

    @property
    def text(self) -> str:
        """What must be the same on all islands."""
        return re.sub(r" at 0x[0-9a-f]+", "", f"{self.algorithm!r} {self.finish}")
