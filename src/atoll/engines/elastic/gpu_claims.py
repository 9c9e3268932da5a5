"""Which of a machine's GPUs each of its islands takes."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Sequence

import torch

from atoll.core.errors import ConfigError
from atoll.runs.run_settings import Run, device_of


def claim_devices(run: Run, name: str, count: int) -> tuple[list[str], list[socket.socket]]:
    """The devices of the island of this name, the first of which is this process's current one, and the claims that hold them."""
    if device_of(run) != "cuda":
        return [device_of(run)] * count, []
    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    indices, claims = claim_gpus(gpus, island_number(name), count)
    torch.cuda.set_device(indices[0])
    return [f"cuda:{index}" for index in indices], claims


def island_number(name: str) -> int:
    """The number of a planned island, by its name; a joiner from another machine gets one of 100,003 others.

    >>> island_number("island-0007"), island_number("box-7-00c0ffee")
    (7, 51601)
    """
    planned = re.fullmatch(r"island-(\d+)", name)
    return int(planned[1]) if planned else zlib.crc32(name.encode()) % 100_003


def claim_gpus(gpus: Sequence[str], number: int, count: int = 1) -> tuple[list[int], list[socket.socket]]:
    """Claim `count` of this machine's GPUs, given by their unique ids, for one island. Island 0 claims the first GPUs, if they are
    free. If too few are free, the island shares some. Returns their indices, and the claims, which hold until they are closed."""
    if count > len(gpus):
        raise ConfigError(f"engine.devices={count}: this machine has {len(gpus)} GPUs. Use at most as many.")
    first, claims = number * count % len(gpus), dict[int, socket.socket]()
    order = (*range(first, len(gpus)), *range(first))
    for index in order:
        # Linux keeps this socket name as long as the socket exists, so a killed process leaves nothing behind.
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0atoll gpu {gpus[index]}")
        except OSError:
            claim.close()
            continue
        claims[index] = claim
        if len(claims) == count:
            break
    return [*claims, *(index for index in order if index not in claims)][:count], [*claims.values()]
