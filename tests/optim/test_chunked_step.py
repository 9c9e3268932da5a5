"""Chunked steps on sharded weights have the bits of the plain rule, for any input and any output buffer."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.errors import TreeDonated
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import trees
from atoll.optim import chunked_step
from atoll.optim.adam import AdamW
from atoll.optim.chunked_step import preview, step
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Nesterov
from atoll.testing.conformance import digests

RULES = [AdamW(lr=Cosine(lr=0.1, steps=9)), AdamW(lr=0.1, weight_decay=0.5, decay="all"), Nesterov(lr=0.1), SGD(lr=0.1)]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def case(rule, numel=37, dtype=torch.float32):
    """Weights, a gradient and a state that is not the first."""
    generator = torch.Generator().manual_seed(0)
    params = Tree.of({"w": torch.randn(numel // 4, 4, generator=generator), "b": torch.randn(3, generator=generator)})
    gradient = Tree(params.layout, torch.randn(params.numel, generator=generator).to(dtype))
    _, state = rule.update(params, params * 0.5, rule.init(params))
    return params, gradient, state


def donated(value):
    if isinstance(value, Tree):
        return value.donate()
    return type(value)(*map(donated, value)) if isinstance(value, tuple) else value


@each_rule
@pytest.mark.parametrize("numel", [37, 2 * CHUNK + 52], ids=["few", "chunks"])
def test_a_step_has_the_bits_of_the_rule_and_a_preview_those_of_its_weights(rule, numel):
    params, gradient, state = case(rule, numel)
    expected = rule.update(params, (gradient / 3.0) * 0.5, state)
    before = digests((params, state))
    seen = preview(rule, params, gradient.copy(), state, over=3.0, times=0.5)
    sent, new, kept = step(rule, params, gradient.copy(), state, over=3.0, times=0.5)
    assert seen.same_bits(expected[0])
    assert sent.same_bits(expected[0])
    assert digests((new, kept)) == digests(expected)
    assert kept.step == state.step + 1
    assert digests((params, state)) == before, "what was not given is only read"


@each_rule
def test_a_slice_of_nothing_still_counts_the_step(rule):
    params, gradient, _ = (value.shard(0, 100) if isinstance(value, Tree) else value for value in case(rule))
    assert params.numel == 0
    sent, new, state = step(rule, params, gradient, rule.init(params))
    assert (sent.numel, new.numel, state.step) == (0, 0, 1)
    assert preview(rule, params, gradient, state).numel == 0


@each_rule
def test_donated_weights_and_moments_are_stepped_in_their_own_buffers(rule):
    params, gradient, state = case(rule, 2 * CHUNK)
    expected = digests(rule.update(params, gradient, state))
    places = [tree.flat.data_ptr() for tree in trees((params, state))]
    weights, moments = donated(params), donated(state)
    _, new, kept = step(rule, weights, gradient, moments)
    assert digests((new, kept)) == expected
    assert [tree.flat.data_ptr() for tree in trees((new, kept))] == places
    for old in trees((params, state, weights, moments)):
        with pytest.raises(TreeDonated):
            old.flat  # noqa: B018


@each_rule
def test_a_preview_reads_weights_and_moments_also_where_they_are_donated(rule):
    params, gradient, state = case(rule)
    before, weights, moments = digests((params, state)), donated(params), donated(state)
    preview(rule, weights, gradient, moments)
    assert digests((weights, moments)) == before
    assert weights.donated


def test_the_new_weights_lie_in_the_gradients_buffer_where_they_have_its_precision():
    rule = AdamW(lr=0.1)
    params, gradient, state = case(rule)
    place = gradient.flat.data_ptr()
    assert preview(rule, params, gradient, state).flat.data_ptr() == place
    params, gradient, state = case(rule, dtype=torch.bfloat16)
    place = gradient.flat.data_ptr()
    assert step(rule, params, gradient, state).sent.flat.data_ptr() == place
    params, gradient, state = case(rule, dtype=torch.bfloat16)
    assert step(rule, params, gradient, state, sent=torch.float32).sent.flat.dtype == torch.float32


def test_gradients_in_half_precision_move_weights_in_single():
    """The step is the rule's on the widened gradient; what is sent is rounded, what is kept is not."""
    rule = AdamW(lr=1e-4)
    params, gradient, state = case(rule, dtype=torch.bfloat16)
    wide, _ = rule.update(params, gradient.wide() / 7.0, state)
    sent, new, _ = step(rule, params, gradient.copy(), state, over=7.0)
    assert new.same_bits(wide)
    assert sent.flat.dtype == torch.bfloat16
    assert torch.equal(sent.flat, wide.flat.bfloat16())
    assert not torch.equal(new.flat, new.flat.bfloat16().float())


def test_a_step_that_sends_nothing_leaves_the_gradient_as_it_is():
    rule = AdamW(lr=0.1)
    params, gradient, state = case(rule)
    expected, before = step(rule, params, gradient.copy(), state), gradient.digest()
    new = step(rule, params, gradient, state, send=False)
    assert gradient.digest() == before
    assert digests((new.params, new.state)) == digests((expected.params, expected.state))


@pytest.mark.parametrize("operation", [preview, step])
def test_a_gradient_of_another_model_is_refused(operation):
    rule = AdamW(lr=0.1)
    params, _, state = case(rule)
    with pytest.raises(ValueError, match="layout"):
        operation(rule, params, Tree.of({"other": torch.ones(39)}), state)


# ------------------------------------------------------------------------------------------------------------- fused kernels


@each_rule
@pytest.mark.parametrize("given", [False, True], ids=["read", "donated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_form_for_a_gpu_is_that_of_the_rule_within_rounding(rule, given, dtype, monkeypatch):
    """`update_in_place` on whole slices; on a CPU only here."""
    params, gradient, state = case(rule, 300, dtype)
    expected = rule.update(params, (gradient.wide() / 3.0) * 0.5, state)
    before = digests((params, state))
    monkeypatch.setattr(chunked_step, "_has_fused_kernel", lambda rule, params: hasattr(rule, "update_in_place"))
    seen = preview(rule, params, gradient.copy(), state, over=3.0, times=0.5, sent=torch.float32)
    assert torch.allclose(seen.flat, expected[0].flat, rtol=1e-5, atol=1e-6)
    assert digests((params, state)) == before, "a preview only reads"
    unsent = step(rule, params, mine := gradient.copy(), state, over=3.0, times=0.5, send=False)
    assert mine.same_bits(gradient)
    assert digests((params, state)) == before, "what was not given is only read"
    place = params.flat.data_ptr()
    weights, moments = (donated(params), donated(state)) if given else (params, state)
    sent, new, kept = step(rule, weights, gradient.copy(), moments, over=3.0, times=0.5, sent=dtype)
    assert (new.flat.data_ptr() == place) is given
    assert sent.flat.dtype == dtype
    assert sent.same_bits(new.cast(dtype))
    assert kept.step == state.step + 1
    for one in (new, unsent.params):
        assert torch.allclose(one.flat, expected[0].flat, rtol=1e-5, atol=1e-6)
    for one, two in zip(trees((kept, unsent.state)), trees((expected[1], expected[1])), strict=True):
        assert torch.allclose(one.flat, two.flat, rtol=1e-5, atol=1e-6)


class Launches(TorchDispatchMode):
    """The operations that a GPU would launch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view and "empty" not in str(operation):
            self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_a_preview_for_a_gpu_is_three_launches(monkeypatch):
    """One copies weights and moments, and the new weights lie where they are sent from. Islands share the count of steps."""
    monkeypatch.setattr(chunked_step, "_has_fused_kernel", lambda rule, params: True)
    rule, params, mine = AdamW(lr=0.01, decay="all"), *(Tree.of({"w": torch.ones(64)}) for _ in range(2))
    state = rule.init(params)
    preview(rule, params, mine.copy(), state)
    with Launches() as launches:
        sent = preview(rule, params, mine, state, over=3.0)
    assert launches.names == ["mul", "_foreach_copy_", "_fused_adamw_"]
    assert sent.flat.data_ptr() == mine.flat.data_ptr()
