"""The run's event log, which the leader of each commit writes; the leader also evaluates, saves checkpoints and finishes the run.

The leader is the first participant of a commit that has the run's folder. A joiner may keep a copy of the folder, and leads there.
Every island remembers recent commits, so when a leader dies, the next one continues where the log ends. It takes the write lease
and truncates the log after the last valid commit; the old leader's writes then fail. It reads the end of the log alone, since the
log of a long run has hundreds of megabytes.
"""

from __future__ import annotations

import errno
import fcntl
import math
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.core import events as ev
from atoll.core.errors import AtollError, CheckpointError, ConfigError, is_disk_full, one_line
from atoll.core.verified_files import open_to_append, read_record, write_record
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.elastic.commit_log import CommitLog
from atoll.engines.elastic.engine import CommittedRound, ElasticEngine
from atoll.engines.elastic.event_log_lease import CommittedPrefix, EventLogLease, LeaseLost, committed_prefix
from atoll.engines.elastic.quorum import LastQuorum
from atoll.engines.elastic.retry import retry
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.liveness import log_while_waiting
from atoll.engines.run_lifecycle import RunResults
from atoll.engines.training_setup import passed_multiple
from atoll.engines.warm_start_training import Prepared
from atoll.replica.evaluator import Evaluator
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import E, explained, read_backwards, read_events

QUORUM_FILE = "quorum.json"
"""In the run's folder: the processes of the last quorum that an island of this machine led."""
PROCESSES_FILE = "processes.json"
"""In the run's folder: the processes that its supervisors started."""
_PROBE_BYTES = 1 << 16
"""A disk that has no room for so much is full."""
_LOST = {errno.ENOENT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN}
"""Errors of a folder that was removed or may not be written, of a broken disk, and of a network file system without its server."""
_RETRY_S = 2.0
"""Between two attempts to finish the run."""
WARNING = "warning: "
"""How a line of an island's log begins that the supervisor shows on its console."""


def refuse_folders(folder: RunFolder) -> None:
    """Refuse a folder of a run that has a folder in the place of a file which islands write: they would try again for ever."""
    for name in (folder.events.name, "events.lease", "finish.lock", QUORUM_FILE, PROCESSES_FILE):
        if (folder.path / name).is_dir():
            raise ConfigError(
                f"{folder.path / name} is a folder, and an elastic run writes a file of this name. Remove the folder."
            )


def write_error(folder: Path) -> OSError | None:
    """Why no file can be written into this run's folder; None if one can. A quota shows only when a file is written. See also
    `is_lost`."""
    probe = folder / f".space-{secrets.token_hex(4)}"
    try:
        RunFolder(folder).settings.stat()  # a folder without settings was made anew by another process, and is not the run's
        with probe.open("xb", buffering=0) as file:
            left = _PROBE_BYTES
            while left:  # a nearly full disk takes a part
                left -= file.write(bytes(left)) or 0
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            probe.unlink()
    return None


def is_lost(error: OSError | None) -> bool:
    """Whether a write error says that the folder is gone: not that a disk is full, or that a process has too many open files."""
    return error is not None and error.errno in _LOST


class RunAlreadyFinished(Exception):
    """Other islands have finished the run while this one was away."""


class LeaderLog:
    """What one island does with the run's folder when it is the leader."""

    def __init__(
        self, results: RunResults, prepared: Prepared, evaluator: Evaluator, commit_log: CommitLog, copy_of: str = ""
    ) -> None:
        self.is_copy, self._folder_id = bool(copy_of), copy_of or "run"
        """A copy belongs to the island `copy_of` alone, which joined the run and fetched its state."""
        self._results, self._evaluator, self._commit_log = results, evaluator, commit_log
        self.warm_start, self._origin = prepared.warm_start, prepared.origin
        self._keep, self.folder, self._log = results.run.keep, results.folder, results.task.log
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep=self._keep.checkpoints)
        self.lease: EventLogLease | None = None
        self._written = NO_VERSION
        """The last commit in the event log, while this island holds the lease."""
        self._evaluated: StateVersion | None = None
        """The version that this island evaluated last."""
        self._steps = 0
        """Of the run, at the last commit in the event log."""
        self._evaluated_at = self._saved_at = 0
        """Steps of the run at the last evaluation and the last checkpoint, by any island."""
        self._void_checkpoints: list[int] = []
        """Rounds of checkpoints of void commits. They are removed when a valid checkpoint is complete."""
        self._saved_quorum: LastQuorum | None = None
        self.other_leader: str | None = None
        """The leader of the last commit, if that is another island."""

    # ------------------------------------------------------------------------------------------------------------- at commits

    def last_quorum(self) -> LastQuorum:
        """The last quorum that an island of this folder led: an island that restarts alone must not go on before all of its members
        are known to have ended. It is empty in a run that was just started or resumed. Of a damaged file no member is known, and
        none is known to have ended."""
        path = self.folder.path / QUORUM_FILE
        try:
            record = read_record(path)
            return LastQuorum(tuple(map(str, record["processes"])), record["leader"])
        except FileNotFoundError:
            return LastQuorum()
        except (OSError, ValueError, TypeError, LookupError) as error:
            self._log(
                f"{WARNING}{path} cannot be read ({one_line(error)}), so it is not known which islands may go on beyond a network "
                f"partition. If all of them are gone for good, stop this run and resume it"
            )
            return LastQuorum((f"an island of the damaged {QUORUM_FILE}",))

    def append(self, engine: ElasticEngine, committed: CommittedRound) -> None:
        """Write a commit into the event log, evaluate and save, if this island is its leader. Raises RunAlreadyFinished."""
        leader = committed.leader(self._folder_id)
        leads = leader == engine.name
        self.other_leader = None if leads else leader
        if not leads:
            self.release()
            return
        try:
            self._write(engine, committed)
        except LeaseLost as error:  # the lease stays, as lost: `_up_to_date` takes none from a holder that is ahead
            if committed.opening:
                raise
            self._log(f"{WARNING}round {engine.version.round} is not in the event log yet: {error}")
        except CheckpointError as error:
            if committed.opening:
                raise
            # The commit is valid whether it is logged or not, and is remembered: the next leader continues where the log ends.
            self._log(f"{WARNING}round {engine.version.round} is not in the event log yet: {error}")
            self.release()

    def _write(self, engine: ElasticEngine, committed: CommittedRound) -> None:
        if committed.commit.quorum != self._saved_quorum:
            write_record(self.folder.path / QUORUM_FILE, committed.commit.quorum._asdict(), CheckpointError)
            self._saved_quorum = committed.commit.quorum
        lease = self._up_to_date(engine)
        before, self._steps = self._steps, engine.steps_taken
        if committed.opening and engine.version.round == 0:
            self._evaluate(engine, lease)
            return
        if engine.leases.done or self._is_due(before, self._evaluated_at, self._keep.evaluate_every):
            self._evaluate(engine, lease)
        due = engine.leases.done or self._void_checkpoints or self._is_due(before, self._saved_at, self._keep.save_every)
        if due and not committed.opening and lease.is_held:
            self._save(engine, lease)

    def _is_due(self, before: int, done_at: int, every: int) -> bool:
        """Whether the run has just passed a multiple of `every` steps. If an earlier multiple was missed, because a disk was full
        or a leader died, it is due again with each tenth of `every`."""
        missed = passed_multiple(done_at, self._steps, every)
        return passed_multiple(before, self._steps, every) or (missed and passed_multiple(before, self._steps, max(every // 10, 1)))

    def _evaluate(self, engine: ElasticEngine, lease: EventLogLease) -> None:
        metrics = self._evaluator(engine.params, engine.replica.buffers())
        lease.emit(engine.accounting.evaluated(metrics, engine.clock.now_s()))
        self._evaluated, self._evaluated_at = engine.version, engine.steps_taken

    def _save(self, engine: ElasticEngine, lease: EventLogLease) -> None:
        """Save a checkpoint. A full disk ends nothing: the last checkpoint stands, and the next may succeed."""
        number = engine.version.round
        try:
            self._write_checkpoint(engine, lease)
        except CheckpointError as error:
            if not lease.is_held:
                self._log(f"round {number} is not saved: another island has taken the write lease")
                return
            self._log(f"not saved: {error}")
            lease.emit(ev.SaveFailed(round=number, reason=str(error)))
        else:
            self.checkpoints.remove(set(self._void_checkpoints) - {number})
            self._void_checkpoints, self._saved_at = [], engine.steps_taken
            lease.emit(ev.Saved(round=number, name=Checkpoints.name(number)))

    def _write_checkpoint(self, engine: ElasticEngine, lease: EventLogLease) -> None:
        lines = self._commit_log.lines(engine.version)
        metadata = {**self._origin, "engine": engine.metadata(), "steps": engine.steps_taken, "lines": lines}
        lease.position()  # syncs the log, where recovery from the checkpoint looks for its commit
        self.checkpoints.save(engine.version.round, {"shared": engine.shared()}, metadata, before_rename=lease.check)

    # --------------------------------------------------------------------------------------------------------- the event log

    def _up_to_date(self, engine: ElasticEngine) -> EventLogLease:
        """The event log, with all commits so far."""
        if (self.lease is None or not self.lease.is_held) and self.is_finished:
            raise RunAlreadyFinished
        if self.lease is not None and not self.lease.is_held:
            last = self._last_logged(ev.Attended)
            if last is None or StateVersion(last.round, last.epoch) < engine.version:
                self.release()  # the holder is behind. From a holder that is ahead this island, frozen meanwhile, takes nothing
        taken_over = self.lease is None
        self.lease = self.lease or self._take_over(engine)
        for record in self._commit_log:
            if record.version > self._written:
                for event in record.events:
                    self.lease.emit(event)
                self._written = record.version
        if taken_over:
            self._void_checkpoints = self._find_void_checkpoints(engine.version)
        return self.lease

    def _take_over(self, engine: ElasticEngine) -> EventLogLease:
        self._log(f"{engine.name} leads: it writes the event log from round {engine.version.round} on")
        try:
            return self._take_lease()
        except LeaseLost as error:  # the former leader was stopped, runs again and has written its last line: read the log again
            self._log(str(error))
            return self._take_lease()

    def _take_lease(self) -> EventLogLease:
        epochs, found = self._commit_log.epochs, CommittedPrefix(0, NO_VERSION, 0)

        def keep_bytes() -> int:
            nonlocal found
            found = committed_prefix(self.folder.events, epochs)
            return found.num_bytes

        lease = EventLogLease(self.folder.events, keep_bytes)
        try:
            self._continue(lease, found)
        except BaseException:
            lease.close()
            raise
        self._written = found.last
        return lease

    def _continue(self, lease: EventLogLease, found: CommittedPrefix) -> None:
        """Read how far the run was, and report lines that the log lacks."""
        finished, evaluated = self._last_logged(ev.RoundFinished), self._last_logged(ev.Evaluated)
        self._steps = finished.steps if finished is not None else 0
        self._evaluated_at = evaluated.steps if evaluated is not None else 0
        self._saved_at = 0
        with suppress(CheckpointError):  # if the newest checkpoint is damaged, a new one is due
            newest = self.checkpoints.newest()
            self._saved_at = newest.metadata.get("steps", 0) if newest is not None else 0
        if not lease.has_beginning:
            self._results.begin(lease)
            if not math.isnan(self.warm_start.loss):  # else no donor has told its figures to this joiner
                self._results.warm_started(self.warm_start, lease)
        missing = range(max(found.last.round, 0) + 1, min(self._commit_log.epochs, default=0))
        why = ": this folder is a copy, and its island was not there" if self.is_copy else ", and no island remembers them"
        damages = [f"rounds {missing[0]} to {missing[-1]} are missing{why}"] if missing else []
        damages += [f"{found.damaged} of its last lines cannot be read"] if found.damaged else []
        for what in damages:
            self._log(f"the event log is incomplete: {what}" if self.is_copy else f"the event log is damaged: {what}")
            lease.emit(ev.LogDamaged(what=what))

    def _last_logged(self, kind: type[E]) -> E | None:
        if not self.folder.events.exists():
            return None
        return next((event for _, event in read_backwards(self.folder.events, kind)), None)

    @property
    def has_begun(self) -> bool:
        """Whether the event log has a round, valid or not."""
        log = self.folder.events
        return log.exists() and next(read_events(log, kinds=(ev.RoundFinished,)), None) is not None

    def _find_void_checkpoints(self, reached: StateVersion) -> list[int]:
        """The rounds of checkpoints whose commits were repeated, as the event log shows, or lie ahead."""
        rounds, epochs, found = self.checkpoints.rounds(), dict[int, int](), []
        for _, one in read_backwards(self.folder.events, ev.Attended) if rounds else ():
            epochs.setdefault(one.round, one.epoch)
            if one.round <= min(rounds):
                break
        for number in rounds:
            with suppress(CheckpointError):  # a damaged checkpoint is left for a person to look at
                _, epoch = self.checkpoints.at(number).metadata["engine"]["version"]
                if number > reached.round or epochs.get(number, epoch) != epoch:
                    found.append(number)
        return found

    @property
    def written(self) -> StateVersion:
        """The last commit in the event log; NO_VERSION if this island does not hold the lease, and so does not know."""
        return self._written if self.lease is not None and self.lease.is_held else NO_VERSION

    def release(self) -> None:
        """Stop writing. Another island may write from now on."""
        if self.lease is not None:
            self.lease.close()
        self.lease = None

    # --------------------------------------------------------------------------------------------------------------- the end

    def rescue(self, engine: ElasticEngine) -> None:
        """Write the state that the engine holds, and the commits that this island remembers, into a new folder or its copy. Raises
        CheckpointError."""
        self.release()  # the island may have been interrupted within a line of the log
        try:
            self._write_checkpoint(engine, self._up_to_date(engine))
        except LeaseLost as error:
            raise CheckpointError(str(error)) from error
        finally:
            self.release()

    @property
    def is_finished(self) -> bool:
        """Whether the folder has all results of the run."""
        return self.folder.final.exists() and self.folder.finished

    def finish(self, engine: ElasticEngine, checkpoint: Checkpoint | None, limit_s: float) -> None:
        """Write the results of the run, unless another island has. Retry for `limit_s`, and while the disk is full without a limit,
        since this process may hold the only copy of the last state. `checkpoint` is the one that this island continued from."""

        def failed(error: Exception) -> None:
            self._log(f"{WARNING}the run is not finished, and {engine.name} tries again: {error}")

        with log_while_waiting(self._log, "finishing the run, or waiting for another island that does"):
            while True:
                try:
                    retry(lambda: self._finish(engine, checkpoint), CheckpointError, limit_s, _RETRY_S, failed)
                    return
                except CheckpointError as error:
                    if not is_disk_full(error):
                        raise
                    failed(error)
                    time.sleep(_RETRY_S)

    def _finish(self, engine: ElasticEngine, checkpoint: Checkpoint | None) -> None:
        path = self.folder.path / "finish.lock"
        with explained("read", self.folder.settings):
            self.folder.settings.stat()  # a folder without settings is not the run's
        with explained("write", path):
            lock = open_to_append(path)
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_finished:
                return
            try:
                self._write_results(engine, checkpoint)
            except AtollError as error:
                if isinstance(error, CheckpointError) or not is_disk_full(error):
                    raise
                raise CheckpointError(str(error)) from error
            finally:
                self.release()

    def _write_results(self, engine: ElasticEngine, checkpoint: Checkpoint | None) -> None:
        if self.lease is not None and not self.lease.is_held:
            self.release()  # the holder took it while this island was frozen, has not finished the run, and may have died
            self._evaluated = None
        lease = self._up_to_date(engine)
        if self._evaluated != engine.version:
            self._evaluate(engine, lease)
        finished = engine.accounting.finished(engine.clock.now_s(), self.warm_start.tokens, engine.params.digest())
        lease.emit(finished)
        self._results.write_final(engine.params, engine.replica.buffers(), finished, checkpoint)
        lease.check()
        self._results.result(self._evaluator, engine.params, engine.replica.buffers())

    def restore(self, checkpoint: Checkpoint, engine: ElasticEngine) -> None:
        """Make an engine continue from a checkpoint."""
        self.release()
        check_origin(checkpoint, self._origin, engine.name)
        shared: dict[str, Any] = self.checkpoints.load(checkpoint, "shared", engine.shared())
        engine.restore(checkpoint.metadata["engine"], shared)
        self._commit_log.from_parts([[*engine.version, False, checkpoint.metadata.get("lines", ())]])
        engine.resume_alone()
