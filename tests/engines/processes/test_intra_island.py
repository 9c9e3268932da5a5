"""Islands of several devices: their bytes, their events, and the weights of one process with the whole batch."""

from dataclasses import dataclass

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Compared, Computed, Exchanged, RoundFinished, UpdateSkipped
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine, simulate
from tests.process_pool import context_of, engine_of

OUTER = DiLoCo(inner_steps=2)
INSIDE = [DDP(optimizer=SGD(lr=0.05)), ZeRO1(optimizer=AdamW(lr=0.05)), ACCO(optimizer=AdamW(lr=0.05))]
WORKLOAD = Regression(hidden=3)


@dataclass(frozen=True)
class Pairs:
    """The batches of the two devices of an island, as one."""

    single: RegressionBatches

    @property
    def num_shards(self):
        return self.single.num_shards // 2

    @property
    def dimensions(self):
        return self.single.dimensions

    def examples(self, shard):
        return 2 * self.single.shard_examples

    def batch(self, shard, position):
        pair = [self.single.batch(2 * shard + device, position) for device in (0, 1)]
        return tuple(torch.cat(parts) for parts in zip(*pair, strict=True))

    def tokens(self, batch):
        return len(batch[0])

    def all_examples(self):
        return self.single.all_examples()


def named(algorithm):
    return type(algorithm).__name__


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def run_and_count(group, algorithm, workload, steps, inside=None, devices=1):
    engine, sink = engine_of(context_of(group, devices, inside=inside is not None), algorithm, workload, steps, None, inside)
    before = engine.context.counterparts.sent_bytes
    finished = run_engine(engine)
    sent_bytes = engine.context.counterparts.sent_bytes - before
    params = engine.params.copy()
    engine.close()
    return params, finished, sink.events, sent_bytes


def test_two_devices_with_ddp_train_as_one_process_with_twice_the_batch(four):
    together = four.run(run_and_count, OUTER, WORKLOAD, 8, INSIDE[0], 2)
    alone = four.run(run_and_count, OUTER, Regression(Pairs(WORKLOAD.batches), hidden=3), 8, size=2)
    assert all(params.equal(together[0][0]) for params, *_ in together)
    torch.testing.assert_close(together[0][0].flat, alone[0][0].flat, rtol=1e-5, atol=1e-6)
    assert together[0][1].tokens == alone[0][1].tokens
    assert together[0][1].sent_bytes_per_island == alone[0][1].sent_bytes_per_island


@pytest.mark.parametrize("inside", INSIDE, ids=named)
def test_each_of_two_devices_sends_half_the_bytes_between_islands(four, inside):
    _, _, _, alone = zip(*four.run(run_and_count, OUTER, WORKLOAD, 6, size=2), strict=True)
    _, _, _, together = zip(*four.run(run_and_count, OUTER, WORKLOAD, 6, inside, 2), strict=True)
    assert [2 * sent_bytes for sent_bytes in together] == [alone[0], alone[0], alone[1], alone[1]]
    assert alone[0] > 0


@pytest.mark.parametrize("inside", INSIDE, ids=named)
def test_events_of_both_levels_are_the_simulators_except_for_their_times(four, inside):
    expected = simulate(OUTER, steps=6, cluster=Cluster(islands=2, devices_per_island=2), workload=WORKLOAD, inside=inside)
    (_, _, events, _), *_ = four.run(run_and_count, OUTER, WORKLOAD, 6, inside, 2)
    assert spans(events) == spans(expected.events)
    assert exchanges(events) == exchanges(expected.events)
    for one, two in zip(of(events, Compared), expected.of(Compared), strict=True):
        assert one.norms == pytest.approx(two.norms, rel=1e-5)
        assert one.mean_norm == pytest.approx(two.mean_norm, rel=1e-5)
        assert one.cosine_mean == pytest.approx(two.cosine_mean, abs=1e-5)
    finished = [
        [(e.round, e.islands, e.steps, e.tokens, e.local_updates) for e in of(es, RoundFinished)]
        for es in (events, expected.events)
    ]
    assert finished[0] == finished[1]


@pytest.mark.parametrize(
    "outer",
    [
        DiLoCo(inner_steps=2, codec="int4"),
        DiLoCo(inner_steps=2, codec="topk"),
        DiLoCo(inner_steps=2, codec="bf16-stochastic", feedback=0.5),
        Streaming(inner_steps=4, fragments=1, overlap=0, codec="int8"),
        Streaming(inner_steps=4, fragments=2, overlap=1),
        Streaming(inner_steps=4, fragments=2, overlap=3, codec="int4"),
        Streaming(inner_steps=4, fragments=2, overlap=1, codec="topk"),
    ],
    ids=str,
)
def test_devices_exchange_their_slices_in_a_codec_and_in_fragments_with_the_simulators_bits(four, outer):
    """Neither a device's slice nor its fragments are whole blocks. All are whole SIMD vectors: torch rounds differently at ends."""
    workload = Regression(RegressionBatches(dimensions=20543))
    expected = simulate(outer, steps=16, cluster=Cluster(islands=2, devices_per_island=2), workload=workload, inside=INSIDE[1])
    together = four.run(run_and_count, outer, workload, 16, INSIDE[1], 2)
    assert all(params.equal(expected.params) for params, *_ in together)
    (_, finished, events, _), *_ = together
    assert (finished.digest, finished.val_loss) == (expected.finished.digest, expected.finished.val_loss)
    assert finished.sent_bytes_per_island == expected.finished.sent_bytes_per_island
    assert exchanges(events) == exchanges(expected.events)


def spans(events):
    return sorted((e.round, e.island, e.device, e.batches, e.tokens, e.loss) for e in of(events, Computed))


def exchanges(events):
    """Payload only: the simulator counts fewer control bytes, and does not ask whether there are weights to load."""
    places = [(e.round, -1 if e.inside is None else e.inside, e.what, e.sent_bytes) for e in of(events, Exchanged)]
    return sorted(place for place in places if place[2] != "total")


def test_an_algorithm_that_needs_whole_weights_is_refused(four):
    errors = four.run(refused, DiLoCo(inner_steps=2, pruned=0.5), INSIDE[0])
    assert all("algorithm.pruned=0.5" in text and "pruned=0" in text for text in errors)
    errors = four.run(refused, Streaming(inner_steps=4, split="balanced"), INSIDE[0])
    assert all("algorithm.split=balanced" in text and "split=contiguous" in text for text in errors)


def refused(group, algorithm, inside):
    try:
        engine_of(context_of(group, 2, inside=True), algorithm, WORKLOAD, 2, None, inside)
    except ConfigError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Poisoned(RegressionBatches):
    """One device reads a batch with NaN targets."""

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        return inputs, targets * float("nan") if (shard, position) == (3, 1) else targets


@pytest.mark.parametrize("inside", INSIDE, ids=named)
def test_only_the_island_of_a_device_with_nonfinite_gradients_skips_the_update(four, inside):
    workload = Regression(hidden=3, batches=Poisoned())
    expected = simulate(OUTER, steps=6, cluster=Cluster(islands=2, devices_per_island=2), workload=workload, inside=inside)
    (params, finished, events, _), *_ = four.run(run_and_count, OUTER, workload, 6, inside, 2)
    assert params.equal(expected.params)
    skipped = [[(e.round, e.islands, e.inside) for e in of(es, UpdateSkipped)] for es in (events, expected.events)]
    assert skipped[0] == skipped[1]
    assert [(islands, island) for _, islands, island in skipped[0]] == [([1], 1)]
    assert (finished.tokens, finished.local_updates) == (expected.finished.tokens, expected.finished.local_updates)
