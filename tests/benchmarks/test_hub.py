"""The hub's step and scheduler: smoke tests, and the timed scheduler."""

import json

import pytest


def test_hub_step_measures_every_rule_and_form(b, lines_of, tmp_path, capsys):
    b.hub_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
    assert len(lines_of(tmp_path)) == 26  # three rules in three forms and four algorithms, twice
    assert "The most expensive fused step" in capsys.readouterr().out


def test_hub_schedule_measures_every_setting(b, lines_of, tmp_path, capsys):
    b.hub_schedule.main(["--quick", "--record", str(tmp_path), "--quiet"])
    assert len(lines_of(tmp_path)) == 4
    for cell in map(json.loads, lines_of(tmp_path)):
        assert sum(cell["shares"].values()) == pytest.approx(1)
    assert "500 arrivals from 20 workers" in capsys.readouterr().out


def test_timers_do_not_change_the_schedule(b):
    schedule = b.hub_schedule
    size = schedule.Size(arrivals=300, workers=7)
    for setting in schedule.settings():
        plain, timed = schedule.scheduler_of(setting, size), schedule.TimedScheduler(setting, size, schedule.Stopwatch())
        for one in (plain, timed):
            schedule.drive(one, size)
        assert plain.to_parts() == timed.to_parts()
        assert plain.local_updates > 0
