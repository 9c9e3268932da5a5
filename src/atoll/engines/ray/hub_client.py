"""Calls a hub that may die, restart or hang: the client retries until a timeout, and logs that it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ExchangeFailed

_RETRY_S = 0.2
_WATCH_EVERY_S = 1.0
_LOG_EVERY_S = 15.0
_LEAST_WAIT_S = 0.01  # for the reply of a live hub, whatever the timeout


class HubClient:
    """A client of the hub, which waits `timeout_s` seconds for a reply and logs that it waits. `hub` is the actor's handle; `watch`
    is called about once a second meanwhile, and may raise."""

    def __init__(
        self, ray: Any, hub: Any, *, timeout_s: float, log: Callable[[str], object], watch: Callable[[], object] | None = None
    ) -> None:
        self._ray, self.hub, self._timeout_s, self._log = ray, hub, timeout_s, log
        self._watch = watch
        self._wait_s = _LOG_EVERY_S if watch is None else _WATCH_EVERY_S
        errors = ray.exceptions
        self._no_reply: type[Exception] = errors.GetTimeoutError
        # A dead, restarting or out-of-memory actor; an object that was lost with the process that owned it.
        self._lost: tuple[type[Exception], ...] = (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError)

    def wait_s(self, wanted_s: float) -> float:
        """How long the hub may hold a call that waits for news: well below the timeout."""
        return min(wanted_s, self._timeout_s / 2)

    def call(self, method: str, *arguments: Any) -> Any:
        """The hub's reply. A hub may have executed the call and died before it replied, so the method must be idempotent. Raises
        ExchangeFailed without a reply within the timeout."""
        began_s, logged_s, reply = time.monotonic(), -_LOG_EVERY_S, None
        while True:
            if self._watch is not None:
                self._watch()
            if reply is None:
                reply = getattr(self.hub, method).remote(*arguments)
            left_s = self._timeout_s - (time.monotonic() - began_s)
            try:
                result = self._ray.get(reply, timeout=max(_LEAST_WAIT_S, min(self._wait_s, left_s)))
            except (*self._lost, self._no_reply) as error:
                waited_s = time.monotonic() - began_s
                self._check_timeout(error, waited_s)
                hangs = isinstance(error, self._no_reply)
                # A watched call looks up every second, which is not worth a line.
                if waited_s - logged_s >= _LOG_EVERY_S and not (hangs and self._watch is not None and waited_s < _LOG_EVERY_S):
                    logged_s = waited_s
                    self._log(f"the hub does not reply ({method}: {type(error).__name__}); waiting up to {self._timeout_s:g} s")
                if not hangs:  # a hub that hangs has the call, and may still reply
                    time.sleep(_RETRY_S)
                    reply = None
            else:
                if logged_s >= 0:
                    self._log(f"the hub replies again, after {time.monotonic() - began_s:.1f} s")
                return result

    def fetch(self, weights: tuple[Any, ...]) -> Any:
        """Fetches what the reference in this tuple refers to; None if the object store has lost it. Then the hub publishes it again
        on demand. Raises ExchangeFailed if the hub, which owns the object, does not reply within the timeout."""
        began_s = time.monotonic()
        while True:
            try:
                return self._ray.get(weights[0], timeout=min(_LOG_EVERY_S, self._timeout_s))
            except self._no_reply:  # a transfer over a slow link may take longer than the timeout, which is for the hub alone
                self._log(f"still fetching weights after {time.monotonic() - began_s:.0f} s")
                self.call("ping")
            except self._lost as error:
                self._log(f"weights are lost ({type(error).__name__}); the hub publishes them again")
                self.call("weights_lost", weights)
                return None

    def _check_timeout(self, error: Exception, waited_s: float) -> None:
        broken = getattr(error, "actor_init_failed", False) or "creation task" in str(error)
        if broken or waited_s > self._timeout_s:
            why = (
                "could not start" if broken else f"has not replied for {waited_s:.0f} s (engine.hub_timeout_s={self._timeout_s:g})"
            )
            reason = last_line(str(error)) or type(error).__name__
            raise ExchangeFailed(f"the hub {why}: {reason} Saved checkpoints are valid. Resume the run.") from error


def last_line(text: str) -> str:
    """Of an error with a traceback, the message."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
