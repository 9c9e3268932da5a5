"""The weights of a module that stays as it is, read and written as Trees: values are copied in and out.

The module may be a user's own, on any device, and FSDP2 may have cut it over several: then this process reads and writes its own
rows of each parameter. Names are those of the module itself, whether it is compiled, wrapped in DDP, or neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, empty, trainable
from atoll.core.layout import Layout, Piece


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
