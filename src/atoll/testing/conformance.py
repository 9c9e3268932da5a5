"""Conformance checks for rules, algorithms and asynchronous algorithms. tests/test_battery.py has one row for each of them.

>>> from atoll.algorithms.async_local_sgd import AsyncLocalSGD
>>> from atoll.algorithms.diloco import DiLoCo
>>> from atoll.optim.sgd import Nesterov
>>> check_rule(Nesterov(lr=0.1))
>>> check_algorithm(DiLoCo(inner_steps=2))
>>> check_async_algorithm(AsyncLocalSGD(inner_steps=2))
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from atoll.core import chunked_elementwise
from atoll.core.events import Arrived, Dispatched, Evaluated, Exchanged, IslandJoined, Returned, RoundFinished, WindowClosed
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import trees
from atoll.core.protocols import Algorithm, Arrival, AsyncAlgorithm, Owner, Rule, fields_owned
from atoll.engines.shared_and_sharded_state import map_trees
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.engine import SimEngine
from atoll.optim.adam import AdamW
from atoll.optim.in_place import HubStep
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Lost, Outage
from atoll.testing.fakes import FakeReplica, ScriptedHub, ScriptedPeers, drive, one_round
from atoll.testing.simulated_runs import Recorder, Regression, run_engine, simulate, simulator

SavedParts = list[tuple[int, dict[str, Any]]]
"""Checkpoints: the number of lines that the log had, and the engine's parts."""

# --------------------------------------------------------------------------------------------------------------- rules


def check_rule(rule: Rule) -> None:
    """A rule is pure, keeps layouts, descends, and gives the same bits in chunks and in shards."""
    generator = torch.Generator().manual_seed(0)
    params = Tree.of({"w": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator)})
    gradient = Tree.of({"w": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator)})
    _check_is_pure(rule, params, gradient)
    _check_descends(rule, params)
    _check_chunks_and_shards(rule)


def _check_is_pure(rule: Rule, params: Tree, gradient: Tree) -> None:
    state = rule.init(params)
    before = digests((params, gradient, state))
    first, second = (rule.update(params, gradient, state) for _ in range(2))
    assert before == digests((params, gradient, state)), "update changed its arguments"
    assert digests(first) == digests(second), "the same arguments gave different results"
    assert first[0].layout == params.layout, "the new weights have another layout"
    assert not first[0].equal(params), "a nonzero gradient changed no weight"


def _check_descends(rule: Rule, start: Tree) -> None:
    """On |w|²/2 the gradient is w itself, and a rule makes |w| smaller."""
    params, state = start, rule.init(start)
    for _ in range(30):
        params, state = rule.update(params, params, state)
    assert params.norm() < start.norm(), f"30 steps on a parabola changed |w| from {start.norm():.3f} to {params.norm():.3f}"


def _check_chunks_and_shards(rule: Rule) -> None:
    """On a tree larger than one chunk, and on two shards of it, as a sharded optimizer holds it."""
    numel = chunked_elementwise.CHUNK + 1000
    generator = torch.Generator().manual_seed(1)
    params = Tree.of({"w": torch.randn(numel // 100, 100, generator=generator), "b": torch.randn(333, generator=generator)})
    gradient = params * 0.5 + 0.1
    whole, _ = rule.update(params, gradient, rule.init(params))
    shards = [rule.update(params.shard(rank, 2), gradient.shard(rank, 2), rule.init(params.shard(rank, 2)))[0] for rank in range(2)]
    assert Tree.join(shards).equal(whole), "updating two shards gave other bits than updating the whole"


def digests(value: Any) -> list[str]:
    return [tree.digest() for tree in trees(value)]


# ---------------------------------------------------------------------------------------------------------- algorithms


def check_algorithm(algorithm: Algorithm[Any]) -> None:
    """Run all of ALGORITHM_CHECKS."""
    for check in ALGORITHM_CHECKS:
        check(algorithm)


def check_state_is_declared(algorithm: Algorithm[Any]) -> None:
    """Every field has an owner, and the global weights are shared or sharded."""
    params = Tree.of(Regression().module())
    state = algorithm.init(params, ScriptedPeers())
    held = {**fields_owned(state, Owner.SHARED), **fields_owned(state, Owner.SHARDED)}
    assert "params" in held, f"{type(state).__name__} needs a field `params`, shared or sharded"
    assert held["params"].equal(params), "training does not start at the given weights"


def check_given_state_is_unchanged(algorithm: Algorithm[Any]) -> None:
    """A round does not change its State, so an engine can repeat it after an exchange has failed."""
    params = Tree.of(Regression().module())
    digest = params.digest()
    simulate(algorithm, steps=2 * algorithm.steps_per_round, params=params)
    assert params.digest() == digest, "the engine or the algorithm changed the caller's weights"
    for heard in (True, False):
        peers = ScriptedPeers(params * 0.1, heard=heard)
        state = algorithm.init(params, peers)
        before = digests(tuple(vars(state).values()))
        one_round(algorithm, FakeReplica(moves_by=-0.1), peers, params=params, state=state)
        assert digests(tuple(vars(state).values())) == before, "a round changed the State it was given"


def check_learns(algorithm: Algorithm[Any]) -> None:
    """Islands reduce the loss on the data of all shards."""
    done = simulate(algorithm, steps=_steps(algorithm, 50), inner=SGD(lr=0.02), evaluate_every=50)
    before, after = done.events[0].metrics["loss"], done.finished.val_loss  # type: ignore[attr-defined]
    assert after < 0.5 * before, f"the loss went from {before:.4f} to {after:.4f}"


def check_same_seed_same_log(algorithm: Algorithm[Any] | AsyncAlgorithm[Any]) -> None:
    """Two runs with the same seed write the same bytes, however their threads were scheduled."""
    one, two = (_run_with_faults(algorithm)[1].lines() for _ in range(2))
    assert one == two


def check_resumes_to_the_bit(algorithm: Algorithm[Any] | AsyncAlgorithm[Any]) -> None:
    """A run restored from any checkpoint has the weights and the log of the run that was not interrupted.

    Checkpoints of an asynchronous run have workers that train, that wait in an open window, that are dead, and that are about to
    join again. At the last one only the accounts remain to be closed.
    """
    saved: SavedParts = []
    engine, sink = _run_with_faults(algorithm, saved)
    assert len(saved) == engine.round > 2, "too few checkpoints to resume from"
    for position, parts in [*saved[:-1:16], saved[-1]] if isinstance(algorithm, AsyncAlgorithm) else saved[:-1]:
        again, later = _run_with_faults(algorithm, restored=parts)
        assert later.lines() == sink.lines()[position:], f"resuming at line {position} of the log gave another log"
        assert again.params.equal(engine.params), f"resuming at line {position} of the log gave other weights"


def check_one_island_sends_nothing(algorithm: Algorithm[Any]) -> None:
    done = simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=1))
    assert done.finished.sent_bytes_per_island == done.finished.control_bytes_per_island == 0
    assert done.finished.utilisation == 1.0


def check_bytes_do_not_depend_on_values(algorithm: Algorithm[Any]) -> None:
    """Runs from different weights send the same bytes at every exchange, and some in every round in which an island contributes."""
    params = Tree.of(Regression().module())
    runs = [simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=3), params=p) for p in (params, 0.5 * params)]
    sent, other = ([(event.round, event.what, event.sent_bytes) for event in done.of(Exchanged)] for done in runs)
    assert sent == other
    contributed = {event.round for event in runs[0].of(Exchanged) if event.weight}
    assert contributed
    assert all(sum(sum(bytes_) for round, _, bytes_ in sent if round == number) > 0 for number in contributed)


def check_survives_losses(algorithm: Algorithm[Any]) -> None:
    """The run ends although messages are lost and islands leave and join, and no exchange ends before it starts."""
    done = simulate(algorithm, steps=_steps(algorithm, 6), cluster=_faulty_cluster())
    steps, free = _steps(algorithm, 6), getattr(algorithm, "batch", "fixed") == "free"
    # A run of free batches ends with the update that reaches its samples.
    assert done.finished.steps >= steps if free else done.finished.steps == steps
    assert any(event.donor is not None for event in done.of(IslandJoined))
    assert all(event.end_s >= event.start_s for event in done.of(Exchanged))


def check_losing_all_messages_changes_nothing(algorithm: Algorithm[Any]) -> None:
    """If no message arrives, the global weights do not change."""
    params = Tree.of(Regression().module())
    done = simulate(algorithm, steps=_steps(algorithm, 3), params=params, cluster=Cluster(islands=2, drop_probability=1.0))
    assert done.params.equal(params)
    assert done.finished.tokens == done.finished.outer_steps == 0


ALGORITHM_CHECKS = (
    check_state_is_declared,
    check_given_state_is_unchanged,
    check_learns,
    check_same_seed_same_log,
    check_resumes_to_the_bit,
    check_one_island_sends_nothing,
    check_bytes_do_not_depend_on_values,
    check_survives_losses,
    check_losing_all_messages_changes_nothing,
)


def _steps(algorithm: Algorithm[Any], rounds: int) -> int:
    return rounds * algorithm.steps_per_round


def _faulty_cluster() -> Cluster:
    """Unequal islands with random step times; messages are lost, and one island leaves and joins again."""
    return Cluster(
        islands=4,
        step_time_s=(0.58, 0.75, 1.51, 3.33),
        step_time_jitter=0.2,
        drop_probability=0.2,
        lost=(Lost(island=1, round=0), Lost(island=1, round=1)),
        away=(Away(island=2, start=2, stop=4),),
    )


def _run_with_faults(
    algorithm: Algorithm[Any] | AsyncAlgorithm[Any], saved: SavedParts | None = None, restored: dict[str, Any] | None = None
) -> tuple[Any, Recorder]:
    """The engine and the log of six rounds with inner AdamW and dropout, restored from these parts if given. `saved` receives the
    checkpoints."""
    sink = Recorder()

    def save(engine: SimEngine | AsyncSimEngine) -> None:
        if saved is not None:
            saved.append((len(sink.lines()), copy.deepcopy(detached(engine.parts()))))

    if isinstance(algorithm, AsyncAlgorithm):
        steps, cluster = algorithm.plan.steps, _faulty_workers(algorithm.plan.steps)
    else:
        steps, cluster = algorithm.steps_per_round, _faulty_cluster()
    workload = Regression(hidden=4, dropout=0.2)
    engine, _ = simulator(
        algorithm, steps=6 * steps, cluster=cluster, inner=AdamW(lr=0.01), workload=workload, sink=sink, save_every=1
    )
    if restored is not None:
        engine.restore(lambda part, like: copy.deepcopy(restored[part]))
    run_engine(engine, save)
    return engine, sink


def detached(value: Any) -> Any:
    """A copy of checkpoint parts whose buffers the engine cannot reuse, as if read from a file."""
    return map_trees(lambda tree: Tree(tree.layout, tree.flat.clone()), value)


# ------------------------------------------------------------------------------------------- asynchronous algorithms


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
    state, arrival = _hub_state(algorithm)
    before = digests((tuple(vars(state).values()), tuple(arrival)))
    one, two = (digests(tuple(vars(algorithm.step(state, arrival)).values())) for _ in range(2))
    assert one == two, "the same arrival gave different States"
    assert digests((tuple(vars(state).values()), tuple(arrival))) == before, "a step changed its arguments"


def check_fused_step_equals_step(algorithm: AsyncAlgorithm[Any]) -> None:
    """Over several arrivals. The fused step does not change weights that a worker was dispatched with."""
    readable, arrival = _hub_state(algorithm)
    fused, _ = _hub_state(algorithm)
    fused_step = HubStep(algorithm, fused)
    for _ in range(9):
        sent, digest = fused.params, fused.params.digest()
        readable, (fused, _) = algorithm.step(readable, arrival), fused_step(fused, arrival)
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


def check_nothing_is_counted_twice_or_lost(algorithm: AsyncAlgorithm[Any]) -> None:
    """The steps counted for a shard are those that arrived and those that are still dispatched; failed rounds were put back."""
    engine, sink = _run_with_faults(algorithm)
    arrived, back = sink.of(Arrived), sink.of(Returned)
    assert back, "no round failed in this cluster: it tests nothing"
    assert sum(event.steps for event in arrived) == engine.accounting.totals.local_updates
    out = [worker.dispatch for worker in engine.hub.scheduler.workers.values() if worker.dispatch is not None]
    steps = [0] * len(engine.hub.scheduler.shards)
    for shard, count in [(e.shard, e.steps) for e in arrived] + [(d.work.shard, d.steps) for d in out]:
        steps[shard] += count
    assert engine.hub.scheduler.shards.steps.tolist() == steps
    rounds = [*(event.round for event in arrived), *(event.round for event in back)]
    assert len(rounds) == len(set(rounds)), "a round ended twice"
    assert set(rounds) | {d.round for d in out} == {event.round for event in sink.of(Dispatched)}


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
    check_same_seed_same_log,
    check_resumes_to_the_bit,
    check_nothing_is_counted_twice_or_lost,
    check_windows_hold_every_arrival_once,
    check_works_with_more_and_fewer_workers_than_shards,
)


def _hub_state(algorithm: AsyncAlgorithm[Any]) -> tuple[Any, Arrival]:
    """A State, and an arrival that was dispatched with other weights."""
    generator = torch.Generator().manual_seed(0)
    params, dispatched, delta = (Tree.of({"w": torch.randn(40, 30, generator=generator)}) for _ in range(3))
    return algorithm.init(params), Arrival(delta * 0.1, dispatched, staleness=2, workers=4)


def _unequal_cluster() -> Cluster:
    return Cluster(islands=4, step_time_s="very")


def _faulty_workers(steps: int) -> Cluster:
    """Unequal workers with random step times: one joins late, one dies and joins again, and messages are lost."""
    return Cluster(
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
