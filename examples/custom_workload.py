"""Train your own module on your own data with your own loss: a workload replaces the recipe's model and text.

A workload makes the module and its batches, and defines loss and evaluation. This one classifies points of two spirals. Each shard
holds one stretch of the spirals: one island alone cannot learn the rest, four islands together can.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import atoll


@dataclass(frozen=True)
class Spirals:
    """Batches by shard and position: the same two numbers give the same points on every island."""

    num_shards: int = 4

    def examples(self, shard: int) -> int:
        return 10_000

    def batch(self, shard: int, position: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1_000_003 * shard + position)
        along = (shard + torch.rand(64, generator=random)) / self.num_shards
        arm = torch.randint(2, (64,), generator=random)
        angle, radius = 4 * along + torch.pi * arm, 0.6 + 3 * along + 0.05 * torch.randn(64, generator=random)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm

    def tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])


class Classifier:
    batches = Spirals()

    def module(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # every call returns the same initial weights
            return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        held_out = [self.batches.batch(shard, 10**6) for shard in range(4)]
        correct = [module(points).argmax(dim=1) == arms for points, arms in held_out]
        losses = [self.loss(module, batch).item() for batch in held_out]
        return {"loss": sum(losses) / 4, "accuracy": torch.cat(correct).float().mean().item()}


run = replace(atoll.recipes.demo_diloco(), algorithm=atoll.DiLoCo(inner_steps=5), optimizer=atoll.AdamW(lr=0.01))
run = replace(run, train=atoll.Train(steps=200, batch_size=64), keep=atoll.Keep(evaluate_every=200, save_every=200))
for islands in (1, 4):
    run = replace(run, cluster=replace(run.cluster, islands=islands))
    result = atoll.run(run, workload=Classifier())
    print(f"{islands} of 4 islands: {Classifier().evaluate(result.module)['accuracy']:.0%} of held-out points correct")
