"""A run on Ray, to be broken too: Ray starts its processes, and each says in its log which it is.

Whoever drives such a run waits for the hub most of the time, also for one that is frozen. So a script is carried out by a thread.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from atoll.core.errors import ConfigError
from atoll.core.events import Event
from atoll.testing.chaos.fault_injector import Chaos
from atoll.testing.chaos.faults import Script
from atoll.testing.chaos.report import CHAOS_LOG

HUB = "hub"
"""The name of a run's hub; its workers are worker-0 and so on, by their places."""
_LOOK_S = 0.05
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


def ray_names(workers: int) -> list[str]:
    """What the processes of a run with so many workers are called.

    >>> ray_names(2)
    ['hub', 'worker-0', 'worker-1']
    """
    return [HUB, *(f"worker-{number}" for number in range(workers))]


def refuse_on_ray(script: Script, workers: int) -> None:
    """Refuse a script of what cannot happen to a run on Ray with so many workers."""
    names = ray_names(workers)
    allowed = f"Kill, Freeze and FullDisk of {', '.join(names)}"
    if script.spoils:
        raise ConfigError(
            f"a script spoils what {_listed({one.island for one in script.spoils})} brings, which is for islands that come and go "
            f"(--elastic). On Ray there is {allowed}. Leave out the spoils."
        )
    if script.lines:
        raise ConfigError(
            f"a script breaks the lines {_listed(script.lines)}, and on Ray, which joins processes in its own way, there are none. "
            f"There is {allowed}. Leave out Cut and Slow."
        )
    strangers = script.victims - set(names)
    if strangers:
        raise ConfigError(
            f"a script has {_listed(strangers)} as victims, and the run starts {', '.join(names)}. Name some of these."
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


class RayChaos:
    """Carries out a script on a run on Ray for as long as it is open, in a thread of its own; then all is mended. It is also a
    sink: the script's clock begins with the first update that it hears of.

    Args:
        script: what is to happen. Victims on other machines are skipped, and it is written down.
        folder: of the run.
    """

    def __init__(self, script: Script, folder: Path) -> None:
        self._chaos, self._folder = Chaos(script, folder / CHAOS_LOG), folder
        self._alone, self._over = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._break, name="chaos", daemon=True)

    def emit(self, event: Event) -> None:
        """An event of the run was heard of."""
        with self._alone:
            self._chaos.emit(event)

    def _break(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                self._step()
        except Exception as error:  # whoever waits for a frozen hub must not wait for ever
            self._error = error
            with suppress(OSError):  # as it may be what cannot be written down
                self._chaos.close()

    def _step(self) -> None:
        with self._alone, suppress(ProcessLookupError):  # of one that Ray has buried in that very moment
            self._chaos.step(time.monotonic(), ray_processes(self._folder))

    def __enter__(self) -> RayChaos:
        self._step()  # so that its clock is right before anything is heard of
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._chaos.close()
        if self._error is not None and error is None:
            raise self._error
