"""The hub's desk: the hub's state machine with the books, and who sits where. It knows no Ray and no clock: it is told the time.

Workers have **places**, numbered from 0, and each that holds a place is a **life** of its own: whoever takes the place of one that
has died has a higher one, so that a worker which was given up and comes back all the same is known for what it is.

Every round is taken once. What a worker brings carries its place, its life and the ticket of its round, and is taken only if the
scheduler has it out with that very ticket. A hub that goes on from a checkpoint has lost what was taken since: it does not know the
rounds that workers are in by now. Such a worker says which round of its own was taken last; if that is not what the desk knows, its
inner optimizer has seen data that count as unseen, and it begins anew, as if it had left and come back. So what a log holds can be
replayed: a worker's moments come from the rounds that the log has, and from no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from atoll.algorithms.async_hub import Applied, Hub, Outcome, Push, Refusal
from atoll.algorithms.async_scheduler import Closing, Dispatch, Return
from atoll.algorithms.dynamic_local_updates import Pace
from atoll.core.errors import TrainingDiverged
from atoll.core.events import Evaluated, IslandJoined, IslandLeft, Refused, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Plan, Sink
from atoll.engines.accounting import RunAccounting, returned, window_closed
from atoll.engines.ray.accounting import Accounts
from atoll.engines.ray.messages import Brought, Ticket, Verdict, Word, tensors_of
from atoll.engines.ray.worker_slots import OpenRounds, Seat

_MOST_REFUSALS = 3  # of one worker in a row: it will not get better
_LATE, _SHORT_S, _LONG_S = 10.0, 30.0, 300.0
"""A worker that is out so many times as long as before is mentioned, but not before so long; one that was not out before later."""


class Desk:
    """The state machine of one run on real machines.

    Args:
        algorithm: whose hub it is.
        plan: how workers are sent off; the algorithm's own, but for what real machines change.
        params: the weights to begin with, which it takes.
        examples: of each shard.
        updates: local updates after which it sends nobody off any more.
        draw: for each round a number in [0, 1); see `Scheduler`.
        islands: how many the local updates were planned for: steps are counted as if these had shared them.
        places: how many workers there are at most.
        evaluate_every: local updates between evaluations; the last weights are always evaluated.
        speeds: of each place in steps per second, where they are given.
        epoch: names this hub among all that have been and will be in its place.
        sink: takes events.
        devices: of each worker.
    """

    def __init__(
        self,
        *,
        algorithm: AsyncAlgorithm[Any],
        plan: Plan,
        params: Tree,
        examples: Sequence[int],
        updates: int,
        draw: Callable[[int], float],
        islands: int,
        places: int,
        evaluate_every: int,
        epoch: int,
        sink: Sink,
        speeds: Sequence[float] = (),
        devices: int = 1,
    ) -> None:
        self.hub = Hub(algorithm, params, examples=examples, updates=updates, draw=draw)
        self.hub.scheduler.plan, self.hub.scheduler.pace = plan, Pace(plan)
        self.seats: dict[int, Seat] = {}
        self.buffers: dict[str, Tensor] = {}
        self.due: Evaluated | None = None
        """What is to be judged: an evaluation without its figures, of the present weights."""
        self.hopeless: TrainingDiverged | None = None
        """What the run ends with, if it cannot get better. All is in order up to here."""
        self._speeds, self._evaluate_every, self._emit = speeds, evaluate_every, sink.emit
        self.rounds = OpenRounds(epoch, sink, devices)
        self.accounts = Accounts(islands, places, sink)

    @property
    def done(self) -> bool:
        return self.hub.done

    @property
    def params(self) -> Tree:
        return self.hub.params

    @property
    def accounting(self) -> RunAccounting:
        return self.accounts.accounting

    # ---------------------------------------------------------------------------------------------------- coming and going

    def come(self, lives: Mapping[int, int], now_s: float) -> None:
        """Workers take their places, those of one call together. Who was there before has gone."""
        for number in [number for number in lives if number in self.seats]:
            self.go(number, now_s)
        first = self.hub.scheduler.rounds == 0
        for number, life in lives.items():
            self.seats[number] = Seat(life, now_s)
            if not first:
                self._emit(
                    IslandJoined(island=number, round=self._round, virtual_time_s=None, wall_time_s=now_s, donor=None, sent_bytes=0)
                )
        speeds = {number: self._speeds[number % len(self._speeds)] if self._speeds else None for number in lives}
        self._carry_out(self.hub.join_all(speeds, now_s))

    def go(self, number: int, now_s: float) -> None:
        """A worker is gone, whatever it was doing."""
        seat = self.seats.pop(number)
        self.accounts.present(number, seat, now_s)
        out = self.hub.scheduler.workers[number].out
        if out is not None:
            self._log(out, out.time_s)
        self._emit(IslandLeft(island=number, round=self._round, virtual_time_s=None, wall_time_s=now_s))
        self._carry_out(self.hub.leave(number, now_s, self._next_s(now_s)))

    def standing(self, number: int, life: int, last: Ticket | None, now_s: float) -> tuple[Word, Dispatch | None, bool]:
        """What a worker that pulls is told: a word, with what it is sent off, and whether it begins anew."""
        if self.done:
            return "over", None, False
        seat = self.seats.get(number)
        if seat is None or seat.life < life:
            return "hello", None, False
        if seat.life > life:
            return "replaced", None, False
        fresh = seat.last != last
        if fresh:
            self.come({number: life}, now_s)
        out = self.hub.scheduler.workers[number].out
        return ("wait" if out is None else "go"), out, fresh

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self._carry_out(self.hub.tick(now_s, self._next_s(now_s)))

    @property
    def deadline_s(self) -> float:
        """When the open window runs out."""
        deadline_s = None if self.done else self.hub.scheduler.deadline_s
        return math.inf if deadline_s is None else deadline_s

    # ---------------------------------------------------------------------------------------------------------- an arrival

    def ticket(self, dispatch: Dispatch) -> Ticket:
        """Of a round that is out."""
        return self.rounds.ticket(dispatch)

    def _out(self, number: int, ticket: Ticket) -> Dispatch | None:
        """With what the worker was sent off, if it is out with this ticket."""
        out = self.hub.scheduler.out(number, ticket[0])
        return out if out is not None and self.ticket(out) == ticket else None

    def began(self, number: int, life: int, ticket: Ticket, begin_s: float) -> None:
        """A worker has the weights of its round."""
        out = self._out(number, ticket)
        if out is not None and self.seats[number].life == life:
            self._log(out, begin_s)

    def take(self, brought: Brought, delta: Tree | None, now_s: float) -> Verdict:
        """A worker's update is there; none if what came is not of the weights' size."""
        number, seat = brought.number, self.seats.get(brought.number)
        if self.done:
            return "over"
        if seat is None or seat.life < brought.life:
            return "hello"
        if seat.life > brought.life:
            return "replaced"
        self.accounts.sent(number, delta)
        out = self._out(number, brought.ticket)
        if out is None:
            return self._turn_away(brought, seat, now_s)
        self._log(out, brought.begin_s)
        outcomes = self._pushed(brought, out, delta, now_s)
        seat.last = brought.ticket
        seat.verdict = "taken" if any(isinstance(outcome, Applied) for outcome in outcomes) else "refused"
        self._carry_out(outcomes, brought)
        if not self.done:
            self.tick(now_s)
        return seat.verdict

    def _pushed(self, brought: Brought, out: Dispatch, delta: Tree | None, now_s: float) -> Sequence[Outcome]:
        """What the hub makes of an update. One that nobody can use is not shown to it: its round is put back."""
        number, unsound = brought.number, [s.loss for s in brought.stretches if not math.isfinite(s.loss)]
        if delta is None or unsound:
            reason = f"its loss is {unsound[0]}" if unsound else f"its delta has not the {self.params.nbytes} bytes of the weights"
            return [Refusal(number, out.round, now_s, reason, True), *self.hub.give_up(number, now_s)]
        push = Push(number, out.round, delta, brought.computed_s or None)
        return self.hub.push(push, now_s, self._next_s(now_s, but=number))

    def _turn_away(self, brought: Brought, seat: Seat, now_s: float) -> Verdict:
        """What is not out cannot be taken: it was brought before, or the hub that gave it out is gone and had not saved it."""
        again = seat.last == brought.ticket
        why = "it was delivered twice" if again else "the hub that gave it out is gone, and this one does not know of it"
        reason = f"round {brought.ticket[0]} of worker {brought.number} is not open: {why}"
        if self.hub.scheduler.out(brought.number, brought.ticket[0]) is None:  # else the log would say that of another round
            self._emit(
                Refused(island=brought.number, round=brought.ticket[0], virtual_time_s=None, wall_time_s=now_s, reason=reason)
            )
        if again:  # it may not have heard what became of it
            return "again" if seat.verdict == "taken" else "refused"
        return "unknown"

    def _carry_out(self, outcomes: Sequence[Outcome], brought: Brought | None = None) -> None:
        for outcome in outcomes:
            match outcome:
                case Closing():
                    self._emit(window_closed(outcome, real=True))
                case Return():
                    self._log(outcome.dispatch, outcome.dispatch.time_s)
                    self.rounds.end(outcome.dispatch)
                    self._emit(returned(outcome, real=True))
                case Applied():
                    assert brought is not None
                    self._applied(outcome, brought)
                case Refusal():
                    assert brought is not None
                    self._refused(outcome, brought)
                case Dispatch():  # whoever pulls is told of it
                    self.rounds.begin(outcome)

    def _applied(self, applied: Applied, brought: Brought) -> None:
        """The hub took its step: count, report, and see whether it is time to judge."""
        dispatch, before = applied.dispatch, self.accounting.totals.local_updates
        seat = self.seats[dispatch.worker]
        seat.refusals = 0
        seat.step_s = (applied.time_s - dispatch.time_s) / dispatch.steps
        seat.computing_s = brought.computed_s / dispatch.steps
        self.buffers = tensors_of(brought.buffers)
        self.rounds.end(dispatch)
        self.accounts.applied(applied, brought, self.seats, self.params.nbytes)
        after = self.accounting.totals.local_updates
        if self.done or after // self._evaluate_every > before // self._evaluate_every:
            self.ask_to_judge(applied.time_s)

    def _refused(self, refusal: Refusal, brought: Brought) -> None:
        self.accounts.refused(refusal, brought)
        seat = self.seats[refusal.worker]
        seat.refusals += 1
        if seat.refusals == _MOST_REFUSALS:
            self.hopeless = TrainingDiverged(
                f"worker {refusal.worker} has brought {seat.refusals} unusable updates in a row: {refusal.reason}. The run stops; "
                f"what was saved stands. Lower the learning rate, set train.clip_norm, or look at its machine."
            )

    def _log(self, dispatch: Dispatch, begin_s: float) -> None:
        self.rounds.log(dispatch, begin_s, self.params.nbytes)

    def _next_s(self, now_s: float, but: int | None = None) -> float | None:
        """When the next of those who are out will be there, by how long each took for a step the last time; none if that is not
        known of one of them, or has proved wrong: it may come at any moment."""
        arrivals = []
        for number, worker in self.hub.scheduler.workers.items():
            if number == but or worker.out is None:
                continue
            step_s = self.seats[number].step_s if number in self.seats else None
            if step_s is None or worker.out.time_s + step_s * worker.out.steps < now_s:
                return None
            arrivals.append(worker.out.time_s + step_s * worker.out.steps)
        return min(arrivals, default=None)

    def silent(self, now_s: float) -> dict[int, float]:
        """Since when those are out, in seconds, who should have been back long ago, by how long each took the last time."""
        found = {}
        for number, worker in self.hub.scheduler.workers.items():
            if worker.out is not None and number in self.seats:
                step_s, out_s = self.seats[number].step_s, now_s - worker.out.time_s
                if out_s > (_LONG_S if step_s is None else max(_SHORT_S, _LATE * step_s * worker.out.steps)):
                    found[number] = out_s
        return found

    # ------------------------------------------------------------------------------------------------------------- judging

    def ask_to_judge(self, now_s: float) -> None:
        """The present weights are to be judged."""
        self.due = self.accounting.evaluation_due(now_s)

    def judged(self, due: Evaluated, metrics: Mapping[str, float]) -> None:
        """Somebody has judged what was to be judged."""
        self.accounting.set_metrics(metrics)
        self._emit(replace(due, metrics=self.accounting.totals.metrics))

    def finish(self, now_s: float, warm_start_tokens: int) -> RunFinished:
        """The run is over."""
        workers = self.hub.scheduler.workers
        for out in [worker.out for worker in workers.values() if worker.out is not None]:
            self._log(out, out.time_s)
        self.accounts.close(now_s, self.seats, workers)
        finished = self.accounting.finished(now_s, warm_start_tokens, self.params.digest())
        self._emit(finished)
        return finished

    @property
    def _round(self) -> int:
        """Rounds that are over."""
        return self.accounting.totals.round
