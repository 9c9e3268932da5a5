"""Islands that join and leave, and how they receive the shared state."""

import copy
from dataclasses import replace

import pytest

from atoll import recipes
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.core.events import CaughtUp, Computed, Exchanged, IslandJoined, IslandLeft, RoundFinished
from atoll.engines import run_lifecycle
from atoll.optim.adam import AdamW
from atoll.runs.cluster import Away, Cluster, Link, Lost
from atoll.testing.simulated_runs import Regression, run_engine, simulate, simulator


def test_a_late_joiners_absence_does_not_count_against_it():
    cluster = Cluster(islands=2, pool=(1, 2), link=Link(latency_s=0.0, bandwidth_mbit_per_s=1e9))
    done = simulate(DiLoCo(inner_steps=5), steps=20, cluster=cluster)
    assert done.finished.utilisation == pytest.approx(1.0, rel=1e-6)


def test_a_joiner_gets_weights_and_momentum_and_its_bytes_are_counted():
    cluster = Cluster(islands=3, away=(Away(island=1, start=2, stop=4),))
    done = simulate(DiLoCo(inner_steps=2), steps=12, cluster=cluster)
    assert [(e.island, e.round) for e in done.of(IslandLeft)] == [(1, 2)]
    joined = done.of(IslandJoined)
    assert [(e.island, e.round, e.donor, e.sent_bytes) for e in joined] == [(1, 4, 0, 2 * done.params.nbytes)]
    before = next(e for e in done.of(RoundFinished) if e.round == 4).virtual_time_s
    assert next(e for e in done.of(Computed) if e.island == 1 and e.round == 4).start_s == joined[0].virtual_time_s
    assert joined[0].virtual_time_s == pytest.approx(before + 0.03 + joined[0].sent_bytes / 12.5e6)
    sent_bytes = sum(sum(e.sent_bytes) for e in done.of(Exchanged)) + joined[0].sent_bytes
    assert done.finished.sent_bytes_per_island == pytest.approx(sent_bytes / 3)


def test_a_joiner_starts_with_fresh_moments_at_the_global_schedule_position():
    cluster = Cluster(islands=2, pool=(1, 2))
    done = simulate(DiLoCo(inner_steps=3), steps=12, workload=Regression(hidden=3), inner=AdamW(lr=0.01), cluster=cluster)
    steps = [float(done.engine.islands[i].replica.state()["optimizer"][0]["step"]) for i in range(2)]
    assert steps == [12.0, 6.0]


def test_two_islands_behind_are_served_one_after_the_other():
    """Both are lost in round 0; the island that took part sends to one of them and then to the other."""
    cluster = Cluster(islands=3, lost=(Lost(island=1, round=0), Lost(island=2, round=0)))
    done = simulate(DiLoCo(inner_steps=1), steps=2, cluster=cluster)
    first, second = done.of(CaughtUp)
    assert (first.donor, second.donor) == (0, 0)
    assert second.end_s - first.end_s == pytest.approx(first.end_s - first.start_s)


def test_a_resumed_run_chooses_the_same_donors():
    """Two islands return one after the other; links differ, so another donor would mean another virtual time."""
    away = (Away(island=0, start=1, stop=2), Away(island=1, start=1, stop=3))
    cluster = Cluster(islands=3, away=away, links=(Link(latency_s=1.0), Link(), Link()))
    saved = []
    whole, sink = simulator(DiLoCo(inner_steps=2), steps=10, cluster=cluster, save_every=1)
    run_engine(whole, lambda e: saved.append(copy.deepcopy(e.parts())))
    for parts in saved[:-1]:
        again, later = simulator(DiLoCo(inner_steps=2), steps=10, cluster=cluster)
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))
        run_engine(again)
        assert again.virtual_time_s == whole.virtual_time_s
        assert later.lines() == sink.lines()[-len(later.lines()) :]


def test_the_clock_does_not_go_back_when_a_slow_island_leaves():
    cluster = Cluster(islands=2, step_time_s=(1.0, 10.0), away=(Away(island=1, start=1, stop=3),), lost=(Lost(island=1, round=0),))
    times = [event.virtual_time_s for event in simulate(DiLoCo(inner_steps=1), steps=4, cluster=cluster).of(RoundFinished)]
    assert times == sorted(times)


def test_a_schedule_without_islands_is_refused_before_the_run_has_a_folder(tmp_path):
    run = replace(recipes.demo_diloco(), cluster=Cluster(islands=1, away=(Away(island=0, start=2, stop=3),)))
    with pytest.raises(ConfigError, match="no island is left in round 2"):
        run_lifecycle.run(run, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
