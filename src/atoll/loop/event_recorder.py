"""The event log of an own loop: each process records its rounds, and the first process writes the events of all.

A record goes through the store of the process group. The first process reads the records of earlier rounds after each round, as far
as they have arrived, so that no process waits for the log.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, Store

from atoll.core.errors import ConfigError
from atoll.core.events import RunStarted
from atoll.core.flat_tree import Tree
from atoll.core.protocols import whole_steps
from atoll.core.verified_files import expanded, write_digests
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.round_record import EventAggregator, RoundRecord, WallClock
from atoll.loop.settings import LoopSettings
from atoll.runs.folder import LOOP_RECIPE, RunFolder
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.sinks import Fanout

if TYPE_CHECKING:
    from atoll.loop.topology import GridPosition

_LAST_RECORDS_S = 10.0
"""How long the first process waits at the end for records of the other processes."""


class EventRecorder:
    """What this process did in the present round; the first process also has the log. Without `out` and sinks nothing is posted."""

    def __init__(self, settings: LoopSettings, position: GridPosition, store: Store | None) -> None:
        self._settings, self._position, self._store = settings, position, store or HashStore()
        self.clock, self.record = WallClock(), RoundRecord()
        self.is_on = settings.records
        self._writes = self.is_on and position.island == position.device == 0
        self._span_start_s: float | None = None
        self._span_end_s = 0.0
        self._span_steps = 0
        self._losses: list[float] = []
        self._tokens = self._rounds = 0
        self._steps = 0  # of the user, in the rounds that were read
        self._unread: deque[tuple[int, int | None, float, Sequence[int]]] = deque()
        """Rounds whose records have not all been read: number, steps of the run if the algorithm takes them, time of their end, and
        islands."""
        self.folder: RunFolder | None = None
        self._held = ExitStack()
        """The folder, as long as this process writes to it."""
        self._sink = Fanout([])
        self._accounting = RunAccounting(position.islands, real=True)
        self._accounting.set_metrics({"loss": math.nan})
        self._aggregator = EventAggregator(self._accounting, position.devices, inside=False, sink=self._sink)

    def begin(self, params: int, *, resumes: bool) -> None:
        """The islands begin together. `params` is the number of trainable parameters of the whole model. A block that `resumes` has
        a folder beside that of the block before it."""
        self.clock.set(0.0)
        if not self._writes:
            return
        settings, name = self._settings, type(self._settings.algorithm).__name__
        sinks: list[Any] = [*settings.sinks]
        if settings.out is not None:
            path = expanded(Path(settings.out))
            if resumes:
                further = (path.with_name(f"{path.name}-{number}") for number in count(2))
                path = next(filter(_is_new, chain([path], further)))
            if not _is_new(path):
                raise ConfigError(f"out={path} is a folder that is not empty. Give each training that begins a new one.")
            record = {"recipe": LOOP_RECIPE, "algorithm": repr(settings.algorithm), "finish": settings.finish}
            self.folder = RunFolder.create(path, record, sys.argv)
            self._held.enter_context(self.folder.lock())
            sinks.insert(0, JsonlSink(self.folder.events, dated=True))
        self._sink = Fanout(sinks)
        self._aggregator = EventAggregator(self._accounting, self._position.devices, inside=False, sink=self._sink)
        islands = self._position.islands
        started = RunStarted(recipe=LOOP_RECIPE, algorithm=name, islands=islands, params=params, steps=0, seed=0, engine="loop")
        self._sink.emit(started)

    # ---------------------------------------------------------------------------------------------------- within a round

    def user_continues(self) -> None:
        """The user's loop computes from now on."""
        if self._span_start_s is None:
            self._span_start_s = self.clock.now_s()

    def user_stepped(self) -> None:
        self._span_end_s = self.clock.now_s()
        self._span_steps += 1

    def close_span(self) -> None:
        """The algorithm does something else than to wait for the user's next step."""
        steps, start_s = self._span_steps, self._span_start_s
        self._span_start_s, self._span_steps = None, 0
        if not steps or start_s is None or self._position.device:  # the devices of an island step together
            return
        losses, tokens = self._losses or [math.nan], self._tokens
        self._losses, self._tokens = [], 0
        taken = steps if self._settings.stepped_by == "user" else 0
        self.record.computed.append(ComputeSpan(start_s, self._span_end_s, taken, steps, [math.fsum(losses) / len(losses)], tokens))
        self.record.tokens += tokens

    def log(self, loss: float | None, tokens: int) -> None:
        if loss is not None:
            self._losses.append(float(loss))
        self._tokens += tokens

    # ----------------------------------------------------------------------------------------------------- after a round

    def end_round(self, state: Any, names: Sequence[str]) -> None:
        """A round has led to this State, by exchanges of the islands of these names."""
        self.close_span()
        self._rounds += 1
        if self.is_on:
            self._store.set(self._key(self._rounds, self._position.island, self._position.device), self.record.to_json())
        if self._writes:
            steps = getattr(state, "steps", None)
            by_user = self._settings.stepped_by == "user"  # whose last round may be shorter
            taken = self._rounds * self._settings.algorithm.steps_per_round if steps is None else whole_steps(steps)
            islands = [int(name.rpartition(" ")[2]) for name in names]
            self._unread.append((self._rounds, None if by_user else taken, self.clock.now_s(), islands))
            self._read()
        self.record.clear()

    def _read(self, wait_s: float = 0.0) -> None:
        """Write the events of rounds whose records have arrived, in order, up to the first that is not complete."""
        while self._unread:
            number, steps, now_s, islands = self._unread[0]
            keys = [self._key(number, island, device) for island in islands for device in range(self._position.devices)]
            if wait_s:
                self._store.wait(keys, timedelta(seconds=wait_s))
            elif not self._store.check(keys):
                return
            records = [RoundRecord.from_json(self._store.get(key).decode()) for key in keys]
            for key in keys:
                self._store.delete_key(key)
            self._unread.popleft()
            self._steps += max(sum(span.steps for span in record.computed) for record in records)
            self._aggregator.add_round(records, self._steps if steps is None else steps, now_s, islands)

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        if self._writes:
            self._sink.emit(self._accounting.evaluated(metrics, self.clock.now_s()))

    def finish(self, params: Tree) -> None:
        """The block ends with these agreed weights."""
        if not self._writes:
            return
        with suppress(RuntimeError):  # an island left by an exception after its last exchange
            self._read(_LAST_RECORDS_S)
        if self._unread:
            logging.getLogger("atoll").warning(
                f"atoll: the log lacks the last {len(self._unread)} rounds: an island that left did not send its records of them."
            )
        if self._rounds > len(self._unread):
            self._sink.emit(self._accounting.finished(self.clock.now_s(), 0, params.digest()))
        self._sink.close()
        if self.folder is not None:
            files = [self.folder.settings.name, self.folder.events.name]
            write_digests(self.folder.path, files, result=self.folder.events.name)
        self._held.close()

    def close(self) -> None:
        self._sink.close()
        self._held.close()

    @staticmethod
    def _key(number: int, island: int, device: int) -> str:
        return f"record/{number}/{island}/{device}"


def _is_new(path: Path) -> bool:
    return not path.is_dir() or not any(path.iterdir())
