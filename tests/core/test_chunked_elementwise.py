from typing import Any, NamedTuple

import pytest
import torch

from atoll.core.chunked_elementwise import CHUNK, elementwise
from atoll.core.errors import TreeDonated
from atoll.core.flat_tree import Tree, empty
from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov

torch.set_num_threads(1)

RULES = [
    SGD(lr=0.1, weight_decay=0.3),
    Momentum(lr=0.1, weight_decay=0.3),
    Nesterov(),
    Nesterov(lr=Cosine(lr=0.1, steps=30, warmup=5), weight_decay=0.3),
    Adam(lr=1e-2),
    AdamW(lr=1e-2),
    AdamW(lr=1e-2, decay="all"),
]
AROUND_A_BOUNDARY = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1]


def some(numel: int, seed: int = 0) -> Tree:
    """A vector and matrices, whose borders are not those of the chunks."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    edge = numel // 3
    return Tree.of({"vector": values[:edge], "row": values[None, edge : 2 * edge], "column": values[2 * edge :, None]})


class Count(NamedTuple):
    calls: int
    nested: tuple[Tree, str]
    tree: Tree


class Rules:
    """Elementwise methods of every form, which note the sizes they were given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @elementwise
    def double(self, tree: Tree) -> Tree:
        self.sizes.append(tree.numel)
        return tree * 2

    @elementwise
    def count(self, tree: Tree, scale: float, count: Count) -> tuple[Tree, Count]:
        return tree * scale, Count(count.calls + 1, (count.nested[0] - tree, count.nested[1] + "!"), count.tree + tree)

    @elementwise
    def first(self, one: Tree, two: Tree) -> Tree:
        return one

    @elementwise
    def difference(self, one: Tree, two: Tree) -> Tree:
        return one - two


def trees_of(value: Any) -> list[Tree]:
    if isinstance(value, Tree):
        return [value]
    return [tree for item in value for tree in trees_of(item)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("numel", AROUND_A_BOUNDARY)
def test_cutting_changes_no_bit_of_any_rule(rule, numel):
    params, gradient = some(numel, 0), some(numel, 1)
    chunked = rule.update(params, gradient, rule.update(params, gradient, rule.init(params))[1])
    whole = type(rule).update.__wrapped__
    straight = whole(rule, params, gradient, whole(rule, params, gradient, rule.init(params))[1])
    for one, two in zip(trees_of(chunked), trees_of(straight), strict=True):
        assert one.equal(two)
    assert chunked[1].step == straight[1].step == 2


@pytest.mark.parametrize("numel", AROUND_A_BOUNDARY)
def test_every_element_is_visited_once_in_chunks_of_the_set_size(numel):
    rules = Rules()
    tree = some(numel)
    assert rules.double(tree).equal(tree * 2)
    assert rules.sizes == [min(CHUNK, numel - start) for start in range(0, numel, CHUNK)]


@pytest.mark.parametrize("numel", [10, 2 * CHUNK + 1])
def test_named_tuples_with_numbers_and_text_survive(numel):
    tree, zero = some(numel), some(numel).zeros()
    scaled, count = Rules().count(tree, 3.0, Count(41, (zero, "so"), zero))
    assert type(count) is Count
    assert count.calls == 42
    assert count.nested[1] == "so!"
    assert scaled.equal(tree * 3.0)
    assert count.nested[0].equal(-tree)
    assert count.tree.equal(tree)


@pytest.mark.parametrize("numel", [12, 2 * CHUNK + 1])
def test_arguments_that_were_not_given_can_still_be_read(numel):
    one, two = some(numel, 0), some(numel, 1)
    before = one.digest(), two.digest()
    Rules().difference(one, two)
    assert (one.digest(), two.digest()) == before


def test_a_result_in_chunks_has_the_layout_of_the_whole_and_a_buffer_of_its_own():
    one = some(2 * CHUNK + 1)
    result = Rules().first(one, one)
    assert result.layout == one.layout
    assert result.flat.data_ptr() != one.flat.data_ptr()
    assert result.equal(one)


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("numel", [14, 2 * CHUNK + 1])
def test_a_given_argument_is_used_up(given, numel):
    arguments = [some(numel, 0), some(numel, 1)]
    expected = arguments[0] - arguments[1]
    kept = arguments[given]
    arguments[given] = kept.donate()
    assert Rules().difference(*arguments).equal(expected)
    assert arguments[given].deleted
    for tree in (kept, arguments[given]):
        with pytest.raises(TreeDonated):
            _ = tree.flat


def test_the_buffer_of_a_given_argument_goes_back_into_circulation():
    numel = 2 * CHUNK + 7
    one, two = some(numel, 0), some(numel, 1)
    keep = one.flat  # so that no new buffer can have that address
    Rules().difference(one.donate(), two)
    assert empty(numel, torch.float32, torch.device("cpu")).data_ptr() == keep.data_ptr()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("numel", [21, CHUNK + 5])
def test_a_rule_may_be_given_its_arguments(rule, numel):
    params, gradient = some(numel, 0), some(numel, 1)
    expected, _ = rule.update(params, gradient, rule.init(params))
    assert rule.update(params.donate(), gradient.donate(), rule.init(some(numel)))[0].equal(expected)


def test_trees_of_different_layouts_do_not_mix_in_chunks_either():
    with pytest.raises(ValueError, match="different layouts"):
        Rules().difference(some(2 * CHUNK), some(2 * CHUNK + 3))


def test_a_chunked_method_keeps_its_name_and_docstring():
    assert Nesterov.update.__name__ == "update"
    assert Rules.double.__qualname__ == "Rules.double"
