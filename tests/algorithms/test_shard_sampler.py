"""ShardSampler: eq. (2) by hand; steps count at dispatch, and the counts add up after a round is put back."""

import json
from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings, strategies as st

from atoll.algorithms.shard_sampler import ShardSampler
from atoll.core.errors import ConfigError


def never():
    raise AssertionError("chance was asked, and there was nothing to decide")


def shards(examples, policy="deficit", ties="chance", steps=()):
    """With some steps handed out already."""
    made = ShardSampler(examples, policy, ties)
    for shard, count in enumerate(steps):
        if count:
            made.assign(shard, count)
    return made


def drawn(account, draws=1000, last=0):
    """How often each shard is drawn, over an even grid of draws."""
    counts = Counter(account.choose(last, lambda at=at: (at + 0.5) / draws) for at in range(draws))
    return [counts[shard] / draws for shard in range(len(account))]


# ---------------------------------------------------------------------------------------------------------- which shard


def test_the_chances_are_equation_two():
    """Shares 1/2, 1/4, 1/4 of the examples and 5/10, 1/10, 4/10 of the steps: deficits 0, 0.15 and none, so only shard 1."""
    assert drawn(shards([200, 100, 100], steps=[5, 1, 4])) == [0, 1, 0]
    # 1/3 each of the examples; 6/10, 3/10 and 1/10 of the steps: deficits 0, 1/30 and 7/30, that is 1 to 7.
    assert drawn(shards([10, 10, 10], steps=[6, 3, 1]), draws=800) == [0, 1 / 8, 7 / 8]


def test_before_the_first_round_the_chances_are_the_sizes():
    assert drawn(shards([600, 300, 100])) == [0.6, 0.3, 0.1]


def test_when_every_shard_has_exactly_its_share_the_chances_are_the_sizes():
    assert drawn(shards([600, 300, 100], steps=[12, 6, 2])) == [0.6, 0.3, 0.1]


def test_an_empty_shard_is_never_drawn():
    assert drawn(shards([100, 0, 300])) == [0.25, 0, 0.75]
    assert shards([0, 100, 0]).choose(0, lambda: 1 - 2**-53) == 1


def test_four_workers_that_are_dispatched_together_take_four_shards():
    """Counted at dispatch, one after the other: whatever is drawn, each next one finds three, two, one that lag."""
    for draw in (0.0, 0.3, 0.99):
        account, taken = shards([50] * 4), []
        for worker in range(4):
            taken.append(account.choose(worker, lambda draw=draw: draw))
            account.assign(taken[-1], 20)
        assert sorted(taken) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["deficit", "visits"])
def test_a_tie_goes_to_the_workers_last_shard_without_asking_chance(policy):
    account = shards([50] * 4, policy, "last")
    assert [account.choose(last, never) for last in range(4)] == [0, 1, 2, 3]
    account.assign(2, 5)
    assert [account.choose(last, never) for last in (0, 1, 3)] == [0, 1, 3]  # three lag equally, and these are among them
    assert drawn(account, draws=300, last=2) == [1 / 3, 1 / 3, 0, 1 / 3]  # its last one does not lag: chance


def test_a_last_shard_that_lags_less_than_another_is_no_tie():
    assert drawn(shards([10, 10, 10], ties="last", steps=[6, 3, 1]), draws=800, last=1) == [0, 1 / 8, 7 / 8]
    assert drawn(shards([10, 10, 10], ties="last", steps=[6, 3, 1]), draws=800, last=2) == [0, 1 / 8, 7 / 8]


def test_visits_takes_one_of_the_least_visited_whatever_their_sizes_and_steps():
    account = shards([1000, 10, 10], "visits", steps=[1, 500, 0])
    assert drawn(account) == [0, 0, 1]
    account.assign(2, 1)
    assert drawn(account, draws=999) == [1 / 3, 1 / 3, 1 / 3]


def test_over_many_rounds_the_steps_follow_the_sizes_also_when_rounds_differ_in_length():
    account = shards([500, 300, 200])
    for round in range(2000):
        account.assign(account.choose(0, lambda round=round: (round * 0.618) % 1), (50, 38, 19, 8)[round % 4])
    total = int(account.steps.sum())
    assert [steps / total for steps in account.steps.tolist()] == pytest.approx([0.5, 0.3, 0.2], abs=50 / total)


def exact(examples, steps, draw):
    """Eq. (2) in fractions."""
    shares = [Fraction(size, sum(examples)) - Fraction(count, sum(steps)) for size, count in zip(examples, steps, strict=True)]
    chances = [max(share, Fraction(0)) for share in shares]
    sums = list(accumulate(chances if any(chances) else map(Fraction, examples)))
    return next(shard for shard, total in enumerate(sums) if draw * sums[-1] < total)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**45)), min_size=1, max_size=5),
    st.sampled_from([Fraction(n, 8) for n in range(8)]),
)
def test_products_beyond_64_bits_give_what_exact_arithmetic_gives(pairs, draw):
    examples, steps = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    near = [exact(examples, steps, draw + hair) for hair in (-Fraction(1, 10**9), 0, Fraction(1, 10**9)) if draw + hair >= 0]
    assert shards(examples, steps=steps).choose(0, lambda: float(draw)) in near


def test_huge_counts_are_counted_exactly():
    """Products of 2**63 and more: one step too many in 2**50 still decides, where 64 bits would overflow."""
    half = 2**50
    assert shards([10_007, 10_009], ties="last", steps=[half, half + 1]).choose(1, lambda: 0.5) == exact(
        [10_007, 10_009], [half, half + 1], Fraction(1, 2)
    )
    account = shards([2**20 + 1, 2**20 + 1, 1], steps=[half, half + 1, 1])
    assert account.choose(0, lambda: 0.9999999) == exact([2**20 + 1, 2**20 + 1, 1], [half, half + 1, 1], Fraction(9999999, 10**7))


# --------------------------------------------------------------------------------------------------------- where in it


def test_the_position_on_the_schedule_and_in_the_data_continues_where_the_shard_was_left():
    account = shards([70, 30])
    works = [account.assign(0, 5), account.assign(1, 3), account.assign(0, 2), account.assign(0, 1)]
    assert [(work.shard, work.start, work.schedule, work.examples) for work in works] == [
        (0, 0, 0, 70), (1, 0, 0, 30), (0, 5, 5, 70), (0, 7, 7, 70),
    ]  # fmt: skip


def test_unassigning_restores_the_counts():
    account = shards([50, 50], steps=[5, 3])
    before = account.to_parts()
    account.unassign(account.assign(0, 7), 7)
    assert account.to_parts() == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_unassigning_out_of_order_restores_the_counts_too(order):
    account = shards([50, 50], steps=[5, 3])
    before = account.to_parts()
    works = [(account.assign(0, steps), steps) for steps in (4, 2, 6)]
    for number in order:
        account.unassign(*works[number])
    assert account.to_parts() == before


def test_an_abandoned_range_is_assigned_before_new_batches():
    account = shards([50])
    first, _ = account.assign(0, 10), account.assign(0, 10)
    account.unassign(first, 10)
    again, rest, new = account.assign(0, 4), account.assign(0, 6), account.assign(0, 1)
    assert (again.start, rest.start, new.start) == (0, 4, 20)
    assert (again.schedule, rest.schedule, new.schedule) == (10, 14, 20)


def test_an_abandoned_range_that_is_too_short_waits_for_a_round_that_fits():
    account = shards([50])
    first, _ = account.assign(0, 3), account.assign(0, 10)
    account.unassign(first, 3)
    assert [account.assign(0, steps).start for steps in (4, 3)] == [13, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=60))
def test_no_batch_is_assigned_twice_and_the_counts_add_up_whatever_is_abandoned(moves):
    account, out = shards([5, 50, 10]), []
    for shard, steps, back, which in moves:
        if back and out:
            account.unassign(*out.pop(which % len(out)))
        else:
            out.append((account.assign(shard, steps), steps))
        for number in range(3):
            mine = sorted((work.start, work.start + steps) for work, steps in out if work.shard == number)
            assert all(one[1] <= two[0] for one, two in pairwise(mine)), mine
            assert account.steps[number] == sum(stop - start for start, stop in mine)
            assert account.visits[number] == len(mine)
    for work, steps in out:
        account.unassign(work, steps)
    assert account.to_parts() == shards([5, 50, 10]).to_parts()


# -------------------------------------------------------------------------------------------------------------- saving


def test_the_account_survives_a_file_and_continues_in_the_same_way():
    account = shards([50, 30])
    first, _ = account.assign(0, 10), account.assign(0, 4)
    account.assign(1, 3)
    account.unassign(first, 10)
    again = shards([50, 30])
    again.from_parts(json.loads(json.dumps(account.to_parts())))
    assert again.to_parts() == account.to_parts()
    for draw in (0.1, 0.5, 0.9):
        shard = account.choose(0, lambda draw=draw: draw)
        assert again.choose(0, lambda draw=draw: draw) == shard
        assert again.assign(shard, 4) == account.assign(shard, 4)


@pytest.mark.parametrize("examples", [[], [0, 0], [5, -1]])
def test_shards_with_nothing_in_them_are_refused(examples):
    with pytest.raises(ConfigError, match="at least one shard with at least one example"):
        ShardSampler(examples, "deficit", "last")


@pytest.mark.parametrize(
    ("examples", "steps", "chances"),
    [([5, 4, 3], [1, 0, 0], [0, 4 / 7, 3 / 7]), ([7686, 7686, 7686, 7685], [20, 20, 20, 20], [1 / 3, 1 / 3, 1 / 3, 0])],
)
def test_with_ties_the_chances_are_equation_two_where_shards_do_not_lag_exactly_equally(examples, steps, chances):
    """Also those of a worker whose last shard has the chance 0, however little that shard has more than its share."""
    last = chances.index(0)
    assert drawn(shards(examples, ties="last", steps=steps), draws=2100, last=last) == pytest.approx(chances, abs=1e-3)


def test_shards_that_differ_more_are_drawn_by_their_sizes_at_first():
    assert drawn(shards([300, 100, 100, 100], ties="last"), draws=600) == [0.5, 1 / 6, 1 / 6, 1 / 6]
