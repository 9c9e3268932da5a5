"""DiLoCo: identities that hold exactly."""

from dataclasses import replace

import pytest
import torch

import atoll
from atoll import recipes
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo, DiLoCoState
from atoll.algorithms.streaming import Streaming
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import CaughtUp, Compared, Exchanged
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, Work
from atoll.engines.chunk_reduction import encoded_mean
from atoll.engines.simulator.collectives import weighted_mean
from atoll.optim.adam import AdamW
from atoll.optim.codecs import CODECS
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.torch_optimizers import Muon, TorchOptimizer
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster, Lost
from atoll.runs.run_settings import candidates
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate


def ones(value=1.0):
    return Tree.of({"w": torch.full((3,), value)})


def close(one, two, tolerance=1e-6):
    return float((one.flat - two.flat).abs().max()) <= tolerance


# ---------------------------------------------------------------------------------------------------- one round, by hand


def test_island_sends_the_distance_it_moved_old_minus_new():
    peers = ScriptedPeers()
    one_round(DiLoCo(inner_steps=2), FakeReplica(moves_by=-0.5), peers, params=ones())
    assert torch.equal(peers.sent[0]["w"], torch.ones(3))


def test_outer_rule_steps_along_the_mean_of_all_deltas():
    peers = ScriptedPeers(ones(3.0))
    state = one_round(DiLoCo(inner_steps=1, outer=Nesterov(lr=1.0, momentum=0.0)), FakeReplica(moves_by=-1.0), peers, params=ones())
    assert torch.equal(state.params["w"], torch.full((3,), 1.0 - 2.0))


def test_round_does_not_change_the_state_it_was_given():
    given = DiLoCoState(ones(), DiLoCo(inner_steps=5).outer.init(ones()))
    one_round(DiLoCo(inner_steps=5), FakeReplica(moves_by=-0.1), ScriptedPeers(), params=ones(), state=given)
    assert torch.equal(given.params["w"], torch.ones(3))
    assert torch.equal(given.outer.velocity["w"], torch.zeros(3))


def test_work_continues_where_the_last_round_ended():
    replica, peers, algorithm = FakeReplica(), ScriptedPeers(), DiLoCo(inner_steps=7)
    state = one_round(algorithm, replica, peers, params=ones())
    one_round(algorithm, replica, peers, params=ones(), state=state)
    assert [(steps, work.start, work.schedule) for steps, work in replica.trained] == [(7, 0, 0), (7, 7, 7)]


def test_golden_scalars_of_synchronous_rounds():
    """Four islands, the pseudo-gradients of papers/common 0.4: theta = 0.6675, 0.3595, 0.1544 and a velocity of 0.32 at the end."""
    rounds = [(0.1, 0.2, 0.3, 0.4), (0.4, -0.1, 0.05, 0.15), (0.02, 0.03, 0.01, -0.04)]
    algorithm = DiLoCo(inner_steps=1, outer=Nesterov(lr=0.7, momentum=0.9))
    scalar = Tree.of({"w": torch.ones(1, dtype=torch.float64)})
    state, seen = algorithm.init(scalar, ScriptedPeers()), []
    for mine, *others in rounds:
        peers = ScriptedPeers(*(Tree.of({"w": torch.tensor([g], dtype=torch.float64)}) for g in others))
        state = one_round(algorithm, FakeReplica(moves_by=-mine), peers, params=scalar, state=state)
        seen.append(float(state.params["w"]))
    assert seen == pytest.approx([0.6675, 0.3595, 0.1544], abs=1e-12)
    assert float(state.outer.velocity["w"]) == pytest.approx(0.32, abs=1e-12)


def test_examples_weigh_the_deltas_and_the_weights_sum_to_one():
    peers = ScriptedPeers(ones(3.0), weights=[300.0])
    peers.examples = 100
    algorithm = DiLoCo(inner_steps=1, outer=SGD(lr=1.0), weighting="examples")
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=ones(0.0))
    assert peers.weights == [100.0]
    assert torch.allclose(state.params["w"], torch.full((3,), -(100 * 1.0 + 300 * 3.0) / 400))


def test_an_island_that_is_not_heard_keeps_the_shared_fields_and_continues_from_its_own_weights():
    algorithm, replica = DiLoCo(inner_steps=1), FakeReplica(moves_by=-1.0)
    state = one_round(algorithm, replica, ScriptedPeers(ones(), heard=False), params=ones())
    assert torch.equal(state.params["w"], torch.ones(3))
    assert state.local is not None
    assert torch.equal(state.local["w"], torch.zeros(3))
    one_round(algorithm, replica, peers := ScriptedPeers(), params=ones(), state=state)
    assert torch.equal(replica.params()["w"], torch.full((3,), -1.0))
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize(("missed", "delta"), [("global", 10.0 - -1.0), ("agreed", 1.0 - -1.0)])
def test_the_next_delta_after_a_miss_is_measured_from_the_global_weights_or_from_the_agreed_ones(missed, delta):
    algorithm = DiLoCo(inner_steps=1, missed=missed)
    fresh = algorithm.init(ones(1.0), ScriptedPeers())
    behind = replace(fresh, local=ones(0.0))
    newest = {"params": ones(10.0), "outer": algorithm.outer.init(ones())}
    peers = ScriptedPeers(newest=newest)
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=ones(), state=behind)
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), delta))
    assert state.local is None
    # Whatever the delta was measured from, the step is taken from the newest global weights.
    assert float(state.params["w"][0]) == pytest.approx(10.0 - 0.7 * 1.9 * delta)


def test_a_total_weight_of_zero_changes_nothing():
    peers = ScriptedPeers(ones(), weights=[0.0])
    peers.examples = 0
    state = one_round(DiLoCo(inner_steps=1, weighting="examples"), FakeReplica(), peers, params=ones())
    assert torch.equal(state.params["w"], torch.ones(3))


def test_pruned_values_are_zero_in_what_is_sent():
    replica, peers = FakeReplica(), ScriptedPeers()
    params = Tree.of({"w": torch.zeros(2, 8)})
    one_round(DiLoCo(inner_steps=1, pruned=0.5), replica, peers, params=params)
    assert int((peers.sent[0]["w"] == 0).sum()) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"inner_steps": 0}, "inner_steps=0.*Use 1"), ({"inner_steps": 1, "pruned": 1.0}, r"pruned=1.0 is outside \[0, 1\)")],
)
def test_nonsense_is_refused_with_advice(settings, message):
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**settings)


# ------------------------------------------------------------------------------------------------------------ identities


def test_one_inner_step_of_sgd_and_outer_sgd_of_one_is_data_parallel_sgd():
    ddp = simulate(DDP(optimizer=SGD(lr=0.05)), steps=50)
    diloco = simulate(DiLoCo(inner_steps=1, outer=SGD(lr=1.0)), inner=SGD(lr=0.05), steps=50)
    assert close(diloco.params, ddp.params)
    assert diloco.finished.sent_bytes_per_island == ddp.finished.sent_bytes_per_island


def averaged_round(replicas, params, number, steps):
    """By hand: every replica trains from the same weights on its own shard, and their weights are averaged."""
    for island, replica in enumerate(replicas):
        replica.load(params)
        replica.train(steps, Work(shard=island, start=number * steps, schedule=number * steps, examples=1))
    return sum((replica.params() for replica in replicas[1:]), replicas[0].params()) / len(replicas)


def test_outer_sgd_of_one_is_federated_averaging():
    """By hand: every island from the same weights, then the mean of the weights."""
    workload, rounds, steps = Regression(hidden=4), 4, 3
    replicas = [LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(4)]
    params = Tree.of(workload.module())
    for number in range(rounds):
        params = averaged_round(replicas, params, number, steps)
    fedavg = simulate(DiLoCo(inner_steps=steps, outer=SGD(lr=1.0)), workload=workload, inner=AdamW(lr=0.01), steps=rounds * steps)
    assert close(fedavg.params, params)


def test_a_single_round_of_outer_sgd_of_one_is_a_model_soup():
    soup = simulate(DiLoCo(inner_steps=20, outer=SGD(lr=1.0)), steps=20)
    lone = []
    for island in range(4):
        replica = LocalReplica(Regression(), optimizer=SGD(lr=0.05))
        replica.train(20, Work(shard=island, start=0, schedule=0, examples=1))
        lone.append(replica.params())
    assert close(soup.params, sum(lone[1:], lone[0]) / 4)


class WeightedBatches(RegressionBatches):
    """Shards that claim to have 1, 3 and 7 examples."""

    def examples(self, shard):
        return (1, 3, 7)[shard]


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 3, 7)])
def test_a_disjoint_merge_is_the_mean_of_the_deltas_with_the_elected_sign(weights):
    """By hand, weight by weight: the sign of the weighted sum, and the weighted mean of the deltas that have it."""
    start, deltas = Tree.of(Regression().module()).flat, []
    for island in range(3):
        replica = LocalReplica(Regression(), optimizer=SGD(lr=0.3))
        replica.train(2, Work(shard=island, start=0, schedule=0, examples=1))
        deltas.append((start - replica.params().flat).tolist())
    expected = []
    for values in zip(*deltas, strict=True):
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        kept = [(weight, value) for weight, value in zip(weights, values, strict=True) if value * total > 0]
        expected.append(sum(weight * value for weight, value in kept) / sum(weight for weight, _ in kept))
    assert any(min(values) < 0 < max(values) for values in zip(*deltas, strict=True))
    weighting = "uniform" if len(set(weights)) == 1 else "examples"
    algorithm = DiLoCo(inner_steps=2, outer=SGD(lr=1.0), merge="disjoint", weighting=weighting)
    merged = simulate(
        algorithm, steps=2, inner=SGD(lr=0.3), cluster=Cluster(islands=3), workload=Regression(batches=WeightedBatches())
    )
    assert torch.allclose(start - merged.params.flat, torch.tensor(expected), atol=1e-6)


def test_a_disjoint_merge_sends_three_times_the_bytes():
    """Two rounds in a ring of four: each island sends 2 * 3/4 of 6 fp32 weights, once or as deltas, agreeing deltas and votes."""
    mean, disjoint = (simulate(DiLoCo(inner_steps=2, merge=each), steps=4) for each in ("mean", "disjoint"))
    assert (mean.finished.sent_bytes_per_island, disjoint.finished.sent_bytes_per_island) == (72, 216)


def test_averaged_moments_are_the_mean_of_the_islands_moments_and_bytes_are_tripled():
    """By hand, over three rounds: weights and both moments are averaged. Only the count of steps is each island's own."""
    workload, rounds, steps = Regression(hidden=4), 3, 3
    replicas = [LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(4)]
    params = Tree.of(workload.module())
    for number in range(rounds):
        params = averaged_round(replicas, params, number, steps)
        of_islands = {name: [replica.moments()[name] for replica in replicas] for name in ("exp_avg", "exp_avg_sq")}
        for replica in replicas:
            replica.load_moments({name: sum(each[1:], each[0]) / 4 for name, each in of_islands.items()})
    options = {"workload": workload, "inner": AdamW(lr=0.01), "steps": rounds * steps}
    own, averaged = (simulate(DiLoCo(inner_steps=3, outer=SGD(lr=1.0), moments=each), **options) for each in ("own", "averaged"))
    assert close(averaged.params, params)
    assert not close(own.params, params)
    assert averaged.finished.sent_bytes_per_island == 3 * own.finished.sent_bytes_per_island


@pytest.mark.parametrize(
    ("inner", "times"),
    [(SGD(lr=0.05), 1), (Nesterov(lr=0.05, momentum=0.9), 2), (AdamW(lr=0.01), 3)],
    ids=["SGD", "Nesterov", "AdamW"],
)
def test_averaged_moments_send_one_tree_more_for_each_moment_that_the_inner_optimizer_has(inner, times):
    own, averaged = (simulate(DiLoCo(inner_steps=2, moments=each), steps=4, inner=inner) for each in ("own", "averaged"))
    assert averaged.finished.sent_bytes_per_island == times * own.finished.sent_bytes_per_island
    assert averaged.params.equal(own.params) is (times == 1)


@pytest.mark.parametrize(
    ("inner", "trees"),
    [
        (Muon(lr=0.01, adamw=("0",)), 2),  # exp_avg of AdamW's parameters and momentum_buffer of Muon's: one tree
        (TorchOptimizer(name="RMSprop", lr=0.01, options="momentum=0.9, centered=True"), 2),
        (TorchOptimizer(name="Adagrad", lr=0.01), 1),
        (TorchOptimizer(name="SGD", lr=0.01, options="momentum=0.9"), 2),
    ],
    ids=["Muon", "RMSprop", "Adagrad", "SGD"],
)
def test_a_moment_has_the_clock_of_its_name(inner, trees):
    """Only the first clock is due: in units of the weights' bytes, a round sends the delta and the moments on that clock."""
    options = {"workload": Regression(hidden=4), "inner": inner, "steps": 4}
    own = simulate(DiLoCo(inner_steps=2), **options)
    averaged = simulate(DiLoCo(inner_steps=2, moments="averaged", moment_rounds=(1, 9)), **options)
    assert averaged.finished.sent_bytes_per_island == trees * own.finished.sent_bytes_per_island


def test_one_island_with_outer_sgd_is_lookahead():
    slow = Tree.of(Regression().module())
    replica = LocalReplica(Regression(), optimizer=SGD(lr=0.05))
    for number in range(5):
        replica.load(slow)
        replica.train(4, Work(shard=0, start=4 * number, schedule=4 * number, examples=1))
        slow = slow + 0.5 * (replica.params() - slow)
    alone = simulate(DiLoCo(inner_steps=4, outer=SGD(lr=0.5)), steps=20, cluster=Cluster(islands=1))
    assert close(alone.params, slow)


def test_identical_islands_are_one_island():
    """With the same data everywhere the mean of the deltas is each delta, so k islands must be one."""
    same = Regression(RegressionBatches(num_shards=1, full_batch=True), hidden=3)
    one, two = (
        simulate(DiLoCo(inner_steps=5), workload=same, inner=AdamW(lr=0.01), steps=25, cluster=Cluster(islands=k)) for k in (1, 2)
    )
    assert two.params.equal(one.params)  # twice a number, halved, is the number
    assert two.finished.tokens == 2 * one.finished.tokens


def test_diloco_sends_exactly_one_hth_of_ddps_bytes():
    ddp = simulate(DDP(optimizer=SGD(lr=0.05)), steps=60, cluster=Cluster(islands=3))
    diloco = simulate(DiLoCo(inner_steps=20), steps=60, cluster=Cluster(islands=3))
    assert diloco.finished.tokens == ddp.finished.tokens
    assert ddp.finished.sent_bytes_per_island == 20 * diloco.finished.sent_bytes_per_island
    assert ddp.finished.control_bytes_per_island == 20 * diloco.finished.control_bytes_per_island


def test_inner_moments_are_never_reset_nor_sent():
    done = simulate(DiLoCo(inner_steps=4), workload=Regression(hidden=3), inner=AdamW(lr=0.01), steps=20)
    for island in done.engine.islands.values():
        assert {float(moments["step"]) for moments in island.replica.state()["optimizer"]} == {20.0}
    payload = done.params.nbytes
    assert all(sum(event.sent_bytes) == 2 * 3 * payload for event in done.of(Exchanged))


# ---------------------------------------------------------------------------------------- losses, pools and what is counted


def test_a_lost_island_is_caught_up_at_its_next_exchange_and_that_is_counted():
    lost = Cluster(islands=3, lost=(Lost(island=1, round=1), Lost(island=1, round=2)))
    done = simulate(DiLoCo(inner_steps=2), steps=12, cluster=lost)
    caught = done.of(CaughtUp)
    assert [(event.island, event.donor, event.round) for event in caught] == [(1, 0, 3)]
    assert caught[0].sent_bytes == 2 * done.params.nbytes  # weights and outer momentum
    assert [event.heard for event in done.of(Exchanged)][1] == [True, False, True]
    # Its uncommitted tokens count with its next exchange.
    assert done.finished.tokens == 12 * 3 * 8


def test_a_dropped_island_does_not_shift_the_mean_of_the_others():
    """If the deltas of all islands but island 0 are lost, the outer step is island 0's delta alone."""
    lost = tuple(Lost(island=island, round=0) for island in (1, 2, 3))
    lone = simulate(DiLoCo(inner_steps=3), steps=3, cluster=Cluster(islands=1))
    done = simulate(DiLoCo(inner_steps=3), steps=3, cluster=Cluster(islands=4, lost=lost))
    assert done.params.equal(lone.params)


def test_both_readings_of_a_missed_exchange_differ_and_both_learn():
    cluster = Cluster(islands=4, drop_probability=0.5)
    literal, other = (
        simulate(DiLoCo(inner_steps=3, outer=SGD(lr=0.7), missed=missed), steps=90, cluster=cluster, seed=3)
        for missed in ("global", "agreed")
    )
    assert not literal.params.equal(other.params)
    assert max(literal.finished.val_loss, other.finished.val_loss) < 1.0


@pytest.mark.parametrize(
    ("pool", "island_rounds"),
    [("constant", 64), ("doubling", 48), ("halving", 48), ("ramp_up", 36), ("ramp_down", 36), ((8, 2, 5, 1), 32)],
)
def test_every_pool_schedule_of_the_paper_takes_its_share_of_steps(pool, island_rounds):
    workload = Regression(RegressionBatches(num_shards=8))
    done = simulate(DiLoCo(inner_steps=2), steps=16, workload=workload, cluster=Cluster(islands=8, pool=pool), evaluate_every=8)
    assert done.finished.local_updates == 2 * island_rounds


def test_deltas_are_compared_and_identical_data_gives_a_cosine_of_one():
    done = simulate(DiLoCo(inner_steps=2), workload=Regression(RegressionBatches(num_shards=1, full_batch=True)), steps=4)
    assert [event.cosine_mean for event in done.of(Compared)] == pytest.approx([1.0, 1.0])
    for event in done.of(Compared):
        assert event.norms == pytest.approx([event.mean_norm] * 4)


@pytest.mark.parametrize("setting", ["algorithm.merge=disjoint", "algorithm.moments=averaged"])
def test_elastic_runs_refuse_rounds_of_several_means(setting, tmp_path):
    with pytest.raises(ConfigError, match=r"a commit is one mean of deltas\. Use merge=mean and moments=own"):
        atoll.run(override(recipes.demo_diloco(), [setting]), engine=atoll.Elastic(processes=2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_averaged_moments_are_refused_where_devices_hold_them():
    with pytest.raises(ConfigError, match=r"algorithm.moments=averaged with inside=DDP.*Use moments=own, or inside=none"):
        override(recipes.demo_two_level(), ["inside=DDP()", "algorithm.moments=averaged"], candidates)


# ------------------------------------------------------------------------------------------------------------------ codecs


def whole_numbers(seed, count=600):
    return Tree.of({"w": torch.randint(-99, 100, (count,), generator=torch.Generator().manual_seed(seed)).float()})


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "fp32"])
def test_what_islands_agreed_on_and_what_is_in_their_error_buffers_is_all_that_they_moved(codec):
    """To the bit, since weights are powers of two and deltas whole numbers: nothing is lost, also not in the second encoding by the
    owner of a slice, and nothing is amplified where an island's weight differs from round to round."""
    errors = [whole_numbers(0).zeros() for _ in range(3)]
    agreed, wanted = errors[0].zeros(), errors[0].zeros()
    for round_ in range(6):
        weights = [2.0 if rank == round_ % 3 else 1.0 for rank in range(3)]
        deltas = [whole_numbers(100 * round_ + seed) for seed in range(3)]
        wanted.add_(weighted_mean(deltas, weights))
        encodings = [Encoding(CODECS[codec], 10 * round_ + rank) for rank in range(3)]
        sums = [delta + error / weight for delta, error, weight in zip(deltas, errors, weights, strict=True)]
        mean, errors = encoded_mean(sums, weights, encodings)
        agreed.add_(mean)
        assert (agreed + (errors[0] + errors[1] + errors[2]) / 4).equal(wanted)


def test_the_owner_of_a_slice_adds_the_error_of_the_means_encoding_times_the_weights_of_all():
    """By hand: of two islands each has half the weight, and owns one block of int4."""
    codec, deltas, slices = CODECS["int4"], [whole_numbers(seed, 512) for seed in range(2)], (slice(0, 256), slice(256, 512))
    mean, errors = encoded_mean(deltas, [1.0, 1.0], [Encoding(codec, 0)] * 2)
    read = [codec.decode(codec.encode(delta.flat), 512) for delta in deltas]
    exact = (read[0] + read[1]) / 2
    assert torch.equal(mean.flat, codec.decode(codec.encode(exact), 512))
    assert not torch.equal(mean.flat, exact)
    for rank, (mine, other) in enumerate([slices, slices[::-1]]):
        first, second = deltas[rank].flat - read[rank], exact - mean.flat
        assert torch.equal(errors[rank].flat[mine], first[mine] + 2 * second[mine])
        assert torch.equal(errors[rank].flat[other], first[other])


def test_sparseloco_has_the_papers_recursion_on_every_island():
    """By hand, round by round: e <- beta e + delta; q = Q(TopK(e)); e <- e - q; theta <- theta - mean(q). There is no momentum."""
    workload, rounds, steps, beta, codec = Regression(hidden=600), 4, 2, 0.5, CODECS["topk"]
    replicas = [LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(3)]
    theta = Tree.of(workload.module())
    errors = [torch.zeros(theta.numel) for _ in replicas]
    for number in range(rounds):
        sent = []
        for island, replica in enumerate(replicas):
            replica.load(theta)
            replica.train(steps, Work(shard=island, start=number * steps, schedule=number * steps, examples=1))
            errors[island] = beta * errors[island] + (theta - replica.params()).flat
            sent.append(codec.decode(codec.encode(errors[island]), theta.numel))
            errors[island] = errors[island] - sent[-1]
            assert 0 < sent[-1].count_nonzero() <= 128 < theta.numel
        theta = Tree(theta.layout, theta.flat - (sent[0] + sent[1] + sent[2]) / 3)
    sparseloco = DiLoCo(inner_steps=steps, codec="topk", feedback=beta, outer=SGD(lr=1.0))
    options = {"workload": workload, "inner": AdamW(lr=0.01), "cluster": Cluster(islands=3)}
    done = simulate(sparseloco, steps=rounds * steps, **options)
    assert done.params.equal(theta)
    assert all(torch.equal(done.engine.islands[island].state.unsent.flat, error) for island, error in enumerate(errors))


def encoded_run(codec, feedback=1.0, **more):
    algorithm = DiLoCo(inner_steps=4, codec=codec, feedback=feedback, outer=SGD(lr=1.0), **more)
    return simulate(algorithm, steps=16, cluster=Cluster(islands=3))


def test_fp32_is_no_codec_and_a_codec_changes_the_bits():
    plain = simulate(DiLoCo(inner_steps=4, outer=SGD(lr=1.0)), steps=16, cluster=Cluster(islands=3))
    assert encoded_run("fp32").params.same_bits(plain.params)
    assert not encoded_run("int8").params.same_bits(plain.params)
    assert close(encoded_run("int8").params, plain.params, 0.05)


def test_an_island_that_missed_an_exchange_keeps_its_error_buffer():
    peers = ScriptedPeers(ones(3.0), heard=False)
    given = DiLoCoState(ones(), SGD(lr=1.0).init(ones()), unsent=ones(0.25))
    algorithm = DiLoCo(inner_steps=1, codec="int8", outer=SGD(lr=1.0))
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=ones(), state=given)
    assert torch.equal(state.unsent["w"], torch.full((3,), 0.25))
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), 1.25)), "the delta and the error buffer"


def test_feedback_decides_how_much_is_sent_later():
    given = DiLoCoState(ones(), SGD(lr=1.0).init(ones()), unsent=ones(0.5))
    for feedback, sent in ((1.0, 1.5), (0.5, 1.25), (0.0, 1.0)):
        peers = ScriptedPeers()
        algorithm = DiLoCo(inner_steps=1, codec="int4", feedback=feedback, outer=SGD(lr=1.0))
        state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=ones(), state=given)
        assert torch.equal(peers.sent[0]["w"], torch.full((3,), sent))
        assert (state.unsent is None) == (feedback == 0)


def test_what_an_island_owes_is_divided_by_the_weight_of_its_next_delta():
    """The error buffer holds what was left out times the weight that it had: a delta of few tokens must not be owed at many."""
    given = DiLoCoState(ones(), SGD(lr=1.0).init(ones()), unsent=ones(2.0))
    peers, algorithm = ScriptedPeers(), DiLoCo(inner_steps=8, codec="bf16", weighting="tokens", outer=SGD(lr=1.0))
    one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=ones(), state=given)
    assert peers.weights == [8.0]
    assert torch.equal(peers.sent[0]["w"], torch.full((3,), 8.25)), "8 steps, and 2 tokens' worth on 8 tokens"


@pytest.mark.parametrize(
    "algorithm",
    [DiLoCo(inner_steps=1, codec="int4"), Streaming(inner_steps=1, fragments=1, overlap=0, codec="int4")],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_with_bf16_weights_a_delta_and_the_error_buffer_are_added_in_fp32(algorithm):
    """Else what a codec left out would be rounded before it is sent, and a part of it lost."""
    params, peers, state = Tree.of({"w": torch.zeros(600, dtype=torch.bfloat16)}), ScriptedPeers(), None
    owed = params.copy(torch.float32)
    for seed in range(3):
        moves = Tree.of({"w": torch.randn(600, generator=torch.Generator().manual_seed(seed)).bfloat16()})
        given = replace(state, params=params, local=None) if state is not None else None
        state = one_round(algorithm, FakeReplica(moves_by=-1.0 * moves), peers, params=params, state=given)
        assert peers.sent[-1].equal(moves.copy(torch.float32) + owed)
        owed = state.unsent if isinstance(algorithm, DiLoCo) else state.unsent[0]
    assert not owed.equal(owed.copy(torch.bfloat16).copy(torch.float32)), "else the test does not see rounding"


@pytest.mark.parametrize(
    ("settings", "words"), [({"feedback": 1.5}, "from 0 to 1"), ({"codec": "int4", "merge": "disjoint"}, "merge=mean")]
)
def test_impossible_codec_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        DiLoCo(inner_steps=1, **settings)
