"""The leader log, driven by hand: what is written, evaluated and saved while islands are frozen or killed."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError
from atoll.core.events import Attended, Evaluated, IslandLeft, LogDamaged, RoundFinished, RunFinished, RunStarted, Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import RunAccounting
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic import commit_log, event_log_lease, leader_event_log
from atoll.engines.elastic.commit_log import CommitLog, CommitRecord
from atoll.engines.elastic.event_log_lease import EventLogLease, LeaseLost, committed_prefix
from atoll.engines.elastic.leader_event_log import LeaderLog
from atoll.engines.elastic.quorum import LastQuorum, ended_among
from atoll.engines.elastic.recovery import Recovery
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.run_lifecycle import RunRequest, RunResults, RunTask
from atoll.engines.warm_start_training import Prepared, WarmStart
from atoll.runs.folder import RunFolder
from atoll.telemetry import event_log
from atoll.telemetry.event_log import read_events

SETTINGS = (
    "model.hidden=4",
    "data.examples=64",
    "data.dimensions=4",
    "data.clusters_per_class=1",
    "data.eval_examples=16",
    "train.warm_start_steps=0",
    "keep.evaluate_every=100",
    "keep.save_every=100",
    "keep.checkpoints=2",
)
ORIGIN = {"run": "r", "data": "d"}
QUORUM = SimpleNamespace(quorum=LastQuorum(("a#1",), "a#1"))


class Engine:
    """Reaches versions on command. A round is ten steps."""

    name, leases = "a", SimpleNamespace(done=False)
    replica, clock = SimpleNamespace(buffers=dict), SimpleNamespace(now_s=lambda: 1.0)

    def __init__(self):
        self.version, self.accounting = StateVersion(0, 1), RunAccounting(1, real=True)
        self.params = Tree.of({"w": torch.zeros(2)})

    @property
    def steps_taken(self):
        return self.version.round * 10

    def reach(self, number, epoch):
        self.version = StateVersion(number, epoch)
        self.accounting.totals.round, self.accounting.totals.steps = number, self.steps_taken
        self.accounting.totals.metrics = {"loss": 1.0}
        self.accounting.ledgers[0].present_s = 1.0

    def shared(self):
        return {"params": self.params}

    def metadata(self):
        return {"version": list(self.version)}

    def restore(self, metadata, shared):
        self.reach(*metadata["version"])

    def resume_alone(self):
        self.version = self.version._replace(epoch=self.version.epoch + 1000)


class Evaluator:
    """Gives all weights the same loss."""

    module = None

    def __call__(self, params, buffers):
        return {"loss": 1.0}

    def load(self, params, buffers):
        pass


class Died(BaseException):
    """The island died."""


class Island:
    """A leader log and an engine that commit on command."""

    def __init__(self, folder):
        run = Elastic(processes=1).fitted(override(recipes.ALL["toy-sync"](), SETTINGS))
        if not folder.exists():
            with RunRequest(run=run, spec=Elastic(processes=1), out=folder).open():
                pass
        self.engine, self.commit_log, self.evaluator, self.logged = Engine(), CommitLog(), Evaluator(), []
        self.folder, warm = RunFolder(folder), WarmStart(self.engine.params, 0, 1.0)
        results = RunResults(RunTask(run=run, spec=Elastic(processes=1), folder=self.folder, log=self.logged.append))
        self.leader_log = LeaderLog(results, Prepared(None, warm, ORIGIN), self.evaluator, self.commit_log)

    def commit(self, number, epoch, *, leader="a"):
        self.engine.reach(number, epoch)
        self.commit_log.append(CommitRecord(self.engine.version, False, [finished(number), attended(number, epoch)]), NO_VERSION)
        self.leader_log.append(self.engine, SimpleNamespace(opening=False, leader=lambda folder: leader, commit=QUORUM))

    def events(self, kind):
        return [event for event in read_events(self.folder.events) if isinstance(event, kind)]

    @property
    def commits(self):
        return [(event.round, event.epoch) for event in self.events(Attended)]


@pytest.fixture
def island(tmp_path):
    made = []

    def make():
        made.append(Island(tmp_path / "run"))
        return made[-1]

    yield make
    for one in made:
        one.leader_log.release()


def attended(number, epoch):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=epoch, virtual_time_s=None, wall_time_s=1.0, **who)


def finished(number):
    figures = {"islands": 1, "steps": number * 10, "tokens": 1, "local_updates": 1, "loss": 1.0, "sent_bytes_per_island": 0.0}
    return RoundFinished(round=number, virtual_time_s=None, wall_time_s=1.0, **figures)


def test_an_island_that_was_frozen_at_the_end_finishes_the_run_if_the_new_lease_holder_has_died(island):
    frozen, other = island(), island()
    frozen.commit(1, 1)
    other.commit(1, 1)
    other.leader_log.release()  # before it has finished the run
    frozen.leader_log.finish(frozen.engine, None, 60.0)
    assert frozen.leader_log.is_finished
    assert frozen.commits == [(1, 1)]
    assert len(frozen.events(RunFinished)) == 1


def test_finishing_is_retried_when_the_lease_is_lost_meanwhile(island, monkeypatch):
    one, others = island(), []
    one.commit(1, 1)
    last = one.engine.accounting.finished

    def frozen(*given):
        if not others:
            others.append(island())
            others[0].commit(1, 1)
        return last(*given)

    one.engine.accounting.finished = frozen
    monkeypatch.setattr(leader_event_log, "_RETRY_S", 0.0)
    one.leader_log.finish(one.engine, None, 60.0)
    assert one.leader_log.is_finished
    assert [text for text in one.logged if text.startswith("warning: the run is not finished, and a tries again: another island")]


def test_a_commit_that_is_written_before_a_takeover_is_neither_cut_off_nor_written_twice(island):
    one, other = island(), island()
    one.commit(1, 1)
    one.commit(2, 2)
    other.commit(2, 2)
    other.commit(3, 3)
    assert other.commits == [(1, 1), (2, 2), (3, 3)]
    assert not [text for text in other.logged if "is not in the event log yet" in text]


def test_a_leader_that_woke_behind_the_new_one_takes_nothing_from_it(island):
    frozen, other = island(), island()
    commits(frozen, (1, 1))
    commits(other, (1, 1), (2, 2), (3, 3))
    commits(frozen, (2, 2))
    assert other.leader_log.lease.is_held
    assert frozen.logged[-1].startswith("warning: round 2 is not in the event log yet: another island has taken the write lease")
    assert other.commits == [(1, 1), (2, 2), (3, 3)]


class Fetching(Recovery):
    """The recovery of an island to which another sends its snapshot."""

    def __init__(self, leader_log):
        self._leader_log, self._log = leader_log, lambda text: None

    def _find(self, *given, **named):
        return "round 6, fetched from b"


def test_a_damaged_checkpoint_is_harmless_while_another_island_has_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(5, {})
    (tmp_path / "00000005" / "meta.json").unlink()
    leader_log = SimpleNamespace(checkpoints=checkpoints, last_quorum=LastQuorum, is_copy=False)
    assert Fetching(leader_log).initialize(SimpleNamespace()) == "round 6, fetched from b"


@pytest.mark.parametrize("dies", ["evaluate", "save"])
def test_a_new_leader_makes_up_for_what_the_old_one_died_over(island, dies):
    first, second = island(), island()
    for number in range(1, 10):
        first.commit(number, number)

    def die(*given):
        raise Died

    setattr(first.leader_log, f"_{dies}", die)
    with pytest.raises(Died):
        first.commit(10, 10)
    assert first.commits[-1] == (10, 10), "the log names the round in which it was due"
    for number in range(1, 13):
        second.commit(number, number, leader="a" if number > 10 else "dead")
    assert [event.round for event in second.events(Evaluated)] == ([11] if dies == "evaluate" else [10])
    assert [event.round for event in second.events(Saved)] == [11]


def test_a_failed_save_is_retried_long_before_the_next_one_is_due(island):
    one = island()
    one.folder.checkpoints.write_text("in the way")
    for number in range(1, 13):
        one.commit(number, number)
    one.folder.checkpoints.unlink()
    for number in range(13, 23):
        one.commit(number, number)
    assert [event.round for event in one.events(SaveFailed)] == [10, 11, 12]
    assert [event.round for event in one.events(Saved)] == [13, 20]


def commits(one, *versions, leader="a"):
    for number, epoch in versions:
        one.commit(number, epoch, leader=leader)


BEFORE = [(number, number) for number in range(1, 10)]
SAVED, ANEW = (10, 10), (10, 20)
"""The tenth round, of which a checkpoint was saved, and the same round as other islands repeated it."""


def test_a_checkpoint_of_a_void_commit_is_removed_when_a_valid_one_is_complete(island):
    one, other = island(), island()
    commits(one, *BEFORE, SAVED)
    commits(other, *BEFORE, ANEW, leader="one")
    assert other.leader_log.checkpoints.rounds() == [10]
    commits(other, (11, 21))
    assert other.commits == [*BEFORE, ANEW, (11, 21)]
    assert other.leader_log.checkpoints.rounds() == [11]
    commits(other, (12, 22))
    assert other.leader_log.checkpoints.rounds() == [11], "and no more than one besides"


def test_a_void_checkpoint_of_a_later_round_is_removed_and_one_of_the_same_round_replaced(island):
    one, other = island(), island()
    commits(one, *BEFORE, SAVED)
    one.engine.reach(24, 24)
    one.leader_log._save(one.engine, one.leader_log.lease)
    assert one.leader_log.checkpoints.rounds() == [10, 24]
    commits(other, *BEFORE, leader="one")
    commits(other, ANEW)
    assert other.leader_log.checkpoints.rounds() == [10]
    assert other.leader_log.checkpoints.newest().metadata["engine"]["version"] == [*ANEW]


def test_the_log_has_no_gap_after_a_restart_from_a_checkpoint_that_it_lacks(island):
    one, other, last = island(), island(), island()
    commits(one, *BEFORE, SAVED)
    commits(other, *BEFORE, leader="one")
    other.leader_log._save = lambda engine, log: None  # all islands die before
    commits(other, ANEW)
    assert other.commits == [*BEFORE, ANEW]
    last.leader_log.restore(last.leader_log.checkpoints.newest(), last.engine)
    commits(last, (11, 1021))
    assert last.commits == [*BEFORE, SAVED, (11, 1021)]
    assert [event.round for event in last.events(RoundFinished)] == [*range(1, 12)]


def test_an_island_that_was_frozen_while_it_saved_saves_nothing_after_it_lost_the_lease(island):
    frozen, other = island(), island()
    commits(frozen, *BEFORE)
    shared = frozen.engine.shared

    def freeze():
        commits(other, *BEFORE, SAVED, leader="frozen")
        commits(other, *((number, number) for number in range(11, 21)))
        return shared()

    frozen.engine.shared = freeze
    commits(frozen, SAVED)
    assert other.leader_log.checkpoints.rounds() == [11, 20]
    assert frozen.logged[-1] == "round 10 is not saved: another island has taken the write lease"


START = RunStarted(recipe="r", algorithm="DiLoCo", islands=1, params=1, steps=1, seed=0)


def written(path, *events, tail=""):
    path.write_text("".join(event.to_json() + "\n" for event in events) + tail)
    return path


def saved(number):
    return Saved(round=number, name=f"{number:08}")


def lease_of(path, num_bytes=None):
    return EventLogLease(path, lambda: path.stat().st_size if num_bytes is None else num_bytes)


def test_writes_of_an_old_lease_holder_do_not_reach_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    frozen = lease_of(path, 0)
    frozen.emit(saved(1))
    assert frozen.is_held
    inode = path.stat().st_ino
    other = lease_of(path)
    other.emit(saved(2))
    with pytest.raises(LeaseLost):
        frozen.emit(saved(99))
    other.emit(saved(3))
    assert not frozen.is_held
    assert other.is_held
    assert [event.round for event in read_events(path)] == [1, 2, 3]
    assert path.stat().st_ino == inode, "the log is not copied"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.lease"]
    frozen.close()
    other.close()


def test_an_island_that_was_frozen_while_it_took_the_lease_has_lost_it(tmp_path):
    path, others = written(tmp_path / "events.jsonl", saved(1)), []

    def frozen_before_it_locks_the_log(path):
        mark = replace_mark(path)
        monkeypatch.undo()
        others.append(lease_of(path.with_name("events.jsonl")))
        others[0].emit(saved(2))
        return mark

    replace_mark = event_log_lease._replace_mark
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(event_log_lease, "_replace_mark", frozen_before_it_locks_the_log)
        with pytest.raises(LeaseLost):
            lease_of(path, 0)
    others[0].emit(saved(3))
    assert others[0].is_held
    assert [event.round for event in read_events(path)] == [1, 2, 3]
    others[0].close()


STOPPED = """
import fcntl, os, signal, sys
log = open(sys.argv[1], "ab")
fcntl.flock(log, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGSTOP)
log.write(sys.argv[2].encode())
"""


def test_a_process_that_froze_with_the_log_locked_does_not_stop_the_next_leader(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log_lease, "_LOCK_LIMIT_S", 0.1)
    path = written(tmp_path / "events.jsonl", saved(1))
    frozen = subprocess.Popen([sys.executable, "-S", "-c", STOPPED, path, saved(99).to_json() + "\n"])
    try:
        assert os.WIFSTOPPED(os.waitpid(frozen.pid, os.WUNTRACED)[1])
        lease = lease_of(path)
        lease.emit(saved(2))
    finally:
        frozen.send_signal(signal.SIGCONT)
        frozen.wait(30.0)
    lease.emit(saved(3))
    assert [event.round for event in read_events(path)] == [1, 2, 3]
    lease.close()


def test_a_holder_that_cannot_lock_the_log_reports_it_and_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log_lease, "_LOCK_LIMIT_S", 0.1)
    lease = lease_of(written(tmp_path / "events.jsonl", saved(1)))
    with lease.path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="does not respond has locked"):
            lease.emit(saved(2))
    lease.emit(saved(3))
    lease.close()


def test_events_carry_the_time_of_their_commit_and_not_of_their_writing(island, monkeypatch):
    one, other = island(), island()
    monkeypatch.setattr(commit_log, "unix_time_s", lambda: 1e9)
    commits(one, (1, 1), leader="dead")
    other.commit_log.from_parts(one.commit_log.to_parts())
    monkeypatch.setattr(commit_log, "unix_time_s", lambda: 2e9)
    commits(other, (2, 2))
    assert [event.unix_time_s for event in other.events(Attended)] == [1e9, 2e9]


def test_a_run_whose_log_is_truncated_by_another_program_still_finishes_and_the_log_says_so(island):
    """What logrotate does with copytruncate."""
    one = island()
    commits(one, *BEFORE)
    os.truncate(one.folder.events, 0)
    commits(one, (10, 10), (11, 11))
    one.leader_log.finish(one.engine, None, 0.0)
    assert one.leader_log.is_finished
    assert one.folder.finished
    assert b"\0" not in one.folder.events.read_bytes()
    assert one.commits == [(10, 10), (11, 11)]
    [damage] = one.events(LogDamaged)
    assert damage.what == "another program has truncated it"
    assert damage.lost_bytes > 0
    assert len(one.events(RunStarted)) == 1


def test_a_run_that_ends_on_a_full_disk_finishes_when_there_is_room(small_disk, monkeypatch):
    monkeypatch.setattr(leader_event_log, "_RETRY_S", 0.01)
    one = Island(small_disk.path / "run")
    commits(one, *BEFORE)
    small_disk.fill()
    commits(one, (10, 10))  # neither logged nor saved, and not lost
    failed = "warning: the run is not finished, and a tries again: "
    thread = threading.Thread(target=one.leader_log.finish, args=(one.engine, None, 0.0))
    thread.start()
    while sum(text.startswith(failed) for text in one.logged) < 5:  # beyond its limit of 0 s
        assert thread.is_alive()
        time.sleep(0.001)
    small_disk.free()
    thread.join(30.0)
    assert one.leader_log.is_finished
    assert one.commits == [*BEFORE, (10, 10)]
    assert len(one.events(RunFinished)) == 1
    assert [text for text in one.logged if "No space left" in text and str(small_disk.path) in text]


def test_a_folder_without_settings_is_not_the_runs_and_no_run_is_finished_there(island):
    one = island()
    commits(one, *BEFORE)
    one.folder.settings.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*run\.json"):
        one.leader_log.finish(one.engine, None, 0.0)
    assert not one.folder.final.exists()


def test_a_new_leader_reports_rounds_that_no_island_remembers(island):
    one, other = island(), island()
    commits(one, *BEFORE)
    one.leader_log.release()
    one.folder.events.write_bytes(b"")
    commits(other, (8, 8), (9, 9), leader="one")
    commits(other, (10, 10))
    [damage] = other.events(LogDamaged)
    assert damage.what == "rounds 1 to 7 are missing, and no island remembers them"
    assert len(other.events(RunStarted)) == 1
    assert other.commits == [(8, 8), (9, 9), (10, 10)]


def test_a_new_leader_reports_damaged_lines_once_and_goes_on(island):
    one, other, last = island(), island(), island()
    commits(one, *BEFORE)
    one.leader_log.release()
    text = one.folder.events.read_bytes()
    at = text.index(b'{"event": "Attended", "round": 8')
    one.folder.events.write_bytes(text[:at] + b"\0" * 5 + text[at : at + 30] + b"~" + text[at + 31 :])
    commits(other, *BEFORE, leader="one")
    commits(other, (10, 10))
    commits(last, *BEFORE, (10, 10), leader="other")
    commits(last, (11, 11))
    assert [event.what for event in last.events(LogDamaged) if "line" not in event.what[:5]] == [
        "1 of its last lines cannot be read"
    ]
    assert [number for number, _ in last.commits] == [*range(1, 8), 9, 10, 11]
    last.leader_log.finish(last.engine, None, 0.0)
    assert last.leader_log.is_finished


def test_a_new_leader_reads_the_end_of_the_log_alone(island, monkeypatch):
    one, other = island(), island()
    for number in range(1, 200):
        one.commit(number, number)
    one.leader_log.release()
    size = one.folder.events.stat().st_size
    # Between the beginning and the remembered commits nothing is read, so damage there changes nothing.
    with one.folder.events.open("r+b") as log:
        log.readline()
        log.write(b"x" * (size // 2 - log.tell() - 1) + b"\n")
    monkeypatch.setattr(event_log, "_BLOCK", 4096)
    read = []
    original = event_log._parse
    monkeypatch.setattr(event_log, "_parse", lambda path, number, line: read.append(line) or original(path, number, line))
    commits(other, (198, 198), (199, 199), leader="one")
    commits(other, (200, 200))
    assert other.leader_log.written == StateVersion(200, 200)
    assert len(read) < 40, "of 600 lines"
    assert not other.events(RunStarted)[1:]


LEFT = IslandLeft(island=0, round=2, virtual_time_s=None, wall_time_s=1.0)
LOG = [START, attended(1, 2), saved(1), attended(2, 3), saved(2), LEFT, attended(3, 4)]


@pytest.mark.parametrize(
    ("epochs", "keeps", "last"),
    [
        ({2: 3}, 5, StateVersion(2, 3)),  # of a checkpoint: later commits are repeated
        ({2: 3, 3: 4, 4: 5}, 7, StateVersion(3, 4)),
        ({2: 9, 3: 10}, 3, StateVersion(1, 2)),  # other islands repeated the second round
        ({5: 9}, 7, StateVersion(3, 4)),
        ({}, 0, StateVersion(-1, 0)),
    ],
)
def test_the_committed_prefix_follows_from_rounds_and_epochs(tmp_path, epochs, keeps, last):
    path = written(tmp_path / "log", *LOG, tail='{"event": "Att')
    assert committed_prefix(path, epochs) == (len("".join(event.to_json() + "\n" for event in LOG[:keeps])), last, 0)


def test_a_missing_log_has_no_commits(tmp_path):
    assert committed_prefix(tmp_path / "log", {4: 5}) == (0, StateVersion(-1, 0), 0)


def test_the_lease_of_a_log_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        lease_of(tmp_path / "nowhere" / "log", 5)


@pytest.mark.parametrize("name", ["finish.lock", "events.jsonl"])
def test_a_link_in_the_place_of_a_file_of_the_run_is_an_error_and_its_target_stays(island, tmp_path, name):
    one, other = island(), tmp_path / "other"
    if name == "finish.lock":
        other.write_text("no lock")
    (one.folder.path / name).unlink(missing_ok=True)
    (one.folder.path / name).symlink_to(other)
    one.engine.reach(1, 5)
    with pytest.raises(CheckpointError, match=rf"{name}.*symbolic link"):
        one.leader_log.finish(one.engine, None, 0.0)
    assert name == "events.jsonl" or other.read_text() == "no lock"
    assert other.exists() == (name == "finish.lock")


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: b"", lambda text: b"[]", lambda text: text.replace(b"a#1", b"b#1")]
)
def test_a_restarted_island_waits_if_the_file_of_the_last_quorum_is_damaged(island, damage):
    one = island()
    assert one.leader_log.last_quorum() == LastQuorum(), "the run has just begun"
    one.commit(1, 5)
    again, path = island(), one.folder.path / "quorum.json"
    assert again.leader_log.last_quorum() == QUORUM.quorum
    path.write_bytes(damage(path.read_bytes()))
    last = again.leader_log.last_quorum().processes
    assert {*last} - ended_among(last, ["a#1", "b#1"]), "one of them is not known to have ended"
    assert "quorum.json cannot be read" in again.logged[-1]
    assert "stop this run and resume it" in again.logged[-1]
