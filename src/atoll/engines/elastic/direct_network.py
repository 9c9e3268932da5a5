"""How an island reaches its run and the other islands where each listens on an address that the others can dial."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence

from atoll.engines.elastic.spec import JoinInfo, check_server
from atoll.engines.network_interfaces import is_dialled

QUERY_S = 1.0
"""How long a status query may take."""


class DirectNetwork:
    """How one island reaches its run and the other islands, where each of them listens on an address that this one can dial.

    Args:
        host: of this machine, as other islands dial it.
        registry, lighthouse: addresses of the run's servers.
        run_id: with which queries and answers are marked; "" marks none.
    """

    def __init__(self, host: str, registry: str = "", lighthouse: str = "", run_id: str = "") -> None:
        self.host, self.registry, self.lighthouse, self.run_id = host, registry, lighthouse, run_id

    standbys: Sequence[str] = ()
    """Standby rendezvous that this island knew when it joined."""

    @property
    def run_address(self) -> str:
        """Where this island looks for the run, for messages."""
        return self.registry

    def places(self, info: JoinInfo) -> Sequence[tuple[str, str]] | None:
        """The registries and lighthouses of the run, where this island has joined it at its registry and fetched this; the first
        that answers is used. None: no standby is ever used."""
        return info.places(self.registry)

    def place(self, standby: str) -> tuple[str, str]:
        """The registry and the lighthouse of a standby, as an island registers it. Raises ConfigError if they are no addresses."""
        registry, _, lighthouse = standby.partition(" ")
        check_server(registry)
        check_server(lighthouse)
        return registry, lighthouse

    def forget(self, standby: str) -> None:
        """This island will not change to the standby, unless it is given a `place` again. The present rendezvous is kept."""

    def reaches(self, registry: str) -> bool:
        """Whether this registry can be asked: no registry is behind a gateway that is lost."""
        return True

    def check_reaches(self, registry: str, limit_s: float) -> None:
        """Raises ExchangeFailed, with the reason, if no connection to this registry is to be tried."""

    def use(self, registry: str) -> None:
        """This island has changed to the rendezvous with this registry."""

    def revoke(self, identities: Collection[str]) -> None:
        """Reach nothing through the gateways of these machines any more."""

    def address_of(self, port: int) -> str:
        """What other islands dial to reach a port of this one."""
        return f"{self.host}:{port}"

    def accepts_folder(self, name: str, folder: str) -> bool:
        """Whether the island of this name is believed to write this folder: the run's own, "run", or a copy, which has its name."""
        return folder in ("run", name)

    def is_trusted(self, address: str) -> bool:
        """Whether connections to this address need neither authentication nor encryption."""
        return True

    def dial(self, address: str, limit_s: float) -> socket.socket:
        """A connection to an island, whose operations time out after the limit. Raises OSError."""
        if not is_dialled(address):
            raise ConnectionError(f"{address[:80]!r} is not HOST:PORT")
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=limit_s)

    def refuses(self, address: str) -> bool:
        """Whether this address is of this machine and no process listens there. A refusal from another machine proves nothing: a
        firewall or a proxy may have sent it."""
        if address.rpartition(":")[0] != self.host:
            return False
        try:
            DirectNetwork.dial(self, address, QUERY_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def serve(self, adopt: Callable[[socket.socket], object], log: Callable[[str], object] = bool) -> None:
        """Pass connections on that reach this island by another way than its own port. Log why none can."""

    def close(self) -> None:
        pass
