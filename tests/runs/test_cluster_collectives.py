"""The costs of collectives follow their formulas, and byte counts are exact also for unequal shards."""

import math

import pytest
from hypothesis import given, strategies as st

from atoll.core.errors import ConfigError
from atoll.runs.cluster import Link, all_gather_cost, all_reduce_cost, reduce_scatter_cost, transfer_s

LINK = Link(latency_s=0.03, bandwidth_mbit_per_s=100)


def test_a_message_takes_the_larger_latency_and_the_smaller_bandwidth():
    slow = Link(latency_s=0.2, bandwidth_mbit_per_s=100, download_mbit_per_s=8)
    assert transfer_s(1e6, LINK, slow) == pytest.approx(0.2 + 1e6 / 1e6)
    assert transfer_s(1e6, slow, LINK) == pytest.approx(0.2 + 1e6 / 12.5e6)


def test_a_ring_all_reduce_costs_two_rounds_of_pieces():
    cost = all_reduce_cost(4_000_000, 4, [LINK] * 4)
    assert cost.seconds == pytest.approx(2 * 3 * (0.03 + 4e6 / 12.5e6))
    assert cost.sent_bytes == [2 * 3 * 4_000_000] * 4


def test_the_slowest_link_sets_the_pace_of_a_ring():
    slow = Link(latency_s=0.03, bandwidth_mbit_per_s=10)
    assert all_reduce_cost(4_000_000, 4, [LINK, LINK, slow, LINK]).seconds == pytest.approx(2 * 3 * (0.03 + 4e6 / 1.25e6))


def test_a_star_uploads_and_then_downloads_the_whole_tensor():
    asymmetric = Link(latency_s=0.01, bandwidth_mbit_per_s=10, download_mbit_per_s=100)
    cost = all_reduce_cost(1_000_000, 4, [asymmetric] * 3, "star")
    assert cost.sent_bytes == [4_000_000] * 3
    assert cost.seconds == pytest.approx(0.01 + 4e6 / 1.25e6 + 0.01 + 4e6 / 12.5e6)


@given(numel=st.integers(1, 10_000), size=st.integers(1, 17), item_bytes=st.sampled_from([1, 2, 4, 8]))
def test_the_total_bytes_are_exact(numel, size, item_bytes):
    links = [LINK] * size
    payload = numel * item_bytes
    assert sum(reduce_scatter_cost(numel, item_bytes, links).sent_bytes) == (size - 1) * payload
    assert sum(all_gather_cost(numel, item_bytes, links).sent_bytes) == (size - 1) * payload
    assert sum(all_reduce_cost(numel, item_bytes, links).sent_bytes) == 2 * (size - 1) * payload


@pytest.mark.parametrize("topology", ["ring", "star"])
def test_over_free_links_bytes_are_counted_and_no_time_passes(topology):
    free = Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)
    cost = all_reduce_cost(1000, 4, [free] * 4, topology)
    assert cost.seconds == transfer_s(1e12, free, free) == 0.0
    assert cost.sent_bytes == all_reduce_cost(1000, 4, [LINK] * 4, topology).sent_bytes


def test_a_link_may_be_free_in_one_direction():
    down = Link(latency_s=0.0, bandwidth_mbit_per_s=8, download_mbit_per_s=math.inf)
    free = Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)
    assert transfer_s(1e6, free, down) == 0.0
    assert transfer_s(1e6, down, free) == pytest.approx(1.0)


@pytest.mark.parametrize("topology", ["ring", "star"])
def test_a_single_island_sends_nothing(topology):
    assert all_reduce_cost(1000, 4, [LINK], topology) == (0.0, [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency_s": -1}, r"latency_s=-1.*0 seconds or more"),
        ({"bandwidth_mbit_per_s": 0}, r"bandwidth_mbit_per_s=0.*more than 0"),
        ({"bandwidth_mbit_per_s": -100}, r"bandwidth_mbit_per_s=-100.*more than 0"),
        ({"download_mbit_per_s": 0}, r"download_mbit_per_s=0.*more than 0"),
        ({"bandwidth_mbit_per_s": math.nan}, r"bandwidth_mbit_per_s=nan.*or inf"),
        ({"latency_s": math.inf}, r"latency_s=inf"),
        ({"latency_s": float("nan")}, r"latency_s=nan"),
    ],
)
def test_impossible_links_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Link(**settings)


def test_text_as_a_latency_is_refused():
    with pytest.raises(ConfigError, match=r"latency_s='0.03' is text, not a number. Leave out the quotation marks"):
        Link(latency_s="0.03")
