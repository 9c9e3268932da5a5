"""A resumed loop continues to the bit."""

import io

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.testing.simulated_runs import Regression

WORKLOAD = Regression(hidden=3)
ALGORITHM_STEPS = [
    (DDP(optimizer=AdamW(lr=0.1), accumulation=3), 7, 1),
    (ZeRO1(optimizer=AdamW(lr=0.1), accumulation=2), 6, 0),
    (ACCO(optimizer=AdamW(lr=0.1)), 7, 0),
    (DPU(optimizer=AdamW(lr=0.1), warmup=1, accumulation=2), 7, 1),
]
"""Algorithm, micro-batches before the checkpoint, and how many of them are in no update."""


def through_a_file(state):
    """The state after torch.save and a safe torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def backward(model, step):
    WORKLOAD.loss(model, WORKLOAD.batches.batch(dist.get_rank() if dist.is_initialized() else 0, step)).backward()


def entered(model, optimizer, algorithm, saved=None, where="before"):
    islands = atoll.islands(model, optimizer, algorithm, limit_s=30.0)
    if saved is not None and where == "before":
        load(model, optimizer, islands, saved)
    with islands:
        if saved is not None and where == "inside":
            load(model, optimizer, islands, saved)
        yield islands


def load(model, optimizer, islands, saved):
    model.load_state_dict(saved["model"])
    if optimizer is not None:
        optimizer.load_state_dict(saved["optimizer"])
    islands.load_state_dict(saved["islands"])


def trained(group, algorithm, start, stop, saved=None, where="before"):
    """The final weights, and the states of model, optimizer and islands after the last step."""
    model = WORKLOAD.module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for islands in entered(model, optimizer, algorithm, saved and saved[dist.get_rank()], where):
        for step in range(start, stop):
            backward(model, step)
            islands.log(0.0, tokens=1 + step * islands.rank)
            optimizer.step()
            optimizer.zero_grad()
        assert islands.steps == stop
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "islands": islands.state_dict()}
        state = through_a_file(state)
    return Tree.of(model), state


def saved_late(group, algorithm):
    """The error of a state that is saved after 6 steps."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for islands in entered(model, optimizer, algorithm):
        for step in range(6):
            backward(model, step)
            optimizer.step()
        try:
            islands.state_dict()
        except CheckpointError as error:
            return str(error)
    return ""


def stepped(group, algorithm, batches, saved=None):
    model = WORKLOAD.module()
    for islands in entered(model, None, algorithm, saved and saved[dist.get_rank()]):
        dropped = islands.dropped
        for step in batches:
            backward(model, step)
            islands.step()
        state = through_a_file({"model": model.state_dict(), "islands": islands.state_dict()})
    return Tree.of(model), state, dropped


@pytest.mark.parametrize(
    ("stop", "where", "weighting"),
    [(7, "before", "uniform"), (7, "inside", "uniform"), (7, "before", "tokens"), (6, "before", "tokens")],
)
def test_a_round_that_was_saved_in_its_middle_resumes_to_the_bit(two, stop, where, weighting):
    algorithm = DiLoCo(inner_steps=3, weighting=weighting)
    straight = two.run(trained, algorithm, 0, 11)
    parts = [state for _, state in two.run(trained, algorithm, 0, stop)]
    assert [part["islands"]["steps_in_round"] for part in parts] == [stop % 3, stop % 3]
    resumed = two.run(trained, algorithm, stop, 11, parts, where)
    for (params, _), (expected, _) in zip(resumed, straight, strict=True):
        assert params.equal(expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(inner_steps=4, codec="int4"),
        Streaming(inner_steps=4, fragments=2, overlap=2, codec="int8"),
        Streaming(inner_steps=4, fragments=3, overlap=4, mixing=0.5),
    ],
)
def test_what_codecs_left_out_and_fragments_resume_to_the_bit(two, algorithm):
    straight = two.run(trained, algorithm, 0, 12)
    parts = [state for _, state in two.run(trained, algorithm, 0, 8)]
    for (params, _), (expected, _) in zip(two.run(trained, algorithm, 8, 12, parts), straight, strict=True):
        assert params.equal(expected)


def test_a_round_in_which_a_fragment_was_exchanged_is_not_saved(two):
    for text in two.run(saved_late, Streaming(inner_steps=4, fragments=2, overlap=1)):
        assert "2 steps after the last round. Save after a whole round: where islands.steps is a multiple of 4" in text


def test_if_the_algorithm_steps_micro_batches_after_the_last_update_are_dropped(two):
    for algorithm, computed, dropped in ALGORITHM_STEPS:
        batches = list(range(16))
        parts = [state for _, state, _ in two.run(stepped, algorithm, batches[:computed])]
        resumed = two.run(stepped, algorithm, batches[computed - dropped :], parts)
        straight = two.run(stepped, algorithm, batches)
        assert {found[2] for found in resumed} == {dropped}, algorithm
        assert all(one[0].equal(other[0]) for one, other in zip(resumed, straight, strict=True)), algorithm


def refused(group, algorithm, parts, order, inside=False):
    """The error of loading states that were not saved together."""
    model = WORKLOAD.module()
    optimizer = None if hasattr(algorithm, "optimizer") else torch.optim.AdamW(model.parameters())
    islands = atoll.islands(model, optimizer, algorithm, limit_s=30.0)
    mine = order[dist.get_rank()]
    if mine is not None and not inside:
        islands.load_state_dict(parts[mine]["islands"])
    try:
        with islands:
            if inside:
                islands.load_state_dict(parts[mine]["islands"])
            return "entered"
    except CheckpointError as error:
        return str(error)


def test_states_of_different_rounds_algorithms_or_processes_are_refused(two):
    algorithm = DiLoCo(inner_steps=3)
    early, late = (two.run(trained, algorithm, 0, stop)[0][1] for stop in (3, 6))
    for message in two.run(refused, algorithm, [early, late], (0, 1)):
        assert "resume from round 1, round 2. Load checkpoints of the same round" in message
    for message in two.run(refused, algorithm, [early, late], (0, 1), True):
        assert "resume from round 1, round 2" in message
    for message in two.run(refused, algorithm, [early], (0, None)):
        assert "resume from round 1, no checkpoint" in message
    sliced = ZeRO1(optimizer=AdamW())
    parts = [state for _, state, _ in two.run(stepped, sliced, range(2))]
    for message in two.run(refused, sliced, parts, (1, 0)):
        assert "holds a slice, saved by device 0 of 1 in island" in message
    for message in two.run(refused, DDP(optimizer=AdamW()), parts, (0, 1)):
        assert "saved with another model or another algorithm (" in message
        assert "folder" not in message


def test_a_foreign_dictionary_and_a_late_call_are_refused():
    model = WORKLOAD.module()
    optimizer = torch.optim.AdamW(model.parameters())
    islands = atoll.islands(model, optimizer, DiLoCo(inner_steps=3))
    with pytest.raises(CheckpointError, match=r"no islands.state_dict\(\) of this version: it has the keys \['params'\]"):
        islands.load_state_dict({"params": 1})
    with islands:
        saved = islands.state_dict()
        backward(model, 0)
        optimizer.step()
        with pytest.raises(ConfigError, match="this block has taken 1 steps"):
            islands.load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"this block is over\. Make new islands"):
        islands.load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"entered before\. Make new ones"), islands:
        pass


def resumed_without_the_model(stop):
    """The agreed weights after `stop` steps, and those of a new module after the state was loaded."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=3)) as islands:
        for step in range(stop):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        saved, agreed = islands.state_dict(), islands.weights()
    model = WORKLOAD.module()
    islands = atoll.islands(model, torch.optim.SGD(model.parameters(), lr=0.05), DiLoCo(inner_steps=3))
    islands.load_state_dict(saved)
    with islands:
        return Tree.of(agreed), Tree.of(model)


def test_between_rounds_the_state_has_the_weights_and_inside_of_one_the_model_must_be_loaded_too():
    agreed, found = resumed_without_the_model(6)
    assert found.equal(agreed)
    assert not found.equal(Tree.of(WORKLOAD.module()))
    with pytest.raises(CheckpointError, match=r"middle of a round, 1 steps after .* First load the model's state_dict"):
        resumed_without_the_model(7)
