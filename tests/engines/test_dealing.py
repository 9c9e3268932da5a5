"""Who reads what."""

from fractions import Fraction

from atoll.engines.dealing import Dealing
from atoll.testing.workloads import RegressionBatches


def test_readers_of_one_shard_never_read_the_same_batch():
    dealing = Dealing(RegressionBatches(num_shards=2))
    works = [dealing.deal(reader, 3, 1, schedule=0) for reader in (0, 1, 2, 3)]
    assert [(work.shard, work.start) for work in works] == [(0, 0), (1, 0), (0, 3), (1, 3)]


def test_who_reads_other_pieces_than_the_last_one_begins_with_a_whole_one():
    dealing = Dealing(RegressionBatches(num_shards=1))
    assert dealing.deal(0, 3, 2, schedule=0).start == 0  # one and a half batches
    assert dealing.deal(0, 1, 1, schedule=0).start == 2
    assert dealing.positions == [Fraction(3)]


def test_positions_are_saved_exactly():
    one, two = (Dealing(RegressionBatches(num_shards=2)) for _ in range(2))
    one.deal(1, 1, 3, schedule=0)
    two.from_parts(one.to_parts())
    assert two.positions == [Fraction(0), Fraction(1, 3)]


def test_a_shard_that_two_devices_share_counts_once():
    dealing = Dealing(RegressionBatches(num_shards=2, shard_examples=32))
    assert dealing.examples([0, 1]) == 64
    assert dealing.examples([0, 2]) == 32
