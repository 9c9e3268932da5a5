"""A standby rendezvous, which a joiner runs beside its copy of the run's folder for the case that the run's own is lost for good.

In a trusted network it is a registry and a lighthouse. Else it has a gateway of its own, whose certificate the run's authority has
signed for a join file that allows standing by. It admits the machines that the run's gateway admits: it knows their authority, and
fetches the list of those that were revoked as long as the run's gateway answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.core.errors import CheckpointError, ExchangeFailed
from atoll.core.verified_files import read_kept, write_record
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayNetwork, own_address
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous
from atoll.engines.elastic.run_identity import IDENTITY, JoinFile, RunSecrets
from atoll.engines.elastic.spec import JoinInfo
from atoll.engines.liveness import Heartbeat
from atoll.engines.network_interfaces import LOOPBACK, free_port, is_dialled

LIGHTHOUSE_FILE, REVOKED_FILE = "lighthouse.json", "revoked.json"
"""In a copy of the run's folder: the port of the standby's lighthouse; the ids of revoked join files."""
_FETCH_S = 1.0
"""How often the list of revoked join files is fetched."""


class TrustedStandby:
    """A registry and a lighthouse that any machine of a trusted network may use. `folder` keeps the lighthouse's port: islands that
    have learnt it find a restarted standby again."""

    def __init__(self, listen: str, info: JoinInfo, network: DirectNetwork, folder: Path) -> None:
        host = listen.rpartition(":")[0]
        port = free_port(host, former_port(folder))
        write_record(folder / LIGHTHOUSE_FILE, {"port": port})
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
        self._path = folder / REVOKED_FILE
        self._secrets = RunSecrets(file.credentials, authority_key="", revoked=former_revoked(folder))
        self._network, self._registry = network, RegistryClient(network.registry, network=network)
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
                write_record(self._path, {"revoked": self._secrets.revoked}, CheckpointError)

    def close(self) -> None:
        self._heartbeat.close(wait=True)
        self._gateway.close()
        self._rendezvous.close()


def former_port(folder: Path) -> int:
    """The port of the lighthouse that ran beside this copy; 0 if none did."""

    def parse(record: Mapping[str, Any]) -> int:
        if not is_dialled(f"{LOOPBACK}:{record['port']}"):
            raise ValueError("it holds no port")
        return int(record["port"])

    return read_kept(folder / LIGHTHOUSE_FILE, parse, 0, "Remove it: the islands then learn another port of the lighthouse.")


def former_revoked(folder: Path) -> tuple[str, ...]:
    """The ids of revoked join files that the standby beside this copy has fetched."""

    def parse(record: Mapping[str, Any]) -> tuple[str, ...]:
        if not all(map(IDENTITY.fullmatch, record["revoked"])):
            raise ValueError("it holds no ids of join files")
        return tuple(record["revoked"])

    remedy = "Restore it from a copy; or remove it while the run's first machine is up, from which it is fetched again."
    return read_kept(folder / REVOKED_FILE, parse, (), remedy)
