import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from atoll.core.errors import TreeDonated
from atoll.core.flat_tree import Tree, all_finite, empty, finite_and_set, measure, products, trainable
from atoll.core.layout import Layout, shard_range

torch.set_num_threads(1)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5)
few = settings(max_examples=40, deadline=None)


def tensors(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype] | None = None, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kinds = dtypes or [torch.float32]
    return {f"t{i}": torch.randn(s, generator=generator).to(kinds[i % len(kinds)]) for i, s in enumerate(shapes)}


def some(seed: int = 0, numel: int = 20) -> Tree:
    """A Tree with a matrix, a vector and a scalar."""
    return Tree.of(dict(zip(("matrix", "vector", "scalar"), tensors([(3, 4), (numel - 13,), ()], seed=seed).values(), strict=True)))


# ------------------------------------------------------------------------------------------------------ making and reading


@few
@given(SHAPES, st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
def test_a_tree_returns_its_tensors_unchanged(shapes, dtypes):
    given_tensors = tensors(shapes, dtypes)
    back = Tree.of(given_tensors).tensors()
    assert list(back) == list(given_tensors)
    for name, tensor in given_tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)


def test_a_tree_is_one_buffer_and_its_tensors_are_windows_on_it():
    tree = some()
    tree.flat[:12] = 7.0
    assert torch.equal(tree["matrix"], torch.full((3, 4), 7.0))
    offsets = {name: (tree[name].data_ptr() - tree.flat.data_ptr()) // 4 for name in tree}
    assert offsets == {"matrix": 0, "vector": 12, "scalar": 19}


def test_a_tree_shares_no_memory_with_what_it_was_made_of_or_gives_out():
    source = {"w": torch.ones(3)}
    tree = Tree.of(source)
    source["w"].zero_()
    tree.tensors()["w"].zero_()
    assert torch.equal(tree["w"], torch.ones(3))


def test_a_mixed_tree_computes_in_the_widest_dtype_and_keeps_each_own():
    mixed = {"half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "full": torch.tensor([3.0], dtype=torch.float32)}
    tree = Tree.of(mixed) * (1 + 2.0**-12)  # too fine for bfloat16
    assert tree.flat.dtype == torch.float32
    assert tree["half"][0] == 1 + 2.0**-12
    assert {name: tensor.dtype for name, tensor in tree.tensors().items()} == {"half": torch.bfloat16, "full": torch.float32}


def test_two_sixteen_bit_dtypes_share_a_buffer_that_holds_both():
    tree = Tree.of({"a": torch.tensor([2.0**-24], dtype=torch.float16), "b": torch.tensor([2.0**100], dtype=torch.bfloat16)})
    assert tree.flat.tolist() == [2.0**-24, 2.0**100]


def test_integers_are_refused_by_name():
    with pytest.raises(TypeError, match=r"steps is torch.int64: a Tree holds floating-point tensors only"):
        Tree.of({"w": torch.ones(2), "steps": torch.ones(2, dtype=torch.int64)})


def test_a_tree_is_a_mapping_in_its_own_order():
    tree = Tree.of({"z": torch.ones(1), "a": torch.ones(2)})
    assert list(tree) == ["z", "a"]
    assert len(tree) == 2
    assert "a" in tree
    assert "b" not in tree
    assert {name: tensor.numel() for name, tensor in tree.items()} == {"z": 1, "a": 2}
    with pytest.raises(KeyError):
        tree["b"]


def test_an_empty_tree_works():
    nothing = Tree.of({})
    assert nothing.numel == 0
    assert (nothing + nothing * 2).equal(nothing)
    assert nothing.norm() == 0.0
    assert nothing.is_finite()
    assert Tree.join([nothing.shard(rank, 3) for rank in range(3)]).equal(nothing)
    assert nothing.digest() == Tree.of({}).digest()


def test_size_in_elements_and_bytes():
    tree = Tree.of({"w": torch.ones(3, 5, dtype=torch.bfloat16)})
    assert (tree.numel, tree.nbytes) == (15, 30)
    assert repr(tree) == "Tree(1 tensors, 15 x bfloat16, cpu)"


# ----------------------------------------------------------------------------------------------------------------- modules


class Tied(torch.nn.Module):
    """A module with a tied head, a frozen layer and a bias between its matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.gain = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.middle = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_module_gives_its_trainable_parameters_tied_ones_once():
    tree = Tree.of(Tied())
    assert set(tree) == {"embedding.weight", "gain", "middle.weight", "middle.bias"}
    assert tree.numel == 15 + 3 + 9 + 3
    assert not tree.flat.requires_grad


def test_a_modules_matrices_come_first():
    dimensions = [parameter.dim() for parameter in trainable(Tied()).values()]
    assert dimensions == sorted(dimensions, reverse=True) == [2, 2, 1, 1]
    assert list(Tree.of(Tied())) == list(trainable(Tied()))


def test_a_tree_does_not_follow_its_module():
    module = Tied()
    tree = Tree.of(module)
    with torch.no_grad():
        module.gain.zero_()
    assert torch.equal(tree["gain"], torch.ones(3))


# -------------------------------------------------------------------------------------------------------------- arithmetic

OPERATIONS: dict[str, tuple[Callable[..., Tree], Callable[..., Tensor]]] = {
    "a + b": (lambda a, b, c: a + b, lambda a, b, c: a + b),
    "a - b": (lambda a, b, c: a - b, lambda a, b, c: a - b),
    "a * b": (lambda a, b, c: a * b, lambda a, b, c: a * b),
    "a / b": (lambda a, b, c: a / b, lambda a, b, c: a / b),
    "-a": (lambda a, b, c: -a, lambda a, b, c: -a),
    "a + 0.3": (lambda a, b, c: a + 0.3, lambda a, b, c: a + 0.3),
    "0.3 + a": (lambda a, b, c: 0.3 + a, lambda a, b, c: 0.3 + a),
    "a - 0.3": (lambda a, b, c: a - 0.3, lambda a, b, c: a - 0.3),
    "0.3 * a": (lambda a, b, c: 0.3 * a, lambda a, b, c: 0.3 * a),
    "a / 3": (lambda a, b, c: a / 3, lambda a, b, c: a / 3),
    "sqrt": (lambda a, b, c: (a * a).sqrt(), lambda a, b, c: (a * a).sqrt()),
    "add": (lambda a, b, c: a.add(b, 0.3), lambda a, b, c: a.add(b, alpha=0.3)),
    "lerp": (lambda a, b, c: a.lerp(b, 0.3), lambda a, b, c: a.lerp(b, 0.3)),
    "addcmul": (lambda a, b, c: a.addcmul(b, c, 0.3), lambda a, b, c: a.addcmul(b, c, value=0.3)),
    "addcdiv": (lambda a, b, c: a.addcdiv(b, c, 0.3), lambda a, b, c: a.addcdiv(b, c, value=0.3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arithmetic_is_that_of_the_tensors(name, dtype):
    on_trees, on_tensors = OPERATIONS[name]
    shapes = [(3, 4), (7,), (), (2, 1, 3)]
    operands = [tensors(shapes, [dtype], seed) for seed in range(3)]
    trees = [Tree.of(operand) for operand in operands]
    before = [tree.digest() for tree in trees]
    result = on_trees(*trees)
    for piece in operands[0]:
        assert torch.equal(result[piece], on_tensors(*(operand[piece] for operand in operands))), piece
    assert [tree.digest() for tree in trees] == before


def test_add_rounds_once_where_two_operations_round_twice():
    # (1 + 2**-12)**2 needs 25 bits. Rounded by itself, it loses the last one, which is all that the sum leaves.
    factor = 1 + 2.0**-12
    tree, other = Tree.of({"w": torch.tensor([-1 - 2.0**-11])}), Tree.of({"w": torch.tensor([factor])})
    assert tree.add(other, factor)["w"].item() == 2.0**-24
    assert (tree + other * factor)["w"].item() == 0.0


def test_zeros_and_copy_keep_the_layout_and_share_nothing():
    tree = some()
    zeros, copy = tree.zeros(), tree.copy()
    assert zeros.layout == copy.layout == tree.layout
    assert zeros.norm() == 0.0
    assert copy.equal(tree)
    copy.flat.zero_()
    assert tree.norm() > 0


def test_a_tree_on_its_device_moves_nowhere():
    tree = some()
    assert tree.to("cpu") is tree


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.ones(2), "c": torch.ones(3)}, r"\['b', 'c'\] are in one of them only"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, r"b is .*shape=\(3,\).* and .*shape=\(4,\)"),
        ({"a": torch.ones(2), "b": torch.ones(3).bfloat16()}, r"b is .*float32.* and .*bfloat16"),
        ({"b": torch.ones(3), "a": torch.ones(2)}, r"their order differs"),
        ({f"x{i}": torch.ones(1) for i in range(5)}, r"and more are in one of them only"),
    ],
)
def test_trees_of_different_layouts_do_not_mix_and_say_where_they_differ(other, message):
    tree = Tree.of({"a": torch.ones(2), "b": torch.ones(3)})
    for combine in (Tree.__add__, Tree.dot, lambda one, two: one.add(two, 0.5), lambda one, two: one.addcmul(one, two, 0.5)):
        with pytest.raises(ValueError, match=message):
            combine(tree, Tree.of(other))


# ----------------------------------------------------------------------------------------------------- handing buffers on


@pytest.mark.parametrize(
    "read",
    [
        lambda tree: tree["matrix"],
        lambda tree: tree.flat,
        lambda tree: tree + 1,
        lambda tree: some() + tree,
        lambda tree: tree.norm(),
        lambda tree: tree.digest(),
        lambda tree: tree.tensors(),
        lambda tree: tree.copy(),
        lambda tree: tree.shard(0, 2),
        lambda tree: tree.donate(),
        lambda tree: tree.release(),
    ],
)
@pytest.mark.parametrize("hand_on", [Tree.donate, Tree.claim, Tree.release])
def test_a_tree_whose_buffer_has_another_owner_cannot_be_read(hand_on, read):
    tree = some()
    hand_on(tree)
    assert tree.deleted
    assert repr(tree) == "Tree(donated)"
    with pytest.raises(TreeDonated, match="was donated"):
        read(tree)


def test_a_donated_tree_can_be_read_until_it_is_claimed():
    tree = some().donate()
    memory = tree.flat.data_ptr()
    assert (tree * 2).equal(some() * 2)
    assert tree.donated
    mine = tree.claim()
    assert (mine.flat.data_ptr(), mine.donated, tree.donated, tree.deleted) == (memory, False, False, True)


def test_a_donated_tree_is_writable_itself_and_another_as_a_copy():
    tree = some()
    memory = tree.flat.data_ptr()
    assert tree.writable().flat.data_ptr() != memory
    assert tree.donate().writable().flat.data_ptr() == memory


def test_a_claim_in_another_dtype_returns_the_buffer_to_the_pool():
    tree, expected = some(numel=1249), some(numel=1249).cast(torch.bfloat16)
    buffer = tree.flat
    half = tree.claim(torch.bfloat16)
    assert half.equal(expected)
    assert tree.deleted
    assert empty(1249, torch.float32, torch.device("cpu")).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("borrow", [Tree.borrow, lambda tree: tree.slice(0, tree.numel)])
def test_a_borrowed_tree_is_never_computed_in(borrow):
    whole = some()
    tree = borrow(whole)
    assert tree.borrowed
    assert not tree.donate().donated
    mine = tree.claim()
    assert mine.flat.data_ptr() != whole.flat.data_ptr()
    assert not mine.borrowed
    tree.release()
    assert whole.equal(some())


def test_a_borrowed_tree_without_a_buffer_is_collected_at_every_read_and_computed_in_what_was_collected():
    reads = []

    def read(layout):
        reads.append(some(1).part(layout).copy().flat)
        return reads[-1]

    borrowed = Tree.borrowed_from(some().layout, read)
    assert (some(0) - borrowed).equal(some(0) - some(1))
    result = some(0) - borrowed
    assert result.flat.data_ptr() == reads[-1].data_ptr()
    assert (borrowed + 1).equal(some(1) + 1)
    assert borrowed.claim().flat.data_ptr() == reads[-1].data_ptr()
    assert not borrowed.deleted
    reads.clear()
    for ranges in ([(2, 5)], [(0, 3), (12, 14)]):
        part = borrowed.select(ranges)
        assert part.borrowed
        assert part.equal(some(1).select(ranges))
        assert [read.numel() for read in reads] == [part.numel], "only the selected pieces, once"
        reads.clear()


def test_a_part_replaces_pieces_in_a_copy_and_then_in_that_copy():
    whole, one, two = some(0), some(1).select([(0, 3), (12, 14)]), some(2).select([(3, 5)])
    first = whole.overlaid(one)
    assert first.part(one.layout).equal(one)
    memory, second = first.flat.data_ptr(), first.overlaid(two)
    assert second.flat.data_ptr() == memory
    assert second.part(one.layout).equal(one)
    assert second.part(two.layout).equal(two)
    assert whole.equal(some(0))
    other = some(1)
    assert whole.overlaid(other) is other


@pytest.mark.parametrize(
    ("in_place", "plain"),
    [
        (lambda a, b: a.add_(b), lambda a, b: a + b),
        (lambda a, b: a.add_(b, 0.3), lambda a, b: a.add(b, 0.3)),
        (lambda a, b: a.mul_(3), lambda a, b: a * 3),
        (lambda a, b: a.div_(3), lambda a, b: a / 3),
        (lambda a, b: b.add(a, 0.3, out=a), lambda a, b: b.add(a, 0.3)),
        (lambda a, b: b.addcmul(b, b, 0.3, out=a), lambda a, b: b.addcmul(b, b, 0.3)),
        (lambda a, b: b.addcdiv(b, b, 0.3, out=a), lambda a, b: b.addcdiv(b, b, 0.3)),
    ],
)
def test_operations_in_place_have_the_bits_of_those_that_are_not(in_place, plain):
    one, two = some(0), some(1)
    memory, expected = one.flat.data_ptr(), plain(one, two)
    result = in_place(one, two)
    assert result.same_bits(expected)
    assert result.flat.data_ptr() == memory


def test_a_released_buffer_is_used_again():
    tree = some(numel=1237)
    memory = tree.flat.data_ptr()
    other = some(seed=1, numel=1237)
    tree.release()
    assert (other * 2).flat.data_ptr() == memory


def test_released_buffers_are_kept_up_to_a_limit():
    trees = [some(numel=1231) for _ in range(20)]
    memory = {tree.flat.data_ptr() for tree in trees}
    alive = [tree.flat for tree in trees]
    for tree in trees:
        tree.release()
    again = [empty(1231, torch.float32, torch.device("cpu")) for _ in alive]
    assert len({buffer.data_ptr() for buffer in again} & memory) == 8


def test_the_pool_gives_no_buffer_of_another_size_or_dtype():
    tree = some(numel=1229)
    memory = tree.flat.data_ptr()
    keep = tree.flat
    tree.release()
    assert empty(1229, torch.float64, torch.device("cpu")).data_ptr() != memory
    assert empty(1228, torch.float32, torch.device("cpu")).data_ptr() != memory
    assert empty(1229, torch.float32, torch.device("cpu")).data_ptr() == memory == keep.data_ptr()


# ----------------------------------------------------------------------------------------------------------------- figures


@few
@given(SHAPES, st.sampled_from([torch.float32, torch.float64]))
def test_dot_and_norm_are_those_of_the_doubles(shapes, dtype):
    one, two = Tree.of(tensors(shapes, [dtype], 0)), Tree.of(tensors(shapes, [dtype], 1))
    assert one.dot(two) == pytest.approx(math.fsum((one.flat.double() * two.flat.double()).tolist()), rel=1e-12, abs=1e-12)
    assert one.norm() == pytest.approx(math.sqrt(math.fsum(x * x for x in one.flat.double().tolist())), rel=1e-12)


def test_norm_sums_in_double_where_a_float_would_stand_still():
    numel = 70_000  # more than one chunk of the sum
    tree = Tree.of({"big": torch.tensor([2.0**12]), "small": torch.full((numel,), 2.0**-1)})
    assert tree.norm() ** 2 == pytest.approx(2.0**24 + numel / 4, rel=1e-14)


def test_norm_does_not_overflow_where_a_float_would():
    assert Tree.of({"w": torch.full((4,), 1e30)}).norm() == pytest.approx(2e30)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(bad):
    tree = some(numel=1000)
    assert tree.is_finite()
    tree["vector"][500] = bad
    assert not tree.is_finite()


def test_a_sum_that_overflows_is_no_reason_to_call_values_infinite():
    assert Tree.of({"w": torch.full((8,), 3e38)}).is_finite()
    assert Tree.of({"w": torch.full((8,), 6e4, dtype=torch.float16)}).is_finite()
    assert not Tree.of({"w": torch.tensor([math.inf, -math.inf])}).is_finite()


# ----------------------------------------------------------------------------------------------------------------- digests


def test_equal_trees_have_equal_digests():
    assert some().digest() == some().copy().digest()
    assert len(some().digest()) == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {("A" if name == "a" else name): tensor for name, tensor in t.items()},
        lambda t: {**t, "a": t["a"].reshape(3, 2)},
        lambda t: {"b": t["b"], "a": t["a"]},
        lambda t: {**t, "c": torch.empty(0)},
        lambda t: {**t, "b": torch.nextafter(t["b"], torch.tensor(math.inf))},
        lambda t: {**t, "a": -t["a"]},
    ],
    ids=["name", "shape", "order", "one more", "last bit", "sign of zero"],
)
def test_a_digest_changes_with(change):
    plain = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    assert Tree.of(change(plain)).digest() != Tree.of(plain).digest()


def test_shards_with_the_same_values_have_different_digests():
    tree = Tree.of({"w": torch.ones(8)})
    assert tree.shard(0, 2).digest() != tree.shard(1, 2).digest()


def test_a_tree_equals_another_of_the_same_layout_and_values_only():
    tree = some()
    assert tree.equal(tree.copy())
    assert not tree.equal(tree + 1)
    assert not tree.equal(Tree.of({"w": tree.flat}))
    hole = Tree.of({"w": torch.tensor([math.nan])})
    assert not hole.equal(hole.copy())


# ------------------------------------------------------------------------------------------------------------------ shards


@few
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shard_ranges_tile_the_buffer_evenly(numel, size):
    ranges = [shard_range(numel, rank, size) for rank in range(size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@few
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 300))
def test_shard_ranges_of_whole_units_are_cut_at_multiples_of_them(numel, size, unit):
    ranges = [shard_range(numel, rank, size, unit) for rank in range(size)]
    assert [ranges[0][0], ranges[-1][1]] == [0, numel]
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    units = [math.ceil((stop - start) / unit) for start, stop in ranges]
    assert max(units) - min(units) <= 1
    assert all(start % unit == 0 or start == numel for start, _ in ranges)


def test_a_part_may_have_two_pieces_of_one_tensor():
    """As a fragment of islands of several devices has, each of which cuts fragments within its slice."""
    whole = Tree.of({"w": torch.arange(8.0)})
    part = whole.select([(0, 2), (4, 6)])
    assert part.slice(1, 3).flat.tolist() == [1.0, 4.0]
    assert {name: view.tolist() for name, view in part.layout.views(part.flat).items()} == {"w": [0.0, 1.0], "w[4]": [4.0, 5.0]}
    assert whole.zeros().paste_(part).flat.tolist() == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0, 0.0, 0.0]


@few
@given(SHAPES, st.integers(1, 9), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
def test_joined_shards_are_the_whole_for_any_number_of_them(shapes, size, dtypes):
    whole = Tree.of(tensors(shapes, dtypes))
    joined = Tree.join([whole.shard(rank, size) for rank in range(size)])
    assert joined.equal(whole)
    assert joined.digest() == whole.digest()
    assert joined.layout.dtype == whole.layout.dtype


@few
@given(SHAPES, st.sets(st.integers(0, 200), max_size=6))
def test_joined_slices_are_the_whole_for_any_cuts(shapes, cuts):
    whole = Tree.of(tensors(shapes))
    edges = [0, *sorted(min(cut, whole.numel) for cut in cuts), whole.numel]
    assert Tree.join([whole.slice(start, stop) for start, stop in pairwise(edges)]).equal(whole)


@few
@given(SHAPES, st.integers(1, 4), st.integers(1, 4))
def test_shards_can_be_cut_again_for_another_number_of_islands(shapes, before, after):
    whole = Tree.of(tensors(shapes))
    joined = Tree.join([whole.shard(rank, before) for rank in range(before)])
    for rank in range(after):
        assert joined.shard(rank, after).equal(whole.shard(rank, after))


@few
@given(SHAPES, st.data())
def test_a_slice_of_a_slice_is_a_slice_of_the_whole(shapes, data):
    whole = Tree.of(tensors(shapes))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, whole.numel), st.integers(0, whole.numel))))
    first, last = sorted(data.draw(st.tuples(st.integers(0, stop - start), st.integers(0, stop - start))))
    assert whole.slice(start, stop).slice(first, last).equal(whole.slice(start + first, start + last))


def test_a_shard_shares_memory_with_the_whole():
    tree = some()
    tree.shard(1, 2).flat.zero_()
    assert tree.flat[10:].abs().sum() == 0
    assert tree.flat[:10].abs().sum() > 0


def test_a_piece_knows_its_whole_tensor():
    tree = Tree.of({"matrix": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(2)})
    part = tree.slice(5, 13)
    assert [(p.name, p.shape, p.start, p.count, p.whole) for p in part.layout.pieces] == [
        ("matrix", (3, 4), 5, 7, False),
        ("bias", (2,), 0, 1, False),
    ]
    assert part["matrix"].tolist() == [5, 6, 7, 8, 9, 10, 11]


def test_arithmetic_on_shards_is_arithmetic_on_the_whole():
    one, two = some(0), some(1)
    shards = [one.shard(rank, 3).add(two.shard(rank, 3), 0.3) for rank in range(3)]
    assert Tree.join(shards).equal(one.add(two, 0.3))


def test_different_shards_do_not_mix():
    tree = Tree.of({"w": torch.ones(8)})
    with pytest.raises(ValueError, match=r"w is .*start=0.* and .*start=4"):
        _ = tree.shard(0, 2) + tree.shard(1, 2)


def test_layouts_are_equal_by_value_and_have_equal_hashes():
    one, two = Layout.of(tensors([(3, 4), (2,)])), Layout.of(tensors([(3, 4), (2,)], seed=1))
    assert one == two
    assert hash(one) == hash(two)
    assert one != Layout.of(tensors([(4, 3), (2,)]))
    assert one != "a layout"


def test_a_window_that_is_given_or_released_leaves_the_rest_of_the_buffer_alone():
    whole = Tree.of({"w": torch.arange(6.0)})
    assert torch.equal((whole.slice(0, 3).donate() * 10).flat, torch.tensor([0.0, 10.0, 20.0]))
    whole.shard(0, 1).release()
    other = Tree.of({"w": torch.zeros(6)})
    assert other.flat.data_ptr() != whole.flat.data_ptr()
    assert torch.equal(whole.flat, torch.arange(6.0))


def test_a_buffer_circulates_once_however_many_trees_release_it():
    one = Tree.of({"w": torch.ones(7)})
    two = Tree(one.layout, one.flat)
    one.release()
    two.release()
    first, second = (Tree.of({"w": torch.zeros(7)}) for _ in range(2))
    assert first.flat.data_ptr() != second.flat.data_ptr()


def test_bits_are_the_same_also_where_they_are_not_numbers():
    one = Tree.of({"w": torch.tensor([math.nan, 1.0])})
    assert one.same_bits(one.copy())
    assert not one.equal(one.copy())
    assert not one.same_bits(Tree.of({"w": torch.tensor([math.nan, 2.0])}))


def test_rough_norm_is_the_norm_to_six_digits_and_sees_what_is_not_finite():
    generator = torch.Generator().manual_seed(0)
    tree = Tree.of({"w": torch.randn(700, 500, generator=generator), "b": torch.randn(3, generator=generator)})
    assert tree.rough_norm() == pytest.approx(tree.norm(), rel=1e-5)
    assert Tree.of({"w": torch.full((4,), 1e30)}).rough_norm() == pytest.approx(2e30)  # whose squares overflow
    assert math.isnan(Tree.of({"w": torch.tensor([1.0, math.nan])}).rough_norm())
    assert math.isinf(Tree.of({"w": torch.tensor([1.0, math.inf])}).rough_norm())
    assert Tree.of({"w": torch.zeros(3)}).rough_norm() == 0.0


# ------------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_keeps_pieces_and_rounds_once(dtype):
    tree = some()
    other = tree.cast(dtype)
    assert other.layout == tree.layout
    assert torch.equal(other.flat, tree.flat.to(dtype))
    assert (other is tree) == (dtype == torch.float32)
    assert tree.flat.dtype == torch.float32


def test_wide_is_single_precision_at_least_and_loses_nothing():
    for dtype, wide in zip(DTYPES, [torch.float32, torch.float32, torch.float32, torch.float64], strict=True):
        tree = some().cast(dtype)
        assert tree.wide().flat.dtype == wide
        assert tree.wide().cast(dtype).same_bits(tree)
        assert (tree.wide() is tree) == (dtype == wide)


def test_a_tree_from_another_process_has_the_same_layout():
    """A hash of names differs from process to process, and a layout keeps its own."""
    code = (
        "import pickle, sys, torch; from atoll.core.flat_tree import Tree; t = Tree.of({'w': torch.ones(2, 3)}); hash(t.layout); "
    )
    code += "sys.stdout.buffer.write(pickle.dumps(t))"
    other = pickle.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert other.equal(Tree.of({"w": torch.ones(2, 3)}))


def test_products_are_those_of_each_with_each():
    trees = [Tree.of({"w": torch.randn(300, generator=torch.Generator().manual_seed(seed))}) for seed in range(3)]
    found = products([tree.flat for tree in trees])
    for i, one in enumerate(trees):
        for j, two in enumerate(trees):
            assert found[i][j] == one.dot(two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_value_that_is_not_finite_is_found_among_many_trees(dtype):
    """An overflowing norm is "perhaps not", and each Tree is looked at then."""
    trees = [Tree.of({"w": torch.ones(5, dtype=dtype)}), Tree.of({}), Tree.of({"w": torch.full((3,), -2.0, dtype=dtype)})]
    assert all_finite(trees)
    assert all_finite([])
    for value in (math.inf, -math.inf, math.nan):
        spoilt = Tree.of({"w": torch.tensor([1.0, value], dtype=dtype)})
        assert not all_finite([*trees, spoilt])
        assert not measure([*trees, spoilt])
    assert all_finite([Tree.of({"w": torch.full((2,), 3e38)})])
    assert finite_and_set(trees, [torch.tensor(True), torch.tensor(False)]) == (True, [True, False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_measured_tree_has_the_same_figures(dtype):
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    trees = [Tree.of({"w": values}), Tree.of({"w": values[:3]}), Tree.of({})]
    before = [(tree.norm(), tree.dot(tree)) for tree in trees]
    assert measure(trees)
    assert [(tree.norm(), tree.dot(tree)) for tree in trees] == before
    assert trees[0].mul_(2.0).norm() == pytest.approx(2 * before[0][0])  # it is computed again
    trees[0].release()
    for figure in (trees[0].norm, lambda: trees[0].dot(trees[0])):
        with pytest.raises(TreeDonated):
            figure()
