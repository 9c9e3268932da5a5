"""The checks that every rule and every algorithm must pass. A new one is one more row in the battery.

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
    """A rule is pure, keeps layouts, descends, and gives the same bits however it is cut."""
    generator = torch.Generator().manual_seed(0)
    params = Tree.of({"w": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator)})
    gradient = Tree.of({"w": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator)})
    _check_purity(rule, params, gradient)
    _check_descent(rule, params)
    _check_cuts(rule)


def _check_purity(rule: Rule, params: Tree, gradient: Tree) -> None:
    state = rule.init(params)
    before = [tree.digest() for tree in trees((params, gradient, state))]
    first = rule.update(params, gradient, state)
    second = rule.update(params, gradient, state)
    assert before == [tree.digest() for tree in trees((params, gradient, state))], "update changed what it was given"
    assert digests(first) == digests(second), "the same arguments gave different results"
    assert first[0].layout == params.layout, "the new weights are laid out differently"
    assert not first[0].equal(params), "a gradient that is not zero moved nothing"


def _check_descent(rule: Rule, start: Tree) -> None:
    """On |w|²/2 the gradient is w itself: a useful rule makes it smaller."""
    params, state = start, rule.init(start)
    for _ in range(30):
        params, state = rule.update(params, params, state)
    assert params.norm() < start.norm(), f"30 steps on a parabola led from {start.norm():.3f} to {params.norm():.3f}"


def _check_cuts(rule: Rule) -> None:
    """Larger than a chunk, so that it is cut; and in two shards, as a sharded optimizer holds it."""
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
    """An algorithm keeps every promise that engines and users rely on."""
    for check in ALGORITHM_CHECKS:
        check(algorithm)


def check_state_is_declared(algorithm: Algorithm[Any]) -> None:
    """Every field says whose it is, and the global weights are shared or sharded."""
    params = Tree.of(Regression().module())
    state = algorithm.init(params, ScriptedPeers())
    held = {**fields_owned(state, Owner.SHARED), **fields_owned(state, Owner.SHARDED)}
    assert "params" in held, f"{type(state).__name__} needs a field `params`, shared or sharded"
    assert held["params"].equal(params), "training does not begin at the given weights"


def check_given_state_is_unchanged(algorithm: Algorithm[Any]) -> None:
    """A round is a function of its State, so it can be repeated when an exchange fails."""
    params = Tree.of(Regression().module())
    digest = params.digest()
    simulate(algorithm, steps=2 * algorithm.steps_per_round, params=params)
    assert params.digest() == digest, "the engine or the algorithm changed the weights that the caller holds"
    for heard in (True, False):
        peers = ScriptedPeers(params * 0.1, heard=heard)
        state = algorithm.init(params, peers)
        before = digests(tuple(vars(state).values()))
        one_round(algorithm, FakeReplica(moves_by=-0.1), peers, params=params, state=state)
        assert digests(tuple(vars(state).values())) == before, "a round changed the State it was given"


def check_learns(algorithm: Algorithm[Any]) -> None:
    """Islands together make the loss on everybody's data smaller."""
    done = simulate(algorithm, steps=_steps(algorithm, 50), inner=SGD(lr=0.02), evaluate_every=50)
    before, after = done.events[0].metrics["loss"], done.finished.val_loss  # type: ignore[attr-defined]
    assert after < 0.5 * before, f"the loss went from {before:.4f} to {after:.4f}"


def check_same_seed_same_log(algorithm: Algorithm[Any]) -> None:
    """To the last digit, whatever the threads did."""
    one, two = (_recorded(algorithm, _eventful(algorithm)) for _ in range(2))
    assert one == two


def check_resumes_to_the_bit(algorithm: Algorithm[Any]) -> None:
    """Saving between any two rounds and going on gives the weights and the log of the run that did not stop."""
    steps, cluster = _steps(algorithm, 6), _eventful(algorithm)
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
    assert len(saved) > 2, "too few checkpoints to go on from"
    for position, parts in saved[:-1]:
        again, later = simulator(
            algorithm, steps=steps, cluster=cluster, inner=AdamW(lr=0.01), workload=Regression(hidden=4, dropout=0.2)
        )
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))  # type: ignore[misc]
        again.run()
        assert again.params.equal(engine.params), f"resuming at line {position} of the log led to other weights"
        assert later.lines() == sink.lines()[position:], f"resuming at line {position} of the log led to another log"


def check_one_island_is_alone(algorithm: Algorithm[Any]) -> None:
    """One island trains and sends nothing."""
    done = simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=1))
    assert done.finished.sent_bytes_per_island == done.finished.control_bytes_per_island == 0
    assert done.finished.utilisation == 1.0


def check_bytes_do_not_depend_on_values(algorithm: Algorithm[Any]) -> None:
    """From other weights the same is sent at every exchange, and somebody sends something."""
    params = Tree.of(Regression().module())
    runs = [simulate(algorithm, steps=_steps(algorithm, 4), cluster=Cluster(islands=3), params=p) for p in (params, 0.5 * params)]
    sent, other = ([(event.round, event.what, event.sent_bytes) for event in done.of(Exchanged)] for done in runs)
    assert sent == other
    assert all(sum(sum(bytes_) for round, _, bytes_ in sent if round == number) > 0 for number in {round for round, *_ in sent})


def check_survives_losses(algorithm: Algorithm[Any]) -> None:
    """Islands that are not heard, leave, and come back: the rest agree, and nobody waits for ever."""
    done = simulate(algorithm, steps=_steps(algorithm, 6), cluster=_eventful(algorithm))
    assert done.finished.steps == _steps(algorithm, 6)
    assert any(event.donor is not None for event in done.of(IslandJoined))


def check_unheard_by_all_changes_nothing(algorithm: Algorithm[Any]) -> None:
    """If no message ever arrives, the global weights stay what they were."""
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
    check_one_island_is_alone,
    check_bytes_do_not_depend_on_values,
    check_survives_losses,
    check_unheard_by_all_changes_nothing,
)


def _steps(algorithm: Algorithm[Any], rounds: int) -> int:
    return rounds * algorithm.steps_per_round


def _eventful(algorithm: Algorithm[Any]) -> Cluster:
    """Unequal islands, lost messages, one that leaves and comes back, and drawn step times."""
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
    """Parts as a file would hold them: Trees whose buffers the engine cannot reuse."""
    if isinstance(value, Tree):
        return Tree(value.layout, value.flat.clone())
    if isinstance(value, dict):
        return {name: detached(item) for name, item in value.items()}
    if isinstance(value, tuple):
        items: Iterator[Any] = (detached(item) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
