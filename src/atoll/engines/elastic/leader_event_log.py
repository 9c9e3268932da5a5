"""The run's event log, which the leader of each commit writes; the leader also evaluates, saves checkpoints and finishes the run.

The leader is the first participant of a commit that has the run's folder. A joiner may keep a copy of the folder, and leads there.
Every island remembers recent commits, so when a leader dies, the next one continues where the log ends. It takes the write lease
and truncates the log after the last valid commit; the old leader's writes then fail. It reads the end of the log alone, since the
log of a long run has hundreds of megabytes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from atoll.core import events as ev
from atoll.core.errors import AtollError, CheckpointError, is_disk_full
from atoll.core.verified_files import parse_json, replacing, write_text
from atoll.engines.checkpoints import Checkpoint, Checkpoints, check_origin
from atoll.engines.elastic.engine import CommittedRound, ElasticEngine
from atoll.engines.elastic.membership import LastQuorum, log_while_waiting, retry
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.run_lifecycle import RunResults
from atoll.engines.training_setup import passed_multiple
from atoll.engines.warm_start_training import Prepared
from atoll.replica.evaluator import Evaluator
from atoll.telemetry.event_log import E, JsonlSink, explained, read_backwards, read_events, unix_time_s

_REMEMBERED_COMMITS = 512
"""How far the event log can lag behind."""
_OPENED = StateVersion(0, 1 << 31)
"""The last version of a log that has events and no commit: round 0, whatever its epoch."""
_BETWEEN_COMMITS = (ev.Evaluated.__name__, ev.Saved.__name__, ev.SaveFailed.__name__, ev.LogDamaged.__name__)
_BEFORE_COMMITS = (ev.RunStarted.__name__, ev.WarmStartFinished.__name__, ev.IslandJoined.__name__)
"""Events outside of commits. A commit's own events end with Attended."""
QUORUM_FILE = "quorum.json"
"""In the run's folder: the processes of the last quorum that an island of this machine led."""
_RETRY_S = 2.0
"""Between two attempts to finish the run."""
_LOCK_LIMIT_S, _LOCK_POLL_S = 2.0, 0.01
"""A process that locks the log for longer is frozen."""
_COPIED_BYTES = 1 << 20


WARNING = "warning: "
"""How a line of an island's log begins that the supervisor shows on its console."""


class RunAlreadyFinished(Exception):
    """Other islands have finished the run while this one was away."""


# -------------------------------------------------------------------------------------------------- recent commits, in memory


class CommitRecord(NamedTuple):
    """What the event log gets from one commit. An `opening` commit precedes the first round."""

    version: StateVersion
    opening: bool
    events: Sequence[ev.Event]

    def lines(self) -> list[str]:
        return [event.to_json() for event in self.events if event.recorded]


class CommitLog:
    """The recent commits, which every island remembers.

    >>> log = CommitLog()
    >>> for number in range(1, 5):
    ...     log.append(CommitRecord(StateVersion(number, number), False, []), written=StateVersion(number - 2, number - 2))
    >>> log.epochs
    {1: 1, 2: 2, 3: 3, 4: 4}
    >>> [parts[:2] for parts in log.to_parts()]  # at the last commit the leader reported to have written the second
    [[2, 2], [3, 3], [4, 4]]
    """

    def __init__(self) -> None:
        self._records: deque[CommitRecord] = deque(maxlen=_REMEMBERED_COMMITS)
        self._written = NO_VERSION
        """The event log goes at least so far."""

    def __iter__(self) -> Iterator[CommitRecord]:
        return iter(self._records)

    @property
    def epochs(self) -> dict[int, int]:
        """Of the committed rounds."""
        return {record.version.round: record.version.epoch for record in self._records if not record.opening}

    def append(self, record: CommitRecord, written: StateVersion) -> None:
        """Remember a commit, whose participants reported that the event log goes up to `written`."""
        self._written = max(self._written, written)
        # A later leader may write the events long after they happened.
        self._records.append(record._replace(events=[replace(event, unix_time_s=unix_time_s()) for event in record.events]))

    def lines(self, version: StateVersion) -> list[str]:
        return [line for record in self._records if record.version == version for line in record.lines()]

    def to_parts(self) -> list[Any]:
        """The last commit that the event log has, and all that it may not have, as JSON data for other islands."""
        return [[*one.version, one.opening, one.lines()] for one in self._records if one.version >= self._written]

    def from_parts(self, parts: Sequence[Any]) -> None:
        """Take over the commits of another island, or of a checkpoint. Some that this island saw itself may be void."""
        self._records.clear()
        for number, epoch, opening, lines in parts:
            self._records.append(CommitRecord(StateVersion(number, epoch), opening, [*map(ev.read_event, lines)]))
        self._written = NO_VERSION


# ---------------------------------------------------------------------------------------------------- the event log, on disk


class LeaseLost(CheckpointError):
    """Another island has taken the write lease."""


class EventLogLease(JsonlSink):
    """The event log with the right to write it.

    A new holder replaces the file `events.lease`, and truncates the log in place. A holder locks the log for every line, and writes
    only if `events.lease` is still its own, so an old leader that wakes from a freeze writes nothing. If a process froze while it
    held the lock, the new holder replaces the log by a copy, which the frozen process does not have open.

    Args:
        path: the log.
        keep_bytes: returns how many bytes of the log stay. It is called when no other process writes.

    Raises:
        CheckpointError: the log cannot be written.
        LeaseLost: another island has taken the lease meanwhile.
    """

    def __init__(self, path: Path, keep_bytes: Callable[[], int]) -> None:
        self.path, self._mark_path = path, path.with_name("events.lease")
        with ExitStack() as failing:
            self._mark = _replace_mark(self._mark_path)
            failing.callback(self._mark.close)
            with explained("open", path), path.open("ab") as log:
                if _lock(log):
                    self.check()
                    super().__init__(path, append_at=keep_bytes(), dated=True)
                else:
                    self._replace_by_copy(path, keep_bytes())
            failing.pop_all()

    def _replace_by_copy(self, path: Path, keep_bytes: int) -> None:
        with replacing(path, CheckpointError) as copy, path.open("rb") as log:
            left = keep_bytes
            while left and (block := log.read(min(left, _COPIED_BYTES))):
                copy.write(block)
                left -= len(block)
            copy.flush()
            # Opened under its temporary name: another island may replace the log at any moment.
            super().__init__(copy.name, append_at=keep_bytes, dated=True)
            self.check()
        self.path = path

    def emit(self, event: ev.Event) -> None:
        with self._locked():
            super().emit(event)

    def position(self) -> int:
        with self._locked():
            return super().position()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.check()
        if not _lock(self._file):
            raise CheckpointError(f"a process that does not respond has locked {self.path}.")
        try:
            self.check()
            yield
        finally:
            with suppress(OSError, ValueError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _check_repair(self) -> None:
        self.check()  # another holder's copy is no damage

    @property
    def is_held(self) -> bool:
        """Whether no other island has taken the lease since."""
        try:
            return os.path.samestat(os.fstat(self._mark.fileno()), self._mark_path.stat())
        except (OSError, ValueError):
            return False

    def check(self) -> None:
        if not self.is_held:
            raise LeaseLost(f"another island has taken the write lease of {self.path}.")

    def close(self) -> None:
        """Closes the log. What a full disk did not take is not written any more: the next holder writes it."""
        self._unwritten = b""
        super().close()
        self._mark.close()


def _replace_mark(path: Path) -> IO[bytes]:
    """A new file of this name, open: while it is open, no other file gets its inode."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    with explained("write", path):
        file = unfinished.open("xb")
        try:
            os.replace(unfinished, path)
        except OSError:
            file.close()
            unfinished.unlink()
            raise
    return file


def _lock(file: IO[bytes]) -> bool:
    """Lock the file, unless another process holds its lock for too long: a writer holds it for one line, a new leader for the time
    that it takes to read the end of the log."""
    deadline_s = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
        except OSError:  # a file system without locks: `events.lease` alone protects the log
            return True
        time.sleep(_LOCK_POLL_S)


class CommittedPrefix(NamedTuple):
    """How many bytes of an event log belong to valid commits, the last of these, and the number of damaged lines near the end that
    the log does not report."""

    num_bytes: int
    last: StateVersion
    damaged: int


def committed_prefix(path: Path, epochs: Mapping[int, int]) -> CommittedPrefix:
    """The valid part of an event log: a leader that died may have written a commit that no other island has, or part of one.
    `epochs` are those of the valid commits, by round. Earlier rounds are valid, and only what follows them is read; without any
    epoch nothing in the log is valid."""
    if not epochs or not path.exists():
        return CommittedPrefix(0, NO_VERSION, 0)
    first = min(epochs)
    start = next((at for at, attended in read_backwards(path, ev.Attended) if attended.round < first), 0)
    at, last, end, damaged = start, NO_VERSION, start, 0
    with explained("read", path), path.open("rb") as log:
        log.seek(start)
        for line in log:
            end += len(line)
            if not line.endswith(b"\n"):
                break
            found = re.match(rb'\0*\{"event": "(\w+)"', line)
            name = found[1].decode() if found is not None and line.endswith(b"}\n") else ""
            if name == ev.Attended.__name__:
                try:
                    attended = json.loads(line.lstrip(b"\0"))
                    version = StateVersion(int(attended["round"]), int(attended["epoch"]))
                except (ValueError, TypeError, KeyError):
                    damaged += 1
                    continue
                if version.round >= first and epochs.get(version.round) != version.epoch:
                    break
                at, last = end, version
            elif name in _BETWEEN_COMMITS:
                at, damaged = end, 0 if name == ev.LogDamaged.__name__ else damaged
            elif name in _BEFORE_COMMITS and last <= _OPENED:
                at, last = end, _OPENED
            elif not name:
                damaged += 1
    return CommittedPrefix(at, last, damaged)


# ---------------------------------------------------------------------------------------------------------------- the leader


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
        are known to have ended. It is empty in a run that was just started or resumed."""
        try:
            processes, leader = parse_json((self.folder.path / QUORUM_FILE).read_text("utf-8"))
            return LastQuorum(tuple(map(str, processes)), leader)
        except (OSError, ValueError, TypeError):
            return LastQuorum()

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
            write_text(self.folder.path / QUORUM_FILE, json.dumps(committed.commit.quorum), CheckpointError)
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
        number, lines = engine.version.round, self._commit_log.lines(engine.version)
        metadata = {**self._origin, "engine": engine.metadata(), "steps": engine.steps_taken, "lines": lines}
        try:
            lease.position()  # syncs the log, where recovery from the checkpoint looks for its commit
            self.checkpoints.save(number, {"shared": engine.shared()}, metadata, before_rename=lease.check)
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
        except LeaseLost as error:  # a frozen leader has woken and written its last line: read the log again
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
        """Write the state that the engine holds, and the commits that this island remembers, into a folder of their own. Raises
        CheckpointError."""
        lease = self._up_to_date(engine)
        self._save(engine, lease)
        self.release()
        if not self.checkpoints.rounds():
            raise CheckpointError(f"the state of round {engine.version.round} could not be saved in {self.folder.path}.")

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
        with explained("write", path):
            lock = open(path, "w", encoding="utf-8")  # noqa: SIM115, closed below
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
