"""Who writes the log of islands that come and go, judges and saves what they hold, and finishes the run, whoever dies over it."""

from collections import Counter

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
from atoll.engines.elastic import shutdown
from atoll.engines.elastic.commit_log import Minute
from atoll.engines.elastic.event_log_lease import TakenLog
from atoll.engines.elastic.leader_log import Desk, Finished
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.elastic.supervisor import island_name
from atoll.runs.folder import RunFolder
from atoll.testing.chaos import exactly_once_violations


def attended(number):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=number, virtual_time_s=None, wall_time_s=1.0, **who)


def test_when_the_one_who_writes_dies_the_next_goes_on_where_the_log_ends(shore_of, toy):
    shore = shore_of(toy(2, "train.steps=16"), Elastic(processes=2))
    first, second = shore.start("island-0000", until=3), shore.start("island-0001")
    for thread in first:
        thread.join(60.0)
    shore.finish(second)
    assert "island-0001 writes the log from round 4 on" in shore.said
    assert [event.round for event in shore.events(RoundFinished)] == list(range(1, len(shore.events(RoundFinished)) + 1))
    assert [event.islands for event in shore.events(RoundFinished)][:4] == [2, 2, 2, 1]
    (finished,) = shore.events(RunFinished)
    assert finished.local_updates == 32
    units = Counter(tuple(unit[1:]) for event in shore.events(Leased) for unit in event.delivered)
    assert len(units) == 16
    assert set(units.values()) == {1}


def test_when_the_one_who_writes_dies_after_the_last_commit_another_finishes_the_run(shore_of, toy, monkeypatch):
    monkeypatch.setattr(shutdown, "_SILENT_S", 0.2)
    shore = shore_of(toy(2, "keep.save_every=1000"), Elastic(processes=2))
    shore.finish([*shore.start("island-0000", until=4), *shore.start("island-0001")])
    assert [event.round for event in shore.events(Attended)] == [1, 2, 3, 4]
    assert len(shore.events(RunFinished)) == 1


def test_whoever_has_the_folder_stays_until_the_one_who_writes_has_finished_the_run(shore_of, toy):
    shore = shore_of(toy(2), Elastic(processes=2))
    shore.waits["island-0000", 4] = "island-0001 stays until island-0000 has finished the run"
    shore.finish(shore.start("island-0000", "island-0001"))
    assert len([text for text in shore.said if "writes the log" in text]) == 1
    assert len(shore.events(RunFinished)) == 1


def test_when_all_who_have_the_folder_die_after_the_last_commit_one_that_joined_has_kept_the_state_for_them(
    shore_of, toy, monkeypatch
):
    monkeypatch.setattr(shutdown, "_SILENT_S", 1000.0)  # nor is it waited for as if it could write
    shore = shore_of(toy(2, "keep.save_every=1000"), Elastic(processes=2))
    first, other = shore.start("island-0000", until=4), shore.start("zz-elsewhere", home=False)
    for thread in first:
        thread.join(60.0)
    shore.finish([*shore.start("island-0000"), *other])
    assert any(text.startswith("island-0000 begins with round 4, fetched from zz-elsewhere") for text in shore.said)
    assert [event.round for event in shore.events(Attended)] == [1, 2, 3, 4]
    assert len(shore.events(RunFinished)) == 1


def test_a_run_whose_end_cannot_be_written_is_finished_when_it_can(shore_of, toy, monkeypatch):
    monkeypatch.setattr(shutdown, "_AGAIN_S", 0.0)
    shore = shore_of(toy(1), Elastic(processes=1))
    in_the_way, note = RunFolder(shore.folder).timing, shore.note
    in_the_way.mkdir()
    shore.note = lambda text: (note(text), text.startswith("not finished, and tried again") and in_the_way.rmdir())
    shore.finish(shore.start("island-0000"))
    assert len([text for text in shore.said if text.startswith("not finished")]) == 1
    assert len(shore.events(RunFinished)) == 1
    assert len(shore.events(Evaluated)) == 3


@pytest.mark.parametrize(("awake", "wrote"), [(True, True), (True, False), (False, False)])
def test_an_island_that_was_away_over_the_end_leaves_the_finished_run_as_it_is(shore_of, toy, awake, wrote):
    shore = shore_of(toy(1), Elastic(processes=1))
    late = shore.one_island("island-0001")  # frozen since before the beginning
    if wrote:
        late._desk._log = TakenLog(RunFolder(shore.folder).events, 0)
    if not awake:
        late.close(wait=False)
    threads = shore.start("island-0000")
    for thread in threads:
        thread.join(60.0)
    before = RunFolder(shore.folder).events.read_bytes()
    if awake:
        late._membership.join()
        with pytest.raises(Finished):
            late._engine.run()
        late.close(wait=False)
    else:
        threads += shore.start("island-0001")
    shore.finish(threads)
    assert RunFolder(shore.folder).events.read_bytes() == before
    assert ("island-0001 has nothing to do: the run is finished" in shore.said) != awake


def test_a_desk_that_was_brought_up_to_date_writes_behind_what_others_have_written_since(shore_of, toy):
    shore = shore_of(toy(1), Elastic(processes=1))
    island = shore.one_island()
    desk, log = island._desk, RunFolder(shore.folder).events
    desk._log = TakenLog(log, 0)
    desk._log.emit(Saved(round=1, name="mine"))
    other = TakenLog(log, log.stat().st_size)  # while this island was frozen
    other.emit(Saved(round=2, name="another's"))
    desk.brought_up_to_date(island._engine)
    assert desk._log is None, "it must look again where the log ends"
    assert [event.name for event in shore.events(Saved)] == ["mine", "another's"]
    other.close()
    island.close(wait=False)


def away_and_back(shore, *, gone, back):
    """The only island that has the folder leaves after round `gone`. One without it goes on, and sees it again in round `back`."""
    shore.waits = {
        ("island-0000", 3): "zz-elsewhere begins with",
        ("zz-elsewhere", back): f"island-0000 begins with round {back}",
    }
    first, other = shore.start("island-0000", until=gone), shore.start("zz-elsewhere", home=False)
    for thread in first:
        thread.join(60.0)
    shore.wait_until(f"committed round {back} ")
    shore.finish([*shore.start("island-0000"), *other])


def test_what_islands_without_the_folder_commit_alone_is_written_by_whoever_has_it_next(shore_of, toy):
    shore = shore_of(toy(1, "train.steps=28", "keep.save_every=1000"), Elastic(processes=1))
    away_and_back(shore, gone=5, back=9)
    rounds = [event.round for event in shore.events(Attended)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert exactly_once_violations(shore.events(Leased), units=14) == []
    assert len(shore.events(RunFinished)) == 1


def test_what_the_one_who_writes_could_not_write_is_remembered_by_the_others_until_it_can(shore_of, toy, monkeypatch):
    shore, tries = shore_of(toy(2, "train.steps=16", "keep.save_every=1000"), Elastic(processes=2)), []
    writing = Desk._writing

    def full(desk, engine):
        if engine.name == "island-0000" and engine.generation.round in (3, 4, 5):
            tries.append(engine.generation.round)
            raise CheckpointError("the disk is full")
        return writing(desk, engine)

    monkeypatch.setattr(Desk, "_writing", full)
    shore.waits["joined", 8] = "island-0001 begins with"
    first, other = shore.start("island-0000", until=6), shore.start("joined", home=False)
    for thread in first:
        thread.join(60.0)
    assert tries == [3, 4, 5]
    shore.finish([*shore.start("island-0001"), *other])
    rounds = [event.round for event in shore.events(Attended)]
    assert rounds == list(range(1, len(rounds) + 1))


def test_a_checkpoint_that_could_not_be_saved_is_not_told_of_as_saved(shore_of, toy):
    shore = shore_of(toy(1), Elastic(processes=1))
    (shore.folder / "checkpoints").write_text("in the way")
    shore.finish(shore.start("island-0000"))
    assert [event.round for event in shore.events(SaveFailed)] == [2, 3, 4]
    assert shore.events(Saved) == []


def test_the_last_figures_are_of_the_last_weights_though_another_island_judged_before(shore_of, toy):
    shore = shore_of(toy(1), Elastic(processes=1))
    shore.finish(shore.start("island-0000"))
    (finished,) = shore.events(RunFinished)
    (shore.folder / "final.safetensors").unlink()
    island = shore.one_island()
    island._sources.first(island._engine)
    island._engine.accounting.totals.metrics = {"loss": -1.0}  # of weights that have changed since
    island._desk.finish(island._engine, None)
    assert [event.val_loss for event in shore.events(RunFinished)] == [finished.val_loss]
    island.close(wait=False)


@pytest.mark.parametrize(("theirs", "told"), [(1, [1, 2, 3]), (4, [4])])
def test_a_log_that_one_who_was_behind_has_taken_is_taken_back_and_one_that_tells_more_is_not(shore_of, toy, theirs, told):
    shore = shore_of(toy(1), Elastic(processes=1))
    island = shore.one_island()
    desk, engine, log = island._desk, island._engine, RunFolder(shore.folder).events
    for number in (1, 2, 3):
        engine.generation = Generation(number, number)
        island._minutes.add(Minute(engine.generation, False, [attended(number)]), NOTHING)
        if number < 3:
            desk._writing(engine)
    other = TakenLog(log, 0)
    other.emit(attended(theirs))
    desk._writing(engine)
    desk.close()
    assert [event.round for event in shore.events(Attended)] == told
    other.close()
    island.close(wait=False)


def test_though_the_first_who_could_write_rounds_otherwise_every_commit_is_written_judged_and_saved_in_time(
    shore_of, toy, rounding
):
    rounding("island-0000")
    shore = shore_of(toy(3, "train.steps=12"), Elastic(processes=3))
    shore.finish(shore.start(*map(island_name, range(3))))
    steps = [0, *(event.steps for event in shore.events(RoundFinished))]
    assert [event.round for event in shore.events(RoundFinished)] == list(range(1, len(steps)))
    passed = [number for number in range(1, len(steps)) if steps[number] // 4 > steps[number - 1] // 4]
    assert [event.round for event in shore.events(Saved)] == passed
    assert [event.round for event in shore.events(Evaluated)] == [0, *passed]


def test_what_was_passed_while_nobody_wrote_is_judged_by_whoever_writes_next(shore_of, toy):
    shore = shore_of(toy(1, "train.steps=28", "keep.evaluate_every=10"), Elastic(processes=1))
    away_and_back(shore, gone=4, back=6)
    again = next(event.round for event in shore.events(IslandJoined) if event.island == 0 and event.round)
    assert again in [event.round for event in shore.events(Evaluated)], "the tenth step was passed before"


def test_others_find_the_state_before_the_one_who_writes_has_judged_it(shore_of, toy, monkeypatch):
    shore, seen = shore_of(toy(1), Elastic(processes=1)), []
    judge = Desk._judge

    def judged(desk, engine, log):
        seen.append(engine.standing["exchanging"])
        judge(desk, engine, log)

    monkeypatch.setattr(Desk, "_judge", judged)
    shore.finish(shore.start("island-0000"))
    assert seen == [False] * 3
