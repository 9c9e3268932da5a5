"""What a hub decided, as events."""

from __future__ import annotations

from atoll.algorithms.async_hub import Applied, Refusal
from atoll.algorithms.async_scheduler import Closing, Dispatch, Return
from atoll.core.events import Arrived, Dispatched, Refused, Returned, WindowClosed


def dispatched(dispatch: Dispatch, begin_s: float, sent_bytes: int) -> Dispatched:
    return Dispatched(
        island=dispatch.worker,
        round=dispatch.round,
        version=dispatch.version,
        shard=dispatch.work.shard,
        start=dispatch.work.start,
        schedule=dispatch.work.schedule,
        steps=dispatch.steps,
        virtual_time_s=dispatch.time_s,
        begin_s=begin_s,
        sent_bytes=sent_bytes,
    )


def arrived(applied: Applied, pushed_s: float, sent_bytes: int) -> Arrived:
    dispatch = applied.dispatch
    return Arrived(
        island=dispatch.worker,
        round=dispatch.round,
        window=applied.window,
        shard=dispatch.work.shard,
        steps=dispatch.steps,
        pushed_s=pushed_s,
        virtual_time_s=applied.time_s,
        version=applied.version,
        staleness=applied.staleness,
        applied=applied.counted,
        norm=applied.norm,
        sent_bytes=sent_bytes,
    )


def closed(closing: Closing) -> WindowClosed:
    return WindowClosed(
        window=closing.window,
        islands=list(closing.workers),
        opened_s=closing.opened_s,
        virtual_time_s=closing.time_s,
        idle_s=list(closing.idle_s),
    )


def returned(back: Return) -> Returned:
    dispatch = back.dispatch
    return Returned(
        island=dispatch.worker,
        round=dispatch.round,
        shard=dispatch.work.shard,
        steps=dispatch.steps,
        virtual_time_s=back.time_s,
    )


def refused(refusal: Refusal) -> Refused:
    return Refused(island=refusal.worker, round=refusal.round, virtual_time_s=refusal.time_s, reason=refusal.reason)
