"""Lightning: a callback that makes a Trainer an island. Start the script by torchrun.

    rank, size = atoll.integrations.lightning.alone()  # first in the script: each process is an island with its own Trainer
    trainer = lightning.Trainer(devices=1, callbacks=[IslandsCallback(atoll.DiLoCo(inner_steps=500))])
    trainer.fit(module, make_loader(rank, size))

Lightning's checkpoints contain the callback's state. Give each island its own folder. Checkpoints during training hold this
island's own weights, to resume from; after `fit`, `trainer.save_checkpoint` saves the agreed weights.
"""

from __future__ import annotations

from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require
from atoll.integrations.trainer_context import TrainerIslands, alone as alone

_Callback: Any = require("lightning.pytorch", extra="lightning", purpose="Lightning's callbacks").Callback


class LightningIslands(TrainerIslands, _Callback):  # type: ignore[misc]
    """Counts the steps of the module's one optimizer. Gradient accumulation and AMP are supported.

    Its arguments are an algorithm that counts the steps of an optimizer, such as DiLoCo, and `limit_s`, `finish`, `examples`
    and `trusted_network` of `atoll.islands`.
    """

    trainer = "Lightning"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers, and islands count the steps of one. Configure one, or use "
                f"atoll.islands in your own loop with the optimizer that steps last."
            )
        self._open(pl_module, trainer.optimizers[0], trainer.world_size)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def state_dict(self) -> dict[str, Any]:
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._loaded = state_dict


IslandsCallback = LightningIslands
"""The name by which users know it, as in `atoll.integrations.hf`."""
