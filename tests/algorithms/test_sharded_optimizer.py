"""All sharded algorithms: precision, weights by tokens, updates that all islands skip together, and slices that make up the
whole."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.sharded_optimizer import Sharded
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError, TrainingDiverged
from atoll.core.events import Exchanged, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.conformance import digests
from atoll.testing.fakes import ScriptedPeers, drive
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate

KINDS = [ZeRO1, ACCO, DPU, WP]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def held(done):
    """What replicas should hold, from the slices of all."""
    return Tree.join([done.engine.algorithm.held(island.state) for island in done.engine.islands.values()])


# -------------------------------------------------------------------------------------------------------------------- precision


@each_kind
def test_updates_too_small_for_half_precision_add_up_in_the_master_weights(kind):
    """One step alone is lost in bf16, twelve move the master, and replicas hold the master's rounding."""
    workload, rule = Regression(RegressionBatches(full_batch=True), dtype=torch.bfloat16), SGD(lr=1e-5)
    start = Tree.of(workload.module())
    done = simulate(kind(optimizer=rule), steps=12, workload=workload, cluster=Cluster(islands=3))
    assert start.flat.dtype == torch.bfloat16
    assert {island.state.params.flat.dtype for island in done.engine.islands.values()} == {torch.float32}
    one = simulate(kind(optimizer=rule), steps=1, workload=workload, cluster=Cluster(islands=3))
    step = (one.params.flat - start.flat.float()).abs()
    assert float(step.min()) > 0
    assert torch.equal(one.params.flat.bfloat16(), start.flat), "in bf16 one step changes nothing"
    assert torch.allclose((done.params.flat - start.flat.float()).abs(), 12 * step, rtol=0.02)
    assert all(island.replica.weights.equals(held(done)) for island in done.engine.islands.values())
    assert {island.replica.params().flat.dtype for island in done.engine.islands.values()} == {torch.bfloat16}


def sent_bytes(done):
    return [event.sent_bytes for event in done.of(Exchanged)]


@each_kind
def test_a_wire_in_half_precision_halves_the_bytes_and_one_in_single_doubles_a_half_precision_models(kind):
    def sent(dtype, wire):
        workload = Regression(hidden=3, dtype=dtype)
        return sent_bytes(simulate(kind(optimizer=SGD(lr=0.02), wire=wire), steps=3, workload=workload, cluster=Cluster(islands=3)))

    single, half = sent(torch.float32, "own"), sent(torch.float32, "bf16")
    assert single == [[2 * number for number in numbers] for numbers in half]
    assert sent(torch.bfloat16, "own") == half
    assert sent(torch.bfloat16, "fp32") == single


@each_kind
@pytest.mark.parametrize("wire", ["own", "bf16"])
def test_replicas_hold_exactly_the_weights_that_travelled(kind, wire):
    done = simulate(kind(optimizer=AdamW(lr=0.05), wire=wire), steps=5, workload=Regression(hidden=3), cluster=Cluster(islands=3))
    travelled = held(done)
    assert travelled.flat.dtype == (torch.bfloat16 if wire == "bf16" else torch.float32)
    for island in done.engine.islands.values():
        assert torch.equal(island.replica.params().flat, travelled.flat.float())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, dtype=torch.bfloat16))


class CountingBatches(RegressionBatches):
    """The first batch holds 256, all others 1."""

    def batch(self, shard, position):
        return torch.tensor([256.0 if position == 0 else 1.0])

    def tokens(self, batch):
        return 1


class CountingWork(Regression):
    """The gradient of a batch is the number that it holds; 257 is no bfloat16 number."""

    def module(self):
        return Counting()

    def loss(self, module, batch):
        return module.weight.float().sum() * batch.sum()

    def evaluate(self, module):
        return {"loss": 0.0}


@pytest.mark.parametrize(("sums", "total"), [("own", 256.0), ("fp32", 256.0 + 64.0)])
def test_single_precision_adds_up_micro_batches_that_half_would_lose(sums, total):
    algorithm = ZeRO1(optimizer=SGD(lr=1.0), accumulation=65, sums=sums)
    done = simulate(algorithm, steps=1, workload=CountingWork(CountingBatches()), cluster=Cluster(islands=1))
    assert done.params["weight"].flatten().tolist() == pytest.approx([1.0 - total / 65] * 4)


@pytest.mark.parametrize(("sums", "total"), [("own", 256.0), ("fp32", 256.0 + 1.0 + 1.0)])
def test_single_precision_adds_up_islands_that_half_would_lose(sums, total):
    """Each island sends bf16; the sum is in single precision or in bf16."""
    ones = Tree.of({"w": torch.ones(3, dtype=torch.bfloat16)})
    algorithm, peers = Sharded(optimizer=SGD(lr=1.0), sums=sums), ScriptedPeers(ones, ones)

    async def play():
        return await algorithm.reduce(Gradient(ones * 256, 1.0, 1), peers)

    assert drive(play()).sum["w"].tolist() == [total]


# --------------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class PaddedBatches(RegressionBatches):
    """Examples of which some are padding; `empty` are shards that have nothing but padding, from `since` on."""

    empty: tuple[int, ...] = ()
    since: int = 0

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        length = 0 if shard in self.empty and position >= self.since else 1 + (3 * shard + 5 * position) % self.batch_size
        return inputs, targets, torch.arange(len(targets)) < length

    def tokens(self, batch):
        return int(batch[2].sum())


class Padded(Regression):
    """The mean over what is no padding: not a number where all is."""

    def loss(self, module, batch):
        inputs, targets, real = batch
        return ((module(inputs).squeeze(1) - targets).square() * real).sum() / real.sum()

    def evaluate(self, module):
        inputs, targets = self.batches.all_examples()
        return {"loss": float((module(inputs).squeeze(1) - targets).square().mean())}


def one_tensor(workload, steps, islands, pieces=1):
    """Plain torch: the mean over all tokens of all islands, however they are distributed."""
    module = workload.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        batches = [workload.batches.batch(island, step * pieces + piece) for island in range(islands) for piece in range(pieces)]
        inputs, targets, real = (torch.cat(parts) for parts in zip(*batches, strict=True))
        if real.any():
            workload.loss(module, (inputs, targets, real)).backward()
            optimizer.step()
    return Tree.of(module)


@pytest.mark.parametrize("empty", [(), (1,), (0, 1)], ids=["all have tokens", "one has none", "two have none"])
@pytest.mark.parametrize(
    "algorithm",
    [
        ZeRO1(optimizer=SGD(lr=0.05), accumulation=2, weigh="tokens"),
        DDP(optimizer=SGD(lr=0.05), accumulation=2, weigh="tokens"),
        WP(optimizer=SGD(lr=0.05), accumulation=2, weigh="tokens", warmup=9),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_every_token_weighs_the_same_and_islands_without_any_change_nothing(algorithm, empty):
    workload = Padded(PaddedBatches(empty=empty))
    done = simulate(algorithm, steps=5, workload=workload, cluster=Cluster(islands=3))
    assert float((done.params.flat - one_tensor(workload, 5, 3, pieces=2).flat).abs().max()) < 1e-5
    assert not done.of(UpdateSkipped)
    assert done.params.is_finite()


def test_acco_counts_tokens_and_continues_beside_islands_that_have_none():
    workload = Padded(PaddedBatches(empty=(1,)))
    done = simulate(ACCO(optimizer=SGD(lr=0.02), weigh="tokens"), steps=6, workload=workload, cluster=Cluster(islands=3))
    states = [island.state for island in done.engine.islands.values()]
    assert states[1].first.weight == 0.0
    assert states[0].committed == done.finished.tokens > 0
    assert done.params.is_finite()
    assert done.finished.val_loss < 3.0


class LateBatches(PaddedBatches):
    """The first half of every batch is padding."""

    def batch(self, shard, position):
        inputs, targets, _ = super().batch(shard, position)
        return inputs, targets, torch.arange(len(targets)) >= len(targets) // 2


def test_without_an_estimate_there_is_still_a_commit():
    """No island has tokens in its first half: both halves together are one step at the committed weights."""
    workload = Padded(LateBatches())
    done = simulate(ACCO(optimizer=SGD(lr=0.05), weigh="tokens"), steps=5, workload=workload, cluster=Cluster(islands=3))
    assert float((done.params.flat - one_tensor(workload, 5, 3).flat).abs().max()) < 1e-5
    assert done.finished.outer_steps == 5
    assert done.finished.tokens == 5 * 3 * 4


@each_kind
def test_where_no_island_has_a_gradient_the_update_is_skipped(kind):
    """From batch 2 on there is nothing but padding: later updates leave weights and moments alone."""
    workload = Padded(PaddedBatches(empty=(0, 1, 2), since=2))
    runs = [
        simulate(kind(optimizer=AdamW(lr=0.05), weigh="tokens"), steps=steps, workload=workload, cluster=Cluster(islands=3))
        for steps in (4, 7)
    ]
    assert runs[0].params.equal(runs[1].params)
    moments = [[digests(island.state.optimizer) for island in one.engine.islands.values()] for one in runs]
    assert moments[0] == moments[1]
    assert runs[0].finished.tokens == runs[1].finished.tokens > 0
    assert not runs[1].params.equal(Tree.of(workload.module()))


# ------------------------------------------------------------------------------------------------------- what is not a number


@dataclass(frozen=True)
class Spoilt(RegressionBatches):
    """NaN on shard 1 from one batch up to another."""

    start: int = 0
    stop: int = 10**9

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        return inputs, targets * math.nan if shard == 1 and self.start <= position < self.stop else targets


@each_kind
def test_twenty_skipped_updates_in_a_row_end_the_run_and_nineteen_do_not(kind):
    algorithm, islands = kind(optimizer=AdamW(lr=0.05)), Cluster(islands=2)
    with pytest.raises(TrainingDiverged, match=r"20 updates in a row were skipped.*island 1"):
        simulate(algorithm, steps=40, workload=Regression(Spoilt()), cluster=islands, evaluate_every=100)
    spoilt = Regression(Spoilt(start=3, stop=22))
    done = simulate(algorithm, steps=26, workload=spoilt, cluster=islands, evaluate_every=100)
    skipped = {event.round for event in done.of(UpdateSkipped)}
    assert len(skipped) in (19, 20)  # of ACCO, a first half counts with the batch before as well
    assert done.params.is_finite()
    assert done.finished.outer_steps == 26 - len(skipped)
    assert {tuple(event.islands) for event in done.of(UpdateSkipped)} == {(1,)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"wire": "bf16", "sums": "fp32"}, {"clip_norm": 1.0}], ids=repr)
def test_zero1_skips_what_is_not_finite_in_any_precision(value, options):
    @dataclass(frozen=True)
    class Once(RegressionBatches):
        def batch(self, shard, position):
            inputs, targets = super().batch(shard, position)
            return inputs, targets * value if (shard, position) == (2, 1) else targets

    algorithm, islands = ZeRO1(optimizer=AdamW(lr=0.05), **options), Cluster(islands=3)
    clear = simulate(algorithm, steps=1, workload=Regression(Once()), cluster=islands)
    done = simulate(algorithm, steps=2, workload=Regression(Once()), cluster=islands)
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(1, [2])]
    assert done.params.equal(clear.params)
    assert simulate(algorithm, steps=5, workload=Regression(Once()), cluster=islands).finished.outer_steps == 4


# ---------------------------------------------------------------------------------------------------------------------- slices


@each_kind
@pytest.mark.parametrize("islands", [1, 2, 5, 7])
def test_slices_of_weights_and_moments_make_up_the_whole(kind, islands):
    done = simulate(kind(optimizer=AdamW(lr=0.05)), steps=3, workload=Regression(hidden=3), cluster=Cluster(islands=islands))
    states = [island.state for island in done.engine.islands.values()]
    assert Tree.join([state.params for state in states]).layout == Tree.of(Regression(hidden=3).module()).layout
    assert [state.optimizer.mean.numel for state in states] == [state.params.numel for state in states]
    assert max(state.params.numel for state in states) - min(state.params.numel for state in states) <= 1


@each_kind
@pytest.mark.parametrize(
    ("settings", "says"),
    [({"clip_norm": -1.0}, "clip_norm=-1.*more than 0"), ({"wire": "fp8"}, "wire"), ({"weigh": "pounds"}, "weigh")],
)
def test_impossible_settings_are_refused(kind, settings, says):
    with pytest.raises(ConfigError, match=says):
        kind(**settings)
