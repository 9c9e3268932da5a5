"""The user's module keeps its parameters, whatever they are."""

import pytest
import torch
from torch import nn

import atoll
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.flat_parameters import ModuleWeights


class MixedModule(nn.Module):
    """Tied, frozen and unused weights, a buffer, and two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4, dtype=torch.bfloat16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.norm(self.frozen(self.embed(tokens).float()))
        return self.head(hidden.bfloat16()).float().square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_are_never_rebound_and_frozen_ones_do_not_change():
    model = MixedModule()
    objects, pointers = list(model.parameters()), [parameter.data_ptr() for parameter in model.parameters()]
    frozen, still = model.frozen.weight.clone(), model.unused.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=2)) as islands:
        train(model, optimizer, 5)
        assert set(islands.weights()) == {"embed.weight", "norm.weight", "norm.bias", "unused"}
    assert all(one is two for one, two in zip(model.parameters(), objects, strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.frozen.weight, frozen)
    assert torch.equal(model.unused, still)
    assert model.embed.weight.dtype == torch.bfloat16


def test_one_island_with_an_outer_rate_of_1_trains_like_a_plain_loop():
    models = [MixedModule(), MixedModule()]
    plain, wrapped = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    train(models[0], plain, 6)
    with atoll.islands(models[1], wrapped, DiLoCo(inner_steps=2, outer=SGD(lr=1.0))):
        train(models[1], wrapped, 6)
    one, other = (Tree.of(model) for model in models)
    torch.testing.assert_close(one.flat, other.flat, rtol=1e-6, atol=1e-6)


def test_agreed_weights_are_more_precise_than_a_module_in_bfloat16():
    """Each round moves them by less than bfloat16 resolves; the agreed weights accumulate these moves."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    step = 2.0**-8  # half of bfloat16's spacing above 1, and its whole spacing below 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=1, outer=Nesterov(lr=0.125, momentum=0.0))) as islands:
        for _ in range(8):
            model.weight.grad = torch.full_like(model.weight, step)
            optimizer.step()
            seen.append(float(model.weight.detach()))
            agreed = float(islands._entered().state.params.flat)
    assert agreed == 1.0 - step
    assert seen[0] == 1.0
    assert seen[-1] == agreed


@pytest.mark.parametrize(
    ("overlap", "mixing", "schedule"),
    [
        (1, 0.0, {1: "s0", 2: "r0 l0", 3: "s1", 4: "r1 l1"}),
        (1, 0.5, {1: "s0", 2: "r0 l0", 3: "s1", 4: "r1 l1"}),
        (3, 0.25, {0: "s0", 1: "l1", 2: "s1", 3: "r0 l0", 4: "r1"}),
        (4, 0.5, {0: "s0", 2: "l1 s1", 4: "r0 r1 l0"}),
    ],
)
def test_fragments_of_a_module_in_bfloat16_are_those_of_a_reference_by_hand(overlap, mixing, schedule):
    """The reference sends (s), receives (r) and loads (l) each of two weights after these steps of a round, and adds what rounding
    removed when a weight was loaded to what the module holds."""
    rounds, rate, move = 3, 0.3, 2.0**-6
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1.0), []
    algorithm = Streaming(inner_steps=4, fragments=2, overlap=overlap, mixing=mixing, outer=SGD(lr=rate))
    with atoll.islands(model, optimizer, algorithm) as islands:
        for _ in range(4 * rounds):
            model.weight.grad = torch.full_like(model.weight, move)
            optimizer.step()
            seen.append(model.weight.detach().flatten().clone())
        agreed = islands._entered().state.params.flat.clone()

    params, held = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    loaded, deltas, unloaded, expected = params.clone(), {}, set(), []

    def present():
        return held.float() + (loaded - loaded.bfloat16())

    def act(step):
        for action, number in (each for each in schedule.get(step, "").split()):
            at = int(number)
            if action == "s":
                deltas[at] = params[at] - present()[at]
            elif action == "r":
                params[at] = params[at].add(deltas.pop(at), alpha=-rate)
                unloaded.add(at)
            elif at in unloaded:
                loaded[at] = torch.lerp(params[at], present()[at], mixing)
                held[at] = loaded[at].bfloat16()
                unloaded.remove(at)

    for _ in range(rounds):
        loaded = present()
        held = loaded.bfloat16()
        act(0)
        for step in range(1, 5):
            held -= move
            act(step)
            expected.append(held.clone())
    assert torch.equal(torch.stack(seen[:-1]), torch.stack(expected[:-1]))  # after the last step the next round has begun
    assert torch.equal(agreed, params)


@pytest.mark.parametrize("algorithm", [DDP(optimizer=SGD(lr=0.1)), ZeRO1(optimizer=SGD(lr=0.1), wire="fp32")])
def test_gradients_of_two_dtypes_step_as_torch_steps_them(algorithm):
    model, expected = MixedModule(), MixedModule()
    with atoll.islands(model, None, algorithm) as islands:
        model(torch.arange(6)).backward()
        islands.step()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    train(expected, optimizer, 1)
    torch.testing.assert_close(Tree.of(model).flat, Tree.of(expected).flat, rtol=1e-2, atol=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_slices_of_two_dtypes_are_refused_without_a_wire_dtype():
    with (
        pytest.raises(ConfigError, match=r'differs from slice to slice\. Give the algorithm wire="fp32"'),
        atoll.islands(MixedModule(), None, ZeRO1(optimizer=SGD(lr=0.1))),
    ):
        pass


def test_sparse_gradients_are_supported():
    model = nn.Embedding(4, 2, sparse=True)
    model.weight.data.zero_()
    with atoll.islands(model, None, DDP(optimizer=SGD(lr=1.0))) as islands:
        model(torch.tensor([1, 1])).sum().backward()
        islands.step()
    assert model.weight.tolist() == [[0, 0], [-2, -2], [0, 0], [0, 0]]


def test_parameters_that_are_frozen_or_replaced_in_the_block_are_refused():
    for change in (
        lambda model: model.frozen.requires_grad_(True),
        lambda model: model.unused.requires_grad_(False),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
    ):
        model = MixedModule()
        weights = ModuleWeights(model)
        weights.read()
        change(model)
        with pytest.raises(ConfigError, match="not those that it entered the block with"):
            weights.read()


def test_a_module_that_is_cast_in_the_block_is_refused():
    model = nn.Linear(2, 1)
    weights = ModuleWeights(model)
    model.bfloat16()
    with pytest.raises(ConfigError, match=r"weight entered the block as torch.float32 on cpu, and is torch.bfloat16 on cpu now"):
        weights.read()


def test_names_do_not_depend_on_torch_compile():
    plain, whole, part = MixedModule(), torch.compile(MixedModule(), backend="eager"), MixedModule()
    part.frozen = torch.compile(part.frozen, backend="eager")
    for model in (whole, part):
        assert ModuleWeights(model).layout == ModuleWeights(plain).layout
        assert [name for name, _ in ModuleWeights(model).untrained_tensors()] == [
            name for name, _ in ModuleWeights(plain).untrained_tensors()
        ]


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameters"):
        ModuleWeights(nn.Linear(2, 1).requires_grad_(False))
    with pytest.raises(ConfigError, match=r"weight is torch.complex64: .* Freeze it"):
        ModuleWeights(nn.Linear(2, 1, dtype=torch.complex64))
