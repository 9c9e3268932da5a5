"""Your own PyTorch loop, on islands: one `with` around it.

    torchrun --nproc-per-node 2 examples/own_loop.py

Each process is an island and sees its own stretch of two spirals only. With DiLoCo your optimizer trains, and every 20 steps the
islands agree. With ACCO atoll owns the optimizer: each island keeps a slice of its state, and gradients travel while you compute.
"""

import torch
from torch import Tensor, nn

import atoll


def spirals(island: int, islands: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of an island's stretch, and which of the two spirals they lie on."""
    random = torch.Generator().manual_seed(seed)
    along = (island + torch.rand(128, generator=random)) / islands
    arm = torch.randint(2, (128,), generator=random)
    angle, radius = 4 * along + torch.pi * arm, 0.6 + 3 * along + 0.05 * torch.randn(128, generator=random)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def report(name: str, model: nn.Module, islands: atoll.Islands) -> None:
    points, arms = spirals(0, 1, seed=10**6)  # of the whole
    right = (model(points).argmax(dim=1) == arms).float().mean()
    if islands.is_first:
        sent = f"{islands.rounds} agreements, {islands.sent_bytes / 1e6:.1f} MB sent"
        print(f"{name} on {islands.size} islands: {islands.steps} steps, {sent}, {right:.0%} right", flush=True)


model = classifier()  # each process has other weights: on entry all take over the first one's
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=20)) as islands:
    for step in range(300 + 10 * islands.rank):  # islands need not have the same number of batches
        points, arms = spirals(islands.rank, islands.size, seed=step)
        nn.functional.cross_entropy(model(points), arms).backward()
        optimizer.step()
        optimizer.zero_grad()
report("DiLoCo", model, islands)

model = classifier()
with atoll.islands(model, None, atoll.ACCO(optimizer=atoll.AdamW(lr=0.01))) as islands:
    for step in range(600):
        points, arms = spirals(islands.rank, islands.size, seed=step)
        nn.functional.cross_entropy(model(points), arms).backward()
        islands.step()
report("ACCO", model, islands)
