import pytest
import torch
from torch import Tensor

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.errors import ConfigError, TreeDonated
from atoll.core.flat_tree import Tree, free_buffer_pool
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov

torch.set_num_threads(1)

SHAPES = {"embedding": (33, 7), "gain": (7,), "matrix": (7, 19), "bias": (19,), "scale": ()}
RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.3),
    Momentum(lr=0.1, momentum=0.8),
    Momentum(lr=0.1, weight_decay=0.3),
    Nesterov(),
    Nesterov(lr=0.1, momentum=0.8, weight_decay=0.3),
    Nesterov(lr=Cosine(lr=0.1, steps=30, warmup=5)),
]
ids = pytest.mark.parametrize("rule", RULES, ids=repr)


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tree(value: float) -> Tree:
    return Tree.of({"w": torch.tensor([value], dtype=torch.float64)})


def torch_form(rule: SGD | Momentum | Nesterov, params: list[Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(
        params,
        lr=rule.lr if isinstance(rule.lr, float) else 1.0,
        momentum=getattr(rule, "momentum", 0.0),
        nesterov=isinstance(rule, Nesterov),
        weight_decay=rule.weight_decay,
        foreach=False,
        fused=False,
    )


@ids
def test_every_rule_has_the_bits_of_torch_over_fifty_steps(rule):
    theirs = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(0).items()}
    optimizer = torch_form(rule, list(theirs.values()))
    params = Tree.of(tensors(0))
    state = rule.init(params)
    for step in range(50):
        gradient = tensors(step + 1)
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].clone()
        if not isinstance(rule.lr, float):
            optimizer.param_groups[0]["lr"] = rule.lr(step)
        optimizer.step()
        params, state = rule.update(params, Tree.of(gradient), state)
        for name in SHAPES:
            assert torch.equal(params[name], theirs[name]), (step, name)
    assert state.step == 50


@ids
def test_an_update_changes_none_of_its_arguments(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    state = rule.update(params, gradient, rule.init(params))[1]
    velocity = getattr(state, "velocity", gradient)
    before = params.digest(), gradient.digest(), velocity.digest()
    rule.update(params, gradient, state)
    assert (params.digest(), gradient.digest(), velocity.digest()) == before


@ids
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("numel", [1, 100, CHUNK, 2 * CHUNK + 3])
def test_the_twin_in_place_has_the_same_bits(rule, numel, given):
    params, gradient = Tree.of(tensors(0, {"w": (numel,)})), Tree.of(tensors(1, {"w": (numel,)}))
    taken, state, taken_state = params.copy(), rule.init(params), rule.init(params)
    for _ in range(3):
        params, state = rule.update(params, gradient, state)
        taken, taken_state = rule.update_in_place(taken.donate() if given else taken, gradient, taken_state)
    assert taken.same_bits(params)
    assert rule.exact
    assert taken_state.step == state.step
    if hasattr(state, "velocity"):
        assert taken_state.velocity.same_bits(state.velocity)


@ids
def test_the_twin_computes_in_the_weights_it_was_given_and_leaves_the_gradient(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    memory, digest, state = params.flat.data_ptr(), gradient.digest(), rule.init(params)
    result, _ = rule.update_in_place(params.donate(), gradient, state)
    assert result.flat.data_ptr() == memory
    assert not result.donated
    assert gradient.digest() == digest
    with pytest.raises(TreeDonated):
        _ = params["gain"]


@ids
def test_the_twin_leaves_weights_that_it_was_not_given(rule):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    digest, state = params.digest(), rule.init(params)
    result, _ = rule.update_in_place(params, gradient, state)
    assert params.digest() == digest
    assert result.flat.data_ptr() != params.flat.data_ptr()
    if hasattr(state, "velocity"):
        with pytest.raises(TreeDonated):
            _ = state.velocity["gain"]


@ids
def test_the_twin_puts_a_given_gradient_back_into_circulation(rule):
    free_buffer_pool()
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1)).donate()
    memory = gradient.flat.data_ptr()
    result, _ = rule.update_in_place(params, gradient, rule.init(params))
    assert gradient.deleted
    assert result.flat.data_ptr() != memory
    assert params.copy().flat.data_ptr() == memory


@ids
def test_the_twin_takes_nothing_if_the_gradient_does_not_match(rule):
    params = Tree.of(tensors(0))
    with pytest.raises(ValueError, match="different layouts"):
        rule.update_in_place(params, Tree.of({"w": torch.ones(3)}), rule.init(params))
    assert not params.deleted


@ids
@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_give_what_the_whole_gives(rule, size):
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    whole, state = rule.update(params, gradient, rule.init(params))
    whole, _ = rule.update(whole, gradient, state)
    shards = []
    for rank in range(size):
        mine, part = params.shard(rank, size), gradient.shard(rank, size)
        mine, own = rule.update(mine, part, rule.init(mine))
        shards.append(rule.update(mine, part, own)[0])
    assert Tree.join(shards).equal(whole)


def test_momentum_without_momentum_is_plain_descent():
    params, gradient = Tree.of(tensors(0)), Tree.of(tensors(1))
    plain = SGD(lr=0.3).update(params, gradient, SGD(lr=0.3).init(params))[0]
    for rule in (Momentum(lr=0.3, momentum=0.0), Nesterov(lr=0.3, momentum=0.0)):
        assert rule.update(params, gradient, rule.init(params))[0].equal(plain)


def test_descent_with_rate_one_takes_the_mean_of_the_islands():
    start, ends = tree(1.0), [tree(0.5), tree(0.25)]
    delta = ((start - ends[0]) + (start - ends[1])) / 2
    assert SGD(lr=1.0).update(start, delta, SGD(lr=1.0).init(start))[0]["w"].item() == 0.375


def test_nesterov_on_the_mean_of_each_round_has_the_golden_values():
    rounds = [(0.1, 0.2, 0.3, 0.4), (0.4, -0.1, 0.05, 0.15), (0.02, 0.03, 0.01, -0.04)]
    rule, params, seen = Nesterov(lr=0.7, momentum=0.9), tree(1.0), []
    state = rule.init(params)
    for deltas in rounds:
        params, state = rule.update(params, tree(sum(deltas) / 4), state)
        seen.append(params["w"].item())
    assert seen == pytest.approx([0.6675, 0.3595, 0.1544], abs=1e-12)
    assert state.velocity["w"].item() == pytest.approx(0.32, abs=1e-12)


def test_four_equal_gradients_in_turn_move_as_equation_5_says():
    rule = Nesterov(lr=1.0, momentum=0.9)

    def moved(gradient: float, velocity: float, times: int) -> float:
        params = tree(0.0)
        state = rule.init(params)._replace(velocity=tree(velocity))
        for _ in range(times):
            params, state = rule.update(params, tree(gradient), state)
        return -params["w"].item()

    assert moved(gradient=1.0, velocity=0.0, times=4) == pytest.approx(12.1441, abs=1e-12)
    assert moved(gradient=0.0, velocity=1.0, times=4) == pytest.approx(2.78559, abs=1e-12)
    assert moved(gradient=1.0, velocity=0.0, times=1) == pytest.approx(1.9, abs=1e-12)
    assert moved(gradient=0.0, velocity=1.0, times=1) == pytest.approx(0.81, abs=1e-12)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("rule", [SGD, Momentum, Nesterov])
def test_an_impossible_learning_rate_is_refused(rule, lr):
    with pytest.raises(ConfigError, match=r"lr=.* at least 0"):
        rule(lr=lr)


@pytest.mark.parametrize("rule", [Momentum, Nesterov])
def test_momentum_that_never_fades_is_refused(rule):
    with pytest.raises(ConfigError, match=r"momentum=1.0 is outside \[0, 1\)"):
        rule(lr=0.1, momentum=1.0)


def test_negative_weight_decay_is_refused():
    with pytest.raises(ConfigError, match=r"weight_decay=-0.1"):
        SGD(lr=0.1, weight_decay=-0.1)
