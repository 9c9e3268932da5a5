"""Whoever starts an elastic run: keeps the lighthouse and the islands of this machine going until the run is over.

A process that dies is started again. An island that refuses to start, or dies again and again soon after, is given up with what it
said, and the others go on; the run ends when none is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError
from atoll.core.events import Event, from_json
from atoll.core.protocols import Sink
from atoll.engines.driver import is_finished
from atoll.engines.elastic.rendezvous import free_port, is_free
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.processes.launch import last_words
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run

if TYPE_CHECKING:
    from atoll.testing.chaos.fault_injector import FaultInjector

_LOOK_S = 0.05
_QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft tells of every meeting, and torch of every store that is away."""
_PATIENCE_S = 5.0
"""So long processes that were asked to end are waited for."""
REFUSED, STATELESS = 2, 4
"""The exit codes of a process that cannot do what it was asked to, and of one that found no state to begin with or none that it
can read."""
_MOST_IN_A_ROW, _SOON_S = 5, 10.0
"""A process that dies so often, each time so soon after it was started, is not started again."""


Inside = Callable[[str, Sequence[str]], Sequence[str]]
"""Of a process's name and its command, the command that starts it where it belongs."""


class IslandFailed(AtollError):
    """No island of this machine can be kept going, or not the lighthouse."""


def as_it_is(name: str, command: Sequence[str]) -> Sequence[str]:
    """It belongs where this process is."""
    return command


def island_name(number: int) -> str:
    """What the islands that a run starts are called: names sort as numbers do."""
    return f"island-{number:04d}"


def log_of(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


@dataclass
class Child:
    """A process that is kept going.

    Attributes:
        name: of it.
        command: that starts it.
        log: where it writes.
        process: the present one.
        started: how often it was.
        began_s: when it was last.
        soon: how often in a row it died soon after.
        given_up: why it is not started any more.
    """

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: int = 0
    began_s: float = 0.0
    soon: int = 0
    given_up: str = ""

    def let_go(self) -> None:
        """Nothing is held of the present process any more. If it is still there, it ends."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def start(self) -> None:
        self.let_go()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            # Its input is a pipe from here that nobody writes to: it ends when this process does, however that may be.
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**_QUIET, **os.environ},
            )
        self.started += 1
        self.began_s = time.monotonic()

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.code is None

    def died(self, *, alone: bool) -> None:
        """It is dead, and is started again, or given up where that is of no use.

        Args:
            alone: whether nobody is alive who may have the state, though it does not answer just now.
        """
        code = self.code
        if code != STATELESS or alone:
            self.soon = self.soon + 1 if time.monotonic() - self.began_s < _SOON_S else 0
        if code == REFUSED or (code == STATELESS and alone) or self.soon >= _MOST_IN_A_ROW:
            self.given_up = last_words(self.log) or f"see {self.log}"
        else:
            self.start()


class Supervisor:
    """Keeps an elastic run going.

    Args:
        run: placed on the planned islands.
        place: how.
        folder: of the run.
        say: takes what a person may want to know.
        sinks: who takes the events, as they appear in the log.
        chaos: breaks it on purpose.
        inside: where the islands are, if not where this process is.
    """

    def __init__(
        self,
        run: Run,
        place: Elastic,
        folder: Path,
        *,
        say: Callable[[str], object],
        sinks: Sequence[Sink] = (),
        chaos: FaultInjector | None = None,
        inside: Inside = as_it_is,
    ) -> None:
        self._folder, self._say, self._chaos, self._inside = folder, say, chaos, inside
        self.address = f"{place.host}:{place.port or free_port(place.host)}"
        self._invitation = folder / "invitation.json"
        lighthouse = _lighthouse_before(self._invitation, place.host) or f"{place.host}:{free_port(place.host)}"
        self._invitation.write_text(JoinInfo(run, place, lighthouse).to_text(), "utf-8")
        base = [sys.executable, "-m", "atoll"]
        self.harbour = Child("lighthouse", [*base, "harbour", str(self._invitation), self.address], log_of(folder, "lighthouse"))
        self.islands = [self._island(base, number) for number in range(place.processes or run.world.islands)]
        self._tail = Tail(folder, [*sinks, *([chaos] if chaos is not None else [])])

    def _island(self, base: Sequence[str], number: int) -> Child:
        name = island_name(number)
        command = [*base, "island", self.address, "--name", name, "--folder", str(self._folder)]
        if self._chaos is not None and self._chaos.script.update_faults:
            script = self._folder / "chaos.json"
            script.write_text(self._chaos.script.to_text(), "utf-8")
            command += ["--chaos", str(script)]
        return Child(name, self._inside(name, command), log_of(self._folder, name))

    def keep_going(self) -> None:
        """Until the run is over.

        Raises:
            IslandFailed: none of them can be kept going, or not the lighthouse; or they ended, and the run is not finished. All
                have been stopped.
        """
        with self._started():
            while not all(child.code == 0 or child.given_up for child in self.islands):
                for child in [self.harbour, *self.islands]:
                    if child.code is not None and not child.given_up and (child.code or child is self.harbour):
                        self._look_after(child)
                self._tail.follow()
                self._break()
                time.sleep(_LOOK_S)
            self._tail.follow()
        if not is_finished(RunFolder(self._folder)):
            lost = "; ".join(f"{child.name}: {child.given_up}" for child in self.islands if child.given_up)
            raise IslandFailed(
                f"all islands of this machine have ended, and the run is not finished{f' ({lost})' if lost else ''}. See "
                f"{log_of(self._folder, 'island-*')}, then go on: atoll run --resume {self._folder}."
            )

    def _look_after(self, child: Child) -> None:
        how = _how(child.code or 0)
        # Who was started later looks for the state itself.
        child.died(alone=not any(other.is_alive and other.began_s < child.began_s for other in self.islands))
        if not child.given_up:
            self._say(f"{child.name} has died ({how}) and is started again")
        elif child is self.harbour or all(island.given_up for island in self.islands):
            raise IslandFailed(f"{child.name} cannot be kept going: {child.given_up}.")
        else:
            self._say(f"{child.name} cannot be kept going, and the others go on without it: {child.given_up}")

    def _break(self) -> None:
        if self._chaos is not None:
            running = {child.name: child.process for child in [self.harbour, *self.islands] if child.process is not None}
            self._chaos.step(time.monotonic(), running)

    @contextmanager
    def _started(self) -> Iterator[None]:
        everybody = [self.harbour, *self.islands]
        try:
            for child in everybody:
                child.start()
            yield
        finally:
            if self._chaos is not None:
                self._chaos.close()
            _stop(everybody)


def _lighthouse_before(invitation: Path, host: str) -> str | None:
    """Where the lighthouse was when the run was last carried out: islands elsewhere look for it there."""
    if not invitation.exists():
        return None
    address = JoinInfo.from_text(invitation.read_text("utf-8")).lighthouse
    before, _, port = address.rpartition(":")
    return address if before == host and is_free(host, int(port)) else None


def _stop(children: Sequence[Child]) -> None:
    running = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _PATIENCE_S
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
    for child in children:
        child.let_go()


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Tail:
    """Follows the log of a run that others write, for whoever watches.

    Args:
        folder: of the run.
        sinks: who takes the events.
    """

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self._path, self._sinks = RunFolder(folder).events, sinks
        self._at = self._path.stat().st_size if self._path.exists() else 0

    def follow(self) -> None:
        """Pass on what is new."""
        if not self._sinks or not self._path.exists():
            return
        if self._path.stat().st_size < self._at:  # it was cut, and goes on from a checkpoint
            self._at = self._path.stat().st_size
        with open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError):  # half a line, where the log was cut behind our back and has grown again
                    self._emit(from_json(line.decode()))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)
