"""An update that reaches a hub, for whoever tests what reads a log: of its many fields a test names those that it is about."""

from __future__ import annotations

from atoll.core.events import Arrived


def arrived(
    *,
    island: int = 0,
    round: int = 0,
    window: int = 0,
    shard: int = 0,
    steps: int = 4,
    pushed_s: float = 1.0,
    virtual_time_s: float | None = None,
    wall_time_s: float | None = None,
    version: int = 1,
    staleness: int = 0,
    applied: bool = True,
    norm: float = 1.0,
    sent_bytes: int = 4,
) -> Arrived:
    """The first update of the first worker, unless told otherwise.

    Where no time of arrival is given the clock is the real one, and the update is there as soon as it is sent.

    >>> arrived().time_s, arrived(virtual_time_s=2.5).time_s
    (1.0, 2.5)
    >>> arrived(virtual_time_s=2.5).wall_time_s is None
    True
    """
    if virtual_time_s is None and wall_time_s is None:
        wall_time_s = pushed_s
    return Arrived(
        island=island,
        round=round,
        window=window,
        shard=shard,
        steps=steps,
        pushed_s=pushed_s,
        virtual_time_s=virtual_time_s,
        wall_time_s=wall_time_s,
        version=version,
        staleness=staleness,
        applied=applied,
        norm=norm,
        sent_bytes=sent_bytes,
    )
