"""The processes of a run on Ray, so that they can be broken too: Ray starts them, and each says in its log which it is."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HUB = "hub"
"""The name of a run's hub; its workers are worker-0 and so on, by their places."""
_SAYS = re.compile(
    r"^[\d:]{8} (?:hub on (?P<here>\S+), process (?P<hub>\d+),|worker \d+: life \d+: process (?P<worker>\d+) on (?P<node>\S+),)",
    re.MULTILINE,
)


class RayProcess(NamedTuple):
    """A process that Ray has started on this machine. A breaking.Process."""

    pid: int

    def poll(self) -> int | None:
        """None while it lives. How it ended is not known."""
        with suppress(OSError):
            # By its title: another process may have its number by now, and must not be broken in its stead.
            if Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"ray::"):
                return None
        return -1


def ray_processes(folder: Path) -> dict[str, RayProcess]:
    """The hub and the workers of the run in this folder that are on this machine, by their names: whoever held each place last."""
    found = {}
    for path in sorted((folder / "logs").glob("*.log")):
        said = list(_SAYS.finditer(path.read_text("utf-8", errors="replace")))
        if said and (said[-1]["here"] or said[-1]["node"]) == platform.node():
            found[path.stem] = RayProcess(int(said[-1]["hub"] or said[-1]["worker"]))
    return found
