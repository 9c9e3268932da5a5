"""The simulator: virtual times and bytes by hand, and the same log from the same seed."""

import copy
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from atoll.algorithms.ddp import DDP, DDPState
from atoll.algorithms.diloco import DiLoCo, DiLoCoState
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Computed, Exchanged, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work, own, sharded, shared
from atoll.engines.simulator.collectives import weighted_mean
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster, Link, Lost
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine, simulate, simulator

UNEQUAL = (0.58, 0.75, 1.51, 3.33)


def test_a_round_lasts_as_long_as_its_slowest_island_and_its_exchange():
    cluster = Cluster(islands=4, step_time_s=UNEQUAL, link=Link(latency_s=0.03, bandwidth_mbit_per_s=100))
    done = simulate(DiLoCo(inner_steps=10), steps=30, cluster=cluster)
    piece = 2 * 4  # six parameters over four islands: the largest shard has two
    exchange_s = 6 * (0.03 + piece / 12.5e6)
    assert done.finished.virtual_time_s == pytest.approx(3 * (10 * 3.33 + exchange_s), rel=1e-12)


def test_utilisation_is_computing_time_over_time_present():
    cluster = Cluster(islands=4, step_time_s=UNEQUAL, link=Link(latency_s=0.0, bandwidth_mbit_per_s=1e9))
    done = simulate(DiLoCo(inner_steps=10), steps=20, cluster=cluster)
    assert done.finished.utilisation == pytest.approx(sum(time / 3.33 for time in UNEQUAL) / 4, rel=1e-6)


def test_ddp_waits_for_the_slowest_at_every_step_and_diloco_once_a_round():
    cluster = Cluster(islands=4, step_time_s=UNEQUAL)
    ddp = simulate(DDP(optimizer=SGD(lr=0.05)), steps=20, cluster=cluster)
    diloco = simulate(DiLoCo(inner_steps=20), steps=20, cluster=cluster)
    assert ddp.finished.virtual_time_s - diloco.finished.virtual_time_s == pytest.approx(19 * 6 * 0.03, abs=1e-3)


def test_spans_of_an_island_never_overlap_and_exchanges_wait_for_the_last():
    done = simulate(DiLoCo(inner_steps=3), steps=12, cluster=Cluster(islands=4, step_time_s=UNEQUAL, step_time_jitter=0.3))
    for island in range(4):
        spans = [(e.start_s, e.end_s) for e in done.of(Computed) if e.island == island]
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    for event in done.of(Exchanged):
        assert event.start_s == max(event.arrived_s)


def test_each_island_reads_its_own_shard():
    done = simulate(DiLoCo(inner_steps=2), steps=6)
    assert done.engine.parts()["engine"]["positions"] == [(6, 1), (6, 1), (6, 1), (6, 1)]


def test_more_islands_than_shards_share_them_without_reading_a_batch_twice():
    workload = Regression(RegressionBatches(num_shards=2))
    done = simulate(DiLoCo(inner_steps=2), steps=6, workload=workload, cluster=Cluster(islands=4))
    assert done.engine.parts()["engine"]["positions"] == [(12, 1), (12, 1)]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_located():
    with pytest.raises(TrainingDiverged, match=r"the loss is (nan|inf) on island \d in round \d"):
        simulate(DiLoCo(inner_steps=50), steps=500, inner=SGD(lr=1e4))


def test_nothing_is_saved_once_the_loss_is_not_finite():
    saved = []

    @dataclass(frozen=True)
    class Spoilt(Regression):
        def loss(self, module, batch):
            return super().loss(module, batch) * (math.nan if len(saved) == 2 else 1.0)

    engine, _ = simulator(DiLoCo(inner_steps=2), steps=20, workload=Spoilt(), save_every=1)
    with pytest.raises(TrainingDiverged):
        run_engine(engine, lambda engine: saved.append(engine.round))
    assert saved == [1, 2]


def test_steps_that_do_not_fill_rounds_are_refused_with_a_number_that_does():
    with pytest.raises(ConfigError, match=r"steps=50 is not a multiple of the 20 .*Use train.steps=40"):
        simulator(DiLoCo(inner_steps=20), steps=50)
    with pytest.raises(ConfigError, match=r"steps=0 is not a multiple of the 20 .*Use train.steps=20"):
        simulator(DiLoCo(inner_steps=20), steps=0)


@dataclass(frozen=True)
class Divided(DiLoCo):
    """A faulty algorithm: computes a shared field from what is its own."""

    async def round(self, state, replica, peers):
        state = await super().round(state, replica, peers)
        return DiLoCoState(state.params + 1e-3 * peers.rank, state.outer)


def test_a_diverged_replica_is_found_in_the_same_round():
    with pytest.raises(ExchangeFailed, match=r"island 1 holds another.params"):
        simulate(Divided(inner_steps=2), steps=10)


@dataclass(frozen=True)
class Deserter(DiLoCo):
    """A faulty algorithm: one island does not reach the exchange."""

    async def round(self, state, replica, peers):
        return state if peers.rank == 1 else await super().round(state, replica, peers)


def test_an_exchange_that_one_island_skips_is_an_error_not_a_hang():
    with pytest.raises(ExchangeFailed, match=r"round 0 cannot end: island 0 in mean.*the same calls"):
        simulate(Deserter(inner_steps=2), steps=10)


@dataclass(frozen=True)
class Confused(DiLoCo):
    """A faulty algorithm: islands meet for different things."""

    async def round(self, state, replica, peers):
        if peers.rank == 1:
            await peers.all_gather(state.params.shard(1, peers.size))
        return await super().round(state, replica, peers)


def test_different_collectives_in_one_call_are_an_error():
    with pytest.raises(ExchangeFailed, match=r"but the other members are in"):
        simulate(Confused(inner_steps=2), steps=10)


@dataclass(frozen=True)
class Gathering(DiLoCo):
    """Averages by reduce-scatter and all-gather, as a sharded algorithm does."""

    async def round(self, state, replica, peers):
        replica.load(state.params)
        await replica.train(self.inner_steps, peers.work(self.inner_steps))
        delta = state.params - replica.params()
        summed = await peers.reduce_scatter(delta)
        mean = await peers.all_gather(summed.value / summed.weight)
        params, outer = self.outer.update(state.params, mean, state.outer)
        return DiLoCoState(params, outer)


def test_reduce_scatter_and_all_gather_are_an_all_reduce_in_two_halves():
    whole, halves = (
        simulate(kind(inner_steps=2), steps=10, cluster=Cluster(islands=3), workload=Regression(hidden=5))
        for kind in (DiLoCo, Gathering)
    )
    assert halves.params.equal(whole.params)
    assert halves.finished.sent_bytes_per_island == whole.finished.sent_bytes_per_island
    assert halves.finished.virtual_time_s == pytest.approx(whole.finished.virtual_time_s)


def test_islands_that_agree_hold_their_weights_once():
    done = simulate(DiLoCo(inner_steps=2), steps=4)
    assert len({island.state.params.flat.data_ptr() for island in done.engine.islands.values()}) == 1
    assert len({island.state.outer.velocity.flat.data_ptr() for island in done.engine.islands.values()}) == 1


def test_any_module_with_a_loss_can_be_trained_also_with_dropout_and_mixed_dtypes():
    @dataclass(frozen=True)
    class Mixed(Regression):
        def module(self):
            module = super().module()
            module[3].double()
            module[0].requires_grad_(False)
            return module

        def loss(self, module, batch):
            inputs, targets = batch
            hidden = module[2](module[1](module[0](inputs)))
            return (module[3](hidden.double()).squeeze(1) - targets).square().mean()

    workload = Mixed(hidden=6, dropout=0.1)
    done = simulate(DiLoCo(inner_steps=5), steps=100, workload=workload, inner=AdamW(lr=0.01))
    assert done.finished.val_loss < 0.7 * done.events[0].metrics["loss"]
    assert done.params.layout == Tree.of(workload.module()).layout


def test_non_finite_weights_are_not_reported_as_a_disagreement():
    with pytest.raises(TrainingDiverged, match=r"(the loss is|no longer finite)"):
        simulate(DDP(optimizer=SGD(lr=1e18)), steps=40)


def test_tokens_of_a_lost_gradient_are_not_counted():
    done = simulate(DDP(optimizer=SGD(lr=0.05)), steps=2, cluster=Cluster(islands=2, lost=(Lost(island=1, round=0),)))
    assert done.finished.tokens == (1 + 2) * 8


def test_a_single_island_loses_no_messages():
    done = simulate(DiLoCo(inner_steps=2), steps=20, cluster=Cluster(islands=1, drop_probability=0.9))
    assert (done.finished.outer_steps, done.finished.virtual_time_s) == (10, pytest.approx(20.0))


@dataclass(frozen=True)
class Piecewise(DiLoCo):
    """Asks for its work in two pieces."""

    async def round(self, state, replica, peers):
        replica.load(state.params)
        for steps in (1, self.inner_steps - 1):
            await replica.train(steps, peers.work(steps))
        mean = await peers.mean(state.params - replica.params())
        params, outer = self.outer.update(state.params, mean.value, state.outer)
        return DiLoCoState(params, outer)


def test_work_requested_in_parts_is_the_same_work():
    whole, pieces = (
        simulate(kind(inner_steps=4), steps=12, inner=SGD(lr=Cosine(lr=0.1, steps=12))) for kind in (DiLoCo, Piecewise)
    )
    assert pieces.params.equal(whole.params)
    assert pieces.finished.local_updates == whole.finished.local_updates


@dataclass(frozen=True)
class Hoarder(DiLoCo):
    """Keeps a raw view of the result of an exchange: the engine must not reuse that memory."""

    async def round(self, state, replica, peers):
        replica.load(state.params)
        await replica.train(self.inner_steps, peers.work(self.inner_steps))
        mean = await peers.mean(state.params - replica.params())
        kept = mean.value.flat if state.local is None else state.local
        params = state.params.add(mean.value, -1.0).add(Tree(state.params.layout, kept), -0.1)
        return DiLoCoState(params, state.outer, mean.value.flat)


@dataclass(frozen=True)
class Copier(Hoarder):
    async def round(self, state, replica, peers):
        state = await super().round(state, replica, peers)
        return replace(state, local=state.local.clone())


@pytest.mark.parametrize("islands", [1, 3])
def test_memory_that_a_state_still_references_is_not_reused(islands):
    views, copies = (simulate(kind(inner_steps=2), steps=20, cluster=Cluster(islands=islands)) for kind in (Hoarder, Copier))
    assert views.params.equal(copies.params)


def test_contributions_of_weight_zero_are_left_out():
    bad = Tree.of({"w": torch.full((3,), math.nan)})
    good = Tree.of({"w": torch.ones(3)})
    assert weighted_mean([bad, good, good], [0.0, 1.0, 3.0]).equal(good)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(weight):
    @dataclass(frozen=True)
    class Weighty(DiLoCo):
        def _weight(self, state, work, tokens):
            return weight

    with pytest.raises(ExchangeFailed, match=r"finite weight"):
        simulate(Weighty(inner_steps=1), steps=2)


@dataclass(frozen=True)
class Noisy(Regression):
    """Draws random numbers in its loss, not in a module."""

    def loss(self, module, batch):
        inputs, targets = batch
        return super().loss(module, (inputs + 0.1 * torch.randn_like(inputs), targets))


def test_randomness_in_a_loss_is_each_islands_own_and_repeatable():
    one, two = (simulate(DiLoCo(inner_steps=3), steps=12, workload=Noisy(), seed=4) for _ in range(2))
    assert one.params.equal(two.params)


@dataclass(frozen=True)
class Normed(Regression):
    def module(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def test_buffers_are_saved_and_evaluated():
    saved = []
    whole, sink = simulator(DiLoCo(inner_steps=3), steps=12, workload=Normed(), save_every=1)
    run_engine(whole, lambda e: saved.append(copy.deepcopy(e.parts())))
    again, later = simulator(DiLoCo(inner_steps=3), steps=12, workload=Normed())
    again.restore(lambda part, like: copy.deepcopy(saved[1][part]))
    run_engine(again)
    assert again.params.equal(whole.params)
    assert later.lines() == sink.lines()[-len(later.lines()) :]
    assert int(whole.islands[0].replica.buffers()["1.num_batches_tracked"]) == 12


def test_a_star_sends_the_payload_once_up_and_takes_two_trips():
    link = Link(latency_s=0.5, bandwidth_mbit_per_s=100)
    done = simulate(DiLoCo(inner_steps=1), steps=2, cluster=Cluster(islands=3, topology="star", link=link))
    assert [event.sent_bytes for event in done.of(Exchanged)] == [[done.params.nbytes] * 3] * 2
    assert done.finished.virtual_time_s == pytest.approx(2 * (1.0 + 2 * 0.5), abs=1e-4)


def test_one_slow_link_slows_all_islands():
    slow = Link(latency_s=2.0)
    done = simulate(DiLoCo(inner_steps=1), steps=1, cluster=Cluster(islands=3, links=(Link(), slow, Link())))
    assert done.finished.virtual_time_s == pytest.approx(1.0 + 2 * 2 * 2.0, abs=1e-4)


@dataclass(frozen=True)
class Unequal(RegressionBatches):
    """The first shard counts for three of the second."""

    def examples(self, shard):
        return (30, 10)[shard]


def test_deltas_weigh_by_the_examples_of_the_shards():
    workload = Regression(Unequal(num_shards=2))
    done = simulate(
        DiLoCo(inner_steps=3, outer=SGD(lr=1.0), weighting="examples"), steps=3, workload=workload, cluster=Cluster(islands=2)
    )
    lone = []
    for shard in range(2):
        replica = LocalReplica(workload, optimizer=SGD(lr=0.05))
        replica.train(3, Work(shard=shard, start=0, schedule=0, examples=1))
        lone.append(replica.params())
    expected = 0.75 * lone[0] + 0.25 * lone[1]
    assert float((done.params.flat - expected.flat).abs().max()) < 1e-6


def test_control_bytes_are_a_weight_and_whether_it_is_finite_for_each_peer():
    done = simulate(DiLoCo(inner_steps=2), steps=10, cluster=Cluster(islands=4))
    assert done.finished.control_bytes_per_island == 5 * 3 * (8 + 8)


def test_a_total_sends_one_control_number_per_peer_and_an_all_gather_none():
    done = simulate(ZeRO1(clip_norm=0.1), steps=5, cluster=Cluster(islands=4))
    assert done.finished.control_bytes_per_island == 5 * 3 * (8 + 8 + 8)


def test_an_exchange_whose_messages_are_all_lost_takes_the_greatest_latency():
    lines = (Link(latency_s=0.1), Link(latency_s=0.7))
    done = simulate(DiLoCo(inner_steps=1), steps=1, cluster=Cluster(islands=2, links=lines, drop_probability=1.0))
    assert done.finished.virtual_time_s == pytest.approx(1.0 + 0.7)


@dataclass(frozen=True)
class CountingState:
    params: Tree = shared()
    optimizer: object = shared()
    rounds_seen: int = own(0)


@dataclass(frozen=True)
class Counting(DDP):
    """DDP that keeps a count of its own, and no weights: gradients that did not arrive are lost all the same."""

    def init(self, params, peers):
        return CountingState(params, self.rule.init(params))

    async def round(self, state, replica, peers):
        inner = await super().round(DDPState(state.params, state.optimizer), replica, peers)
        return CountingState(inner.params, inner.optimizer, state.rounds_seen + 1)


def test_a_counter_in_a_state_keeps_no_pending_work():
    lost = Cluster(islands=2, lost=(Lost(island=1, round=0),))
    done = simulate(Counting(optimizer=SGD(lr=0.05)), steps=2, cluster=lost)
    assert done.finished.tokens == (1 + 2) * 8


# ----------------------------------------------------------------------------------------------- pieces, slices and what is held


@dataclass(frozen=True)
class Reader:
    """Asks for work in pieces and in whole batches, in turn, and notes what it is handed."""

    asked: tuple
    handed: list
    steps_per_round: int = 1

    def init(self, params, peers):
        return DDPState(params, None)

    async def round(self, state, replica, peers):
        for batches, pieces in self.asked:
            work = peers.work(0, batches, pieces=pieces)
            self.handed.append((work.start, work.pieces))
        await replica.gradient(peers.work(1))
        return DDPState((await peers.mean(state.params)).value, None)


def test_pieces_are_consecutive_and_a_reader_of_whole_batches_begins_with_the_next():
    handed = []
    asked = ((1, 4), (1, 4), (1, 2), (1, 1), (1, 4), (2, 2))
    simulate(Reader(asked, handed), steps=1, cluster=Cluster(islands=1))
    # Two quarters, then the second half of batch 0; all of batch 1; a quarter of batch 2, its second half and the first of batch 3.
    assert handed == [(0, 4), (1, 4), (1, 2), (1, 1), (8, 4), (5, 2)]


@dataclass(frozen=True)
class SliceState:
    params: Tree = sharded()


@dataclass(frozen=True)
class Forgetful:
    """Moves its slices and does not load what they make up."""

    steps_per_round: int = 1

    def init(self, params, peers):
        return SliceState(params.shard(peers.rank, peers.size).copy())

    async def round(self, state, replica, peers):
        await replica.gradient(peers.work(1))
        await peers.all_gather(state.params)
        return SliceState(state.params + 1.0)

    def held(self, state):
        return state.params


def test_a_replica_that_differs_from_the_joined_slices_is_found_in_the_same_round():
    with pytest.raises(ExchangeFailed, match=r"after round 0 island 0 holds other weights.*must load what it gathered"):
        simulate(Forgetful(), steps=3, cluster=Cluster(islands=2))


@dataclass(frozen=True)
class Adding:
    """Passes a tree to a reduce-scatter and keeps its result."""

    tree: Tree
    got: list
    wide: bool
    weight: float = 2.0
    steps_per_round: int = 1

    def init(self, params, peers):
        return DDPState(params, None)

    async def round(self, state, replica, peers):
        await replica.gradient(peers.work(1))
        self.got.append(await peers.reduce_scatter(self.tree.copy().donate(), self.weight, wide=self.wide))
        return state


@pytest.mark.parametrize("wide", [False, True])
def test_a_reduce_scatter_gives_each_its_slice_of_the_sum_and_the_sum_of_weights(wide):
    got, ones = [], Tree.of({"w": torch.ones(3, dtype=torch.bfloat16)})
    simulate(Adding(ones, got, wide), steps=1, cluster=Cluster(islands=3))
    assert [one.value.flat.tolist() for one in got] == [[3.0]] * 3
    assert {one.value.flat.dtype for one in got} == {torch.float32 if wide else torch.bfloat16}
    assert {(one.weight, one.finite) for one in got} == {(6.0, True)}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_gradients_that_are_not_finite_skip_the_update_on_all_islands(wide, value):
    """Only the last slice is not finite, and yet all islands learn of it."""
    got, tree = [], Tree.of({"w": torch.tensor([1.0, 1.0, value], dtype=torch.bfloat16)})
    done = simulate(Adding(tree, got, wide), steps=1, cluster=Cluster(islands=3))
    assert [one.finite for one in got] == [False] * 3
    assert [event.islands for event in done.of(UpdateSkipped)] == [[0, 1, 2]]
    assert done.finished.outer_steps == done.finished.tokens == 0


@pytest.mark.parametrize("wide", [False, True])
def test_finite_gradients_whose_sum_overflows_are_no_island_s_fault(wide):
    """Then all take the step, and the run ends with the weights that it leads to."""
    got, tree = [], Tree.of({"w": torch.full((3,), 3e38, dtype=torch.bfloat16)})
    done = simulate(Adding(tree, got, wide), steps=1, cluster=Cluster(islands=3))
    assert [one.finite for one in got] == [True] * 3
    assert not got[0].value.is_finite()
    assert not done.of(UpdateSkipped)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0])
def test_a_mean_says_whether_every_tree_was_finite_also_one_without_weight(value, weight):
    means = []

    @dataclass(frozen=True)
    class Averaging(DiLoCo):
        async def round(self, state, replica, peers):
            await replica.train(self.inner_steps, peers.work(self.inner_steps))
            last = peers.rank == 2
            tree = Tree.of({"w": torch.full((2,), value if last else 1.0)})
            means.append(await peers.mean(tree, weight if last else 1.0))
            return state

    simulate(Averaging(inner_steps=1), steps=1, cluster=Cluster(islands=3))
    assert [mean.finite for mean in means] == [math.isfinite(value)] * 3


def test_an_update_without_weight_is_skipped_and_the_run_ends():
    got, tree = [], Tree.of({"w": torch.zeros(3)})
    done = simulate(Adding(tree, got, wide=False, weight=0.0), steps=3, cluster=Cluster(islands=2))
    assert [event.islands for event in done.of(UpdateSkipped)] == [[]] * 3
    assert done.finished.outer_steps == 0
    assert done.finished.rounds == 3
