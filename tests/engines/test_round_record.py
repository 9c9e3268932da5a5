"""Records survive JSON, and the clock of a run continues from a saved time."""

import math

from atoll.engines.accounting import ComputeSpan
from atoll.engines.round_record import DeltaSimilarity, ExchangeRecord, RoundRecord, WallClock

THIRD = 1 / 3


def test_a_record_survives_json():
    record = RoundRecord(
        computed=[ComputeSpan(0.1, 0.1 + THIRD, 3, 3.0, [THIRD], 24, True), ComputeSpan(1.0, 2.0, 0, 0.25, [0.5], 2, False)],
        exchanges=[
            ExchangeRecord("mean", 0.5, 0.75, 40, 16, 2.0, False, (1, 3), True),
            ExchangeRecord("total", 0.8, 0.9, 0, 8, 0.0, True),
        ],
        island_exchanges=[ExchangeRecord("reduce_scatter", 0.2, 0.3, 12, 16, 4.0, True)],
        tokens=26,
        dropped_tokens=2,
        island_updates=3,
        island_skipped=[(0,), ()],
        similarities=[DeltaSimilarity(((4.0, THIRD), (THIRD, 1.0)), (1.0, 2.5))],
    )
    assert RoundRecord.from_json(record.to_json()) == record
    assert "\n" not in record.to_json()


def test_losses_that_are_not_finite_survive_json():
    record = RoundRecord(computed=[ComputeSpan(0.0, 1.0, 0, 1.0, [loss], 8, False) for loss in (math.nan, math.inf, -math.inf)])
    nan, *others = (span.loss for span in RoundRecord.from_json(record.to_json()).computed)
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf]


def test_a_clock_continues_from_where_it_is_set():
    clock = WallClock()
    assert 0 <= clock.now_s() < 60
    clock.set(1000.0)
    assert 1000 <= clock.now_s() < 1060
    assert clock.now_s() <= clock.now_s()


def test_a_taken_record_keeps_its_round_and_the_next_round_goes_to_the_same_lists():
    record = RoundRecord(tokens=3)
    add = record.computed.append
    add(ComputeSpan(0.0, 1.0, 1, 1.0, [0.5], 3))
    taken = record.take()
    assert (record, len(taken.computed), taken.tokens) == (RoundRecord(), 1, 3)
    add(ComputeSpan(1.0, 2.0, 1, 1.0, [0.25], 3))
    assert (len(record.computed), len(taken.computed)) == (1, 1)
