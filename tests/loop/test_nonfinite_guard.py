"""Non-finite numbers of an island are reported, and do not reach the agreed weights."""

import logging

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.core.errors import TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import MAX_SKIPPED
from atoll.optim.sgd import SGD
from atoll.testing.simulated_runs import Regression

WORKLOAD = Regression(hidden=3)
ALGORITHM = DiLoCo(inner_steps=3)


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def diverging(group, optimizers, algorithm, steps, nan_steps):
    """Trains islands of which the last has a NaN loss at some steps. Returns weights, error, present islands, and log messages."""
    rank, logged = dist.get_rank() if dist.is_initialized() else 0, Messages()
    log = logging.getLogger("atoll")
    log.addHandler(logged)
    model = WORKLOAD.module()
    optimizer = None if optimizers is None else optimizers(model.parameters(), lr=0.05)
    raised = None
    try:
        with atoll.islands(model, optimizer, algorithm, limit_s=30.0) as islands:
            for step in range(steps[rank]):
                factor = float("nan") if rank == len(steps) - 1 and step in nan_steps else 1.0
                (WORKLOAD.loss(model, WORKLOAD.batches.batch(rank, step)) * factor).backward()
                islands.optimizer.step()
                islands.optimizer.zero_grad()
    except TrainingDiverged as error:
        raised = str(error)
    finally:
        log.removeHandler(logged)
    if group is not None:
        group.barrier().wait()
    return Tree.of(model), raised, islands.present, logged.messages


def test_an_island_with_non_finite_weights_has_weight_0_and_logs_a_warning(two):
    (expected, *_), _ = two.run(diverging, torch.optim.SGD, ALGORITHM, (9, 0), ())
    one, other = two.run(diverging, torch.optim.SGD, ALGORITHM, (9, 9), range(9))
    for params, raised, present, _ in (one, other):
        assert params.equal(expected)
        assert (raised, present) == (None, 2)
    assert one[3] == []
    assert len(other[3]) == 3
    assert "weights of island 1 are not finite. It takes part in this exchange with weight 0" in other[3][0]


def test_an_island_recovers_in_the_next_round(two):
    one, other = two.run(diverging, torch.optim.SGD, ALGORITHM, (9, 9), (4,))
    (healthy, *_), _ = two.run(diverging, torch.optim.SGD, ALGORITHM, (9, 9), ())
    assert one[0].equal(other[0])
    assert one[0].is_finite()
    assert not one[0].equal(healthy)
    assert len(other[3]) == 1


@pytest.mark.parametrize(
    ("algorithm", "nan_step"),
    [
        (Streaming(inner_steps=4, fragments=2, overlap=1), 1),
        (Streaming(inner_steps=4, fragments=2, overlap=1, mixing=0.5), 3),  # after the last fragment of a round was sent
        (Streaming(inner_steps=4, fragments=3, overlap=4, mixing=0.5), 2),  # fragments are loaded in the next round
        (Streaming(inner_steps=4, fragments=2, overlap=0, codec="int8"), 2),
        (Eager(inner_steps=4), 1),
    ],
)
def test_one_non_finite_step_excludes_an_island_for_two_rounds_at_most(two, algorithm, nan_step):
    one, other = two.run(diverging, torch.optim.SGD, algorithm, (24, 24), (nan_step,))
    assert one[0].equal(other[0])
    assert one[0].is_finite()
    assert (one[1], one[2]) == (other[1], other[2]) == (None, 2)
    assert len(other[3]) == 1, "its next round has no non-finite weights to warn of"


def test_an_island_that_sends_many_fragments_in_a_round_recovers_after_it(two):
    fragments = Tree.of(WORKLOAD.module()).numel
    assert fragments > MAX_SKIPPED
    one, other = two.run(diverging, torch.optim.SGD, Streaming(inner_steps=fragments, fragments=fragments), (66, 66), (0,))
    assert one[0].equal(other[0])
    assert (one[1], other[1]) == (None, None)


def error_buffers(group, algorithm, rounds, nan_round):
    """This island's error buffer after each round. One of island 1's rounds has a NaN loss."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    buffers = []
    with atoll.islands(model, optimizer, algorithm, limit_s=30.0) as islands:
        for step in range(rounds * algorithm.inner_steps):
            factor = float("nan") if dist.get_rank() == 1 and step // algorithm.inner_steps == nan_round else 1.0
            (WORKLOAD.loss(model, WORKLOAD.batches.batch(dist.get_rank(), step)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % algorithm.inner_steps == 0:
                buffers += [{name: x.clone() for name, x in islands.state_dict()["tensors"].items() if "unsent" in name}]
    return buffers


def test_an_island_with_non_finite_weights_keeps_its_error_buffer(two):
    one, other = two.run(error_buffers, DiLoCo(inner_steps=3, codec="int8"), 3, 1)
    assert other[0]
    for name, buffers in other[0].items():
        assert buffers.any()
        assert torch.equal(other[1][name], buffers)
        assert not torch.equal(other[2][name], buffers)
        assert not torch.equal(one[1][name], one[0][name])


def test_an_island_with_non_finite_moments_raises_and_the_others_continue(two):
    one, other = two.run(diverging, torch.optim.AdamW, ALGORITHM, (9, 9), (4,))
    assert "the weights of island 1 and its optimizer's moments are not finite. It leaves" in other[1]
    assert (one[1], one[2]) == (None, 1)
    assert one[0].is_finite()


def test_an_island_that_does_not_recover_in_20_rounds_raises(two):
    steps = MAX_SKIPPED + 1
    one, other = two.run(diverging, torch.optim.SGD, DiLoCo(inner_steps=1), (steps, steps), range(steps))
    assert f"were not finite in {MAX_SKIPPED} rounds in a row" in other[1]
    assert (one[1], one[2]) == (None, 1)


@pytest.mark.parametrize("algorithm", [DDP(optimizer=SGD(lr=0.1)), ACCO(optimizer=SGD(lr=0.1))])
def test_all_islands_skip_updates_with_non_finite_gradients_and_raise_after_20(two, algorithm):
    steps = 3 * MAX_SKIPPED
    start = Tree.of(WORKLOAD.module())
    found = two.run(diverging, None, algorithm, (steps, steps), range(steps))
    for params, raised, _, _ in found:
        assert f"{MAX_SKIPPED} updates in a row were skipped: in the last one island 1 sent non-finite gradients" in raised
        assert params.equal(start)
    assert [len(messages) for *_, messages in found] == [1, 0]
    assert "island 1 sent non-finite gradients" in found[0][3][0]


def test_a_non_finite_state_does_not_replace_the_last_good_one():
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = Tree.of(model)
    (1e22 * WORKLOAD.loss(model, WORKLOAD.batches.batch(0, 0))).backward()
    with (
        pytest.raises(TrainingDiverged, match=r"would not be finite after this round, .* the outer one too"),
        atoll.islands(model, optimizer, DiLoCo(inner_steps=1, outer=SGD(lr=1e18))) as islands,
    ):
        optimizer.step()
    assert Tree.of(islands.weights()).same_bits(start)
    assert all(tensor.isfinite().all() for tensor in islands.state_dict()["tensors"].values())
