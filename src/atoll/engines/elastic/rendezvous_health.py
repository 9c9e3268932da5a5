"""Whether the rendezvous of a run answers: a stopped process closes no connection."""

from __future__ import annotations

import socket
import time

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.elastic.gateway_client import GatewayClient
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.liveness import Heartbeat

_PROBE_S = 1.0
"""Between two requests to the rendezvous."""


class RendezvousHealth:
    """Asks the lighthouse, the registry and the gateway once a second whether they answer, in a thread of its own. A stopped
    process closes no connection, so only an answer shows that it works. Times are those of requests, not of this process, which may
    be stopped too.

    Args:
        lighthouse, registry: their addresses, HOST:PORT.
        gateway: a client of the run's gateway, if it has one.
        limit_s: for an answer.
        attempts: requests in a row without an answer, after which the rendezvous hangs.
        start_s: a new process may take this long until its first answer, if a former one answered at all: this process may be on
            a network that does not reach them.
    """

    def __init__(
        self,
        lighthouse: str,
        registry: str,
        gateway: GatewayClient | None = None,
        *,
        limit_s: float = 1.5,
        attempts: int = 3,
        start_s: float = 120.0,
    ) -> None:
        self._lighthouse, self._registry, self._gateway, self._limit_s = lighthouse, registry, gateway, limit_s
        self._attempts, self._start_s, self._reachable = attempts, start_s, False
        self.restarted()
        self._thread = Heartbeat(lambda number: self._probe(), interval_s=_PROBE_S)

    def restarted(self) -> None:
        """A new process has been started."""
        self._process, self._failed, self._answered, self._started_s = object(), 0, False, time.monotonic()

    @property
    def hangs(self) -> bool:
        if not self._answered:
            return self._reachable and time.monotonic() - self._started_s > self._start_s
        return self._failed >= self._attempts

    def _probe(self) -> None:
        process = self._process
        answers = self._lighthouse_answers() and self._registry_answers() and self._gateway_answers()
        if process is self._process:  # else the answer is the former process's
            self._answered, self._failed = self._answered or answers, 0 if answers else self._failed + 1
            self._reachable = self._reachable or answers

    def _lighthouse_answers(self) -> bool:
        host, _, port = self._lighthouse.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=self._limit_s) as connection:
                # Any answer will do: this path does not exist.
                connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return bool(connection.recv(1))
        except OSError:
            return False

    def _registry_answers(self) -> bool:
        try:
            RegistryClient(self._registry, self._limit_s).join_info()
        except ExchangeFailed:
            return False
        return True

    def _gateway_answers(self) -> bool:
        """A gateway that refuses this connection, since it has too many, answers too. One that accepts none any more lets the
        connection time out."""
        try:
            if self._gateway is not None:
                self._gateway.open("registry", self._limit_s).close()
        except TimeoutError:
            return False
        except (OSError, ConfigError):
            pass
        return True

    def close(self) -> None:
        self._thread.close(wait=True)
