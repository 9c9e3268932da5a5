"""The workers of a run, as whoever drives it sees them: started, watched, and replaced when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import AtollError, ExchangeFailed
from atoll.engines.ray.actors import start_worker
from atoll.engines.ray.worker import WorkerOrder

_MOST_DEATHS = 5  # of one place in a row, without an update in between
_REMIND_S = 30.0


@dataclass
class Hired:
    """A worker that was started."""

    order: WorkerOrder
    actor: Any
    work: Any
    started_s: float
    ended: bool = False
    """Whether it has ended by itself: the hub told it that the run is over, which is soon heard here too."""

    @property
    def number(self) -> int:
        return self.order.number

    @property
    def life(self) -> int:
        return self.order.life


class Crew:
    """All workers.

    Args:
        ray: the library.
        hub: the actor they work for.
        workers: how many are expected.
        most: how many there may be: those beyond the expected come when the cluster has room for them.
        order: what the worker of this place and life is made of.
        cpus: of each.
        gpus: of each.
        say: takes a line on who has died.
    """

    def __init__(
        self,
        ray: Any,
        hub: Any,
        *,
        workers: int,
        most: int,
        order: Callable[[int, int], WorkerOrder],
        cpus: float,
        gpus: float,
        say: Callable[[str], object],
    ) -> None:
        self._ray, self._hub, self._order, self._say = ray, hub, order, say
        self._workers, self._cpus, self._gpus = workers, cpus, gpus
        self._lives = 0
        self._deaths: dict[int, int] = {}
        """Of each place, since it last brought something."""
        self._reminded_s = self._mentioned_s = time.monotonic()
        self.hired = {number: self._hire(number) for number in range(most)}

    @property
    def lives(self) -> dict[int, int]:
        return {number: hired.life for number, hired in self.hired.items()}

    def _hire(self, number: int) -> Hired:
        """Ray starts it as soon as it finds room."""
        order, self._lives = self._order(number, self._lives), self._lives + 1
        return Hired(order, *start_worker(self._ray, order, self._hub, cpus=self._cpus, gpus=self._gpus), time.monotonic())

    def look_after(self, seats: Mapping[int, tuple[int, bool]], left: Callable[[int, int], object]) -> None:
        """Whoever has died is replaced; `left` is told. Who waits for a place in the cluster is mentioned now and then.

        Args:
            seats: who is at the hub, by place: its life, and whether it has brought anything.
            left: takes place and life of who has died.

        Raises:
            AtollError: a worker has ended with an error that another would end with too.
        """
        for number, (life, has_brought) in seats.items():
            if has_brought and life == self.hired[number].life:
                self._deaths.pop(number, None)
        ready, _ = self._ray.wait([hired.work for hired in self.hired.values()], num_returns=len(self.hired), timeout=0)
        for hired in [hired for hired in self.hired.values() if hired.work in ready]:
            why = self._why(hired)
            if why is None and not hired.ended:
                hired.ended = True
            else:
                self._replace(hired, why or "it ended by itself", left)
        self._remind(seats)

    def _replace(self, hired: Hired, why: str, left: Callable[[int, int], object]) -> None:
        left(hired.number, hired.life)
        deaths = self._deaths[hired.number] = self._deaths.get(hired.number, 0) + 1
        if deaths >= _MOST_DEATHS:
            raise ExchangeFailed(
                f"worker {hired.number} has died {deaths} times in a row, each time before it brought anything: {why}. What was "
                f"saved stands. Look at {hired.order.log}, or at Ray's logs on a machine without that folder; mend what is wrong, "
                f"and resume."
            )
        self._say(f"worker {hired.number} is gone ({why}); another takes its place")
        self._ray.kill(hired.actor)
        self.hired[hired.number] = self._hire(hired.number)

    def _why(self, hired: Hired) -> str | None:
        """What a worker that has ended died of; none if it ended by itself. Whatever befell one of them need not befall another,
        but for an error of ours, which says that something is wrong with the run."""
        try:
            self._ray.get(hired.work)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            if isinstance(cause, AtollError) and not isinstance(cause, ExchangeFailed):  # that was about the hub
                raise cause from None
            return _last_line(str(cause))
        except self._ray.exceptions.RayError as error:
            return str(error).partition("\n")[0].rstrip(".")  # then follow numbers that mean nothing to anybody
        return None

    def _remind(self, seats: Mapping[int, tuple[int, bool]]) -> None:
        now_s = time.monotonic()
        expected = [hired for hired in self.hired.values() if hired.number < self._workers]
        absent = [h.number for h in expected if seats.get(h.number, (-1, False))[0] != h.life and now_s - h.started_s > _REMIND_S]
        if absent and now_s - self._reminded_s > _REMIND_S:
            self._reminded_s = now_s
            free = {name: amount for name, amount in self._ray.available_resources().items() if name in ("CPU", "GPU")}
            self._say(f"workers {absent} have not come yet: each needs {self._cpus:g} CPU and {self._gpus:g} GPU, free are {free}")

    def mention(self, silent: Mapping[int, float]) -> None:
        """Say now and then who is alive and brings nothing. Nobody waits for such a worker, but if all are so, nothing happens."""
        now_s = time.monotonic()
        if silent and now_s - self._mentioned_s > _REMIND_S:
            self._mentioned_s = now_s
            since = ", ".join(f"{number} for {seconds:.0f} s" for number, seconds in sorted(silent.items()))
            self._say(
                f"workers are out much longer than before, and have not died: {since}. See their logs; a killed one is replaced"
            )

    def dismiss(self) -> None:
        """All of them, whatever they are doing."""
        for hired in self.hired.values():
            self._ray.kill(hired.actor)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "an error without a word")
