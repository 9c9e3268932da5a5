"""Forwards and backwards over a batch: in pieces, on one device or several, in half precision or not. The gradient is that of the
mean loss over the whole batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Batches
from atoll.replica.data_parallel import DataParallelDevices
from atoll.replica.flat_parameters import TrainableWeights
from atoll.replica.micro_batches import batch_length, split_batch, to_device, two_examples

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """What a replica computes gradients with.

    Attributes:
        weights: of its module, to whose gradients passes add.
        batches: know how many tokens a piece has.
        loss: which may be compiled.
        plain_loss: the same as the workload has it.
        device: of the module.
        helpers: further devices, each of which computes a share of every batch.
        autocast: run forward passes in bfloat16 (CUDA only).
    """

    weights: TrainableWeights
    batches: Batches
    loss: Loss
    plain_loss: Loss
    device: str
    helpers: DataParallelDevices | None
    autocast: bool

    def backward(self, batch: Any, weight: float, *, micro_batches: int, in_turn: bool) -> Tensor:
        """Adds the gradient of the mean loss over the batch, times `weight`, to the module's; returns that loss, on the device.

        A piece counts for as many tokens as it has: examples may be padded.

        Args:
            batch: all of it.
            weight: of its gradient.
            micro_batches: into how many pieces each device's share is cut.
            in_turn: one device after the other, because modules draw from one source of random numbers.
        """
        pieces = self._pieces(batch, micro_batches)
        compute = partial(self._pass, weight=weight, loss=self.loss)
        if self.helpers is None:
            total = compute(self.weights.module, self.device, pieces)
        else:
            parts = [pieces[at : at + micro_batches] for at in range(0, len(pieces), micro_batches)]
            total = self.helpers.backward(self.weights, self.device, parts, compute, in_turn=in_turn)
        assert total is not None
        return total

    def try_a_few(self) -> None:
        """A pass, on this device alone, of which nothing comes. With the plain loss: what a compiler makes of it draws as often. Of
        a few examples: a plain pass over a whole batch may need more memory than all that is computed later."""
        self.weights.collect(None)
        few = [(two_examples(self.batches.batch(0, 0)), 1.0)]
        self._pass(self.weights.module, self.device, few, weight=1.0, loss=self.plain_loss)
        self.weights.collected()

    def precision(self) -> AbstractContextManager[Any]:
        """In which forward passes run."""
        on_cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if self.autocast and on_cuda else nullcontext()

    def _pieces(self, batch: Any, micro_batches: int) -> list[tuple[Any, float | None]]:
        """The batch in pieces for all devices, and each one's share of its mean loss; none for what cannot be learnt from."""
        devices = 1 if self.helpers is None else 1 + len(self.helpers.devices)
        pieces = list(split_batch(batch, micro_batches * devices))
        size = sum(batch_length(piece) for piece in pieces)
        if size < len(pieces):
            raise ConfigError(
                f"a batch, or piece of one, holds {size} examples and is to be cut into {len(pieces)}: each needs at least one. "
                f"Use larger batches, or fewer pieces (train.micro_batches, algorithm.pieces_per_half, --devices)."
            )
        tokens = [self.batches.tokens(piece) for piece in pieces] if len(pieces) > 1 else [1]
        some = sum(tokens)
        return [(piece, None if some and not own else own / (some or 1)) for piece, own in zip(pieces, tokens, strict=True)]

    def _pass(
        self, module: nn.Module, device: str, pieces: Sequence[tuple[Any, float | None]], *, weight: float, loss: Loss
    ) -> Tensor | None:
        """Backwards over pieces of a batch; their share of the loss, if they have any."""
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
    """What a step does besides: draw from torch's global generators, as dropout does; change something in the module that is no
    parameter, as BatchNorm does."""

    draws_randomness: bool
    changes_buffers: bool


def probe_module(module: nn.Module, device: str, step: Callable[[], object]) -> ModuleTraits:
    """Takes a step of this module on this device, and leaves no trace of it."""
    on_cuda = device.startswith("cuda")
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        before = _generators(on_cuda)
        step()
        draws = not all(torch.equal(one, two) for one, two in zip(before, _generators(on_cuda), strict=True))
    changes = False
    for name, buffer in module.named_buffers():
        changes = changes or not torch.equal(buffer, buffers[name])
        buffer.copy_(buffers[name])
    return ModuleTraits(draws, changes)


def _generators(on_cuda: bool) -> list[Tensor]:
    """The states of those that everybody draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]
