"""A decoder that trains on one small batch, so that weights take most of the memory and of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.models.gpt import GPT, Decoder


@dataclass(frozen=True)
class RepeatedBatch:
    """Returns one batch at every position, so that no step allocates a new one."""

    tokens_of_a_batch: Tensor
    num_shards: int = 1

    def examples(self, shard: int) -> int:
        return len(self.tokens_of_a_batch)

    def batch(self, shard: int, position: int) -> Tensor:
        return self.tokens_of_a_batch

    def tokens(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()


@dataclass(frozen=True)
class DecoderWorkload:
    """A decoder that reads small batches, so that its weights take most of the memory."""

    model: GPT
    batches: RepeatedBatch
    vocab_size: int = 2048
    seq_len: int = 8

    @staticmethod
    def of(model: GPT, *, vocab_size: int = 2048, seq_len: int = 8, device: str = "cpu") -> DecoderWorkload:
        """A workload of two random sequences."""
        tokens = torch.randint(vocab_size, (2, seq_len + 1), generator=torch.Generator().manual_seed(0))
        return DecoderWorkload(model, RepeatedBatch(tokens.to(device)), vocab_size, seq_len)

    def module(self) -> Decoder:
        return self.model.build(self.vocab_size, self.seq_len, seed=0)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, Decoder)
        return module.loss(batch)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(module, self.batches.tokens_of_a_batch))}
