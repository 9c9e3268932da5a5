"""How a hub begins: from the newest checkpoint and the log as far as that knows it, or with the weights that the run began with."""

from __future__ import annotations

import time
from typing import NamedTuple

from atoll.core.events import HubRestarted, Saved
from atoll.core.protocols import Sink
from atoll.engines.ray.hub_checkpoints import restored
from atoll.engines.ray.hub_spec import HubOrder
from atoll.engines.ray.hub_state import Desk
from atoll.engines.ray.outbox import Tidings
from atoll.engines.ray.storage import Kept, Log, Lost
from atoll.engines.wall_clock import WallClock
from atoll.runs.cluster import draw


class Opened(NamedTuple):
    """What a hub begins with.

    Attributes:
        desk: as it stands.
        tidings: to be told.
        log: of the run.
        clock: of the run.
        started: whether the run's clock has begun to count.
        gathering: whether those who come first wait for the others.
    """

    desk: Desk
    tidings: Tidings
    log: Log
    clock: WallClock
    started: bool
    gathering: bool


def opened(order: HubOrder, epoch: int) -> Opened:
    """Go on from the newest checkpoint; without one, begin."""
    keeper, kept = order.keeper, order.keeper.newest()
    after = order.begin_bytes if kept is None else int(kept.metadata["events_bytes"])
    same = kept is not None and kept.metadata["session"] == order.session
    lost = keeper.lost(after)
    if not same:  # what was lost before this session was cut off when that began
        lost = Lost(lost.rounds + order.lost.rounds, lost.local_updates + order.lost.local_updates)
    log, clock = keeper.log(after), WallClock()
    tidings = Tidings(log)
    desk = _desk(order, epoch, tidings)
    if kept is not None:
        now_s = restored(desk, kept.load)
        # The log was cut where this checkpoint was begun, so before the line that says it is there. Who drives has heard of it.
        log.emit(Saved(round=desk.accounting.totals.round, name=kept.name))
        # The machine's clock goes on while a hub is away, and this run with it; a run that rests until somebody goes on does not.
        clock.set(max(now_s, time.monotonic() - float(kept.metadata["zero_s"])) if same else now_s)
    if lost.rounds or same:
        _tell_of_restart(order, kept, lost, desk, tidings, clock.now_s())
    if not same:  # nobody is left of those who were there
        for number in list(desk.seats):
            desk.go(number, clock.now_s())
    if desk.done or not desk.accounting.totals.metrics:
        desk.ask_to_judge(0.0 if kept is None else clock.now_s())
    return Opened(desk, tidings, log, clock, kept is not None, not desk.seats)


def _desk(order: HubOrder, epoch: int, sink: Sink) -> Desk:
    return Desk(
        algorithm=order.algorithm,
        plan=order.plan,
        params=order.keeper.begin(),
        examples=order.examples,
        updates=order.updates,
        draw=lambda round: draw(order.seed, "shard", round),
        islands=order.islands,
        places=order.places,
        evaluate_every=order.evaluate_every,
        epoch=epoch,
        sink=sink,
        speeds=order.speeds,
        devices=order.devices,
    )


def _tell_of_restart(order: HubOrder, kept: Kept | None, lost: Lost, desk: Desk, sink: Sink, now_s: float) -> None:
    sink.emit(
        HubRestarted(
            checkpoint=None if kept is None else kept.name,
            round=desk.accounting.totals.round,
            lost_rounds=lost.rounds,
            lost_local_updates=lost.local_updates,
            virtual_time_s=None,
            wall_time_s=now_s,
        )
    )
    where = "no checkpoint yet: it begins again with the weights that the run began with"
    if kept is not None:
        where = f"it goes on from checkpoint {kept.name}"
    order.keeper.say(f"a hub was here before; {where}; {lost.rounds} rounds that were taken since are lost")
