"""Two levels: an algorithm between the devices of an island, and another between islands."""

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo, DiLoCoState
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import CaughtUp, Computed, Exchanged, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Link, Lost, all_gather_cost, all_reduce_cost, reduce_scatter_cost
from atoll.testing.conformance import detached
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine, simulate, simulator

FREE = Link(latency_s=0.0, bandwidth_mbit_per_s=1e12)
INSIDE = [
    DDP(optimizer=AdamW(lr=0.05)),
    ZeRO1(optimizer=AdamW(lr=0.05), clip_norm=1.0),
    ACCO(optimizer=AdamW(lr=0.05)),
    ACCO(optimizer=AdamW(lr=0.05), batch="free", pieces_per_half=2, wire="bf16"),
    DPU(optimizer=AdamW(lr=0.05), warmup=1),
    WP(optimizer=AdamW(lr=0.05)),
]


def two_level(inside, *, islands=2, devices=2, inner_steps=3, rounds=3, outer=None, **options):
    cluster = options.pop("cluster", Cluster())
    shards = options.pop("workload", Regression(RegressionBatches(num_shards=islands * devices), hidden=3))
    algorithm = DiLoCo(inner_steps=inner_steps, **({"outer": outer} if outer else {}))
    cluster = replace(cluster, islands=islands, devices_per_island=devices)
    return simulate(algorithm, steps=rounds * inner_steps, inside=inside, cluster=cluster, workload=shards, **options)


def inner_exchanges(done, island=None):
    return [e for e in done.of(Exchanged) if e.inside is not None and island in (None, e.inside)]


def outer_exchanges(done):
    return [e for e in done.of(Exchanged) if e.inside is None]


# ------------------------------------------------------------------------------------------------------------- identities


@dataclass(frozen=True)
class Merged:
    """Batches of which each is those of several devices, one after the other."""

    parts: RegressionBatches
    devices: int

    @property
    def num_shards(self):
        return self.parts.num_shards // self.devices

    def examples(self, shard):
        return self.devices * self.parts.shard_examples

    def batch(self, shard, position):
        batches = [self.parts.batch(shard * self.devices + device, position) for device in range(self.devices)]
        return tuple(torch.cat(items) for items in zip(*batches, strict=True))

    def tokens(self, batch):
        return self.parts.tokens(batch)

    def all_examples(self):
        return self.parts.all_examples()

    @property
    def dimensions(self):
        return self.parts.dimensions


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("kind", [DDP, ZeRO1])
@pytest.mark.parametrize("rule", [AdamW(lr=0.03), AdamW(lr=Cosine(lr=0.05, steps=12, warmup=3)), SGD(lr=0.05)], ids=repr)
def test_devices_in_step_are_one_device_that_reads_all_their_batches(rule, kind, devices):
    """DiLoCo over islands whose devices agree on every gradient is DiLoCo over islands of one device with all the batches."""
    parts = RegressionBatches(num_shards=2 * devices)
    done = two_level(kind(optimizer=rule), devices=devices, rounds=4, workload=Regression(parts, hidden=3))
    one = simulate(
        DiLoCo(inner_steps=3),
        steps=12,
        inner=rule,
        workload=Regression(Merged(parts, devices), hidden=3),
        cluster=Cluster(islands=2),
    )
    assert torch.allclose(done.params.flat, one.params.flat, rtol=1e-4, atol=1e-5)
    assert done.finished.tokens == one.finished.tokens
    assert done.finished.sent_bytes_per_island == one.finished.sent_bytes_per_island


def test_one_island_with_plain_averaging_is_data_parallel_training_of_its_devices():
    workload = Regression(RegressionBatches(num_shards=3), hidden=3)
    rule = AdamW(lr=0.05)
    done = two_level(DDP(optimizer=rule), islands=1, devices=3, rounds=4, outer=SGD(lr=1.0), workload=workload)
    ddp = simulate(DDP(optimizer=rule), steps=12, workload=workload, cluster=Cluster(islands=3))
    assert torch.allclose(done.params.flat, ddp.params.flat, rtol=1e-5, atol=1e-6)
    assert done.finished.tokens == ddp.finished.tokens
    assert done.finished.sent_bytes_per_island == 0
    gathers = sum(e.what == "all_gather" for e in inner_exchanges(done))
    assert gathers <= 3  # before all rounds but the first, unless the loaded weights are the same
    extra = gathers * sum(all_gather_cost(done.params.numel, 4, [FREE] * 3).sent_bytes) / 3
    assert done.finished.inside_bytes_per_device == pytest.approx(ddp.finished.sent_bytes_per_island + extra)


def test_one_device_alone_with_an_algorithm_inside_is_an_island_of_one():
    rule = AdamW(lr=0.05)
    done = two_level(ZeRO1(optimizer=rule), devices=1)
    one = simulate(
        DiLoCo(inner_steps=3), steps=9, inner=rule, cluster=Cluster(islands=2), workload=Regression(RegressionBatches(2), hidden=3)
    )
    assert torch.allclose(done.params.flat, one.params.flat, rtol=1e-4, atol=1e-5)
    assert done.finished.virtual_time_s == pytest.approx(one.finished.virtual_time_s)


@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: type(inside).__name__)
def test_islands_of_devices_exchange_fragments_and_codecs_as_islands_of_one_do(inside):
    whole = DiLoCo(inner_steps=4, outer=SGD(lr=0.7), codec="int8")
    options = {"steps": 12, "inside": inside, "cluster": Cluster(islands=2, devices_per_island=2)}
    workload = Regression(RegressionBatches(num_shards=4), hidden=3)
    one = simulate(whole, workload=workload, **options)
    same = simulate(Streaming(inner_steps=4, fragments=1, overlap=0, outer=SGD(lr=0.7), codec="int8"), workload=workload, **options)
    assert same.params.same_bits(one.params)
    assert one.finished.sent_bytes_per_island == 3 * 2 * 258, "half of the weights is a block, sent in each of two directions"
    streamed = simulate(Streaming(inner_steps=4, fragments=2), workload=workload, **options)
    assert sum(event.background for event in outer_exchanges(streamed)) == 6
    assert streamed.finished.val_loss < simulate(DiLoCo(inner_steps=4), workload=workload, **options).finished.val_loss * 2


def test_moments_of_a_device_are_kept_over_rounds_of_islands():
    done = two_level(ZeRO1(optimizer=AdamW(lr=0.05)), rounds=4)
    states = [device.state for island in done.engine.islands.values() for device in island.devices.members]
    assert [state.optimizer.step for state in states] == [12] * 4


@pytest.mark.parametrize("wide", [False, True])
def test_weights_of_a_model_in_half_precision_leave_an_island_as_they_were_loaded(wide):
    """Devices keep masters in single precision, which islands exchange if their own weights are kept so."""
    workload = Regression(RegressionBatches(num_shards=4), hidden=3, dtype=torch.bfloat16)
    params = Tree.of(workload.module())
    done = two_level(ZeRO1(optimizer=SGD(lr=0.05)), workload=workload, params=params.wide() if wide else params, rounds=1)
    masters = Tree.join([device.state.params for device in done.engine.islands[0].devices.members])
    mine = done.engine.islands[0].devices.params()
    assert mine.flat.dtype == done.params.flat.dtype == (torch.float32 if wide else torch.bfloat16)
    assert mine.equal(masters if wide else masters.cast(torch.bfloat16))
    assert not masters.equal(masters.cast(torch.bfloat16).wide())


@pytest.mark.parametrize("inside", INSIDE, ids=repr)
def test_two_level_training_reduces_the_loss(inside):
    done = two_level(inside, inner_steps=5, rounds=6, outer=SGD(lr=1.0))
    before = done.events[0].metrics["loss"]
    assert done.finished.val_loss < 0.6 * before


# --------------------------------------------------------------------------------------------------------- time and bytes


def test_a_round_of_islands_takes_its_inner_steps_and_one_slow_exchange():
    """And, where weights were loaded, one gather inside."""
    slow, fast = Link(latency_s=0.1, bandwidth_mbit_per_s=1.0), Link(latency_s=0.01, bandwidth_mbit_per_s=10.0)
    cluster = Cluster(step_time_s=(2.0,), link=slow, inside=fast)
    done = two_level(ZeRO1(optimizer=SGD(lr=0.05)), cluster=cluster, inner_steps=4, rounds=5)
    numel = done.params.numel
    inner_s = 2.0 + reduce_scatter_cost(numel, 4, [fast] * 2).seconds + all_gather_cost(numel, 4, [fast] * 2).seconds
    outer_s = all_reduce_cost(numel, 4, [slow] * 2).seconds
    gathers_s = 4 * all_gather_cost(numel, 4, [fast] * 2).seconds
    assert done.finished.virtual_time_s == pytest.approx(5 * (4 * inner_s + outer_s) + gathers_s, rel=1e-12)


def test_a_round_of_islands_with_acco_inside_takes_half_a_batch_more():
    """After new weights the first half-batch has no exchange to hide; within the round the exchanges cost nothing."""
    cluster = Cluster(step_time_s=(2.0,), inside=Link(latency_s=0.2, bandwidth_mbit_per_s=1e9), link=FREE)
    done = two_level(ACCO(optimizer=SGD(lr=0.05)), cluster=cluster, inner_steps=4, rounds=5)
    assert done.finished.virtual_time_s == pytest.approx(5 * (4 * 2.0 + 1.0) + 4 * 0.2, rel=1e-6)


@pytest.mark.parametrize("kind", [DPU, WP])
def test_a_round_of_islands_with_a_late_update_inside_takes_a_batch_more(kind):
    cluster = Cluster(step_time_s=(2.0,), inside=Link(latency_s=0.2, bandwidth_mbit_per_s=1e9), link=FREE)
    done = two_level(kind(optimizer=SGD(lr=0.02), warmup=0), cluster=cluster, inner_steps=4, rounds=5)
    assert done.finished.virtual_time_s == pytest.approx(5 * (4 * 2.0 + 2.0) + 4 * 0.2, rel=1e-6)
    assert done.finished.inside_dropped_tokens == 4 * 4 * 8


def test_flights_inside_are_hidden_and_the_exchange_of_islands_is_not():
    done = two_level(ACCO(optimizer=SGD(lr=0.05)))
    gathers_of_new_weights = 2 * 2
    assert sum(not e.background for e in inner_exchanges(done)) == gathers_of_new_weights
    assert {e.background for e in outer_exchanges(done)} == {False}


@pytest.mark.parametrize("inside", INSIDE, ids=repr)
def test_bytes_over_the_slow_link_are_those_of_diloco_with_the_same_islands(inside):
    plain = simulate(DiLoCo(inner_steps=3), steps=9, cluster=Cluster(islands=2), workload=Regression(hidden=3))
    done = two_level(inside)
    assert [e.sent_bytes for e in outer_exchanges(done)] == [e.sent_bytes for e in plain.of(Exchanged)]
    assert done.finished.sent_bytes_per_island == plain.finished.sent_bytes_per_island
    assert (
        done.finished.control_bytes_per_island == 2 * plain.finished.control_bytes_per_island
    )  # each device sends it to its counterpart
    assert plain.finished.inside_bytes_per_device is None


def test_bytes_inside_an_island_are_counted_per_device():
    done = two_level(ZeRO1(optimizer=SGD(lr=0.05)), devices=3)
    sent = sum(sum(e.sent_bytes) for e in inner_exchanges(done))
    assert done.finished.inside_bytes_per_device == pytest.approx(sent / 6)
    assert {e.inside for e in inner_exchanges(done)} == {0, 1}
    assert all(e.islands == [0, 1, 2] for e in inner_exchanges(done))


def test_acco_inside_sends_twice_what_zero1_does():
    one, two = (two_level(kind(optimizer=SGD(lr=0.05)), rounds=1) for kind in (ZeRO1, ACCO))
    assert two.finished.inside_bytes_per_device == 2 * one.finished.inside_bytes_per_device


def test_devices_differ_by_jitter_alone_and_utilisation_is_theirs():
    cluster = Cluster(step_time_s=(1.0, 3.0), step_time_jitter=0.3, link=FREE, inside=FREE)
    done = two_level(DDP(optimizer=SGD(lr=0.05)), cluster=cluster)
    times = {(e.island, e.device): e.end_s - e.start_s for e in done.of(Computed) if e.round == 0}
    assert len(set(times.values())) == 4
    computed = sum(e.end_s - e.start_s for e in done.of(Computed))
    assert done.finished.utilisation == pytest.approx(computed / (4 * done.finished.virtual_time_s), rel=1e-6)


def test_spans_of_a_device_never_overlap():
    cluster = Cluster(step_time_s=(1.0, 1.7), step_time_jitter=0.4, inside=Link(latency_s=0.3, bandwidth_mbit_per_s=1e9))
    done = two_level(ACCO(optimizer=SGD(lr=0.05), batch="free"), cluster=cluster)
    for device in {(e.island, e.device) for e in done.of(Computed)}:
        spans = [(e.start_s, e.end_s) for e in done.of(Computed) if (e.island, e.device) == device]
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))


# ------------------------------------------------------------------------------------------------------------ what is read


def test_each_device_reads_a_shard_of_its_own():
    done = two_level(ZeRO1(optimizer=SGD(lr=0.05)), islands=2, devices=3)
    assert done.engine.parts()["engine"]["positions"] == [(9, 1)] * 6
    assert done.finished.tokens == 9 * 6 * 8


def test_pending_gradients_are_dropped_and_counted_when_weights_are_loaded():
    """Of ACCO's: each device has one half-batch waiting at the end of each round, and all but the last round's are dropped."""
    done = two_level(ACCO(optimizer=SGD(lr=0.05)), rounds=4)
    states = [device.state for island in done.engine.islands.values() for device in island.devices.members]
    assert [state.dropped for state in states] == [3.0] * 4
    assert [state.first.weight for state in states] == [1.0] * 4
    halves, half_tokens = 4 * 3, 4
    assert done.finished.inside_dropped_tokens == halves * half_tokens
    computed = sum(e.tokens for e in done.of(Computed))
    assert done.finished.tokens == 4 * 12 * 8
    assert computed == done.finished.tokens + done.finished.inside_dropped_tokens + 4 * half_tokens
    for island in (0, 1):  # and in weights: halves of all devices
        members = done.engine.islands[island].devices.members
        read = sum(e.batches * 2 for e in done.of(Computed) if e.island == island)
        assert members[0].state.committed + sum(m.state.dropped + m.state.first.weight for m in members) == read


def test_zero1_drops_nothing():
    assert two_level(ZeRO1(optimizer=SGD(lr=0.05))).finished.inside_dropped_tokens == 0


def test_deltas_weigh_by_the_examples_of_all_devices():
    weights = []

    @dataclass(frozen=True, kw_only=True)
    class RecordsExamples(DiLoCo):
        def _weight(self, state: DiLoCoState, work: Work, tokens: int) -> float:
            weights.append(work.examples)
            return super()._weight(state, work, tokens)

    workload = Regression(RegressionBatches(num_shards=4, shard_examples=32))
    cluster = Cluster(islands=2, devices_per_island=2)
    inside = DDP(optimizer=SGD(lr=0.05))
    simulate(RecordsExamples(inner_steps=2, weighting="examples"), steps=2, inside=inside, cluster=cluster, workload=workload)
    assert weights == [64, 64]


# ------------------------------------------------------------------------------------- lost messages, joining and leaving


def test_an_island_that_was_left_out_continues_and_catches_up():
    """It keeps its weights, its moments and what waits in its devices."""
    cluster = Cluster(islands=2, lost=(Lost(island=1, round=1),))
    done = two_level(ACCO(optimizer=AdamW(lr=0.05)), cluster=cluster, rounds=4)
    assert [(e.island, e.round) for e in done.of(CaughtUp)] == [(1, 2)]
    dropped = [done.engine.islands[island].devices.members[0].state.dropped for island in (0, 1)]
    assert dropped == [3.0, 2.0]  # after the round that it missed, it loaded no weights
    steps = [done.engine.islands[island].devices.members[0].state.steps for island in (0, 1)]
    assert steps == [12.0, 12.0]


def test_a_joiner_begins_at_the_runs_schedule_position():
    """With moments that are new, and a rate of 0 by then: it does not move."""
    schedule = Cosine(lr=0.1, steps=3, floor=0.0)
    cluster = Cluster(islands=2, away=(Away(island=1, start=1, stop=2),))
    done = two_level(ZeRO1(optimizer=SGD(lr=schedule)), cluster=cluster, rounds=3, outer=SGD(lr=1.0))
    three = two_level(ZeRO1(optimizer=SGD(lr=schedule)), rounds=1, outer=SGD(lr=1.0))
    assert torch.allclose(done.params.flat, three.params.flat, atol=1e-6)


@dataclass(frozen=True)
class Spoilt(Regression):
    """One shard's loss is not a number, at one position or at all of them."""

    at: int | None = None

    def loss(self, module, batch):
        inputs, _ = batch
        wrong, _ = self.batches.batch(3, self.at or 0)
        spoilt = any(torch.equal(row, inputs[0]) for row in wrong)
        return super().loss(module, batch) * (float("nan") if spoilt else 1.0)


def test_a_gradient_that_is_not_finite_is_left_out_by_its_island_alone():
    workload = Spoilt(RegressionBatches(num_shards=4, shard_examples=128), hidden=3, at=4)
    done = two_level(ZeRO1(optimizer=SGD(lr=0.05)), workload=workload)
    assert [(e.inside, e.islands, e.round) for e in done.of(UpdateSkipped)] == [(1, [1], 1)]
    assert done.finished.tokens == (4 * 9 - 2) * 8


def test_too_many_skipped_updates_inside_an_island_end_the_run():
    workload = Spoilt(RegressionBatches(num_shards=4, shard_examples=8), hidden=3)
    with pytest.raises(TrainingDiverged, match=r"20 updates in a row were skipped inside island 1.*loss is nan"):
        two_level(ZeRO1(optimizer=SGD(lr=0.05)), workload=workload, inner_steps=5, rounds=6)


# ------------------------------------------------------------------------------------------------------------- the contract

EVENTFUL = Cluster(
    islands=3,
    step_time_s=(0.6, 1.5),
    step_time_jitter=0.2,
    drop_probability=0.2,
    lost=(Lost(island=1, round=0), Lost(island=1, round=1)),
    away=(Away(island=2, start=2, stop=4),),
)


@pytest.mark.parametrize("inside", INSIDE, ids=repr)
def test_same_seed_same_log_and_resuming_between_any_rounds_gives_the_same_bits(inside):
    options = {
        "cluster": replace(EVENTFUL, devices_per_island=2),
        "workload": Regression(RegressionBatches(num_shards=6), hidden=3, dropout=0.2),
        "inside": inside,
    }
    saved = []
    engine, sink = simulator(
        DiLoCo(inner_steps=2),
        steps=12,
        save_every=1,
        **options,
    )
    run_engine(engine, lambda e: saved.append((len(sink.lines()), copy.deepcopy(detached(e.parts())))))
    assert len(saved) == 6
    for position, parts in [(0, None), *saved[:-1]]:
        again, later = simulator(DiLoCo(inner_steps=2), steps=12, **options)
        if parts is not None:
            again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))
        run_engine(again)
        assert again.params.equal(engine.params)
        assert later.lines() == sink.lines()[position:]


# -------------------------------------------------------------------------------------------------------------- bad input


def test_an_inter_island_algorithm_that_asks_for_gradients_is_rejected():
    with pytest.raises(ConfigError, match=r"inside=ACCO .* ZeRO1 exchanges every gradient .*Use algorithm=DiLoCo"):
        simulator(ZeRO1(), steps=2, inside=ACCO())


def test_an_algorithm_inside_that_cannot_take_new_weights_is_refused():
    with pytest.raises(ConfigError, match=r"inside=DiLoCo cannot continue .*Use DDP, ZeRO1, FSDP, ACCO"):
        simulator(DiLoCo(inner_steps=2), steps=2, inside=DiLoCo(inner_steps=1))


def test_a_round_inside_that_does_not_fit_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Long(ZeRO1):
        @property
        def steps_per_round(self):
            return 2

    with pytest.raises(ConfigError, match=r"3 steps, which is not a multiple of the 2 of a round of Long"):
        simulator(DiLoCo(inner_steps=3), steps=3, inside=Long())


def test_an_island_has_no_gradient_to_give():
    @dataclass(frozen=True, kw_only=True)
    class Curious(DiLoCo):
        async def round(self, state, replica, peers):
            await replica.gradient(peers.work(1))
            return state

    with pytest.raises(ConfigError, match="has no gradient to give"):
        two_level_of(Curious(inner_steps=2))


def test_diverged_devices_are_found():
    @dataclass(frozen=True, kw_only=True)
    class Divided(DDP):
        async def round(self, state, replica, peers):
            state = await super().round(state, replica, peers)
            return replace(state, params=state.params + 1e-3 * peers.rank)

    with pytest.raises(ExchangeFailed, match=r"device 1 of island 0 holds another\.params"):
        two_level(Divided(optimizer=SGD(lr=0.05)))


def test_devices_that_wait_for_a_missing_one_are_named():
    @dataclass(frozen=True, kw_only=True)
    class Deserter(DDP):
        async def round(self, state, replica, peers):
            return state if peers.rank == 1 else await super().round(state, replica, peers)

    with pytest.raises(ExchangeFailed, match="cannot end: device 0 of island 0 in mean"):
        two_level(Deserter(optimizer=SGD(lr=0.05)))


def two_level_of(algorithm):
    cluster = Cluster(islands=2, devices_per_island=2)
    return simulate(algorithm, steps=algorithm.steps_per_round, inside=ZeRO1(optimizer=SGD(lr=0.05)), cluster=cluster)
