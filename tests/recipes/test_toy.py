"""The authors' toy: its clock by hand, and its sanity check to the bit."""

from dataclasses import replace

import pytest

import atoll
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.events import Arrived, Dispatched, Evaluated
from atoll.data.gaussians import Gaussians
from atoll.models.mlp import MLP
from atoll.optim.delayed_nesterov import Buffered
from atoll.optim.sgd import SGD, Momentum
from atoll.recipes import toy_async, toy_sync
from atoll.telemetry.event_log import read_events

SECONDS_PER_ROUND = (11.6, 15.0, 30.2, 66.6)  # 20 steps of 0.58, 0.75, 1.51 and 3.33 s


def quick(run, **train):
    """The same run with a model and data that train in no time; the clock does not look at them."""
    small = replace(run, model=MLP(hidden=8), data=replace(Gaussians.small(), dimensions=16))
    return replace(small, train=replace(small.train, **train))


def events_of(run, folder, *kinds):
    atoll.run(run, out=folder)
    return [event for event in read_events(folder / "events.jsonl") if isinstance(event, kinds)]


def authors_loop(seconds, grace_s, updates, steps):
    """The notebook's asynchronous loop: (finish, worker) of every synchronisation, with nothing but clocks in it."""
    finish, synced, now, opened, idle = dict(enumerate(seconds)), [], 0.0, None, []
    while len(synced) * steps < updates:
        worker = min(finish, key=finish.get) if finish else None
        if worker is None or (opened is not None and finish[worker] - opened > grace_s):
            finish |= {other: now + seconds[other] for other in idle}
            opened, idle = None, []
            continue
        now = max(now, finish.pop(worker))
        opened = now if opened is None else opened
        idle.append(worker)
        synced.append((now, worker))
    return synced


def test_first_arrivals_are_when_the_schedule_says(tmp_path):
    events = events_of(quick(toy_async(), steps=70), tmp_path / "run", Arrived, Dispatched)
    arrivals = [(event.virtual_time_s, event.island) for event in events if isinstance(event, Arrived)]
    by_hand = [
        (
            11.6,
            0,
        ),  # worker 0 needs 11.6 s for its 20 steps; no worker arrives within half a second, so the hub dispatches it at once
        (15.0, 1),
        (23.2, 0),  # 2 x 11.6
        (30.0, 1),  # 2 x 15.0: worker 1 waits, since
        (30.2, 2),  # worker 2 arrives within the half second; the hub dispatches both at 30.2
        (34.8, 0),  # 3 x 11.6
        (45.2, 1),  # 30.2 + 15.0
        (46.4, 0),  # 4 x 11.6; it lies 1.2 s after worker 1, outside its window
        (58.0, 0),  # 5 x 11.6
        (60.2, 1),  # 45.2 + 15.0: waits for
        (60.4, 2),  # 30.2 + 30.2
        (66.6, 3),  # worker 3's first round
        (69.6, 0),  # 6 x 11.6
        (75.4, 1),  # 60.4 + 15.0
    ]
    assert [worker for _, worker in arrivals] == [worker for _, worker in by_hand]
    assert [time_s for time_s, _ in arrivals] == pytest.approx([time_s for time_s, _ in by_hand], abs=1e-9)
    together = [event.island for event in events if isinstance(event, Dispatched) and abs(event.virtual_time_s - 30.2) < 1e-9]
    assert together == [1, 2]


def test_evaluations_happen_every_800_local_updates_at_the_authors_times(tmp_path):
    run = quick(toy_async(), steps=800)
    evaluations = events_of(run, tmp_path / "run", Evaluated)
    assert [event.local_updates for event in evaluations] == list(range(0, 3201, 800))
    synced = authors_loop(SECONDS_PER_ROUND, run.algorithm.grace_s, updates=3200, steps=20)
    expected = [0.0, *(synced[updates // 20 - 1][0] for updates in range(800, 3201, 800))]
    assert [event.virtual_time_s for event in evaluations] == pytest.approx(expected, abs=0.005)
    assert expected[1] == pytest.approx(209.0)  # 40 rounds: 18 of worker 0, 13 of worker 1, 6 of worker 2 and 3 of worker 3
    assert all(event.accuracy is not None and event.loss == event.metrics["loss"] for event in evaluations)
    assert evaluations[-1].loss < evaluations[0].loss


def test_sanity_check_of_the_authors_sync_and_async_agree_to_the_bit(tmp_path):
    """Outer SGD of 0.5, five phases, a grace of 1000 s and a buffer of four: the hub waits for all workers, and so is DiLoCo."""
    sync = quick(toy_sync(), steps=100)
    sync = replace(sync, algorithm=replace(sync.algorithm, outer=SGD(lr=0.5)), keep=replace(sync.keep, evaluate_every=20))
    waiting = AsyncLocalSGD(inner_steps=20, outer=Buffered(rule=SGD(lr=0.5), size=4), grace_s=1000.0, shards="visits", ties="last")
    one, two = atoll.run(sync, out=tmp_path / "sync"), atoll.run(replace(sync, algorithm=waiting), out=tmp_path / "async")
    assert one.params.same_bits(two.params)
    ours, theirs = (
        [(e.local_updates, e.loss, e.accuracy) for e in read_events(tmp_path / name / "events.jsonl") if isinstance(e, Evaluated)]
        for name in ("async", "sync")
    )
    assert ours == theirs
    assert [updates for updates, _, _ in ours] == [0, 80, 160, 240, 320, 400]
    assert one.summary.virtual_time_s == pytest.approx(5 * 66.6)
    assert two.summary.virtual_time_s == pytest.approx(5 * 66.6)


def test_recipe_has_the_authors_settings():
    run = toy_async()
    assert run.algorithm == AsyncLocalSGD(
        inner_steps=20, outer=Momentum(lr=0.07, momentum=0.9), weight="sqrt(k)/k", grace_s=0.5, shards="visits", ties="chance"
    )
    assert run.train.steps * run.cluster.islands == 100 * 20 * 4
    assert run.train.fresh_optimizer
    assert run.train.peak_first
    assert run.model.num_params(512, 4) == 33_605_004
    assert run.resolved.optimizer.lr.steps == 100 * 20
