"""The hub: its steps and its scheduling, in miniature."""

import json

import pytest


def test_hub_steps_are_measured_in_miniature_and_not_twice(b, lines_of, tmp_path, capsys):
    for _ in range(2):
        b.hub_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 26  # three rules in three forms and four that do more, twice
    assert "The dearest fused step" in capsys.readouterr().out


def test_scheduling_is_measured_in_miniature_and_not_twice(b, lines_of, tmp_path, capsys):
    for _ in range(2):
        b.hub_schedule.main(["--quick", "--record", str(tmp_path), "--quiet"])
        assert len(lines_of(tmp_path)) == 4
    for cell in map(json.loads, lines_of(tmp_path)):
        assert sum(cell["shares"].values()) == pytest.approx(1)
    assert "500 arrivals from 20 workers" in capsys.readouterr().out


def test_a_clock_around_its_parts_does_not_change_what_is_scheduled(b):
    schedule = b.hub_schedule
    size = schedule.Size(arrivals=300, workers=7)
    for setting in schedule.settings():
        plain, timed = schedule.scheduler_of(setting, size), schedule.TimedScheduler(setting, size, schedule.Clock())
        for one in (plain, timed):
            schedule.drive(one, size)
        assert plain.to_parts() == timed.to_parts()
        assert plain.local_updates > 0
