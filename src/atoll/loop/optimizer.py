"""What a user steps where atoll owns the optimizer: an optimizer for trainers, schedulers and scalers to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Rule
from atoll.optim.schedules import Schedule, at


class Dial:
    """The learning rate as somebody set it from outside; none if nobody did."""

    def __init__(self) -> None:
        self.lr: float | None = None


@dataclass(frozen=True)
class Dialled:
    """A rule whose learning rate can be set from outside, between updates. A protocols.Rule.

    Attributes:
        rule: the rule itself.
        dial: what was set, which goes before all else.
        lr: else the rate, or the schedule: the rule's own, unless an algorithm has put another one here.
    """

    rule: Any
    dial: Dial
    lr: float | Schedule

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        lr = self.lr if self.dial.lr is None else self.dial.lr
        rule: Rule = self.rule if lr == self.rule.lr else replace(self.rule, lr=lr)
        return rule.update(params, gradient, state)


class IslandsOptimizer(torch.optim.Optimizer):
    """Takes the gradients of a micro-batch at each `step()`. The islands step together when their algorithm says so.

    A learning rate that is set in its `param_groups`, as torch's schedulers do, counts from the next update on, and replaces the
    rule's own schedule. It has no state to save: `islands.state_dict()` has it. A GradScaler may step it: gradients that are not
    finite are then dropped, and the micro-batch does not count. `zero_grad()` after a step is not needed, and does no harm.

    Args:
        parameters: of the module.
        rule: the algorithm's.
        take: called at each step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rule: Any, take: Callable[[], None]) -> None:
        self._rule, self._take, self.dial = rule, take, Dial()
        # So GradScaler always steps it, as it does torch's fused optimizers: else what it skips would stay, and spoil what comes.
        self._step_supports_amp_scaling = True
        self._shown = at(rule.lr, 0) if hasattr(rule, "lr") else None
        super().__init__(parameters, {} if self._shown is None else {"lr": self._shown})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if closure is not None:
            raise ConfigError(
                "islands.optimizer was stepped with a closure, as Lightning's automatic optimization does. It takes gradients that "
                "are there: call loss.backward(), then step() without one (in Lightning: manual optimization)."
            )
        if was_skipped(self):
            self.zero_grad()
        else:
            self._unscale()
            self._take()
        return None

    def _unscale(self) -> None:
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = float(scale.double().reciprocal())
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)

    def read_dial(self) -> None:
        """Let a rate that was set from outside count from here on."""
        if self._shown is None:
            return
        now = [float(group["lr"]) for group in self.param_groups]
        if any(lr != now[0] for lr in now):
            raise ConfigError(f"the groups of islands.optimizer have the learning rates {now}: it knows one for all. Set the same.")
        if now[0] != self._shown or self.dial.lr is not None:
            self._shown = self.dial.lr = now[0]

    def show(self, updates: int) -> None:
        """Show the rate that a schedule of the rule's own has come to."""
        if self._shown is not None and self.dial.lr is None:
            self._shown = at(self._rule.lr, updates)
            for group in self.param_groups:
                group["lr"] = self._shown


def dialled(algorithm: Any, dial: Dial) -> Any:
    """The algorithm with a rule whose rate can be set from outside; itself if its rule has none."""
    rule = algorithm.optimizer
    return replace(algorithm, optimizer=Dialled(rule, dial, rule.lr)) if hasattr(rule, "lr") else algorithm


def counted(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that really steps, and whose steps can be counted: accelerate wraps it in another."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that is just over did nothing. A fused optimizer is stepped by GradScaler in any case, and told to skip."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
