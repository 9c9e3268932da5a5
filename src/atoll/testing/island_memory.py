"""What one island holds: it trains alone in the process, among echoes of itself, and every storage is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.flat_tree import forget_spare_buffers
from atoll.core.protocols import Algorithm
from atoll.engines.replicated_state import given
from atoll.models.gpt import GPT, Decoder
from atoll.optim.adam import AdamW
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.testing.echo_peers import EchoPeers, EchoReplica, take_turns
from atoll.testing.storage_tracker import Site, Storages


@dataclass(frozen=True)
class OneBatch:
    """The same few random tokens again and again; none of them are made anew."""

    tokens_of_a_batch: Tensor
    num_shards: int = 1

    def examples(self, shard: int) -> int:
        return len(self.tokens_of_a_batch)

    def batch(self, shard: int, position: int) -> Tensor:
        return self.tokens_of_a_batch

    def tokens(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()


@dataclass(frozen=True)
class SmallBatches:
    """A decoder whose weights take the memory: it reads two sequences of a few tokens at a time."""

    model: GPT
    batches: OneBatch
    vocab_size: int = 2048
    seq_len: int = 8

    @staticmethod
    def of(model: GPT, *, vocab_size: int = 2048, seq_len: int = 8, device: str = "cpu") -> SmallBatches:
        tokens = torch.randint(vocab_size, (2, seq_len + 1), generator=torch.Generator().manual_seed(0))
        return SmallBatches(model, OneBatch(tokens.to(device)), vocab_size, seq_len)

    def module(self) -> Decoder:
        return self.model.build(self.vocab_size, self.seq_len, seed=0)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, Decoder)
        return module.loss(batch)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(module, self.batches.tokens_of_a_batch))}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an island held at most over some rounds, in bytes.

    Attributes:
        params: trainable parameters.
        peak_bytes: of all live storages, but for what is apart.
        apart_bytes: batches, activations, and what else a forward and backward pass needs for itself.
        at_peak: what was alive then, by where it was made.
        passing: by place, what lived between two waits only, at most at a time.
        device_bytes: what the device's allocator had given out at most, all in all, for it; none on a CPU.
    """

    params: int
    peak_bytes: int
    apart_bytes: int
    at_peak: Mapping[Site, int]
    passing: Mapping[Site, int]
    device_bytes: int | None = None

    @property
    def per_param(self) -> float:
        return self.peak_bytes / self.params


def hold(
    algorithm: Algorithm[Any],
    workload: SmallBatches,
    *,
    size: int,
    rounds: int = 3,
    inner: InnerRule | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str = "cpu",
    may_fail: bool = False,
) -> Held:
    """Rounds of one island of `size`. The first of them may only begin something: the peak is that of the others.

    Where rounds may fail, the State before a round stays until it is over. Else the round is given what it may take of it.
    """
    forget_spare_buffers()
    before_bytes = _allocated(device)
    storages = Storages()
    storages.set_apart(workload.batches.tokens_of_a_batch)
    with storages:
        loss = _forward_apart(workload, storages)
        replica = LocalReplica(workload, optimizer=inner or AdamW(), dtype=dtype, device=device, loss=loss)
        peers, params = EchoPeers(size), replica.weights.layout.numel
        state = _begun(algorithm, workload, replica, peers, dtype)
        for number in range(rounds):
            if number == 1:
                _forget_peaks(storages, device)
            before = state if may_fail else given(state)
            state = take_turns(algorithm.round(before, EchoReplica(replica), peers), peers, storages.wait)
    forget_spare_buffers()
    return Held(
        params=params,
        peak_bytes=storages.peak_bytes,
        apart_bytes=storages.apart_peak_bytes,
        at_peak=storages.at_peak,
        passing=storages.most_passing(),
        device_bytes=None if before_bytes is None else torch.cuda.max_memory_allocated() - before_bytes,
    )


def _begun(algorithm: Algorithm[Any], workload: SmallBatches, replica: LocalReplica, peers: EchoPeers, dtype: Any) -> Any:
    """The first State, of weights that nobody else holds."""
    params = initial_weights(workload, replica.device, dtype)
    replica.load(params)
    return algorithm.init(params, peers)


def _allocated(device: str) -> int | None:
    """What a device's allocator has given out, its libraries' own room included; none on a CPU."""
    if not device.startswith("cuda"):
        return None
    some = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.autograd.grad((some @ some).sum(), some)  # on both of autograd's threads, which each have room of their own
    del some
    return torch.cuda.memory_allocated()


def _forget_peaks(storages: Storages, device: str) -> None:
    storages.forget_peak()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _forward_apart(workload: SmallBatches, storages: Storages) -> Loss:
    """The workload's loss; what its forward pass makes is counted apart, as is all that a backward pass makes."""

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        with storages.apart():
            return workload.loss(module, batch)

    return loss
