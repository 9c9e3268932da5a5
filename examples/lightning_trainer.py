"""Lightning's Trainer on islands: one call at the top and one callback. Needs `pip install -e ".[lightning]"`.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py

Each process is an island. It fits a line to its half of noisy points with its own Trainer. The islands average every 10 steps.
"""

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.integrations.lightning import IslandsCallback, alone


class LinearRegression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


rank, size = alone()  # before the Trainer, which would set up data-parallel training over torchrun's processes
random = torch.Generator().manual_seed(0)
inputs = torch.rand(512, 1, generator=random)
targets = 3 * inputs - 1 + 0.1 * torch.randn(512, 1, generator=random)
shard = TensorDataset(inputs[rank::size], targets[rank::size])

callback = IslandsCallback(atoll.DiLoCo(inner_steps=10))
trainer = lightning.Trainer(
    max_epochs=8,
    devices=1,
    accelerator="auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[callback],
)
module = LinearRegression()
trainer.fit(module, DataLoader(shard, batch_size=8))

islands = callback.islands
slope, offset = module.net.weight.item(), module.net.bias.item()
print(f"island {islands.rank} of {islands.size}: y = {slope:.4f} x + {offset:.4f} after {islands.rounds} rounds", flush=True)
