"""Processes that do not meet are told why, and what to do."""

import pytest
import torch.distributed as dist

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.loop.topology import _meeting, find_place


def test_what_torch_says_of_an_island_that_does_not_enter_is_explained():
    with (
        pytest.raises(ExchangeFailed, match=r"not all islands entered the block within 3 s: .* give islands\(limit_s=.*Connect"),
        _meeting(3.0),
    ):
        raise dist.DistStoreError("Connect timeout")


def test_what_atoll_says_itself_is_left_as_it_is():
    with pytest.raises(ConfigError, match="a mesh of two"), _meeting(3.0):
        raise ConfigError("a mesh of two")


def test_a_process_that_nobody_started_with_others_is_one_island_and_has_no_groups():
    place = find_place(None, None)
    assert (place.island, place.islands, place.groups) == (0, 1, ())
