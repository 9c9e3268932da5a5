from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.errors import ConfigError, TreeDonated
from atoll.core.flat_tree import Tree, free_buffer_pool
from atoll.core.nested_trees import trees
from atoll.core.protocols import Rule
from atoll.engines.simulator.collectives import weighted_mean
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.testing.conformance import check_rule

torch.set_num_threads(1)

SHAPES = {"matrix": (7, 19), "bias": (19,), "scale": ()}
RULES = [
    DelayedNesterov(period=1),
    DelayedNesterov(period=4),
    DelayedNesterov(lr=Cosine(lr=0.3, steps=3), momentum=0.8, period=3, activation=0.3),
    DelayedNesterov(period=2, activation=0.5),
    Buffered(rule=SGD(lr=0.1, weight_decay=0.3), size=2),
    Buffered(rule=Momentum(lr=0.1), size=3),
    Buffered(rule=Nesterov(), size=4),
    Buffered(rule=Nesterov(), size=1),
    Buffered(rule=DelayedNesterov(period=2), size=2),
]
ids = pytest.mark.parametrize("rule", RULES, ids=repr)
PUSHED = [0.1, 0.2, 0.3, 0.4, 0.4, -0.1, 0.05, 0.15, 0.02, 0.03, 0.01, -0.04]


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tree(value: float) -> Tree:
    return Tree.of({"w": torch.tensor([value], dtype=torch.float64)})


def digests(value: Any) -> list[str]:
    return [leaf.digest() for leaf in trees(value)]


def values(rule: Rule, pushed: list[float], start: float = 1.0) -> tuple[list[float], Any]:
    """The weight after each arrival, and the state in the end."""
    params, seen = tree(start), []
    state = rule.init(params)
    for gradient in pushed:
        params, state = rule.update(params, tree(gradient), state)
        seen.append(params["w"].item())
    return seen, state


@dataclass(frozen=True)
class WholeWindows:
    """Applies every gradient so often that the weights must move."""

    rule: Rule
    times: int

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
        for _ in range(self.times):
            params, state = self.rule.update(params, gradient, state)
        return params, state


# ------------------------------------------------------------------------------------------------------ Delayed Nesterov


def test_delayed_nesterov_has_the_golden_values():
    seen, state = values(DelayedNesterov(lr=0.7, momentum=0.9, period=4), PUSHED)
    golden = [0.9825, 0.9475, 0.895, 0.6675, 0.5975, 0.615, 0.60625, 0.3595, 0.356, 0.35075, 0.349, 0.1544]
    assert seen == pytest.approx(golden, abs=1e-12)
    assert state.velocity["w"].item() == pytest.approx(0.32, abs=1e-12)
    assert state.step == 12


def test_delayed_nesterov_with_activation_has_the_golden_values():
    seen, state = values(DelayedNesterov(lr=0.7, momentum=0.9, period=4, activation=0.1), PUSHED)
    golden = [0.9825, 0.9475, 0.895, 0.71475, 0.629, 0.63075, 0.60625, 0.42565, 0.4001, 0.3728, 0.349, 0.21488]
    assert seen == pytest.approx(golden, abs=1e-12)
    assert state.velocity["w"].item() == pytest.approx(0.32, abs=1e-12)


@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_a_window_without_activation_ends_where_one_nesterov_step_on_its_mean_does(period):
    means = [sum(PUSHED[at : at + period]) / period for at in range(0, len(PUSHED), period)]
    expected, state = values(Nesterov(lr=0.7, momentum=0.9), means)
    seen, delayed = values(DelayedNesterov(lr=0.7, momentum=0.9, period=period), PUSHED)
    assert seen[period - 1 :: period] == pytest.approx(expected, abs=1e-12)
    assert delayed.velocity["w"].item() == pytest.approx(state.velocity["w"].item(), abs=1e-12)


def test_windows_of_one_arrival_have_the_bits_of_nesterov():
    one, two = Nesterov(lr=0.3, momentum=0.8), DelayedNesterov(lr=0.3, momentum=0.8, period=1)
    params = Tree.of(tensors(0))
    params["bias"][:2] = -0.0
    ours, ours_state, theirs, theirs_state = params, two.init(params), params, one.init(params)
    for step in range(5):
        gradient = Tree.of(tensors(step + 1))
        gradient["bias"][:2] = -0.0
        theirs, theirs_state = one.update(theirs, gradient, theirs_state)
        ours, ours_state = two.update(ours, gradient, ours_state)
        assert ours.same_bits(theirs)
        assert ours_state.velocity.same_bits(theirs_state.velocity)


def test_four_equal_gradients_with_momentum_at_each_move_as_equation_5_says_and_delayed_as_one():
    def moved(rule: Rule, gradient: float, velocity: float) -> float:
        params = tree(0.0)
        state = rule.init(params)._replace(velocity=tree(velocity))
        for _ in range(4):
            params, state = rule.update(params, tree(gradient), state)
        return -params["w"].item()

    naive, delayed = DelayedNesterov(lr=1.0, momentum=0.9, period=1), DelayedNesterov(lr=1.0, momentum=0.9, period=4)
    assert moved(naive, 1.0, 0.0) == pytest.approx(12.1441, abs=1e-12)
    assert moved(naive, 0.0, 1.0) == pytest.approx(2.78559, abs=1e-12)
    assert moved(delayed, 1.0, 0.0) == pytest.approx(1.9, abs=1e-12)
    assert moved(delayed, 0.0, 1.0) == pytest.approx(0.81, abs=1e-12)


def test_activation_spreads_the_momentum_and_applies_all_of_it():
    """With a velocity that stays 1, each arrival moves by its share of `momentum`."""
    rule, params = DelayedNesterov(lr=1.0, momentum=0.9, period=4, activation=0.25), tree(0.0)
    state, moved = rule.init(params)._replace(velocity=tree(1.0)), []
    for gradient in (0.0, 0.0, 0.0, 0.4):  # 0.9 * 1 + 0.4 / 4 = 1
        before = params
        params, state = rule.update(params, tree(gradient), state)
        moved.append((before - params)["w"].item() - gradient / 4)
    assert moved == pytest.approx([0.225] * 4, abs=1e-12)
    assert state.velocity["w"].item() == pytest.approx(1.0, abs=1e-12)


def test_the_schedule_counts_whole_windows():
    schedule = Cosine(lr=0.8, steps=3)
    seen, _ = values(DelayedNesterov(lr=schedule, momentum=0.0, period=2), [1.0] * 6, start=0.0)
    moved = [before - after for before, after in zip([0.0, *seen], seen, strict=False)]
    assert moved == pytest.approx([schedule(window) / 2 for window in (0, 0, 1, 1, 2, 2)], abs=1e-12)


def test_a_delayed_state_is_one_momentum_and_the_sum_of_the_window():
    rule, params = DelayedNesterov(period=4), tree(1.0)
    state, totals = rule.init(params), []
    for gradient in PUSHED[:8]:
        params, state = rule.update(params, tree(gradient), state)
        assert len(list(trees(state))) == 2
        totals.append(state.total["w"].item())
    assert totals == pytest.approx([0.1, 0.3, 0.6, 0.0, 0.4, 0.3, 0.35, 0.0], abs=1e-12)
    assert totals[3] == totals[7] == 0.0


# -------------------------------------------------------------------------------------------------------------- Buffered


@pytest.mark.parametrize("taking", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_full_buffer_has_the_bits_of_one_step_on_the_mean_that_islands_agree_on(size, taking):
    rule, params = Nesterov(lr=0.7, momentum=0.9), Tree.of(tensors(0))
    gradients = [Tree.of(tensors(seed + 1)) for seed in range(size)]
    for gradient in gradients:
        gradient["bias"][:2] = -0.0
    mean = weighted_mean([gradient.copy() for gradient in gradients], [1.0] * size)
    expected, expected_state = rule.update(params, mean, rule.init(params))
    buffered, now = Buffered(rule=rule, size=size), params
    state = buffered.init(params)
    for gradient in gradients:
        assert now.same_bits(params), "the weights moved before the buffer was full"
        now, state = (buffered.update_in_place if taking else buffered.update)(now, gradient, state)
    assert now.same_bits(expected)
    assert state.inner.velocity.same_bits(expected_state.velocity)
    assert (state.waiting, state.total.norm(), state.inner.step) == (0, 0.0, 1)


def test_an_arrival_that_waits_copies_neither_weights_nor_momentum():
    rule, params = Buffered(rule=Nesterov(), size=3), Tree.of(tensors(0))
    state = rule.init(params)
    for update in (rule.update, rule.update_in_place):
        after, new = update(params, Tree.of(tensors(1)), state)
        assert after is params
        assert new.inner is state.inner


def test_weights_donated_to_an_arrival_that_waits_can_still_be_read():
    rule, params = Buffered(rule=Nesterov(), size=3), Tree.of(tensors(0))
    for update in (rule.update, rule.update_in_place):
        digest, state = params.digest(), rule.init(params)
        params, _ = update(params.donate(), Tree.of(tensors(1)), state)
        assert not params.donated
        assert params.digest() == digest


def test_a_rule_without_a_twin_can_be_buffered():
    @dataclass(frozen=True)
    class Last:
        """Plain descent that remembers the last gradient, under its own name."""

        def init(self, params: Tree) -> Tree:
            return params.zeros()

        def update(self, params: Tree, gradient: Tree, state: Tree) -> tuple[Tree, Tree]:
            return params - 0.5 * gradient, gradient

    rule, params = Buffered(rule=Last(), size=2), tree(1.0)
    state = rule.init(params)
    for gradient in (0.2, 0.4, 0.6):
        params, state = rule.update_in_place(params, tree(gradient), state)
    assert params["w"].item() == pytest.approx(0.85, abs=1e-12)
    assert state.inner["w"].item() == pytest.approx(0.3, abs=1e-12)


def test_the_buffered_twin_of_adamw_follows_it_within_rounding():
    rule, params = Buffered(rule=AdamW(lr=0.01), size=2), Tree.of(tensors(0))
    one, two, state, taken = params, params, rule.init(params), rule.init(params)
    for seed in range(8):
        one, state = rule.update(one, Tree.of(tensors(seed)), state)
        two, taken = rule.update_in_place(two, Tree.of(tensors(seed)), taken)
    torch.testing.assert_close(two.flat, one.flat, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------------ both


@pytest.mark.parametrize(
    ("rule", "times"),
    [
        (DelayedNesterov(lr=0.1, period=4), 4),
        (DelayedNesterov(lr=0.1, period=3, activation=0.3), 3),
        (Buffered(rule=Nesterov(lr=0.1), size=4), 4),
        (Buffered(rule=AdamW(lr=0.02), size=2), 2),
        (Buffered(rule=DelayedNesterov(lr=0.1, period=2), size=2), 4),
    ],
    ids=repr,
)
def test_a_rule_over_whole_windows_keeps_its_guarantees(rule, times):
    check_rule(WholeWindows(rule, times))


@ids
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("numel", [1, 100, CHUNK, 2 * CHUNK + 3])
def test_the_twin_has_the_same_bits(rule, numel, given):
    params = Tree.of(tensors(0, {"w": (numel,)}))
    gradients = [Tree.of(tensors(seed + 1, {"w": (numel,)})) for seed in range(2)]
    taken, state, taken_state = params.copy(), rule.init(params), rule.init(params)
    for arrival in range(5):
        params, state = rule.update(params, gradients[arrival % 2], state)
        taken, taken_state = rule.update_in_place(taken.donate() if given else taken, gradients[arrival % 2], taken_state)
        for ours, theirs in zip(trees((taken, taken_state)), trees((params, state)), strict=True):
            assert ours.same_bits(theirs), arrival


@ids
def test_an_update_changes_none_of_its_arguments(rule):
    params, state = Tree.of(tensors(0)), rule.init(Tree.of(tensors(0)))
    for arrival in range(5):
        gradient = Tree.of(tensors(arrival + 1))
        before = digests((params, gradient, state))
        following = rule.update(params, gradient, state)
        assert digests((params, gradient, state)) == before
        assert digests(rule.update(params, gradient, state)) == digests(following)
        params, state = following


@ids
def test_the_twin_computes_in_the_state_and_leaves_gradients_and_weights_that_were_not_given(rule):
    params, state = Tree.of(tensors(0)), rule.init(Tree.of(tensors(0)))
    for arrival in range(5):
        gradient = Tree.of(tensors(arrival + 1))
        memory = [leaf.flat.data_ptr() for leaf in trees(state)]
        before = digests((params, gradient))
        following, new = rule.update_in_place(params, gradient, state)
        assert digests((params, gradient)) == before
        assert [leaf.flat.data_ptr() for leaf in trees(new)] == memory
        with pytest.raises(TreeDonated):
            _ = state.total.flat
        params, state = following, new


@ids
def test_the_twin_computes_in_the_weights_that_it_was_given(rule):
    params, state = Tree.of(tensors(0)), rule.init(Tree.of(tensors(0)))
    memory = params.flat.data_ptr()
    for arrival in range(5):
        params, state = rule.update_in_place(params.donate(), Tree.of(tensors(arrival + 1)), state)
        assert params.flat.data_ptr() == memory
        assert not params.donated


@ids
def test_a_given_gradient_goes_back_into_circulation(rule):
    params, state = Tree.of(tensors(0)), rule.init(Tree.of(tensors(0)))
    for arrival in range(5):
        free_buffer_pool()
        gradient = Tree.of(tensors(arrival + 1)).donate()
        memory = gradient.flat.data_ptr()
        params, state = rule.update_in_place(params, gradient, state)
        assert gradient.deleted
        assert memory in [leaf.flat.data_ptr() for leaf in (params, params.copy())]


@ids
def test_the_in_place_update_takes_no_buffer_if_the_gradient_does_not_match_or_was_donated(rule):
    params, gone = Tree.of(tensors(0)), Tree.of(tensors(1))
    state = rule.init(params)
    gone.donate()
    with pytest.raises(ValueError, match="different layouts"):
        rule.update_in_place(params, Tree.of({"w": torch.ones(3)}), state)
    with pytest.raises(TreeDonated):
        rule.update_in_place(params, gone, state)
    assert not any(leaf.deleted for leaf in trees((params, state)))


@ids
def test_shards_give_what_the_whole_gives(rule):
    def run(params: Tree, gradients: list[Tree]) -> Tree:
        state = rule.init(params)
        for gradient in gradients:
            params, state = rule.update(params, gradient, state)
        return params

    params, gradients = Tree.of(tensors(0)), [Tree.of(tensors(seed + 1)) for seed in range(5)]
    shards = [run(params.shard(rank, 3), [gradient.shard(rank, 3) for gradient in gradients]) for rank in range(3)]
    assert Tree.join(shards).equal(run(params, gradients))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(DelayedNesterov, period=0), r"period=0: .* at least 1 arrival. .* number of workers"),
        (partial(DelayedNesterov, period=2.0), r"period=2.0 is not a whole number"),
        (
            partial(DelayedNesterov, period=4, activation=0.3),
            r"activation=0.3 is outside \[0, 1/period\] = \[0, 0.25\].* default of 0",
        ),
        (partial(DelayedNesterov, period=4, activation=-0.1), r"activation=-0.1 is outside"),
        (partial(DelayedNesterov, period=4, activation=float("nan")), r"activation=nan is outside"),
        (partial(DelayedNesterov, period=4, momentum=1.0), r"momentum=1.0 is outside \[0, 1\)"),
        (partial(DelayedNesterov, period=4, lr=-1.0), r"lr=-1.0 must be"),
        (partial(Buffered, rule=SGD(lr=1.0), size=0), r"size=0: .* at least 1 gradient. .* number of workers"),
        (partial(Buffered, rule=SGD(lr=1.0), size=1.5), r"size=1.5 is not a whole number"),
        (partial(Buffered, rule=Buffered(rule=SGD(lr=1.0), size=2), size=3), r"itself buffered.*Use one Buffered with size=6"),
    ],
)
def test_impossible_settings_are_refused_with_advice(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
