"""The report of an elastic run finds lost and duplicate data, diverged islands, and the times of recovery."""

import json

import pytest

from atoll.core.errors import ConfigError
from atoll.core.events import Attended, Evaluated, Leased
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.chaos.reports import elastic_report, exactly_once_violations, report_text


def leased(number, *delivered, returned=(), dropped=()):
    units, back, lost = ([[island, shard, start, 10] for island, shard, start in some] for some in (delivered, returned, dropped))
    moment = {"virtual_time_s": None, "wall_time_s": float(number)}
    return Leased(round=number, delivered=units, returned=back, dropped=lost, **moment)


def attended(number, participating=2, digest="aaaaaaaa", attempts=1):
    return Attended(
        round=number,
        known=2,
        alive=2,
        participating=participating,
        attempts=attempts,
        epoch=number + 1,
        digest=digest,
        virtual_time_s=None,
        wall_time_s=float(number),
    )


def test_complete_data_in_any_order_has_no_violations():
    assert exactly_once_violations([leased(1, (0, 0, 10), (1, 1, 0)), leased(2, (1, 0, 0), (0, 1, 10))], units=4) == []


def test_a_duplicate_unit_is_found():
    assert exactly_once_violations([leased(1, (0, 0, 0)), leased(2, (1, 0, 0))]) == [
        "shard 0: batches 0 to 10 are in commits 1 and 2"
    ]


def test_a_missing_unit_is_found():
    assert exactly_once_violations([leased(1, (0, 0, 0)), leased(2, (1, 0, 20))]) == ["shard 0: batches 10 to 20 are in no commit"]


def test_a_dropped_unit_is_reported_once():
    account = [leased(1, (0, 0, 0), dropped=[(1, 0, 10)]), leased(2, (1, 0, 20))]
    assert exactly_once_violations(account, units=3) == ["shard 0: batches 10 to 20 were refused too often, and dropped"]


def test_a_missing_last_unit_is_found_by_the_count():
    assert exactly_once_violations([leased(1, (0, 0, 0))], units=2) == ["1 units are in commits; 2 were expected"]


@pytest.fixture
def folder(tmp_path):
    """A run of two islands, one of which was killed after its second commit and took part in the fourth again."""
    with JsonlSink(tmp_path / "events.jsonl") as log:
        for event in (
            leased(1, (0, 0, 0), (1, 1, 0)),
            attended(1),
            leased(2, (0, 0, 10), (1, 1, 10)),
            attended(2, digest="bbbbbbbb"),
            leased(3, (0, 0, 20), returned=[(1, 1, 20)]),
            attended(3, participating=1, digest="cccccccc", attempts=2),
            leased(4, (0, 1, 20)),
            attended(4, digest="dddddddd"),
        ):
            log.emit(event)
        counts = {"steps": 4, "tokens": 9, "local_updates": 9, "sent_bytes_per_island": 0.0}
        log.emit(Evaluated(round=4, virtual_time_s=None, wall_time_s=4.0, metrics={"loss": 2.5}, **counts))
    actions = [
        {"at_s": 0.0, "observed": {"round": 1, "epoch": 2, "participating": 2}},
        {"at_s": 1.0, "observed": {"round": 2, "epoch": 3, "participating": 2}},
        {"at_s": 1.5, "injected": {"fault": "Kill", "victim": "island-0001", "pid": 7}},
        {"at_s": 3.0, "observed": {"round": 3, "epoch": 4, "participating": 1}},
        {"at_s": 4.0, "observed": {"round": 4, "epoch": 5, "participating": 2}},
    ]
    (tmp_path / "chaos.jsonl").write_text("".join(json.dumps(action) + "\n" for action in actions))
    (tmp_path / "logs").mkdir()
    write(tmp_path, 0, (6, [(1, 2, "aaaaaaaa"), (2, 3, "bbbbbbbb"), (3, 4, "cccccccc"), (4, 5, "dddddddd")]))
    write(tmp_path, 1, (7, [(1, 2, "aaaaaaaa"), (2, 3, "bbbbbbbb")]), (8, [(4, 5, "dddddddd")]))
    return tmp_path


def write(folder, island, *processes):
    name = f"island-{island:04d}"
    lines = []
    for pid, commits in processes:
        lines.append(f"12:00:00 {name} on host (127.0.0.1), process {pid}, 1 thread(s)")
        lines += [f"12:00:01 committed round {r} of epoch {e} as {digest}, with work of its own" for r, e, digest in commits]
    (folder / "logs" / f"{name}.log").write_text("\n".join(lines) + "\n")


def test_a_report_counts_commits_data_and_faults(folder):
    report = elastic_report(folder, units=6)
    assert (report.commits, report.attempts, report.succeeded) == (4, 5, 0.8)
    assert (report.delivered, report.returned, report.data) == (6, 1, ())
    assert (report.participating_of_alive, report.loss, report.injected) == (0.875, 2.5, {"Kill": 1})
    assert (report.compared, report.diverged, report.unseen) == (7, (), 0)


def test_recovery_times_run_to_the_next_commit_and_to_the_next_work_of_the_victim(folder):
    (recovery,) = elastic_report(folder).recoveries
    assert (recovery.victim, recovery.commit_s, recovery.back_s) == ("island-0001", 1.5, 2.5)


def test_a_diverged_island_is_named(folder):
    write(folder, 1, (7, [(1, 2, "aaaaaaaa"), (2, 3, "bbbbbbb0")]))
    assert elastic_report(folder).diverged == ("island-0001 held bbbbbbb0 after round 2, and the log has bbbbbbbb",)


def test_a_commit_in_only_one_islands_log_is_unseen(folder):
    write(folder, 1, (7, [(3, 9, "eeeeeeee")]))
    assert (elastic_report(folder).unseen, elastic_report(folder).diverged) == (1, ())


def test_a_run_without_a_commit_has_no_report(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no commit"):
        elastic_report(tmp_path)


def test_the_report_as_text(folder):
    assert report_text(elastic_report(folder)).splitlines() == [
        "faults        1 Kill",
        "commits       4 in 5 attempts (80 % succeeded); 0 deltas refused, 0 checkpoints not saved",
        "islands       2 known, 2.00 alive, 1.75 participating on average (0.875 of those alive)",
        "data          6 units delivered, 1 leased again: each in exactly one commit",
        "equal bits    7 digests of islands' own logs compared, none differs",
        "recovery      after a kill the other islands commit within 1.5 s (median; at most 1.5 s), "
        "and the killed island delivers work again "
        "within 2.5 s (median; at most 2.5 s)",
    ]
