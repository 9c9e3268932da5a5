"""Who writes: of the islands that have the run's folder, the first that took part in a commit logs it, judges and saves.

Every island knows all that is to be written, since all keep the same books. So when the one who writes dies, the next goes on where
the log ends.
"""

from __future__ import annotations

import fcntl
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.engines.elastic.engine import Commit, ElasticEngine
from atoll.engines.evaluator import Evaluator
from atoll.errors import CheckpointError
from atoll.events import Attended, Evaluated, Event, IslandJoined, RunStarted, Saved, SaveFailed, WarmStartFinished
from atoll.protocols import Workload
from atoll.runs.checkpoint import Checkpoint, Checkpoints, check_origin
from atoll.runs.execute import Execution, is_finished
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run
from atoll.runs.warm import Cache, WarmStart
from atoll.telemetry.jsonl import JsonlSink

_REMEMBERED = 256  # commits: so long a log can lag behind


class Desk:
    """The desk of one island.

    Args:
        run: the Run, resolved.
        folder: of the run.
        workload: that is trained.
        warm: what the run begins with.
        evaluator: judges weights.
        origin: what a checkpoint must be of.
        cache: keeps the data that are read.
        say: takes what a person may want to know.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        workload: Workload,
        warm: WarmStart,
        evaluator: Evaluator,
        origin: Mapping[str, str | None],
        cache: Cache,
        say: Callable[[str], object],
    ) -> None:
        self._run, self._folder, self._workload, self._warm, self._evaluator = run, folder, workload, warm, evaluator
        self._origin, self._say = dict(origin), say
        self._execution = Execution(run, folder, None, (), cache)
        self.checkpoints = Checkpoints(folder.checkpoints, run.keep.checkpoints)
        self._recent: deque[tuple[int, Sequence[Event]]] = deque(maxlen=_REMEMBERED)
        self._log: JsonlSink | None = None
        self._steps = 0
        """Of the run, at the last commit."""
        self._others_write = False
        """Whether somebody else wrote of the last commit."""
        self.cut_at: int | None = None
        """Where the log ended when the checkpoint was saved that this island begins with; none if it did not begin with one."""

    # ------------------------------------------------------------------------------------------------------------- at commits

    def committed(self, engine: ElasticEngine, commit: Commit) -> None:
        before, self._steps = self._steps, engine.steps_taken
        self._recent.append((engine.generation.round, commit.events))
        writer = next((n for n, told in zip(commit.met.names, commit.met.result.told, strict=True) if told.home), None)
        self._others_write = writer != engine.name
        if self._others_write:
            self._stop_writing()
            return
        try:
            self._write(engine, commit, before)
        except CheckpointError as error:
            if commit.opening:
                raise
            # The commit stands whether it is written down or not, and is remembered: the next one tries again where the log ends.
            self._say(f"not written: {error}")
            self._stop_writing()

    def _write(self, engine: ElasticEngine, commit: Commit, before: int) -> None:
        log = self._writing(engine, opening=commit.opening)
        if commit.opening and engine.generation.round == 0:
            self._judge(engine, log)
            return
        if engine.over or self._passed(before, self._run.keep.evaluate_every):
            self._judge(engine, log)
        if not commit.opening and (engine.over or self._passed(before, self._run.keep.save_every)):
            self._save(engine, log)

    def _passed(self, before: int, every: int) -> bool:
        """Whether the run has just passed a multiple of so many steps."""
        return self._steps // every > before // every

    def _judge(self, engine: ElasticEngine, log: JsonlSink) -> None:
        metrics = self._evaluator(engine.params, engine.replica.buffers())
        log.emit(engine.books.evaluated(metrics, engine.clock.now_s()))

    def _save(self, engine: ElasticEngine, log: JsonlSink) -> None:
        """A disk that is full ends nothing: the last checkpoint stands, and the next may succeed."""
        number = engine.generation.round
        try:
            log.emit(Saved(round=number, name=Checkpoints.name(number)))
            metadata = {**self._origin, "engine": engine.plain(), "events_bytes": log.position()}
            self.checkpoints.save(number, {"shared": engine.shared()}, metadata)
        except CheckpointError as error:
            self._say(f"not saved: {error}")
            log.emit(SaveFailed(round=number, reason=str(error)))

    # -------------------------------------------------------------------------------------------------------------- the log

    def _writing(self, engine: ElasticEngine, *, opening: bool) -> JsonlSink:
        """The log, with everything in it that happened up to now."""
        if self._log is None:
            self._log = self._opened(engine, opening=opening)
        for _, events in self._recent:
            for event in events:
                self._log.emit(event)
        self._recent.clear()  # not before all is written: else it is written again, from where the log ends
        return self._log

    def _opened(self, engine: ElasticEngine, *, opening: bool) -> JsonlSink:
        path = self._folder.events
        cut_at, self.cut_at = self.cut_at, None
        if opening and engine.generation.round == 0:
            self._execution.keep_what_is_read()
            log = JsonlSink(path)
            log.emit(self._execution.started(self._workload, engine="elastic"))
            if self._run.train.warm_start_steps:
                warm = self._warm
                log.emit(WarmStartFinished(steps=self._run.train.warm_start_steps, tokens=warm.tokens, loss=warm.loss))
            return log
        if opening and cut_at is not None:  # what came after the checkpoint happens again
            return JsonlSink(path, append_at=cut_at)
        self._say(f"{engine.name} writes the log from round {engine.generation.round} on")
        mine = {event.round: event.epoch for _, events in self._recent for event in events if isinstance(event, Attended)}
        append_at, last = _agreed_part(path, mine, first=min(mine, default=engine.generation.round + 1))
        while self._recent and self._recent[0][0] <= last:
            self._recent.popleft()
        return JsonlSink(path, append_at=append_at)

    def close(self) -> None:
        """Nothing more is written here."""
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._log is not None:
            with suppress(CheckpointError):
                self._log.close()
        self._log, self.cut_at = None, None

    # -------------------------------------------------------------------------------------------------------------- the end

    def finish(self, engine: ElasticEngine, checkpoint: Checkpoint | None) -> None:
        """The run is over: whoever wrote last leaves what is to be left, or whoever comes back to a run that lacks it."""
        if self._others_write:
            return
        with open(self._folder.path / "finish.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_finished(self._folder):
                return
            log = self._log or JsonlSink(self._folder.events, append_at=_whole_lines(self._folder.events))
            if not engine.books.totals.metrics:
                self._judge(engine, log)
            finished = engine.books.finished(engine.clock.now_s(), self._warm.tokens, engine.params.digest())
            log.emit(finished)
            log.close()
            self._execution.leave(engine.params, engine.replica.buffers(), finished, checkpoint)
            self._evaluator.load(engine.params, engine.replica.buffers())
            self._execution.result(self._evaluator, engine.params)

    def brought_up_to_date(self, engine: ElasticEngine) -> None:
        """The engine goes on with what another island gave it: what this one saw before may have come to nothing."""
        self._stop_writing()  # somebody else may have written since, and this end of the log is no longer its end
        self._recent.clear()
        self._steps = engine.steps_taken

    def restored(self, checkpoint: Checkpoint, engine: ElasticEngine) -> None:
        """Have an engine go on from a checkpoint."""
        self._stop_writing()
        check_origin(checkpoint, self._origin, engine.name)
        shared: dict[str, Any] = self.checkpoints.load(checkpoint, "shared", engine.shared())
        engine.restore(checkpoint.metadata["engine"], shared)
        engine.begin_anew()
        self._recent.clear()
        self._steps, self.cut_at = engine.steps_taken, checkpoint.metadata["events_bytes"]


def _agreed_part(path: Path, mine: Mapping[int, int], *, first: int) -> tuple[int, int]:
    """How many bytes of a log tell of commits that count, and the last of these.

    A commit that was written by an island which died at once may be one that nobody else has; and it may not be there in full.

    Args:
        path: the log.
        mine: the epochs of the commits that this island remembers, by round.
        first: the first round that it has to agree on.
    """
    at = end = last = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        name = line[: line.find(b",")].decode(errors="replace").removeprefix('{"event": ').strip('"')
        if not line.endswith(b"\n"):
            break
        if name == Attended.__name__:
            attended = json.loads(line)
            if attended["round"] >= first and mine.get(attended["round"]) != attended["epoch"]:
                break
            at, last = end, attended["round"]
        elif name in _BETWEEN or (not last and name in _AT_FIRST):
            at = end
    return at, last


_BETWEEN = (Evaluated.__name__, Saved.__name__, SaveFailed.__name__)
_AT_FIRST = (RunStarted.__name__, WarmStartFinished.__name__, IslandJoined.__name__)
"""What is written between two commits, and before the first. A commit's own events end with who attended."""


def _whole_lines(path: Path) -> int:
    """How many bytes of a log are whole lines: whoever wrote it may have died in the middle of one."""
    text = path.read_bytes()
    return text.rfind(b"\n") + 1
