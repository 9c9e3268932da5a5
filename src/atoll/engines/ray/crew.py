"""The workers of a run, as whoever drives it sees them: started, watched, and replaced when they die."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.engines.ray.actors import start_worker
from atoll.engines.ray.worker import WorkerOrder
from atoll.errors import AtollError, ExchangeFailed

_MOST_DEATHS = 5  # of one place in a row, without an update in between
_REMIND_S = 30.0


@dataclass
class Hired:
    """A worker that was started."""

    number: int
    life: int
    actor: Any
    work: Any
    started_s: float
    ended: bool = False
    """Whether it has ended by itself: the hub told it that the run is over, which is soon heard here too."""


class Crew:
    """All workers.

    Args:
        ray: the library.
        hub: the actor they work for.
        workers: how many.
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
        order: Callable[[int, int], WorkerOrder],
        cpus: float,
        gpus: float,
        say: Callable[[str], object],
    ) -> None:
        self._ray, self._hub, self._order, self._say = ray, hub, order, say
        self._cpus, self._gpus = cpus, gpus
        self._lives = 0
        self._deaths: dict[int, list[int]] = {}
        """Of each place since its last update: local updates of the run at each death."""
        self._reminded_s = time.monotonic()
        self.hired = {number: self._hire(number) for number in range(workers)}

    @property
    def lives(self) -> dict[int, int]:
        return {number: hired.life for number, hired in self.hired.items()}

    def _hire(self, number: int) -> Hired:
        life, self._lives = self._lives, self._lives + 1
        order = self._order(number, life)
        return Hired(number, life, *start_worker(self._ray, order, self._hub, cpus=self._cpus, gpus=self._gpus), time.monotonic())

    def look_after(self, local_updates: int, seats: dict[int, int], left: Callable[[int, int], object]) -> None:
        """Whoever has died is replaced; `left` is told. Who waits for a place in the cluster is mentioned now and then.

        Raises:
            AtollError: a worker has ended with an error that another would end with too.
        """
        for number in seats:
            if number in self._deaths and self._deaths[number][-1] < local_updates and seats[number] == self.hired[number].life:
                del self._deaths[number]
        ready, _ = self._ray.wait([hired.work for hired in self.hired.values()], num_returns=len(self.hired), timeout=0)
        for hired in [hired for hired in self.hired.values() if hired.work in ready]:
            why = self._why(hired)
            if why is None and not hired.ended:
                hired.ended = True
            else:
                self._replace(hired, why or "it ended by itself", local_updates, left)
        self._remind(seats)

    def _replace(self, hired: Hired, why: str, local_updates: int, left: Callable[[int, int], object]) -> None:
        left(hired.number, hired.life)
        deaths = self._deaths.setdefault(hired.number, [])
        deaths.append(local_updates)
        if len(deaths) >= _MOST_DEATHS:
            raise ExchangeFailed(
                f"worker {hired.number} has died {len(deaths)} times in a row, each time before it brought anything: {why}. What "
                f"was saved stands. Look at its log, mend what is wrong, and resume."
            )
        self._say(f"worker {hired.number} is gone ({why}); another takes its place")
        self._kill(hired)
        self.hired[hired.number] = self._hire(hired.number)

    def _why(self, hired: Hired) -> str | None:
        """What a worker that has ended died of; none if it ended by itself."""
        try:
            self._ray.get(hired.work)
        except self._ray.exceptions.RayActorError as error:
            return str(error).partition("\n")[0].rstrip(".")  # then follow numbers that mean nothing to anybody
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            if isinstance(cause, ExchangeFailed):  # it could not reach the hub: another may
                return str(cause)
            if isinstance(cause, AtollError):
                raise cause from None
            raise
        return None

    def _remind(self, seats: dict[int, int]) -> None:
        now_s = time.monotonic()
        absent = [h.number for h in self.hired.values() if seats.get(h.number) != h.life and now_s - h.started_s > _REMIND_S]
        if absent and now_s - self._reminded_s > _REMIND_S:
            self._reminded_s = now_s
            free = {name: amount for name, amount in self._ray.available_resources().items() if name in ("CPU", "GPU")}
            self._say(f"workers {absent} have not come yet: each needs {self._cpus:g} CPU and {self._gpus:g} GPU, free are {free}")

    def _kill(self, hired: Hired) -> None:
        self._ray.kill(hired.actor)

    def dismiss(self) -> None:
        """All of them, whatever they are doing."""
        for hired in self.hired.values():
            self._kill(hired)
