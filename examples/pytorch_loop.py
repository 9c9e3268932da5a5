"""Your own PyTorch loop on islands: one `with` around it.

    torchrun --nproc-per-node 2 examples/pytorch_loop.py

Each process is an island and sees its own stretch of two spirals. With DiLoCo your optimizer steps and the islands average every 20
steps. With ACCO the algorithm steps: every island holds a slice of the optimizer's state, and gradients are sent while you compute.
On several machines add --trusted-network, if you trust the network between them: docs/security.md says what that means.
"""

import sys

import torch
from torch import Tensor, nn

import atoll


def spirals(island: int, islands: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on this island's stretch, and the spiral that each point lies on."""
    random = torch.Generator().manual_seed(seed)
    along = (island + torch.rand(128, generator=random)) / islands
    arm = torch.randint(2, (128,), generator=random)
    angle, radius = 4 * along + torch.pi * arm, 0.6 + 3 * along + 0.05 * torch.randn(128, generator=random)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def report(name: str, model: nn.Module, islands: atoll.Islands) -> None:
    points, arms = spirals(0, 1, seed=10**6)  # the whole spirals
    correct = (model(points).argmax(dim=1) == arms).float().mean()
    if islands.is_first:
        sent = f"{islands.rounds} rounds, {islands.sent_bytes / 1e6:.1f} MB sent"
        print(f"{name} on {islands.size} islands: {islands.steps} steps, {sent}, {correct:.0%} correct", flush=True)


trusted = "--trusted-network" in sys.argv
model = classifier()  # initial weights differ per process; on entry every island loads island 0's
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=20), trusted_network=trusted) as islands:
    for step in range(300 + 10 * islands.rank):  # islands may have different numbers of batches
        points, arms = spirals(islands.rank, islands.size, seed=step)
        nn.functional.cross_entropy(model(points), arms).backward()
        optimizer.step()
        optimizer.zero_grad()
report("DiLoCo", model, islands)

model = classifier()
with atoll.islands(model, None, atoll.ACCO(optimizer=atoll.AdamW(lr=0.01)), trusted_network=trusted) as islands:
    for step in range(600):
        points, arms = spirals(islands.rank, islands.size, seed=step)
        nn.functional.cross_entropy(model(points), arms).backward()
        islands.step()
report("ACCO", model, islands)
