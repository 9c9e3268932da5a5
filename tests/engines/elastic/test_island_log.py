"""The leader of threaded runs: it writes the event log, evaluates, saves and finishes the run, whichever island dies."""

from collections import Counter
from contextlib import nullcontext

import pytest

from atoll.core.errors import CheckpointError
from atoll.core.events import (
    Attended,
    Evaluated,
    IslandJoined,
    Leased,
    RoundFinished,
    RunFinished,
    Saved,
    SaveFailed,
)
from atoll.engines.elastic import island as island_module, leader_event_log as leader_log_module
from atoll.engines.elastic.commit_log import CommitRecord
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.event_log_lease import EventLogLease, LeaseLost
from atoll.engines.elastic.gateway_client import GatewayNetwork
from atoll.engines.elastic.leader_event_log import LeaderLog, RunAlreadyFinished
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.runs.folder import RunFolder
from atoll.testing.chaos.reports import exactly_once_violations


def attended(number):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=number, virtual_time_s=None, wall_time_s=1.0, **who)


def test_when_the_leader_dies_the_next_one_continues_where_the_log_ends(threaded, toy):
    live = threaded(toy(2, "train.steps=16"), Elastic(processes=2))
    first, second = live.start("island-0000", dies_after=3), live.start("island-0001")
    for thread in first:
        thread.join(60.0)
    live.finish(second)
    assert "island-0001 leads: it writes the event log from round 4 on" in live.logged
    assert [event.round for event in live.events(RoundFinished)] == list(range(1, len(live.events(RoundFinished)) + 1))
    assert [event.islands for event in live.events(RoundFinished)][:4] == [2, 2, 2, 1]
    (finished,) = live.events(RunFinished)
    assert finished.local_updates == 32
    units = Counter(tuple(unit[1:]) for event in live.events(Leased) for unit in event.delivered)
    assert len(units) == 16
    assert set(units.values()) == {1}


def test_when_the_leader_dies_after_the_last_commit_another_island_finishes_the_run(threaded, toy, monkeypatch):
    monkeypatch.setattr(island_module, "SILENT_S", 0.2)
    live = threaded(toy(2, "keep.save_every=1000"), Elastic(processes=2))
    live.finish([*live.start("island-0000", dies_after=4), *live.start("island-0001")])
    assert [event.round for event in live.events(Attended)] == [1, 2, 3, 4]
    assert len(live.events(RunFinished)) == 1


def test_islands_with_the_folder_stay_until_the_leader_has_finished_the_run(threaded, toy):
    live = threaded(toy(2), Elastic(processes=2))
    live.waits["island-0000", 4] = "island-0001 stays until island-0000 has finished the run"
    live.finish(live.start("island-0000", "island-0001"))
    assert len([text for text in live.logged if "writes the event log" in text]) == 1
    assert len(live.events(RunFinished)) == 1


def test_a_joiner_keeps_the_last_state_for_islands_with_the_folder_that_died(threaded, toy, monkeypatch):
    monkeypatch.setattr(island_module, "SILENT_S", 1000.0)  # the joiner cannot write, so it is not waited for
    live = threaded(toy(2, "keep.save_every=1000"), Elastic(processes=2))
    first, other = live.start("island-0000", dies_after=4), live.start("zz-elsewhere", has_folder=False)
    for thread in first:
        thread.join(60.0)
    live.finish([*live.start("island-0000"), *other])
    assert any(text.startswith("island-0000 begins with round 4, fetched from zz-elsewhere") for text in live.logged)
    assert [event.round for event in live.events(Attended)] == [1, 2, 3, 4]
    assert len(live.events(RunFinished)) == 1


@pytest.fixture
def claimed(monkeypatch):
    """The joiner `aaa`, the first in rank order, claims to have the run's own folder."""
    own = IslandStatus.folder
    monkeypatch.setattr(IslandStatus, "folder", property(lambda one: "run" if one.name == "aaa" else own.fget(one)))


@pytest.mark.parametrize("gateway", [True, False])
def test_a_joiner_that_claims_the_runs_folder_does_not_keep_the_run_from_its_end(threaded, toy, claimed, monkeypatch, gateway):
    """Behind a gateway it is not believed. In a trusted network it leads, and is waited for at the end as long as for a quorum."""
    if gateway:
        monkeypatch.setattr(DirectNetwork, "accepts_folder", GatewayNetwork.accepts_folder)
    live = threaded(toy(1, "train.steps=24"), Elastic(processes=1, quorum_timeout_s=600.0 if gateway else 1.0))
    live.waits["island-0000", 3] = "aaa begins with"
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    live.finish([*first, *live.start("aaa", has_folder=False)])
    assert max(event.participating for event in live.events(Attended)) == 2
    assert len(live.events(RunFinished)) == 1
    waited = "aaa answers no more, or has not finished the run within 1 s, so island-0000 finishes it"
    assert (waited in live.logged) == (not gateway)


def test_a_run_whose_results_cannot_be_written_is_finished_when_they_can(threaded, toy, monkeypatch):
    monkeypatch.setattr(leader_log_module, "_RETRY_S", 0.0)
    live = threaded(toy(1), Elastic(processes=1))
    in_the_way, log = RunFolder(live.folder).timing, live.log
    in_the_way.mkdir()
    live.log = lambda text: (log(text), text.startswith("warning: the run is not finished") and in_the_way.rmdir())
    live.finish(live.start("island-0000"))
    assert len([text for text in live.logged if text.startswith("warning: the run is not finished")]) == 1
    assert len(live.events(RunFinished)) == 1
    assert len(live.events(Evaluated)) == 3


@pytest.mark.parametrize(("awake", "wrote"), [(True, True), (True, False), (False, False)])
def test_an_island_that_returns_after_the_end_does_not_change_the_finished_run(threaded, toy, awake, wrote):
    live = threaded(toy(1), Elastic(processes=1))
    late = live.one_island("island-0001")  # frozen since before the beginning
    if wrote:
        late._leader_log.lease = EventLogLease(RunFolder(live.folder).events, lambda: 0)
    if not awake:
        late.close(wait=False)
    threads = live.start("island-0000")
    for thread in threads:
        thread.join(60.0)
    before = RunFolder(live.folder).events.read_bytes()
    if awake:
        late._membership.join()
        with pytest.raises(RunAlreadyFinished):
            late._train()
        late.close(wait=False)
    else:
        threads += live.start("island-0001")
    live.finish(threads)
    assert RunFolder(live.folder).events.read_bytes() == before
    assert ("island-0001 has nothing to do: the run is finished" in live.logged) != awake


def test_an_island_that_recovered_takes_the_write_lease_again(threaded, toy):
    live = threaded(toy(1), Elastic(processes=1))
    island, donor = live.one_island(), live.one_island("donor")
    leader_log, log = island._leader_log, RunFolder(live.folder).events
    leader_log.lease = EventLogLease(log, lambda: 0)
    leader_log.lease.emit(Saved(round=1, name="mine"))
    other = EventLogLease(log, lambda: log.stat().st_size)  # while this island was frozen
    other.emit(Saved(round=2, name="another's"))
    donor._publish()
    donor.status.phase = IslandPhase.JOINED
    for one in (donor, island):
        one._registry.refresh()
    assert island._recovery._fetch_newest(island._engine, NO_VERSION)
    assert leader_log.lease is None, "it must look again where the log ends"
    donor.close(wait=False)
    assert [event.name for event in live.events(Saved)] == ["mine", "another's"]
    other.close()
    island.close(wait=False)


def away_and_back(live, *, gone, back):
    """The only island that has the folder leaves after round `gone`. One without the folder trains on, and the first returns in
    round `back`."""
    live.waits = {
        ("island-0000", 3): "zz-elsewhere begins with",
        ("zz-elsewhere", back): f"island-0000 begins with round {back}",
    }
    first, other = live.start("island-0000", dies_after=gone), live.start("zz-elsewhere", has_folder=False)
    for thread in first:
        thread.join(60.0)
    live.wait_until(f"committed round {back} ")
    live.finish([*live.start("island-0000"), *other])


def test_commits_of_islands_without_the_folder_are_written_by_the_next_leader(threaded, toy):
    live = threaded(toy(1, "train.steps=28", "keep.save_every=1000"), Elastic(processes=1))
    away_and_back(live, gone=5, back=9)
    rounds = [event.round for event in live.events(Attended)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert exactly_once_violations(live.events(Leased), units=14) == []
    assert len(live.events(RunFinished)) == 1


def test_commits_that_the_leader_could_not_write_are_remembered_by_the_other_islands(threaded, toy, monkeypatch):
    live, tries = threaded(toy(2, "train.steps=16", "keep.save_every=1000"), Elastic(processes=2)), []
    up_to_date = LeaderLog._up_to_date

    def full(log, engine):
        if engine.name == "island-0000" and engine.version.round in (3, 4, 5):
            tries.append(engine.version.round)
            raise CheckpointError("the disk is full")
        return up_to_date(log, engine)

    monkeypatch.setattr(LeaderLog, "_up_to_date", full)
    live.waits["joined", 8] = "island-0001 begins with"
    first, other = live.start("island-0000", dies_after=6), live.start("joined", has_folder=False)
    for thread in first:
        thread.join(60.0)
    assert tries == [3, 4, 5]
    live.finish([*live.start("island-0001"), *other])
    rounds = [event.round for event in live.events(Attended)]
    assert rounds == list(range(1, len(rounds) + 1))


def test_a_checkpoint_that_could_not_be_saved_is_logged_as_failed(threaded, toy):
    live = threaded(toy(1), Elastic(processes=1))
    (live.folder / "checkpoints").write_text("in the way")
    live.finish(live.start("island-0000"))
    assert [event.round for event in live.events(SaveFailed)] == [2, 3, 4]
    assert live.events(Saved) == []


def test_the_final_figures_are_of_the_final_weights_though_another_island_evaluated_before(threaded, toy):
    live = threaded(toy(1), Elastic(processes=1))
    live.finish(live.start("island-0000"))
    (finished,) = live.events(RunFinished)
    (live.folder / "final.safetensors").unlink()
    island = live.one_island()
    island._recovery.initialize(island._engine)
    island._engine.accounting.totals.metrics = {"loss": -1.0}  # of weights that have changed since
    island._leader_log.finish(island._engine, None, 60.0)
    assert [event.val_loss for event in live.events(RunFinished)] == [finished.val_loss]
    island.close(wait=False)


@pytest.mark.parametrize(("theirs", "written"), [(1, [1, 2, 3]), (4, [4])])
def test_the_write_lease_is_taken_back_from_an_island_that_is_behind_and_not_from_one_ahead(threaded, toy, theirs, written):
    live = threaded(toy(1), Elastic(processes=1))
    island = live.one_island()
    leader_log, engine, log = island._leader_log, island._engine, RunFolder(live.folder).events
    for number in (1, 2, 3):
        engine.version = StateVersion(number, number)
        island._commit_log.append(CommitRecord(engine.version, False, [attended(number)]), NO_VERSION)
        if number < 3:
            leader_log._up_to_date(engine)
    other = EventLogLease(log, lambda: 0)
    other.emit(attended(theirs))
    with nullcontext() if theirs < 3 else pytest.raises(LeaseLost):
        leader_log._up_to_date(engine)
    leader_log.release()
    assert [event.round for event in live.events(Attended)] == written
    other.close()
    island.close(wait=False)


def test_with_a_diverged_first_island_every_commit_is_written_evaluated_and_saved_in_time(threaded, toy, diverging):
    diverging("island-0000")
    live = threaded(toy(3, "train.steps=12"), Elastic(processes=3))
    live.finish(live.start(*map(island_name, range(3))))
    steps = [0, *(event.steps for event in live.events(RoundFinished))]
    assert [event.round for event in live.events(RoundFinished)] == list(range(1, len(steps)))
    passed = [number for number in range(1, len(steps)) if steps[number] // 4 > steps[number - 1] // 4]
    assert [event.round for event in live.events(Saved)] == passed
    assert [event.round for event in live.events(Evaluated)] == [0, *passed]


def test_an_evaluation_that_was_due_without_a_leader_is_made_by_the_next_leader(threaded, toy):
    live = threaded(toy(1, "train.steps=28", "keep.evaluate_every=10"), Elastic(processes=1))
    away_and_back(live, gone=4, back=6)
    again = next(event.round for event in live.events(IslandJoined) if event.island == 0 and event.round)
    assert again in [event.round for event in live.events(Evaluated)], "the tenth step was passed before"


def test_a_state_is_published_before_the_leader_evaluates_it(threaded, toy, monkeypatch):
    live, seen = threaded(toy(1), Elastic(processes=1)), []
    evaluate = LeaderLog._evaluate

    def evaluated(log, engine, lease):
        seen.append(engine._status.exchanging)
        evaluate(log, engine, lease)

    monkeypatch.setattr(LeaderLog, "_evaluate", evaluated)
    live.finish(live.start("island-0000"))
    assert seen == [False] * 3
