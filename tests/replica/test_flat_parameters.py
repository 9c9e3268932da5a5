"""Modules in one buffer train as other modules do, and a parameter that leaves the buffer is detected."""

import pytest
import torch
from torch import nn

from atoll.core.flat_tree import Tree
from atoll.replica.flat_parameters import FlatModule, UnflattenedModule, trainable_weights


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def loss_of(module):
    inputs = torch.linspace(-1, 1, 20).view(5, 4)
    return (module(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def test_loading_and_reading_give_the_weights_back():
    weights, other = FlatModule(make(0)), Tree.of(make(1))
    weights.load(other)
    assert weights.read().equal(other)
    assert Tree.of(weights.module).equal(other)


def test_read_weights_do_not_change_in_later_training():
    weights = FlatModule(make())
    before = weights.read()
    digest = before.digest()
    weights.load(before * 2)
    assert before.digest() == digest


def test_fused_adamw_on_the_buffer_has_the_bits_of_fused_adamw_on_the_parameters():
    flat, plain = FlatModule(make()), make()
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    vectors = [p for p in plain.parameters() if p.dim() < 2]

    def groups(one, two):
        return [{"params": one, "weight_decay": 0.1}, {"params": two, "weight_decay": 0.0}]

    one = torch.optim.AdamW(groups(*flat.decay_groups()), lr=0.01, fused=True)
    two = torch.optim.AdamW(groups(matrices, vectors), lr=0.01, fused=True)
    for _ in range(20):
        flat.zero_gradient()
        loss_of(flat.module).backward()
        flat.gather_gradient()
        one.step()
        two.zero_grad()
        loss_of(plain).backward()
        two.step()
    assert flat.read().equal(Tree.of(plain))


def test_matrices_come_first_so_that_decay_is_one_range():
    decayed, spared = FlatModule(make()).decay_groups()
    assert [p.numel() for p in decayed] == [4 * 8 + 8]
    assert [p.numel() for p in spared] == [8 + 8 + 8 + 1]


def test_compiled_modules_keep_their_views():
    weights = FlatModule(make())
    compiled = torch.compile(loss_of, backend="eager")
    first = compiled(weights.module).item()
    weights.load(weights.read() * 0.0)
    assert compiled(weights.module).item() == pytest.approx(loss_of(weights.module).item())
    assert compiled(weights.module).item() != first


@pytest.mark.parametrize(
    "leave", [lambda m: m.double(), lambda m: m.zero_grad(), lambda m: m.load_state_dict(make().state_dict(), assign=True)]
)
def test_a_module_that_left_its_buffer_is_noticed(leave):
    weights = FlatModule(make())
    weights.begin_accumulation(None)
    leave(weights.module)
    with pytest.raises(RuntimeError, match="no longer lie in its flat buffer"):
        weights.read()


def test_mixed_dtypes_are_borrowed_and_lose_nothing():
    module = make()
    module[2].bfloat16()
    weights = trainable_weights(module)
    assert isinstance(weights, UnflattenedModule)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights.load(weights.read())
    assert all(torch.equal(p, before[name]) and p.dtype == before[name].dtype for name, p in module.named_parameters())


def test_a_borrowed_module_keeps_its_own_parameters():
    module = make()
    identities = [id(p) for p in module.parameters()], [p.data_ptr() for p in module.parameters()]
    weights = UnflattenedModule(module)
    weights.load(weights.read() + 1.0)
    assert identities == ([id(p) for p in module.parameters()], [p.data_ptr() for p in module.parameters()])


def test_frozen_and_tied_parameters_appear_never_and_once():
    module = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "frozen": nn.Linear(2, 2)})
    module["head"].weight = module["embedding"].weight
    module["frozen"].requires_grad_(False)
    weights = FlatModule(module)
    assert list(weights.read()) == ["embedding.weight"]
    assert module["head"].weight is module["embedding"].weight


# -------------------------------------------------------------------------------------------------------- gradients that add up


def backward(weights, times=1):
    for _ in range(times):
        loss_of(weights.module).backward()


def mixed():
    module = make()
    module[2].double()
    module.forward = lambda inputs: module[2](module[1](module[0](inputs)).double()).float()
    return module


@pytest.mark.parametrize(
    "kind", [lambda: FlatModule(make()), lambda: UnflattenedModule(make()), lambda: trainable_weights(mixed())]
)
def test_accumulation_adds_to_given_gradients_or_starts_from_zero(kind):
    weights = kind()
    weights.begin_accumulation(None)
    backward(weights)
    once = weights.end_accumulation().copy()
    weights.begin_accumulation(None)
    backward(weights, 2)
    assert torch.allclose(weights.end_accumulation().flat, 2 * once.flat)
    weights.begin_accumulation(once.copy())
    backward(weights)
    assert torch.allclose(weights.end_accumulation().flat, 2 * once.flat)


def test_gradients_are_added_to_in_place_and_borrowed_ones_are_copied():
    weights = FlatModule(make())
    weights.begin_accumulation(None)
    backward(weights)
    first = weights.end_accumulation()
    bits = first.digest()
    weights.begin_accumulation(first.borrow())
    backward(weights)
    assert weights.end_accumulation().flat.data_ptr() != first.flat.data_ptr()
    assert first.digest() == bits
    place = first.flat.data_ptr()
    weights.begin_accumulation(first)
    backward(weights)
    assert weights.end_accumulation().flat.data_ptr() == place
    assert first.deleted


def test_accumulation_leaves_the_optimizers_gradients_unchanged():
    weights = FlatModule(make())
    weights.zero_gradient()
    backward(weights)
    weights.gather_gradient()
    own = [gradient.clone() for gradient in weights.gradients()]
    assert len(own) == 1
    weights.begin_accumulation(None)
    backward(weights)
    theirs = weights.end_accumulation()
    bits = theirs.digest()
    weights.zero_gradient()
    backward(weights)
    weights.gather_gradient()
    assert all(torch.equal(one, two) for one, two in zip(own, weights.gradients(), strict=True))
    assert theirs.digest() == bits


def test_gathered_gradients_are_those_that_were_added_to_zeros_and_of_an_unused_parameter_zero():
    weights, added = FlatModule(make()), FlatModule(make())
    for number in range(2):
        weights.zero_gradient()
        assert not weights.gradients(), "nothing is there before a pass"
        added.begin_accumulation(None)
        for one in (weights, added):
            (one.module[0].weight.square().sum() + one.module[number].bias.sum()).backward()
        weights.gather_gradient()
        weights.gather_gradient()  # once is enough
        (gathered,) = weights.gradients()
        assert torch.equal(gathered, added.end_accumulation().flat)
        assert all(parameter.grad is None for parameter in weights.module.parameters()), "what autograd made is free again"


def test_gradients_of_half_precision_accumulate_in_single_precision_on_request():
    weights = FlatModule(make().bfloat16())
    total = None
    for _ in range(4):
        weights.begin_accumulation(total, wide=True)
        (weights.module[2].weight.sum() * 3.0).backward()
        total = weights.end_accumulation()
    assert total.flat.dtype == torch.float32
    assert total.layout == weights.layout
    assert total["2.weight"].tolist() == [[12.0] * 8]
    single = FlatModule(make())
    single.begin_accumulation(None, wide=True)
    backward(single)
    assert single.end_accumulation().flat.dtype == torch.float32


def test_a_module_equals_loaded_weights_after_rounding():
    for weights in (FlatModule(make().bfloat16()), UnflattenedModule(make().bfloat16())):
        fine = Tree.of(make(1).bfloat16()).wide() * 1.001
        weights.load(fine)
        assert weights.equals(fine)
        assert weights.equals(fine.cast(torch.bfloat16))
        assert not weights.equals(fine * 2)
        assert not weights.equals(Tree.of({"other": torch.ones(3)}))
