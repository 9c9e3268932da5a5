"""The scheduler, driven by hand: when it dispatches each worker, with how many steps, and what it does about workers that do not
return."""

import heapq
import json
import math

import pytest
from hypothesis import given, settings, strategies as st

from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Dispatch, Scheduler
from atoll.core.errors import ConfigError
from atoll.core.protocols import Plan

VERY_S = (0.58, 0.75, 1.51, 3.33)


def scheduler(
    workers=0, *, steps=10, grace_s=0.0, pace="even", speeds=(), shards="deficit", ties="last", examples=(100,) * 4, updates=10**9
):
    """A scheduler with so many workers, dispatched at time 0 with version 0."""
    plan = Plan(steps=steps, grace_s=grace_s, pace=pace, speeds=speeds, shards=shards, ties=ties)
    made = Scheduler(plan, examples, updates, draw=lambda round: 0.5)
    for worker in range(workers):
        made.join_all({worker: None}, 0.0, 0)
    return made


def summarized(decisions):
    """Closings as (time, workers), dispatches as (time, worker), returns as (time, worker, shard)."""
    short = []
    for decision in decisions:
        match decision:
            case ClosedWindow():
                short.append((decision.time_s, decision.workers))
            case Dispatch():
                short.append((decision.time_s, decision.worker))
            case AbandonedRound():
                short.append((decision.time_s, decision.dispatch.worker, decision.dispatch.work.shard))
    return short


# ----------------------------------------------------------------------------------------------------- the grace window


def test_without_grace_every_worker_is_dispatched_at_once():
    hub = scheduler(2)
    window, decisions = hub.arrive(0, 3.0, 1, next_s=5.0)
    assert (window, summarized(decisions)) == (0, [(3.0, (0,)), (3.0, 0)])
    assert hub.deadline_s is None


def test_arrivals_at_the_very_same_time_share_a_window_even_without_grace():
    hub = scheduler(3)
    assert hub.arrive(2, 3.0, 1, next_s=3.0) == (0, [])
    assert summarized(hub.arrive(0, 3.0, 2, next_s=4.0)[1]) == [(3.0, (2, 0)), (3.0, 2), (3.0, 0)]


def test_the_window_is_anchored_at_the_first_arrival_and_not_at_the_last():
    hub = scheduler(4, grace_s=2.0)
    assert hub.arrive(0, 10.0, 1, next_s=11.5) == (0, [])
    assert hub.deadline_s == 12.0
    window, decisions = hub.arrive(1, 11.5, 2, next_s=13.0)  # within 2 of the second arrival, but not of the first
    assert (window, summarized(decisions)) == (0, [(11.5, (0, 1)), (11.5, 0), (11.5, 1)])
    assert decisions[0].opened_s == 10.0
    assert decisions[0].idle_s == (1.5, 0.0)
    assert hub.arrive(2, 13.0, 3, next_s=14.0) == (1, [])  # opens the next


def test_an_arrival_exactly_at_the_end_is_inside():
    hub = scheduler(3, grace_s=2.0)
    assert hub.arrive(0, 10.0, 1, next_s=12.0) == (0, [])
    assert hub.tick(12.0, 1, next_s=12.0) == []
    window, decisions = hub.arrive(1, 12.0, 2, next_s=12.5)
    assert (window, summarized(decisions)) == (0, [(12.0, (0, 1)), (12.0, 0), (12.0, 1)])


def test_an_arrival_after_the_end_is_outside():
    hub = scheduler(3, grace_s=2.0)
    assert hub.arrive(0, 10.0, 1, next_s=None) == (0, [])
    assert summarized(hub.tick(12.1, 1, next_s=12.1)) == [(12.1, (0,)), (12.1, 0)]
    assert hub.arrive(1, 12.1, 2, next_s=None) == (1, [])


def test_a_window_closes_at_the_last_arrival_if_no_further_one_is_possible():
    hub = scheduler(2, grace_s=2.0)
    assert summarized(hub.arrive(0, 10.0, 1, next_s=12.000001)[1]) == [(10.0, (0,)), (10.0, 0)]


def test_a_window_closes_when_it_becomes_known_that_no_arrival_is_possible():
    hub = scheduler(2, grace_s=2.0)
    assert hub.arrive(0, 10.0, 1, next_s=None) == (0, [])
    assert hub.tick(11.0, 1, next_s=None) == []
    closing, _ = hub.tick(11.5, 1, next_s=40.0)
    assert (closing.time_s, closing.opened_s, closing.idle_s) == (11.5, 10.0, (1.5,))


def test_when_nothing_is_known_the_window_closes_at_its_end():
    hub = scheduler(2, grace_s=2.0)
    hub.arrive(0, 10.0, 1, next_s=None)
    assert hub.tick(11.999, 1) == []
    assert summarized(hub.tick(hub.deadline_s, 1)) == [(12.0, (0,)), (12.0, 0)]


def test_a_window_closes_at_once_if_no_worker_is_in_a_round():
    hub = scheduler(2, grace_s=100.0)
    assert hub.arrive(1, 10.0, 1, next_s=None) == (0, [])
    assert summarized(hub.arrive(0, 11.0, 2, next_s=None)[1]) == [(11.0, (1, 0)), (11.0, 1), (11.0, 0)]


def test_an_infinite_window_waits_for_all_workers_and_no_longer():
    hub = scheduler(3, grace_s=math.inf)
    assert hub.arrive(2, 1.0, 1, next_s=1e12) == (0, [])
    assert hub.arrive(0, 1e12, 2, next_s=None) == (0, [])
    assert hub.tick(1e15, 2) == []
    assert summarized(hub.arrive(1, 1e16, 3, next_s=math.inf)[1])[0] == (1e16, (2, 0, 1))


def test_the_workers_of_a_window_are_dispatched_with_one_version_in_order_of_arrival():
    hub = scheduler(3, grace_s=math.inf)
    for version, worker in enumerate((2, 0, 1), start=1):
        decisions = hub.arrive(worker, float(version), version, next_s=None)[1]
    assert [(d.worker, d.round, d.version) for d in decisions[1:]] == [(2, 3, 3), (0, 4, 3), (1, 5, 3)]


# -------------------------------------------------------------------------------------------------- joining and leaving


def test_a_window_whose_last_outstanding_worker_dies_closes_then():
    hub = scheduler(2, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=14.0)
    assert summarized(hub.leave(1, 12.0, 1, next_s=math.inf)) == [(12.0, 1, 1), (12.0, (0,)), (12.0, 0)]


def test_a_death_that_leaves_others_out_within_the_window_does_not_close_it():
    hub = scheduler(3, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=14.0)
    assert summarized(hub.leave(1, 12.0, 1, next_s=15.0)) == [(12.0, 1, 1)]
    assert summarized(hub.arrive(2, 15.0, 2, next_s=math.inf)[1])[0] == (15.0, (0, 2))


def test_a_waiting_worker_may_leave_and_its_update_stays_counted():
    hub = scheduler(3, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=14.0)
    hub.arrive(1, 11.0, 2, next_s=14.0)
    assert hub.leave(0, 12.0, 2, next_s=14.0) == []
    assert (hub.local_updates, hub.shards.steps.tolist()) == (20, [10, 10, 10, 0])
    closing = hub.arrive(2, 14.0, 3, next_s=math.inf)[1][0]
    assert (closing.workers, closing.opened_s) == ((1, 2), 10.0)


def test_a_window_without_workers_closes_and_its_number_is_not_reused():
    hub = scheduler(2, grace_s=5.0)
    assert hub.arrive(0, 10.0, 1, next_s=14.0) == (0, [])
    assert hub.leave(0, 11.0, 1, next_s=14.0) == [ClosedWindow(0, (), 10.0, 11.0, ())]
    assert hub.deadline_s is None
    assert hub.tick(100.0, 1) == []
    assert hub.arrive(1, 101.0, 2, next_s=None)[0] == 1


def test_an_estimate_that_has_proved_wrong_counts_as_unknown():
    """The worker that was due at 12 is late: the window closes at its deadline, whatever the scheduler expected."""
    hub = scheduler(2, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=12.0)
    assert hub.tick(14.0, 1, next_s=12.0) == []
    assert isinstance(hub.tick(15.0, 1, next_s=12.0)[0], ClosedWindow)


@pytest.mark.parametrize("now_s", [9.0, math.nan, math.inf])
def test_time_is_finite_and_does_not_go_back(now_s):
    hub = scheduler(2, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=14.0)
    before = hub.to_parts()
    for event in (lambda: hub.tick(now_s, 1), lambda: hub.arrive(1, now_s, 2, None), lambda: hub.leave(1, now_s, 1)):
        with pytest.raises(ConfigError, match=r"the time is .* and the last event was at 10.0 s"):
            event()
    assert hub.to_parts() == before


def test_workers_that_join_together_take_steps_relative_to_the_fastest_of_all():
    hub = scheduler(steps=20, pace="given")
    speeds = {worker: 1 / time_s for worker, time_s in enumerate(reversed(VERY_S))}
    assert [dispatch.steps for dispatch in hub.join_all(speeds, 0.0, 0)] == [3, 7, 15, 20]


def test_workers_one_of_whom_has_no_speed_do_not_join_at_all():
    hub = scheduler(steps=20, pace="given")
    before = hub.to_parts()
    for speeds in ({0: 1.0, 1: None}, {0: 1.0, 1: 0.0}, {0: 1.0, -1: 1.0}):
        with pytest.raises(ConfigError):
            hub.join_all(speeds, 0.0, 0)
    assert hub.to_parts() == before


def test_a_measured_worker_that_joins_again_has_its_old_speed():
    hub = scheduler(2, steps=20, pace="measured")
    rounds_at(hub, 0, 1.0, 2)
    rounds_at(hub, 1, 2.0, 2)
    assert hub.speeds.steps(1) == 10
    now_s = hub.to_parts()["latest_s"]
    hub.leave(1, now_s, 0)
    [again] = hub.join_all({1: None}, now_s, 0)
    assert again.steps == 10


@pytest.mark.parametrize("seconds", [math.inf, 1e-320, 0.0, -1.0, math.nan])
def test_a_time_that_gives_no_speed_is_passed_over(seconds):
    hub = scheduler(2, steps=20, pace="measured")
    rounds_at(hub, 0, 1.0, 1)
    rounds_at(hub, 1, 2.0, 1)
    dispatch, now_s = hub.workers[1].dispatch, hub.to_parts()["latest_s"]
    hub.arrive(1, now_s + 1, 0, None, seconds)
    assert (dispatch.steps, hub.speeds.steps(1)) == (10, 10)


def test_the_round_of_a_worker_that_dies_is_assigned_to_the_next():
    hub = scheduler(2, examples=(100, 100))
    [back] = hub.leave(1, 3.0, 0, next_s=7.0)
    assert (back.dispatch.worker, back.dispatch.round, back.dispatch.work.shard, back.time_s) == (1, 1, 1, 3.0)
    assert hub.shards.steps.tolist() == [10, 0]
    [_, again] = hub.arrive(0, 7.0, 1, next_s=math.inf)[1]
    assert again.work == back.dispatch.work
    assert hub.local_updates == 10


def test_a_joiner_is_dispatched_at_once_though_a_window_is_open():
    hub = scheduler(2, grace_s=5.0)
    hub.arrive(0, 10.0, 1, next_s=14.0)
    [dispatch] = hub.join_all({7: None}, 11.0, 1)
    assert (dispatch.worker, dispatch.time_s, dispatch.version, dispatch.work.shard) == (7, 11.0, 1, 3)
    assert hub.deadline_s == 15.0
    assert summarized(hub.arrive(7, 13.0, 2, next_s=14.0)[1]) == []
    assert summarized(hub.arrive(1, 14.0, 3, next_s=math.inf)[1])[0] == (14.0, (0, 7, 1))


def test_a_worker_that_joins_again_starts_a_new_round():
    hub = scheduler(1)
    hub.leave(0, 1.0, 0)
    [dispatch] = hub.join_all({0: None}, 2.0, 0)
    assert (dispatch.round, hub.open_dispatch(0, 0), hub.open_dispatch(0, 1)) == (1, None, dispatch)


def test_a_worker_cannot_join_twice_or_leave_without_having_joined():
    hub = scheduler(2)
    before = hub.to_parts()
    with pytest.raises(ConfigError, match=r"worker 1 joins, but it has joined already"):
        hub.join_all({1: None}, 1.0, 0)
    with pytest.raises(ConfigError, match=r"worker 5 leaves, but it is not one of the 2 workers"):
        hub.leave(5, 1.0, 0)
    assert hub.to_parts() == before


def test_a_worker_with_an_unusable_update_is_dispatched_with_the_same_work():
    hub = scheduler(1, examples=(100,))
    first = hub.open_dispatch(0, 0)
    back, again = hub.redispatch(0, 4.0, 0)
    assert (back.dispatch, again.work, again.round, again.time_s) == (first, first.work, 1, 4.0)
    assert hub.local_updates == 0


def test_once_the_updates_are_reached_no_worker_is_dispatched():
    hub = scheduler(3, updates=10)
    assert hub.arrive(0, 5.0, 1, next_s=8.0) == (0, [])
    assert hub.done
    assert hub.tick(100.0, 1) == []
    assert hub.join_all({9: None}, 101.0, 1) == []
    assert summarized(hub.redispatch(1, 102.0, 1)) == [(102.0, 1, 1)]
    assert summarized(hub.leave(2, 103.0, 1)) == [(103.0, 2, 2)]
    assert hub.shards.steps.tolist() == [10, 0, 0, 0]


# --------------------------------------------------------------------------------------------------------------- shards


def test_every_worker_keeps_its_own_shard_while_all_are_equal():
    hub = scheduler(4, grace_s=math.inf)
    for _ in range(5):
        sent = [d for worker in range(4) for d in hub.arrive(worker, 1.0, 0, next_s=None)[1] if isinstance(d, Dispatch)]
        assert [dispatch.work.shard for dispatch in sent] == [0, 1, 2, 3]


def test_two_workers_that_swap_shards_leave_the_schedules_with_the_shards():
    """Steps by speed: worker 0 takes 10, worker 1 takes 5. Then shard 1 lags, so worker 0 is given it."""
    hub = scheduler(pace="given", speeds=(2.0, 1.0), examples=(100, 100), grace_s=math.inf)
    rounds = [[decision for worker in (0, 1) for decision in hub.join_all({worker: None}, 0.0, 0)]]
    for _ in range(2):
        rounds.append([d for worker in (0, 1) for d in hub.arrive(worker, 1.0, 0, next_s=None)[1] if isinstance(d, Dispatch)])
    seen = [[(d.worker, d.work.shard, d.work.schedule, d.steps) for d in round] for round in rounds]
    assert seen == [
        [(0, 0, 0, 10), (1, 1, 0, 5)],
        [(0, 1, 5, 10), (1, 0, 10, 5)],  # shard 1 goes on at 5, where worker 1 left it; shard 0 at 10
        [(0, 1, 15, 10), (1, 0, 15, 5)],  # 15 each: a tie, and every worker keeps its shard
    ]


# ------------------------------------------------------------------------------------------------ Dynamic Local Updates


@pytest.mark.parametrize(("steps", "expected"), [(50, [50, 38, 19, 8]), (20, [20, 15, 7, 3]), (1, [1, 1, 1, 1]), (3, [3, 2, 1, 1])])
def test_steps_follow_the_speed_and_the_fastest_takes_all_of_them(steps, expected):
    hub = scheduler(steps=steps, pace="given", speeds=tuple(1 / time for time in VERY_S))
    for worker in range(4):
        hub.join_all({worker: None}, 0.0, 0)
    assert [hub.speeds.steps(worker) for worker in range(4)] == expected


def test_a_worker_of_a_thousandth_of_the_speed_takes_a_step_all_the_same():
    hub = scheduler(2, steps=50, pace="given", speeds=(1000.0, 1.0))
    assert [hub.speeds.steps(worker) for worker in range(2)] == [50, 1]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.floats(1e-3, 1e3))
def test_a_worker_of_exactly_one_nth_of_the_speed_loses_no_step_to_rounding(parts, steps, time_s):
    hub = scheduler(2, steps=parts * steps, pace="given", speeds=(1 / time_s, 1 / (parts * time_s)))
    assert hub.speeds.steps(1) == steps


def test_the_reference_is_the_fastest_worker_that_is_present():
    hub = scheduler(pace="given", steps=20, speeds=(4.0, 2.0, 1.0))
    [alone] = hub.join_all({2: None}, 0.0, 0)
    [faster] = hub.join_all({1: None}, 0.0, 0)
    assert (alone.steps, faster.steps, hub.speeds.steps(2)) == (20, 20, 10)
    hub.join_all({0: None}, 0.0, 0)
    assert [hub.speeds.steps(worker) for worker in (0, 1, 2)] == [20, 10, 5]
    hub.leave(0, 1.0, 0)
    assert [hub.speeds.steps(worker) for worker in (1, 2)] == [20, 10]


def test_the_driver_may_supply_the_speeds():
    hub = scheduler(pace="given", steps=20)
    for worker, time in enumerate(VERY_S):
        hub.join_all({worker: 1 / time}, 0.0, 0)
    assert [hub.speeds.steps(worker) for worker in range(4)] == [20, 15, 7, 3]


@pytest.mark.parametrize(
    ("speed", "what"), [(None, "no speed is given"), (0.0, "speed is 0.0"), (math.inf, "inf"), (math.nan, "nan")]
)
def test_a_worker_without_a_usable_speed_is_refused_and_not_there(speed, what):
    hub = scheduler(pace="given")
    hub.join_all({0: 2.0}, 0.0, 0)
    before = hub.to_parts()
    with pytest.raises(ConfigError, match=rf"worker 1: .*{what}.*pace=measured"):
        hub.join_all({1: speed}, 0.0, 0)
    assert hub.to_parts() == before


def test_a_worker_beyond_the_list_of_speeds_is_refused_though_the_driver_knows_one():
    with pytest.raises(ConfigError, match=r"worker 1: no speed is given"):
        scheduler(1, pace="given", speeds=(1.0,)).join_all({1: 1.0}, 0.0, 0)


def test_measured_speeds_agree_with_given_ones_after_one_round_each():
    hub = scheduler(4, steps=50, pace="measured")
    assert [hub.speeds.steps(worker) for worker in range(4)] == [50] * 4
    for worker, time in enumerate(VERY_S):
        hub.arrive(worker, 50 * time, worker, next_s=None, seconds=50 * time)
    assert [hub.speeds.steps(worker) for worker in range(4)] == [50, 38, 19, 8]


def test_a_worker_that_was_not_measured_yet_takes_all_steps():
    hub = scheduler(2, steps=50, pace="measured")
    hub.arrive(0, 10.0, 1, next_s=None, seconds=10.0)
    [newcomer] = hub.join_all({5: None}, 11.0, 1)
    assert (newcomer.steps, hub.speeds.steps(1), hub.speeds.steps(0)) == (50, 50, 50)


def test_the_time_since_dispatch_counts_where_computing_time_is_unknown():
    hub = scheduler(2, steps=50, pace="measured")
    hub.arrive(0, 10.0, 1, next_s=None)
    hub.arrive(1, 20.0, 2, next_s=None)
    assert [hub.speeds.steps(worker) for worker in (0, 1)] == [50, 25]


def rounds_at(hub, worker, time_s, count):
    """So many rounds in a row, at so many seconds a step; the steps of each next one."""
    steps = []
    for _ in range(count):
        dispatch = hub.workers[worker].dispatch
        now_s = max(hub.to_parts()["latest_s"], dispatch.time_s + dispatch.steps * time_s)
        decisions = hub.arrive(worker, now_s, 0, next_s=math.inf, seconds=dispatch.steps * time_s)[1]
        steps.append(next(d.steps for d in decisions if isinstance(d, Dispatch) and d.worker == worker))
    return steps


def test_measured_steps_follow_a_worker_that_slows_down_and_recovers():
    hub = scheduler(2, steps=64, pace="measured")
    assert rounds_at(hub, 0, 1.0, 1) + rounds_at(hub, 1, 1.0, 1) == [64, 64]
    assert rounds_at(hub, 1, 4.0, 1) == [40]  # half of what was known, half of what was seen: (1 + 1/4) / 2 of 64
    assert rounds_at(hub, 1, 4.0, 20)[-1] == 16
    slowly = rounds_at(hub, 1, 1.0, 3)
    assert slowly == [40, 52, 58]
    assert rounds_at(hub, 1, 1.0, 30)[-1] in (63, 64)  # never quite, as halves go


def test_when_the_fastest_slows_down_another_becomes_the_reference():
    hub = scheduler(2, steps=60, pace="measured")
    rounds_at(hub, 0, 1.0, 1), rounds_at(hub, 1, 2.0, 1)
    assert [hub.speeds.steps(worker) for worker in (0, 1)] == [60, 30]
    rounds_at(hub, 0, 8.0, 40)
    assert [hub.speeds.steps(worker) for worker in (0, 1)] == [15, 60]
    rounds_at(hub, 0, 0.5, 40)
    assert [hub.speeds.steps(worker) for worker in (0, 1)] == [60, 15]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10.0)), min_size=4, max_size=30))
def test_the_fastest_that_is_remembered_is_the_fastest_that_is_present(seen):
    hub = scheduler(4, steps=50, pace="measured")
    for worker, time_s in seen:
        rounds_at(hub, worker, time_s, 1)
        speeds = [speed for _, speed in hub.speeds.to_parts()["present"]]
        fastest = max(speed for speed in speeds if speed is not None)
        expected = [50 if s is None else max(1, math.floor(s / fastest * 50 + 1e-9)) for s in speeds]
        assert [hub.speeds.steps(w) for w in range(4)] == expected


# --------------------------------------------------------------------------------------------------------- whole schedules


def play(hub, times_s, until_s):
    """Drives the scheduler as the simulator does, with exact knowledge of the next arrival: (arrivals, closings)."""
    out, arrivals, closings = [], [], []
    for worker in range(len(times_s)):
        [dispatch] = hub.join_all({worker: 1 / times_s[worker]}, 0.0, 0)
        heapq.heappush(out, (dispatch.steps * times_s[worker], worker))
    while out[0][0] <= until_s:
        now_s, worker = heapq.heappop(out)
        window, decisions = hub.arrive(worker, now_s, 0, next_s=out[0][0] if out else math.inf)
        arrivals.append((round(now_s, 6), worker, window))
        for decision in decisions:
            if isinstance(decision, ClosedWindow):
                closings.append((round(decision.time_s, 6), decision.workers))
            else:
                heapq.heappush(out, (decision.time_s + decision.steps * times_s[decision.worker], decision.worker))
    return arrivals, closings


def test_the_authors_schedule_of_the_first_rounds():
    """Workers of 0.58, 0.75, 1.51 and 3.33 s a step, 20 steps a round: rounds of 11.6, 15.0, 30.2 and 66.6 s. Grace 0.5 s."""
    arrivals, closings = play(scheduler(steps=20, grace_s=0.5), VERY_S, until_s=70.0)
    assert arrivals == [
        (11.6, 0, 0),  # 20 x 0.58; alone until 12.1
        (15.0, 1, 1),  # 20 x 0.75; alone until 15.5
        (23.2, 0, 2),  # 11.6 + 11.6
        (30.0, 1, 3),  # 15.0 + 15.0; opens a window until 30.5 ...
        (30.2, 2, 3),  # ... in which 20 x 1.51 falls: worker 1 waits for 0.2 s, and the hub dispatches both at 30.2
        (34.8, 0, 4),  # 23.2 + 11.6
        (45.2, 1, 5),  # 30.2 + 15.0, for it left at 30.2 and not at 30.0
        (46.4, 0, 6),  # 34.8 + 11.6; 1.2 s after worker 1, whose window has closed
        (58.0, 0, 7),  # 46.4 + 11.6
        (60.2, 1, 8),  # 45.2 + 15.0; its window ends at 60.7 ...
        (60.4, 2, 8),  # ... and 30.2 + 30.2 falls into it: both leave at 60.4
        (66.6, 3, 9),  # 20 x 3.33
        (69.6, 0, 10),  # 58.0 + 11.6
    ]
    assert closings == [
        (11.6, (0,)), (15.0, (1,)), (23.2, (0,)), (30.2, (1, 2)), (34.8, (0,)), (45.2, (1,)), (46.4, (0,)), (58.0, (0,)),
        (60.4, (1, 2)), (66.6, (3,)), (69.6, (0,)),
    ]  # fmt: skip


def test_with_dynamic_steps_all_rounds_take_about_as_long():
    """50, 38, 19 and 8 steps take 29.0, 28.5, 28.69 and 26.64 s, so a window of 2.5 s from the slowest on holds all four."""
    arrivals, closings = play(scheduler(steps=50, grace_s=2.5, pace="given"), VERY_S, until_s=60.0)
    assert arrivals == [
        (26.64, 3, 0), (28.5, 1, 0), (28.69, 2, 0), (29.0, 0, 0), (55.64, 3, 1), (57.5, 1, 1), (57.69, 2, 1), (58.0, 0, 1),
    ]  # fmt: skip
    assert closings == [(29.0, (3, 1, 2, 0)), (58.0, (3, 1, 2, 0))]


# --------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("pace", ["even", "measured"])
def test_the_scheduler_survives_a_file_in_an_open_window_and_continues_in_the_same_way(pace):
    hub = scheduler(4, grace_s=5.0, pace=pace)
    hub.arrive(2, 10.0, 1, next_s=11.0, seconds=9.0)
    hub.arrive(0, 11.0, 2, next_s=14.0, seconds=10.0)
    hub.leave(3, 12.0, 2, next_s=14.0)
    again = scheduler(grace_s=5.0, pace=pace)
    again.from_parts(json.loads(json.dumps(hub.to_parts())))
    assert again.to_parts() == hub.to_parts()
    assert again.deadline_s == 15.0
    assert again.arrive(1, 14.0, 3, math.inf, 13.0) == hub.arrive(1, 14.0, 3, math.inf, 13.0)
    assert again.join_all({3: None}, 15.0, 3) == hub.join_all({3: None}, 15.0, 3)
    assert again.to_parts() == hub.to_parts()
