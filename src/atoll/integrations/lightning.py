"""Lightning: a callback that makes a Trainer an island. Start the script by torchrun.

    rank, size = atoll.integrations.lightning.alone()  # first in the script: each process is an island with its own Trainer
    trainer = lightning.Trainer(devices=1, callbacks=[IslandsCallback(atoll.DiLoCo(inner_steps=500))])
    trainer.fit(module, make_loader(rank, size))

After `alone(devices=N)` every N processes are an island, on which `Trainer(devices=N, strategy="ddp")` trains data-parallel.

Lightning's checkpoints contain the callback's state. Give each island its own folder, for its loggers and checkpoints. Validations
are of the last agreed weights, and a checkpoint right after one holds what was validated, such as that of
ModelCheckpoint(monitor="val_loss"). Other checkpoints hold this island's own weights. Training resumes from both. Those after
the last step, and `trainer.save_checkpoint` after `fit`, hold the agreed weights. Island 0 shows the progress.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.optional_imports import require
from atoll.integrations import trainer_context
from atoll.integrations.trainer_context import TrainerIslands
from atoll.loop.topology import RankAndSize, hidden_position

_Callback: Any = require("lightning.pytorch", extra="lightning", purpose="Lightning's callbacks").Callback

_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def alone(devices: int = 1) -> RankAndSize:
    """Hides torchrun's other processes; see the `alone` of `atoll.integrations.trainer_context`. Lightning, which has read
    torchrun's variables when it was imported, logs in the first process of every island, and only island 0 says on the terminal
    what it does."""
    joined = trainer_context.alone(devices)
    rank_zero = require("lightning.fabric.utilities.rank_zero", extra="lightning", purpose="Lightning's callbacks")
    rank_zero.rank_zero_only.rank = hidden_position().device
    if joined.rank:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return joined


class LightningIslands(TrainerIslands, _Callback):  # type: ignore[misc]
    """Counts the steps of the module's one optimizer. Gradient accumulation and AMP are supported.

    With several devices, the state in a checkpoint is that of all of them, which the first one gathers.

    Its arguments are an algorithm that counts the steps of an optimizer, such as DiLoCo, and `limit_s`, `finish`, `examples`,
    `trusted_network`, `average_buffers`, `out` and `sinks` of `atoll.islands`.
    """

    trainer = "Lightning"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if hidden_position().island and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers, and islands count the steps of one. Configure one, or use "
                f"atoll.islands in your own loop with the optimizer that steps last."
            )
        for callback in trainer.callbacks:
            if (name := type(callback).__name__) in _AVERAGING:
                raise ConfigError(
                    f"{name} would average weights of one island in the middle of its rounds, and put another average into each "
                    f"island's model at the end. Leave it out: the agreed weights are the mean of all islands."
                )
        if trainer.world_size > 1 and not isinstance(trainer.model, DistributedDataParallel):
            raise ConfigError(
                f"{type(trainer.strategy).__name__} with {trainer.world_size} devices: each device of an island holds the whole "
                f'module. Give Trainer(strategy="ddp"), or use atoll.islands with a mesh in your own loop.'
            )
        self._open(pl_module, trainer.optimizers[0], trainer.world_size)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._arguments["out"] is not None or self._arguments["sinks"]:  # reading a loss waits for a GPU
            self._log(None if loss is None else float(loss))
        steps, epochs = trainer.max_steps, trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        if 0 <= steps <= trainer.global_step or (trainer.is_last_batch and last_epoch):
            self._finish()  # validations and checkpoints follow

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        self._evaluated({} if loss is None else {"loss": float(loss)})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._end_evaluation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def state_dict(self) -> dict[str, Any]:
        """Lightning calls it in every process, and writes what the first process of the island returns."""
        if not self._is_open or self.islands is None:
            return {}
        try:
            return {"devices": self.islands.state_dicts()}
        except ExchangeFailed as error:
            raise ExchangeFailed(
                f"{error} A checkpoint has the states of all devices of an island: call trainer.save_checkpoint in each of its "
                f"processes, not in the first alone."
            ) from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict.get("devices") or [state_dict]  # an older version saved the state of an island's one device
        self._loaded = states[hidden_position().device % len(states)]


IslandsCallback = LightningIslands
"""The name by which users know it, as in `atoll.integrations.hf`."""
