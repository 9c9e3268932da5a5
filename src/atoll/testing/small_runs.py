"""A run that takes a fraction of a second: settings over any text recipe, for tests of what is around the training."""

from __future__ import annotations

SMALL = (
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.head_size=8",
    "data.limit_bytes=60000",
    "data.seq_len=16",
    "data.eval_batches=2",
    "train.batch_size=4",
    "optimizer.lr.warmup=2",
)
"""Give `train.steps` and `train.warm_start_steps` besides."""
