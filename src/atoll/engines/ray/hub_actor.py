"""The hub's process: the desk behind a lock, with a clock, the object store and the run's keeper. It is an actor of Ray's.

Whatever is asked of it comes in threads of its own. A push is there, in the machine's memory, before it takes its turn at the desk,
so the next one is received while this one is applied. Weights are published when somebody asks for them, once each. Two threads of
the hub's own keep time: one closes windows that have run out, one writes checkpoints, beside the desk.

When its process dies Ray starts another, which goes on from the newest checkpoint and cuts the log to what that knows. It says so,
in the log and on the console, with what was lost; without a checkpoint it begins again with the weights that the run began with.

An error at the desk may leave it half moved: the run ends with it, and nothing is saved any more.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from atoll.core.errors import AtollError, ExchangeFailed
from atoll.core.events import RunFinished
from atoll.core.flat_tree import Tree
from atoll.engines.ray.evaluation_queue import Judging
from atoll.engines.ray.hub_checkpoints import Saver
from atoll.engines.ray.hub_load import Load
from atoll.engines.ray.hub_spec import HubOrder, News
from atoll.engines.ray.messages import Bits, Brought, Ticket, Told, Verdict, arrays_of, dtype_name, expect_read_only, received_tree
from atoll.engines.ray.recovery import opened
from atoll.engines.ray.start_barrier import Gathering
from atoll.engines.ray.weight_publisher import Publisher

_LOAD_EVERY_S = 10.0


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
        order.keeper.hold()
        order.keeper.say(f"hub on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        self._epoch = secrets.randbits(48)
        self._load, self._publisher = Load(), Publisher(put)
        self._changed = threading.Condition()
        self._error: AtollError | None = None
        self._finished: RunFinished | None = None
        self._desk, self._tidings, self._log, self._clock, self._started, first = opened(order, self._epoch)
        self._gathering = Gathering(order.workers, first=first)
        self._judging = Judging(self._desk, self._tidings, self._publisher, self._changed)
        self._saver = Saver(
            keeper=order.keeper,
            session=order.session,
            desk=self._desk,
            clock=self._clock,
            log=self._log,
            sink=self._tidings,
            load=self._load,
            changed=self._changed,
        )
        self._judging.claim()
        self._judging.publish()
        for work in (self._keep_time, self._keep_saving):
            threading.Thread(target=self._try, args=(work,), daemon=True).start()

    def _try(self, action: Callable[[], Any]) -> Any:
        """What the run cannot go on with is told to whoever drives it."""
        try:
            return action()
        except Exception as error:
            with self._changed:
                self._saver.stop()  # the desk may be half moved
                self._error = self._error or self._explained(error)
                self._changed.notify_all()
            return None

    def _explained(self, error: Exception) -> AtollError:
        """An error that is not ours may not even be one that can be sent to another process."""
        if isinstance(error, AtollError):
            return error
        self._order.keeper.say(traceback.format_exc())
        what = f"{type(error).__name__}: {error}"
        return ExchangeFailed(f"the hub failed: {what}. logs/hub.log has more. What was saved stands. Resume the run.")

    # --------------------------------------------------------------------------------------------------- coming and going

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
            self._gathering.add(number, life)
            self._try(self._gather)
        return ""

    def _gather(self) -> None:
        """Whoever waits takes its place, if it is time."""
        with self._changed:
            lives = {} if self._desk.done else self._gathering.seated()
            if not lives:
                return
            if not self._started:
                self._clock.set(0.0)
                self._load.begin()
                self._started = True
                self._saver.save_at_the_desk()  # so that there is always something to go on from
            self._desk.come(lives, self._clock.now_s())
            self._changed.notify_all()

    def census(self, lives: Mapping[int, int]) -> None:
        """Who is there according to whoever starts workers. A hub that goes on from a checkpoint may believe in others."""
        with self._changed:
            gone = [number for number, seat in self._desk.seats.items() if lives.get(number) != seat.life]
            self._try(lambda: self._go(gone))

    def left(self, number: int, life: int) -> None:
        """A worker has died."""
        with self._changed:
            self._gathering.drop(number, life)
            seat = self._desk.seats.get(number)
            self._try(lambda: self._go([number] if seat is not None and seat.life == life else []))

    def _go(self, numbers: list[int]) -> None:
        for number in numbers if not self._desk.done else []:
            self._desk.go(number, self._clock.now_s())
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------ pull and push

    def pull(self, number: int, life: int, last: Ticket | None, patience_s: float) -> Told:
        """A worker asks for work. It waits here until there is some, or is told to ask again."""
        until_s = time.monotonic() + patience_s
        with self._changed:
            while True:
                told, params = self._try(lambda: self._told(number, life, last)) or (Told("over"), None)
                left_s = until_s - time.monotonic()
                if told.word != "wait" or left_s <= 0:
                    break
                self._changed.wait(left_s)
            if told.fresh:
                self._changed.notify_all()
        if params is None:
            return Told(told.word)
        return told._replace(weights=(self._publisher.publish(params),), dtype=dtype_name(params), now_s=self._clock.now_s())

    def _told(self, number: int, life: int, last: Ticket | None) -> tuple[Told, Tree | None]:
        """What a worker that pulls is told, and the weights that it is sent off with."""
        if self._error is not None:
            return Told("over"), None
        if self._gathering.has(number, life) and not self._desk.done:
            return Told("wait"), None
        word, dispatch, fresh = self._desk.standing(number, life, last, self._clock.now_s())
        if dispatch is None:
            return Told(word), None
        task = self._desk.hub.task(dispatch)
        return Told("go", self._desk.ticket(dispatch), task.steps, task.work, fresh=fresh), task.params

    def began(self, number: int, life: int, ticket: Ticket, begin_s: float) -> None:
        """A worker has the weights it was sent off with."""
        with self._changed:
            if number in self._desk.seats and not self._desk.done:
                self._try(lambda: self._desk.began(number, life, ticket, min(begin_s, self._clock.now_s())))

    def push(self, brought: Brought, bits: Bits) -> Verdict:
        """A worker brings its delta."""
        with self._load.received() as applying:
            delta = received_tree(bits, self._order.layout, self._order.dtype)
            with self._changed, applying():
                if self._error is not None:
                    return "over"
                verdict: Verdict | None = self._try(lambda: self._desk.take(brought, delta, self._clock.now_s()))
                self._error = self._error or self._desk.hopeless
                self._try(self._judging.claim)
                self._changed.notify_all()
        self._try(self._judging.publish)
        return verdict or "over"

    # ------------------------------------------------------------------------------------------------------------- judging

    def judged(self, epoch: int, number: int, metrics: Mapping[str, float]) -> None:
        """Somebody has judged what the hub of this epoch had filed: numbers begin anew with each."""
        with self._changed:
            if epoch == self._epoch:
                self._try(lambda: self._judging.judged(number, metrics))

    def leave_unjudged(self, epoch: int, number: int) -> None:
        """What the hub of this epoch had filed cannot be judged. Who judges says so: a worker may have lost what others have."""
        with self._changed:
            if epoch == self._epoch:
                self._try(lambda: self._judging.leave_out(number))
        self._try(self._judging.publish)

    def lost(self, weights: tuple[Any, ...]) -> None:
        """Somebody did not find in the store what was published: the next who asks has it put there anew."""
        self._publisher.forget(weights[0])

    def present(self) -> None:
        """For whoever waits for something else: a hub that answers is there, and its desk is free now and then."""
        with self._changed:
            return

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
                seats={number: (seat.life, seat.has_brought) for number, seat in self._desk.seats.items()},
                silent=self._desk.silent(self._clock.now_s()),
                done=self._desk.done,
                judged=self._judging.is_over,
                error=self._error,
            )

    # ------------------------------------------------------------------------------------------------- keeping time, saving

    def _keep_time(self) -> None:
        """Close windows that have run out, and report the load."""
        load_s = _LOAD_EVERY_S
        while True:
            with self._changed:
                now_s = self._clock.now_s()
                self._changed.wait(max(0.0, min(self._desk.deadline_s, load_s, now_s + _LOAD_EVERY_S) - now_s))
                if self._finished is not None or self._error is not None:
                    return
                now_s = self._clock.now_s()
                if now_s >= self._desk.deadline_s:
                    self._desk.tick(now_s)
                    self._changed.notify_all()
                if now_s >= load_s:
                    load_s = now_s + _LOAD_EVERY_S
                    if self._started and not self._desk.done:
                        self._tidings.emit(self._load.report(now_s))
            self._gather()

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

    def save(self) -> bool:
        """Write a checkpoint now, unless nothing has happened since the last one. Whether all that has happened is saved."""
        return self._saver.save()

    # ------------------------------------------------------------------------------------------------------------- the end

    def finish(self) -> RunFinished | None:
        """The run is over and judged: save, and draw up its figures. None if it is not: this hub has come after another."""
        self._try(self.save)
        with self._changed:
            if self._finished is None and self._desk.done and self._judging.is_over:
                self._try(self._draw_up)
            return self._finished

    def _draw_up(self) -> None:
        now_s = self._clock.now_s()
        self._tidings.emit(self._load.report(now_s))
        finished = self._desk.finish(now_s, self._order.warm_start_tokens)
        self._log.position()
        self._log.close()
        self._finished = finished
        self._changed.notify_all()

    def outcome(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A reference to the weights, and buffers."""
        with self._changed:
            return (self._publisher.publish(self._desk.params),), arrays_of(self._desk.buffers)
