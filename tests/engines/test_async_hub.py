"""The hub, driven by hand: its arithmetic, the weights that it dispatches, and the updates that it refuses."""

import json
import math
import re
from dataclasses import dataclass

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Dispatch
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.engines.async_hub import Applied, AsyncHub, Push, Refusal
from atoll.optim.adam import Adam
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial

GOLDEN = (0.1, 0.2, 0.3, 0.4, 0.4, -0.1, 0.05, 0.15, 0.02, 0.03, 0.01, -0.04)


def scalar(value):
    return Tree.of({"w": torch.tensor([value], dtype=torch.float64)})


def hub_of(algorithm, workers=4, params=None, shards=4, updates=10**9):
    """A hub with so many workers, dispatched at 0."""
    hub = AsyncHub(algorithm, params or scalar(1.0), examples=[100] * shards, updates=updates, draw=lambda round: 0.5)
    for worker in range(workers):
        hub.join_all({worker: None}, 0.0)
    return hub


def push(hub, worker, value, now_s=1.0, next_s=None):
    """The worker's update of its present round."""
    delta = scalar(value) if isinstance(value, float) else value
    return hub.push(Push(worker, hub.scheduler.workers[worker].dispatch.round, delta), now_s, next_s)


def after_each(hub, values):
    """The weight after each of these, from workers in turn."""
    seen = []
    for number, value in enumerate(values):
        push(hub, number % len(hub.scheduler.workers), value, now_s=float(number))
        seen.append(float(hub.params["w"]))
    return seen


def plain(step, inner=2):
    return AsyncLocalSGD(inner_steps=inner, outer=SGD(lr=step))


# ------------------------------------------------------------------------------------------------------- its arithmetic


@pytest.mark.parametrize("grace_s", [0.0, math.inf])
@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (0.0, [0.9825, 0.9475, 0.895, 0.6675, 0.5975, 0.615, 0.60625, 0.3595, 0.356, 0.35075, 0.349, 0.1544]),
        (0.1, [0.9825, 0.9475, 0.895, 0.71475, 0.629, 0.63075, 0.60625, 0.42565, 0.4001, 0.3728, 0.349, 0.21488]),
    ],
)
def test_golden_scalars_of_delayed_nesterov(activation, expected, grace_s):
    """Every fourth weight without activation is that of synchronous DiLoCo: 0.6675, 0.3595, 0.1544. The times of dispatch do
    not enter the arithmetic."""
    rule = DelayedNesterov(lr=0.7, momentum=0.9, period=4, activation=activation)
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=rule, grace_s=grace_s))
    assert after_each(hub, GOLDEN) == pytest.approx(expected, abs=1e-12)
    assert float(hub.state.outer.velocity["w"]) == pytest.approx(0.32, abs=1e-12)


def test_a_buffer_of_four_takes_the_golden_synchronous_steps_and_stays_in_between():
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=Buffered(rule=Nesterov(lr=0.7, momentum=0.9), size=4)))
    expected = [1.0] * 3 + [0.6675] * 4 + [0.3595] * 4 + [0.1544]
    assert after_each(hub, GOLDEN) == pytest.approx(expected, abs=1e-12)


def test_delayed_nesterov_with_a_period_of_one_is_nesterov_at_every_arrival():
    delayed, naive = (
        hub_of(AsyncLocalSGD(inner_steps=1, outer=rule)) for rule in (DelayedNesterov(lr=0.7, period=1), Nesterov(lr=0.7))
    )
    assert after_each(delayed, GOLDEN) == after_each(naive, GOLDEN)


def test_four_equal_updates_in_turn_move_naive_nesterov_six_times_as_far_as_one_step_on_their_mean():
    """4 + 4b + 3b^2 + 2b^3 + b^4 = 12.1441 at b = 0.9, against 1.9."""
    naive = hub_of(AsyncLocalSGD(inner_steps=1, outer=Nesterov(lr=1.0, momentum=0.9)), params=scalar(0.0))
    delayed = hub_of(AsyncLocalSGD(inner_steps=1, outer=DelayedNesterov(lr=1.0, momentum=0.9, period=4)), params=scalar(0.0))
    assert after_each(naive, [1.0] * 4)[-1] == pytest.approx(-12.1441, abs=1e-12)
    assert after_each(delayed, [1.0] * 4)[-1] == pytest.approx(-1.9, abs=1e-12)


def test_a_weight_of_one_over_k_follows_the_workers_that_are_present():
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=SGD(lr=1.0), weight="1/k"), params=scalar(10.0))
    assert after_each(hub, [1.0]) == [9.75]
    now_s = hub.scheduler.to_parts()["latest_s"]
    hub.leave(3, now_s), hub.leave(2, now_s)
    assert after_each(hub, [1.0]) == [9.25]


def test_staleness_is_the_number_of_updates_since_the_dispatch():
    """Three workers without grace. Each row: the worker that arrives, its staleness, and the new version."""
    hub, seen = hub_of(plain(0.1), workers=3), []
    for number, worker in enumerate((0, 0, 1, 0, 2, 1)):
        [applied] = [o for o in push(hub, worker, 1.0, float(number), next_s=math.inf) if isinstance(o, Applied)]
        seen.append((worker, applied.staleness, applied.version))
    assert seen == [
        (0, 0, 1),  # the first update
        (0, 0, 2),  # dispatched with version 1
        (1, 2, 3),  # dispatched with version 0; worker 0 arrived twice since
        (0, 1, 4),  # dispatched with version 2; worker 1 arrived since
        (2, 4, 5),  # dispatched with version 0
        (1, 2, 6),  # dispatched with version 3
    ]


def test_the_second_of_a_window_is_as_stale_as_the_window_is_long():
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=SGD(lr=0.1), grace_s=math.inf), workers=3)
    for _ in range(2):
        stale = [o.staleness for w in range(3) for o in push(hub, w, 1.0) if isinstance(o, Applied)]
        assert stale == [0, 1, 2]


def test_an_update_that_is_too_stale_is_left_out_but_its_steps_count_and_its_worker_continues():
    correction = Polynomial(power=0.0, threshold=1)
    hub = hub_of(AsyncLocalSGD(inner_steps=5, outer=SGD(lr=1.0), correction=correction), workers=2, params=scalar(10.0))
    push(hub, 0, 1.0, next_s=9.0), push(hub, 0, 1.0, next_s=9.0)
    applied, closing, dispatch = push(hub, 1, 5.0, next_s=9.0)
    assert (applied.counted, applied.staleness, applied.version, hub.version) == (False, 2, 2, 2)
    assert float(hub.params["w"]) == 8.0
    assert hub.scheduler.local_updates == 15
    assert (closing.workers, dispatch.version) == ((1,), 2)


def test_a_correction_sees_the_dispatched_weights():
    """delta + strength * delta^2 * (now - then) = 2 + 0.5 * 4 * (7 - 10) = -4."""
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=SGD(lr=1.0), correction=DelayCompensation(strength=0.5)), params=scalar(10.0))
    push(hub, 0, 3.0, next_s=9.0)
    push(hub, 1, 2.0, next_s=9.0)
    assert float(hub.params["w"]) == 7.0 - -4.0


# ------------------------------------------------------------------------------------------------------ what it hands out


def test_an_update_is_applied_before_its_worker_is_dispatched_again():
    hub = hub_of(plain(1.0), workers=1, params=scalar(10.0), shards=1)
    applied, closing, dispatch = push(hub, 0, 4.0, 3.0)
    assert isinstance(applied, Applied)
    assert isinstance(closing, ClosedWindow)
    assert float(hub.task(dispatch).params["w"]) == 6.0
    assert hub.task(dispatch).steps == 2
    assert hub.task(dispatch).work.start == 2


def test_an_arrival_after_the_window_first_sends_off_the_others_with_the_weights_from_before_it():
    hub = hub_of(AsyncLocalSGD(inner_steps=2, outer=SGD(lr=1.0), grace_s=2.0), workers=3, params=scalar(10.0))
    [first] = push(hub, 0, 1.0, now_s=10.0)
    closing, dispatch, second = push(hub, 1, 3.0, now_s=13.0)  # no tick at 12
    assert (first.window, closing.window, second.window) == (0, 0, 1)
    assert (first.staleness, second.staleness) == (0, 1)
    assert (closing.workers, closing.time_s, closing.idle_s) == ((0,), 13.0, (3.0,))
    assert (dispatch.worker, dispatch.version) == (0, 1)
    assert float(hub.task(dispatch).params["w"]) == 9.0
    assert float(hub.params["w"]) == 6.0


def test_a_joiner_begins_from_the_present_weights_though_others_wait():
    hub = hub_of(AsyncLocalSGD(inner_steps=2, outer=SGD(lr=1.0), grace_s=9.0), workers=2, params=scalar(10.0))
    push(hub, 0, 1.0, now_s=10.0)
    [dispatch] = hub.join_all({2: None}, 11.0)
    assert (dispatch.version, float(hub.task(dispatch).params["w"])) == (1, 9.0)


def test_a_round_that_is_given_up_begins_again_from_the_present_weights():
    hub = hub_of(plain(1.0), workers=2, params=scalar(10.0))
    push(hub, 0, 1.0, next_s=9.0)
    back, again = hub.give_up(1, 5.0)
    assert isinstance(back, AbandonedRound)
    assert (back.dispatch.work, again.work, again.version) == (again.work, back.dispatch.work, 1)
    assert float(hub.task(again).params["w"]) == 9.0


RULES = [
    SGD(lr=0.1),
    Momentum(lr=0.01),
    Nesterov(lr=0.01),
    Adam(lr=0.01),
    DelayedNesterov(lr=0.1, period=3, activation=0.1),
    Buffered(rule=Nesterov(lr=0.1), size=3),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_weights_that_a_worker_is_out_with_never_change_and_never_vanish(rule):
    """The hub reuses buffers of weights that no worker holds. One worker is slow, so that it holds very old ones."""
    params = Tree.of({"w": torch.randn(50, generator=torch.Generator().manual_seed(0))})
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=rule, grace_s=0.5), workers=4, params=params.copy())
    held = dict.fromkeys(range(4), params.digest())
    for number in range(200):
        worker = 3 if number % 50 == 49 else number % 3
        delta = (params * (0.01 * (number % 7 - 3))).donate()
        for outcome in push(hub, worker, delta, now_s=0.3 * number):
            if isinstance(outcome, Dispatch):
                held[outcome.worker] = hub.task(outcome).params.digest()
        for other, here in hub.scheduler.workers.items():
            if here.dispatch is not None:
                assert hub.task(here.dispatch).params.digest() == held[other]


def test_a_delta_that_was_not_given_can_still_be_read():
    hub, delta = hub_of(plain(1.0)), scalar(0.5)
    push(hub, 0, delta)
    assert float(delta["w"]) == 0.5


@dataclass(frozen=True)
class Readable:
    """An algorithm whose hub steps in the readable form."""

    of: AsyncLocalSGD

    def __getattr__(self, name):
        return getattr(self.of, name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_hub_of_fused_steps_is_a_hub_of_readable_ones(rule):
    params = Tree.of({"w": torch.randn(50, generator=torch.Generator().manual_seed(0))})
    algorithm = AsyncLocalSGD(inner_steps=1, outer=rule, correction=Polynomial(), weight=0.5)
    fused, readable = (hub_of(kind, params=params.copy()) for kind in (algorithm, Readable(algorithm)))
    for number in range(100):
        for hub in (fused, readable):
            push(hub, (number * number) % 4, params * (0.01 * (number % 7 - 3)), float(number))
    assert torch.allclose(fused.params.flat, readable.params.flat, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- what it refuses


def account(hub):
    """Weights, momenta and counts: all that a refusal must leave as it is."""
    counts = [hub.version, hub.scheduler.local_updates, hub.scheduler.windows, hub.scheduler.deadline_s]
    outer = hub.state.outer
    return hub.params.digest(), outer.velocity.digest(), outer.total.digest(), counts, hub.scheduler.shards.to_parts()


def begun():
    """A hub in mid-run: worker 2 has left, and worker 1 was dispatched last."""
    hub = hub_of(AsyncLocalSGD(inner_steps=3), shards=1)
    hub.leave(2, 0.5)
    push(hub, 0, 0.5, 1.0), push(hub, 3, 0.25, 2.0), push(hub, 1, 0.125, 3.0)
    return hub


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Tree.of({"w": torch.zeros(2, dtype=torch.float64)}), r"its delta is Tree\(.*2 x float64.*the hub's weights are Tree"),
        (Tree.of({"v": torch.zeros(1, dtype=torch.float64)}), r"its delta is Tree"),
        (Tree.of({"w": torch.zeros(1)}), r"its delta is Tree\(.*float32"),
        (scalar(math.nan), r"not finite \(norm nan\)"),
        (scalar(math.inf), r"not finite \(norm inf\)"),
        (scalar(-math.inf), r"not finite \(norm inf\)"),
    ],
)
def test_an_unusable_update_changes_nothing_and_its_worker_is_dispatched_again(delta, reason):
    hub = begun()
    before, round = account(hub), hub.scheduler.workers[1].dispatch.round
    refusal, back, again = push(hub, 1, delta, 5.0)
    assert (refusal.worker, refusal.round, refusal.known) == (1, round, True)
    assert re.search(reason, refusal.reason)
    assert back.dispatch.round == round
    assert (again.worker, again.work, again.time_s) == (1, back.dispatch.work, 5.0)
    assert hub.task(again).params.equal(hub.params)
    assert account(hub) == before
    assert isinstance(push(hub, 1, 0.5, 6.0)[0], Applied)


@pytest.mark.parametrize(
    ("worker", "round", "reason"),
    [
        (9, 0, r"worker 9 is not one of the 3 present workers"),
        (2, 2, r"worker 2 is not one of the 3 present workers"),  # it left
        (0, 0, r"round 0 is not open: worker 0 is in round 4. It was delivered twice, or abandoned"),
        (0, 77, r"round 77 is not open"),
        (3, 0, r"round 0 is not open: worker 3 is in round 5"),  # another worker's
    ],
)
def test_an_update_from_an_unknown_worker_or_of_another_round_changes_nothing(worker, round, reason):
    hub = begun()
    before, parts = account(hub), hub.scheduler.to_parts()
    [refusal] = hub.push(Push(worker, round, scalar(1.0)), 5.0, None)
    assert isinstance(refusal, Refusal)
    assert not refusal.known
    assert re.search(reason, refusal.reason)
    assert (account(hub), hub.scheduler.to_parts()) == (before, parts)


def test_a_second_delivery_while_the_worker_waits_is_refused():
    hub = hub_of(AsyncLocalSGD(inner_steps=3, grace_s=9.0), workers=2)
    first = Push(0, 0, scalar(0.5))
    hub.push(first, 1.0, 5.0)
    before, parts = account(hub), hub.scheduler.to_parts()
    [refusal] = hub.push(first, 1.5, 5.0)
    assert refusal.reason.startswith("round 0 is not open: worker 0 waits in a window")
    assert (account(hub), hub.scheduler.to_parts()) == (before, parts)


def test_a_late_update_of_an_abandoned_round_is_refused():
    hub = hub_of(AsyncLocalSGD(inner_steps=3), workers=1)
    hub.give_up(0, 4.0)
    before = account(hub)
    [refusal] = hub.push(Push(0, 0, scalar(1.0)), 5.0, None)
    assert not refusal.known
    assert account(hub) == before


def test_an_update_of_a_life_before_is_refused():
    hub = hub_of(AsyncLocalSGD(inner_steps=3), workers=2)
    hub.leave(1, 1.0), hub.join_all({1: None}, 2.0)
    before = account(hub)
    [refusal] = hub.push(Push(1, 1, scalar(1.0)), 3.0, None)
    assert not refusal.known
    assert account(hub) == before


def test_a_waiting_worker_keeps_waiting_when_the_update_of_another_is_refused():
    hub = hub_of(AsyncLocalSGD(inner_steps=3, grace_s=9.0), workers=3)
    push(hub, 0, 0.5, 1.0, next_s=2.0)
    before = account(hub)
    assert [type(o) for o in push(hub, 1, math.nan, 2.0, next_s=3.0)] == [Refusal, AbandonedRound, Dispatch]
    assert account(hub) == before
    push(hub, 2, 0.5, 3.0, next_s=4.0)
    assert push(hub, 1, 0.5, 4.0, next_s=math.inf)[1].workers == (0, 2, 1)


def test_an_unknown_worker_cannot_leave_and_a_worker_cannot_join_twice():
    hub = begun()
    before, parts = account(hub), hub.scheduler.to_parts()
    with pytest.raises(ConfigError, match="it is not one of the"):
        hub.leave(9, 5.0)
    with pytest.raises(ConfigError, match="it has joined already"):
        hub.join_all({0: None}, 5.0)
    assert (account(hub), hub.scheduler.to_parts()) == (before, parts)
    assert isinstance(push(hub, 0, 0.5, 6.0)[0], Applied)


def test_an_update_after_the_end_changes_nothing_and_no_worker_is_dispatched():
    hub = hub_of(AsyncLocalSGD(inner_steps=3), workers=2, updates=3)
    push(hub, 0, 0.5, 1.0)
    assert hub.done
    before = account(hub)
    for value in (math.nan, 0.25):
        [refusal] = push(hub, 1, value, 2.0)
        assert (refusal.reason, refusal.known) == ("the run has reached its local updates", False)
    assert account(hub) == before


# ------------------------------------------------------------------------------------------------- buffers that others hold


@dataclass(frozen=True)
class MeanOfLastTwo:
    """A rule that keeps a gradient. It is pure, and has no twin."""

    def init(self, params):
        return (params.zeros(),)

    def update(self, params, gradient, state):
        return params - 0.5 * gradient - 0.5 * state[0], (gradient,)


@dataclass(frozen=True)
class Anchored:
    """A rule that keeps the weights it began with, and reads its gradient twice."""

    def init(self, params):
        return (params,)

    def update(self, params, gradient, state):
        return 0.5 * params + 0.5 * state[0] - 0.5 * gradient - 0.5 * gradient, state


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("rule", [MeanOfLastTwo(), Anchored()], ids=lambda rule: type(rule).__name__)
def test_a_rule_may_keep_what_it_was_given(rule, weight):
    """Through the hub, whose buffers circulate, it does what it does by hand."""
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=rule, weight=weight))
    params, state = scalar(1.0), rule.init(scalar(1.0))
    for number, value in enumerate((0.1, -0.2, 0.3, 0.05, 0.7, -0.4)):
        push(hub, number % 4, scalar(value).donate(), now_s=float(number))
        params, state = rule.update(params, weight * scalar(value), state)
        assert hub.params["w"].item() == pytest.approx(params["w"].item(), abs=1e-12)


def test_a_second_delivery_of_a_donated_delta_is_refused():
    hub = hub_of(AsyncLocalSGD(inner_steps=2))
    given = Push(0, 0, scalar(0.5).donate())
    assert isinstance(hub.push(given, 1.0, None)[0], Applied)
    before = account(hub)
    [refusal] = hub.push(given, 2.0, None)
    assert "delivered twice" in refusal.reason
    [refusal] = hub.push(given._replace(worker=9), 3.0, None)
    assert "worker 9 is not one of" in refusal.reason
    assert account(hub) == before


def test_an_algorithm_without_a_twin_is_driven_by_its_step():
    @dataclass(frozen=True)
    class Plain:
        inner: AsyncLocalSGD

        @property
        def plan(self):
            return self.inner.plan

        def init(self, params):
            return self.inner.init(params)

        async def round(self, replica, hub):
            await self.inner.round(replica, hub)

        def step(self, state, arrival):
            return self.inner.step(state, arrival)

    inner = AsyncLocalSGD(inner_steps=1, outer=DelayedNesterov(period=4), weight=0.5)
    one, two = hub_of(inner), hub_of(Plain(inner))
    values = [float(value) for value in GOLDEN]
    assert after_each(one, values) == pytest.approx(after_each(two, values), abs=1e-12)


def test_an_update_that_is_only_noted_moves_nothing():
    hub = hub_of(AsyncLocalSGD(inner_steps=1, outer=Buffered(rule=SGD(lr=1.0), size=3)))
    applied = [push(hub, worker % 4, 0.5, float(worker))[0] for worker in range(6)]
    assert [(one.counted, one.moved) for one in applied] == [(True, False), (True, False), (True, True)] * 2


# --------------------------------------------------------------------------------------------------------------- saving


def test_the_hub_survives_a_file_and_continues_in_the_same_way():
    algorithm = AsyncLocalSGD(inner_steps=3, grace_s=2.0)
    hub = hub_of(algorithm)
    push(hub, 0, 0.5, 1.0, next_s=4.0), push(hub, 3, 0.25, 4.0, next_s=5.0)
    parts = hub.to_parts()
    assert len(parts["versions"]) == 2  # 1 and 2 have the first weights, 0 the second; 3 waits
    versions = {name: tree.copy() for name, tree in parts["versions"].items()}
    outer = parts["state"].outer
    state = type(parts["state"])(hub.params.copy(), outer._replace(velocity=outer.velocity.copy(), total=outer.total.copy()))
    again = hub_of(algorithm, workers=0)
    again.from_parts(state, versions, {}, json.loads(json.dumps(parts["plain"])))
    for now_s, worker in ((5.0, 1), (7.0, 0), (8.0, 2), (9.0, 3), (9.5, 1)):
        assert push(again, worker, 0.1 * now_s, now_s) == push(hub, worker, 0.1 * now_s, now_s)
        assert again.params.same_bits(hub.params)
    assert again.scheduler.to_parts() == hub.scheduler.to_parts()


def test_pinned_weights_can_be_read_after_many_updates_and_are_reused_when_unpinned():
    hub = hub_of(plain(1.0), workers=2)
    first = hub.params
    held = hub.pin_weights()
    for now_s in (1.0, 2.0):
        for worker in (0, 1):
            push(hub, worker, 0.25, now_s=now_s)
    assert held == [first]
    assert first["w"].tolist() == [1.0]
    assert hub.params["w"].tolist() == [0.0]
    hub.unpin_weights(held)
    assert first.deleted
    hub.unpin_weights(hub.pin_weights())
    assert not hub.params.deleted, "the hub's own are in use"
