"""Small workloads that train in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RegressionBatches:
    """Noisy points of a plane, in shards. `full_batch` gives each shard's examples at once, whatever the position."""

    num_shards: int = 4
    shard_examples: int = 32
    batch_size: int = 8
    dimensions: int = 5
    full_batch: bool = False
    seed: int = 0

    @cached_property
    def _points(self) -> Examples:
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.num_shards, self.shard_examples, self.dimensions, generator=generator)
        plane = torch.linspace(-1, 1, self.dimensions)
        noise = 0.1 * torch.randn(self.num_shards, self.shard_examples, generator=generator)
        return inputs, inputs @ plane + 0.5 + noise

    def examples(self, shard: int) -> int:
        return self.shard_examples

    def batch(self, shard: int, position: int) -> Examples:
        inputs, targets = self._points
        if self.full_batch:
            return inputs[shard], targets[shard]
        chosen = (torch.arange(self.batch_size) + position * self.batch_size) % self.shard_examples
        return inputs[shard][chosen], targets[shard][chosen]

    def tokens(self, batch: Examples) -> int:
        return len(batch[0])

    def all_examples(self) -> Examples:
        inputs, targets = self._points
        return inputs.flatten(0, 1), targets.flatten()


@dataclass(frozen=True)
class Regression:
    """A linear model, or one with a hidden layer, on `RegressionBatches`; with dropout if asked."""

    batches: RegressionBatches = RegressionBatches()
    hidden: int = 0
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def module(self) -> nn.Module:
        generator = torch.Generator().manual_seed(1)
        size = self.batches.dimensions
        layers: list[nn.Module] = [nn.Linear(size, self.hidden or 1)]
        if self.hidden:
            layers += [nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.hidden, 1)]
        module = nn.Sequential(*layers).to(self.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=self.dtype) / size**0.5)
        return module

    def loss(self, module: nn.Module, batch: Examples) -> Tensor:
        inputs, targets = batch
        error: Tensor = module(inputs.to(self.dtype)).squeeze(1) - targets.to(self.dtype)
        return error.square().mean()

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(module, self.batches.all_examples()))}
