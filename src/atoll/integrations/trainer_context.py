"""What the callbacks of both trainers share: one process per trainer, and a block of `atoll.islands` around its training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, Sink
from atoll.loop.context_manager import Islands, islands
from atoll.loop.rule_optimizer import unwrap_optimizer
from atoll.loop.settings import refuse_asynchronous
from atoll.loop.topology import RankAndSize, hidden_position, hide_torchrun, is_hidden, join


def alone(devices: int = 1) -> RankAndSize:
    """Hides torchrun's other processes from trainers that this process makes. The islands still find each other.

    Call it first in your script. It renames torchrun's environment variables, creates no process group that a library could see,
    and on a machine with several GPUs makes only those of the island visible.

    Args:
        devices: of an island. With several, consecutive processes of one machine are an island, and a trainer sees these alone: it
            trains data-parallel on them.

    Returns:
        This island's rank and the number of islands: shard your data by them. With several devices the trainer divides the
        island's shard further.
    """
    if is_hidden():
        if hidden_position().devices != devices:
            raise ConfigError(
                f"alone(devices={devices}) after alone(devices={hidden_position().devices}): the islands are made once. Call alone "
                f"once, or with the same number."
            )
        return join()
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("alone() hides the other processes, but torch.distributed is initialized. Call it first in your script.")
    if (local_rank := os.environ.get("LOCAL_RANK")) is not None:
        _show_own_gpus(int(local_rank), devices)
    hide_torchrun(devices)
    return join()


def _show_own_gpus(local_rank: int, devices: int) -> None:
    """Make only the GPUs of this island visible. CUDA's runtime reads the variable at its first call, and `is_available` is one;
    `device_count` asks the driver's NVML instead."""
    if (count := torch.cuda.device_count()) < 2:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus = _gpus(os.environ, count, local_rank, devices)
    if (seen := torch._C._cuda_getDeviceCount()) != devices:
        raise ConfigError(
            f"alone(devices={devices}) chose the GPUs {gpus} of {count}, but CUDA sees {seen}: a library used CUDA before, or this "
            f"machine has fewer GPUs than devices. Call alone() first in your script, before torch.cuda.is_available()."
        )


def _gpus(environment: Mapping[str, str], count: int, local_rank: int, devices: int) -> str:
    """The visible GPUs of the island of this local rank.

    >>> _gpus({}, 4, 2, 1), _gpus({}, 4, 3, 2)
    ('2', '2,3')
    >>> _gpus({"CUDA_VISIBLE_DEVICES": "4,7"}, 2, 3, 1)
    '7'
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(i) for i in range(count)]
    first = local_rank // devices * devices
    return ",".join(visible[number % len(visible)] for number in range(first, first + devices))


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
        average_buffers: bool = False,
        out: str | Path | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        refuse_asynchronous(algorithm)
        if hasattr(algorithm, "optimizer"):
            name = type(algorithm).__name__
            raise ConfigError(
                f"{name} steps by itself, but {self.trainer} has an optimizer. Use DiLoCo, or {name} in your own loop."
            )
        self._algorithm = algorithm
        self._arguments: dict[str, Any] = {"limit_s": limit_s, "finish": finish, "examples": examples}
        self._arguments |= {"trusted_network": trusted_network, "average_buffers": average_buffers, "out": out, "sinks": sinks}
        self._loaded: Mapping[str, Any] | None = None
        """The state to resume from when the block opens."""
        self._is_open = False
        self._evaluation = ExitStack()
        """While an evaluation has the agreed weights in the module, what loads the island's own again."""
        self._evaluates = False
        """Whether the module holds the agreed weights."""
        self._metrics: dict[str, float] = {}
        """Of the datasets on which the trainer has evaluated those."""
        self.islands: Islands | None = None
        """The object that `atoll.islands` returns; None before training."""

    def _open(self, model: nn.Module, optimizer: torch.optim.Optimizer, processes: int) -> None:
        devices = hidden_position().devices
        if processes != devices:
            raise ConfigError(
                f"{self.trainer} trains data-parallel in {processes} processes, and an island has {devices}. Call alone() first: "
                f"each process is then an island, whose trainer has one device. After alone(devices=N) it has N."
            )
        self._close(ConfigError("training was restarted before it had ended"))
        self.islands = islands(model, unwrap_optimizer(optimizer), self._algorithm, **self._arguments)
        if self._loaded is not None:
            self.islands.load_state_dict(self._loaded)
            self._loaded = None
        self.islands.__enter__()
        self._is_open = True

    def _begin_evaluation(self) -> None:
        """The trainer evaluates next, and may save what it evaluated: the module gets the agreed weights."""
        self._end_evaluation()
        if self._is_open and self.islands is not None:
            self._evaluation.enter_context(self.islands.agreed())
            self._evaluates = True

    def _evaluated(self, metrics: Mapping[str, float]) -> None:
        """The trainer has evaluated a dataset. Others may follow."""
        if not self._is_open:
            return
        if not self._evaluates:
            raise ConfigError(
                f"{self.trainer} evaluated this island's own weights in the middle of a round: a callback asked for it after "
                f"IslandsCallback had its turn. Give IslandsCallback last in callbacks=[...], and let the other set "
                f"control.should_evaluate."
            )
        self._metrics |= metrics

    def _end_evaluation(self) -> None:
        """The module gets the island's own weights again, to train on."""
        metrics, self._metrics, self._evaluates = self._metrics, {}, False
        self._evaluation.close()
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        if (losses or "loss" in metrics) and self.islands is not None:
            self.islands.log_evaluation({"loss": fmean(losses or [math.nan]), **metrics})

    def _finish(self) -> None:
        """The trainer takes no further step: what it evaluates and saves from now on are the agreed weights."""
        self._end_evaluation()
        if self._is_open and self.islands is not None:
            self.islands.finish()
            self._evaluates = True

    def _log(self, loss: float | None) -> None:
        if loss is not None and self._is_open and self.islands is not None:
            self.islands.log(loss)

    def _close(self, error: BaseException | None = None) -> None:
        try:
            self._end_evaluation()
        finally:  # the other islands wait for this one until it leaves
            if self._is_open and self.islands is not None:
                self._is_open = False
                self.islands.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def _state(self) -> dict[str, Any]:
        """For a checkpoint; empty outside of training."""
        return self.islands.state_dict() if self._is_open and self.islands is not None else {}
