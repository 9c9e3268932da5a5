"""Asking a hub that may die and come back, or be silent: whoever asks waits for it, says so, and gives up after a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ExchangeFailed

_APART_S = 0.2  # between two attempts
_SAY_EVERY_S = 15.0
_LEAST_S = 0.01  # a hub that is there has so long, whatever the limit


class Reach:
    """The hub, as others reach it.

    Args:
        ray: the library.
        hub: the actor.
        limit_s: how long it is waited for when it does not answer.
        say: takes a line on who is waited for.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        ray: Any,
        hub: Any,
        *,
        limit_s: float,
        say: Callable[[str], object],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._ray, self.hub, self._limit_s, self._say, self._sleep = ray, hub, limit_s, say, sleep
        errors = ray.exceptions
        self._silent: type[Exception] = errors.GetTimeoutError
        # An actor that is gone, away or killed for memory; an object that was lost with the process that had put it into the store.
        self._gone: tuple[type[Exception], ...] = (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError)

    def patience_s(self, wanted_s: float) -> float:
        """How long the hub may keep whoever asks waiting for news: well below the limit, or it would count as silent."""
        return min(wanted_s, self._limit_s / 2)

    def ask(self, what: str, *arguments: Any) -> Any:
        """The hub's answer. What was asked may have been done by a hub that died before it could answer: ask for nothing that
        must not be done twice.

        Raises:
            ExchangeFailed: it has not answered within the limit.
        """
        began_s, said_s, asked = time.monotonic(), -_SAY_EVERY_S, None
        while True:
            if asked is None:
                asked = getattr(self.hub, what).remote(*arguments)
            left_s = self._limit_s - (time.monotonic() - began_s)
            try:
                result = self._ray.get(asked, timeout=max(_LEAST_S, min(_SAY_EVERY_S, left_s)))
            except (*self._gone, self._silent) as error:
                waited_s = time.monotonic() - began_s
                self._give_up(error, what, waited_s)
                if waited_s - said_s >= _SAY_EVERY_S:
                    said_s = waited_s
                    self._say(f"the hub does not answer ({what}: {type(error).__name__}); it is waited for {self._limit_s:g} s")
                if not isinstance(error, self._silent):  # one that is silent was asked, and may still answer
                    self._sleep(_APART_S)
                    asked = None
            else:
                if said_s >= 0:
                    self._say(f"the hub answers again, after {time.monotonic() - began_s:.1f} s")
                return result

    def fetch(self, weights: tuple[Any, ...]) -> Any:
        """What lies in the object store under the one reference in here; none if it is lost. The hub is told, and puts there anew
        what is still wanted.

        Raises:
            ExchangeFailed: the hub, who alone knows where it lies, has not answered within the limit.
        """
        began_s = time.monotonic()
        while True:
            try:
                return self._ray.get(weights[0], timeout=min(_SAY_EVERY_S, self._limit_s))
            except self._silent:  # large weights on a slow line may take longer than the limit: that holds for the hub alone
                self._say(f"weights have been on their way for {time.monotonic() - began_s:.0f} s, and are waited for")
                self.ask("present")
            except self._gone as error:
                self._say(f"weights are lost ({type(error).__name__}); the hub is asked for them again")
                self.ask("lost", weights)
                return None

    def _give_up(self, error: Exception, what: str, waited_s: float) -> None:
        """Unless it may still come back."""
        broken = getattr(error, "actor_init_failed", False) or "creation task" in str(error)
        if broken or waited_s > self._limit_s:
            why = "could not go on" if broken else f"has not answered for {waited_s:.0f} s (limit {self._limit_s:g} s, --limit)"
            raise ExchangeFailed(f"the hub {why}: {_last_line(error)} What was saved stands. Resume the run.") from error


def _last_line(error: Exception) -> str:
    """Of an error with a traceback in it, what it says."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
