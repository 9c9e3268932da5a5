import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.serialization import LAYOUT, layout_from_json, layout_to_json, load_tree, read_tensors, save_tree, write_tensors
from atoll.core.verified_files import write_text

torch.set_num_threads(1)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
few = settings(max_examples=25, deadline=None)


def assorted() -> dict[str, Tensor]:
    """Tensors of many dtypes and sizes, in an order that is neither by name nor by width."""
    return {
        "z": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "m": torch.arange(6.0).reshape(2, 3),
        "count": torch.tensor(2**40),
        "a": torch.arange(5, dtype=torch.float64) / 3,
        "empty": torch.empty(0, 3),
        'odd "name" ü': torch.arange(5, dtype=torch.uint8),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "small": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    }


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bits(one) == bits(two)


@contextmanager
def disk_with_room_for(nbytes: int) -> Iterator[None]:
    """Within, no file can grow beyond this size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ----------------------------------------------------------------------------------------------------------------- tensors


def test_tensors_of_every_dtype_are_read_back_with_their_bits(tmp_path):
    write_tensors(tmp_path / "x.safetensors", assorted(), {"step": "3", "note": "ü\n"})
    tensors, metadata = read_tensors(tmp_path / "x.safetensors")
    expected = assorted()
    assert tensors.keys() == expected.keys()
    assert all(same(tensors[name], tensor) for name, tensor in expected.items())
    assert metadata == {"step": "3", "note": "ü\n"}


def test_the_library_reads_what_was_written(tmp_path):
    expected = assorted()
    write_tensors(tmp_path / "x", expected)
    tensors = safetensors.torch.load_file(tmp_path / "x")
    assert all(same(tensors[name], tensor) for name, tensor in expected.items())


def test_what_the_library_wrote_is_read(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "x")
    assert torch.equal(read_tensors(tmp_path / "x")[0]["w"], torch.ones(3))


def test_tensors_that_share_memory_are_written_each(tmp_path):
    tied = torch.arange(6.0)
    write_tensors(tmp_path / "x", {"one": tied, "two": tied, "part": tied[2:4]})
    tensors, _ = read_tensors(tmp_path / "x")
    assert torch.equal(tensors["one"], tensors["two"])
    assert torch.equal(tensors["part"], torch.tensor([2.0, 3.0]))


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path):
    write_tensors(tmp_path / "x", assorted(), {"k": "v"})
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in assorted().items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0, name


def test_no_tensors_are_a_file_too(tmp_path):
    write_tensors(tmp_path / "x", {}, {"only": "words"})
    assert read_tensors(tmp_path / "x") == ({}, {"only": "words"})


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    for name in ("x", "y"):
        write_tensors(tmp_path / name, {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}, {"k": "v"})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_to_write_to_a_tensor_that_was_read_does_not_change_the_file(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(3)})
    read_tensors(tmp_path / "x")[0]["w"].zero_()
    assert torch.equal(read_tensors(tmp_path / "x")[0]["w"], torch.ones(3))


def test_a_reader_keeps_what_it_read_when_the_file_is_replaced(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(3)})
    old, _ = read_tensors(tmp_path / "x")
    write_tensors(tmp_path / "x", {"w": torch.zeros(3)})
    assert torch.equal(old["w"], torch.ones(3))
    assert torch.equal(read_tensors(tmp_path / "x")[0]["w"], torch.zeros(3))


def test_a_file_is_as_readable_for_others_as_any_other(tmp_path):
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / "x", {})
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "message"),
    [
        ({"c": torch.zeros(2, dtype=torch.complex64)}, {}, TypeError, r"c is torch.complex64.*Convert it"),
        ({"__metadata__": torch.zeros(2)}, {}, ValueError, r"'__metadata__'.*Rename it"),
        ({}, {"step": 3}, TypeError, r"metadata values must be text"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_and_nothing_is_written(tmp_path, tensors, metadata, error, message):
    with pytest.raises(error, match=message):
        write_tensors(tmp_path / "x", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- whole or not at all


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.ones(3)})
    before = path.read_bytes()
    with (
        disk_with_room_for(10_000),
        pytest.raises(CheckpointError, match=r"could not write .*x\.safetensors: .*untouched.*Make room"),
    ):
        write_tensors(path, {"w": torch.zeros(100_000)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, {"w": torch.ones(3)})
    with pytest.raises(NotImplementedError):
        write_tensors(path, {"good": torch.ones(3), "without values": torch.empty(3, device="meta")})
    assert list(read_tensors(path)[0]) == ["w"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not write .*nowhere.*No such file or directory"):
        write_tensors(tmp_path / "nowhere" / "x", {"w": torch.ones(3)})


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match="could not write"):
        write_tensors(tmp_path / "x", {"w": torch.ones(3)})
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_file_cut_at_any_place_is_refused_by_name(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}, {"k": "v"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=r"x\.safetensors (is truncated or not a safetensors file|does not match its digest)"
        ):
            read_tensors(path)


def test_a_bit_that_flips_anywhere_in_a_file_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    write_tensors(path, tensors, {"k": "v"})
    whole, refused = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            found, metadata = read_tensors(path)
        except CheckpointError:
            refused += 1
        else:  # a bit of the digest's own name: the file is read without it
            assert (metadata["k"], {name: list(found[name]) for name in found}) == (
                "v",
                {name: list(tensors[name]) for name in tensors},
            )
    assert len(whole) - refused <= len("atoll.blake2b")


def test_a_file_of_another_program_is_read_without_a_digest(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(3)}, digest=False)
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "y.safetensors")
    assert all(read_tensors(tmp_path / name)[0]["w"].sum() == 3 for name in ("x.safetensors", "y.safetensors"))


@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04" * 100, b"\x00" * 100, b"{}" * 50])
def test_a_foreign_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt is truncated or not a safetensors file"):
        read_tensors(tmp_path / "x.pt")


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*missing"):
        read_tensors(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="could not read"):
        read_tensors(tmp_path)


# ------------------------------------------------------------------------------------------------------------------- Trees


@few
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5),
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=4),
)
def test_a_tree_is_read_back_with_names_order_shapes_dtypes_and_bits(shapes, dtypes):
    generator = torch.Generator().manual_seed(0)
    named = [(f"t{i}", torch.randn(s, generator=generator).to(dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    tree = Tree.of(dict(reversed(named))) * (1 + 2.0**-20)  # too fine for the narrow ones' own dtypes
    with TemporaryDirectory() as folder:
        save_tree(Path(folder) / "x", tree)
        back = load_tree(Path(folder) / "x")
    assert list(back) == list(tree)
    assert back.layout == tree.layout
    assert back.flat.dtype == tree.flat.dtype
    assert back.digest() == tree.digest()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_are_read_back_as_shards_and_join_to_the_whole(tmp_path, size):
    whole = Tree.of({"w": torch.randn(7, 3), "b": torch.randn(3), "v": torch.randn(4, 2).bfloat16()})
    for rank in range(size):
        save_tree(tmp_path / f"{rank}", whole.shard(rank, size))
    shards = [load_tree(tmp_path / f"{rank}") for rank in range(size)]
    assert shards[0].layout == whole.shard(0, size).layout
    assert Tree.join(shards).equal(whole)


def test_a_buffer_wider_than_its_tensors_keeps_its_bits(tmp_path):
    layout = Tree.of({"w": torch.ones(2, dtype=torch.bfloat16)}).layout
    master = Tree(layout, torch.tensor([1 + 2.0**-20, 3.0]))
    save_tree(tmp_path / "x", master)
    back = load_tree(tmp_path / "x")
    assert back.flat.dtype == torch.float32
    assert back["w"][0].item() == 1 + 2.0**-20
    assert back.tensors()["w"].dtype == torch.bfloat16


def test_a_saved_tree_is_a_plain_safetensors_file_for_other_readers(tmp_path):
    tree = Tree.of({"z": torch.randn(2, 3), "a": torch.randn(4)})
    save_tree(tmp_path / "x", tree, {"step": "7"})
    tensors = safetensors.torch.load_file(tmp_path / "x")
    assert torch.equal(tensors["z"], tree["z"])
    assert torch.equal(tensors["a"], tree["a"])
    assert read_tensors(tmp_path / "x")[1]["step"] == "7"


def test_a_loaded_tree_does_not_depend_on_its_file(tmp_path):
    tree = Tree.of({"w": torch.ones(3)})
    save_tree(tmp_path / "x", tree)
    back = load_tree(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"")
    assert back.equal(tree)


def test_the_layouts_key_belongs_to_the_layout(tmp_path):
    with pytest.raises(ValueError, match=r"atoll\.layout.*Rename yours"):
        save_tree(tmp_path / "x", Tree.of({"w": torch.ones(3)}), {LAYOUT: "mine"})


def test_a_layout_survives_as_json():
    layout = Tree.of({"w": torch.randn(7, 3), "s": torch.tensor(1.0).bfloat16()}).layout.slice(5, 22)
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


def test_tensors_without_a_layout_are_no_tree(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"holds tensors but no Tree.*read_tensors"):
        load_tree(tmp_path / "x")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("not json", r"x has a layout that cannot be read"),
        ("[]", r"x has a layout that cannot be read"),
        ('{"dtype": "float33", "pieces": []}', r"'float33' is no dtype"),
        ('{"dtype": "float32", "pieces": [["w", [3]]]}', r"x has a layout that cannot be read"),
        ('{"dtype": "float32", "pieces": [["w", [4], "float32", 0, 4]]}', r"x and its layout disagree about w"),
        ('{"dtype": "float64", "pieces": [["w", [3], "float32", 0, 3]]}', r"x and its layout disagree about w"),
        ('{"dtype": "float32", "pieces": [["v", [3], "float32", 0, 3]]}', r"x and its layout disagree about v"),
    ],
)
def test_a_layout_that_does_not_fit_its_file_is_refused(tmp_path, layout, message):
    write_tensors(tmp_path / "x", {"w": torch.ones(3)}, {LAYOUT: layout})
    with pytest.raises(CheckpointError, match=message):
        load_tree(tmp_path / "x")


def test_text_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "summary.json"
    write_text(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"could not write .*: File too large\. The file that was there before is untouched\. Make room"
        ):
            write_text(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]
