"""Conformance checks for asynchronous algorithms. tests/test_battery.py has one row for each algorithm.

>>> from atoll.algorithms.async_local_sgd import AsyncLocalSGD
>>> check_async_algorithm(AsyncLocalSGD(inner_steps=2))
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from atoll.core.events import Arrived, Dispatched, Evaluated, Returned, RoundFinished, WindowClosed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, AsyncAlgorithm
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.optim.adam import AdamW
from atoll.optim.in_place import hub_algorithm
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Lost, Outage
from atoll.testing.conformance import detached, digests
from atoll.testing.fakes import FakeReplica, ScriptedHub, drive
from atoll.testing.simulated_runs import Recorder, Regression, SimulatedRun, simulate, simulator


def check_async_algorithm(algorithm: AsyncAlgorithm[Any]) -> None:
    """Run all of ASYNC_CHECKS."""
    for check in ASYNC_CHECKS:
        check(algorithm)


def check_worker_pushes_old_minus_new(algorithm: AsyncAlgorithm[Any]) -> None:
    """A round pulls once and pushes once: the old weights minus the new."""
    hub = ScriptedHub(Tree.of({"w": torch.ones(3)}), steps=4)
    drive(algorithm.round(FakeReplica(moves_by=-0.25), hub))
    assert [delta["w"].tolist() for delta in hub.pushed] == [[1.0, 1.0, 1.0]]


def check_step_is_pure(algorithm: AsyncAlgorithm[Any]) -> None:
    """The same State and arrival give the same next State, and a step changes neither."""
    state, arrival = _initial_state(algorithm)
    before = digests((tuple(vars(state).values()), tuple(arrival)))
    one, two = (digests(tuple(vars(algorithm.step(state, arrival)).values())) for _ in range(2))
    assert one == two, "the same arrival gave different States"
    assert digests((tuple(vars(state).values()), tuple(arrival))) == before, "a step changed its arguments"


def check_fused_step_equals_step(algorithm: AsyncAlgorithm[Any]) -> None:
    """Over several arrivals. The fused step does not change weights that a worker was dispatched with."""
    readable, arrival = _initial_state(algorithm)
    fused, _ = _initial_state(algorithm)
    in_place = hub_algorithm(algorithm, fused)
    for _ in range(9):
        sent, digest = fused.params, fused.params.digest()
        readable, fused = algorithm.step(readable, arrival), in_place.step(fused, arrival)
        assert sent.digest() == digest, "the fused step changed weights that a worker may hold"
        assert torch.allclose(readable.params.flat, fused.params.flat, rtol=1e-6, atol=1e-7), "the fused step gave other weights"


def check_async_learns(algorithm: AsyncAlgorithm[Any]) -> None:
    """Workers of unequal speed reduce the loss on the data of all shards."""
    done = simulate(
        algorithm, steps=20 * algorithm.plan.steps, inner=SGD(lr=0.02), cluster=_unequal_cluster(), evaluate_every=1_000_000
    )
    first, last = done.of(Evaluated)
    before, after = first.metrics["loss"], last.metrics["loss"]
    assert after < 0.5 * before, f"the loss went from {before:.4f} to {after:.4f}"


def check_stops_at_the_hub_step_that_reaches_the_updates(algorithm: AsyncAlgorithm[Any]) -> None:
    done = simulate(algorithm, steps=5 * algorithm.plan.steps, cluster=_unequal_cluster())
    *_, before, last = [event.local_updates for event in done.of(RoundFinished)]
    assert before < 4 * 5 * algorithm.plan.steps <= last == done.finished.local_updates


def check_same_seed_same_async_log(algorithm: AsyncAlgorithm[Any]) -> None:
    """Two runs with the same seed write the same bytes, however their threads were scheduled."""
    one, two = (_run_with_faults(algorithm)[1].lines() for _ in range(2))
    assert one == two


def check_resumes_to_the_bit_at_any_hub_step(algorithm: AsyncAlgorithm[Any]) -> None:
    """A run restored from any checkpoint has the weights and the log of the run that was not interrupted.

    Checkpoints have workers that train, that wait in an open window, that are dead, and that are about to join again.
    """
    saved: list[tuple[int, dict[str, Any]]] = []
    engine, sink = _run_with_faults(algorithm, saved)
    assert len(saved) == engine.round
    for position, parts in [*saved[:-1:16], saved[-1]]:  # at the last one only the accounts remain to be closed
        again, later = _engine_with_faults(algorithm, None)
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))  # type: ignore[misc]
        again.run()
        assert later.lines() == sink.lines()[position:], f"resuming at line {position} of the log gave another log"
        assert again.params.equal(engine.params), f"resuming at line {position} of the log gave other weights"


def check_nothing_is_counted_twice_or_lost(algorithm: AsyncAlgorithm[Any]) -> None:
    """The steps counted for a shard are those that arrived and those that are still dispatched; failed rounds were put back."""
    engine, sink = _run_with_faults(algorithm)
    done = SimulatedRun(engine.params, engine, sink.events, None)  # type: ignore[arg-type]
    arrived, back = done.of(Arrived), done.of(Returned)
    assert back, "no round failed in this cluster: it tests nothing"
    assert sum(event.steps for event in arrived) == engine.accounting.totals.local_updates
    out = [worker.dispatch for worker in engine.hub.scheduler.workers.values() if worker.dispatch is not None]
    steps = [0] * len(engine.hub.scheduler.shards)
    for shard, count in [(e.shard, e.steps) for e in arrived] + [(d.work.shard, d.steps) for d in out]:
        steps[shard] += count
    assert engine.hub.scheduler.shards.steps.tolist() == steps
    rounds = [event.round for event in (*arrived, *back)]
    assert len(rounds) == len(set(rounds)), "a round ended twice"
    assert set(rounds) | {d.round for d in out} == {event.round for event in done.of(Dispatched)}


def check_windows_hold_every_arrival_once(algorithm: AsyncAlgorithm[Any]) -> None:
    done = simulate(algorithm, steps=8 * algorithm.plan.steps, cluster=_unequal_cluster())
    closed, arrived = done.of(WindowClosed), done.of(Arrived)
    assert [window.window for window in closed] == list(range(len(closed)))
    listed = [(window.window, island) for window in closed for island in window.islands]
    assert listed == [(event.window, event.island) for event in arrived][: len(listed)]
    assert all(event.time_s - window.opened_s <= algorithm.plan.grace_s for window in closed for event in arrived
               if event.window == window.window)  # fmt: skip


def check_works_with_more_and_fewer_workers_than_shards(algorithm: AsyncAlgorithm[Any]) -> None:
    for islands in (1, 3, 7):
        done = simulate(algorithm, steps=3 * algorithm.plan.steps, cluster=Cluster(islands=islands))
        assert done.finished.local_updates >= 3 * algorithm.plan.steps * islands
        assert {event.shard for event in done.of(Arrived)} <= set(range(4))


ASYNC_CHECKS = (
    check_worker_pushes_old_minus_new,
    check_step_is_pure,
    check_fused_step_equals_step,
    check_async_learns,
    check_stops_at_the_hub_step_that_reaches_the_updates,
    check_same_seed_same_async_log,
    check_resumes_to_the_bit_at_any_hub_step,
    check_nothing_is_counted_twice_or_lost,
    check_windows_hold_every_arrival_once,
    check_works_with_more_and_fewer_workers_than_shards,
)


def _initial_state(algorithm: AsyncAlgorithm[Any]) -> tuple[Any, Arrival]:
    """A State, and an arrival that was dispatched with other weights."""
    generator = torch.Generator().manual_seed(0)
    params, dispatched, delta = (Tree.of({"w": torch.randn(40, 30, generator=generator)}) for _ in range(3))
    return algorithm.init(params), Arrival(delta * 0.1, dispatched, staleness=2, workers=4)


def _unequal_cluster() -> Cluster:
    return Cluster(islands=4, step_time_s="very")


def _engine_with_faults(
    algorithm: AsyncAlgorithm[Any], saved: list[tuple[int, dict[str, Any]]] | None
) -> tuple[AsyncSimEngine, Recorder]:
    """Unequal workers with random step times: one joins late, one dies and joins again, and messages are lost."""
    steps, sink = algorithm.plan.steps, Recorder()
    cluster = Cluster(
        islands=4,
        step_time_s="very",
        step_time_jitter=0.2,
        drop_probability=0.1,
        lost=(Lost(island=1, round=1),),
        outages=(
            Outage(island=2, start_s=0, stop_s=1.3 * steps),
            Outage(island=0, start_s=2.1 * steps, stop_s=3.7 * steps),
            Outage(island=1, start_s=5.0 * steps),
        ),
    )
    engine, _ = simulator(
        algorithm,
        steps=6 * steps,
        cluster=cluster,
        inner=AdamW(lr=0.01),
        workload=Regression(hidden=4, dropout=0.2),
        sink=sink,
        save=None
        if saved is None
        else lambda e: saved.append((sum(event.recorded for event in sink.events), copy.deepcopy(detached(e.parts())))),
    )
    assert isinstance(engine, AsyncSimEngine)
    return engine, sink


def _run_with_faults(
    algorithm: AsyncAlgorithm[Any], saved: list[tuple[int, dict[str, Any]]] | None = None
) -> tuple[AsyncSimEngine, Recorder]:
    engine, sink = _engine_with_faults(algorithm, saved)
    engine.run()
    return engine, sink
