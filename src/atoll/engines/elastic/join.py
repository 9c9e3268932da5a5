"""One island of an elastic run, as a process: it finds the run by its address, and is told there what it is."""

from __future__ import annotations

import gc
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.island import Interpose, IslandProcess
from atoll.engines.elastic.membership import log_while_waiting
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.spec import JoinInfo

_LOOK_S = 0.2


def take_part(
    address: str,
    name: str,
    *,
    folder: Path | None,
    say: Callable[[str], object],
    start_limit_s: float,
    interpose: Interpose | None = None,
    devices: int | None = None,
) -> None:
    """Be an island of the run at this address, until it is over.

    Args:
        address: of the run.
        name: of the island, unlike all others'.
        folder: of the run, where this machine has it.
        say: takes what a person may want to know.
        start_limit_s: how long the run is waited for.
        interpose: replaces parts of the island, for fault injection.
        devices: of this island; none: as many as the others have.
    """
    invitation = invited(address, say, start_limit_s)
    host = _host_towards(address)
    torch.set_num_threads(invitation.run.cluster.threads_per_island)
    say(f"{name} on {platform.node()} ({host}), process {os.getpid()}, {torch.get_num_threads()} thread(s)")
    gc.freeze()  # with each change of company garbage is collected, while others wait: what was imported is none
    with ExitStack() as stack:
        island = IslandProcess(invitation, address, host, name, folder, say, interpose, devices)
        stack.push(lambda kind, error, trace: island.close(wait=kind is None))
        island.run()


def invited(address: str, say: Callable[[str], object], limit_s: float) -> JoinInfo:
    """What the run at this address is."""
    registry, deadline_s = RegistryClient(address), time.monotonic() + limit_s
    with log_while_waiting(say, f"waiting for the run at {address}"):
        while True:
            try:
                text = registry.join_info()
                if text is not None:
                    return JoinInfo.from_text(text)
                missing = ExchangeFailed(f"the run at {address} has not said what it is for {limit_s:.0f} s. Start it anew.")
            except ExchangeFailed as error:
                missing = error
            if time.monotonic() > deadline_s:
                raise missing
            time.sleep(_LOOK_S)


def _host_towards(address: str) -> str:
    """The address by which a machine that is reached there reaches this one."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        found: str = connection.getsockname()[0]
        return found
