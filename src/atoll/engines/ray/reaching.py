"""Asking a hub that may die and come back: whoever asks waits for it, says so, and gives up after a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from atoll.errors import ExchangeFailed

_APART_S = 0.2  # between two attempts
_SAY_EVERY_S = 15.0


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
        # An actor that is gone or away; an object that was lost with the process that had put it into the store.
        self.gone: tuple[type[Exception], ...] = (errors.RayActorError, errors.ObjectLostError, errors.GetTimeoutError)

    def ask(self, what: str, *arguments: Any) -> Any:
        """The hub's answer. What was asked may have been done by a hub that died before it could answer: ask for nothing that
        must not be done twice.

        Raises:
            ExchangeFailed: it has not answered within the limit.
        """
        return self.insist(lambda: self._ray.get(getattr(self.hub, what).remote(*arguments)), what)

    def insist(self, attempt: Callable[[], Any], what: str) -> Any:
        """What an attempt brings, as soon as one succeeds."""
        began_s, said_s = time.monotonic(), -_SAY_EVERY_S
        while True:
            try:
                result = attempt()
            except self.gone as error:
                waited_s = time.monotonic() - began_s
                self._give_up(error, what, waited_s)
                if waited_s - said_s >= _SAY_EVERY_S:
                    said_s = waited_s
                    self._say(f"the hub does not answer ({what}: {type(error).__name__}); it is waited for {self._limit_s:g} s")
                self._sleep(_APART_S)
            else:
                if said_s >= 0:
                    self._say(f"the hub answers again, after {time.monotonic() - began_s:.1f} s")
                return result

    def _give_up(self, error: Exception, what: str, waited_s: float) -> None:
        """Unless it may still come back."""
        broken = getattr(error, "actor_init_failed", False) or "creation task" in str(error)
        if broken or waited_s > self._limit_s:
            why = "could not go on" if broken else f"has not answered for {waited_s:.0f} s (limit {self._limit_s:g} s, --limit)"
            raise ExchangeFailed(f"the hub {why}: {_last_line(error)} What was saved stands. Resume the run.") from error


def _last_line(error: Exception) -> str:
    """Of an error with a traceback in it, what it says."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
