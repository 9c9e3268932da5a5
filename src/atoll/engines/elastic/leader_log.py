"""Who writes: of the islands that have the run's folder, the first that took part in a commit logs it, judges and saves.

Every island knows all that is to be written, since all keep the same books. So when the one who writes dies, the next goes on where
the log ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from atoll.core.errors import CheckpointError
from atoll.core.events import Attended, Evaluated, RoundFinished, Saved, SaveFailed, WarmStartFinished
from atoll.core.protocols import Workload
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.driver import Execution, is_finished
from atoll.engines.elastic.commit_log import Minutes
from atoll.engines.elastic.engine import Commit, ElasticEngine
from atoll.engines.elastic.event_log_lease import Overtaken, TakenLog, agreed_part, last_commit, stamp
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.warm_start import Cache, WarmStart
from atoll.replica.evaluator import Evaluator
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run
from atoll.telemetry.event_log import read_events


class Finished(Exception):
    """Others have finished the run, while this island was away."""


class _Overtaken(Exception):
    """Another island has taken the log over meanwhile."""


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
        minutes: what is to be written.
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
        minutes: Minutes,
        say: Callable[[str], object],
    ) -> None:
        self._run, self._folder, self._workload, self._warm, self._evaluator = run, folder, workload, warm, evaluator
        self._origin, self._minutes, self._say = dict(origin), minutes, say
        self._execution = Execution(run, folder, None, (), cache)
        self.checkpoints = Checkpoints(folder.checkpoints, run.keep.checkpoints)
        self._log: TakenLog | None = None
        self._written = NOTHING
        """The last of the minutes that are in it."""
        self._judged: Generation | None = None
        """Whose weights were judged here last."""
        self._steps = 0
        """Of the run, at the last commit that is written down."""
        self._judged_at = self._saved_at = 0
        """Steps of the run, when its weights were last judged, and last saved, by whomever."""
        self._void: list[int] = []
        """Rounds of checkpoints that others saved of commits which came to nothing. They go when a better one stands."""
        self.writer: str | None = None
        """Who else writes of the last commit, if anybody does."""

    # ------------------------------------------------------------------------------------------------------------- at commits

    def committed(self, engine: ElasticEngine, commit: Commit, writer: str | None) -> None:
        """Write down what was committed, if it is this island who does so.

        Raises:
            Finished: nothing is left to do.
        """
        self.writer = writer if writer != engine.name else None
        if writer != engine.name:
            self._stop_writing()
            return
        try:
            self._write(engine, commit)
        except CheckpointError as error:
            if commit.opening:
                raise
            # The commit stands whether it is written down or not, and is remembered: the next one tries again where the log ends.
            self._say(f"not written: {error}")
            self._stop_writing()

    def _write(self, engine: ElasticEngine, commit: Commit) -> None:
        log = self._writing(engine)
        before, self._steps = self._steps, engine.steps_taken
        if commit.opening and engine.generation.round == 0:
            self._judge(engine, log)
            return
        if engine.over or self._is_due(before, self._judged_at, self._run.keep.evaluate_every):
            self._judge(engine, log)
        due = engine.over or self._void or self._is_due(before, self._saved_at, self._run.keep.save_every)
        if due and not commit.opening and log.is_ours:
            self._save(engine, log)

    def _is_due(self, before: int, done_at: int, every: int) -> bool:
        """Whether the run has just passed a multiple of so many steps. Or it has passed one since this was last done, and nothing
        came of it, since a disk was full or whoever did it has died: then it is tried once more with each tenth of them."""
        missed = self._steps // every > done_at // every
        return self._passed(before, every) or (missed and self._passed(before, max(every // 10, 1)))

    def _passed(self, before: int, every: int) -> bool:
        """Whether the run has just passed a multiple of so many steps."""
        return self._steps // every > before // every

    def _judge(self, engine: ElasticEngine, log: TakenLog) -> None:
        metrics = self._evaluator(engine.params, engine.replica.buffers())
        log.emit(engine.accounting.evaluated(metrics, engine.clock.now_s()))
        self._judged, self._judged_at = engine.generation, engine.steps_taken

    def _save(self, engine: ElasticEngine, log: TakenLog) -> None:
        """A disk that is full ends nothing: the last checkpoint stands, and the next may succeed."""
        number = engine.generation.round

        def check() -> None:
            if not log.is_ours:
                raise _Overtaken

        metadata = {
            **self._origin,
            "engine": engine.plain(),
            "steps": engine.steps_taken,
            "lines": self._minutes.lines(engine.generation),
        }
        try:
            log.sync()  # whoever goes on from the checkpoint looks for its commit there
            self.checkpoints.save(number, {"shared": engine.shared()}, metadata, before_it_counts=check)
        except _Overtaken:
            self._say(f"round {number} is not saved: another island has taken the log over")
        except CheckpointError as error:
            self._say(f"not saved: {error}")
            log.emit(SaveFailed(round=number, reason=str(error)))
        else:
            self.checkpoints.remove(set(self._void) - {number})
            self._void, self._saved_at = [], engine.steps_taken
            log.emit(Saved(round=number, name=Checkpoints.name(number)))

    # -------------------------------------------------------------------------------------------------------------- the log

    def _writing(self, engine: ElasticEngine) -> TakenLog:
        """The log, with everything in it that happened up to now."""
        if (self._log is None or not self._log.is_ours) and self.is_finished:
            raise Finished
        if self._log is not None and not self._log.is_ours and last_commit(self._folder.events) < engine.generation:
            self._stop_writing()  # whoever took it was behind; of one that is ahead this island, frozen meanwhile, takes nothing
        taken_over = self._log is None
        self._log = self._log or self._taken_over(engine)
        for minute in self._minutes:
            if minute.generation > self._written:
                for event in minute.events:
                    self._log.emit(event)
                self._written = minute.generation
        if taken_over:
            self._void = self._contradicted(engine.generation)
        return self._log

    def _taken_over(self, engine: ElasticEngine) -> TakenLog:
        self._say(f"{engine.name} writes the log from round {engine.generation.round} on")
        try:
            return self._taken(engine)
        except Overtaken as error:  # one that was frozen has written its last line, perhaps; what it left is read once more
            self._say(str(error))
            return self._taken(engine)

    def _taken(self, engine: ElasticEngine) -> TakenLog:
        epochs, seen = self._minutes.epochs, stamp(self._folder.events)
        keep_bytes, self._written = agreed_part(self._folder.events, epochs)
        missing = range(max(self._written.round, 0) + 1, min(epochs, default=0))
        if missing:
            self._say(f"nobody remembers rounds {missing[0]} to {missing[-1]}, and the log does not have them")
        log = TakenLog(self._folder.events, keep_bytes, seen)
        told = [*read_events(self._folder.events, [RoundFinished, Evaluated])]
        self._steps = max((event.steps for event in told if isinstance(event, RoundFinished)), default=0)
        self._judged_at = max((event.steps for event in told if isinstance(event, Evaluated)), default=0)
        self._saved_at = self._steps_saved()
        if not keep_bytes:
            self._begin(log)
        return log

    def _steps_saved(self) -> int:
        """Steps of the run, at its newest checkpoint."""
        try:
            newest = self.checkpoints.newest()
        except CheckpointError:  # it is damaged, and another one is due
            return 0
        return int(newest.metadata.get("steps", 0)) if newest is not None else 0

    def _contradicted(self, reached: Generation) -> list[int]:
        """The checkpoints, by their rounds, of commits that others did again, as the log tells, or that are still to come."""
        told = {one.round: one.epoch for one in read_events(self._folder.events, [Attended]) if isinstance(one, Attended)}
        found = []
        for number in self.checkpoints.rounds():
            with suppress(CheckpointError):  # what is damaged is for a person to look at
                _, epoch = self.checkpoints.at(number).metadata["engine"]["generation"]
                if number > reached.round or told.get(number, epoch) != epoch:
                    found.append(number)
        return found

    def _begin(self, log: TakenLog) -> None:
        self._execution.keep_what_is_read()
        log.emit(self._execution.started(self._workload, engine="elastic"))
        if self._run.train.warm_start_steps:
            warm = self._warm
            log.emit(WarmStartFinished(steps=self._run.train.warm_start_steps, tokens=warm.tokens, loss=warm.loss))

    @property
    def writes(self) -> bool:
        """Whether it is this island who writes the log."""
        return self._log is not None

    @property
    def written(self) -> Generation:
        """Up to which commit this island has written the log; of one that it does not write now, or cannot, it does not know."""
        return self._written if self._log is not None and self._log.is_ours else NOTHING

    def close(self) -> None:
        """Nothing more is written here."""
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    # -------------------------------------------------------------------------------------------------------------- the end

    @property
    def is_finished(self) -> bool:
        """Whether somebody has left all that is to be left of the run."""
        return self._folder.final.exists() and is_finished(self._folder)

    def finish(self, engine: ElasticEngine, checkpoint: Checkpoint | None) -> None:
        """The run is over: leave what is to be left, unless another island has.

        Raises:
            CheckpointError: it could not be written. It can be tried again.
        """
        with open(self._folder.path / "finish.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_finished:
                return
            try:
                self._leave(engine, checkpoint)
            finally:
                self._stop_writing()

    def _leave(self, engine: ElasticEngine, checkpoint: Checkpoint | None) -> None:
        if self._log is not None and not self._log.is_ours:
            self._stop_writing()  # whoever took it while this island was frozen has not finished the run, and may have died since
            self._judged = None
        log = self._writing(engine)
        if self._judged != engine.generation:
            self._judge(engine, log)
        finished = engine.accounting.finished(engine.clock.now_s(), self._warm.tokens, engine.params.digest())
        log.emit(finished)
        self._execution.leave(engine.params, engine.replica.buffers(), finished, checkpoint)
        self._evaluator.load(engine.params, engine.replica.buffers())
        if not log.is_ours:
            raise CheckpointError(f"another island has taken {self._folder.events} over while this one finished the run.")
        self._execution.result(self._evaluator, engine.params)

    def brought_up_to_date(self, engine: ElasticEngine) -> None:
        """The engine goes on with what another island gave it, and the minutes are that one's."""
        self._stop_writing()  # somebody else may have written since

    def restored(self, checkpoint: Checkpoint, engine: ElasticEngine) -> None:
        """Have an engine go on from a checkpoint."""
        self._stop_writing()
        check_origin(checkpoint, self._origin, engine.name)
        shared: dict[str, Any] = self.checkpoints.load(checkpoint, "shared", engine.shared())
        engine.restore(checkpoint.metadata["engine"], shared)
        self._minutes.begin_with(engine.generation, checkpoint.metadata.get("lines", ()))
        engine.begin_anew()
