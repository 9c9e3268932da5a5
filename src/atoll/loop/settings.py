"""The arguments of `atoll.islands`, and which combinations it refuses."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from atoll.core.config.type_checks import Timeout, WideInt, check_type, check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, HoldsWeights, Sink, Weigh
from atoll.engines.processes.intra_island import check_sliceable
from atoll.loop.replica import SteppedBy
from atoll.loop.rule_optimizer import unwrap_optimizer
from atoll.replica.flat_parameters import ModuleWeights


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The arguments of `atoll.islands`, which documents them."""

    model: nn.Module
    optimizer: Any
    algorithm: Any
    mesh: DeviceMesh | None = None
    limit_s: Timeout | None = None
    finish: Literal["together", "alone"] = "together"
    examples: WideInt | None = None
    trusted_network: bool = False
    average_buffers: bool = False
    out: str | None = None
    sinks: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        check_types(self)
        name = type(self.algorithm).__name__
        refuse_asynchronous(self.algorithm)
        check_type("algorithm", self.algorithm, Algorithm[Any])
        self._check_optimizer(name)
        if self.limit_s is not None and not self.limit_s > 0:
            raise ConfigError(f"limit_s={self.limit_s}: give more than 0 seconds, or leave it out to derive it.")
        if self.examples is not None and self.examples < 1:
            raise ConfigError(f"examples={self.examples}: give 1 or more, or leave it out if all islands have the same weight.")
        if getattr(self.algorithm, "weighting", "uniform") == "examples" and self.examples is None:
            raise ConfigError(
                'weighting="examples" needs the number of examples of this island: give islands(..., examples=len(dataset)).'
            )
        if getattr(self.algorithm, "quorum", None) is not None:
            raise ConfigError(
                f"{name}(quorum={self.algorithm.quorum}) in a loop of your own: its exchanges need every island. Leave quorum out, "
                f"or use `atoll run` on the simulator or on elastic islands."
            )
        if getattr(self.algorithm, "moments", "own") != "own":
            raise ConfigError(
                f"moments={self.algorithm.moments} in a loop of your own: atoll cannot read the moments of your optimizer. Use "
                f"moments=own, or `atoll run`, whose optimizers are atoll's."
            )
        if self.finish == "alone" and self.sharded:
            raise ConfigError(
                f'finish="alone" with {name}: every island holds a slice of the state, which would be lost when it leaves. Use '
                f'finish="together".'
            )
        if self.average_buffers and self.finish == "alone":
            raise ConfigError(
                'average_buffers=True with finish="alone": an island that leaves would keep other buffers. Use finish="together".'
            )
        self._check_module(name)

    def _check_optimizer(self, name: str) -> None:
        kind = type(self.optimizer).__name__
        given = f"the class {self.optimizer.__name__}" if isinstance(self.optimizer, type) else kind
        if self.stepped_by == "user":
            optimizer = self.user_optimizer
            if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
                raise ConfigError(
                    f"{name} was given {given} as the optimizer, and counts the steps of a torch optimizer: "
                    f"islands(model, optimizer, {name}(...))."
                )
            return
        if self.optimizer is not None:
            raise ConfigError(
                f"{name} steps by itself, with its own rule, and was also given {kind}. Give none, "
                f"islands(model, None, {name}(optimizer=atoll.AdamW(lr=...))), and call islands.step() after loss.backward()."
            )
        if self.algorithm.optimizer is None:
            raise ConfigError(f"{name} has no rule to step with: give {name}(optimizer=atoll.AdamW(lr=...)).")

    def _check_module(self, name: str) -> None:
        if self.mesh is not None:
            if self.stepped_by == "algorithm":
                raise ConfigError(
                    f"{name} with a mesh: atoll does not combine gradients of several devices per island. Use DiLoCo with a mesh, "
                    f"or one process per island."
                )
            check_sliceable(self.algorithm)
            return
        if isinstance(self.model, DistributedDataParallel) and self.model.process_group.size() > 1:
            raise ConfigError(
                f"the model is wrapped in DistributedDataParallel over {self.model.process_group.size()} processes, "
                f"which exchange gradients at every step. Give the bare model, or a mesh that assigns the processes to islands."
            )

    def check_parameters(self, module: ModuleWeights, own: torch.optim.Optimizer | None) -> None:
        """Checks that the optimizer holds the module's parameters. `own` stands for the rule of an algorithm that steps."""
        optimizer = own or self.user_optimizer
        assert optimizer is not None
        if own is not None and (missing := _missing_parameters(module, own)):
            raise ConfigError(f"{missing[0]} was unfrozen after atoll.islands was called. Unfreeze it first.")
        check_holds(optimizer, module)

    @property
    def user_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose steps are counted, without wrappers."""
        return None if self.optimizer is None else unwrap_optimizer(self.optimizer)

    @property
    def stepped_by(self) -> SteppedBy:
        """Algorithms that step by themselves have a field for their rule."""
        return "algorithm" if hasattr(self.algorithm, "optimizer") else "user"

    @property
    def weigh(self) -> Weigh:
        """Whether an island's delta is weighed by its steps, or by the tokens that the user logs for them."""
        return "tokens" if getattr(self.algorithm, "weighting", "uniform") == "tokens" else "batches"

    @property
    def how_to_step(self) -> str:
        """Advice for a user whose block took no step."""
        name = type(self.algorithm).__name__
        if self.stepped_by == "algorithm":
            return f"{name} steps by itself: call islands.step() after each loss.backward(), and no optimizer of your own."
        return (
            f"{name} counts the steps of the {type(self.optimizer).__name__} that atoll.islands was given: call its step() after "
            f"loss.backward(). Steps that a GradScaler skips do not count."
        )

    @property
    def records(self) -> bool:
        """Whether the islands' rounds become events."""
        return self.out is not None or bool(self.sinks)

    @property
    def sharded(self) -> bool:
        """Whether every island holds a slice of the algorithm's State."""
        return isinstance(self.algorithm, HoldsWeights)

    @property
    def comparable(self) -> str:
        """The settings that all islands must share, as text."""
        optional = [name for name in ("average_buffers", "records") if getattr(self, name)]
        return re.sub(r" at 0x[0-9a-f]+", "", " ".join([repr(self.algorithm), self.finish, *optional]))


def refuse_asynchronous(algorithm: Any) -> None:
    if isinstance(algorithm, AsyncAlgorithm) and not isinstance(algorithm, type):
        raise ConfigError(
            f"{type(algorithm).__name__} is asynchronous: it has a hub and no rounds, and this block has no hub. Use DiLoCo, ACCO, "
            f"DDP or ZeRO1 here; or atoll.run_islands, and start the loop with `atoll run demo-async --engine ray --workload "
            f"FILE.py:NAME`."
        )


def check_holds(optimizer: torch.optim.Optimizer, module: ModuleWeights) -> None:
    """Refuses an optimizer with none of the module's parameters, and warns of one that lacks some."""
    missing = _missing_parameters(module, optimizer)
    if len(missing) == len(module.parameters):
        raise ConfigError(
            f"the optimizer has none of the model's {len(missing)} trainable parameters: it was made for another model, or "
            f"before this one's parameters were replaced (by fully_shard, for example). Make the optimizer last."
        )
    if missing:
        logging.getLogger("atoll").warning(
            f"atoll: {len(missing)} of the model's {len(module.parameters)} trainable parameters are not in the optimizer, for "
            f"example {missing[0]}. That is right if another optimizer steps them. Otherwise add or freeze them."
        )


def _missing_parameters(module: ModuleWeights, optimizer: torch.optim.Optimizer) -> list[str]:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in module.parameters.items() if id(parameter) not in stepped]
