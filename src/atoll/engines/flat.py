"""Modules as Trees: reading and writing all weights of a module in one go.

`FlatModule` moves a module's parameters and gradients into two contiguous buffers, of which they become views. Loading and reading
weights is then one copy, and an optimizer can step the whole buffer at once. Only modules that atoll builds are treated so:
rebinding parameters would break what a user's own code may hold on to. `BorrowedModule` reads and writes such a module by `copy_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.tree import Layout, Tree, empty, trainable


class Weights(Protocol):
    """A module's weights and gradients, read and written as Trees."""

    module: nn.Module
    layout: Layout

    def load(self, params: Tree) -> None:
        """Write these weights into the module."""

    def read(self) -> Tree:
        """A copy of the module's weights."""

    def read_gradient(self) -> Tree:
        """A copy of the gradients."""

    def zero_gradient(self) -> None: ...

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        """What an optimizer steps: parameters that decay (matrices), and the rest."""

    def gradients(self) -> Sequence[Tensor]:
        """All gradients, to be scaled in place."""


class FlatModule:
    """A module whose trainable parameters and gradients are views of two flat buffers."""

    def __init__(self, module: nn.Module) -> None:
        parameters = trainable(module)
        dtypes = {parameter.dtype for parameter in parameters.values()}
        assert len(dtypes) == 1, f"a flat buffer needs one dtype, this module has {sorted(map(str, dtypes))}: use BorrowedModule"
        if any(
            parameter.grad is not None and parameter.untyped_storage().nbytes() != parameter.nbytes
            for parameter in parameters.values()
        ):
            raise ConfigError(
                "this module lies in a flat buffer already: Workload.module() must return a new module at every call."
            )
        self.module = module
        self.layout = Layout.of({name: parameter.detach() for name, parameter in parameters.items()})
        device = next(iter(parameters.values())).device
        self._params = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=device)
        self._grads = torch.zeros_like(self._params)
        weights, gradients = self.layout.views(self._params), self.layout.views(self._grads)
        for name, parameter in parameters.items():
            weights[name].copy_(parameter.detach())
            parameter.data = weights[name]
            parameter.grad = gradients[name]
        self._matrices = sum(piece.count for piece in self.layout.pieces if len(piece.shape) >= 2)
        self._parts = [self._part(0, self._matrices), self._part(self._matrices, self.layout.numel)]

    def _part(self, start: int, stop: int) -> list[nn.Parameter]:
        if start == stop:
            return []
        part = nn.Parameter(self._params[start:stop])
        part.grad = self._grads[start:stop]
        return [part]

    def load(self, params: Tree) -> None:
        self._check()
        assert params.layout == self.layout, "these weights are another model's"
        self._params.copy_(params.flat)

    def read(self) -> Tree:
        self._check()
        return Tree(self.layout, empty(self.layout.numel, self._params.dtype, self._params.device).copy_(self._params))

    def read_gradient(self) -> Tree:
        return Tree(self.layout, empty(self.layout.numel, self._grads.dtype, self._grads.device).copy_(self._grads))

    def zero_gradient(self) -> None:
        self._grads.zero_()  # not None: the gradients would leave the buffer

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        return self._parts[0], self._parts[1]

    def gradients(self) -> Sequence[Tensor]:
        return [self._grads]

    def _check(self) -> None:
        """`.to()`, `zero_grad()` to None and `load_state_dict(assign=True)` silently take a module out of its buffer."""
        first = next(iter(trainable(self.module).values()))
        gradient = first.grad
        if first.data_ptr() != self._params.data_ptr() or gradient is None or gradient.data_ptr() != self._grads.data_ptr():
            raise RuntimeError(
                "the module's parameters or gradients no longer lie in its flat buffer: something called .to(), .zero_grad() or "
                "the like on it. Move or cast the module before it is made flat, and zero gradients with zero_gradient()."
            )


class BorrowedModule:
    """A module that stays as it is: weights are copied in and out, parameter by parameter. Its dtypes may be mixed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parameters: Mapping[str, nn.Parameter] = trainable(module)
        self.layout = Layout.of({name: parameter.detach() for name, parameter in self._parameters.items()})

    def load(self, params: Tree) -> None:
        assert params.layout == self.layout, "these weights are another model's"
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(params[name])

    def read(self) -> Tree:
        return Tree.of({name: parameter.detach() for name, parameter in self._parameters.items()})

    def read_gradient(self) -> Tree:
        return Tree.of({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()})

    def zero_gradient(self) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        parameters = list(self._parameters.values())
        return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]

    def gradients(self) -> Sequence[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def weights_of(module: nn.Module) -> Weights:
    """The module made flat, or borrowed as it is where its dtypes are mixed."""
    dtypes = {parameter.dtype for parameter in trainable(module).values()}
    return FlatModule(module) if len(dtypes) == 1 else BorrowedModule(module)
