"""A standby rendezvous, which a joiner runs beside its copy of the run's folder for the case that the run's own is lost for good.

In a trusted network it is a registry and a lighthouse. Else it has a gateway of its own, whose certificate the run's authority has
signed for a join file that allows standing by. It admits the machines that the run's gateway admits: it knows their authority, and
fetches the list of those that were revoked as long as the run's gateway answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.core.verified_files import write_text
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayNetwork, own_address
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous
from atoll.engines.elastic.run_identity import IDENTITY, JoinFile, RunSecrets
from atoll.engines.elastic.spec import JoinInfo
from atoll.engines.liveness import Heartbeat
from atoll.engines.network_interfaces import LOOPBACK, free_port

_FETCH_S = 1.0
"""How often the list of revoked join files is fetched."""


class TrustedStandby:
    """A registry and a lighthouse that any machine of a trusted network may use. `folder` keeps the lighthouse's port: islands that
    have learnt it find a restarted standby again."""

    def __init__(self, listen: str, info: JoinInfo, network: DirectNetwork, folder: Path) -> None:
        host, path = listen.rpartition(":")[0], folder / "lighthouse_port"
        former = path.read_text("ascii", errors="replace").strip() if path.exists() else ""
        port = free_port(host, int(former) if former.isdecimal() and int(former) < 1 << 16 else 0)
        write_text(path, f"{port}\n")
        first = info.first or (network.registry, info.lighthouse)
        self._rendezvous = Rendezvous(replace(info, lighthouse=f"{host}:{port}", first=first), listen)
        self.dialled = self._rendezvous.address
        self.name = f"{self.dialled} {self._rendezvous.lighthouse}"
        """As its island registers it."""

    def close(self) -> None:
        self._rendezvous.close()


class SecuredStandby:
    """A registry and a lighthouse on loopback, behind a gateway. `folder` keeps the list of revoked join files."""

    def __init__(
        self, listen: str, info: JoinInfo, network: GatewayNetwork, file: JoinFile, folder: Path, log: Callable[[str], object]
    ) -> None:
        self._path = folder / "revoked.txt"
        self._secrets = RunSecrets(file.credentials, authority_key="", revoked=_read(self._path))
        self._network, self._registry = network, RegistryClient(network.registry)
        lighthouse, registry = (f"{LOOPBACK}:{free_port(LOOPBACK)}" for _ in range(2))
        self._rendezvous = Rendezvous(replace(info, lighthouse=lighthouse, registry=registry), registry)
        ports = {"registry": int(registry.rpartition(":")[2]), "lighthouse": int(lighthouse.rpartition(":")[2])}
        self._gateway = Gateway(lambda: self._secrets, listen, ports, log)
        self.dialled = file.standby
        self.name = f"{file.credentials.identity}@{file.standby}"
        """As its island registers it."""
        network.runs_standby(self.name, own_address(self._gateway.address))
        self._rendezvous.set_revoked(self._secrets.revoked)
        self._heartbeat = Heartbeat(lambda number: self._fetch_revoked(), interval_s=_FETCH_S)

    def _fetch_revoked(self) -> None:
        with suppress(ExchangeFailed):
            self._revoke(self._registry.revoked())

    def _revoke(self, identities: list[str]) -> None:
        known = self._secrets.revoked
        if new := sorted({one for one in identities if IDENTITY.fullmatch(one)} - {*known}):
            self._secrets = replace(self._secrets, revoked=(*known, *new))
            self._rendezvous.set_revoked(self._secrets.revoked)
            with suppress(CheckpointError):  # on a full disk: it is fetched again
                write_text(self._path, "".join(f"{one}\n" for one in self._secrets.revoked), CheckpointError)

    def close(self) -> None:
        self._heartbeat.close()
        self._gateway.close()
        self._rendezvous.close()


def _read(path: Path) -> tuple[str, ...]:
    """The identities in this file, one per line."""
    words = path.read_text("utf-8", errors="replace").split() if path.exists() else []
    if not all(map(IDENTITY.fullmatch, words)):
        raise ConfigError(f"{path} is damaged: it holds ids of revoked join files, one per line. Restore it from a copy.")
    return tuple(words)
