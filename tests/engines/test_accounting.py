import pytest

from atoll.engines.accounting import Ledger, RunAccounting


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
    # Within a second; over several, of which one is whole; in no time; in a second that has payload already; over many.
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
    assert seen == [10, 20, 20, 35, 35, 50]
    ledger.add_bytes(10**6, 0)
    assert (ledger.busiest_second_bytes, ledger.sent_bytes) == (50, 1092 + 10**6), (
        "a transfer without times counts in the sum alone"
    )


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
