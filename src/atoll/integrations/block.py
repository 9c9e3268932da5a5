"""The block of `atoll.islands`, opened and closed by a trainer's callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm
from atoll.loop.islands import Islands, islands
from atoll.loop.optimizer import counted


class Block:
    """Islands around a trainer's loop.

    Args:
        trainer: its name, for messages.
        algorithm: counts the steps of the trainer's own optimizer.
        limit_s: as in `atoll.islands`, and so are the others.
        finish: see there.
        examples: see there.
    """

    def __init__(
        self,
        trainer: str,
        algorithm: Algorithm[Any],
        *,
        limit_s: float | None,
        finish: Literal["together", "alone"],
        examples: int | None,
    ) -> None:
        if hasattr(algorithm, "optimizer"):
            name = type(algorithm).__name__
            raise ConfigError(
                f"{name} steps by itself, and {trainer} has an optimizer of its own. Use DiLoCo here, or {name} in your own loop."
            )
        self._trainer, self._algorithm = trainer, algorithm
        self._limit_s, self._finish, self._examples = limit_s, finish, examples
        self._saved: Mapping[str, Any] | None = None
        self.islands: Islands | None = None
        """What `atoll.islands` gives, once training has begun."""
        self._open = False

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from this when training begins."""
        self._saved = saved

    def open(self, model: nn.Module, optimizer: torch.optim.Optimizer, processes: int) -> None:
        """Training begins."""
        if processes > 1:
            raise ConfigError(
                f"{self._trainer} trains in {processes} processes together, which talk after every step. Call alone() first, and "
                f"let it have one device: each process is then an island."
            )
        self.close(ConfigError("training began anew before it was over"))
        steps = counted(optimizer)
        self.islands = islands(model, steps, self._algorithm, limit_s=self._limit_s, finish=self._finish, examples=self._examples)
        if self._saved is not None:
            self.islands.load_state_dict(self._saved)
            self._saved = None
        self.islands.__enter__()
        self._open = True

    def close(self, error: BaseException | None = None) -> None:
        """Training is over, or broken off by an error."""
        if self._open and self.islands is not None:
            self._open = False
            self.islands.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold; nothing while there is no training."""
        return self.islands.state_dict() if self._open and self.islands is not None else {}
