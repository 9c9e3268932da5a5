"""A torch optimizer that stands for the algorithm's rule, so that schedulers, scalers and trainers can hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Rule
from atoll.optim.schedules import Schedule, at


@dataclass(frozen=True)
class OverridableRule:
    """A rule whose learning rate can be set between updates, in an optimizer's `param_groups`. A protocols.Rule."""

    rule: Any
    optimizer: IslandsOptimizer
    lr: float | Schedule
    """The rule's own, or the one that an algorithm put in its place."""

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        override = self.optimizer.lr_override
        lr = self.lr if override is None else override
        rule: Rule = self.rule if lr == self.rule.lr else replace(self.rule, lr=lr)
        return rule.update(params, gradient, state)


class IslandsOptimizer(torch.optim.Optimizer):
    """Hands the gradients of a micro-batch to the algorithm at each `step()`.

    A learning rate that is set in `param_groups`, as torch's schedulers do, applies from the next update on and replaces the rule's
    own schedule. `islands.state_dict()` holds its state. A GradScaler may step it: non-finite gradients are dropped, and the
    micro-batch does not count. `zero_grad()` after a step is not needed.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rule: Any, on_step: Callable[[], None]) -> None:
        self._rule, self._on_step = rule, on_step
        self.lr_override: float | None = None
        """The rate that was set in `param_groups`; None until then."""
        # GradScaler then always steps it, as it does torch's fused optimizers. Otherwise skipped gradients would stay, and add to
        # the next ones.
        self._step_supports_amp_scaling = True
        self._shown = at(rule.lr, 0) if hasattr(rule, "lr") else None
        super().__init__(parameters, {} if self._shown is None else {"lr": self._shown})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError(
                "islands.optimizer was stepped with a closure, as Lightning's automatic optimization does. It takes gradients that "
                "exist: call loss.backward(), then step() without a closure (in Lightning: manual optimization)."
            )
        if was_skipped(self):
            self.zero_grad()
        else:
            self._unscale()
            self._on_step()

    def _unscale(self) -> None:
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = float(scale.double().reciprocal())
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)

    def read_lr(self) -> None:
        """Applies a rate that was set in `param_groups`."""
        if self._shown is None:
            return
        now = [float(group["lr"]) for group in self.param_groups]
        if any(lr != now[0] for lr in now):
            raise ConfigError(
                f"the groups of islands.optimizer have the learning rates {now}: it supports one. Set the same in all."
            )
        if now[0] != self._shown or self.lr_override is not None:
            self._shown = self.lr_override = now[0]

    def show_lr(self, updates: int) -> None:
        """Writes the rate of the rule's own schedule to `param_groups`."""
        if self._shown is not None and self.lr_override is None:
            self._shown = at(self._rule.lr, updates)
            for group in self.param_groups:
                group["lr"] = self._shown

    def attach(self, algorithm: Any) -> Any:
        """The algorithm with a rule that this optimizer's override applies to; unchanged if its rule has no rate."""
        rule = algorithm.optimizer
        return replace(algorithm, optimizer=OverridableRule(rule, self, rule.lr)) if hasattr(rule, "lr") else algorithm


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of a wrapper such as accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler made the last step a no-op. It steps a fused optimizer in any case, and sets `found_inf`."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
