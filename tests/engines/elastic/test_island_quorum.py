"""Elastic runs with a quorum of deltas, and joiners that begin with their donor's inner moments."""

import pytest

from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Attended, Leased, RunFinished
from atoll.core.serialization import load_tree
from atoll.engines.elastic import commit, island as island_module, spec
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.run_lifecycle import run as simulate
from atoll.runs.run_settings import candidates
from atoll.testing.chaos.reports import exactly_once_violations

QUORUM = ("algorithm.quorum=2", "algorithm.late=dropped")


@pytest.fixture(autouse=True)
def _short_window(monkeypatch):
    monkeypatch.setattr(spec, "LEAST_WINDOW_S", 0.4)
    monkeypatch.setattr(commit, "_LONGEST_RETRY_S", 0.1)


def test_a_quorum_commits_without_the_slow_island_which_fetches_the_state_and_comes_back(threaded, toy):
    live = threaded(toy(3, *QUORUM, "train.steps=12"), Elastic(processes=3))
    live.waits["island-0002", 1] = "committed round 3 "
    live.finish(live.start(*map(island_name, range(3))))
    attended = {event.round: event.participating for event in live.events(Attended)}
    assert [attended[number] for number in (1, 2, 3)] == [3, 2, 2]
    assert max(attended[number] for number in attended if number > 3) == 3
    (returned,) = [event.returned for event in live.events(Leased) if event.returned]
    assert [island for island, *_ in returned] == [2]
    assert not exactly_once_violations(live.events(Leased), units=3 * 6)


def test_a_quorum_of_all_islands_has_the_bits_of_a_run_without_one(tmp_path, threaded, toy):
    live = threaded(toy(2, "algorithm.quorum=2", "algorithm.weighting=tokens"), Elastic(processes=2))
    live.finish(live.start("island-0000", "island-0001"))
    expected = simulate(toy(2, "algorithm.weighting=tokens"), out=tmp_path / "sim")
    assert load_tree(live.folder / "final.safetensors").equal(expected.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.quorum=2"], "algorithm.quorum=2 of 4 islands with --engine elastic.*Use algorithm.quorum=3 or more"),
        (["algorithm.quorum=3"], "algorithm.late=carried with --engine elastic.*Use algorithm.late=dropped"),
    ],
)
def test_quorums_that_elastic_islands_cannot_keep_are_refused(toy, settings, message):
    with pytest.raises(ConfigError, match=message):
        Elastic(processes=4).fitted(override(toy(4), settings, candidates))


@pytest.mark.parametrize("given", ["empty", "donor"])
def test_a_joiner_begins_with_empty_moments_or_with_those_of_its_donor(threaded, toy, monkeypatch, given):
    run = toy(2, f"train.joiner_moments={given}", "train.fresh_optimizer=false", "train.peak_first=false", "train.steps=24")
    live, donated = threaded(run, Elastic(processes=2, start_timeout_s=0.0)), {}
    publish = island_module.IslandProcess._publish

    def publishing(self):
        publish(self)
        donated.setdefault(self._name, []).append((self._engine.version, self._engine.replica.moments_state()["optimizer"]))

    monkeypatch.setattr(island_module.IslandProcess, "_publish", publishing)
    first = live.start("island-0000")
    live.wait_until("committed round 2 ")
    live.finish([*first, *live.start("island-0001")])
    (_, begun), *_ = donated["island-0001"]
    assert not any(begun) if given == "empty" else all(begun)
    assert live.events(RunFinished)
