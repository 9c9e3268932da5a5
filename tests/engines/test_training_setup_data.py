"""Which batches each reader of a shard is assigned."""

from fractions import Fraction

import pytest

from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.engines.training_setup import DataPositions
from atoll.testing.simulated_runs import RegressionBatches


def test_readers_of_one_shard_never_read_the_same_batch():
    positions = DataPositions(RegressionBatches(num_shards=2))
    works = [positions.assign(reader, 3, 1, schedule=0) for reader in (0, 1, 2, 3)]
    assert [(work.shard, work.start) for work in works] == [(0, 0), (1, 0), (0, 3), (1, 3)]


def test_a_reader_of_other_pieces_begins_with_a_whole_one():
    positions = DataPositions(RegressionBatches(num_shards=1))
    assert positions.assign(0, 3, 2, schedule=0).start == 0  # one and a half batches
    assert positions.assign(0, 1, 1, schedule=0).start == 2
    assert positions.positions == [Fraction(3)]


def test_positions_are_saved_exactly():
    one, two = (DataPositions(RegressionBatches(num_shards=2)) for _ in range(2))
    one.assign(1, 1, 3, schedule=0)
    two.from_parts(one.to_parts())
    assert two.positions == [Fraction(0), Fraction(1, 3)]


def test_a_shard_that_two_devices_share_counts_once():
    positions = DataPositions(RegressionBatches(num_shards=2, shard_examples=32))
    assert positions.examples([0, 1]) == 64
    assert positions.examples([0, 2]) == 32


def test_readers_in_step_get_work_in_order_whichever_asks_first():
    positions = DataPositions(RegressionBatches(num_shards=2))
    asked = {reader: [] for reader in range(4)}
    for reader in (2, 2, 1, 0, 3, 0, 3, 1):
        asked[reader].append(positions.assign_in_step(reader, 3, 1, reader, range(4)))
    assert {reader: [work.start for work in works] for reader, works in asked.items()} == {
        0: [0, 6],
        1: [0, 6],
        2: [3, 9],
        3: [3, 9],
    }
    assert [[work.schedule for work in works] for works in asked.values()] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_a_reader_out_of_step_gets_unassigned_batches():
    positions = DataPositions(RegressionBatches(num_shards=1))
    assert positions.assign_in_step(0, 3, 1, 0, range(2)).start == 0
    assert positions.assign_in_step(1, 5, 1, 0, range(2)).start == 6  # it was assigned 3 to 5


def test_assigned_work_expires_with_its_round():
    positions = DataPositions(RegressionBatches(num_shards=1))
    positions.assign_in_step(0, 1, 1, 0, range(2))
    positions.begin_round()
    assert positions.assign_in_step(1, 1, 1, 0, range(2)).start == 3
    assert positions.positions == [Fraction(4)]


def test_processes_with_free_batches_cannot_share_a_shard():
    positions = DataPositions(RegressionBatches(num_shards=2))
    positions.check_readers(2, ACCO(batch="free"), None)
    positions.check_readers(3, ACCO(), None)
    with pytest.raises(ConfigError, match=r"3 processes read 2 shards.*data.shards=3, or batch=fixed"):
        positions.check_readers(3, DiLoCo(inner_steps=2), ACCO(batch="free"))
