"""Who was there, in words and in a figure."""

import pytest

from atoll.core.errors import AtollError
from atoll.core.events import Attended, Leased, Refused, SaveFailed
from atoll.telemetry.attendance import attendance, plot_attendance, read_attendance
from atoll.telemetry.event_text import notice


def attended(round, participating, alive=3, attempts=1):
    return Attended(
        round=round,
        known=4,
        alive=alive,
        participating=participating,
        attempts=attempts,
        epoch=round,
        digest="0",
        virtual_time_s=None,
        wall_time_s=float(round),
    )


def leased(round, delivered, returned=()):
    units = ([[i, i, round, 1] for i in islands] for islands in (delivered, returned))
    return Leased(round=round, delivered=next(units), returned=next(units), virtual_time_s=None, wall_time_s=float(round))


EVENTS = [
    leased(1, [0, 1, 2]),
    attended(1, 3),
    leased(2, [0, 2], [1]),
    attended(2, 2, attempts=3),
    Refused(island=1, round=2, virtual_time_s=None, wall_time_s=2.0, reason="its delta is not finite"),
    SaveFailed(round=2, reason="the disk is full"),
]


def test_figures_are_means_and_sums_over_commits():
    found = attendance(EVENTS)
    assert (found.commits, found.attempts, found.known, found.alive, found.participating) == (2, 4, 4, 3.0, 2.5)
    assert (found.delivered, found.returned, found.refused, found.not_saved) == (5, 1, 1, 1)
    assert found.lines == [
        "islands    4 known; 3 alive and 2.5 taking part on average (83 %)",
        "commits    2, of which 2 attempts failed first",
        "data       5 units delivered, each once; 1 leased again",
        "refused    1 delta",
        "not saved  1 checkpoint",
    ]


def test_a_run_of_islands_that_stay_has_none(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    assert read_attendance(tmp_path) is None
    with pytest.raises(AtollError, match="no commit of islands that come and go"):
        plot_attendance(tmp_path, tmp_path / "attendance.png")


def test_the_figure_is_drawn_from_the_log(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in EVENTS))
    assert plot_attendance(tmp_path, tmp_path / "attendance.png").stat().st_size > 1000
    assert read_attendance(tmp_path) == attendance(EVENTS)


def test_a_commit_that_somebody_missed_has_a_line_of_its_own():
    assert notice(attended(1, 3)) is None
    assert notice(attended(2, 2, attempts=3)) == "round 2: committed by 2 of 3 islands alive (4 known), at attempt 3"
    assert notice(SaveFailed(round=2, reason="full")) == "round 2: not saved, and training goes on: full"
