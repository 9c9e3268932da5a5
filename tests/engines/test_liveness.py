"""Heartbeats in a store, attribution of the first failure, and the timeout of exchanges."""

import shutil
import threading
from datetime import timedelta

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
    last_error,
    store_heartbeat,
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
        (["12:00:00 rank 1 of 2 on here, process 7", "error: an old one.", "error: the disk is full.", "bye"], "the disk is full"),
        (["error: the disk is full.", "12:00:05 rank 1 of 2 on here, process 8, 1 thread(s)", "12:00:06 saved round 3"], ""),
        (["error: the disk is full.", "12:00:05 island-0001 on here (cpu), process 8"], ""),
        (None, ""),
    ],
)
def test_the_last_error_of_a_log_is_from_after_the_last_start(tmp_path, lines, error):
    log = tmp_path / "rank-1.log"
    if lines is not None:
        log.write_text("".join(f"{line}\n" for line in lines))
    assert last_error(log) == error
