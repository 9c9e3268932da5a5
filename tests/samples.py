"""Settings and events that several tests share."""

from __future__ import annotations

from typing import Any

from atoll.core.events import Arrived

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
"""Settings with which a text recipe takes a fraction of a second. Set `train.steps` and `train.warm_start_steps` besides."""


def arrived(**fields: Any) -> Arrived:
    """An event of an update that reaches a hub, with a default for each field. Without a time, it arrives when it is pushed.

    >>> arrived().time_s, arrived(virtual_time_s=2.5).time_s
    (1.0, 2.5)
    >>> arrived(virtual_time_s=2.5).wall_time_s is None
    True
    """
    defaults: dict[str, Any] = {"island": 0, "round": 0, "window": 0, "shard": 0, "steps": 4, "pushed_s": 1.0, "version": 1}
    defaults |= {"staleness": 0, "applied": True, "norm": 1.0, "sent_bytes": 4, "virtual_time_s": None, "wall_time_s": None}
    known = defaults | fields
    if known["virtual_time_s"] is None and known["wall_time_s"] is None:
        known["wall_time_s"] = known["pushed_s"]
    return Arrived(**known)
