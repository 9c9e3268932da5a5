"""Fault injection into the processes of a run on Ray. Ray starts them, and each logs its process id.

The driving process blocks on the hub most of the time, also on a frozen hub, so a thread of its own injects the faults.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import ConfigError
from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import CHAOS_LOG, FaultScript

HUB = "hub"
"""Name of a run's hub; its workers are worker-0 and so on."""
_POLL_S = 0.05
_PROCESS_LINE = re.compile(
    r"^\S+ (?:hub on (?P<here>\S+), process (?P<hub>\d+),"
    r"|worker \d+: incarnation \d+: process (?P<worker>\d+) on (?P<node>\S+),)",
    re.MULTILINE,
)


class RayProcess(NamedTuple):
    """A process that Ray has started on this machine. A fault_injector.TargetProcess."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs, else -1: its exit code is unknown."""
        with suppress(OSError):
            # By its title: another process may have the same id by now, and must not be hit.
            if Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"ray::"):
                return None
        return -1


def ray_processes(folder: Path) -> dict[str, RayProcess]:
    """The latest process of the hub and of each worker that runs on this machine, by name, from the logs in the run's folder."""
    found = {}
    for path in sorted((folder / "logs").glob("*.log")):
        lines = list(_PROCESS_LINE.finditer(path.read_text("utf-8", errors="replace")))
        if lines and (lines[-1]["here"] or lines[-1]["node"]) == platform.node():
            found[path.stem] = RayProcess(int(lines[-1]["hub"] or lines[-1]["worker"]))
    return found


def check_ray_script(script: FaultScript, workers: int) -> None:
    """Refuse faults that cannot be injected into a run on Ray with this many workers."""
    names = [HUB, *(f"worker-{number}" for number in range(workers))]
    allowed = f"Kill, Freeze and FullDisk of {', '.join(names)}"
    if script.update_faults:
        islands = sorted({fault.island for fault in script.update_faults})
        raise ConfigError(
            f"a fault script has update faults of {', '.join(islands)}, which only elastic islands (--engine elastic) have. A run "
            f"on Ray takes {allowed}. Leave out update_faults."
        )
    if script.links:
        raise ConfigError(
            f"a fault script names the links {', '.join(sorted(script.links))}; a run on Ray has none, since Ray connects its "
            f"processes. It takes {allowed}. Leave out Cut, CutOneWay, CutPair and Slow."
        )
    script.check_names(names)


@contextmanager
def inject_ray_faults(script: FaultScript, folder: Path) -> Iterator[FaultInjector]:
    """Injects the faults of a script into the run on Ray in this folder, in a thread, and reverts them at the end. The run's events
    start the script's clock at the first arrived update. Faults of processes on other machines are skipped, and logged as such."""
    injector, ended, errors = FaultInjector(script, folder / CHAOS_LOG), threading.Event(), list[Exception]()

    def step() -> None:
        with suppress(ProcessLookupError):  # of a process that ended since poll()
            injector.step(time.monotonic(), ray_processes(folder))

    def step_until_the_end() -> None:
        try:
            while not ended.wait(_POLL_S):
                step()
        except Exception as error:  # a hub must not stay frozen, since the driving process waits for it
            errors.append(error)
            with suppress(OSError):  # the log may be what failed
                injector.close()

    step()  # sets the injector's clock before the first event
    thread = threading.Thread(target=step_until_the_end, name="chaos", daemon=True)
    thread.start()
    try:
        yield injector
    finally:
        ended.set()
        thread.join()
        injector.close()
    if errors:
        raise errors[0]
