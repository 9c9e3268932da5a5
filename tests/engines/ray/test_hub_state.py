"""The hub's state machine: every round counts once, whichever process dies."""

import copy
import math
from collections import Counter
from dataclasses import replace

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
from atoll.engines.accounting import ComputeSpan
from atoll.engines.hub_encoding import decode_weights
from atoll.engines.ray.hub_state import HubState, StartBarrier
from atoll.engines.ray.messages import UpdateMessage
from atoll.engines.ray.spec import Ray
from atoll.optim.codecs import CODECS
from atoll.optim.sgd import SGD
from atoll.optim.staleness import Polynomial
from atoll.recipes.toy import toy_async
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Train
from atoll.telemetry.sinks import MemorySink

WEIGHTS = Tree.of({"w": torch.ones(3)})


def hub_state(
    sink, *, updates=40, epoch=1, grace_s=0.0, islands=2, max_workers=2, pace="even", evaluate_every=10, algorithm=None, devices=1
):
    algorithm = algorithm or AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), grace_s=grace_s, pace=pace)
    run = replace(
        toy_async(),
        algorithm=algorithm,
        train=Train(steps=updates // islands, batch_size=1),
        cluster=Cluster(islands=islands),
        keep=Keep(evaluate_every=evaluate_every // islands),
    )
    engine = Ray(max_workers=max_workers, devices=devices)
    return HubState(run, engine, WEIGHTS.copy(), (100,) * islands, epoch=epoch, sink=sink)


def round_id(state, number):
    return state.round_id(state.hub.scheduler.workers[number].dispatch)


def update(state, number, *, incarnation=0, begin_s=0.0, pushed_s=1.0, loss=2.0, buffers=None):
    steps = state.hub.scheduler.workers[number].dispatch.steps
    stretch = ComputeSpan(begin_s, pushed_s, steps, float(steps), [loss], 8 * steps, True)
    return UpdateMessage(number, incarnation, round_id(state, number), begin_s, pushed_s, (stretch,), buffers or {})


def delta(value=0.1):
    return Tree.of({"w": torch.full((3,), value)})


def saved(state, sink, *, now_s, **settings):
    """Another hub that resumes from a checkpoint of this one, and its log."""
    parts, events = copy.deepcopy(state.to_parts(now_s)), list(sink.events)
    again = MemorySink()
    again.events = events
    other = hub_state(again, **settings)
    assert other.from_parts(lambda part, like: parts[part]) == now_s
    return other, again


def spans(sink):
    """The batches of all arrived rounds, with their shards."""
    rounds = {event.round: event for event in sink.of(Dispatched)}
    return [
        (d.shard, position) for a in sink.of(Arrived) for d in [rounds[a.round]] for position in range(d.start, d.start + d.steps)
    ]


def test_a_duplicate_update_counts_once():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    first = update(state, 0)
    assert state.push(first, delta(), 1.0) == "accepted"
    assert state.push(first, delta(), 1.1) == "duplicate"
    assert torch.allclose(state.params["w"], torch.full((3,), 0.9))
    assert (state.hub.version, state.accounting.totals.local_updates, len(sink.of(Arrived))) == (1, 4, 1)
    assert "delivered twice" in sink.of(Refused)[0].reason
    assert state.pull(0, 0, first.round_id, 1.2)[0].status == "train"
    assert state.accounting.ledgers[0].sent_bytes == 2 * WEIGHTS.nbytes, "both were sent"


def test_a_dead_workers_data_is_dispatched_again_and_its_late_update_is_rejected():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    late, task = update(state, 0), state.hub.scheduler.workers[0].dispatch
    state.leave(0, 2.0)
    state.join({0: 2}, 3.0)
    again = state.hub.scheduler.workers[0].dispatch
    assert (again.work.shard, again.work.start) == (task.work.shard, task.work.start)
    assert state.push(late, delta(), 4.0) == "replaced"
    assert state.pull(0, 0, None, 4.0)[0].status == "replaced"
    assert state.push(update(state, 0, incarnation=2), delta(), 5.0) == "accepted"
    assert [type(event) for event in sink.events][:4] == [Dispatched, IslandLeft, Returned, IslandJoined]
    assert max(Counter(spans(sink)).values()) == 1


def test_a_hub_that_lost_a_round_rejects_it_and_resets_its_workers_optimizer():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    two, again = saved(state, sink, now_s=0.5, epoch=2)
    first = update(state, 0)
    assert state.push(first, delta(), 1.0) == "accepted"
    second = update(state, 0, begin_s=1.0, pushed_s=2.0)
    # The first hub dies here. Of the worker's two rounds, the second hub has the first as open, and no record of the other.
    assert two.push(second, delta(), 3.0) == "unknown"
    task, _ = two.pull(0, 0, second.round_id, 3.1)
    assert (task.status, task.fresh_optimizer) == ("train", True)
    assert task.round_id != second.round_id
    assert [type(event) for event in again.events][-4:] == [Dispatched, IslandLeft, Returned, IslandJoined]


def test_a_round_that_was_open_at_the_checkpoint_is_accepted_by_the_next_hub_once():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    mine = update(state, 1, incarnation=1)
    two, again = saved(state, sink, now_s=0.5, epoch=2)
    assert two.push(mine, delta(), 2.0) == "accepted"
    task, _ = two.pull(1, 1, mine.round_id, 2.0)
    assert (task.status, task.fresh_optimizer) == ("train", False), "the worker keeps its optimizer"
    three, _ = saved(two, again, now_s=2.5, epoch=3)
    assert three.push(mine, delta(), 3.0) == "duplicate", "also if the hub died before it replied"


def test_a_round_of_another_hub_with_the_same_number_is_rejected():
    sink = MemorySink()
    state = hub_state(sink, grace_s=5.0)
    state.join({0: 0, 1: 1}, 0.0)
    assert state.push(update(state, 0), delta(), 1.0) == "accepted"  # it waits in the window
    two, again = saved(state, sink, now_s=1.0, epoch=2, grace_s=5.0)
    state.tick(6.5)
    theirs = update(state, 0, begin_s=6.5, pushed_s=7.0)
    two.tick(6.5)
    mine = round_id(two, 0)
    assert (theirs.round_id[0], theirs.round_id == mine) == (mine[0], False)
    assert two.push(theirs, delta(), 8.0) == "unknown"
    assert two.hub.version == 1
    assert not again.of(Refused), "the log has a round of this hub with that number"
    assert two.pull(0, 0, theirs.round_id, 8.0)[0].fresh_optimizer, "its worker resets its optimizer"


def test_an_unknown_worker_is_asked_to_register():
    state = hub_state(MemorySink())
    state.join({0: 0}, 0.0)
    assert state.pull(1, 5, None, 0.0)[0].status == "register"
    assert state.push(update(state, 0)._replace(incarnation=7), delta(), 1.0) == "register"


def test_a_window_closes_at_its_deadline_and_at_once_if_no_worker_can_arrive_before():
    sink = MemorySink()
    state = hub_state(sink, grace_s=2.0, updates=400)
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0), delta(), 1.0)
    assert state.deadline_s == 3.0, "the other worker has no last round"
    state.tick(2.9)
    assert state.hub.scheduler.workers[0].dispatch is None
    state.tick(3.0)
    assert state.hub.scheduler.workers[0].dispatch is not None
    state.push(update(state, 1, incarnation=1), delta(), 40.0)  # 10 s per step
    state.tick(42.0)
    state.push(update(state, 0), delta(), 45.0)
    closed = sink.of(WindowClosed)
    assert [(event.wall_time_s, event.islands) for event in closed] == [(3.0, [0]), (42.0, [1]), (45.0, [0])]


def test_the_last_weights_are_always_evaluated_and_the_figures_come_at_the_end():
    sink = MemorySink()
    state = hub_state(sink, updates=8, evaluate_every=1000)
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0), delta(), 1.0)
    assert state.evaluation_due is None
    state.push(update(state, 1, incarnation=1), delta(), 1.5)
    assert state.done
    assert (state.evaluation_due.local_updates, state.evaluation_due.wall_time_s, state.evaluation_due.virtual_time_s) == (
        8,
        1.5,
        None,
    )
    state.record_metrics(state.evaluation_due, {"loss": 1.25, "accuracy": 0.5})
    finished = state.finish(2.0, 0)
    evaluated = sink.of(Evaluated)[0]
    assert (evaluated.loss, evaluated.accuracy, evaluated.wall_time_s) == (1.25, 0.5, 1.5)
    assert (finished.val_loss, finished.wall_time_s, finished.local_updates) == (1.25, 2.0, 8)
    assert finished.digest == state.params.digest()
    assert sink.events[-1] is finished
    assert isinstance(finished, RunFinished)
    assert len(sink.of(Dispatched)) == 3, "dispatches that are open at the end are logged"
    assert state.push(update(state, 0), delta(), 3.0) == "finished"
    assert state.pull(0, 0, None, 3.0)[0].status == "finished"


def test_every_dispatch_is_logged_once_and_before_its_arrival():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    state.round_started(0, 0, round_id(state, 0), 0.25)
    state.push(update(state, 0), delta(), 1.0)
    state.round_started(0, 0, (0, 1), 0.25)  # a late call
    state.push(update(state, 1, incarnation=1, begin_s=0.125), delta(), 1.5)
    assert [(event.round, event.begin_s) for event in sink.of(Dispatched)] == [(0, 0.25), (1, 0.125)]
    kinds = [type(event) for event in sink.events]
    assert kinds.index(Dispatched) < kinds.index(Arrived)
    assert [event.islands for event in sink.of(RoundFinished)] == [2, 2]


def test_three_unusable_updates_in_a_row_end_the_run_and_change_no_weight():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    for time_s in (1.0, 2.0, 3.0):
        assert state.fatal_error is None
        assert state.push(update(state, 0, pushed_s=time_s), delta(math.nan), time_s) == "refused"
    assert isinstance(state.fatal_error, TrainingDiverged)
    assert "worker 0 has pushed 3 unusable updates" in str(state.fatal_error)
    assert torch.equal(state.params["w"], WEIGHTS["w"])
    assert len(sink.of(Returned)) == 3
    assert state.hub.scheduler.workers[0].dispatch is not None, "the state is consistent"


@pytest.mark.parametrize(
    ("what", "loss", "says"),
    [(delta(), math.inf, "its loss is inf"), (delta(math.nan), 2.0, "not finite"), (None, 2.0, "not the 12 bytes of an update")],
    ids=["loss", "delta", "length"],
)
def test_an_unusable_update_is_refused_and_its_data_dispatched_again(what, loss, says):
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    task = state.hub.scheduler.workers[0].dispatch
    bad = update(state, 0, loss=loss)
    assert state.push(bad, what, 1.0) == "refused"
    again = state.hub.scheduler.workers[0].dispatch
    assert (again.work, again.round > task.round) == (task.work, True)
    assert says in sink.of(Refused)[0].reason
    assert state.accounting.ledgers[0].computed_s == 1.0, "a refused update was computed, too"
    next_task, _ = state.pull(0, 0, bad.round_id, 1.0)
    assert (next_task.status, next_task.fresh_optimizer) == ("train", False), "the worker has reset its optimizer already"
    assert state.hub.version == 0


def test_a_duplicate_of_a_refused_update_is_refused_also_by_the_next_hub():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    bad = update(state, 0)
    replies = [state.push(bad, delta(math.nan), time_s) for time_s in (1.0, 1.5)]
    two, _ = saved(state, sink, now_s=2.0, epoch=2)
    assert [*replies, two.push(bad, delta(math.nan), 2.5)] == ["refused"] * 3, "its worker must reset its optimizer"


def test_only_refusals_in_a_row_count_and_a_restarted_hub_remembers_them():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    for time_s, value in ((1.0, math.nan), (2.0, math.nan), (3.0, 0.1), (4.0, math.nan), (5.0, math.nan)):
        state.push(update(state, 0, pushed_s=time_s), delta(value), time_s)
    assert state.fatal_error is None
    two, _ = saved(state, sink, now_s=5.5, epoch=2)
    two.push(update(two, 0, pushed_s=6.0), delta(math.nan), 6.0)
    assert two.fatal_error is not None


def test_measured_speeds_give_a_slow_worker_fewer_steps():
    state = hub_state(MemorySink(), pace="measured", updates=400)
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0, pushed_s=1.0), delta(), 1.0)
    state.push(update(state, 1, incarnation=1, pushed_s=4.0), delta(), 4.0)
    assert state.hub.scheduler.workers[1].dispatch.steps == 1


def test_additional_workers_have_ledgers_and_steps_do_not_go_back():
    sink = MemorySink()
    state = hub_state(sink, updates=400)
    state.join({0: 0, 1: 1}, 0.0)
    for number in (0, 1):
        state.push(update(state, number, incarnation=number), delta(), 1.0)
    wide, again = saved(state, sink, now_s=1.0, epoch=2, updates=400, max_workers=4)
    wide.join({2: 2, 3: 3}, 1.0)
    wide.push(update(wide, 3, incarnation=3), delta(), 2.0)
    assert len(wide.accounting.ledgers) == 4
    assert [(event.local_updates, event.steps) for event in again.of(RoundFinished)] == [(4, 2), (8, 4), (12, 6)]


def test_accounting_has_presence_and_counted_tokens():
    sink = MemorySink()
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), correction=Polynomial(threshold=0))
    state = hub_state(sink, algorithm=algorithm)
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0, buffers={"seen": np.array([7])}), delta(), 1.0)
    state.push(update(state, 1, incarnation=1, buffers={"seen": np.array([8])}), delta(), 2.0)
    assert [event.applied for event in sink.of(Arrived)] == [True, False], "a staleness of 1 is above the threshold"
    assert (state.accounting.totals.tokens, state.accounting.totals.local_updates) == (32, 8)
    assert state.buffers["seen"].tolist() == [8]
    state.leave(1, 5.0)
    assert [ledger.present_s for ledger in state.accounting.ledgers] == [2.0, 5.0]


def test_a_logged_dispatch_is_not_logged_again_by_the_next_hub_or_for_another_incarnation():
    sink = MemorySink()
    state = hub_state(sink)
    state.join({0: 0, 1: 1}, 0.0)
    state.round_started(1, 0, round_id(state, 1), 0.5)  # an older incarnation
    assert not sink.of(Dispatched)
    state.round_started(0, 0, round_id(state, 0), 0.25)
    two, again = saved(state, sink, now_s=0.5, epoch=2)
    two.push(update(two, 0), delta(), 1.0)
    assert [event.round for event in again.of(Dispatched)] == [0]


def test_a_worker_is_overdue_after_ten_times_its_last_round_or_after_300_s_in_its_first():
    state = hub_state(MemorySink())
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0, pushed_s=4.0), delta(), 4.0)  # 4 steps in 4 s
    assert state.overdue(44.0) == {}
    assert state.overdue(45.0) == {0: 41.0}
    assert state.overdue(301.0) == {0: 297.0, 1: 301.0}
    state.leave(0, 302.0)
    assert state.overdue(303.0) == {1: 303.0}, "a worker that left is not overdue"


def test_a_dispatch_has_the_number_of_devices():
    sink = MemorySink()
    state = hub_state(sink, devices=3)
    state.join({0: 0, 1: 1}, 0.0)
    state.push(update(state, 0), delta(), 1.0)
    assert {event.devices for event in sink.of(Dispatched)} == {3}


def test_the_start_barrier_waits_for_the_expected_workers_and_later_ones_pass():
    barrier = StartBarrier(2, starting=True)
    barrier.add(0, 0, now_s=1.0)
    assert barrier.release(now_s=60.0) == {}
    barrier.add(1, 1, now_s=60.0)
    assert barrier.release(now_s=60.0) == {0: 0, 1: 1}
    assert barrier.release(now_s=60.0) == {}, "each passes once"
    barrier.add(0, 2, now_s=70.0)
    assert barrier.release(now_s=70.0) == {0: 2}


def test_the_start_barrier_releases_after_its_timeout():
    barrier = StartBarrier(2, starting=True)
    barrier.add(1, 0, now_s=1.0)
    assert barrier.release(now_s=62.0) == {1: 0}


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_dead_worker_leaves_the_start_barrier_but_not_its_successor(incarnation):
    barrier = StartBarrier(2, starting=True)
    barrier.add(0, 1, now_s=0.0)
    barrier.remove(0, incarnation)
    assert barrier.has(0, 1) == (incarnation != 1)


def test_a_worker_is_sent_what_changed_since_its_last_round_and_whole_weights_when_it_joins():
    sink, codec = MemorySink(), CODECS["int8"]
    encoded = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), codec="int8")
    state = hub_state(sink, algorithm=encoded)
    state.join({0: 0, 1: 1}, 0.0)
    task, weights = state.pull(0, 0, None, 0.0)
    assert (task.encoded, weights.same_bits(WEIGHTS)) == (False, True)
    held, first = weights.copy(), update(state, 0)._replace(encoded=True)
    assert state.push(first, delta(), 1.0) == "accepted"
    assert state.accounting.ledgers[0].sent_bytes == sink.of(Arrived)[0].sent_bytes == codec.nbytes(3)
    two, _ = saved(state, sink, now_s=2.0, epoch=2, algorithm=encoded)
    for hub in (state, two):  # also one that was restarted
        task, data = hub.pull(0, 0, first.round_id, 2.0)
        assert task.encoded
        out = hub.hub.scheduler.workers[0].dispatch
        assert decode_weights(codec, held, data).same_bits(hub.hub.task(out).params)
        assert hub.hub.task_bytes(0) == data.nbytes == codec.nbytes(3)
    task, weights = two.pull(0, 0, (99, 1), 3.0)  # a worker that trained in a round which the hub has lost
    assert (task.encoded, task.fresh_optimizer, weights is two.params) == (False, True, True)
