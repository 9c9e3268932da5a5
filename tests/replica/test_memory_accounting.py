"""Memory accounting finds every held tensor once, and the paper's formulas use the run's own dtypes."""

from dataclasses import dataclass

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Work
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.local_replica import LocalReplica, TrainJob
from atoll.replica.memory_accounting import STATE, Storages, add_replica, add_storages, by_kind, paper_formula, total_bytes
from atoll.replica.vmap_stack import VmapStack
from atoll.testing.simulated_runs import Regression
from benchmarks.decoder_workload import DecoderWorkload


def tree(count=10):
    return Tree.of({"w": torch.zeros(count)})


@dataclass
class Record:
    params: Tree
    rest: object


def test_a_storage_counts_once_with_its_first_kind():
    whole, holding = tree(), Storages()
    add_storages(holding, [whole, whole.slice(0, 3)], "gradients")
    add_storages(holding, {"again": (whole["w"],)}, "communication")
    assert list(holding.values()) == [("gradients", 40)]


def test_a_view_counts_its_whole_storage():
    holding = Storages()
    add_storages(holding, tree().slice(0, 1), "communication")
    assert total_bytes(holding) == 40


def test_gradients_are_known_by_their_type_and_a_states_own_by_their_names():
    holding = Storages()
    add_storages(holding, Record(tree(1), (Gradient(tree(2), 1.0, 1), tree(3))), "communication", frozenset({"params"}))
    assert sorted(holding.values()) == [("communication", 12), ("gradients", 8), (STATE, 4)]


def test_donated_buffers_are_not_counted():
    given, holding = tree(), Storages()
    given.donate()
    add_storages(holding, [given, None, 3, "text"], "communication")
    assert not holding


def test_an_island_that_left_a_stack_holds_its_own_gradients_alone():
    workload = DecoderWorkload.of(GPT(layers=1, width=8, heads=1, head_size=8), vocab_size=13)
    left, never = (LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(2))
    job = TrainJob(left, 1, Work(shard=0, start=0, schedule=0, examples=1))
    stack = VmapStack(left, 1, workload.loss, compiled=False)
    stack.train([job])
    stacked, own, expected = Storages(), Storages(), Storages()
    add_replica(stacked, left)
    for replica, holding in ((left, own), (never, expected)):
        replica.train(job.steps, job.work)
        add_replica(holding, replica)
    assert by_kind(stacked, trains=True) == by_kind(own, trains=True) == by_kind(expected, trains=True)


@pytest.mark.parametrize(("trains", "kind"), [(False, "optimizer"), (True, "copies")])
def test_a_state_is_the_optimizers_or_a_copy_where_replicas_train(trains, kind):
    assert by_kind({1: (STATE, 8), 2: ("parameters", 4)}, trains=trains)[kind] == 8


@pytest.mark.parametrize(
    ("algorithm", "half", "single"),
    [
        (DDP(optimizer=AdamW()), "2+2+12", "4+4+12"),
        (ZeRO1(optimizer=SGD(lr=0.1)), "2+2+4/3", "4+4+4/3"),
        (ACCO(optimizer=AdamW()), "2+2+2+12/3", "4+4+4+12/3"),
        (DiLoCo(inner_steps=1), "2+2+8+2*2", "4+4+4+2*4"),
    ],
    ids=["DDP", "ZeRO1 with SGD", "ACCO", "DiLoCo with Nesterov inside"],
)
def test_the_formulas_have_the_runs_own_widths(algorithm, half, single):
    for text, dtype in ((half, torch.bfloat16), (single, torch.float32)):
        paper = paper_formula(algorithm, LocalReplica(Regression(dtype=dtype), optimizer=Nesterov()), 3)
        assert paper.text == text
        assert paper.per_param == eval(text)


def test_feedback_adds_four_bytes_for_what_the_codec_left_out():
    replica = LocalReplica(Regression(), optimizer=Nesterov())
    plain, fed, bare = (
        paper_formula(DiLoCo(inner_steps=2, codec=codec, feedback=feedback), replica, 3)
        for codec, feedback in (("fp32", 1.0), ("int4", 0.5), ("int4", 0.0))
    )
    assert (fed.text, fed.per_param) == (f"{plain.text}+4", plain.per_param + 4)
    assert bare == plain


def test_an_algorithm_that_the_paper_lacks_has_no_formula():
    assert paper_formula(AsyncLocalSGD(inner_steps=1), LocalReplica(Regression(), optimizer=SGD(lr=0.1)), 3) is None
