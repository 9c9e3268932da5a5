"""A process that the supervisor keeps alive, and the delay between the end of that process and its restart."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.library_logs import QUIET
from atoll.core.verified_files import open_to_append
from atoll.engines.elastic.leader_event_log import WARNING
from atoll.engines.elastic.quorum import new_process
from atoll.engines.liveness import PEER_MISSING, last_error

REFUSED, STATELESS, RESCUED = 2, 4, 5
"""Exit codes: of a process that refuses its task; of an island that found no state to start from, or none that it can read; and of
one that has lost the run's folder and saved the state in another."""
_MAX_EARLY_DEATHS, _EARLY_S = 5, 10.0
"""A process that dies this often in a row, each time this soon after its start, is not restarted."""


@dataclass
class Child:
    """A process that the supervisor keeps alive."""

    name: str
    command: Sequence[str]
    log: Path  # of its output
    is_island: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    processes: list[str] = field(default_factory=list, init=False)  # identities of an island's processes so far
    starts: int = field(default=0, init=False)
    started_s: float = field(default=0.0, init=False)  # the last time
    early_deaths: int = field(default=0, init=False)  # in a row
    deaths: int = field(default=0, init=False)  # in a row, each after a short life
    restart_s: float | None = field(default=None, init=False)  # when the dead process is restarted
    killed_for_memory: int = field(default=0, init=False)  # processes of this machine, when this one was started
    read_bytes: int = field(default=0, init=False)  # of its log
    given_up: str = field(default="", init=False)  # the reason why it is not restarted

    def release(self) -> None:
        """Close the pipe to the present process. If it is still alive, it ends."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def start(self) -> None:
        self.release()
        self.log.parent.mkdir(exist_ok=True)  # a run's folder that is lost is not made anew
        if not self.starts and self.log.exists():
            self.read_bytes = self.log.stat().st_size  # the warnings of an earlier run were shown then
        process = new_process(self.name)
        command = [*self.command, "--process", process] if self.is_island else self.command
        with open_to_append(self.log) as log:
            # Its input is a pipe that the supervisor never writes to: it ends when the supervisor does, however that may be.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env={**QUIET, **os.environ}
            )
        self.processes.append(process)
        self.starts += 1
        self.started_s, self.restart_s = time.monotonic(), None
        self.killed_for_memory = _killed_for_memory()

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.exit_code is None

    def cause_of_death(self) -> str:
        """The signal or the exit code, in words."""
        code = self.exit_code or 0
        if code < 0:
            memory = code == -signal.SIGKILL and _killed_for_memory() > self.killed_for_memory
            return f"by {signal.Signals(-code).name}" + (", as the kernel does when memory runs out" if memory else "")
        return f"exit code {code}"

    def plan_restart(self, *, alone: bool, disk_full: bool = False) -> None:
        """Decide when the dead process is restarted, or give it up where a restart is of no use. `alone`: no other island is alive
        that may have the state, though it does not answer at the moment."""
        code, now_s = self.exit_code, time.monotonic()
        lived_s = now_s - self.started_s
        if (code != STATELESS or alone) and not disk_full:
            self.early_deaths = self.early_deaths + 1 if lived_s < _EARLY_S else 0
        if not disk_full and (code == REFUSED or (code == STATELESS and alone) or self.early_deaths >= _MAX_EARLY_DEATHS):
            self.given_up = last_error(self.log) or f"see {self.log}"
            return
        backoff = EVICTED_BACKOFF if code == PEER_MISSING else BACKOFF
        self.deaths = self.deaths + 1 if lived_s < backoff.reset_s else 1
        self.restart_s = now_s + backoff.delay_s(self.deaths)

    def new_warnings(self) -> list[str]:
        """The lines for the console that the process has logged since the last call."""
        size = self.log.stat().st_size if self.log.is_file() else 0
        start, self.read_bytes = (self.read_bytes if self.read_bytes <= size else 0), size
        if start == size:
            return []
        with self.log.open("rb") as log:
            log.seek(start)
            lines = log.read(size - start).decode("utf-8", errors="replace").splitlines()
        return [text.removeprefix(WARNING) for line in lines if (text := line.partition(" ")[2]).startswith(WARNING)]


@dataclass(frozen=True)
class Backoff:
    """How long a process that died waits for its restart. The delay doubles with every death that follows a life of less than
    `reset_s`. It is drawn at random from its upper half, so that processes that died together are not restarted together."""

    first_s: float  # of the first death
    second_s: float
    longest_s: float
    reset_s: float

    def delay_s(self, deaths: int) -> float:
        """After so many deaths in a row.

        >>> [Backoff(0.0, 1.0, 30.0, 60.0).longest_delay_s(deaths) for deaths in (1, 2, 3, 4, 9, 5000)]
        [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
        """
        return self.longest_delay_s(deaths) * random.uniform(0.5, 1.0)

    def longest_delay_s(self, deaths: int) -> float:
        return self.first_s if deaths <= 1 else min(self.second_s * 2.0 ** min(deaths - 2, 60), self.longest_s)


BACKOFF = Backoff(first_s=0.0, second_s=1.0, longest_s=30.0, reset_s=60.0)
EVICTED_BACKOFF = Backoff(first_s=5.0, second_s=10.0, longest_s=300.0, reset_s=600.0)
"""Of an island that was evicted, or that finds no quorum: each time it joins, the others wait for it until they evict it again."""


def _killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed for lack of memory."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as counters:
        return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
    return 0
