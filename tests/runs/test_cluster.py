"""The cluster as a value: lists for any number of islands, random numbers without a position, and refused settings."""

from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from atoll.core.errors import ConfigError
from atoll.runs.cluster import Away, Cluster, Link, Lost, Outage, step_times


@pytest.mark.parametrize(("islands", "times"), [(2, [0.58, 0.75]), (6, [0.58, 0.75, 1.51, 3.33, 0.58, 0.75])])
def test_a_list_is_cut_or_repeated_to_the_number_of_islands(islands, times):
    cluster = Cluster(islands=islands, step_time_s=(0.58, 0.75, 1.51, 3.33))
    assert [cluster.step_time(island, seed=0) for island in range(islands)] == times


def test_links_are_per_island_if_given():
    slow = Link(bandwidth_mbit_per_s=1)
    cluster = Cluster(islands=3, links=(Link(), slow))
    assert [cluster.link_of(island) for island in range(3)] == [Link(), slow, Link()]
    assert Cluster(islands=2, link=slow).link_of(1) == slow


def test_draws_depend_on_the_seed_and_on_what_they_are_for_alone():
    cluster = Cluster(islands=4, step_time_s=(1.0,), step_time_spread=0.5, step_time_jitter=0.1)
    first = [cluster.step_time(island, seed=7) for island in range(4)]
    assert first == [cluster.step_time(island, seed=7) for island in range(4)]
    assert len(set(first)) == 4
    assert first != [cluster.step_time(island, seed=8) for island in range(4)]
    assert cluster.jitter(0, 5, 1, seed=7) != cluster.jitter(0, 6, 1, seed=7)


def test_jitter_is_drawn_for_every_batch_so_that_long_spans_vary_less():
    cluster = Cluster(step_time_jitter=0.5)
    short, long = ([cluster.jitter(0, span, batches, seed=0) for span in range(300)] for batches in (1, 20))
    assert pstdev(short) > 3 * pstdev(long)
    assert fmean(short) == pytest.approx(fmean(long), abs=0.15)  # the mean of a log-normal factor, 1.13


def test_messages_are_lost_with_the_given_probability():
    cluster = Cluster(islands=4, drop_probability=0.3)
    delivered = [cluster.delivers(island, round, seed=1) for island in range(4) for round in range(2_000)]
    assert sum(delivered) / len(delivered) == pytest.approx(0.7, abs=0.02)  # four standard deviations


def test_named_messages_are_lost():
    cluster = Cluster(islands=2, lost=(Lost(island=1, round=3),))
    assert [cluster.delivers(1, round, seed=0) for round in range(5)] == [True, True, True, False, True]
    assert cluster.delivers(0, 3, seed=0)


@pytest.mark.parametrize(
    ("pool", "counts"),
    [
        ("constant", [8] * 8),
        ("doubling", [4] * 4 + [8] * 4),
        ("halving", [8] * 4 + [4] * 4),
        ("ramp_up", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("ramp_down", [8, 7, 6, 5, 4, 3, 2, 1]),
        ((2, 5), [2] * 4 + [5] * 4),
    ],
)
def test_pools_follow_their_schedule(pool, counts):
    cluster = Cluster(islands=8, pool=pool)
    assert [len(cluster.present(round, 8)) for round in range(8)] == counts


def test_islands_that_are_away_return():
    cluster = Cluster(islands=3, away=(Away(island=1, start=2, stop=4),))
    assert [cluster.present(round, 6) for round in range(6)] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]


def test_a_round_without_islands_is_an_error_that_names_the_round():
    cluster = Cluster(islands=1, away=(Away(island=0, start=1, stop=2),))
    with pytest.raises(ConfigError, match="no island is left in round 1"):
        cluster.present(1, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"islands": 0}, r"islands=0.*at least 1"),
        ({"step_time_s": ()}, r"step_time_s=\[\].*positive"),
        ({"step_time_s": (1.0, -0.5)}, r"step_time_s=\[1.0, -0.5\].*positive"),
        ({"step_time_spread": -1.0}, r"step_time_spread=-1.0"),
        ({"drop_probability": 1.5}, r"drop_probability=1.5 is outside \[0, 1\]"),
        ({"threads_per_island": 0}, r"threads_per_island=0"),
        ({"islands": 4, "pool": (5,)}, r"pool=\[5\].*between 1 and islands=4"),
        ({"pool": (0, 1)}, r"pool=\[0, 1\]"),
        ({"away": (Away(island=9, start=0, stop=1),)}, r"island=9"),
        ({"away": (Away(island=0, start=3, stop=3),)}, r"start comes before stop"),
        ({"lost": (Lost(island=0, round=-1),)}, r"round is 0 or more"),
    ],
)
def test_impossible_clusters_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**settings)


# ------------------------------------------------------------------------------------------------------------- outages


def test_membership_changes_are_ordered_with_joins_first_at_equal_times():
    cluster = Cluster(
        islands=4,
        outages=(
            Outage(island=3, start_s=5.0, stop_s=9.0),
            Outage(island=0, start_s=9.0),
            Outage(island=1, start_s=0.0, stop_s=5.0),
            Outage(island=2, start_s=5.0, stop_s=7.0),
        ),
    )
    assert cluster.present_at_start() == [0, 2, 3]
    assert cluster.membership_changes() == [
        (5.0, 1, True),
        (5.0, 2, False),
        (5.0, 3, False),
        (7.0, 2, True),
        (9.0, 3, True),
        (9.0, 0, False),
    ]


def test_an_island_may_have_several_outages():
    outages = (Outage(island=0, start_s=5.0, stop_s=6.0), Outage(island=0, start_s=1.0, stop_s=2.0))
    assert Cluster(islands=1, outages=outages).membership_changes() == [
        (1.0, 0, False),
        (2.0, 0, True),
        (5.0, 0, False),
        (6.0, 0, True),
    ]


@pytest.mark.parametrize(
    ("outages", "message"),
    [
        ((Outage(island=4, start_s=1.0),), r"island=4.*the island is below 4"),
        ((Outage(island=-1, start_s=1.0),), r"island=-1"),
        ((Outage(island=0, start_s=-1.0),), r"start_s comes before stop_s"),
        ((Outage(island=0, start_s=3.0, stop_s=3.0),), r"start_s comes before stop_s"),
        ((Outage(island=0, start_s=1.0), Outage(island=0, start_s=5.0)), r"overlap.*Merge them"),
        ((Outage(island=0, start_s=1.0, stop_s=5.0), Outage(island=0, start_s=5.0, stop_s=6.0)), r"overlap"),
    ],
)
def test_impossible_outages_are_refused(outages, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(islands=4, outages=outages)


def test_outages_are_for_asynchronous_algorithms_and_rounds_for_synchronous_ones():
    outages = Cluster(outages=(Outage(island=0, start_s=1.0),))
    outages.check_asynchronous()
    with pytest.raises(ConfigError, match=r"Use cluster.away.*or an asynchronous algorithm"):
        outages.check_synchronous()
    for cluster in (Cluster(away=(Away(island=0, start=1, stop=2),)), Cluster(pool=(1, 4)), Cluster(pool="ramp_up")):
        cluster.check_synchronous()
        with pytest.raises(ConfigError, match=r"Use cluster.outages, which counts in virtual seconds"):
            cluster.check_asynchronous()


# ------------------------------------------------------------------------------------------------------- heterogeneity


@pytest.mark.parametrize(("level", "power"), [("none", 0), ("slight", 1 / 3), ("moderate", 2 / 3), ("very", 1)])
def test_a_level_makes_devices_more_equal_and_keeps_their_total_speed(level, power):
    very, times = (0.58, 0.75, 1.51, 3.33), step_times(level)
    assert sum(1 / time for time in times) == pytest.approx(sum(1 / time for time in very))
    for time, far in zip(times, very, strict=True):
        assert time / times[0] == pytest.approx((far / very[0]) ** power)


def test_a_level_is_repeated_to_the_number_of_islands():
    cluster = Cluster(islands=6, step_time_s="very")
    assert [cluster.step_time(island, seed=0) for island in range(6)] == [0.58, 0.75, 1.51, 3.33, 0.58, 0.75]


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="step_time_s"):
        Cluster(step_time_s="extreme")


# ------------------------------------------------------------------------------------------------------- several devices each


def test_devices_as_islands_are_on_the_links_of_their_islands():
    slow = Link(bandwidth_mbit_per_s=1)
    cluster = Cluster(
        islands=2,
        devices_per_island=3,
        step_time_s=(1.0, 2.0),
        links=(Link(), slow),
        lost=(Lost(island=1, round=4),),
        away=(Away(island=0, start=1, stop=2),),
        pool=(1, 2),
    )
    flat = cluster.devices_as_islands(seed=0)
    assert (flat.islands, flat.devices_per_island, flat.devices) == (6, 1, 6)
    assert [flat.step_time(device, seed=0) for device in range(6)] == [1.0] * 3 + [2.0] * 3
    assert [flat.link_of(device) for device in range(6)] == [Link()] * 3 + [slow] * 3
    assert [flat.delivers(device, 4, seed=0) for device in range(6)] == [True] * 3 + [False] * 3
    assert flat.present(0, rounds=4) == [0, 1, 2]
    assert replace(flat, pool="constant").present(1, rounds=4) == [3, 4, 5]


def test_devices_of_an_island_are_drawn_equally_fast_and_an_island_of_one_device_stays_as_it_is():
    cluster = Cluster(islands=3, devices_per_island=2, step_time_spread=0.5)
    flat = cluster.devices_as_islands(seed=7)
    assert [flat.step_time(device, seed=7) for device in range(6)] == [cluster.step_time(d // 2, seed=7) for d in range(6)]
    assert flat.pool == "constant"
    alone = Cluster(islands=3, step_time_spread=0.5, pool="ramp_up")
    assert alone.devices_as_islands(seed=7) is alone


def test_an_island_without_a_device_is_refused():
    with pytest.raises(ConfigError, match=r"devices_per_island=0: an island has at least 1 device.*Use 1"):
        Cluster(devices_per_island=0)


@pytest.mark.parametrize("pool", ["constant", "ramp_down", "doubling", (2, 1, 2)])
@pytest.mark.parametrize("away", [((0, 0, 3),), ((0, 2, 4), (1, 3, 5)), ((1, 0, 9), (0, 8, 9)), ((0, 4, 6), (1, 5, 10**9))])
def test_a_round_without_islands_is_found_without_a_look_at_every_round(pool, away):
    cluster = Cluster(islands=2, pool=pool, away=tuple(Away(island=i, start=a, stop=b) for i, a, b in away))

    def refused(check):
        try:
            check()
        except ConfigError:
            return True
        return False

    rounds = 10
    expected = any(refused(lambda r=r: cluster.present(r, rounds)) for r in range(rounds))
    assert refused(lambda: cluster.check_presence(rounds)) == expected
    refused(lambda: cluster.check_presence(10**9))  # in time
