"""Replicas as a Run describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.protocols import Workload
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica, RoundStart
from atoll.runs.run import Run, device_of, dtype_of


def loss_of(run: Run, workload: Workload) -> Loss:
    """The workload's loss; with train.compile one compiled graph for all replicas."""
    return torch.compile(workload.loss) if run.train.compile else workload.loss


def replica_of(
    run: Run, workload: Workload, loss: Loss, island: int, device: str | None = None, more_devices: Sequence[str] = ()
) -> LocalReplica:
    """One island's model and inner optimizer on `device`, or on the run's. `more_devices` share its batches."""
    return LocalReplica(
        workload,
        optimizer=run.optimizer,
        clip_norm=run.train.clip_norm,
        micro_batches=run.train.micro_batches,
        devices=(device or device_of(run), *more_devices),
        autocast=run.train.precision == "bf16",
        dtype=dtype_of(run),
        loss=loss,
        seed=seed_of(run, island),
        round_start=RoundStart(run.train.fresh_optimizer, run.train.peak_first),
    )


def seed_of(run: Run, number: int) -> int:
    """The seed of the random numbers that one island, or one device of an island, draws while it computes."""
    return run.seed * 100_003 + number
