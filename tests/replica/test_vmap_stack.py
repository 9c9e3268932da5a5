"""A stack computes for each island what it would compute by itself, within rounding."""

from collections import UserDict

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.models.gpt import GPT
from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.torch_optimizers import TorchOptimizer
from atoll.replica.local_replica import GradientJob, LocalReplica, RoundStart, TrainJob
from atoll.replica.vmap_stack import RaggedBatches, VmapStack, why_not_stackable
from benchmarks.decoder_workload import DecoderWorkload, RepeatedBatch

torch.set_num_threads(1)

MODEL = GPT(layers=2, width=16, heads=2, head_size=8)
RULES = [AdamW(lr=0.01, weight_decay=0.3), Adam(lr=0.01), SGD(lr=0.1), Nesterov(lr=0.05), TorchOptimizer(name="NAdam", lr=0.01)]
CLOSE = {"rtol": 1e-3, "atol": 2e-5}


class Positions(RepeatedBatch):
    """Other tokens at each position."""

    def batch(self, shard: int, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(position)
        return torch.randint(31, self.tokens_of_a_batch.shape, generator=generator)


def workload(batches: type[RepeatedBatch] = Positions) -> DecoderWorkload:
    return DecoderWorkload(MODEL, batches(torch.zeros(2, 9, dtype=torch.int64)), 31)


def replicas(count: int, rule: object = RULES[0], **options: object) -> list[LocalReplica]:
    """Replicas with different weights."""
    made = [LocalReplica(workload(), optimizer=rule, clip_norm=0.5, **options) for _ in range(count)]
    for number, replica in enumerate(made):
        params = replica.params()
        replica.load(
            params + 0.02 * Tree(params.layout, torch.randn(params.numel, generator=torch.Generator().manual_seed(number)))
        )
    return made


def work(shard: int, start: int = 0, schedule: int = 0, pieces: int = 1) -> Work:
    return Work(shard=shard, start=start, schedule=schedule, examples=1, pieces=pieces)


def stack(like: LocalReplica, rows: int) -> VmapStack:
    return VmapStack(like, rows, workload().loss, compiled=False)


def close(one: Tree, two: Tree) -> bool:
    return torch.allclose(one.flat, two.flat, **CLOSE)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_stack_trains_each_island_as_it_would_train_by_itself(rule):
    alone, together = replicas(3, rule), replicas(3, rule)
    rows = stack(together[0], 4)
    for start in (0, 4):  # twice: moments are carried over
        expected = [replica.train(4, work(0, start + number)) for number, replica in enumerate(alone)]
        found = rows.train([TrainJob(replica, 4, work(0, start + number)) for number, replica in enumerate(together)])
        for one, two in zip(expected, found, strict=True):
            assert two.losses == pytest.approx(one.losses, rel=1e-4)
            assert two.tokens == one.tokens
    for one, two in zip(alone, together, strict=True):
        assert close(one.params(), two.params())
        assert one.steps_taken == two.steps_taken == 8
    assert not close(together[0].params(), together[1].params())


def test_stacked_islands_may_take_fewer_steps_and_have_other_rates():
    rule = AdamW(lr=Cosine(lr=0.02, steps=10, warmup=2))
    alone, together = replicas(3, rule), replicas(3, rule)
    todo = [(5, work(0, 0, schedule=0)), (2, work(0, 3, schedule=4)), (3, work(0, 1, schedule=4))]
    expected = [replica.train(steps, at) for replica, (steps, at) in zip(alone, todo, strict=True)]
    found = stack(together[0], 3).train([TrainJob(r, steps, at) for r, (steps, at) in zip(together, todo, strict=True)])
    assert [len(trained.losses) for trained in found] == [5, 2, 3]
    for one, two, a, b in zip(expected, found, alone, together, strict=True):
        assert two.losses == pytest.approx(one.losses, rel=1e-4)
        assert close(a.params(), b.params())


def test_moments_continue_between_stacked_and_single_steps():
    alone, mixed = replicas(2), replicas(2)
    for replica in alone:
        replica.train(6, work(0))
    rows = stack(mixed[0], 2)
    mixed[0].train(2, work(0))  # by itself, then stacked with one that has no moments yet, then by itself again
    mixed[1].train(2, work(0))
    rows.train([TrainJob(replica, 2, work(0, 2)) for replica in mixed])
    for replica in mixed:
        replica.train(2, work(0, 4))
    for one, two in zip(alone, mixed, strict=True):
        assert close(one.params(), two.params())


def test_fresh_moments_are_fresh_in_a_stack_too():
    alone, together = (
        replicas(2, round_start=RoundStart(fresh_optimizer=True)),
        replicas(2, round_start=RoundStart(fresh_optimizer=True)),
    )
    rows = stack(together[0], 2)
    for start in (0, 3):
        for replica in alone:
            replica.train(3, work(0, start))
        rows.train([TrainJob(replica, 3, work(0, start)) for replica in together])
    assert close(alone[1].params(), together[1].params())


@pytest.mark.parametrize("pieces", [1, 2])
def test_gradients_are_those_of_each_island_added_onto_what_there_was(pieces):
    alone, together = replicas(3), replicas(3)
    rows, at = stack(together[0], 4), alone[2].params()
    before: list[object] = [None] * 3
    stacked: list[object] = [None] * 3
    for start in range(3):
        asks = [GradientJob(r, work(0, start + n, pieces=pieces), at, stacked[n], "tokens", False) for n, r in enumerate(together)]
        for number, replica in enumerate(alone):
            ask = work(0, start + number, pieces=pieces)
            before[number], _ = replica.gradient(ask, at=at, onto=before[number], weigh="tokens")
        stacked = [gradient for gradient, _ in rows.gradients(asks)]
    for one, two in zip(before, stacked, strict=True):
        assert close(one.sum, two.sum)
        assert (one.weight, one.tokens) == (two.weight, two.tokens)
    assert together[0].params().equal(at)


class Shorter(Positions):
    """Fewer tokens from the third batch on, and in shard 1 also in the second."""

    def batch(self, shard: int, position: int) -> torch.Tensor:
        return super().batch(shard, position)[:, : 7 if position + shard > 2 else 9]


@pytest.mark.parametrize("shard", [0, 1])
def test_ragged_batches_stop_a_stack_after_the_steps_before_them(shard):
    """Whether the batches of two islands differ, or those of two steps."""
    alone, together = (
        [
            LocalReplica(workload(Shorter), optimizer=RULES[0], round_start=RoundStart(fresh_optimizer=True, peak_first=True))
            for _ in range(2)
        ]
        for _ in range(2)
    )
    asked = [(replica, work(number * shard)) for number, replica in enumerate(together)]
    with pytest.raises(RaggedBatches, match=r"shapes .*\(2, 7\).*\(2, 9\)") as seen:
        stack(together[0], 2).train([TrainJob(replica, 5, what) for replica, what in asked])
    rest = [
        replica.train(5, what, after=len(before.losses)) for (replica, what), before in zip(asked, seen.value.results, strict=True)
    ]
    for number, replica in enumerate(alone):
        whole, before = replica.train(5, work(number * shard)), seen.value.results[number]
        assert len(before.losses) == 3 - shard
        assert [*before.losses, *rest[number].losses] == pytest.approx(whole.losses, rel=1e-5)
        assert before.tokens + rest[number].tokens == whole.tokens
        assert close(replica.params(), together[number].params())
        assert replica.steps_taken == together[number].steps_taken == 5


def test_gradients_of_batches_that_differ_in_shape_are_refused_before_anything_is_counted():
    two = [LocalReplica(workload(Shorter), optimizer=RULES[0]) for _ in range(2)]
    asks = [GradientJob(replica, work(number, 2), None, None, "batches", False) for number, replica in enumerate(two)]
    with pytest.raises(RaggedBatches):
        stack(two[0], 2).gradients(asks)
    assert [replica.steps_taken for replica in two] == [0, 0]


class Dropping(DecoderWorkload):
    """A loss that draws."""

    def loss(self, module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(module, batch) * torch.rand(())


def test_replicas_that_cannot_be_stacked_are_reported():
    assert why_not_stackable(LocalReplica(workload(), optimizer=RULES[0])) == ""
    assert "micro-batches" in why_not_stackable(LocalReplica(workload(), optimizer=RULES[0], micro_batches=2))
    assert "master weights" in why_not_stackable(LocalReplica(workload(), optimizer=RULES[0], dtype=torch.bfloat16))
    drops = Dropping(MODEL, Positions(torch.zeros(2, 9, dtype=torch.int64)), 31)
    assert "random" in why_not_stackable(LocalReplica(drops, optimizer=RULES[0]))


class Besides(torch.nn.Module):
    """A decoder with an unused parameter and buffers."""

    def __init__(self, decoder: torch.nn.Module, counts: bool, persistent: bool) -> None:
        super().__init__()
        self.decoder, self.unused = decoder, torch.nn.Parameter(torch.ones(3, 3))
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self._counts = counts

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self._counts:
            self.seen += 1
        return self.decoder.loss(batch)


class BesidesBatches(DecoderWorkload):
    counts, persistent = False, True

    def module(self) -> Besides:
        return Besides(super().module(), self.counts, self.persistent)

    def loss(self, module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module.loss(batch)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_stay_are_stacked_and_buffers_that_change_are_not(persistent):
    class Stays(BesidesBatches):
        pass

    class Counts(BesidesBatches):
        counts = True

    Stays.persistent = Counts.persistent = persistent
    batches = Positions(torch.zeros(2, 9, dtype=torch.int64))
    assert why_not_stackable(LocalReplica(Stays(MODEL, batches, 31), optimizer=RULES[0])) == ""
    counting = LocalReplica(Counts(MODEL, batches, 31), optimizer=RULES[0])
    assert "changes its buffers" in why_not_stackable(counting)
    assert float(counting.weights.module.seen) == 0, "finding out leaves no trace"


def test_a_parameter_that_the_loss_does_not_use_is_stepped_as_by_an_island_alone():
    batches = Positions(torch.zeros(2, 9, dtype=torch.int64))
    one, two = (LocalReplica(BesidesBatches(MODEL, batches, 31), optimizer=RULES[0]) for _ in range(2))
    one.train(2, work(0))
    VmapStack(two, 2, BesidesBatches(MODEL, batches, 31).loss, compiled=False).train([TrainJob(two, 2, work(0))])
    assert close(one.params(), two.params())
    assert not torch.equal(two.params()["unused"], torch.ones(3, 3)), "it decays"


class Wrapped(DecoderWorkload):
    """Batches as the transformers library has them: something like a dict, and no dict."""

    def loss(self, module: torch.nn.Module, batch: UserDict) -> torch.Tensor:
        return super().loss(module, batch["ids"])


class WrappedPositions(Positions):
    def batch(self, shard: int, position: int) -> UserDict:
        return UserDict(ids=super().batch(shard, position))

    def tokens(self, batch: UserDict) -> int:
        return super().tokens(batch["ids"])


def test_batches_may_be_any_mapping():
    alone, together = replicas(2), replicas(2)
    wrapped = Wrapped(MODEL, WrappedPositions(torch.zeros(2, 9, dtype=torch.int64)), 31)
    for replica in together:
        replica.batches = wrapped.batches
    VmapStack(together[0], 2, wrapped.loss, compiled=False).train([TrainJob(replica, 2, work(0)) for replica in together])
    for one, two in zip(alone, together, strict=True):
        one.train(2, work(0))
        assert close(one.params(), two.params())
