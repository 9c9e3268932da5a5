"""The report of a run with a hub finds updates that count twice, and counts workers and hubs that died."""

import json

import pytest

from atoll.core.errors import ConfigError
from atoll.core.events import Dispatched, Evaluated, HubRestarted, IslandJoined, IslandLeft, Refused, Returned, SaveFailed
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.chaos.faults import CHAOS_LOG
from atoll.testing.chaos.reports import hub_report, report_text, update_violations
from tests.samples import arrived

STEPS = 4


def at_wall_time(time_s):
    return {"virtual_time_s": None, "wall_time_s": float(time_s)}


def sent(round, start, *, island=0, shard=0):
    what = {"version": 0, "schedule": start, "steps": STEPS, "begin_s": 0.0, "sent_bytes": 4}
    return Dispatched(island=island, round=round, shard=shard, start=start, **what, **at_wall_time(round))


def came(round, version, *, island=0, shard=0, applied=True):
    what = {"island": island, "round": round, "shard": shard, "steps": STEPS, "version": version, "applied": applied}
    return arrived(pushed_s=0.0, **what, **at_wall_time(round))


def left(island, time_s):
    return IslandLeft(island=island, round=0, **at_wall_time(time_s))


def joined(island, time_s):
    return IslandJoined(island=island, round=0, donor=None, sent_bytes=0, **at_wall_time(time_s))


def folder_of(folder, events, actions=()):
    with JsonlSink(folder / "events.jsonl") as log:
        for event in events:
            log.emit(event)
    (folder / CHAOS_LOG).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return folder


SOUND = [
    sent(0, 0),
    sent(1, 0, island=1, shard=1),
    came(0, 1),
    sent(2, 4),
    came(1, 1, island=1, shard=1, applied=False),  # too late, and left out
    came(2, 2),
]


def test_a_log_in_which_each_update_counts_once_has_no_violations():
    assert list(update_violations(SOUND)) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([came(2, 3)], "round 2 of worker 0 arrived twice"),
        ([sent(3, 6), came(3, 3)], "rounds 2 and 3 have the same batches of shard 0"),
        ([sent(3, 8), came(3, 4)], "round 3: the hub had applied 4 updates after it, and the log has 3"),
        ([sent(3, 8), came(3, 3, applied=False)], "round 3: the hub had applied 3 updates after it, and the log has 2"),
        ([came(9, 3)], "round 9 of worker 0 arrived without a dispatch"),
    ],
)
def test_an_update_that_counts_twice_or_was_never_dispatched_is_named(more, says):
    assert list(update_violations([*SOUND, *more])) == [says]


def test_a_round_that_was_returned_and_dispatched_again_counts_once():
    returned = Returned(island=0, round=3, shard=0, steps=STEPS, **at_wall_time(3))
    assert list(update_violations([*SOUND, sent(3, 8), returned, sent(4, 8, island=1), came(4, 3, island=1)])) == []


def test_the_report_counts_workers_restarts_and_skipped_faults(tmp_path):
    restarted = HubRestarted(checkpoint="00000002", round=2, lost_rounds=3, lost_local_updates=12, **at_wall_time(7))
    figures = {"round": 3, "steps": 4, "tokens": 1, "local_updates": 12, "sent_bytes_per_island": 1.0}
    events = [
        *SOUND,
        left(1, 5),
        joined(1, 6.5),
        restarted,
        left(0, 8),
        joined(0, 8),
        Refused(island=1, round=3, reason="it was delivered twice", **at_wall_time(8)),
        Returned(island=1, round=3, shard=0, steps=STEPS, **at_wall_time(8)),
        SaveFailed(round=3, reason="no space"),
        Evaluated(**figures, metrics={"loss": 2.5}, **at_wall_time(9)),
        Evaluated(**figures, metrics={"loss": 2.25}, **at_wall_time(9)),
    ]
    actions = [
        {"at_s": 1.0, "injected": {"fault": "Kill", "victim": "worker-1", "pid": 1}},
        {"at_s": 2.0, "injected": {"fault": "Kill", "victim": "hub", "pid": 2}},
        {"at_s": 3.0, "injected": {"fault": "Freeze", "victim": "hub", "for_s": 1.0, "pid": 3}},
        {"at_s": 4.0, "reverted": {"fault": "Freeze", "done": True}},
        {"at_s": 5.0, "skipped": {"fault": "Kill", "victim": "worker-2", "why": "no such process"}},
    ]
    report = hub_report(folder_of(tmp_path, events, actions))
    assert (report.injected, report.skipped) == ({"Kill": 2, "Freeze": 1}, ("Kill of worker-2 (no such process on this machine)",))
    assert (report.arrivals, report.applied, report.violations) == (3, 2, ())
    assert (report.left, report.joined, report.rejoined) == (2, 2, 1)
    assert (report.restarts, report.lost_rounds, report.lost_local_updates) == (1, 3, 12)
    assert (report.refused, report.returned, report.not_saved, report.loss) == (1, 1, 1, 2.25)
    assert report_text(report).splitlines() == [
        "faults        2 Kill, 1 Freeze; skipped: Kill of worker-2 (no such process on this machine)",
        "updates       3 arrived, 2 of them applied, with 12 local updates: none twice; 1 refused, 1 rounds dispatched again",
        "workers       2 left, 2 joined (1 at the same time: a restarted hub had another record of them)",
        "hub           1 restarts; 3 updates (12 local updates) lost and computed again; 1 checkpoints not saved",
        "loss          2.2500",
    ]


def test_a_run_without_faults_has_a_report(tmp_path):
    folder = folder_of(tmp_path, [*SOUND, came(2, 3)])
    (folder / CHAOS_LOG).unlink()
    words = report_text(hub_report(folder))
    assert words.splitlines()[0].split() == ["faults", "none"]
    assert "round 2 of worker 0 arrived twice" in words
    assert "not measured" in words


def test_a_run_without_updates_has_no_report(tmp_path):
    with pytest.raises(ConfigError, match=r"no update that reached a hub.*Let it run longer"):
        hub_report(folder_of(tmp_path, [left(0, 1)]))
