"""Your own loop on islands that may die and come back: a function with one parameter. Needs `pip install -e ".[torchft]"`.

    python examples/elastic_loop.py
    atoll run demo-diloco --engine elastic --processes 3 --workload examples/elastic_loop.py:train --set train.warm_start_steps=0

Three processes learn which of two spirals a point lies on. A shard is a stretch of the spirals, and the run leases its batches to
the islands. Kill a process while the second command trains: it is started again, joins, and gets work.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import atoll

SHARDS = 3


def spirals(shard: int, shards: int, seed: int, device: Any) -> tuple[Tensor, Tensor]:
    """Points on the stretch of this shard, and the spiral that each point lies on."""
    random = torch.Generator().manual_seed(seed)
    along = (shard + torch.rand(128, generator=random)) / shards
    arm = torch.randint(2, (128,), generator=random)
    angle, radius = 4 * along + torch.pi * arm, 0.6 + 3 * along + 0.05 * torch.randn(128, generator=random)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).to(device), arm.to(device)


def evaluate(model: nn.Module) -> dict[str, float]:
    points, arms = spirals(0, 1, 10**6, next(model.parameters()).device)  # the whole spirals
    scores = model(points)
    correct = (scores.argmax(dim=1) == arms).float().mean()
    return {"loss": nn.functional.cross_entropy(scores, arms).item(), "correct": correct.item()}


def train(member: Any) -> None:
    torch.manual_seed(0)  # every process makes the same weights; one that joins a running run gets the run's
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(member.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with atoll.run_islands(member, model, optimizer, evaluate=evaluate) as islands:
        for shard, position in islands.batches():  # until the run is over
            points, arms = spirals(shard % SHARDS, SHARDS, position, member.device)
            loss = nn.functional.cross_entropy(model(points), arms)
            islands.log(loss.item(), tokens=len(points))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run = atoll.recipes.demo_diloco()
    run = replace(run, train=replace(run.train, steps=200, warm_start_steps=0), keep=replace(run.keep, evaluate_every=100))
    result = atoll.run(run, engine=atoll.Elastic(processes=SHARDS), workload=f"{__file__}:train")
    print(f"loss {result.val_loss:.3f} on the whole spirals after {result.summary.tokens:,} points; {result.folder}")
