import pytest
import torch
from torch import Tensor

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.errors import ConfigError, TreeDonated
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.optim.adam import Adam, AdamW, complement, matrices
from atoll.optim.schedules import Cosine

torch.set_num_threads(1)

SHAPES = {"embedding": (33, 7), "gain": (7,), "matrix": (7, 19), "head": (19, 5), "bias": (19,), "scale": (), "last": (3, 1)}
RULES = [
    Adam(lr=1e-2),
    Adam(lr=0.3, eps=0.1),
    AdamW(lr=1e-2),
    AdamW(lr=1e-2, weight_decay=0.5, decay="all"),
    AdamW(lr=1e-2, weight_decay=0.0),
    # With this beta a square root and a power of 0.5 differ in the 18th step.
    AdamW(lr=Cosine(lr=1e-2, steps=30, warmup=5, floor=1e-4), betas=(0.8, 0.963)),
]
ids = pytest.mark.parametrize("rule", RULES, ids=repr)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def torch_form(rule: Adam | AdamW, params: dict[str, torch.nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    lr = rule.lr if isinstance(rule.lr, float) else 1.0
    if isinstance(rule, Adam):
        return torch.optim.Adam(params.values(), lr=lr, betas=rule.betas, eps=rule.eps, foreach=False, fused=fused)
    decaying = [p for p in params.values() if p.dim() >= 2 or rule.decay == "all"]
    others = [p for p in params.values() if p.dim() < 2 and rule.decay != "all"]
    groups = [{"params": decaying, "weight_decay": rule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=rule.betas, eps=rule.eps, foreach=False, fused=fused)


def torch_steps(rule: Adam | AdamW, steps: int, *, fused: bool, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    params = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(0, dtype).items()}
    optimizer, seen = torch_form(rule, params, fused=fused), []
    for step in range(steps):
        for name, gradient in tensors(step + 1, dtype).items():
            params[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rule.lr if isinstance(rule.lr, float) else rule.lr(step)
        optimizer.step()
        seen.append({name: parameter.detach().clone() for name, parameter in params.items()})
    return seen


def our_steps(
    rule: Adam | AdamW, steps: int, *, taking: bool = False, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    params, seen = Tree.of(tensors(0, dtype)), []
    state = rule.init(params)
    for step in range(steps):
        update = rule.update_in_place if taking else rule.update
        params, state = update(params, Tree.of(tensors(step + 1, dtype)), state)
        seen.append(params.tensors())
    assert state.step == steps
    return seen


@ids
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_has_the_bits_of_torchs_plain_form_over_fifty_steps(rule, dtype):
    for ours, theirs in zip(our_steps(rule, 50, dtype=dtype), torch_steps(rule, 50, fused=False, dtype=dtype), strict=True):
        for name in SHAPES:
            assert torch.equal(ours[name], theirs[name]), name


@ids
@pytest.mark.parametrize("taking", [False, True])
def test_every_rule_and_its_twin_follow_torchs_fused_form_within_rounding(rule, taking):
    ours, theirs = our_steps(rule, 50, taking=taking)[-1], torch_steps(rule, 50, fused=True)[-1]
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@ids
def test_the_twin_follows_the_readable_form_within_rounding(rule):
    for ours, theirs in zip(our_steps(rule, 50, taking=True), our_steps(rule, 50), strict=True):
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@ids
@pytest.mark.parametrize("taking", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shards_give_what_the_whole_gives(rule, size, taking):
    def steps(params: Tree, gradients: list[Tree]) -> tuple[Tree, Tree]:
        state = rule.init(params)
        params = params.copy()
        for gradient in gradients:
            params, state = (rule.update_in_place if taking else rule.update)(params, gradient, state)
        return params, state.square

    params, gradients = Tree.of(tensors(0)), [Tree.of(tensors(seed)) for seed in (1, 2, 3)]
    whole, square = steps(params, gradients)
    shards = [steps(params.shard(rank, size), [g.shard(rank, size) for g in gradients]) for rank in range(size)]
    assert Tree.join([shard for shard, _ in shards]).equal(whole)
    assert Tree.join([squares for _, squares in shards]).equal(square)


def test_a_chunk_that_begins_inside_a_matrix_decays_as_the_matrix():
    layout = {"bias": torch.ones(10), "matrix": torch.ones(3, CHUNK), "gain": torch.ones(CHUNK)}
    params = Tree.of(layout)
    rule = AdamW(lr=0.5, weight_decay=0.5)
    updated, _ = rule.update(params, params.zeros(), rule.init(params))
    assert torch.equal(updated["matrix"], torch.full((3, CHUNK), 0.75))
    assert torch.equal(updated["bias"], torch.ones(10))
    assert torch.equal(updated["gain"], torch.ones(CHUNK))


@ids
def test_an_update_changes_none_of_its_arguments(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    state = rule.update(params, gradient, rule.init(params))[1]
    arguments = (params, gradient, state.mean, state.square)
    before = [tree.digest() for tree in arguments]
    rule.update(params, gradient, state)
    assert [tree.digest() for tree in arguments] == before


@ids
def test_update_in_place_computes_in_its_arguments_buffers_and_leaves_the_gradient(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    state = rule.init(params)
    memory, digest = [t.flat.data_ptr() for t in (params, state.mean, state.square)], gradient.digest()
    result, new = rule.update_in_place(params.donate(), gradient, state)
    assert [t.flat.data_ptr() for t in (result, new.mean, new.square)] == memory
    assert gradient.digest() == digest
    for tree in (params, state.mean, state.square):
        with pytest.raises(TreeDonated):
            _ = tree.flat


@ids
def test_the_twin_leaves_weights_that_it_was_not_given(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    digest, state, taken_state = params.digest(), rule.init(params), rule.init(params)
    result, _ = rule.update_in_place(params, gradient, state)
    assert params.digest() == digest
    assert result.same_bits(rule.update_in_place(params.donate(), gradient, taken_state)[0])
    assert state.mean.deleted


@ids
def test_the_twin_takes_nothing_if_the_gradient_does_not_match(rule):
    params = Tree.of(tensors(0))
    with pytest.raises(ValueError, match="different layouts"):
        rule.update_in_place(params, Tree.of({"w": torch.ones(3)}), rule.init(params))
    assert not params.deleted


def test_adam_is_adamw_without_decay():
    adam, adamw = Adam(lr=1e-2, betas=(0.8, 0.9)), AdamW(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.0)
    for one, two in zip(our_steps(adam, 5), our_steps(adamw, 5), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in SHAPES)


def test_the_first_step_moves_every_weight_by_the_learning_rate():
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    rule = Adam(lr=0.25, eps=0.0)
    moved = (params - rule.update(params, gradient, rule.init(params))[0]).flat
    torch.testing.assert_close(moved, 0.25 * gradient.flat.sign())


def test_decaying_ranges_and_the_rest_cover_the_buffer_once():
    layout = Layout.of(tensors(0))
    for start in range(0, layout.numel, 37):
        window = layout.slice(start, min(start + 200, layout.numel))
        ranges = matrices(window)
        cover = [position for pair in (*ranges, *complement(ranges, window.numel)) for position in range(*pair)]
        assert sorted(cover) == list(range(window.numel))
        shapes = [piece.shape for piece in window.pieces for _ in range(piece.count)]
        assert {position for pair in ranges for position in range(*pair)} == {i for i, s in enumerate(shapes) if len(s) >= 2}


def test_an_empty_tree_is_updated_to_an_empty_tree():
    params = Tree.of({})
    for rule in RULES:
        assert rule.update(params, params, rule.init(params))[0].numel == 0
        assert rule.update_in_place(params.copy(), params, rule.init(params))[0].numel == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must be .* at least 0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0 is outside \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]=-0.1 is outside"),
        ({"eps": -1e-8}, r"eps=-1e-08"),
        ({"weight_decay": float("inf")}, r"weight_decay=inf"),
        ({"decay": "none"}, r"decay='none' is neither .* weight_decay=0"),
    ],
)
def test_impossible_settings_are_refused_with_advice(settings, message):
    with pytest.raises(ConfigError, match=message):
        AdamW(**settings)
