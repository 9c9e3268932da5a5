"""Fragments of a model are read and loaded alone."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.loop.replica import LoopReplica
from atoll.optim.sgd import SGD
from atoll.replica.flat_parameters import ModuleWeights
from atoll.replica.local_replica import LocalReplica
from atoll.testing.simulated_runs import Regression


class BytesMoved(TorchDispatchMode):
    """Counts the bytes that operations write."""

    total = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and "empty" not in str(operation) and isinstance(result, torch.Tensor):
            self.total += result.nbytes
        return result


def layers(dtype=torch.float32, first=None):
    return nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=(first if n == 0 else None) or dtype) for n in range(64)))


@dataclass(frozen=True)
class Layers(Regression):
    first: torch.dtype | None = None  # of the first layer, if it has another one

    def module(self):
        return layers(self.dtype, self.first)

    def loss(self, module, batch):
        return sum(layer.weight.float().square().sum() for layer in module)


def trained(**options):
    replica = LocalReplica(Layers(**options), optimizer=SGD(lr=0.1))
    replica.train(1, Work(shard=0, start=0, schedule=0, examples=1))
    return replica


def in_a_loop(dtype):
    weights = ModuleWeights(layers(dtype))
    replica = LoopReplica(weights, weights, "user", 4)
    replica.borrowed = replica.params
    replica.load(weights.read().wide() + 0.1)
    return replica


@pytest.mark.parametrize(
    "make_replica",
    [
        trained,
        lambda: trained(dtype=torch.bfloat16),
        lambda: trained(first=torch.bfloat16),
        lambda: LocalReplica(Layers(dtype=torch.bfloat16), optimizer=SGD(lr=0.1)),
        lambda: in_a_loop(torch.float32),
        lambda: in_a_loop(torch.bfloat16),
    ],
    ids=["flat", "masters", "several dtypes", "bfloat16, untrained", "loop", "loop, bfloat16"],
)
def test_a_fragment_is_read_and_loaded_without_moving_the_whole_model(make_replica):
    """Fragments of four layers of 64 that do not lie side by side."""
    replica = make_replica()
    start = replica.borrowed().copy().wide() * 0.0 + 0.5
    replica.load(start)
    fragments = [[(64 * n, 64 * n + 64) for n in range(first, 64, 16)] for first in range(16)]
    replica.load(start.select(fragments[0]) + 1.0)  # may copy weights that are kept in single precision, once in a round
    with BytesMoved() as moved:
        delta = start.select(fragments[3]) - replica.borrowed().select(fragments[3])
        replica.load(start.select(fragments[3]) + 1.0)
    assert not delta.flat.any()
    assert moved.total <= 12 * delta.nbytes < start.nbytes
    assert replica.borrowed().equal(Tree.join([(start + float(n % 16 in (0, 3))).slice(64 * n, 64 * n + 64) for n in range(64)]))


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_of_a_tensor_are_read_and_written_alone(transposed):
    module = nn.Linear(4, 3, bias=False)
    if transposed:
        module.weight.data = module.weight.data.t().contiguous().t()
    weights = ModuleWeights(module)
    whole, part = weights.read(), Tree.of({"weight": torch.randn(3, 4)}).slice(2, 7)
    assert weights.read(part.layout).equal(whole.slice(2, 7))
    weights.write(part)
    assert weights.read().equal(whole.overlaid(part))
