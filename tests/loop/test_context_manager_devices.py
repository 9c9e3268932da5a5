"""An island of two devices trains like an island of one with twice the batch, and each device sends half of the bytes."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.core.errors import ConfigError
from atoll.optim.adam import AdamW
from atoll.testing.simulated_runs import Regression, RegressionBatches

WORKLOAD = Regression(hidden=16, batches=RegressionBatches(batch_size=4))
ALGORITHM = DiLoCo(inner_steps=3)
STEPS = 8
"""No multiple of the inner steps."""


def wrap(how, mesh, model):
    if how == "ddp":
        return DistributedDataParallel(model, process_group=mesh["device"].get_group())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["device"])
    return fully_shard(model, mesh=mesh["device"])


def whole(model):
    """The weights, without FSDP2's sharding."""
    tensors = (parameter.detach() for parameter in model.parameters())
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def batch_of(island, step, device):
    inputs, targets = WORKLOAD.batches.batch(island, 2 * step + device)
    return inputs, targets


def tokens_of(island, step, device):
    """Only the sum over an island's devices weighs it as the test expects."""
    return 1 + 5 * step * (island + 2 * device)


def train_on_devices(group, how, saved=None, start=0, stop=STEPS, algorithm=ALGORITHM):
    """Two islands of two devices: their weights, the bytes that each process sent, and its state after the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "device"))
    model = wrap(how, mesh, WORKLOAD.module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    islands = atoll.islands(model, optimizer, algorithm, mesh=mesh, limit_s=30.0)
    if saved is not None:
        mine = saved[dist.get_rank()]
        model.load_state_dict(mine["model"])
        islands.load_state_dict(mine["islands"])
    with islands:
        for step in range(start, stop):
            device = mesh.get_local_rank("device")
            WORKLOAD.loss(model, batch_of(islands.rank, step, device)).backward()
            islands.log(0.0, tokens_of(islands.rank, step, device))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 5))  # an evaluation, after which FSDP2 keeps the parameters unsharded
        with islands.agreed():
            in_agreed = islands.state_dict(), islands.state_dicts()
        state = {
            "in_agreed": in_agreed,
            "islands": islands.state_dict(),
            "model": None if how == "fsdp" else copy.deepcopy(model.state_dict()),
        }
    return whole(model), islands.sent_bytes, state


def train_on_one(group, algorithm):
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, algorithm, limit_s=30.0) as islands:
        for step in range(STEPS):
            batches = [batch_of(islands.rank, step, device) for device in range(2)]
            WORKLOAD.loss(model, [torch.cat(parts) for parts in zip(*batches, strict=True)]).backward()
            islands.log(0.0, sum(tokens_of(islands.rank, step, device) for device in range(2)))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), islands.sent_bytes


def check_gathered(found):
    """The first device of each island has the states of both, which were saved in the middle of a round."""
    assert [len(gathered) for _, gathered in found] == [2, 0, 2, 0]
    for (state, _), gathered in zip(found, [*found[0][1], *found[2][1]], strict=True):
        tensors, expected = ({"own weights": each["own"], **each["tensors"]} for each in (gathered, state))
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert all(gathered[name] == state[name] for name in gathered.keys() | state.keys() if name not in ("own", "tensors"))


@pytest.mark.parametrize(("how", "weighting"), [("ddp", "uniform"), ("fsdp", "uniform"), ("ddp", "tokens")])
def test_two_devices_train_like_one_with_twice_the_batch_and_each_sends_half(two, four, how, weighting):
    algorithm = replace(ALGORITHM, weighting=weighting)
    (expected, sent_bytes), _ = two.run(train_on_one, algorithm)
    found = four.run(train_on_devices, how, None, 0, STEPS, algorithm)
    for weights, _, _ in found:
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert all(torch.equal(one, other) for one, other in zip(weights, found[0][0], strict=True))
    assert sum(sent for _, sent, _ in found) == 2 * sent_bytes
    check_gathered([state["in_agreed"] for _, _, state in found])
    # FSDP2 shards rows, so a tensor of one row belongs to one device.
    assert max(sent for _, sent, _ in found) <= (0.51 if how == "ddp" else 0.6) * sent_bytes


def test_devices_resume_from_their_own_slices(four):
    straight = four.run(train_on_devices, "ddp")
    parts = [state for _, _, state in four.run(train_on_devices, "ddp", None, 0, 5)]
    resumed = four.run(train_on_devices, "ddp", parts, 5)
    for (weights, *_), (expected, *_) in zip(resumed, straight, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


@pytest.mark.parametrize(
    "algorithm", [DiLoCo(inner_steps=4, codec="int4"), Streaming(inner_steps=4, fragments=2, overlap=2, mixing=0.25, codec="int8")]
)
def test_devices_exchange_their_slices_encoded_and_in_fragments_and_resume(four, algorithm):
    straight = four.run(train_on_devices, "ddp", None, 0, 8, algorithm)
    parts = [state for _, _, state in four.run(train_on_devices, "ddp", None, 0, 4, algorithm)]
    for (weights, *_), (expected, *_) in zip(four.run(train_on_devices, "ddp", parts, 4, 8, algorithm), straight, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(weights, straight[0][0], strict=True))


def diverging(group, how):
    """Weights after training in which all weights of the last island, or only its first, are NaN at the end of a round."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "device"))
    model = wrap("ddp", mesh, WORKLOAD.module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, ALGORITHM, mesh=mesh, limit_s=30.0) as islands:
        for step in range(6):
            WORKLOAD.loss(model, batch_of(islands.rank, step, mesh.get_local_rank("device"))).backward()
            if islands.rank == 1 and step == 2:
                for parameter in model.parameters():
                    parameter.data.view(-1)[: 1 if how == "first" else None] = torch.nan
                    if how == "first":
                        break
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def test_one_device_with_non_finite_weights_gives_its_whole_island_weight_0(four):
    first, everything = four.run(diverging, "first"), four.run(diverging, "all")
    for one, other in zip(first, everything, strict=True):
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(one, other, strict=True))
        assert all(tensor.isfinite().all() for tensor in one)


def refused(group):
    """The errors of settings that several devices do not support."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "device"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    sharded = fully_shard(nn.Linear(2, 2), mesh=mesh["device"])
    messages = []
    for arguments, settings in (
        ((model, None, ACCO(optimizer=AdamW())), {"mesh": mesh}),
        ((model, optimizer, DiLoCo(inner_steps=2, pruned=0.5)), {"mesh": mesh}),
        ((model, optimizer, ALGORITHM), {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))}),
        ((model, optimizer, ALGORITHM), {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("island",))}),
        ((sharded, torch.optim.SGD(sharded.parameters()), ALGORITHM), {}),
    ):
        try:
            atoll.islands(*arguments, **settings).__enter__()
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_settings_that_several_devices_do_not_support_are_refused(four):
    for gradients, pruned, names, flat, sharded in four.run(refused):
        assert "does not combine gradients of several devices" in gradients
        assert "pruned=0.5 with several devices per island" in pruned
        assert "dimensions ('dp', 'tp'): it needs ('island', 'device')" in names
        assert "dimensions ('island',)" in flat
        assert "sharded by FSDP2 over processes that atoll treats as islands" in sharded
