"""Runs on real processes have the simulator's weights, losses, tokens and bytes."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.events import Compared, Computed, Evaluated, Exchanged, RoundFinished
from atoll.optim.adam import AdamW
from atoll.optim.codecs import CODECS
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import Nesterov
from atoll.optim.torch_optimizers import Muon, TorchOptimizer
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate
from tests.process_pool import run_on_processes

RULE = AdamW(lr=0.05)
ALGORITHMS = [
    DDP(optimizer=RULE, accumulation=2),
    ZeRO1(optimizer=RULE, clip_norm=0.5),
    DiLoCo(inner_steps=3),
    DiLoCo(inner_steps=3, merge="disjoint", moments="averaged"),
    DiLoCo(inner_steps=3, moments="averaged", moment_rounds=(2, 4), weighting="tokens"),
    Eager(inner_steps=2),
    ACCO(optimizer=RULE, pieces_per_half=2),
    ACCO(optimizer=RULE, wire="bf16", sums="fp32"),
    DPU(optimizer=RULE, warmup=1),
    WP(optimizer=RULE, warmup=1),
]
FLIGHTS = Streaming(inner_steps=6, fragments=3, overlap=3, mixing=0.25)  # a fragment leaves before the one before it arrives
ENCODED = [
    FLIGHTS,
    replace(FLIGHTS, codec="int4"),
    DiLoCo(inner_steps=2, codec="int8"),
    DiLoCo(inner_steps=2, codec="topk", feedback=0.95),
    *(DiLoCo(inner_steps=2, codec=name) for name in ("bf16", "bf16-stochastic", "int4", "fp4", "int2")),
    Streaming(inner_steps=4, fragments=2, overlap=0, codec="fp4"),
]
SENT = ("sent_bytes_per_island", "control_bytes_per_island")
SAME = ("rounds", "outer_steps", "steps", "tokens", "local_updates", *SENT, "val_loss", "digest")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_weights_losses_tokens_and_bytes_are_the_simulators(four, size):
    # Large enough for whole SIMD vectors in every slice: torch's kernels round differently at the ends of a buffer.
    workload = Regression(hidden=150, batches=RegressionBatches(num_shards=size))
    check_as_simulated(four, size, workload, [*ALGORITHMS, *ENCODED])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_strided_fragments_have_the_simulators_weights(four, codec):
    check_as_simulated(four, 3, Layered(), [replace(FLIGHTS, split="strided", codec=codec)])


def test_every_codec_has_a_run():
    assert {algorithm.codec for algorithm in ENCODED} == CODECS.keys()


def check_as_simulated(four, size, workload, algorithms):
    for algorithm in algorithms:
        steps = 4 * algorithm.steps_per_round
        expected = simulate(algorithm, steps=steps, cluster=Cluster(islands=size), workload=workload)
        first, *rest = four.run(run_on_processes, algorithm, workload, steps, size=size)
        assert first.params.equal(expected.params), algorithm
        assert all(other.params.equal(expected.params) and other.finished is None for other in rest)
        for name in SAME:
            assert getattr(first.finished, name) == getattr(expected.finished, name), (algorithm, name)
        losses = [[e.loss for e in events if isinstance(e, Evaluated)] for events in (first.events, expected.events)]
        assert losses[0] == losses[1], algorithm
        for kind in (Computed, Exchanged, RoundFinished):
            assert len([e for e in first.events if isinstance(e, kind)]) == len(expected.of(kind)), (algorithm, kind)
        compared = [event for event in first.events if isinstance(event, Compared)]
        for one, two in zip(compared, expected.of(Compared), strict=True):
            assert one.round == two.round
            assert similarity(one) == pytest.approx(similarity(two), rel=1e-5, abs=1e-5), algorithm


def similarity(event):
    """The figures of a comparison. Deltas of zeros have no cosine."""
    return [*event.norms, event.mean_norm, *(number for number in (event.cosine_mean, event.cosine_std) if number is not None)]


def test_one_fragment_without_overlap_is_diloco_to_the_bit(four):
    workload, outer = Regression(hidden=150), Nesterov(lr=0.7, momentum=0.9)
    alone = Streaming(inner_steps=3, fragments=1, overlap=0, outer=outer)
    streaming, diloco = (
        four.run(run_on_processes, algorithm, workload, 12, size=2)[0] for algorithm in (alone, DiLoCo(inner_steps=3, outer=outer))
    )
    assert streaming.params.same_bits(diloco.params)


@pytest.mark.parametrize("wire", ["own", "fp32"])
@pytest.mark.parametrize("kind", [ZeRO1, ACCO, DPU, WP])
def test_a_bfloat16_model_has_the_simulators_master_weights(four, kind, wire):
    workload, algorithm = Regression(hidden=150, dtype=torch.bfloat16), kind(optimizer=RULE, wire=wire)
    expected = simulate(algorithm, steps=4, cluster=Cluster(islands=2), workload=workload)
    first, _ = four.run(run_on_processes, algorithm, workload, 4, size=2)
    assert first.params.flat.dtype == torch.float32
    assert first.params.equal(expected.params)
    assert [getattr(first.finished, name) for name in SAME] == [getattr(expected.finished, name) for name in SAME]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_shard_shared_with_a_slower_rank_is_read_as_in_the_simulator(four, devices):
    workload = Regression(hidden=3, batches=RegressionBatches(num_shards=1, shard_examples=256))
    cluster = Cluster(islands=2, devices_per_island=devices, step_time_s=(1.0, 5.0))
    inner = ACCO(optimizer=RULE, pieces_per_half=2)
    algorithm, inside = (inner, None) if devices == 1 else (DiLoCo(inner_steps=2), inner)
    expected = simulate(algorithm, steps=4, cluster=cluster, workload=workload, inside=inside)
    first, *_ = four.run(run_on_processes, algorithm, workload, 4, None, inside, devices, size=2 * devices)
    assert first.params.equal(expected.params)
    assert [getattr(first.finished, name) for name in SAME] == [getattr(expected.finished, name) for name in SAME]


def inner_id(value):
    return value.name if isinstance(value, TorchOptimizer) else type(value).__name__


@pytest.mark.parametrize("inner", [Muon(lr=0.02, adamw=("2",)), TorchOptimizer(name="NAdam", lr=0.01)], ids=inner_id)
def test_other_inner_optimizers_have_the_simulators_weights(four, inner):
    algorithm, workload = DiLoCo(inner_steps=3, moments="averaged", moment_rounds=(1, 2)), Regression(hidden=16)
    expected = simulate(algorithm, steps=12, cluster=Cluster(islands=3), workload=workload, inner=inner)
    first, *rest = four.run(run_on_processes, algorithm, workload, 12, inner, size=3)
    assert all(one.params.equal(expected.params) for one in (first, *rest))
    assert [getattr(first.finished, name) for name in SAME] == [getattr(expected.finished, name) for name in SAME]


INSIDE = [DDP(optimizer=RULE), ZeRO1(optimizer=RULE), ACCO(optimizer=RULE)]
TWO_LEVELS = [(DiLoCo(inner_steps=2), inside, dtype) for inside in INSIDE for dtype in (torch.float32, torch.bfloat16)]


def two_levels_id(value):
    return str(value).rpartition(".")[2] if isinstance(value, torch.dtype) else type(value).__name__


@pytest.mark.parametrize(
    ("algorithm", "inside", "dtype"), [*TWO_LEVELS, (Eager(inner_steps=2), INSIDE[-1], torch.float32)], ids=two_levels_id
)
def test_islands_of_two_devices_have_the_simulators_weights(four, algorithm, inside, dtype):
    workload = Regression(hidden=3, dtype=dtype)
    cluster = Cluster(islands=2, devices_per_island=2)
    expected = simulate(algorithm, steps=6, cluster=cluster, workload=workload, inside=inside)
    first, *_ = four.run(run_on_processes, algorithm, workload, 6, None, inside, 2)
    assert first.params.equal(expected.params)
    for name in (*SAME, "inside_bytes_per_device", "inside_dropped_tokens"):
        assert getattr(first.finished, name) == getattr(expected.finished, name), name


@pytest.mark.parametrize("inside", [kind(optimizer=RULE) for kind in (DDP, ZeRO1, FSDP)], ids=lambda a: type(a).__name__)
def test_two_devices_train_as_one_with_twice_the_batch_within_rounding(fresh_four, inside):
    halves, steps = RegressionBatches(num_shards=4, batch_size=4, shard_examples=32), 6
    together, *_ = fresh_four.run(
        run_on_processes, DiLoCo(inner_steps=3), Regression(hidden=3, batches=halves), steps, None, inside, 2
    )
    doubled = Regression(hidden=3, batches=Doubled(halves))
    alone, *_ = fresh_four.run(run_on_processes, DiLoCo(inner_steps=3), doubled, steps, RULE, size=2)
    torch.testing.assert_close(together.params.flat, alone.params.flat, rtol=1e-5, atol=1e-6)
    assert together.finished.sent_bytes_per_island == alone.finished.sent_bytes_per_island
    assert together.finished.tokens == alone.finished.tokens


def test_fsdp2_clips_accumulates_and_follows_the_schedule_as_zero1_does(fresh_four):
    rule = AdamW(lr=Cosine(lr=0.2, warmup=2, steps=6), betas=(0.5, 0.9))
    settings = {"optimizer": rule, "accumulation": 2, "clip_norm": 0.3}
    workload, outer = Regression(hidden=3, batches=RegressionBatches(batch_size=4)), DiLoCo(inner_steps=3)
    sharded, *_ = fresh_four.run(run_on_processes, outer, workload, 6, None, FSDP(**settings), 2)
    plain, *_ = fresh_four.run(run_on_processes, outer, workload, 6, None, ZeRO1(**settings), 2)
    torch.testing.assert_close(sharded.params.flat, plain.params.flat, rtol=1e-5, atol=1e-6)
    other, *_ = fresh_four.run(run_on_processes, outer, workload, 6, None, ZeRO1(**{**settings, "clip_norm": None}), 2)
    assert not torch.allclose(sharded.params.flat, other.params.flat, rtol=1e-3), "else the test does not see clipping"


@dataclass(frozen=True)
class Layered(Regression):
    """Three numbered layers between an input and an output layer."""

    def module(self):
        torch.manual_seed(3)
        layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
        return nn.Sequential(OrderedDict(enter=nn.Linear(self.batches.dimensions, 40), layers=layers, leave=nn.Linear(40, 1)))


@dataclass(frozen=True)
class Doubled:
    """Two shards as one, with the batches of both."""

    halves: RegressionBatches

    @property
    def num_shards(self):
        return self.halves.num_shards // 2

    def examples(self, shard):
        return 2 * self.halves.shard_examples

    def batch(self, shard, position):
        both = [self.halves.batch(2 * shard + half, position) for half in (0, 1)]
        return tuple(torch.cat(parts) for parts in zip(*both, strict=True))

    def tokens(self, batch):
        return len(batch[0])

    def all_examples(self):
        return self.halves.all_examples()

    @property
    def dimensions(self):
        return self.halves.dimensions
