"""The inner loop: exactly what a plain PyTorch loop does with the same batches."""

import math

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Work
from atoll.core.serialization import pack, unpack
from atoll.models.gpt import GPT
from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import WSD, Constant, Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.torch_optimizers import Muon, TorchOptimizer
from atoll.replica.evaluator import Evaluator
from atoll.replica.forward_backward import two_examples
from atoll.replica.local_replica import LocalReplica, RoundStart
from atoll.testing.simulated_runs import Regression
from benchmarks.decoder_workload import DecoderWorkload, RepeatedBatch

WORKLOAD = Regression(hidden=6)


def work(start=0, shard=0):
    return Work(shard=shard, start=start, schedule=start, examples=1)


def torch_loop(optimizer_of, steps, clip_norm=None, lr=None):
    module = WORKLOAD.module()
    optimizer = optimizer_of(module.parameters())
    for step in range(steps):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.zero_grad()
        WORKLOAD.loss(module, WORKLOAD.batches.batch(0, step)).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
    return Tree.of(module)


@pytest.mark.parametrize(
    ("rule", "optimizer_of"),
    [
        (
            AdamW(lr=0.01, weight_decay=0.1, decay="all"),
            lambda p: torch.optim.AdamW(p, 0.01, (0.9, 0.95), weight_decay=0.1, fused=True),
        ),
        (Adam(lr=0.01), lambda p: torch.optim.Adam(p, 0.01, fused=True)),
        (SGD(lr=0.05), lambda p: torch.optim.SGD(p, 0.05)),
        (Momentum(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
        (Nesterov(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_training_is_a_plain_loop(rule, optimizer_of):
    replica = LocalReplica(WORKLOAD, optimizer=rule)
    replica.train(25, work())
    expected = torch_loop(optimizer_of, 25)
    if isinstance(
        rule, Adam | AdamW
    ):  # the fused kernel rounds the last few numbers of a tensor otherwise: those of a buffer are others
        assert float((replica.params().flat - expected.flat).abs().max()) < 1e-6
    else:
        assert replica.params().equal(expected)


def test_the_schedule_is_read_at_the_works_position():
    schedule = Cosine(lr=0.1, steps=30, warmup=5, floor=0.01)
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=schedule))
    for start in (0, 10, 20):
        replica.train(10, work(start))
    assert replica.params().equal(torch_loop(lambda p: torch.optim.SGD(p, 1.0), 30, lr=schedule))


def test_clipping_is_torchs_clipping():
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.05), clip_norm=0.1)
    replica.train(20, work())
    expected = torch_loop(lambda p: torch.optim.SGD(p, 0.05), 20, clip_norm=0.1)
    assert float((replica.params().flat - expected.flat).abs().max()) < 1e-6


@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_micro_batches_change_nothing_but_rounding(pieces):
    whole, cut = (LocalReplica(WORKLOAD, optimizer=AdamW(lr=0.01), micro_batches=n) for n in (1, pieces))
    one, two = whole.train(20, work()), cut.train(20, work())
    assert one.losses == pytest.approx(two.losses, rel=1e-4)
    assert one.tokens == two.tokens == 20 * 8
    assert float((whole.params().flat - cut.params().flat).abs().max()) < 1e-4


def test_gradients_add_up():
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.1))
    at = Tree.of(WORKLOAD.module())
    first, trained = replica.gradient(work(0), at=at)
    alone, _ = replica.gradient(work(1))
    expected = first.sum + alone.sum
    both, _ = replica.gradient(work(1), onto=first)
    assert (first.weight, both.weight) == (1.0, 2.0)
    assert (first.tokens, both.tokens) == (8, 16)
    assert both.sum.equal(expected)
    assert trained.losses == [pytest.approx(WORKLOAD.loss(WORKLOAD.module(), WORKLOAD.batches.batch(0, 0)).item())]
    assert isinstance(both, Gradient)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resumed_replica_has_the_bits_of_one_that_was_not_stopped(dropout):
    workload = Regression(hidden=6, dropout=dropout)
    straight = LocalReplica(workload, optimizer=AdamW(lr=0.01), seed=5)
    straight.train(20, work())
    first = LocalReplica(workload, optimizer=AdamW(lr=0.01), seed=5)
    first.train(12, work())
    second = LocalReplica(workload, optimizer=AdamW(lr=0.01), seed=99)
    second.load(first.params())
    second.restore(first.state())
    second.train(8, work(12))
    assert second.params().equal(straight.params())
    assert straight.traits.draws_randomness == (dropout > 0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [
        Muon(lr=0.01),
        TorchOptimizer(name="Adagrad", lr=0.01),
        TorchOptimizer(name="Adafactor", lr=0.01),
        TorchOptimizer(name="SGD", lr=0.01, options="momentum=0.9, dampening=0.5"),
    ],
    ids=repr,
)
def test_torchs_optimizers_resume_from_a_packed_checkpoint_bit_for_bit_and_their_moments_can_be_replaced(rule, dtype):
    tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
    decoder = DecoderWorkload(GPT(layers=1, width=16, heads=2, head_size=8), RepeatedBatch(tokens), 31)
    straight, resumed = (LocalReplica(decoder, optimizer=rule, clip_norm=0.5, dtype=dtype) for _ in range(2))
    straight.train(3, work())
    resumed.restore(unpack(pack(straight.state()), None))
    resumed.load(straight.params())
    for replica in (straight, resumed):
        replica.train(3, work(3))
    assert resumed.params().same_bits(straight.params())
    before = straight.moments()
    straight.load_moments({name: 2 * moment for name, moment in before.items()})
    after = straight.moments()
    assert before.keys() == after.keys()
    assert all((2 * moment).same_bits(after[name]) for name, moment in before.items())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_probe_uses_two_examples_and_the_plain_loss(micro_batches):
    class Counts(Regression):
        def loss(self, module, batch):
            seen.append(len(batch[0]))
            return super().loss(module, batch)

    seen = []
    compiled = Regression(hidden=6, dropout=0.5).loss
    replica = LocalReplica(Counts(hidden=6, dropout=0.5), optimizer=SGD(lr=0.1), loss=compiled, micro_batches=micro_batches)
    replica.train(2, work())
    assert replica.traits.draws_randomness
    assert seen == [2]


def test_a_replica_leaves_the_global_generator_alone():
    replica = LocalReplica(Regression(hidden=6, dropout=0.5), optimizer=SGD(lr=0.1))
    before = torch.get_rng_state()
    replica.train(3, work())
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_whose_tensors_do_not_all_count_examples_are_tried_whole():
    same_length, packed = {"x": torch.zeros(8, 3), "y": torch.zeros(8)}, {"tokens": torch.zeros(30), "ends": torch.zeros(4)}
    assert [part.shape[0] for part in two_examples(same_length).values()] == [2, 2]
    assert two_examples(packed) is packed
    assert len(two_examples(torch.zeros(1, 3))) == 1


def test_an_island_holds_weights_gradients_and_two_moments():
    replica = LocalReplica(WORKLOAD, optimizer=AdamW(lr=0.01))
    replica.train(1, work())
    params = replica.params().nbytes
    tensors = [tensor for kind in replica.tensors().values() for tensor in kind]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert 4 * params <= sum(held.values()) <= 4 * params + 16  # the step counters


def test_evaluating_changes_no_replica_and_disables_dropout():
    workload = Regression(hidden=6, dropout=0.5)
    evaluator, params = Evaluator(workload), Tree.of(workload.module())
    assert evaluator(params) == evaluator(params)


def test_one_compiled_loss_serves_every_replica_and_survives_loading():
    """With the tracing part of torch.compile alone: generating code would change last bits and take half a minute."""
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(WORKLOAD.loss, backend=backend)
    plain = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.05))
    for _ in range(2):
        replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.05), loss=compiled)
        replica.load(Tree.of(WORKLOAD.module()))
        plain.load(Tree.of(WORKLOAD.module()))
        replica.train(5, work())
        plain.train(5, work())
        assert replica.params().equal(plain.params())
    assert len(frames) == 1


def test_decay_spares_vectors_unless_all_is_asked_for():
    """One step from large weights: what decays shrinks by lr times decay beyond what Adam moves, which is at most lr."""
    big = Tree.of(WORKLOAD.module()) * 0.0 + 100.0
    moved = {}
    for decay in ("matrices", "all"):
        replica = LocalReplica(WORKLOAD, optimizer=AdamW(lr=0.01, weight_decay=0.5, decay=decay))
        replica.load(big)
        replica.train(1, work())
        moved[decay] = {name: float((big[name] - tensor).abs().max()) for name, tensor in replica.params().items()}
    assert moved["matrices"]["0.weight"] > 0.4
    assert moved["matrices"]["0.bias"] < 0.02
    assert moved["all"]["0.bias"] > 0.4


def test_a_batch_cannot_be_cut_into_more_pieces_than_it_has_examples():
    with pytest.raises(ConfigError, match=r"holds 8 examples.*cut into 9.*train.micro_batches"):
        LocalReplica(WORKLOAD, optimizer=SGD(lr=0.1), micro_batches=9).train(1, work())


def test_a_workload_that_returns_one_module_twice_is_rejected():
    module = WORKLOAD.module()

    class Careless(Regression):
        def module(self):
            return module

    LocalReplica(Careless(), optimizer=SGD(lr=0.1))
    with pytest.raises(ConfigError, match=r"must return a new module"):
        LocalReplica(Careless(), optimizer=SGD(lr=0.1))


# ----------------------------------------------------------------------------------------------- habits of the authors' toy


@pytest.mark.parametrize("rule", [AdamW(lr=0.01), Adam(lr=0.01), Momentum(lr=0.05, momentum=0.9)], ids=lambda r: type(r).__name__)
def test_a_fresh_optimizer_makes_every_round_that_of_a_new_replica(rule):
    old = LocalReplica(WORKLOAD, optimizer=rule, round_start=RoundStart(fresh_optimizer=True))
    keeping = LocalReplica(WORKLOAD, optimizer=rule)
    for round in range(3):
        new = LocalReplica(WORKLOAD, optimizer=rule)
        new.load(old.params())
        for replica in (old, new, keeping):
            replica.train(5, work(5 * round))
        assert old.params().equal(new.params())
    assert not keeping.params().equal(old.params()), "moments matter here, so that forgetting them shows"


@pytest.mark.parametrize("settings", [RoundStart(fresh_optimizer=True), RoundStart(peak_first=True)], ids=str)
def test_a_round_that_trains_in_parts_starts_once(settings):
    rule = AdamW(lr=Cosine(lr=0.1, steps=12, floor=0.01))
    whole, parts = (LocalReplica(WORKLOAD, optimizer=rule, round_start=settings) for _ in range(2))
    for start in (0, 6):
        whole.train(6, work(start))
        for done, steps in ((0, 1), (1, 3), (4, 2)):
            parts.train(steps, work(start).after(done))
    assert parts.params().equal(whole.params())


def test_an_island_that_takes_only_the_last_steps_of_a_round_starts_with_a_fresh_optimizer():
    old, new = (LocalReplica(WORKLOAD, optimizer=AdamW(lr=0.01), round_start=RoundStart(fresh_optimizer=True)) for _ in range(2))
    old.train(6, work())
    new.load(old.params())
    for replica in (old, new):
        replica.train(2, work(6).after(4))
    assert old.params().equal(new.params())


def test_a_fresh_optimizer_saves_no_moments_and_resumes_bit_for_bit():
    straight, first, second = (
        LocalReplica(WORKLOAD, optimizer=AdamW(lr=0.01), round_start=RoundStart(fresh_optimizer=True)) for _ in range(3)
    )
    straight.train(5, work())
    straight.train(5, work(5))
    first.train(5, work())
    assert not any(first.state()["optimizer"])
    second.load(first.params())
    second.restore(first.state())
    second.train(5, work(5))
    assert second.params().equal(straight.params())


def test_with_peak_first_a_round_begins_at_the_highest_rate_and_continues_along_the_schedule():
    """By hand: the first step of every round of ten at 0.1, the k-th after it at the schedule's position of the round plus k."""
    schedule = Cosine(lr=0.1, steps=30, floor=0.01)
    rates = [0.1 if step % 10 == 0 else schedule(step) for step in range(30)]
    assert rates[10] > schedule(10)
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=schedule), round_start=RoundStart(peak_first=True))
    for start in (0, 10, 20):
        replica.train(10, work(start))
    assert replica.params().equal(torch_loop(lambda p: torch.optim.SGD(p, 1.0), 30, lr=lambda step: rates[step]))


def test_the_peak_is_the_schedules_highest_rate_also_while_it_warms_up_and_a_constant_rate_is_its_own():
    for schedule in (Cosine(lr=0.1, steps=20, warmup=10), WSD(lr=0.1, steps=20, warmup=5, decay=5), Constant(lr=0.1), 0.1):
        one = LocalReplica(WORKLOAD, optimizer=SGD(lr=schedule), round_start=RoundStart(peak_first=True))
        one.train(1, work())
        assert one.params().equal(torch_loop(lambda p: torch.optim.SGD(p, 0.1), 1))


# -------------------------------------------------------------------------------------------------- pieces, and what they weigh


def piece(start, pieces):
    return Work(shard=0, start=start, schedule=0, examples=1, pieces=pieces)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_the_pieces_of_a_batch_add_up_to_the_whole_of_it(pieces):
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.1))
    for batch in range(3):
        whole, trained = replica.gradient(work(batch))
        total, losses = None, []
        for number in range(pieces):
            total, part = replica.gradient(piece(batch * pieces + number, pieces), onto=total)
            losses += part.losses
        assert torch.allclose(total.sum.flat / total.weight, whole.sum.flat, atol=1e-6)
        assert (total.weight, total.tokens) == (pieces, whole.tokens)
        assert sum(losses) / pieces == pytest.approx(trained.losses[0], rel=1e-5)
        assert not trained.moved
    assert replica.steps_taken == 6


def test_gradients_are_added_in_place_and_borrowed_ones_are_left_alone():
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.1))
    first, _ = replica.gradient(work(0))
    bits = first.sum.digest()
    both, _ = replica.gradient(work(1), onto=first._replace(sum=first.sum.borrow()))
    assert first.sum.digest() == bits
    place = first.sum.flat.data_ptr()
    again, _ = replica.gradient(work(1), onto=first)
    assert again.sum.flat.data_ptr() == place
    assert again.sum.equal(both.sum)
    assert first.sum.deleted


def test_a_gradient_is_taken_at_the_replicas_weights_unless_others_are_given():
    replica = LocalReplica(WORKLOAD, optimizer=SGD(lr=0.1))
    other = Tree.of(WORKLOAD.module()) * 2.0
    at_other, _ = replica.gradient(work(), at=other)
    stays, _ = replica.gradient(work())
    assert at_other.sum.equal(stays.sum)
    assert replica.params().equal(other)


class PaddedBatches:
    """Batches of 8 whose last examples are padding: `real` has the number of real examples of each batch."""

    num_shards = 1

    def __init__(self, *real):
        self.real = real

    def examples(self, shard):
        return 8

    def batch(self, shard, position):
        inputs, targets = WORKLOAD.batches.batch(shard, position)
        return {"inputs": inputs, "targets": targets, "real": torch.arange(8) < self.real[position]}

    def tokens(self, batch):
        return int(batch["real"].sum())


class Padded(Regression):
    """The mean over what is real: not a number where nothing is."""

    def module(self):
        return WORKLOAD.module()

    def loss(self, module, batch):
        error = module(batch["inputs"]).squeeze(1) - batch["targets"]
        return (error.square() * batch["real"]).sum() / batch["real"].sum()


def slope_of(batches):
    """Of the mean over all real examples of these batches, by plain torch."""
    module = WORKLOAD.module()
    parts = [{name: part[batch["real"]] for name, part in batch.items()} for batch in batches]
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("inputs", "targets")}
    (module(joined["inputs"]).squeeze(1) - joined["targets"]).square().mean().backward()
    return Tree.of({name: dict(module.named_parameters())[name].grad for name in Tree.of(module)})


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("pieces", [1, 2])
def test_weighed_by_tokens_padded_batches_equal_one_batch_without_padding(pieces, micro_batches):
    """Also where a piece, or one of its micro-batches, has nothing but padding."""
    batches = PaddedBatches(3, 8, 0, 5)
    replica = LocalReplica(Padded(batches), optimizer=SGD(lr=0.1), micro_batches=micro_batches)
    total = None
    for number in range(4 * pieces):
        total, trained = replica.gradient(piece(number, pieces), onto=total, weigh="tokens")
        assert math.isfinite(trained.losses[0])
    assert (total.weight, total.tokens) == (16.0, 16)
    expected = slope_of([batches.batch(0, number) for number in range(4)])
    assert torch.allclose(total.sum.flat / total.weight, expected.flat, atol=1e-6)


def test_micro_batches_of_a_padded_batch_are_weighted_by_their_tokens():
    batches = PaddedBatches(5)
    for pieces in (1, 2, 4, 8):
        replica = LocalReplica(Padded(batches), optimizer=SGD(lr=0.1), micro_batches=pieces)
        gradient, _ = replica.gradient(work())
        assert torch.allclose(gradient.sum.flat, slope_of([batches.batch(0, 0)]).flat, atol=1e-6)


def test_a_batch_of_padding_alone_adds_nothing_and_weighs_nothing():
    replica = LocalReplica(Padded(PaddedBatches(0)), optimizer=SGD(lr=0.1))
    gradient, trained = replica.gradient(work(), weigh="tokens")
    assert not gradient.sum.flat.any()
    assert (gradient.weight, gradient.tokens, trained.losses) == (0.0, 0, [0.0])


def test_borrowed_weights_are_the_present_ones_without_a_copy():
    replica = LocalReplica(Regression(hidden=3), optimizer=SGD(lr=0.1))
    assert replica.borrowed().equal(replica.params())
    assert replica.borrowed().flat.data_ptr() == replica.borrowed().flat.data_ptr() != replica.params().flat.data_ptr()
    origin = replica.params()
    replica.train(2, Work(shard=0, start=0, schedule=0, examples=1))
    assert (origin - replica.borrowed()).equal(origin - replica.params())
    assert replica.borrowed().equal(replica.params()), "reading it has changed nothing"
