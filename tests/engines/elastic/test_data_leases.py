"""Data leases: every unit ends in exactly one commit, whichever islands join and die."""

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.elastic.data_leases import DataLeases, DataUnit

ISLANDS = ["a", "b", "c", "d"]
ROUNDS = st.lists(
    st.tuples(st.sets(st.sampled_from(ISLANDS), min_size=1), st.sets(st.sampled_from(ISLANDS))), min_size=1, max_size=40
)


@given(ROUNDS, st.integers(1, 5), st.integers(1, 30))
def test_no_unit_is_delivered_twice_or_lost_while_islands_join_and_die(rounds, shards, units):
    leases, delivered = DataLeases(shards=shards, batches=3, units=units), []
    for here, died in rounds:
        out = leases.lease(sorted(here))
        assert len(out) == min(len(here), units - leases.delivered)
        settled = leases.settle(here - died if out.keys() >= here - died else set(out) - died)
        delivered += settled.delivered.values()
        leases.check()
    assert len(set(delivered)) == len(delivered) == leases.delivered <= units
    while not leases.done:  # one island stays
        leases.lease(["a"])
        delivered += leases.settle(["a"]).delivered.values()
    leases.check()
    assert len(set(delivered)) == len(delivered) == units
    for shard in range(shards):  # and no batch before the last one is left out
        starts = sorted(unit.start for unit in delivered if unit.shard == shard)
        assert starts == list(range(0, 3 * len(starts), 3))


@given(ROUNDS, st.lists(st.integers(0, 2), max_size=3).map(sorted), st.integers(1, 3))
def test_with_several_commits_a_round_no_batch_is_delivered_twice_or_lost_while_islands_join_and_die(rounds, cuts, shards):
    leases, delivered = DataLeases(shards=shards, batches=3, units=12, cuts=cuts), Counter()

    def settle(names):
        settled = leases.settle([name for name in leases.active if name in names])
        for shard, start, batches in settled.delivered.values():
            delivered.update((shard, batch) for batch in range(start, start + batches))
        leases.check()

    for here, died in rounds:
        if not leases.active:
            leases.lease(sorted(here))
        settle(here - died)
    while not leases.done:  # one island stays
        if not leases.active:
            leases.lease(["a"])
        settle({"a"})
    assert set(delivered.values()) == {1}
    assert sorted(delivered) == [
        (shard, batch) for shard in range(shards) for batch in range(sum(one == shard for one, _ in delivered))
    ]


def test_while_all_islands_are_present_each_reads_its_own_shard_in_order():
    leases = DataLeases(shards=3, batches=2, units=9)
    for number in range(3):
        out = leases.lease(["a", "b", "c"])
        assert out == {name: DataUnit(shard, 2 * number, 2) for shard, name in enumerate("abc")}
        leases.settle(out)
    assert leases.done
    assert leases.lease(["a", "b", "c"]) == {}


def test_islands_that_share_a_shard_get_different_units():
    leases = DataLeases(shards=2, batches=1, units=8)
    out = leases.lease(["a", "b", "c", "d"])
    assert [unit.shard for unit in out.values()] == [0, 1, 0, 1]
    assert len(set(out.values())) == 4


def test_leases_are_restored_from_their_parts():
    leases, other = DataLeases(shards=2, batches=4, units=20), DataLeases(shards=2, batches=4, units=20)
    leases.lease(["a", "b", "c"])
    leases.settle(["b"])
    leases.lease(["b", "d"])
    other.from_parts(leases.to_parts())
    assert other.to_parts() == leases.to_parts()
    assert other.settle(["d"]) == leases.settle(["d"])
    assert other.lease(["b", "a"]) == leases.lease(["b", "a"])


def test_impossible_leases_are_refused():
    with pytest.raises(ConfigError, match="at least one of each"):
        DataLeases(shards=0, batches=1, units=1)
    leases = DataLeases(shards=1, batches=1, units=5)
    leases.lease(["a"])
    with pytest.raises(ExchangeFailed, match=r"\['b'\] delivered without a lease"):
        leases.settle(["b"])
    with pytest.raises(ConfigError, match="of 1 shards, and there are 2"):
        DataLeases(shards=2, batches=1, units=5).from_parts(leases.to_parts())
    leases.delivered = 3
    with pytest.raises(ExchangeFailed, match="the account of data is wrong"):
        leases.check()


def refused_until_dropped(islands, units, poison):
    """The islands whose deltas of one unit are rejected, until all units are settled."""
    leases, refusals, delivered = DataLeases(shards=2, batches=2, units=units), [], []
    while not leases.done:
        out = leases.lease(islands)
        bad = [name for name, unit in out.items() if unit == poison]
        settled = leases.settle(out.keys() - bad, bad)
        leases.check()
        refusals += bad
        delivered += settled.delivered.values()
        if settled.dropped:
            assert list(settled.dropped.values()) == [poison]
    assert leases.dropped == 1
    assert len(set(delivered)) == len(delivered) == units - 1
    return refusals


def test_an_undeliverable_unit_is_tried_by_two_islands_and_then_dropped():
    refusals = refused_until_dropped(["a", "b"], 12, DataUnit(1, 2, 2))
    assert len(refusals) == 3
    assert set(refusals) == {"a", "b"}


@pytest.mark.parametrize("units", [2, 6])
def test_a_single_island_drops_an_undeliverable_unit_after_three_rejections(units):
    assert refused_until_dropped(["a"], units, DataUnit(1, 0, 2)) == ["a"] * 3


def test_an_island_whose_every_delta_is_rejected_drops_no_unit_that_another_can_deliver():
    leases, delivered = DataLeases(shards=2, batches=2, units=10), []
    while not leases.done:
        out = leases.lease(["a", "b"])
        delivered += leases.settle(out.keys() - {"a"}, out.keys() & {"a"}).delivered.values()
    assert leases.dropped == 0
    assert len(set(delivered)) == 10


def test_rejections_are_restored_with_the_leases():
    leases, other = DataLeases(shards=1, batches=2, units=3), DataLeases(shards=1, batches=2, units=3)
    for _ in range(2):
        leases.lease(["a"])
        leases.settle([], ["a"])
    other.from_parts(json.loads(json.dumps(leases.to_parts())))
    other.lease(["a"])
    assert other.settle([], ["a"]).dropped == {"a": DataUnit(0, 0, 2)}
