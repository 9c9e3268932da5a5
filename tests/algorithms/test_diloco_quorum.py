"""DiLoCo with a quorum, with weights by tokens, and with inner moments that are averaged on their own clocks."""

import copy
import math

import pytest
import torch

import atoll
from atoll import recipes
from atoll.algorithms.diloco import DiLoCo, DiLoCoState
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.events import CaughtUp, Computed, Exchanged, IslandJoined, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Mean
from atoll.core.serialization import tensor_bytes
from atoll.engines.processes.spec import Processes
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Away, Cluster, Link, Lost
from atoll.runs.run_settings import candidates
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, run_engine, simulate, simulator

FREE = Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)
ONE_SLOW = Cluster(islands=3, step_time_s=(1.0, 1.0, 2.5), link=FREE)


def ones(value=1.0):
    return Tree.of({"w": torch.full((3,), value)})


class LatePeers(ScriptedPeers):
    """The quorum's round is over when this island comes."""

    async def mean(self, tree, weight=1.0, **how):
        self.sent.append(tree)
        self.weights.append(weight)
        return Mean(tree.zeros(), 0.0, heard=False, late=True)


# ------------------------------------------------------------------------------------------------------- weights by tokens


def test_tokens_weigh_the_deltas_and_the_weights_sum_to_one():
    """300 tokens of this island moved it by 2 x 1, 100 of the other by 4: the mean is (300 * 2 + 100 * 4) / 400 = 2.5."""
    peers = ScriptedPeers(ones(4.0), weights=[100.0])
    algorithm = DiLoCo(inner_steps=2, outer=SGD(lr=1.0), weighting="tokens")
    state = one_round(algorithm, FakeReplica(moves_by=-1.0, tokens=150), peers, params=ones(0.0))
    assert peers.weights == [300.0]
    assert torch.equal(state.params["w"], torch.full((3,), -2.5))
    assert state.tokens == 0


def test_a_delta_that_was_not_heard_adds_its_tokens_to_the_next():
    algorithm, replica = DiLoCo(inner_steps=2, weighting="tokens"), FakeReplica(tokens=10)
    state = one_round(algorithm, replica, ScriptedPeers(ones(), heard=False), params=ones())
    assert state.tokens == 20
    one_round(algorithm, replica, peers := ScriptedPeers(), params=ones(), state=state)
    assert peers.weights == [40.0]


def test_equal_tokens_of_a_power_of_two_are_uniform_weights_to_the_bit():
    uniform, tokens = (simulate(DiLoCo(inner_steps=2, weighting=each), steps=12) for each in ("uniform", "tokens"))
    assert tokens.params.equal(uniform.params)
    assert {event.weight for event in tokens.of(Exchanged)} == {4.0 * tokens.of(Computed)[0].tokens}


# ------------------------------------------------------------------------------------------------------------------ quorum


@pytest.mark.parametrize("cluster", [ONE_SLOW, Cluster(islands=3, drop_probability=0.3)], ids=["slow", "lossy"])
@pytest.mark.parametrize("grace_s", [0.0, 100.0])
def test_a_quorum_of_all_islands_is_no_quorum_to_the_last_event(cluster, grace_s):
    plain = simulate(DiLoCo(inner_steps=2), steps=12, cluster=cluster)
    quorum = simulate(DiLoCo(inner_steps=2, quorum=3, grace_s=grace_s), steps=12, cluster=cluster)
    assert quorum.lines() == plain.lines()
    assert quorum.params.equal(plain.params)


def test_a_window_that_is_long_enough_is_no_quorum_to_the_bit():
    plain = simulate(DiLoCo(inner_steps=10), steps=40, cluster=ONE_SLOW)
    quorum = simulate(DiLoCo(inner_steps=10, quorum=2, grace_s=15.0), steps=40, cluster=ONE_SLOW)
    assert quorum.params.equal(plain.params)
    assert quorum.finished.virtual_time_s == plain.finished.virtual_time_s == 4 * 25.0


@pytest.mark.parametrize(("grace_s", "round_s"), [(0.0, 10.0), (3.0, 13.0)])
def test_a_round_takes_the_time_of_the_last_island_of_the_quorum_and_the_window(grace_s, round_s):
    done = simulate(DiLoCo(inner_steps=10, quorum=2, grace_s=grace_s), steps=20, cluster=ONE_SLOW)
    assert done.of(RoundFinished)[0].virtual_time_s == round_s
    first, second = done.of(Exchanged)
    assert (first.islands, first.arrived_s, first.start_s, first.end_s) == ([0, 1], [10.0, 10.0], round_s, round_s)
    # The slow island comes at 25 s. The second round is over at 20 s without a window, and at 26 s at the latest with one.
    assert second.islands == ([0, 1] if grace_s == 0 else [0, 1, 2])
    assert second.start_s == (20.0 if grace_s == 0 else 25.0)


@pytest.mark.parametrize("late", ["carried", "dropped"])
def test_a_late_island_joins_the_round_that_is_open_when_it_comes(late):
    """Its 10 steps take 25 s, and the others' 10 s: it comes within rounds 2, 5 and 8, and waits there for the others."""
    done = simulate(DiLoCo(inner_steps=10, quorum=2, late=late), steps=90, cluster=ONE_SLOW)
    with_three = [event.round for event in done.of(Exchanged) if len(event.islands) == 3]
    assert with_three == [2, 5, 8]
    assert [event.round for event in done.of(CaughtUp)] == with_three
    assert done.finished.virtual_time_s == 90.0
    trained = sum(event.tokens for event in done.of(Computed) if event.island == 2)
    others = sum(event.tokens for event in done.of(Computed) if event.island != 2)
    assert done.finished.tokens == others + (trained if late == "carried" else 0)
    assert [event.weight for event in done.of(Exchanged) if event.round in with_three] == [3.0 if late == "carried" else 2.0] * 3


def test_a_late_island_sends_its_delta_before_it_trains_again():
    algorithm, replica = DiLoCo(inner_steps=2, quorum=1), FakeReplica(moves_by=-1.0)
    state = one_round(algorithm, replica, LatePeers(ones()), params=ones())
    assert (state.late, state.tokens, float(state.local["w"][0])) == (True, 2, -1.0)
    state = one_round(algorithm, replica, LatePeers(ones()), params=ones(), state=state)
    peers = ScriptedPeers(newest={"params": ones(10.0), "outer": algorithm.outer.init(ones())})
    state = one_round(algorithm, replica, peers, params=ones(), state=state)
    assert len(replica.trained) == 1
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), 11.0))
    assert (state.late, state.tokens, state.local) == (False, 0, None)


def test_a_dropped_delta_has_no_weight_and_its_island_goes_on_from_the_global_weights():
    algorithm, replica = DiLoCo(inner_steps=2, quorum=1, late="dropped", weighting="tokens"), FakeReplica()
    state = one_round(algorithm, replica, LatePeers(ones()), params=ones())
    assert (state.late, state.tokens, state.local) == (True, 0, None)
    state = one_round(algorithm, replica, peers := ScriptedPeers(ones(3.0)), params=ones(), state=state)
    assert peers.weights == [0.0]
    assert float(state.params["w"][0]) == pytest.approx(1 - 0.7 * 1.9 * 3.0)
    assert state == DiLoCoState(state.params, state.outer)


def test_an_island_whose_delta_was_dropped_keeps_its_error_buffer():
    """It has the weights of two rounds ago while it waits; how far the others went meanwhile is no error of a codec."""
    algorithm = DiLoCo(inner_steps=2, quorum=1, late="dropped", codec="int8", outer=SGD(lr=1.0))
    late = DiLoCoState(ones(1.0), SGD(lr=1.0).init(ones()), unsent=ones(0.25), late=True)
    peers = ScriptedPeers(ones(3.0), newest={"params": ones(-9.0)})
    state = one_round(algorithm, FakeReplica(), peers, params=ones(), state=late)
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), -10.0))
    assert peers.weights == [0.0], "so it pays back nothing of what it owes"
    assert torch.equal(state.unsent["w"], torch.full((3,), 0.25))
    assert not state.late


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_late_island_whose_deltas_are_always_dropped_has_no_error_buffer(codec):
    """Island 2 is late in every round in which it trains, so none of its deltas is ever in a mean."""
    engine, _ = simulator(DiLoCo(inner_steps=10, quorum=2, late="dropped", codec=codec), steps=90, cluster=ONE_SLOW)
    run_engine(engine)
    assert [island.state.unsent is None for island in engine.islands.values()] == [False, False, True]


def test_deltas_that_are_late_or_lost_are_not_of_the_quorum():
    """Islands 0 and 1 need 10 s, island 2 12 s and island 3 25 s, whose delta of the first round does not end the third."""
    cluster = Cluster(islands=4, step_time_s=(1.0, 1.0, 1.2, 2.5), link=FREE, lost=(Lost(island=0, round=0),))
    done = simulate(DiLoCo(inner_steps=10, quorum=2), steps=30, cluster=cluster)
    assert [event.start_s for event in done.of(Exchanged)] == [12.0, 22.0, 32.0]
    assert done.of(Exchanged)[0].heard == [False, True, True]


def test_a_late_island_waits_for_the_end_of_the_exchange_that_it_missed():
    """At 10.5 s it learns that it is late; the weights that it then fetches are those of 12 s, after two messages of 1 s."""
    cluster = Cluster(islands=3, step_time_s=(1.0, 1.0, 1.05), link=Link(latency_s=1.0, bandwidth_mbit_per_s=math.inf))
    done = simulate(DiLoCo(inner_steps=10, quorum=2), steps=20, cluster=cluster)
    assert done.of(Exchanged)[0].end_s == 12.0
    assert done.of(CaughtUp)[0].start_s == 12.0


def test_a_run_with_late_islands_resumes_to_the_bit():
    def run(saved=None, parts=None):
        options = {"steps": 12, "cluster": ONE_SLOW, "save_every": 1, "inner": AdamW(lr=0.01)}
        engine, sink = simulator(DiLoCo(inner_steps=2, quorum=2, weighting="tokens", codec="int8"), **options)
        if parts is not None:
            engine.restore(lambda part, like: parts[part])
        run_engine(engine, lambda engine: saved.append(copy.deepcopy(engine.parts())) if saved is not None else None)
        return engine, sink

    saved = []
    whole, sink = run(saved)
    for parts in saved[:-1]:
        again, later = run(parts=copy.deepcopy(parts))
        assert again.params.equal(whole.params)
        assert later.lines()[-1] == sink.lines()[-1]


def test_late_islands_take_no_part_in_the_average_of_moments():
    done = simulate(DiLoCo(inner_steps=2, quorum=2, moments="averaged"), steps=12, cluster=ONE_SLOW, inner=AdamW(lr=0.01))
    assert [event.islands for event in done.of(Exchanged) if event.round == 0] == [[0, 1]] * 3


def test_only_means_have_a_quorum():
    class Totals(DiLoCo):
        async def round(self, state, replica, peers):
            after = await super().round(state, replica, peers)
            await peers.total(1.0)
            return after

    with pytest.raises(ExchangeFailed, match="island 0 calls total in a round with a quorum"):
        simulate(Totals(inner_steps=2, quorum=2), steps=4, cluster=Cluster(islands=3, step_time_s=(1.0, 1.0, 2.5)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quorum": 0}, "quorum=0: a round needs at least 1 delta"),
        ({"quorum": 2, "grace_s": -1.0}, "grace_s=-1.0"),
        ({"grace_s": 1.0}, "grace_s=1.0 without a quorum"),
        ({"quorum": 2, "merge": "disjoint"}, "quorum=2 with merge=disjoint"),
        ({"moment_rounds": (0, 1)}, r"moment_rounds=\(0, 1\)"),
    ],
)
def test_nonsense_is_refused_with_advice(settings, message):
    with pytest.raises(ConfigError, match=message):
        DiLoCo(inner_steps=2, **settings)


def test_settings_that_an_engine_cannot_carry_out_are_refused():
    run = override(recipes.demo_diloco(), ["algorithm.quorum=3"], candidates)
    with pytest.raises(ConfigError, match=r"algorithm.quorum=3 with --engine processes: its exchanges need every process"):
        Processes(processes=4).fitted(run)
    assert Processes(processes=3).fitted(run).algorithm.quorum == 3  # of all: the same as none
    with pytest.raises(ConfigError, match=r"algorithm.quorum=5 of 4 islands"):
        override(recipes.demo_diloco(), ["algorithm.quorum=5"], candidates)
    with pytest.raises(ConfigError, match=r"algorithm.weighting=tokens with inside=DDP"):
        override(recipes.demo_two_level(), ["inside=DDP()", "algorithm.weighting=tokens"], candidates)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"DiLoCo\(quorum=1\) in a loop of your own"):
        atoll.islands(model, optimizer, DiLoCo(inner_steps=2, quorum=1))


# ----------------------------------------------------------------------------------------------------------------- moments


def test_moments_are_averaged_on_clocks_of_their_own():
    done = simulate(DiLoCo(inner_steps=2, moments="averaged", moment_rounds=(3, 6)), steps=24, inner=AdamW(lr=0.01))
    assert [sum(event.round == number for event in done.of(Exchanged)) for number in range(12)] == [1, 1, 2, 1, 1, 3] * 2
    own = simulate(DiLoCo(inner_steps=2), steps=24, inner=AdamW(lr=0.01))
    assert done.finished.sent_bytes_per_island == own.finished.sent_bytes_per_island * (1 + 1 / 3 + 1 / 6)


def test_a_joiner_may_begin_with_the_moments_of_its_donor():
    cluster = Cluster(islands=2, away=(Away(island=1, start=1, stop=2),))
    runs = {}
    for gives in (False, True):
        engine, sink = simulator(
            DiLoCo(inner_steps=3), steps=9, cluster=cluster, inner=AdamW(lr=0.01), gives_moments=gives, save_every=1
        )
        seen = []
        run_engine(engine, lambda engine, seen=seen: seen.append({i: one.replica.state() for i, one in engine.islands.items()}))
        runs[gives] = seen, sink.of(IslandJoined)[0].sent_bytes
    (empty, plain_bytes), (given, more_bytes) = runs[False], runs[True]
    steps = [{float(moments["step"]) for moments in state[1]["optimizer"]} for state in (empty[2], given[2])]
    assert steps == [{3.0}, {9.0}]  # of its own in the third round; and the donor's of two rounds before
    assert more_bytes - plain_bytes == tensor_bytes(empty[1][0]["optimizer"])


@pytest.mark.parametrize("rule", [AdamW(lr=0.01), SGD(lr=0.1), Nesterov(lr=0.1, momentum=0.9), atoll.Muon(lr=0.01)], ids=repr)
def test_a_replica_that_is_given_moments_steps_as_the_one_that_has_them(rule):
    trained, fresh = (LocalReplica(Regression(hidden=4), optimizer=rule) for _ in range(2))
    work = atoll.core.protocols.Work(shard=0, start=0, schedule=0, examples=1)
    trained.train(3, work)
    fresh.load(trained.params())
    fresh.load_moments_state(trained.moments_state())
    for replica in (trained, fresh):
        replica.train(2, work)
    assert fresh.params().equal(trained.params())


def test_moments_of_another_shape_are_refused():
    other, replica = (
        LocalReplica(Regression(hidden=8), optimizer=AdamW(lr=0.01)),
        LocalReplica(Regression(hidden=4), optimizer=AdamW(lr=0.01)),
    )
    other.train(1, atoll.core.protocols.Work(shard=0, start=0, schedule=0, examples=1))
    with pytest.raises(ValueError, match="has shape"):
        replica.load_moments_state(other.moments_state())


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("demo-ddp", [], "train.joiner_moments is for islands that each train with an inner optimizer"),
        ("demo-async", [], "train.joiner_moments=donor with a hub"),
        ("demo-diloco", ["train.fresh_optimizer=true"], "train.joiner_moments=donor and train.fresh_optimizer=true"),
        ("demo-two-level", [], "train.joiner_moments is for islands of one device.*Use train.joiner_moments=empty"),
    ],
)
def test_moments_are_given_only_where_islands_have_them(recipe, settings, message):
    with pytest.raises(ConfigError, match=message):
        override(recipes.ALL[recipe](), ["train.joiner_moments=donor", *settings], candidates)
