import pytest

from atoll.engines.accounting import RunAccounting


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
