"""What a hub is made of, and what it tells whoever drives its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.core.events import Evaluated, Event
from atoll.core.layout import Layout
from atoll.core.protocols import AsyncAlgorithm, Plan
from atoll.engines.ray.storage import Keeper, Lost


@dataclass(frozen=True, kw_only=True)
class HubOrder:
    """What a hub is made of.

    Attributes:
        algorithm: whose hub it is.
        plan: how workers are sent off.
        layout: of the weights.
        dtype: of the weights.
        examples: of each shard.
        updates: local updates of the run.
        seed: of what is drawn.
        islands: how many these local updates were planned for.
        workers: how many the first wait for.
        places: how many there are at most.
        speeds: in steps per second, by place, where they are given.
        evaluate_every: local updates between evaluations.
        save_every_s: seconds between checkpoints.
        begin_bytes: of the log, when the run begins.
        lost: what the log had that no checkpoint knew of, when this session began.
        session: names the process that drives the run: another goes on where the run was saved.
        keeper: of log and checkpoints.
        fingerprint: of the data.
        threads: of torch.
        warm_start_tokens: for the figures.
        devices: of each worker.
    """

    algorithm: AsyncAlgorithm[Any]
    plan: Plan
    layout: Layout
    dtype: str
    examples: tuple[int, ...]
    updates: int
    seed: int
    islands: int
    workers: int
    places: int
    speeds: tuple[float, ...]
    evaluate_every: int
    save_every_s: float
    begin_bytes: int
    lost: Lost
    session: str
    keeper: Keeper
    fingerprint: str
    threads: int
    warm_start_tokens: int
    devices: int = 1


class ToJudge(NamedTuple):
    """What whoever judges is given: the evaluation without its figures, a reference to the weights, and buffers."""

    number: int
    due: Evaluated
    weights: tuple[Any, ...]
    buffers: Mapping[str, Any]


class News(NamedTuple):
    """What happened at a hub.

    Attributes:
        epoch: which hub it is.
        events: since the last time it was asked.
        heard: how many events it has told of, these included.
        to_judge: what is to be judged, and was not handed out before.
        local_updates: that have arrived.
        seats: who is there, by place: its life, and whether it has brought anything.
        silent: since how many seconds a worker is out, of those who should have been back long ago.
        done: whether the run has its local updates.
        judged: whether all is judged that was to be.
        error: what the run ends with, if it ends so.
    """

    epoch: int
    events: list[Event]
    heard: int
    to_judge: list[ToJudge]
    local_updates: int
    seats: dict[int, tuple[int, bool]]
    silent: dict[int, float]
    done: bool
    judged: bool
    error: Exception | None
