"""A module's trainable weights and gradients, read and written as Trees.

`FlatModule` moves the parameters of a module that atoll built into one contiguous buffer, of which they become views. Loading and
reading weights is then one copy, and an optimizer steps the whole buffer at once. `ModuleWeights` leaves a module as it is, because
user code may hold references to its parameters: it copies values in and out, parameter by parameter. `UnflattenedModule` gives such
a module the interface of a flat one, for modules that atoll built with parameters of several dtypes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, empty, trainable
from atoll.core.layout import Layout, Piece


class FlatModule:
    """A module whose trainable parameters are views of one flat buffer. An optimizer reads its gradients from a second buffer;
    accumulation has backward passes add to a buffer of the caller."""

    def __init__(self, module: nn.Module) -> None:
        parameters = trainable(module)
        storages = [parameter.untyped_storage().data_ptr() for parameter in parameters.values() if parameter.numel()]
        if len(set(storages)) < len(storages):  # `trainable` lists tied parameters once
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
        self._grads: Tensor | None = None  # the optimizer's gradient buffer, allocated at its first use
        self._grad_views: Mapping[str, Tensor] = {}
        self._bound: Tensor | None = None  # the buffer that holds the gradients now
        self._adds = False  # whether backward passes add to it
        self._wide_sum: Tensor | None = None
        self._matrices = sum(piece.count for piece in self.layout.pieces if len(piece.shape) >= 2)
        parts = self._params[: self._matrices], self._params[self._matrices :]
        self._groups = tuple([nn.Parameter(part)] if len(part) else [] for part in parts)
        self._tensors: dict[str, nn.Parameter] = {}  # views in the tensors' own shapes, made when an optimizer needs them

    def load(self, params: Tree) -> None:
        """Writes these weights into the module, all of them or some pieces."""
        self._check()
        if params.layout == self.layout:
            self._params.copy_(params.flat)
        else:
            Tree(self.layout, self._params).paste_(params)

    def borrowed(self) -> Tree:
        """The module's weights, borrowed: they change with it."""
        self._check()
        return Tree(self.layout, self._params).borrow()

    def read(self, layout: Layout | None = None) -> Tree:
        """A copy of the module's weights in this layout (None: of all)."""
        return self.borrowed().part(layout or self.layout).claim()

    def equals(self, params: Tree) -> bool:
        """Whether the module has these weights, bit for bit after rounding to its precision."""
        self._check()
        return params.layout == self.layout and torch.equal(self._params, params.flat.to(self._params.dtype))

    def zero_gradient(self) -> None:
        """Called before backward passes whose gradients an optimizer reads."""
        self._unbind()

    def gather_gradient(self) -> None:
        """Called after these passes and before the optimizer's step: copies the gradients that they made into the buffer. Adding to
        zeros there would move twice as many bytes."""
        if self._bound is not None:
            return
        own = self._optimizer_gradients()
        made = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        for name in self._grad_views.keys() - made.keys():  # the loss does not use these parameters
            self._grad_views[name].zero_()
        if made:
            torch._foreach_copy_([self._grad_views[name] for name in made], list(made.values()))
        self._unbind()
        self._bound = own

    def begin_accumulation(self, onto: Tree | None, *, wide: bool = False) -> None:
        """Backward passes add to the gradients `onto`, which are donated, else to zeros. `wide` adds gradients of half precision up
        in single precision."""
        wide = wide and self._params.dtype.itemsize < torch.float32.itemsize
        dtype = torch.float32 if wide else self._params.dtype
        assert onto is None or onto.flat.dtype == dtype, "gradients are added up in one precision"
        flat = empty(self.layout.numel, dtype, self._params.device).zero_() if onto is None else onto.claim().flat
        self._wide_sum = flat if wide else None
        self._bound, self._adds = self._optimizer_gradients().zero_() if wide else flat, True
        for name, gradient in self.layout.views(self._bound).items():
            self._parameters[name].grad = gradient

    def end_accumulation(self) -> Tree:
        """The accumulated gradients."""
        self._check()
        assert self._bound is not None, "begin_accumulation() comes first"
        if self._wide_sum is None:
            flat = self._bound
            self._unbind()  # a reference here would keep the buffer alive after its exchange
            return Tree(self.layout, flat)
        total, self._wide_sum = self._wide_sum.add_(self._bound), None
        return Tree(self.layout, total)

    def decay_groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        """The parameters for an optimizer: those with weight decay (matrices), and the others."""
        return self._groups[0], self._groups[1]

    def tensor_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters for an optimizer that needs each tensor in its own shape."""
        if not self._tensors:
            self._tensors = {name: nn.Parameter(view) for name, view in self.layout.views(self._params).items()}
        return self._tensors

    def gradients(self) -> Sequence[Tensor]:
        """All gradients, which the caller may scale in place."""
        return [] if self._bound is None else [self._bound]

    def _optimizer_gradients(self) -> Tensor:
        if self._grads is None:
            self._grads = torch.empty_like(self._params)
            self._grad_views = self.layout.views(self._grads)
            for group, start in zip(self._groups, (0, self._matrices), strict=True):
                for parameter in group:
                    parameter.grad = self._grads[start : start + parameter.numel()]
            for name, parameter in self._tensors.items():
                parameter.grad = self._grad_views[name]
        return self._grads

    def _unbind(self) -> None:
        self._bound, self._adds = None, False
        for parameter in self._parameters.values():
            parameter.grad = None

    def _check(self) -> None:
        """`.to()`, `zero_grad()` to None and `load_state_dict(assign=True)` silently take a module out of its buffer."""
        first = self.module.get_parameter(next(iter(self._parameters)))  # by name, since it may have been replaced
        gradient = self._bound if self._adds else None
        astray = gradient is not None and (first.grad is None or first.grad.data_ptr() != gradient.data_ptr())
        if first.data_ptr() != self._params.data_ptr() or astray:
            raise RuntimeError(
                "the module's parameters or gradients no longer lie in its flat buffer: something called .to(), .zero_grad() or "
                "the like on it. Move or cast the module before it is made flat, and zero gradients with zero_gradient()."
            )


class ModuleWeights:
    """The weights of a module that stays as it is. With FSDP2, they are this process's rows of each parameter. Names are those of
    the plain module, also if it is compiled or wrapped in DDP."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Who wrapped a module has imported fsdp, which takes a second.
        fsdp = sys.modules.get("torch.distributed.fsdp")
        self._fsdp_modules = [part for part in module.modules() if fsdp is not None and isinstance(part, fsdp.FSDPModule)]
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
        """Whether FSDP2 has sharded the module."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters.values())

    def read(self, layout: Layout | None = None) -> Tree:
        """A copy of the weights in this layout (None: of all)."""
        self._check()
        layout = layout or self.layout
        tree = Tree(layout, empty(layout.numel, self.layout.dtype, self.device))
        for (piece, start), values in self._pieces(tree):
            values.copy_(local(self.parameters[piece.name]).reshape(-1)[start : start + piece.count])
        return tree

    def write(self, params: Tree) -> None:
        """Writes these weights into the module, all of them or some pieces."""
        self._check()
        with torch.no_grad():
            for (piece, start), values in self._pieces(params):
                mine = local(self.parameters[piece.name])
                if piece.count == mine.numel():
                    mine.copy_(values.view(mine.shape))
                elif mine.is_contiguous():
                    mine.view(-1)[start : start + piece.count].copy_(values)
                else:  # its elements in the order of the layout are no range of its memory
                    whole = mine.flatten()
                    whole[start : start + piece.count].copy_(values)
                    mine.copy_(whole.view(mine.shape))

    def borrowed(self) -> Tree:
        """The module's weights, borrowed: pieces of them are collected when they are read."""
        return Tree.borrowed_from(self.layout, lambda layout: self.read(layout).flat)

    def check_gradients(self) -> None:
        """Raises ConfigError if the module has no gradients to take."""
        self._check()
        if all(parameter.grad is None for parameter in self.parameters.values()):
            raise ConfigError("there are no gradients to take: call loss.backward() before each step.")

    def take_gradients(self, onto: Tree | None, weight: float, *, wide: bool) -> Tree:
        """Moves the module's gradients times `weight` onto those in `onto`, which is donated."""
        flat = self.zero_gradients(wide=wide).flat if onto is None else onto.claim().flat
        for part, parameter in self._parts(flat):
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                part.add_(gradient.reshape(-1), alpha=weight)
                parameter.grad = None
        return Tree(self.layout, flat)

    def zero_gradients(self, *, wide: bool) -> Tree:
        """Gradients that are all zero."""
        dtype = torch.promote_types(self.layout.dtype, torch.float32) if wide else self.layout.dtype
        return Tree(self.layout, empty(self.layout.numel, dtype, self.device).zero_())

    def untrained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen parameters and buffers, which the caller may overwrite in place."""
        frozen = ((name, parameter) for name, parameter in self.module.named_parameters() if not parameter.requires_grad)
        for name, tensor in (*frozen, *self.module.named_buffers()):
            if tensor.layout == torch.strided:
                yield _plain_name(self.module, name), local(tensor)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Each parameter with its part of a buffer."""
        for piece, at in zip(self.layout.pieces, self.layout.offsets.values(), strict=True):
            yield flat[at : at + piece.count], self.parameters[piece.name]

    def _pieces(self, tree: Tree) -> Iterator[tuple[tuple[Piece, int], Tensor]]:
        """Each piece of a part of the weights, where it begins in this process's part of its parameter, and its values."""
        for piece, values in zip(tree.layout.pieces, torch.split(tree.flat, [p.count for p in tree.layout.pieces]), strict=True):
            mine = self.layout.index[piece.name]
            assert mine.shape == piece.shape, "these weights have another model's layout"
            yield (piece, piece.start - mine.start), values

    def _reshard(self) -> None:
        """After an evaluation FSDP2's parameters stay gathered for a while, and what is written to them then is lost."""
        for part in self._fsdp_modules:
            part.reshard()

    def _check(self) -> None:
        self._reshard()
        now = trainable(self.module)
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


class UnflattenedModule(ModuleWeights):
    """A module with parameters of several dtypes, with the methods of a `FlatModule`."""

    _onto: Tree | None = None
    load = ModuleWeights.write

    def equals(self, params: Tree) -> bool:
        return params.layout == self.layout and all(
            torch.equal(parameter.detach(), params[name].to(parameter.dtype)) for name, parameter in self.parameters.items()
        )

    def zero_gradient(self) -> None:
        for gradient in self.gradients():
            gradient.zero_()

    def gather_gradient(self) -> None:
        pass  # an optimizer reads each parameter's own gradient

    def begin_accumulation(self, onto: Tree | None, *, wide: bool = False) -> None:
        self._onto = onto  # a Tree of several dtypes is as wide as the widest of them
        self.zero_gradient()

    def end_accumulation(self) -> Tree:
        mine = Tree.of({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()})
        onto, self._onto = self._onto, None
        return mine if onto is None else mine.add_(onto)

    def decay_groups(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        parameters = list(self.parameters.values())
        return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]

    def tensor_parameters(self) -> Mapping[str, nn.Parameter]:
        return self.parameters

    def gradients(self) -> Sequence[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]


TrainableWeights = FlatModule | UnflattenedModule  # the weights and gradients of a module that a replica trains


def trainable_weights(module: nn.Module) -> TrainableWeights:
    """The module made flat, or left as it is if its parameters have several dtypes."""
    dtypes = {parameter.dtype for parameter in trainable(module).values()}
    return FlatModule(module) if len(dtypes) == 1 else UnflattenedModule(module)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint of the module has, such as BatchNorm's running means."""
    persistent = module.state_dict().keys()
    return {name: buffer.detach() for name, buffer in module.named_buffers() if name in persistent}


def copy_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Writes the module's buffers of these names."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _plain_name(module: nn.Module, name: str) -> str:
    """A parameter's name without the parts that torch.compile and DDP add.

    >>> _plain_name(nn.Linear(1, 1), "layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    wrapped = getattr(module, "_orig_mod", module)  # a compiled module may be a DDP one
    return name.removeprefix("module.") if isinstance(wrapped, DataParallel | DistributedDataParallel) else name


def _piece(name: str, parameter: Tensor) -> Piece:
    if not parameter.is_floating_point():
        raise ConfigError(f"{name} is {parameter.dtype}: weights that islands agree on are floating-point. Freeze it.")
    shape, mine = tuple(parameter.shape), local(parameter)
    if not isinstance(parameter, DTensor):
        return Piece(name, shape, parameter.dtype, 0, parameter.numel())
    if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
        raise ConfigError(
            f"{name} is placed as {parameter.placements}: atoll supports FSDP2's own placement, which shards the first dimension "
            f'over one dimension of a mesh. Use fully_shard(model, mesh=mesh["device"]).'
        )
    rank, size = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
    rows = math.ceil(shape[0] / size)
    return Piece(name, shape, parameter.dtype, min(rank * rows, shape[0]) * math.prod(shape[1:]), mine.numel())
