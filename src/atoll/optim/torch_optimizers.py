"""Inner optimizers that torch computes: Muon with AdamW, and any class of `torch.optim` by name.

    B <- mu * B + (1 - mu) * g          u = (1 - mu) * g + mu * B          W <- W * (1 - lr * weight_decay)
    W <- W - lr * 0.2 * sqrt(max(rows, columns)) * NS5(u)             NS5: five Newton-Schulz steps towards U V^T of u = U S V^T

    here   momentum = mu    the moment momentum_buffer = B

Muon: Jordan et al., kellerjordan.github.io/posts/muon. Scale: Liu et al., arXiv 2502.16982. Inside DiLoCo: arXiv 2505.23725.

Torch's optimizers update whole tensors, so these rules cannot be applied to a slice of the weights. Their state has Trees of
whatever torch's class remembers, also of some tensors only or of one number per tensor.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from atoll.core.config.type_checks import check_types, shown
from atoll.core.errors import ConfigError, one_line
from atoll.core.flat_tree import Tree
from atoll.optim.in_place import rule_update
from atoll.optim.schedules import LARGEST_FACTOR, Schedule, at, at_least_zero, below_one, check_lr

Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]

_REFUSED = {
    "Optimizer": "it is the base class of the others",
    "LBFGS": "it evaluates the loss several times per step, and an island computes one gradient per step",
    "SparseAdam": "it needs sparse gradients",
    "Muon": "it updates matrices only. Use Muon(...), which has AdamW for the other weights",
}
_RESERVED = ("params", "lr", "differentiable", "capturable")
"""Arguments that are no options: the replica gives the first two, and the others are for steps inside of a graph."""


class TorchMoment(NamedTuple):
    name: str  # torch's, such as exp_avg
    values: Tree  # by the names of the weights


class TorchState(NamedTuple):
    step: int  # updates so far; the position on the schedule
    moments: tuple[TorchMoment, ...]  # none before the first update


class TorchRule:
    """A rule on whole tensors, which an optimizer of torch carries out. Pure: each update makes a new optimizer."""

    lr: float | Schedule

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        """A new optimizer of these parameters, each in its own shape. Names may occur more than once."""
        raise NotImplementedError

    def init(self, params: Tree) -> TorchState:
        return TorchState(0, ())

    @rule_update
    def update(self, params: Tree, gradient: Tree, state: TorchState) -> tuple[Tree, TorchState]:
        return self.update_at(at(self.lr, state.step), params, gradient, state)

    def update_at(self, lr: float, params: Tree, gradient: Tree, state: TorchState) -> tuple[Tree, TorchState]:
        """`update` at this learning rate. A caller with a schedule of its own would else make, and check, a rule for each step."""
        new = params.copy()
        named = [(name, nn.Parameter(view)) for name, view in new.layout.views(new.flat).items()]
        gradients = gradient.layout.views(gradient.flat)
        for name, parameter in named:
            parameter.grad = gradients[name]
        optimizer = self.optimizer(named)
        by_name = dict(named)
        for moment in state.moments:
            for name, value in moment.values.items():
                optimizer.state[by_name[name]][moment.name] = value.clone()
        place_state(optimizer)
        set_rate(optimizer, lr)
        optimizer.step()
        return new, TorchState(state.step + 1, moments_of(optimizer, named))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def moments_of(optimizer: torch.optim.Optimizer, named: Named) -> tuple[TorchMoment, ...]:
    """Copies of what the optimizer remembers of these parameters."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in named:
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found.setdefault(kind, {})[name] = value
    return tuple(TorchMoment(kind, Tree.of(values)) for kind, values in found.items())


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves the optimizer's state to where its kernels read it: beside the parameters, but counters of steps to the CPU unless a
    fused kernel reads them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for kind, value in state.items():
                if isinstance(value, Tensor):
                    counter = kind == "step" and not group.get("fused")
                    state[kind] = value.to("cpu" if counter else parameter.device)


def check_takes_slices(rule: Any, algorithm: Any) -> None:
    """Refuse a rule on whole tensors for an algorithm that steps slices of the weights."""
    if isinstance(rule, TorchRule):
        name = type(algorithm).__name__
        raise ConfigError(
            f"optimizer={type(rule).__name__} with {name}: {name} cuts the weights into slices, one per island, and this optimizer "
            f"updates whole tensors. Use AdamW, Adam, SGD, Momentum or Nesterov, or an algorithm that keeps whole weights: DDP, "
            f"DiLoCo, Streaming, Eager or AsyncLocalSGD."
        )


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer(TorchRule):
    """A class of `torch.optim`, by name, for islands that keep whole weights.

    Args:
        name: of the class, such as SGD, NAdam or Adafactor.
        lr: the learning rate, or its schedule.
        options: its other arguments, as in a call: "momentum=0.9, nesterov=True". Values are numbers, true or false, texts, none,
            and tuples of numbers.
    """

    name: str
    lr: float | Schedule
    options: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        _check_rate(self.lr)
        arguments, kind = _arguments(self.options), _torch_class(self.name)
        known = [name for name in inspect.signature(kind).parameters if name not in _RESERVED]
        unknown = sorted(arguments.keys() - {*known})
        if unknown:
            raise ConfigError(
                f"options={shown(self.options)}: torch.optim.{self.name} has no option {', '.join(unknown)[:100]}. It has: "
                f"{', '.join(known)}. (lr is a setting of its own.)"
            )
        _try(self)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        kind: Any = _torch_class(self.name)
        made: torch.optim.Optimizer = kind(
            [parameter for _, parameter in parameters], lr=_peak(self.lr), **_arguments(self.options)
        )
        return made


@dataclass(frozen=True, kw_only=True)
class Muon(TorchRule):
    """Muon for the matrices of hidden layers, AdamW for all other weights, with one learning rate: Muon's updates have the size of
    AdamW's. Weights of one dimension do not decay.

    Args:
        lr: the learning rate, or its schedule.
        momentum: of Muon.
        nesterov: whether Muon looks ahead along its momentum.
        weight_decay: of all weights of two or more dimensions.
        betas: of AdamW.
        eps: of AdamW.
        adamw: matrices that AdamW updates: those whose names contain one of these texts, in small letters. A name begins and ends
            with a dot here, so that ".head." is a whole part of it, and multihead_attn is Muon's.
    """

    lr: float | Schedule = 4e-4
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adamw: tuple[str, ...] = ("embed", ".wte.", ".wpe.", ".head.", ".lm_head.")

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.adamw, str):
            raise ConfigError(f"adamw={shown(self.adamw)} is a text. Give a list, such as [{shown(self.adamw)}].")
        _check_rate(self.lr)
        for name, value in (("momentum", self.momentum), ("betas[0]", self.betas[0]), ("betas[1]", self.betas[1])):
            below_one(name, value)
        at_least_zero("eps", self.eps)
        _check_rate(self.weight_decay, "weight_decay")

    def takes(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon updates it."""
        return parameter.dim() == 2 and not any(text in f".{name.lower()}." for text in self.adamw)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        lr, kinds = _peak(self.lr), defaultdict[str, list[nn.Parameter]](list)
        for name, parameter in parameters:
            kinds["muon" if self.takes(name, parameter) else "matrices" if parameter.dim() > 1 else "rest"].append(parameter)
        parts: list[torch.optim.Optimizer] = []
        if kinds["muon"]:
            own: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.weight_decay}
            parts.append(torch.optim.Muon(kinds["muon"], lr=lr, adjust_lr_fn="match_rms_adamw", **own))
        groups = [{"params": kinds["matrices"], "weight_decay": self.weight_decay}, {"params": kinds["rest"], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if groups:
            parts.append(torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True))
        return JoinedOptimizers(parts)


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers of different parameters, as one."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self._parts = [*parts]
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self._parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def _peak(lr: float | Schedule) -> float:
    return lr.lr if isinstance(lr, Schedule) else lr


def _check_rate(lr: float | Schedule, name: str = "lr") -> None:
    check_lr(lr)
    at_least_zero(name, _peak(lr))
    if _peak(lr) > LARGEST_FACTOR:
        raise ConfigError(f"{name}={_peak(lr)} must be at most {LARGEST_FACTOR:g}: torch multiplies it by other numbers.")


@cache
def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    classes = {
        n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if name not in classes or name in _REFUSED:
        why = f"cannot be used here: {_REFUSED[name]}" if name in _REFUSED else f"is no optimizer of torch {torch.__version__}"
        raise ConfigError(f"name={shown(name)} {why}. Allowed: {', '.join(sorted(classes.keys() - _REFUSED.keys()))}.")
    return classes[name]


def _arguments(options: str) -> Mapping[str, Any]:
    """The arguments in a text such as "momentum=0.9, nesterov=True". Nothing is evaluated as code."""
    try:
        call = ast.parse(f"options({options})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("an argument has no name")
        names = [keyword.arg for keyword in call.keywords]
        if None in names or len({*names}) < len(names):
            raise ValueError("an argument has no name, or one is given twice")
        found = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'options={shown(options)} cannot be read ({one_line(error)[:100]}). Write "name=value, name=value" with numbers, '
            f"True, False, None, quoted texts and tuples of numbers."
        ) from error
    for name, value in found.items():
        if not all(_plain(item) for item in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(
                f"options: {name[:60]}={shown(value)} is no finite number, bool, text, None or tuple of these. Give one."
            )
    return found


def _plain(value: Any) -> bool:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return abs(value) <= LARGEST_FACTOR
    return value is None or isinstance(value, bool | str)


def _try(rule: TorchOptimizer) -> None:
    """Refuse options that torch refuses, in the constructor or at the first step."""
    trial = nn.Parameter(torch.ones(2, 2))
    trial.grad = torch.ones(2, 2)
    try:
        rule.optimizer([("trial", trial)]).step()
    except Exception as error:  # torch's classes raise whatever their arithmetic does
        raise ConfigError(
            f"options={shown(rule.options)}: torch.optim.{rule.name} refuses them ({one_line(error)[:200]}). Correct them."
        ) from error
    if not math.isfinite(float(trial.detach().sum())):
        raise ConfigError(
            f"lr={shown(rule.lr)}, options={shown(rule.options)}: the first step of torch.optim.{rule.name} on a matrix of ones is "
            f"not finite. Use smaller numbers."
        )
