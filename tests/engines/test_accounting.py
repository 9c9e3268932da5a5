import random
from dataclasses import asdict

import pytest

from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.protocols import Work
from atoll.engines.accounting import BusiestSecond, Ledger, RunAccounting


def closed(*, real: bool) -> list[tuple[float | None, float | None]]:
    """The times of a round's end, an evaluation and the run's end, at 1, 2 and 4 seconds."""
    accounting = RunAccounting(islands=1, real=real)
    accounting.ledgers[0].present_s, accounting.ledgers[0].computed_s = 4.0, 3.0
    events = [accounting.round_finished(1, 1, 1.0), accounting.evaluated({"loss": 2.0}, 2.0), accounting.finished(4.0, 0, "")]
    return [(event.virtual_time_s, event.wall_time_s) for event in events]


def test_simulated_times_are_on_the_virtual_clock_only():
    assert closed(real=False) == [(1.0, None), (2.0, None), (4.0, None)]


def test_measured_times_are_on_the_wall_clock_only():
    assert closed(real=True) == [(None, 1.0), (None, 2.0), (None, 4.0)]


@pytest.mark.parametrize("real", [False, True])
def test_utilisation_is_computing_over_presence_on_either_clock(real):
    accounting = RunAccounting(islands=2, real=real)
    for ledger, computed_s in zip(accounting.ledgers, (1.0, 3.0), strict=True):
        ledger.present_s, ledger.computed_s = 4.0, computed_s
    accounting.evaluated({"loss": 2.0}, 4.0)
    assert accounting.finished(4.0, 0, "").utilisation == 0.5


def test_bytes_of_the_busiest_second_by_hand():
    ledger, seen = Ledger(), []
    # Alone; within a second of it, at 20 bytes a second; in no time; less than a second after that; exactly a second after a start;
    # over many seconds.
    for payload, start_s, end_s in [
        (10, 0.25, 0.5),
        (40, 0.5, 2.5),
        (5, 3.0, 3.0),
        (30, 3.5, 3.75),
        (7, 4.5, 4.5),
        (1000, 5.0, 25.0),
    ]:
        ledger.add_bytes(payload, 1, start_s, end_s)
        seen.append(ledger.busiest_second_bytes)
    assert seen == [10, 10 + 15, 25, 5 + 30, 30 + 7, 50]
    ledger.add_bytes(10**6, 0)
    assert (ledger.busiest_second_bytes, ledger.sent_bytes) == (50, 1092 + 10**6), (
        "a transfer without times counts in the sum alone"
    )


def test_a_burst_counts_whole_wherever_it_lies_on_the_clock():
    for start_s in (0.0, 0.9, 7.5):
        burst, both = BusiestSecond(), BusiestSecond()
        burst.add(100, start_s, start_s + 0.25)
        both.add(100, start_s, start_s + 0.25)
        both.add(60, start_s + 0.5, start_s + 1.25)  # at 80 bytes a second
        assert burst.num_bytes == 100
        assert both.num_bytes == pytest.approx(100 + 40), "the second that begins with the first"


def test_the_busiest_second_is_that_of_all_windows():
    """Against windows at many places, for transfers of random lengths and distances."""
    draw = random.Random(0)
    for _ in range(20):
        busiest, at_s, transfers = BusiestSecond(), 0.0, []
        for _ in range(12):
            start_s = at_s + draw.choice([0.0, 0.1, 0.4, 1.3])
            at_s = start_s + draw.choice([0.05, 0.3, 1.0, 2.2])
            transfers.append((start_s, at_s, draw.randrange(1, 100)))
            busiest.add(transfers[-1][2], start_s, at_s)
        begins = [edge + more for start_s, end_s, _ in transfers for edge in (start_s, end_s) for more in (-1.0, 0.0)]
        begins += [draw.uniform(-1, at_s) for _ in range(200)]
        windows = [sum(n * max(0.0, min(e, b + 1) - max(s, b)) / (e - s) for s, e, n in transfers) for b in begins]
        assert busiest.num_bytes == pytest.approx(max(windows))


def test_what_a_hub_sends_to_a_worker_counts_in_its_direction():
    accounting = RunAccounting(islands=2)
    accounting.ledgers[1].present_s = 1.0
    accounting.dispatched(Dispatch(1, 0, 0, 4, Work(0, 0, 0, 1), 2.0), 2.5, 300)
    accounting.sent(1, 200, 0, 2.5, 2.75)
    accounting.evaluated({"loss": 2.0}, 3.0)
    assert accounting.finished(3.0, 0, "").busiest_second_bytes == 300
    resumed = RunAccounting(islands=2)
    resumed.from_parts(accounting.to_parts())
    resumed.sent(1, 250, 0, 2.75, 3.0)
    assert resumed.ledgers[1].busiest_second_bytes == 450


def test_the_ledger_of_an_older_checkpoint_keeps_its_busiest_second():
    parts = asdict(Ledger(sent_bytes=7)) | {"busiest_second_bytes": 5.0, "second": 3, "second_bytes": 1.0}
    del parts["sending"], parts["pulling"]
    assert (Ledger.of(parts).sent_bytes, Ledger.of(parts).busiest_second_bytes) == (7, 5.0)


def test_payload_leaves_from_the_start_of_an_exchange_not_from_the_arrival_of_the_last_island():
    """A quorum waits for its window, and a fragment for the one before it."""
    accounting = RunAccounting(islands=2)
    event = accounting.exchanged(
        "mean", islands=[0, 1], arrived_s=[0.0, 1.0], start_s=3.0, end_s=4.0, sent_bytes=[90, 60], control_bytes=[0, 0], weight=2.0
    )
    assert (event.start_s, event.end_s) == (3.0, 4.0)
    assert [ledger.busiest_second_bytes for ledger in accounting.ledgers] == [90, 60]


def test_a_run_reports_the_busiest_second_of_its_islands_also_after_it_is_resumed():
    accounting = RunAccounting(islands=3)
    for ledger in accounting.ledgers[:2]:
        ledger.present_s = 1.0
    accounting.sent(0, 80, 0, 0.0, 0.5)
    accounting.exchanged(
        "mean", islands=[0, 1], arrived_s=[0.5, 0.75], end_s=1.0, sent_bytes=[10, 60], control_bytes=[0, 0], weight=2.0
    )
    resumed = RunAccounting(islands=3)
    resumed.from_parts(accounting.to_parts())
    for one in (accounting, resumed):
        one.sent(0, 20, 0, 1.5, 1.75)
        one.evaluated({"loss": 2.0}, 2.0)
        assert one.finished(2.0, 0, "").busiest_second_bytes == 80 + 10
