"""A hub that measures itself."""

from atoll.engines.ray.hub_load import Load


def test_two_updates_at_a_time_are_counted_as_waiting_and_only_one_as_applied():
    seconds = iter([0.0, 1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 5.0])
    load = Load(now=lambda: next(seconds))
    with load.received() as first, load.received() as second:
        with first():
            pass
        with second():
            pass
    report = load.report(5.0)
    assert (report.pushes, report.most_waiting, report.seconds) == (2, 2, 5.0)
    assert report.busy == (1.0 + 1.0) / 5.0
    assert report.waited_s == ((2.0 - 1.0) + (3.0 - 1.5)) / 2
    assert report.wall_time_s == 5.0


def test_time_in_which_nothing_can_be_applied_is_busy_too_and_no_update():
    seconds = iter([0.0, 1.0, 3.0, 4.0])
    load = Load(now=lambda: next(seconds))
    with load.occupied():
        pass
    report = load.report(4.0)
    assert (report.busy, report.pushes, report.apply_s) == ((3.0 - 1.0) / 4.0, 0, 0.0)


def test_a_report_begins_a_new_account():
    seconds = iter([0.0, 1.0, 2.0])
    load = Load(now=lambda: next(seconds))
    load.report(1.0)
    again = load.report(2.0)
    assert (again.seconds, again.pushes, again.busy, again.apply_s) == (1.0, 0, 0.0, 0.0)
