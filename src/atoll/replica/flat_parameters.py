"""Modules as Trees: reading and writing all weights of a module in one go.

`FlatModule` moves a module's parameters into one contiguous buffer, of which they become views, and its gradients into another.
Loading and reading weights is then one copy, and an optimizer can step the whole buffer at once. Only modules that atoll builds are
treated so: rebinding parameters would break what a user's own code may hold on to. `BorrowedModule` reads and writes such a module
by `copy_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, empty, trainable
from atoll.core.layout import Layout


class Weights(Protocol):
    """A module's weights and gradients, read and written as Trees."""

    module: nn.Module
    layout: Layout

    def load(self, params: Tree) -> None:
        """Write these weights into the module."""

    def read(self) -> Tree:
        """A copy of the module's weights."""

    def lent(self) -> Tree:
        """The module's weights, which change with it."""

    def holds(self, params: Tree) -> bool:
        """Whether these are the module's weights, to the bit, once they are in its precision."""

    def zero_gradient(self) -> None:
        """Before backward passes whose gradients an optimizer will read."""

    def gather_gradient(self) -> None:
        """After them, and before the optimizer."""

    def collect(self, onto: Tree | None, *, wide: bool = False) -> None:
        """From now on backward passes add to these gradients, in their buffer if they were given; to none: from zero on. `wide`
        adds up in single precision what passes bring in half."""

    def collected(self) -> Tree:
        """What was added up. To add more, collect onto it."""

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        """What an optimizer steps: parameters that decay (matrices), and the rest."""

    def gradients(self) -> Sequence[Tensor]:
        """All gradients, to be scaled in place."""


class FlatModule:
    """A module whose trainable parameters are views of one flat buffer. Its gradients are gathered in another, for an optimizer; or
    backward passes add to one that is given, for whoever collects."""

    def __init__(self, module: nn.Module) -> None:
        parameters = trainable(module)
        dtypes = {parameter.dtype for parameter in parameters.values()}
        assert len(dtypes) == 1, f"a flat buffer needs one dtype, this module has {sorted(map(str, dtypes))}: use BorrowedModule"
        if _shares_a_buffer(parameters):
            raise ConfigError(
                "this module lies in a flat buffer already: Workload.module() must return a new module at every call."
            )
        self.module = module
        self.layout = Layout.of({name: parameter.detach() for name, parameter in parameters.items()})
        device = next(iter(parameters.values())).device
        self._params = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=device)
        self._parameters = parameters
        weights = self.layout.views(self._params)
        for name, parameter in parameters.items():
            weights[name].copy_(parameter.detach())
            parameter.data = weights[name]
        self._grads: Tensor | None = None
        """The module's own gradients, made when an optimizer asks for them. Whoever collects brings another buffer."""
        self._into: Mapping[str, Tensor] = {}
        """Its views."""
        self._bound: Tensor | None = None
        """The buffer that gradients lie in now."""
        self._adds = False
        """Whether backward passes add to it."""
        self._sum: Tensor | None = None
        """In single precision, if they are added up in it."""
        self._matrices = sum(piece.count for piece in self.layout.pieces if len(piece.shape) >= 2)
        self._parts = [self._part(0, self._matrices), self._part(self._matrices, self.layout.numel)]

    def _part(self, start: int, stop: int) -> list[nn.Parameter]:
        return [nn.Parameter(self._params[start:stop])] if start < stop else []

    def _bind(self, flat: Tensor) -> None:
        """Have backward passes add to this buffer."""
        for name, gradient in self.layout.views(flat).items():
            self._parameters[name].grad = gradient
        self._bound, self._adds = flat, True

    def _own(self) -> Tensor:
        """The module's own buffer, from which an optimizer reads."""
        if self._grads is None:
            self._grads = torch.empty_like(self._params)
            self._into = self.layout.views(self._grads)
            for part, start in zip(self._parts, (0, self._matrices), strict=True):
                for parameter in part:
                    parameter.grad = self._grads[start : start + parameter.numel()]
        return self._grads

    def load(self, params: Tree) -> None:
        self._check()
        assert params.layout == self.layout, "these weights are another model's"
        self._params.copy_(params.flat)

    def lent(self) -> Tree:
        self._check()
        return Tree(self.layout, self._params)

    def read(self) -> Tree:
        self._check()
        return Tree(self.layout, empty(self.layout.numel, self._params.dtype, self._params.device).copy_(self._params))

    def holds(self, params: Tree) -> bool:
        self._check()
        return params.layout == self.layout and torch.equal(self._params, params.flat.to(self._params.dtype))

    def zero_gradient(self) -> None:
        self._unbind()

    def gather_gradient(self) -> None:
        """What passes have made is copied into the buffer. To add it to zeros there would move twice as many bytes."""
        if self._bound is not None:
            return
        own = self._own()
        made = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        for name in self._into.keys() - made.keys():  # the loss does not use these parameters
            self._into[name].zero_()
        if made:
            torch._foreach_copy_([self._into[name] for name in made], list(made.values()))
        self._unbind()
        self._bound = own

    def collect(self, onto: Tree | None, *, wide: bool = False) -> None:
        wide = wide and self._params.dtype.itemsize < torch.float32.itemsize
        dtype = torch.float32 if wide else self._params.dtype
        if onto is None:
            flat = empty(self.layout.numel, dtype, self._params.device).zero_()
        else:
            assert onto.flat.dtype == dtype, "gradients are added up in one precision"
            flat = (onto if onto.spare else onto.copy()).give().flat
        if wide:
            self._sum = flat
            self._bind(self._own().zero_())
        else:
            self._sum = None
            self._bind(flat)

    def collected(self) -> Tree:
        self._check()
        assert self._bound is not None, "collect() comes first"
        if self._sum is None:
            # It will travel, and must not stay alive here when it is of no more use.
            flat = self._bound
            self._unbind()
            return Tree(self.layout, flat)
        total, self._sum = self._sum.add_(self._bound), None
        return Tree(self.layout, total)

    def _unbind(self) -> None:
        """Gradients lie nowhere now."""
        self._bound, self._adds = None, False
        for parameter in self._parameters.values():
            parameter.grad = None

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        return self._parts[0], self._parts[1]

    def gradients(self) -> Sequence[Tensor]:
        return [] if self._bound is None else [self._bound]

    def _check(self) -> None:
        """`.to()`, `zero_grad()` to None and `load_state_dict(assign=True)` silently take a module out of its buffer."""
        first = self.module.get_parameter(next(iter(self._parameters)))  # not as it was: it may have been replaced
        bound = self._bound if self._adds else None
        astray = bound is not None and (first.grad is None or first.grad.data_ptr() != bound.data_ptr())
        if first.data_ptr() != self._params.data_ptr() or astray:
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
        self._onto: Tree | None = None

    def load(self, params: Tree) -> None:
        assert params.layout == self.layout, "these weights are another model's"
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(params[name])

    def read(self) -> Tree:
        return Tree.of({name: parameter.detach() for name, parameter in self._parameters.items()})

    def lent(self) -> Tree:
        return self.read()  # they do not lie together

    def holds(self, params: Tree) -> bool:
        return params.layout == self.layout and all(
            torch.equal(parameter.detach(), params[name].to(parameter.dtype)) for name, parameter in self._parameters.items()
        )

    def zero_gradient(self) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def gather_gradient(self) -> None:
        pass  # an optimizer reads them where they are

    def collect(self, onto: Tree | None, *, wide: bool = False) -> None:
        self._onto = onto  # a Tree of mixed dtypes is as wide as the widest of them
        self.zero_gradient()

    def collected(self) -> Tree:
        mine = Tree.of({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()})
        onto, self._onto = self._onto, None
        return mine if onto is None else onto + mine.give()

    def groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        parameters = list(self._parameters.values())
        return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]

    def gradients(self) -> Sequence[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def _shares_a_buffer(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether two parameters lie in one storage, as only a flat buffer has it: tied ones are listed once."""
    storages = [parameter.untyped_storage().data_ptr() for parameter in parameters.values() if parameter.numel()]
    return len(set(storages)) < len(storages)


def weights_of(module: nn.Module) -> Weights:
    """The module made flat, or borrowed as it is where its dtypes are mixed."""
    dtypes = {parameter.dtype for parameter in trainable(module).values()}
    return FlatModule(module) if len(dtypes) == 1 else BorrowedModule(module)


def copy_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write what a module keeps besides its parameters."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
