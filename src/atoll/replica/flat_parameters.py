"""Modules as Trees: reading and writing all weights of a module in one go.

`FlatModule` moves a module's parameters into one contiguous buffer, of which they become views, and its gradients into another.
Loading and reading weights is then one copy, and an optimizer can step the whole buffer at once. Only modules that atoll builds are
treated so: rebinding parameters would break what a user's own code may hold on to. `BorrowedModule` reads and writes such a module
by `copy_`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, empty, trainable
from atoll.core.layout import Layout, Piece


class TrainableWeights(Protocol):
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


class UnflattenedModule:
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


def trainable_weights(module: nn.Module) -> TrainableWeights:
    """The module made flat, or borrowed as it is where its dtypes are mixed."""
    dtypes = {parameter.dtype for parameter in trainable(module).values()}
    return FlatModule(module) if len(dtypes) == 1 else UnflattenedModule(module)


def copy_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write what a module keeps besides its parameters."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


class ModuleWeights:
    """All of a module, or this process's shard of each parameter."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharders = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._reshard()
        self._entered = trainable(module)
        self.parameters = {_plain_name(module, name): parameter for name, parameter in self._entered.items()}
        if not self.parameters:
            raise ConfigError("this module has no trainable parameters, so there is nothing to agree on. Unfreeze some.")
        devices = {parameter.device for parameter in self.parameters.values()}
        if len(devices) > 1:
            raise ConfigError(
                f"this module lies on {sorted(map(str, devices))}. Put it on one device per process, or shard it by FSDP2 and give "
                f"a mesh."
            )
        self.device = devices.pop()
        self.layout = Layout(tuple(_piece(name, parameter) for name, parameter in self.parameters.items()))
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self._entered.values()]

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has cut the module."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters.values())

    def read(self) -> Tree:
        self._check()
        flat = empty(self.layout.numel, self.layout.dtype, self.device)
        for part, parameter in self._parts(flat):
            part.copy_(local(parameter).reshape(-1))
        return Tree(self.layout, flat)

    def write(self, params: Tree) -> None:
        self._check()
        assert params.layout == self.layout, "these weights are another model's"
        with torch.no_grad():
            for part, parameter in self._parts(params.flat):
                mine = local(parameter)
                mine.copy_(part.view(mine.shape))

    def check_gradients(self) -> None:
        """That there are some to take."""
        self._check()
        if all(parameter.grad is None for parameter in self.parameters.values()):
            raise ConfigError("there are no gradients to take: call loss.backward() before each step.")

    def take_gradients(self, onto: Tree | None, weight: float, *, wide: bool) -> Tree:
        """The module's gradients times `weight`, added to those in `onto`, in its buffer if it was given. They are then spent."""
        flat = self._room(wide).zero_() if onto is None else (onto if onto.spare else onto.copy()).give().flat
        for part, parameter in self._parts(flat):
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                part.add_(gradient.reshape(-1), alpha=weight)
                parameter.grad = None
        return Tree(self.layout, flat)

    def no_gradients(self, *, wide: bool) -> Tree:
        """Gradients that are all zero."""
        return Tree(self.layout, self._room(wide).zero_())

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that are not trained, and buffers, to be overwritten where they lie."""
        frozen = ((name, parameter) for name, parameter in self._module.named_parameters() if not parameter.requires_grad)
        for name, tensor in (*frozen, *self._module.named_buffers()):
            if tensor.layout == torch.strided:
                yield _plain_name(self._module, name), local(tensor)

    def _room(self, wide: bool) -> Tensor:
        dtype = self.layout.dtype
        return empty(self.layout.numel, torch.promote_types(dtype, torch.float32) if wide else dtype, self.device)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Each parameter with its part of a buffer."""
        for piece, at in zip(self.layout.pieces, self.layout.offsets.values(), strict=True):
            yield flat[at : at + piece.count], self.parameters[piece.name]

    def _reshard(self) -> None:
        """After an evaluation the parameters of FSDP2 are whole for a while, and what is written to them then is lost."""
        for part in self._sharders:
            part.reshard()

    def _check(self) -> None:
        self._reshard()
        now = trainable(self._module)
        if now.keys() != self._entered.keys() or any(now[name] is not mine for name, mine in self._entered.items()):
            raise ConfigError(
                "the module's trainable parameters are not those that it entered the block with: some were frozen, unfrozen or "
                "replaced (as load_state_dict(assign=True) does). Leave the block first, change the module, and enter a new one."
            )
        for (name, parameter), (dtype, device) in zip(now.items(), self._kinds, strict=True):
            if (parameter.dtype, parameter.device) != (dtype, device):
                raise ConfigError(
                    f"{name} entered the block as {dtype} on {device}, and is {parameter.dtype} on {parameter.device} now. Leave "
                    f"the block first, move the module, and enter a new one."
                )


def local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _plain_name(module: nn.Module, name: str) -> str:
    """A name without what torch.compile puts into it, and DDP before it.

    >>> _plain_name(nn.Linear(1, 1), "layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    wrapped = getattr(module, "_orig_mod", module)  # DDP may be compiled, and what it wraps too
    return name.removeprefix("module.") if isinstance(wrapped, DataParallel | DistributedDataParallel) else name


def _piece(name: str, parameter: Tensor) -> Piece:
    if not parameter.is_floating_point():
        raise ConfigError(f"{name} is {parameter.dtype}: weights that islands agree on are floating-point. Freeze it.")
    shape, mine = tuple(parameter.shape), local(parameter)
    if not isinstance(parameter, DTensor):
        return Piece(name, shape, parameter.dtype, 0, parameter.numel())
    if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
        raise ConfigError(
            f"{name} is placed as {parameter.placements}: atoll knows FSDP2's own way, which cuts the first dimension over one "
            f'dimension of a mesh. Use fully_shard(model, mesh=mesh["device"]).'
        )
    rank, size = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
    rows = math.ceil(shape[0] / size)
    return Piece(name, shape, parameter.dtype, min(rank * rows, shape[0]) * math.prod(shape[1:]), mine.numel())
