from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from atoll.core.errors import CheckpointError, TreeDonated
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Work, own, sharded, shared
from atoll.core.serialization import Packed, pack, read_tensors, unpack, write_tensors

torch.set_num_threads(1)


class Momentum(NamedTuple):
    velocity: Tree
    step: int


class Moments(NamedTuple):
    mean: Tree
    square: Tree


@dataclass(frozen=True)
class State:
    params: Tree = shared()
    outer: Any = shared()
    moments: Moments = sharded()
    waiting: Gradient | None = own()
    extra: Any = own()


def tree(fill: float = 1.0) -> Tree:
    return Tree.of({"w": torch.full((2, 3), fill), "b": torch.full((2,), fill, dtype=torch.bfloat16), "none": torch.zeros(0)})


def state(fill: float = 1.0, **changes: Any) -> State:
    whole = tree(fill)
    shard = Moments(whole.shard(1, 3), whole.shard(1, 3) * 2)
    return replace(State(params=whole, outer=Momentum(whole * 3, 7), moments=shard), **changes)


def through_json(packed: Packed) -> Packed:
    return Packed(json.loads(json.dumps(packed.structure, allow_nan=False)), packed.tensors)


def same(one: Any, two: Any) -> bool:
    """Whether two values have the same types, layouts and bits. Packing is what is tested, so it is done by hand."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tree):
        return one.equal(two) and one.flat.dtype == two.flat.dtype
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, State):
        return all(same(getattr(one, name), getattr(two, name)) for name in State.__dataclass_fields__)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    return one.hex() == two.hex() if isinstance(one, float) else one == two


EXTRA = {
    "": None,
    "numbers": [2**53 + 1, -(2**200), 0.1 + 0.2, -0.0, math.nan, math.inf, -math.inf, True, 5e-324],
    "kind": "text \u2603 \ud800",
    "generator": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "bits": (torch.tensor([True, False]), torch.tensor([[1, 2]], dtype=torch.int64)),
    "works": [Work(shard=1, start=2, schedule=3, examples=4)],
    "empty": ((), [], {}),
}


def test_a_state_is_read_back_with_its_types_and_bits():
    saved = state(2.5, waiting=Gradient(tree(4.0), 3.0, 24), extra=EXTRA)
    assert same(unpack(through_json(pack(saved)), like=state(0.0, waiting=Gradient(tree(), 0.0, 0), extra=EXTRA)), saved)


def test_a_state_is_read_back_from_a_file(tmp_path):
    saved = state(2.5, waiting=Gradient(tree(4.0), 3.0, 24), extra=EXTRA)
    packed = pack(saved)
    write_tensors(tmp_path / "state.safetensors", packed.tensors, {"structure": json.dumps(packed.structure)})
    tensors, metadata = read_tensors(tmp_path / "state.safetensors")
    assert same(unpack(Packed(json.loads(metadata["structure"]), tensors), like=state(0.0, extra=EXTRA)), saved)


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_plain_value_is_read_back_exactly(value: Any):
    assert same(unpack(through_json(pack(value)), like=None), value)


def test_where_the_fresh_state_has_none_anything_may_come():
    saved = state(1.0, waiting=Gradient(tree(4.0), 3.0, 24), extra=[tree(), torch.ones(2), 5])
    assert same(unpack(through_json(pack(saved)), like=state(0.0)), saved)


def test_none_may_come_where_the_fresh_state_has_something():
    assert unpack(pack(state(1.0)), like=state(0.0, waiting=Gradient(tree(), 1.0, 8))).waiting is None


def test_a_shard_keeps_its_place_in_the_whole():
    shards = [tree(5.0).shard(rank, 3) for rank in range(3)]
    back = [unpack(through_json(pack(shard)), like=None) for shard in shards]
    assert Tree.join(back).layout.pieces == Tree.join(shards).layout.pieces
    assert [shard.layout for shard in back] == [shard.layout for shard in shards]


def test_a_shard_of_another_number_of_islands_is_refused():
    packed, like = pack(tree().shard(0, 2)), tree().shard(0, 3)
    with pytest.raises(
        CheckpointError, match=r"a Tree of another layout \(.*Piece.* and Piece.*another run.*Resume with the settings"
    ):
        unpack(packed, like)


def test_packing_copies_nothing_and_unpacking_always_does():
    saved = tree()
    packed = pack(saved)
    assert packed.tensors["value"].data_ptr() == saved.flat.data_ptr()
    one, two = unpack(packed, like=saved), unpack(packed, like=None)
    assert len({one.flat.data_ptr(), two.flat.data_ptr(), saved.flat.data_ptr()}) == 3


def test_tensors_go_to_the_device_of_the_fresh_state():
    like = (Tree(tree().layout, tree().flat.to("meta")), torch.ones(2, device="meta"), None)
    first, second, third = unpack(pack((tree(), torch.ones(2), torch.ones(2))), like)
    assert [first.flat.device.type, second.device.type, third.device.type] == ["meta", "meta", "cpu"]


def test_names_with_dots_do_not_collide():
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a.b'": torch.full((1,), 2.0)}
    packed = pack(value)
    assert len(packed.tensors) == 3
    assert same(unpack(packed, like=None), value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"outer": Moments(tree(), tree())},
            r"outer is a .*Momentum with velocity, step \(in one of them only: outer.mean, .*Moments",
        ),
        ({"outer": tree()}, r"outer is a .*Momentum in the checkpoint, where this run has Tree\(3 tensors"),
        ({"outer": 5}, r"outer is a .*Momentum in the checkpoint, where this run has 5"),
        ({"outer": ()}, r"outer is a .*Momentum in the checkpoint, where this run has \(\)"),
        ({"outer": Momentum(torch.ones(1), 0)}, r"outer\.velocity is a Tree in the checkpoint, where this run has tensor"),
        ({"outer": Momentum(tree(), "x")}, r"outer\.step is 7 in the checkpoint, where this run has 'x'"),
        ({"outer": Momentum(tree(), True)}, r"outer\.step is 7 in the checkpoint, where this run has True"),
        (
            {"outer": Momentum(Tree.of({"w": torch.zeros(2, 3)}), 0)},
            r"outer\.velocity is a Tree of another layout \(.*are in one of them only",
        ),
        ({"extra": (1,)}, r"extra is a list in the checkpoint, where this run has \(1,\)"),
        ({"extra": [{}]}, r"extra\.0 is a tensor in the checkpoint, where this run has \{\}"),
        ({"extra": [None, 5]}, r"extra\.1 is a dictionary in the checkpoint, where this run has 5"),
    ],
)
def test_a_foreign_checkpoint_is_refused_at_the_field_that_differs(change: dict[str, Any], complaint: str):
    packed = through_json(pack(state(1.0, extra=[torch.ones(1), {}])))
    with pytest.raises(CheckpointError, match=complaint + r"[\s\S]*another run or version\. Resume with the settings"):
        unpack(packed, like=state(1.0, **change))


def test_a_record_of_an_unknown_type_is_refused_where_nothing_says_what_it_is():
    packed = pack(Work(shard=1, start=2, schedule=3, examples=4))
    packed.structure["type"] = "elsewhere.Work"
    assert unpack(packed, like=Work(shard=0, start=0, schedule=0, examples=0)).examples == 4
    with pytest.raises(CheckpointError, match=r"elsewhere\.Work in the checkpoint, which is not a known record.*Import the module"):
        unpack(packed, like=None)


@pytest.mark.parametrize(
    ("structure", "complaint"),
    [
        ({"kind": "tree", "tensor": "x", "pieces": []}, "has 2 numbers in the checkpoint and its layout needs 0"),
        ({"kind": "tensor", "tensor": "y"}, "lacks the tensor 'y'"),
        ({"kind": "spell"}, "damaged"),
        ({"kind": "tree", "tensor": "x", "pieces": [["w", [2], "float33", 0, 2]]}, "damaged"),
        ({}, "damaged"),
    ],
)
def test_a_damaged_structure_is_refused_with_advice(structure: Any, complaint: str):
    with pytest.raises(CheckpointError, match=rf"the value.*{complaint}.*Use an older checkpoint"):
        unpack(Packed(structure, {"x": torch.ones(2)}), like=None)


@pytest.mark.parametrize("value", [{3: 1}, {1, 2}, b"x", torch.float32, object(), Work])
def test_what_cannot_be_saved_is_refused_with_its_place(value: Any):
    with pytest.raises(CheckpointError, match=r"extra\.1 is .*cannot be saved.*Use one of these"):
        pack(state(1.0, extra=[0, value]))


def test_a_tree_that_was_given_away_is_not_saved():
    given_away = tree()
    given_away.donate()
    with pytest.raises(TreeDonated):
        pack(state(1.0, extra=given_away))
