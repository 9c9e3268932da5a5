"""Lightning: a callback that makes a Trainer one of several islands.

    rank, size = atoll.integrations.lightning.alone()  # first: each process is an island, and trains by itself
    trainer = lightning.Trainer(devices=1, callbacks=[IslandsCallback(atoll.DiLoCo(inner_steps=500))])
    trainer.fit(module, loader_of(rank, size))

Start it by torchrun. Its state is in Lightning's checkpoints: each island keeps its own, so give each a folder of its own. They are
for going on, and the last is written before the last agreement: after `fit`, `trainer.save_checkpoint` saves what all agreed on.
"""

from __future__ import annotations

from typing import Any, Literal

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require
from atoll.core.protocols import Algorithm
from atoll.integrations.alone import alone as alone
from atoll.integrations.block import Block
from atoll.loop.islands import Islands

_Callback: Any = require("lightning.pytorch", extra="lightning", purpose="Lightning's callbacks").Callback


class IslandsCallback(_Callback):  # type: ignore[misc]
    """Islands agree every so many steps of the module's optimizer. Use one optimizer; gradient accumulation and AMP are fine.

    Args:
        algorithm: what the islands do, such as DiLoCo: one that counts the steps of an optimizer.
        limit_s: as in `atoll.islands`.
        finish: see there.
        examples: see there.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        *,
        limit_s: float | None = None,
        finish: Literal["together", "alone"] = "together",
        examples: int | None = None,
    ) -> None:
        self._block = Block("Lightning", algorithm, limit_s=limit_s, finish=finish, examples=examples)

    @property
    def islands(self) -> Islands | None:
        """What `atoll.islands` gives, once training has begun."""
        return self._block.islands

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers, and islands count the steps of one. Configure one, or use "
                f"atoll.islands in a loop of your own, with the one that steps last."
            )
        self._block.open(pl_module, trainer.optimizers[0], trainer.world_size)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._block.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._block.close(exception)

    def state_dict(self) -> dict[str, Any]:
        return self._block.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._block.load(state_dict)
