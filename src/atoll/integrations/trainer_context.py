"""What the callbacks of both trainers share: one process per trainer, and a block of `atoll.islands` around its training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm
from atoll.loop.context_manager import Islands, islands
from atoll.loop.rule_optimizer import unwrap_optimizer
from atoll.loop.topology import RankAndSize, hide_torchrun


def alone() -> RankAndSize:
    """Hides torchrun's other processes from trainers that this process makes. The islands still find each other.

    Call it first in your script. It renames torchrun's environment variables, creates no process group that a library could see,
    and on a machine with several GPUs makes only the GPU of the local rank visible.

    Returns:
        This island's rank and the number of islands: shard your data by them.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("alone() hides the other processes, but torch.distributed is initialized. Call it first in your script.")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and torch.cuda.is_available() and torch.cuda.device_count() > 1:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError("alone() chooses one GPU for this process, but CUDA is initialized. Call it first in your script.")
        os.environ["CUDA_VISIBLE_DEVICES"] = _one_gpu(os.environ, torch.cuda.device_count(), int(local_rank))
    return hide_torchrun()


def _one_gpu(environment: Mapping[str, str], count: int, local_rank: int) -> str:
    """The visible GPU of this local rank.

    >>> _one_gpu({}, 4, 2)
    '2'
    >>> _one_gpu({"CUDA_VISIBLE_DEVICES": "4,7"}, 2, 3)
    '7'
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(i) for i in range(count)]
    return visible[local_rank % len(visible)]


class TrainerIslands:
    """What the callbacks of both trainers inherit: a block of `atoll.islands`, open from the begin of training to its end or an
    error in it. `atoll.islands` documents the arguments."""

    trainer: str
    """How errors name it."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        *,
        limit_s: float | None = None,
        finish: Literal["together", "alone"] = "together",
        examples: int | None = None,
        trusted_network: bool = False,
    ) -> None:
        if hasattr(algorithm, "optimizer"):
            name = type(algorithm).__name__
            raise ConfigError(
                f"{name} steps by itself, but {self.trainer} has an optimizer. Use DiLoCo, or {name} in your own loop."
            )
        self._algorithm = algorithm
        self._arguments = {"limit_s": limit_s, "finish": finish, "examples": examples, "trusted_network": trusted_network}
        self._loaded: Mapping[str, Any] | None = None
        """The state to resume from when the block opens."""
        self._is_open = False
        self.islands: Islands | None = None
        """The object that `atoll.islands` returns; None before training."""

    def _open(self, model: nn.Module, optimizer: torch.optim.Optimizer, processes: int) -> None:
        if processes > 1:
            raise ConfigError(
                f"{self.trainer} trains data-parallel in {processes} processes. Call alone() first and give it one device: each "
                f"process is then an island."
            )
        self._close(ConfigError("training was restarted before it had ended"))
        self.islands = islands(model, unwrap_optimizer(optimizer), self._algorithm, **self._arguments)  # type: ignore[arg-type]
        if self._loaded is not None:
            self.islands.load_state_dict(self._loaded)
            self._loaded = None
        self.islands.__enter__()
        self._is_open = True

    def _close(self, error: BaseException | None = None) -> None:
        if self._is_open and self.islands is not None:
            self._is_open = False
            self.islands.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def _state(self) -> dict[str, Any]:
        """For a checkpoint; empty outside of training."""
        return self.islands.state_dict() if self._is_open and self.islands is not None else {}
