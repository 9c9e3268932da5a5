"""Forward and backward passes over a batch: in micro-batches, on one device or several, with autocast or without. The gradient is
that of the mean loss over the whole batch, however it is split.

A batch is a tensor, or nested tuples, lists and dicts of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Workload
from atoll.replica.data_parallel import DataParallelDevices
from atoll.replica.flat_parameters import TrainableWeights

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Computes the gradients of one replica."""

    weights: TrainableWeights
    workload: Workload
    loss: Loss  # the workload's, or a compiled form of it
    device: str
    data_parallel: DataParallelDevices | None  # further devices, each of which computes a share of every batch
    autocast: bool  # run forward passes in bfloat16 (CUDA only)

    def backward(self, batch: Any, weight: float, *, micro_batches: int, in_turn: bool) -> Tensor:
        """Adds the gradient of the mean loss over the batch, times `weight`, to the module's. Returns that loss, on the device.
        Each of the `micro_batches` per device weighs as many tokens as it has, because examples may be padded. Devices compute
        `in_turn` if modules draw from one random generator."""
        pieces = self._split(batch, micro_batches)
        compute = partial(self._backward, weight=weight, loss=self.loss)
        if self.data_parallel is None:
            total = compute(self.weights.module, self.device, pieces)
        else:
            parts = [pieces[at : at + micro_batches] for at in range(0, len(pieces), micro_batches)]
            total = self.data_parallel.backward(self.weights, self.device, parts, compute, in_turn=in_turn)
        assert total is not None
        return total

    def dry_run(self) -> None:
        """A pass over two examples on this device alone, whose gradient is discarded. It uses the plain loss, which draws as many
        random numbers as the compiled one. A plain pass over a whole batch may need more memory than the compiled passes."""
        self.weights.begin_accumulation(None)
        pieces = [(two_examples(self.workload.batches.batch(0, 0)), 1.0)]
        self._backward(self.weights.module, self.device, pieces, weight=1.0, loss=self.workload.loss)
        self.weights.end_accumulation()

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast context of forward passes."""
        on_cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if self.autocast and on_cuda else nullcontext()

    def _split(self, batch: Any, micro_batches: int) -> list[tuple[Any, float | None]]:
        """The micro-batches for all devices, each with its share of the mean loss; None for one without tokens."""
        devices = 1 if self.data_parallel is None else 1 + len(self.data_parallel.devices)
        pieces = list(split_batch(batch, micro_batches * devices))
        size = sum(next(batch_tensors(piece)).shape[0] for piece in pieces)
        if size < len(pieces):
            raise ConfigError(
                f"a batch, or piece of one, holds {size} examples and is to be cut into {len(pieces)}: each needs at least one. "
                f"Use larger batches, or fewer pieces (train.micro_batches, algorithm.pieces_per_half, engine.devices)."
            )
        tokens = [self.workload.batches.tokens(piece) for piece in pieces] if len(pieces) > 1 else [1]
        total = sum(tokens)
        return [(piece, None if total and not own else own / (total or 1)) for piece, own in zip(pieces, tokens, strict=True)]

    def _backward(
        self, module: nn.Module, device: str, pieces: Sequence[tuple[Any, float | None]], *, weight: float, loss: Loss
    ) -> Tensor | None:
        """Backward passes over micro-batches. Returns their share of the loss, if any."""
        total: Tensor | None = None
        for piece, share in pieces:
            if share is None:
                continue  # its mean loss is not a number
            with self.precision():
                mean = loss(module, to_device(piece, device)) * share
            (mean if weight == 1.0 else mean * weight).backward()  # type: ignore[no-untyped-call]
            total = mean.detach() if total is None else total + mean.detach()
        return total


class ModuleTraits(NamedTuple):
    """What a pass does besides computing gradients."""

    draws_randomness: bool  # from torch's global generators, as dropout does
    changes_buffers: bool  # of the module, as BatchNorm does


def probe_module(module: nn.Module, device: str, run: Callable[[], object]) -> ModuleTraits:
    """Runs one pass of the module and undoes its effects."""
    on_cuda = device.startswith("cuda")
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        before = _generator_states(on_cuda)
        run()
        draws = not all(map(torch.equal, before, _generator_states(on_cuda)))
    changes = False
    for name, buffer in module.named_buffers():
        changes = changes or not torch.equal(buffer, buffers[name])
        buffer.copy_(buffers[name])
    return ModuleTraits(draws, changes)


def _generator_states(on_cuda: bool) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]


# ----------------------------------------------------------------------------------------------------- batches and micro-batches


def split_batch(batch: Any, pieces: int) -> Iterator[Any]:
    """Splits the batch along its first dimension."""
    if pieces == 1:
        yield batch
    elif isinstance(batch, Tensor):
        yield from torch.tensor_split(batch, pieces)
    elif isinstance(batch, Mapping):
        for parts in zip(*(split_batch(item, pieces) for item in batch.values()), strict=True):
            yield dict(zip(batch, parts, strict=True))
    else:
        for parts in zip(*(split_batch(item, pieces) for item in batch), strict=True):
            yield type(batch)(parts)


def two_examples(batch: Any) -> Any:
    """The first two examples: BatchNorm needs more than one. The whole batch if its tensors differ in their first dimension, which
    then need not count examples.

    >>> two_examples({"tokens": torch.zeros(16, 3)})["tokens"].shape
    torch.Size([2, 3])
    """
    lengths = {part.shape[0] if part.dim() else 0 for part in batch_tensors(batch)}
    return next(split_batch(batch, max(1, min(lengths) // 2))) if len(lengths) == 1 else batch


def to_device(batch: Any, device: str) -> Any:
    return batch if device == "cpu" else map_tensors(lambda part: part.to(device, non_blocking=True), batch)


def batch_tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from batch_tensors(item)


def map_tensors(function: Callable[..., Tensor], *batches: Any) -> Any:
    """Applies the function to each tensor of a batch, or to the corresponding tensors of several batches."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(*batches)
    if isinstance(first, Mapping):
        return {name: map_tensors(function, *(batch[name] for batch in batches)) for name in first}
    return type(first)(map_tensors(function, *items) for items in zip(*batches, strict=True))
