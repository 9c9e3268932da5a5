"""What a process wrote down is read as it was written."""

import math

from atoll.engines.processes.round_record import ComputeRecord, DeltaSimilarity, ExchangeRecord, RoundRecord

THIRD = 1 / 3


def test_a_diary_reads_back_as_it_was_written():
    diary = RoundRecord(
        stretches=[ComputeRecord(0.1, 0.1 + THIRD, 3, 3.0, 24, THIRD, True), ComputeRecord(1.0, 2.0, 0, 0.25, 2, 0.5, False)],
        meetings=[
            ExchangeRecord("mean", 0.5, 0.75, 40, 16, 2.0, False, (1, 3), True),
            ExchangeRecord("total", 0.8, 0.9, 0, 8, 0.0, True),
        ],
        inside=[ExchangeRecord("reduce_scatter", 0.2, 0.3, 12, 16, 4.0, True)],
        tokens=26,
        dropped=2,
        updates=3,
        skipped=[(0,), ()],
        likenesses=[DeltaSimilarity(((4.0, THIRD), (THIRD, 1.0)), (1.0, 2.5))],
    )
    assert RoundRecord.from_line(diary.to_line()) == diary
    assert "\n" not in diary.to_line()


def test_an_empty_diary_reads_back_as_it_was_written():
    assert RoundRecord.from_line(RoundRecord().to_line()) == RoundRecord()


def test_losses_that_are_no_numbers_survive():
    diary = RoundRecord(stretches=[ComputeRecord(0.0, 1.0, 0, 1.0, 8, loss, False) for loss in (math.nan, math.inf, -math.inf)])
    nan, *others = (stretch.loss for stretch in RoundRecord.from_line(diary.to_line()).stretches)
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf]
