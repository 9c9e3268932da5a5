"""The hub's desk, driven by hand: every round counts once, whoever dies."""

import copy
import math
from collections import Counter

import numpy as np
import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import TrainingDiverged
from atoll.core.events import (
    Arrived,
    Dispatched,
    Evaluated,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    RoundFinished,
    RunFinished,
    WindowClosed,
)
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_checkpoints import parts_of, restored
from atoll.engines.ray.hub_state import Desk
from atoll.engines.ray.messages import Brought
from atoll.engines.round_record import ComputeRecord
from atoll.optim.sgd import SGD
from atoll.optim.staleness import Polynomial
from atoll.telemetry.sinks import Remembered

WEIGHTS = Tree.of({"w": torch.ones(3)})


def desk(sink, *, updates=40, epoch=1, grace_s=0.0, islands=2, places=2, pace="even", evaluate_every=10, algorithm=None, devices=1):
    algorithm = algorithm or AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), grace_s=grace_s, pace=pace)
    return Desk(
        algorithm=algorithm,
        plan=algorithm.plan,
        params=WEIGHTS.copy(),
        examples=[100] * islands,
        updates=updates,
        draw=lambda round: 0.5,
        islands=islands,
        places=places,
        evaluate_every=evaluate_every,
        epoch=epoch,
        sink=sink,
        devices=devices,
    )


def ticket(a_desk, number):
    return a_desk.ticket(a_desk.hub.scheduler.workers[number].out)


def brought(a_desk, number, *, life=0, begin_s=0.0, pushed_s=1.0, loss=2.0, buffers=None):
    steps = a_desk.hub.scheduler.workers[number].out.steps
    stretch = ComputeRecord(begin_s, pushed_s, steps, float(steps), 8 * steps, loss, True)
    return Brought(number, life, ticket(a_desk, number), begin_s, pushed_s, (stretch,), buffers or {})


def delta(value=0.1):
    return Tree.of({"w": torch.full((3,), value)})


def saved(a_desk, sink, *, now_s, **settings):
    """Another desk that goes on from what this one saves now; what was logged goes with it."""
    parts, events = copy.deepcopy(parts_of(a_desk, now_s)), list(sink.events)
    again = Remembered()
    again.events = events
    other = desk(again, **settings)
    assert restored(other, lambda part, like: parts[part]) == now_s
    return other, again


def spans(sink):
    """What was read, by shard, of all rounds that arrived."""
    rounds = {event.round: event for event in sink.of(Dispatched)}
    return [
        (d.shard, position) for a in sink.of(Arrived) for d in [rounds[a.round]] for position in range(d.start, d.start + d.steps)
    ]


def test_an_update_that_comes_twice_counts_once():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    first = brought(one, 0)
    assert one.take(first, delta(), 1.0) == "taken"
    assert one.take(first, delta(), 1.1) == "again"
    assert torch.allclose(one.params["w"], torch.full((3,), 0.9))
    assert (one.hub.version, one.accounting.totals.local_updates, len(sink.of(Arrived))) == (1, 4, 1)
    assert "delivered twice" in sink.of(Refused)[0].reason
    assert one.standing(0, 0, first.ticket, 1.2)[0] == "go", "it goes on all the same"
    assert one.accounting.ledgers[0].sent_bytes == 2 * WEIGHTS.nbytes, "and both were sent"


def test_a_dead_workers_data_is_read_by_another_and_its_late_update_is_not_taken():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    late, task = brought(one, 0), one.hub.scheduler.workers[0].out
    one.go(0, 2.0)
    one.come({0: 2}, 3.0)
    again = one.hub.scheduler.workers[0].out
    assert (again.work.shard, again.work.start) == (task.work.shard, task.work.start)
    assert one.take(late, delta(), 4.0) == "replaced"
    assert one.standing(0, 0, None, 4.0)[0] == "replaced"
    assert one.take(brought(one, 0, life=2), delta(), 5.0) == "taken"
    assert [type(event) for event in sink.events][:4] == [Dispatched, IslandLeft, Returned, IslandJoined]
    assert max(Counter(spans(sink)).values()) == 1


def test_a_hub_that_lost_a_round_refuses_it_and_has_its_worker_begin_anew():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    two, again = saved(one, sink, now_s=0.5, epoch=2)
    first = brought(one, 0)
    assert one.take(first, delta(), 1.0) == "taken"
    second = brought(one, 0, begin_s=1.0, pushed_s=2.0)
    # `one` dies here. Of the worker's two rounds, `two` knows the first as out, and not the second.
    assert two.take(second, delta(), 3.0) == "unknown"
    word, dispatch, fresh = two.standing(0, 0, second.ticket, 3.1)
    assert (word, fresh) == ("go", True)
    assert two.ticket(dispatch) != second.ticket
    assert [type(event) for event in again.events][-4:] == [Dispatched, IslandLeft, Returned, IslandJoined]


def test_a_round_that_was_out_when_the_hub_saved_is_taken_by_the_next_hub_once():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    mine = brought(one, 1, life=1)
    two, again = saved(one, sink, now_s=0.5, epoch=2)
    assert two.take(mine, delta(), 2.0) == "taken"
    assert two.standing(1, 1, mine.ticket, 2.0)[::2] == ("go", False), "and its moments go on"
    three, _ = saved(two, again, now_s=2.5, epoch=3)
    assert three.take(mine, delta(), 3.0) == "again", "also if the hub died before it could say so"


def test_a_round_of_the_same_number_from_another_hub_is_not_taken_for_this_ones():
    sink = Remembered()
    one = desk(sink, grace_s=5.0)
    one.come({0: 0, 1: 1}, 0.0)
    assert one.take(brought(one, 0), delta(), 1.0) == "taken"  # it waits in the window
    two, again = saved(one, sink, now_s=1.0, epoch=2, grace_s=5.0)
    one.tick(6.5)
    theirs = brought(one, 0, begin_s=6.5, pushed_s=7.0)
    two.tick(6.5)
    mine = ticket(two, 0)
    assert (theirs.ticket[0], theirs.ticket == mine) == (mine[0], False)
    assert two.take(theirs, delta(), 8.0) == "unknown"
    assert two.hub.version == 1
    assert not again.of(Refused), "the log would say it of this hub's round"
    assert two.standing(0, 0, theirs.ticket, 8.0)[2], "and its worker begins anew"


def test_a_worker_that_nobody_knows_is_asked_who_it_is():
    one = desk(Remembered())
    one.come({0: 0}, 0.0)
    assert one.standing(1, 5, None, 0.0)[0] == "hello"
    assert one.take(brought(one, 0)._replace(life=7), delta(), 1.0) == "hello"


def test_a_window_closes_by_itself_and_at_once_when_nobody_can_come_in_time():
    sink = Remembered()
    one = desk(sink, grace_s=2.0, updates=400)
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0), delta(), 1.0)
    assert one.deadline_s == 3.0, "how long the other takes is not known yet"
    one.tick(2.9)
    assert one.hub.scheduler.workers[0].out is None
    one.tick(3.0)
    assert one.hub.scheduler.workers[0].out is not None
    one.take(brought(one, 1, life=1), delta(), 40.0)  # ten seconds a step
    one.tick(42.0)
    one.take(brought(one, 0), delta(), 45.0)
    closed = sink.of(WindowClosed)
    assert [(event.wall_time_s, event.islands) for event in closed] == [(3.0, [0]), (42.0, [1]), (45.0, [0])]


def test_the_last_weights_are_always_judged_and_the_figures_come_at_the_end():
    sink = Remembered()
    one = desk(sink, updates=8, evaluate_every=1000)
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0), delta(), 1.0)
    assert one.due is None
    one.take(brought(one, 1, life=1), delta(), 1.5)
    assert one.done
    assert (one.due.local_updates, one.due.wall_time_s, one.due.virtual_time_s) == (8, 1.5, None)
    one.judged(one.due, {"loss": 1.25, "accuracy": 0.5})
    finished = one.finish(2.0, 0)
    judged = sink.of(Evaluated)[0]
    assert (judged.loss, judged.accuracy, judged.wall_time_s) == (1.25, 0.5, 1.5)
    assert (finished.val_loss, finished.wall_time_s, finished.local_updates) == (1.25, 2.0, 8)
    assert finished.digest == one.params.digest()
    assert sink.events[-1] is finished
    assert isinstance(finished, RunFinished)
    assert len(sink.of(Dispatched)) == 3, "who is out at the end is in the log"
    assert one.take(brought(one, 0), delta(), 3.0) == "over"
    assert one.standing(0, 0, None, 3.0)[0] == "over"


def test_every_dispatch_is_in_the_log_once_and_before_what_came_of_it():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    one.began(0, 0, ticket(one, 0), 0.25)
    one.take(brought(one, 0), delta(), 1.0)
    one.began(0, 0, (0, 1), 0.25)  # comes late
    one.take(brought(one, 1, life=1, begin_s=0.125), delta(), 1.5)
    assert [(event.round, event.begin_s) for event in sink.of(Dispatched)] == [(0, 0.25), (1, 0.125)]
    kinds = [type(event) for event in sink.events]
    assert kinds.index(Dispatched) < kinds.index(Arrived)
    assert [event.islands for event in sink.of(RoundFinished)] == [2, 2]


def test_three_unusable_updates_in_a_row_end_the_run_and_change_no_weight():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    for time_s in (1.0, 2.0, 3.0):
        assert one.hopeless is None
        assert one.take(brought(one, 0, pushed_s=time_s), delta(math.nan), time_s) == "refused"
    assert isinstance(one.hopeless, TrainingDiverged)
    assert "worker 0 has brought 3 unusable updates" in str(one.hopeless)
    assert torch.equal(one.params["w"], WEIGHTS["w"])
    assert len(sink.of(Returned)) == 3
    assert one.hub.scheduler.workers[0].out is not None, "all is in order, and could be saved"


@pytest.mark.parametrize(
    ("what", "loss", "says"),
    [(delta(), math.inf, "its loss is inf"), (delta(math.nan), 2.0, "not finite"), (None, 2.0, "not the 12 bytes of the weights")],
    ids=["loss", "delta", "length"],
)
def test_what_is_unusable_is_refused_and_its_data_read_again(what, loss, says):
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    task = one.hub.scheduler.workers[0].out
    bad = brought(one, 0, loss=loss)
    assert one.take(bad, what, 1.0) == "refused"
    again = one.hub.scheduler.workers[0].out
    assert (again.work, again.round > task.round) == (task.work, True)
    assert says in sink.of(Refused)[0].reason
    assert one.accounting.ledgers[0].computed_s == 1.0, "it was busy all the same"
    assert one.standing(0, 0, bad.ticket, 1.0)[::2] == ("go", False), "it has begun anew by itself"
    assert one.hub.version == 0


def test_a_refused_update_that_comes_twice_is_refused_twice_also_by_the_next_hub():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    bad = brought(one, 0)
    verdicts = [one.take(bad, delta(math.nan), time_s) for time_s in (1.0, 1.5)]
    two, _ = saved(one, sink, now_s=2.0, epoch=2)
    assert [*verdicts, two.take(bad, delta(math.nan), 2.5)] == ["refused"] * 3, "else its worker would keep what it has seen"


def test_only_refusals_in_a_row_count_and_a_hub_that_dies_forgets_none():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    for time_s, value in ((1.0, math.nan), (2.0, math.nan), (3.0, 0.1), (4.0, math.nan), (5.0, math.nan)):
        one.take(brought(one, 0, pushed_s=time_s), delta(value), time_s)
    assert one.hopeless is None
    two, _ = saved(one, sink, now_s=5.5, epoch=2)
    two.take(brought(two, 0, pushed_s=6.0), delta(math.nan), 6.0)
    assert two.hopeless is not None


def test_measured_speeds_give_a_slow_worker_fewer_steps():
    one = desk(Remembered(), pace="measured", updates=400)
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0, pushed_s=1.0), delta(), 1.0)
    one.take(brought(one, 1, life=1, pushed_s=4.0), delta(), 4.0)
    assert one.hub.scheduler.workers[1].out.steps == 1


def test_more_workers_than_before_have_books_of_their_own_and_steps_do_not_go_back():
    sink = Remembered()
    one = desk(sink, updates=400)
    one.come({0: 0, 1: 1}, 0.0)
    for number in (0, 1):
        one.take(brought(one, number, life=number), delta(), 1.0)
    wide, again = saved(one, sink, now_s=1.0, epoch=2, updates=400, places=4)
    wide.come({2: 2, 3: 3}, 1.0)
    wide.take(brought(wide, 3, life=3), delta(), 2.0)
    assert len(wide.accounting.ledgers) == 4
    assert [(event.local_updates, event.steps) for event in again.of(RoundFinished)] == [(4, 2), (8, 4), (12, 6)]


def test_the_books_know_who_was_there_and_which_tokens_count():
    sink = Remembered()
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), correction=Polynomial(threshold=0))
    one = desk(sink, algorithm=algorithm)
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0, buffers={"seen": np.array([7])}), delta(), 1.0)
    one.take(brought(one, 1, life=1, buffers={"seen": np.array([8])}), delta(), 2.0)
    assert [event.applied for event in sink.of(Arrived)] == [True, False], "one version late is too late here"
    assert (one.accounting.totals.tokens, one.accounting.totals.local_updates) == (32, 8)
    assert one.buffers["seen"].tolist() == [8]
    one.go(1, 5.0)
    assert [ledger.present_s for ledger in one.accounting.ledgers] == [2.0, 5.0]


def test_a_dispatch_that_the_log_has_is_not_written_again_by_the_next_hub_or_for_another_life():
    sink = Remembered()
    one = desk(sink)
    one.come({0: 0, 1: 1}, 0.0)
    one.began(1, 0, ticket(one, 1), 0.5)  # of one that held the place before
    assert not sink.of(Dispatched)
    one.began(0, 0, ticket(one, 0), 0.25)
    two, again = saved(one, sink, now_s=0.5, epoch=2)
    two.take(brought(two, 0), delta(), 1.0)
    assert [event.round for event in again.of(Dispatched)] == [0]


def test_who_is_out_ten_times_as_long_as_before_is_mentioned_and_whoever_was_never_out_before_later():
    one = desk(Remembered())
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0, pushed_s=4.0), delta(), 4.0)  # four steps in as many seconds
    assert one.silent(44.0) == {}
    assert one.silent(45.0) == {0: 41.0}
    assert one.silent(301.0) == {0: 297.0, 1: 301.0}
    one.go(0, 302.0)
    assert one.silent(303.0) == {1: 303.0}, "who is gone is replaced"


def test_how_many_devices_a_round_is_computed_by_is_in_the_log():
    sink = Remembered()
    one = desk(sink, devices=3)
    one.come({0: 0, 1: 1}, 0.0)
    one.take(brought(one, 0), delta(), 1.0)
    assert {event.devices for event in sink.of(Dispatched)} == {3}
