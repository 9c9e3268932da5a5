"""DPU and WP: an update is one step late, overlaps with computing, and equals ZeRO-1's during the warm-up."""

import math

import pytest
import torch

from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Computed, Exchanged, RoundFailed, RoundFinished, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Link, Lost
from atoll.testing.conformance import digests
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate

each_kind = pytest.mark.parametrize("kind", [DPU, WP])


@each_kind
def test_as_long_as_they_warm_up_they_are_zero1_to_the_bit(kind):
    options = {"steps": 6, "workload": Regression(hidden=3), "cluster": Cluster(islands=3)}
    one = simulate(kind(optimizer=AdamW(lr=0.05), accumulation=2, clip_norm=0.3, warmup=6), **options)
    two = simulate(ZeRO1(optimizer=AdamW(lr=0.05), accumulation=2, clip_norm=0.3), **options)
    assert one.params.equal(two.params)
    assert one.finished.virtual_time_s == two.finished.virtual_time_s
    assert one.finished.tokens == two.finished.tokens


@each_kind
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("step_time_s", [(1.0,), (0.25, 1.0, 0.5)])
def test_an_update_takes_the_longer_of_computing_and_one_exchange(kind, ratio, step_time_s):
    """c = 1 s, of the slowest; m = ratio / 2, a reduce-scatter and an all-gather around a ring of three."""
    m = ratio / 2
    cluster = Cluster(islands=3, step_time_s=step_time_s, link=Link(latency_s=m / 4, bandwidth_mbit_per_s=math.inf))
    done = simulate(kind(optimizer=SGD(lr=0.02), warmup=0), steps=5, cluster=cluster)
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    assert ends == pytest.approx([1.0 + (round + 1) * max(1.0, m) for round in range(5)])
    assert all(event.background for event in done.of(Exchanged))


@each_kind
def test_each_update_sends_what_zero1_sends(kind):
    options = {"steps": 4, "workload": Regression(hidden=3), "cluster": Cluster(islands=3)}
    one = simulate(kind(optimizer=AdamW(lr=0.05), warmup=0), **options)
    two = simulate(ZeRO1(optimizer=AdamW(lr=0.05)), **options)
    assert one.finished.sent_bytes_per_island == two.finished.sent_bytes_per_island


@each_kind
@pytest.mark.parametrize("warmup", [0, 2])
def test_every_batch_is_in_one_update_or_waits(kind, warmup):
    done = simulate(kind(optimizer=SGD(lr=0.02), accumulation=2, warmup=warmup), steps=6, cluster=Cluster(islands=3))
    waiting = [island.state.waiting for island in done.engine.islands.values()]
    assert [gradient.weight for gradient in waiting] == [2.0] * 3
    assert done.finished.tokens + sum(gradient.tokens for gradient in waiting) == sum(event.tokens for event in done.of(Computed))
    assert done.finished.tokens == 6 * 3 * 2 * 8


# --------------------------------------------------------------------------------------------------------------- free batches


@each_kind
def test_free_batches_are_fixed_ones_to_the_bit_where_an_exchange_is_shorter_than_a_batch(kind):
    options = {"steps": 6, "workload": Regression(hidden=3), "cluster": Cluster(islands=3, link=Link(latency_s=0.01))}
    fixed, free = (simulate(kind(optimizer=AdamW(lr=0.05), warmup=2, batch=batch), **options) for batch in ("fixed", "free"))
    assert free.params.equal(fixed.params)
    assert free.finished.virtual_time_s == fixed.finished.virtual_time_s


@each_kind
def test_with_free_batches_an_island_computes_until_its_exchange_is_over_and_the_run_ends_by_samples(kind):
    """A batch takes 1 s and an exchange 2.5 s: every update after the first has 3 batches of each island."""
    cluster = Cluster(islands=3, link=Link(latency_s=2.5 / 4, bandwidth_mbit_per_s=math.inf))
    done = simulate(kind(optimizer=SGD(lr=0.02), warmup=0, batch="free"), steps=10, cluster=cluster, evaluate_every=100)
    assert [event.steps for event in done.of(RoundFinished)] == [1, 4, 7, 10]
    assert done.finished.tokens == 10 * 3 * 8
    waiting = [island.state.waiting for island in done.engine.islands.values()]
    assert [gradient.weight for gradient in waiting] == [3.0] * 3
    assert all(ledger.computed_s == pytest.approx(ledger.present_s) for ledger in done.engine.accounting.ledgers)


@each_kind
def test_with_free_batches_a_faster_island_contributes_in_proportion(kind):
    cluster = Cluster(islands=4, step_time_s=(1.0, 1.0, 1.0, 0.25), link=Link(latency_s=0.2))
    algorithm = kind(optimizer=SGD(lr=0.01), warmup=0, batch="free")
    done = simulate(algorithm, steps=40, cluster=cluster, evaluate_every=100)
    counts = [sum(event.batches for event in done.of(Computed) if event.island == island) for island in range(4)]
    assert counts[3] / counts[0] == pytest.approx(4.0, rel=0.05)


@each_kind
def test_free_batches_follow_the_schedule_by_samples(kind):
    """The schedule ends after 1 nominal batch. The second update has 3, and comes after it."""
    optimizer = SGD(lr=Cosine(lr=0.05, steps=1, floor=0.0))
    cluster = Cluster(islands=3, link=Link(latency_s=2.5 / 4, bandwidth_mbit_per_s=math.inf))
    one, ten = (simulate(kind(optimizer=optimizer, warmup=0, batch="free"), steps=steps, cluster=cluster) for steps in (1, 10))
    assert not one.params.equal(Tree.of(Regression().module()))
    assert ten.params.equal(one.params)
    assert kind(optimizer=SGD(lr=Cosine(lr=1.0, steps=10)), batch="free").rule_at(4.7).lr == Cosine(lr=1.0, steps=10)(4)


# ------------------------------------------------------------------------------------------------------------- what goes wrong


@each_kind
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_round_that_misses_an_island_is_void_and_the_waiting_gradient_still_counts(kind, warmup):
    """Every batch is the same, so the run with a void round has the bits of one that is a round shorter. Replicas of WP must hold
    the prediction again."""
    workload = Regression(RegressionBatches(full_batch=True))
    clusters = [Cluster(islands=3, lost=(Lost(island=1, round=round),)) for round in (10**6, 2)]
    clear, done = (
        simulate(kind(optimizer=AdamW(lr=0.05), warmup=warmup), steps=steps, workload=workload, cluster=cluster)
        for steps, cluster in zip((4, 5), clusters, strict=True)
    )
    assert [event.round for event in done.of(RoundFailed)] == [2]
    assert done.params.equal(clear.params)


@each_kind
def test_islands_join_and_leave_and_a_joiner_has_no_waiting_gradient(kind):
    cluster = Cluster(islands=3, away=(Away(island=2, start=0, stop=2),))
    done = simulate(kind(optimizer=SGD(lr=0.05), warmup=0), steps=4, cluster=cluster)
    batches = [sum(e.batches for e in done.of(Computed) if (e.island, e.round) == at) for at in ((0, 2), (2, 2), (2, 3))]
    assert batches == [1, 2, 1]


class Spoilt(RegressionBatches):
    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        return inputs, targets * math.nan if (shard, position) == (1, 2) else targets


@each_kind
def test_a_gradient_that_is_no_number_is_left_out_by_all(kind):
    """Batch 2 waits after round 1 and is spoilt on island 1: round 2 changes nothing, neither weights nor moments nor what replicas
    hold, which for WP is the prediction."""
    algorithm, options = kind(optimizer=AdamW(lr=0.05), warmup=0), {"workload": Regression(Spoilt()), "cluster": Cluster(islands=3)}
    clear, done, later = (simulate(algorithm, steps=steps, **options) for steps in (2, 3, 6))
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(2, [1])]
    assert done.params.equal(clear.params)
    kept, before = (
        [digests((island.state.optimizer, algorithm.held(island.state))) for island in one.engine.islands.values()]
        for one in (done, clear)
    )
    assert kept == before
    assert later.finished.outer_steps == 5


@each_kind
def test_going_on_from_other_weights_drops_what_waits_and_keeps_moments(kind):
    algorithm, peers, params = kind(optimizer=AdamW(lr=0.1), warmup=0), ScriptedPeers(), Tree.of({"w": torch.ones(3)})
    state = one_round(algorithm, FakeReplica(), peers, params=params)
    rebased = algorithm.rebase(state, params * 5, peers)
    assert rebased.params.equal(params * 5)
    assert algorithm.held(rebased).equal(params * 5)
    assert rebased.waiting is None
    assert digests(rebased.optimizer) == digests(state.optimizer)


@each_kind
@pytest.mark.parametrize(
    ("settings", "says"),
    [({"warmup": -1}, r"warmup=-1.*0 updates or more.*Use 0"), ({"accumulation": 0}, r"accumulation=0.*Use 1")],
    ids=repr,
)
def test_nonsense_is_refused_with_what_to_do(kind, settings, says):
    with pytest.raises(ConfigError, match=says):
        kind(**settings)
