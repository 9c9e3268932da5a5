"""Conformance checks for rules and algorithms. tests/test_battery.py has one row for each rule and algorithm.

>>> from atoll.algorithms.diloco import DiLoCo
>>> from atoll.optim.sgd import Nesterov
>>> check_rule(Nesterov(lr=0.1))
>>> check_algorithm(DiLoCo(inner_steps=2))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from atoll.core import chunked_elementwise
from atoll.core.events import Exchanged, IslandJoined
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Owner, Rule, fields_owned
from atoll.core.pytree import trees
from atoll.engines.simulator.engine import SimEngine
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Lost
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Recorder, Regression, simulate, simulator

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
    before = [tree.digest() for tree in trees((params, gradient, state))]
    first = rule.update(params, gradient, state)
    second = rule.update(params, gradient, state)
    assert before == [tree.digest() for tree in trees((params, gradient, state))], "update changed its arguments"
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


def check_same_seed_same_log(algorithm: Algorithm[Any]) -> None:
    """Two runs with the same seed write the same bytes, however their threads were scheduled."""
    one, two = (_recorded(algorithm, _faulty_cluster()) for _ in range(2))
    assert one == two


def check_resumes_to_the_bit(algorithm: Algorithm[Any]) -> None:
    """A run restored from any checkpoint has the weights and the log of the run that was not interrupted."""
    steps, cluster = _steps(algorithm, 6), _faulty_cluster()
    saved: list[tuple[int, dict[str, Any]]] = []
    engine, sink = simulator(
        algorithm,
        steps=steps,
        cluster=cluster,
        inner=AdamW(lr=0.01),
        workload=Regression(hidden=4, dropout=0.2),
        save=lambda e: saved.append((len(sink.lines()), copy.deepcopy(detached(e.parts())))),
    )
    engine.run()
    assert isinstance(engine, SimEngine)
    assert len(saved) > 2, "too few checkpoints to resume from"
    for position, parts in saved[:-1]:
        again, later = simulator(
            algorithm, steps=steps, cluster=cluster, inner=AdamW(lr=0.01), workload=Regression(hidden=4, dropout=0.2)
        )
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))  # type: ignore[misc]
        again.run()
        assert again.params.equal(engine.params), f"resuming at line {position} of the log gave other weights"
        assert later.lines() == sink.lines()[position:], f"resuming at line {position} of the log gave another log"


def check_one_island_sends_nothing(algorithm: Algorithm[Any]) -> None:
    done = simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=1))
    assert done.finished.sent_bytes_per_island == done.finished.control_bytes_per_island == 0
    assert done.finished.utilisation == 1.0


def check_bytes_do_not_depend_on_values(algorithm: Algorithm[Any]) -> None:
    """Runs from different weights send the same bytes at every exchange, and every exchange sends some."""
    params = Tree.of(Regression().module())
    runs = [simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=3), params=p) for p in (params, 0.5 * params)]
    sent, other = ([(event.round, event.what, event.sent_bytes) for event in done.of(Exchanged)] for done in runs)
    assert sent == other
    assert all(sum(sum(bytes_) for round, _, bytes_ in sent if round == number) > 0 for number in {round for round, *_ in sent})


def check_survives_losses(algorithm: Algorithm[Any]) -> None:
    """The run ends although messages are lost and islands leave and join."""
    done = simulate(algorithm, steps=_steps(algorithm, 6), cluster=_faulty_cluster())
    assert done.finished.steps == _steps(algorithm, 6)
    assert any(event.donor is not None for event in done.of(IslandJoined))


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


def _recorded(algorithm: Algorithm[Any], cluster: Cluster) -> list[str]:
    engine, sink = simulator(algorithm, steps=_steps(algorithm, 5), cluster=cluster, sink=Recorder())
    engine.run()
    return sink.lines()


def detached(value: Any) -> Any:
    """A copy of checkpoint parts whose buffers the engine cannot reuse, as if read from a file."""
    if isinstance(value, Tree):
        return Tree(value.layout, value.flat.clone())
    if isinstance(value, dict):
        return {name: detached(item) for name, item in value.items()}
    if isinstance(value, tuple):
        items: Iterator[Any] = (detached(item) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
