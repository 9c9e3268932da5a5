"""The one address of an elastic run: torchft's lighthouse, which says who meets whom, and the roll beside it.

Neither knows anything that islands do not know too: when this process dies and comes back on the same ports, everybody goes on.
"""

from __future__ import annotations

from typing import Any

from atoll.core.optional_imports import require
from atoll.engines.elastic.registry import Board, listening, open_store

TICK_S = 0.02
"""How often the lighthouse looks whether all have come."""


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with listening(host) as door:
        return int(door.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there now."""
    try:
        listening(host, port).close()
    except OSError:
        return False
    return True


class Harbour:
    """A lighthouse and a roll, in this process.

    Args:
        host: the address to listen on.
        port: of the roll, which is the run's address.
        lighthouse_port: of the lighthouse.
        order: what newcomers are told.
        join_limit_s: how long islands that are alive, and do not come to a meeting, are waited for.
        silent_s: whoever is silent for so long is left out of the next meeting.
    """

    def __init__(
        self,
        host: str,
        port: int,
        lighthouse_port: int,
        order: str,
        *,
        join_limit_s: float,
        silent_s: float,
    ) -> None:
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="islands that come and go")
        self._lighthouse = coordination.LighthouseServer(
            bind=f"{_bracketed(host)}:{lighthouse_port}",
            min_replicas=1,
            join_timeout_ms=int(join_limit_s * 1000),
            quorum_tick_ms=int(TICK_S * 1000),
            heartbeat_timeout_ms=int(silent_s * 1000),
        )
        # After the lighthouse: a store that may choose its port must not choose that one.
        self._store, port = open_store(host, port)
        self.address = f"{host}:{port}"
        Board(self.address, self._store).give_order(order)

    def close(self) -> None:
        self._lighthouse.shutdown()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
