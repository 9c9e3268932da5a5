"""Islands with different numbers of batches finish without a deadlock, and so do islands whose peer raises."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.testing.simulated_runs import Regression
from tests.process_pool import outcomes

WORKLOAD = Regression(hidden=3)
LIMIT_S = 30.0
ALGORITHM_STEPS = [
    DDP(optimizer=AdamW(lr=0.1), accumulation=2),
    ZeRO1(optimizer=AdamW(lr=0.1), accumulation=2, clip_norm=0.5),
    ACCO(optimizer=AdamW(lr=0.1), clip_norm=0.5),
    ACCO(optimizer=AdamW(lr=0.1), batch="free"),
    DPU(optimizer=AdamW(lr=0.1), warmup=1),
    WP(optimizer=AdamW(lr=0.1)),
]


def backward(model, step):
    WORKLOAD.loss(model, WORKLOAD.batches.batch(dist.get_rank(), step)).backward()


def trained(group, algorithm, steps, finish="together"):
    """Each island takes its own number of steps. Returns weights, rounds, and the islands that were present at the end."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, algorithm, finish=finish, limit_s=LIMIT_S) as islands:
        for step in range(steps[islands.rank]):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return Tree.of(model), islands.rounds, islands.present


def stepped(group, algorithms, steps):
    found = []
    for algorithm in algorithms:
        model = WORKLOAD.module()
        with atoll.islands(model, None, algorithm, limit_s=LIMIT_S) as islands:
            for step in range(steps[islands.rank]):
                backward(model, step)
                islands.step()
        found.append((Tree.of(model), islands.rounds))
    return found


def local_sgd(steps, start, rank):
    """The weights of one island after some steps from given weights."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    for step in steps:
        WORKLOAD.loss(model, WORKLOAD.batches.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Tree.of(model)


def test_a_part_of_a_round_is_weighted_by_its_steps(two):
    (one, _, _), (other, rounds, _) = two.run(trained, DiLoCo(inner_steps=4, outer=SGD(lr=1.0)), (5, 7))
    start = Tree.of(WORKLOAD.module())
    first = (local_sgd(range(4), start, 0) + local_sgd(range(4), start, 1)) / 2
    last = (local_sgd(range(4, 5), first, 0) + local_sgd(range(4, 7), first, 1) * 3) / 4
    assert rounds == 2
    assert one.equal(other)
    torch.testing.assert_close(one.flat, last.flat)


@pytest.mark.parametrize("steps", [(2, 13, 7), (0, 5, 6), (0, 0, 1), (0, 0, 0), (6, 3, 3)])
def test_with_finish_together_all_islands_end_with_the_same_weights(three, steps):
    found = three.run(trained, DiLoCo(inner_steps=3), steps)
    assert all(params.equal(found[0][0]) for params, _, _ in found)
    assert {rounds for _, rounds, _ in found} == {-(-max(steps) // 3)}
    assert {present for _, _, present in found} == {3}
    assert found[0][0].equal(Tree.of(WORKLOAD.module())) == (max(steps) == 0)


def test_an_exhausted_island_does_not_change_the_result_of_the_others(two, three):
    (expected, _, _), _ = two.run(trained, DiLoCo(inner_steps=3), (9, 6))
    *both, (idle, _, _) = three.run(trained, DiLoCo(inner_steps=3), (9, 6, 0))
    assert [params.equal(expected) for params, _, _ in both] == [True, True]
    assert idle.equal(expected)


def test_with_finish_alone_islands_that_leave_at_the_same_exchange_hold_the_same_weights(three):
    found = three.run(trained, DiLoCo(inner_steps=3), (2, 13, 14), "alone")
    assert [present for _, _, present in found] == [3, 2, 2]
    assert [rounds for _, rounds, _ in found] == [1, 5, 5]
    assert found[1][0].equal(found[2][0])
    assert not found[0][0].equal(found[1][0])


def test_with_finish_alone_an_island_without_batches_leaves_after_one_exchange(three):
    found = three.run(trained, DiLoCo(inner_steps=3), (0, 6, 6), "alone")
    assert [present for _, _, present in found] == [3, 2, 2]
    assert found[1][0].equal(found[2][0])
    assert [rounds for _, rounds, _ in found] == [1, 2, 2]


@pytest.mark.parametrize(("overlap", "codec"), [(1, "fp32"), (4, "int8")])
def test_uneven_islands_that_exchange_fragments_end_with_the_same_weights(three, overlap, codec):
    streaming = Streaming(inner_steps=4, fragments=2, overlap=overlap, mixing=0.25, codec=codec)
    for steps in ((5, 11, 8), (0, 2, 0)):
        found = three.run(trained, streaming, steps)
        assert all(params.equal(found[0][0]) for params, _, _ in found)
    found = three.run(trained, streaming, (2, 13, 14), "alone")
    assert [present for _, _, present in found] == [3, 2, 2]
    assert found[1][0].equal(found[2][0])


@pytest.mark.parametrize("steps", [(1, 8, 5), (0, 4, 7), (0, 0, 1), (0, 0, 0)])
def test_if_the_algorithm_steps_uneven_islands_end_with_the_same_weights(three, steps):
    for algorithm, *found in zip(ALGORITHM_STEPS, *three.run(stepped, ALGORITHM_STEPS, steps), strict=True):
        assert all(params.equal(found[0][0]) for params, _ in found), algorithm
        assert len({rounds for _, rounds in found}) == 1
        assert found[0][0].equal(Tree.of(WORKLOAD.module())) == (max(steps) == 0), algorithm


def test_all_micro_batches_of_uneven_islands_have_the_same_weight(two):
    """ZeRO-1 with SGD on two micro-batches of one island and four of the other: one step along the mean of all six."""
    ((params, rounds),), _ = two.run(stepped, [ZeRO1(optimizer=SGD(lr=0.1), accumulation=4)], (2, 4))
    model = WORKLOAD.module()
    for rank, steps in enumerate((2, 4)):
        for step in range(steps):
            (WORKLOAD.loss(model, WORKLOAD.batches.batch(rank, step)) / 6).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert rounds == 1
    torch.testing.assert_close(params.flat, Tree.of(model).flat)


# -------------------------------------------------------------------------------------------------------------- exceptions


def raising(group, algorithm, culprit, at, steps):
    """One island raises after `at` steps, and leaves the block before any other begins its next step. Returns the result of the
    others; of the culprit, that it left."""
    model = WORKLOAD.module()
    form = hasattr(algorithm, "optimizer")
    optimizer = None if form else torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with atoll.islands(model, optimizer, algorithm, limit_s=LIMIT_S) as islands:
            for step in range(steps):
                if step == at and islands.rank == culprit:
                    raise ZeroDivisionError("a bug of the user")
                if step == at:
                    group.barrier().wait()
                backward(model, step)
                islands.optimizer.step()
                islands.optimizer.zero_grad()
    except ZeroDivisionError:
        group.barrier().wait()
        group.barrier().wait()  # its process lives until the others are done
        return "left"
    except ExchangeFailed as failed:
        group.barrier().wait()
        return str(failed)
    group.barrier().wait()
    return Tree.of(model), islands.present, islands.rounds


def test_an_exception_leaves_the_block_at_once_and_the_others_continue(three):
    one, culprit, other = three.run(raising, DiLoCo(inner_steps=3), 1, 4, 9)
    assert culprit == "left"
    assert one[0].equal(other[0])
    assert one[1:] == other[1:] == (2, 3)


def test_an_exception_stops_the_others_if_the_state_is_sharded(three):
    for algorithm in (ZeRO1(optimizer=AdamW()), ACCO(optimizer=AdamW())):
        one, culprit, other = three.run(raising, algorithm, 1, 4, 9)
        assert culprit == "left"
        for message in (one, other):
            assert re.search(
                r"island 1 left by an exception, and its slice .* is lost. .* resume from the last checkpoint", message
            )


def dying(group, culprit):
    """One island raises, and its process ends before the others receive its leave message."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with atoll.islands(model, optimizer, DiLoCo(inner_steps=3), limit_s=LIMIT_S) as islands:
            for step in range(9):
                if islands.rank == culprit and step == 4:
                    raise ZeroDivisionError("a bug of the user")
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
    except ZeroDivisionError:
        os._exit(7)
    return Tree.of(model).digest(), islands.present


def test_if_the_process_of_a_failed_island_has_ended_the_others_find_its_record_and_continue():
    (_, one), (code, nothing), (_, other) = outcomes(3, dying, 1)
    assert (code, nothing) == (7, None)
    assert one == other
    assert one[1] == 2


def killed(group, culprit):
    """One island is killed by SIGKILL."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=3), limit_s=LIMIT_S) as islands:
        for step in range(9):
            if islands.rank == culprit and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()


def test_if_an_island_is_killed_the_others_raise_at_once_and_name_it():
    (_, failed), (code, _) = outcomes(2, killed, 1)
    assert code == -signal.SIGKILL
    assert isinstance(failed, ExchangeFailed)
    assert "island 1" in str(failed)
    assert "it has closed its connection" in str(failed), "and not that it was silent for the limit"
