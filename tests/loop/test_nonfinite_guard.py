"""Numbers that are not finite are named, and do not spread."""

import logging

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import MAX_SKIPPED
from atoll.optim.sgd import SGD
from atoll.testing.simulated_runs import Regression

WORKLOAD = Regression(hidden=3)
ALGORITHM = DiLoCo(inner_steps=3)


class Heard(logging.Handler):
    """What is logged here."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def spoilt(group, optimizers, algorithm, steps, spoils):
    """What comes of islands of which the last has no finite loss at some steps: weights, what was raised, who is left, and what was
    said."""
    rank, heard = dist.get_rank() if dist.is_initialized() else 0, Heard()
    log = logging.getLogger("atoll")
    log.addHandler(heard)
    model = WORKLOAD.module()
    optimizer = None if optimizers is None else optimizers(model.parameters(), lr=0.05)
    raised = None
    try:
        with atoll.islands(model, optimizer, algorithm, limit_s=30.0) as islands:
            for step in range(steps[rank]):
                factor = float("nan") if rank == len(steps) - 1 and step in spoils else 1.0
                (WORKLOAD.loss(model, WORKLOAD.batches.batch(rank, step)) * factor).backward()
                islands.optimizer.step()
                islands.optimizer.zero_grad()
    except TrainingDiverged as error:
        raised = str(error)
    finally:
        log.removeHandler(heard)
    if group is not None:
        group.barrier().wait()
    return Tree.of(model), raised, islands.present, heard.messages


def test_an_island_that_is_not_finite_is_warned_of_and_the_others_come_to_what_they_would_without_it(two):
    (expected, *_), _ = two.run(spoilt, torch.optim.SGD, ALGORITHM, (9, 0), ())
    one, other = two.run(spoilt, torch.optim.SGD, ALGORITHM, (9, 9), range(9))
    for params, raised, present, _ in (one, other):
        assert params.equal(expected)
        assert (raised, present) == (None, 2)
    assert one[3] == []
    assert len(other[3]) == 3
    assert "weights of island 1 are not finite. It weighs nothing in this agreement" in other[3][0]


def test_an_island_that_was_not_finite_for_a_round_is_back_in_the_next(two):
    one, other = two.run(spoilt, torch.optim.SGD, ALGORITHM, (9, 9), (4,))
    (healthy, *_), _ = two.run(spoilt, torch.optim.SGD, ALGORITHM, (9, 9), ())
    assert one[0].equal(other[0])
    assert one[0].is_finite()
    assert not one[0].equal(healthy)
    assert len(other[3]) == 1


def test_an_island_whose_moments_are_spoilt_raises_before_it_exchanges_and_the_others_go_on(two):
    one, other = two.run(spoilt, torch.optim.AdamW, ALGORITHM, (9, 9), (4,))
    assert "the weights of island 1 are not finite, and so are its optimizer's moments. It leaves" in other[1]
    assert (one[1], one[2]) == (None, 1)
    assert one[0].is_finite()


def test_an_island_that_never_comes_back_gives_up(two):
    steps = MAX_SKIPPED + 1
    one, other = two.run(spoilt, torch.optim.SGD, DiLoCo(inner_steps=1), (steps, steps), range(steps))
    assert f"so they were in {MAX_SKIPPED} rounds in a row" in other[1]
    assert (one[1], one[2]) == (None, 1)


@pytest.mark.parametrize("algorithm", [DDP(optimizer=SGD(lr=0.1)), ACCO(optimizer=SGD(lr=0.1))])
def test_updates_that_somebodys_gradients_spoil_are_left_out_by_all_and_too_many_end_it_everywhere(two, algorithm):
    steps = 3 * MAX_SKIPPED
    start = Tree.of(WORKLOAD.module())
    found = two.run(spoilt, None, algorithm, (steps, steps), range(steps))
    for params, raised, _, _ in found:
        assert f"{MAX_SKIPPED} updates in a row were left out; at last island 1 brought something that is not finite" in raised
        assert params.equal(start)
    assert [len(messages) for *_, messages in found] == [1, 0]
    assert "island 1 brought gradients that are not finite" in found[0][3][0]


def test_a_state_that_is_not_finite_does_not_replace_the_last_good_one():
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = Tree.of(model)
    (1000 * WORKLOAD.loss(model, WORKLOAD.batches.batch(0, 0))).backward()
    with (
        pytest.raises(TrainingDiverged, match=r"would not be finite after this round, .* the outer one too"),
        atoll.islands(model, optimizer, DiLoCo(inner_steps=1, outer=SGD(lr=3e38))) as islands,
    ):
        optimizer.step()
    assert Tree.of(islands.weights()).same_bits(start)
    assert all(tensor.isfinite().all() for tensor in islands.state_dict()["tensors"].values())
