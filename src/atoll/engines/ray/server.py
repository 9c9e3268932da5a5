"""The hub's process: the desk behind a lock, with a clock, the object store and the run's keeper. It is an actor of Ray's.

Whatever is asked of it comes in threads of its own. A push is there, in the machine's memory, before it takes its turn at the desk,
so the next one is received while this one is applied. Weights are published when somebody asks for them, once each. Two threads of
the hub's own keep time: one closes windows that have run out, one writes checkpoints of a copy, beside the desk.

When its process dies Ray starts another, which goes on from the newest checkpoint and cuts the log to what that knows. It says so,
in the log and on the console, with what was lost; without a checkpoint it begins again with the weights that the run began with.
"""

from __future__ import annotations

import copy
import math
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from atoll.engines.dist.clock import WallClock
from atoll.engines.ray.desk import Desk
from atoll.engines.ray.keeping import Kept, Log
from atoll.engines.ray.load import Load
from atoll.engines.ray.orders import HubOrder, News
from atoll.engines.ray.publishing import Publisher
from atoll.engines.ray.tidings import Tidings
from atoll.engines.ray.wire import (
    Bits,
    Brought,
    Ticket,
    Told,
    Verdict,
    Word,
    arrays_of,
    dtype_name,
    expect_read_only,
    tree_over,
)
from atoll.engines.sim.world import draw
from atoll.errors import AtollError
from atoll.events import Event, HubRestarted, RunFinished, Saved
from atoll.tree import Tree

_ANSWER_S = 5.0  # so long a question waits for something to tell before it is answered with nothing
_LOAD_EVERY_S = 10.0
_GATHER_S = 60.0  # so long the first workers wait for the others


class HubServer:
    """The hub's process.

    Args:
        order: what it is made of.
        put: puts bits into the object store, and gives a reference.
    """

    def __init__(self, order: HubOrder, put: Callable[[Bits], Any]) -> None:
        torch.set_num_threads(order.threads)
        expect_read_only()
        self._order = order
        self._epoch = secrets.randbits(48)
        self._clock, self._load = WallClock(), Load()
        self._changed = threading.Condition()
        self._publisher, self._tidings = Publisher(put), Tidings()
        self._saving = threading.Lock()
        self._hellos: dict[int, int] = {}
        self._first_hello_s = math.inf
        self._error: Exception | None = None
        self._finished: RunFinished | None = None
        self._log: Log | None = None
        self._desk = self._make_desk(order.keeper.begin())
        order.keeper.say(f"hub on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        self._gathering = True
        self._started = False
        self._try(self._open)
        self._saved: Any = self._state_of_affairs()
        for work in (self._keep_time, self._keep_saving):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _make_desk(self, params: Tree) -> Desk:
        order = self._order
        return Desk(
            algorithm=order.algorithm,
            plan=order.plan,
            params=params,
            examples=order.examples,
            updates=order.updates,
            draw=lambda round: draw(order.seed, "shard", round),
            places=order.places,
            evaluate_every=order.evaluate_every,
            epoch=self._epoch,
            sink=self,
            speeds=order.speeds,
        )

    def emit(self, event: Event) -> None:
        """Takes an event: for the log, and for whoever asks for news."""
        assert self._log is not None
        self._log.emit(event)
        self._tidings.tell(event)

    # ------------------------------------------------------------------------------------------------------- the beginning

    def _open(self) -> None:
        """Go on from the newest checkpoint; without one, begin."""
        order, kept = self._order, self._order.keeper.newest()
        after = order.begin_bytes if kept is None else int(kept.metadata["events_bytes"])
        same = kept is not None and kept.metadata["session"] == order.session
        lost = order.keeper.lost(after)
        self._log = order.keeper.log(after)
        if kept is not None:
            self._restore(kept, same=same)
        if lost.rounds or same:
            self._tell_of_restart(kept, lost.rounds, lost.local_updates)
        if kept is not None and not same:  # nobody is left of those who were there
            for number in list(self._desk.seats):
                self._desk.go(number, self._clock.now_s())
        if self._desk.done or not self._desk.books.totals.metrics:
            self._desk.ask_to_judge(self._clock.now_s() if self._started else 0.0)
            self._publish_to_judge()

    def _restore(self, kept: Kept, *, same: bool) -> None:
        now_s = self._desk.restore(kept.load)
        # The machine's clock goes on while a hub is away, and this run with it; a run that rests until somebody goes on does not.
        self._clock.set(max(now_s, time.monotonic() - float(kept.metadata["zero_s"])) if same else now_s)
        self._started = True
        self._gathering = not (same and self._desk.seats)

    def _tell_of_restart(self, kept: Kept | None, rounds: int, local_updates: int) -> None:
        event = HubRestarted(
            checkpoint=None if kept is None else kept.name,
            round=self._desk.books.totals.round,
            lost_rounds=rounds,
            lost_local_updates=local_updates,
            virtual_time_s=None,
            wall_time_s=self._clock.now_s(),
        )
        self.emit(event)
        where = "no checkpoint yet: it begins again with the weights that the run began with"
        if kept is not None:
            where = f"it goes on from checkpoint {kept.name}"
        self._order.keeper.say(f"a hub was here before; {where}; {rounds} rounds that were taken since are lost")

    def hello(self, number: int, life: int, fingerprint: str, about: str) -> str:
        """A worker introduces itself; what is wrong with it, if it is refused."""
        if fingerprint != self._order.fingerprint:
            return (
                f"worker {number} ({about}) reads other data than the run: fingerprint {fingerprint}, not "
                f"{self._order.fingerprint}. Give every machine the same files, or `atoll data prepare` once and copy the folder."
            )
        with self._changed:
            self._order.keeper.say(f"worker {number}, life {life}: {about}")
            seat = self._desk.seats.get(number)
            if seat is not None and seat.life >= life:
                return ""  # it is here, or will be told otherwise when it pulls
            self._hellos[number] = max(life, self._hellos.get(number, -1))
            self._first_hello_s = min(self._first_hello_s, time.monotonic())
            self._try(self._gather)
            self._changed.notify_all()
        return ""

    def _gather(self) -> None:
        """Whoever waits takes its place: at once, or in the beginning when all are there, or have had their time."""
        late = time.monotonic() - self._first_hello_s > _GATHER_S
        if self._desk.done or not self._hellos or (self._gathering and len(self._hellos) < self._order.workers and not late):
            return
        if not self._started:
            self._clock.set(0.0)
            self._started = True
            self._write(*self._snapshot())  # so that there is always something to go on from
        self._gathering = False
        hellos, self._hellos = self._hellos, {}
        self._first_hello_s = math.inf
        self._desk.come(hellos, self._clock.now_s())

    def census(self, lives: Mapping[int, int]) -> None:
        """Who is there according to whoever starts workers. A hub that goes on from a checkpoint may believe in others."""
        with self._changed:
            for number, seat in list(self._desk.seats.items()):
                if lives.get(number) != seat.life:
                    self._try(partial(self._go, number))
            self._changed.notify_all()

    def left(self, number: int, life: int) -> None:
        """A worker has died."""
        with self._changed:
            if self._hellos.get(number) == life:
                del self._hellos[number]
            seat = self._desk.seats.get(number)
            if seat is not None and seat.life == life and not self._desk.done:
                self._try(partial(self._go, number))
            self._changed.notify_all()

    def _go(self, number: int) -> None:
        with self._publisher.lock:  # what it was sent off with may be on its way into the store
            self._desk.go(number, self._clock.now_s())

    # ------------------------------------------------------------------------------------------------------ pull and push

    def pull(self, number: int, life: int, last: Ticket | None) -> Told:
        """A worker asks for work. It waits here until there is some, or is told to ask again."""
        until_s = time.monotonic() + _ANSWER_S
        with self._changed:
            while True:
                if self._error is not None:
                    return Told("over")
                if self._hellos.get(number) == life and not self._desk.done:
                    word: Word = "wait"
                    dispatch, fresh = None, False
                else:
                    word, dispatch, fresh = self._desk.standing(number, life, last, self._clock.now_s())
                if dispatch is not None:
                    task, ticket = self._desk.hub.task(dispatch), self._desk.ticket(dispatch)
                    break
                left_s = until_s - time.monotonic()
                if word != "wait" or left_s <= 0:
                    return Told(word)
                self._changed.wait(left_s)
            if fresh:
                self._changed.notify_all()
        reference = self._publisher.publish(task.params)
        dtype = dtype_name(task.params)
        return Told("go", ticket, task.steps, task.work, (reference,), dtype, fresh, self._clock.now_s())

    def began(self, number: int, life: int, ticket: Ticket, begin_s: float) -> None:
        """A worker has the weights it was sent off with."""
        with self._changed:
            if number in self._desk.seats and not self._desk.done:
                self._desk.began(number, life, ticket, min(begin_s, self._clock.now_s()))

    def push(self, brought: Brought, bits: Bits) -> Verdict:
        """A worker brings its delta."""
        with self._load.received() as applying:
            delta = tree_over(bits, self._order.layout, self._order.dtype)
            with self._changed, applying():
                if self._error is not None:
                    return "over"
                verdict: Verdict | None = self._try(lambda: self._desk.take(brought, delta, self._clock.now_s()))
                if self._desk.due is not None:
                    self._publish_to_judge()
                self._changed.notify_all()
            return verdict or "over"

    def _try(self, action: Callable[[], Any]) -> Any:
        """What the run cannot go on with is told to whoever drives it."""
        try:
            return action()
        except AtollError as error:
            self._error = error
            return None

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------------- judging

    def _publish_to_judge(self) -> None:
        """The present weights go to whoever judges, unless too many wait there. The last are always judged."""
        due, self._desk.due = self._desk.due, None
        assert due is not None
        if self._desk.done or not self._tidings.is_full:
            # At once, while nobody else is at the desk: the next arrival may reuse the buffer.
            reference = self._publisher.publish(self._desk.params)
            self._tidings.file(due, reference, arrays_of(self._desk.buffers))

    def judged(self, number: int, metrics: Mapping[str, float]) -> None:
        """Somebody has judged."""
        with self._changed:
            due = self._tidings.judged(number)
            if due is not None:
                self._try(lambda: self._desk.judged(due, metrics))

    def news(self, epoch: int, heard: int, handed: int, patience_s: float) -> News:
        """What happened, for whoever drives the run and has heard so much of this hub (or of another) before."""
        with self._changed:
            if epoch != self._epoch:
                heard, handed = 0, 0
            if not self._tidings.is_new(heard, handed) and self._error is None:
                self._changed.wait(patience_s)
            events, heard = self._tidings.since(heard)
            return News(
                epoch=self._epoch,
                events=events,
                heard=heard,
                to_judge=self._tidings.to_judge(handed),
                local_updates=self._desk.hub.scheduler.local_updates,
                seats={number: seat.life for number, seat in self._desk.seats.items()},
                done=self._desk.done,
                judged=self._tidings.is_judged,
                error=self._error,
            )

    # -------------------------------------------------------------------------------------------------------------- saving

    def _keep_time(self) -> None:
        """Close windows that have run out, and report the load."""
        load_s = _LOAD_EVERY_S
        while True:
            with self._changed:
                now_s = self._clock.now_s()
                self._changed.wait(max(0.0, min(self._desk.deadline_s, load_s, now_s + _GATHER_S) - now_s))
                if self._finished is not None or self._error is not None:
                    return
                self._try(self._gather)
                now_s = self._clock.now_s()
                if now_s >= self._desk.deadline_s:
                    self._try(lambda: self._desk.tick(self._clock.now_s()))
                    self._changed.notify_all()
                if now_s >= load_s:
                    load_s = now_s + _LOAD_EVERY_S
                    if self._started and not self._desk.done:
                        self.emit(self._load.report(now_s))

    def _keep_saving(self) -> None:
        """Save whenever it is time, and something has happened."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._desk.done or self._error is not None, self._order.save_every_s)
                if self._error is not None or self._finished is not None:
                    return
            self.save()
            if self._desk.done:
                return

    def save(self) -> None:
        """Write a checkpoint now, unless nothing has happened since the last one."""
        with self._saving:
            with self._changed:
                if self._error is not None or not self._started or self._state_of_affairs() == self._saved:
                    return
                snapshot = self._snapshot()
            self._write(*snapshot)

    def _snapshot(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """A copy of all that a checkpoint holds, and how long the log is that it goes with: taken in one moment."""
        assert self._log is not None
        now_s, round = self._clock.now_s(), self._desk.books.totals.round
        self._saved = self._state_of_affairs()
        self.emit(Saved(round=round, name=self._order.keeper.name(round)))
        metadata = {
            "events_bytes": self._log.position(),
            "session": self._order.session,
            "zero_s": time.monotonic() - now_s,
        }
        return round, copy.deepcopy(self._desk.parts(now_s)), metadata

    def _write(self, round: int, parts: dict[str, Any], metadata: dict[str, Any]) -> None:
        self._order.keeper.save(round, parts, metadata)
        self._order.keeper.say(f"saved round {round}")

    def _state_of_affairs(self) -> tuple[int, ...]:
        scheduler = self._desk.hub.scheduler
        return (scheduler.rounds, scheduler.local_updates, scheduler.windows)

    # ------------------------------------------------------------------------------------------------------------- the end

    def finish(self) -> RunFinished | None:
        """The run is over and judged: save, and draw up its figures. None if it is not: this hub has come after another."""
        self.save()
        with self._changed:
            if not (self._desk.done and self._tidings.is_judged):
                return None
            if self._finished is None:
                now_s = self._clock.now_s()
                self.emit(self._load.report(now_s))
                self._finished = self._desk.finish(now_s, self._order.warm_start_tokens)
                assert self._log is not None
                self._log.position()
                self._log.close()
                self._changed.notify_all()
            return self._finished

    def outcome(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A reference to the weights, and buffers."""
        with self._changed:
            return (self._publisher.publish(self._desk.params),), arrays_of(self._desk.buffers)
