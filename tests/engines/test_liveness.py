"""Heartbeats in a store, attribution of the first failure, and the timeout of exchanges."""

import shutil
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta

import pytest
from torch.distributed import FileStore, HashStore

from atoll.engines import liveness
from atoll.engines.liveness import (
    FIRST_TIMEOUT_S,
    LEAST_TIMEOUT_S,
    TIMEOUT_INTERVALS,
    ExchangeTimeout,
    FailureAttribution,
    Heartbeat,
    HeartbeatMonitor,
    append_log_line,
    dated,
    last_error,
    last_lines,
    rotate_log,
    store_heartbeat,
    write_log_line,
)


def test_a_count_that_changes_is_a_sign_of_life(monkeypatch):
    store, now = HashStore(), [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    monitor = HeartbeatMonitor(store, 1)
    store_heartbeat(store, 1).close()
    assert monitor.silent_s() == 0
    now[0] += 5
    assert (monitor.silent_s(), monitor.failure()) == (5, "")
    store.set("heartbeat/1", "2")
    now[0] += 5
    assert monitor.silent_s() == 0


def test_a_rank_is_taken_for_dead_after_the_silence_limit_or_with_an_exit_reason(monkeypatch):
    store, now = HashStore(), [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    monitor = HeartbeatMonitor(store, 1)
    now[0] += liveness.SILENCE_LIMIT_S + 1
    assert monitor.failure() == "its last heartbeat was 31 s ago"
    FailureAttribution(store, 1, [0, 1]).record_exit_reason("the disk is full")
    now[0] += 2
    assert monitor.failure() == "it has ended (the disk is full)"


def test_a_heartbeat_runs_until_it_is_closed_or_the_store_is_lost():
    third, ended = threading.Event(), threading.Event()
    heartbeat = Heartbeat(lambda number: third.set() if number == 3 else None, interval_s=0.001)
    assert third.wait(20)
    heartbeat.close()

    def gone(number):
        ended.set()
        raise ConnectionError

    Heartbeat(gone, interval_s=0.001)
    assert ended.wait(20)


def attributions(size=5):
    store = HashStore()
    return [FailureAttribution(store, rank, range(size)) for rank in range(size)]


def test_a_rank_that_reported_nothing_is_named_itself():
    zero, *_ = attributions()
    assert zero.report_missing(3) == (3, "")


def test_a_rank_that_ended_because_it_missed_another_is_not_named_but_that_other_is():
    zero, one, two, *_ = attributions()
    assert zero.report_missing(4) == (4, "")
    assert one.report_missing(0) == (4, " (rank 0 missed it first)")
    assert two.report_missing(1) == (4, " (rank 1 missed it first)"), "along the chain: 1 reports what 0 reported"


def test_two_ranks_that_miss_each_other_name_each_other_and_never_themselves():
    zero, one, *_ = attributions()
    assert zero.report_missing(1)[0] == 1
    assert one.report_missing(0)[0] == 0
    assert zero.report_missing(1)[0] == 1, "also after the other's report"


def test_a_cycle_of_reports_ends():
    zero, one, two, three, *_ = attributions()
    one.report_missing(2)
    two.report_missing(3)
    three.report_missing(1)
    assert zero.report_missing(1)[0] in (1, 2, 3)


def test_members_are_named_by_their_rank_in_the_group_and_other_ranks_by_their_global_rank():
    store = HashStore()
    all_ranks = [FailureAttribution(store, rank, range(6)) for rank in range(6)]
    counterparts = FailureAttribution(store, 1, [1, 3, 5])
    assert counterparts.report_missing(2) == (2, ""), "global rank 5"
    assert all_ranks[0].report_missing(1) == (5, " (rank 1 missed it first)")
    all_ranks[3].report_missing(4)
    assert FailureAttribution(store, 5, [1, 3, 5]).report_missing(1) == (1, ", which missed rank 4"), "rank 4 is in another group"


def test_without_the_store_the_missing_rank_is_named(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    store = FileStore(str(folder / "values"), 3)
    store.set_timeout(timedelta(milliseconds=50))
    attribution = FailureAttribution(store, 0, range(3))
    shutil.rmtree(folder)
    assert attribution.report_missing(2) == (2, "")


# the timeout of exchanges


class ManualClock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def exchange(timeout, clock, computed_s, took_s=0.0):
    """The timeout of an exchange of `took_s` seconds after `computed_s` seconds of computing."""
    clock.now_s += computed_s
    timeout_s = timeout.start()
    clock.now_s += took_s
    timeout.finish()
    return timeout_s


def test_the_first_timeout_is_long_and_its_reason_names_the_rule():
    timeout = ExchangeTimeout()
    assert timeout.start() == FIRST_TIMEOUT_S
    assert "before the first exchange" in timeout.reason
    assert f"{LEAST_TIMEOUT_S:g} s" in timeout.reason


@pytest.mark.parametrize(
    ("intervals_s", "timeout_s"), [([0.01], LEAST_TIMEOUT_S), ([7.0], 70.0), ([7.0, 30.0, 2.0], 30.0 * TIMEOUT_INTERVALS)]
)
def test_the_timeout_is_ten_times_the_longest_interval_and_at_least_a_minute(intervals_s, timeout_s):
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    for interval_s in intervals_s:
        exchange(timeout, clock, interval_s)
    assert timeout.start() == pytest.approx(timeout_s)
    assert f"{max(intervals_s):.3g} s" in timeout.reason


def test_the_interval_under_way_counts():
    """Rounds of 20 minutes here and of 40 minutes elsewhere: each exchange takes 20 minutes of waiting."""
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    assert [exchange(timeout, clock, 1200.0, 1200.0) for _ in range(3)] == [12000.0, 24000.0, 24000.0]


def test_waiting_for_peers_is_part_of_the_interval():
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    exchange(timeout, clock, 1.0, 99.0)
    assert exchange(timeout, clock, 1.0) == 1000.0


def test_a_fixed_timeout_never_changes():
    clock = ManualClock()
    timeout = ExchangeTimeout(2.5, now=clock)
    exchange(timeout, clock, 100.0)
    assert (timeout.start(), timeout.timeout_s, timeout.reason) == (2.5, 2.5, "as given")


def test_a_timeout_is_news_at_first_and_when_it_has_changed_by_a_factor_of_2():
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    assert [timeout.is_news(), timeout.is_news()] == [True, False]
    exchange(timeout, clock, 7.0)
    assert [timeout.is_news(), timeout.is_news()] == [True, False]
    exchange(timeout, clock, 10.0)
    assert not timeout.is_news()
    exchange(timeout, clock, 14.0)
    assert timeout.is_news()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([dated("rank 1 of 2 on here, process 7"), "error: an old one.", "error: the disk is full.", "bye"], "the disk is full"),
        ([dated("error: the disk is full."), "bye"], "the disk is full"),
        ([dated("error: the disk is full."), dated("rank 1 of 2 on here, process 8, 1 thread(s)"), dated("saved round 3")], ""),
        (["error: the disk is full.", dated("island-0001 on here (cpu), process 8")], ""),
        (None, ""),
    ],
)
def test_the_last_error_of_a_log_is_from_after_the_last_start(tmp_path, lines, error):
    log = tmp_path / "rank-1.log"
    if lines is not None:
        log.write_text("".join(f"{line}\n" for line in lines))
    assert last_error(log) == error


def test_a_line_of_a_log_begins_with_date_time_and_zone(tmp_path):
    append_log_line(tmp_path / "logs" / "hub.log", "saved")
    stamp, _, text = (tmp_path / "logs" / "hub.log").read_text().partition(" ")
    written = datetime.fromisoformat(stamp)
    assert written.utcoffset() is not None
    assert abs(written.timestamp() - time.time()) < 60
    assert text == "saved\n"


def test_a_log_is_rotated_by_size_and_the_oldest_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "LOG_LIMIT_BYTES", 100)
    log = tmp_path / "hub.log"
    for number in range(20):
        append_log_line(log, f"line {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub.log", "hub.log.1", "hub.log.2", "hub.log.3"]
    kept = "".join((tmp_path / name).read_text() for name in ("hub.log.3", "hub.log.2", "hub.log.1", "hub.log"))
    numbers = [int(line.rpartition(" ")[2]) for line in kept.splitlines()]
    assert numbers == list(range(numbers[0], 20))


WRITER = """
import sys
for number in range(3):
    sys.stdout.write("x" * 60 + "\\n")
    sys.stdout.flush()
    sys.stdin.readline()
print("error: no more.")
"""


def test_rotation_under_a_process_that_waits_loses_no_line_and_its_last_error_is_found(tmp_path, monkeypatch):
    log = tmp_path / "island.log"
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-S", "-c", WRITER], stdin=subprocess.PIPE, stdout=output)
    while not log.stat().st_size:
        time.sleep(0.001)
    monkeypatch.setattr(liveness, "LOG_LIMIT_BYTES", 50)
    rotate_log(log, in_use=True)
    assert (log.stat().st_size, log.with_name("island.log.1").stat().st_size) == (0, 61)
    process.communicate(b"\n\n\n", timeout=30.0)
    assert log.read_bytes() == (b"x" * 60 + b"\n") * 2 + b"error: no more.\n"
    assert last_error(log) == "no more"
    rotate_log(log, in_use=True)
    assert log.read_bytes() == b""
    assert last_error(log) == "no more", "it is in the rotated log"
    assert last_lines(log, 2) == "x" * 60 + " | error: no more."


def test_rotation_writes_through_no_link(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "LOG_LIMIT_BYTES", 5)
    other, log = tmp_path / "other", tmp_path / "island.log"
    for path, link in ((other, log), (log, log.with_name("island.log.0"))):
        link.unlink(missing_ok=True)
        path.write_text("not a log")
        link.symlink_to(other)
        rotate_log(log, in_use=True)
        assert other.read_text() == "not a log"


def test_a_log_on_a_full_disk_ends_nothing():
    full = open("/dev/full", "w")  # noqa: SIM115, closing it fails
    write_log_line(full, "nothing")
    with pytest.raises(OSError, match="No space"):
        full.close()
