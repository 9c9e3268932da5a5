"""Digests of states: any changed bit changes the checksum."""

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.engines.elastic.state_version import (
    Checksum,
    checksum,
    combine_checksums,
    differing_digest,
    digest_text,
    state_digest,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_flipped_bit_changes_the_checksum(dtype):
    flat = torch.randn(97).to(dtype)
    before = checksum(flat)
    bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    for place in (0, 50, 96):
        for bit in (0, 7, 14):
            bits[place] ^= 1 << bit
            assert checksum(flat) != before, (place, bit)
            bits[place] ^= 1 << bit
    assert checksum(flat) == before


def test_the_checksum_of_pieces_in_order_is_that_of_the_whole():
    flat = torch.randn(1001)
    assert checksum(flat[:300], flat[300:]) == checksum(flat[:300], flat[:0], memoryview(flat[300:].numpy())) == checksum(flat)
    assert checksum(flat[300:], flat[:300]) != checksum(flat)


def test_order_and_pairs_of_signs_change_the_checksum():
    flat = torch.randn(1000)
    swapped, turned = flat.clone(), flat.clone()
    swapped[[3, 998]] = flat[[998, 3]]
    turned[[1, 501]] *= -1
    assert len({checksum(one) for one in (flat, flat.flip(0), swapped, turned, -flat)}) == 5


def test_a_checksum_fits_into_a_float():
    sums = [checksum(torch.full((number,), -1.0)) for number in range(1, 100)]
    assert [int(float(one)) for one in sums] == sums
    assert max(sums) > 1 << 51, "all 52 bits are used"


def test_combined_checksums_depend_on_order_and_text():
    assert combine_checksums([1, 2]) != combine_checksums([2, 1])
    assert combine_checksums([1, 2], "a") != combine_checksums([1, 2], "b")


def test_a_state_has_the_digest_that_was_recorded_or_another():
    shared, metadata = {"params": Tree.of({"w": torch.tensor([1.0, -2.0])})}, {"leases": [1], "known": {"a": 0}}
    recorded = digest_text(state_digest(shared, metadata))
    assert differing_digest(shared, {**metadata, "digest": recorded}) is None
    assert differing_digest(shared, {**metadata, "digest": None}) == recorded
    assert differing_digest(shared, {**metadata, "known": {"b": 0}, "digest": recorded}) not in (None, recorded)
    early = "059c4fd8"  # as the CRC-32 of early checkpoints
    assert differing_digest(shared, {**metadata, "digest": early}, of_checkpoint=True) is None
    assert differing_digest(shared, {**metadata, "leases": [2], "digest": early}, of_checkpoint=True) not in (None, early)
    assert differing_digest(shared, {**metadata, "digest": early}) == recorded, "of an island"
    assert differing_digest(shared, {**metadata, "digest": recorded}, of_checkpoint=True) is None


def test_a_checksum_is_the_upper_part_of_xxh3():
    """The published value of XXH3 for no input: islands of other builds of the library must come to the same."""
    assert Checksum().value == 0x2D06800538D394C2 >> 12
