"""Digests of states: any changed bit changes the checksum."""

import pytest
import torch

from atoll.engines.elastic.state_version import checksum, combine_checksums


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
    assert checksum(flat[300:], before=checksum(flat[:300])) == checksum(flat)
    assert checksum(flat[:300], before=checksum(flat[300:])) != checksum(flat)
    assert checksum(flat[:0]) == 0


def test_order_and_pairs_of_signs_change_the_checksum():
    flat = torch.randn(1000)
    swapped, turned = flat.clone(), flat.clone()
    swapped[[3, 998]] = flat[[998, 3]]
    turned[[1, 501]] *= -1
    assert len({checksum(one) for one in (flat, flat.flip(0), swapped, turned, -flat)}) == 5


def test_a_checksum_fits_into_a_float():
    assert int(float(checksum(torch.full((1000,), -1.0)))) == checksum(torch.full((1000,), -1.0))


def test_combined_checksums_depend_on_order_and_text():
    assert combine_checksums([1, 2]) != combine_checksums([2, 1])
    assert combine_checksums([1, 2], "a") != combine_checksums([1, 2], "b")
