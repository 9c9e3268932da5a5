"""The log reads back as written, survives a truncated tail, and every error says what to do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from atoll.core.errors import CheckpointError
from atoll.core.events import Evaluated, IslandLeft, Progress, RunStarted, Saved
from atoll.telemetry.event_log import JsonlSink, log_damage, read_events


def saved(number: int) -> Saved:
    return Saved(round=number, name=f"round-{number}")


EVENTS = [saved(1), saved(2), saved(3)]


def write(path: Path, *numbers: int) -> int:
    with JsonlSink(path) as sink:
        for number in numbers:
            sink.emit(saved(number))
        return sink.position()


def test_a_log_reads_back_as_the_events_that_were_written(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    assert list(read_events(folder / "events.jsonl")) == list(script().events())


def test_the_same_events_give_the_same_bytes(tmp_path, script) -> None:
    one, two = script().write(tmp_path / "one"), script().write(tmp_path / "two")
    assert (one / "events.jsonl").read_bytes() == (two / "events.jsonl").read_bytes()


def test_progress_is_not_recorded(tmp_path) -> None:
    with JsonlSink(tmp_path / "log") as sink:
        sink.emit(Progress(phase="train", done=1, total=2))
        assert sink.position() == 0


def test_picking_kinds_gives_the_same_events_as_filtering(tmp_path, script) -> None:
    log = script().write(tmp_path / "run") / "events.jsonl"
    assert list(read_events(log, kinds=[Evaluated])) == [event for event in read_events(log) if isinstance(event, Evaluated)]


def test_a_loss_that_is_not_finite_survives_the_log(tmp_path) -> None:
    with JsonlSink(tmp_path / "log") as sink:
        sink.emit(IslandLeft(island=0, round=1, virtual_time_s=math.inf))
        sink.emit(IslandLeft(island=0, round=1, virtual_time_s=math.nan))
    infinite, missing = read_events(tmp_path / "log")
    assert infinite.virtual_time_s == math.inf
    assert math.isnan(missing.virtual_time_s)


def test_each_event_is_on_disk_before_the_sink_is_closed(tmp_path) -> None:
    with JsonlSink(tmp_path / "log") as sink:
        sink.emit(saved(1))
        assert list(read_events(tmp_path / "log")) == [saved(1)]


def test_position_is_the_length_of_the_file(tmp_path) -> None:
    position = write(tmp_path / "log", 1, 2, 3)
    assert position == (tmp_path / "log").stat().st_size


def test_a_log_cut_at_a_position_and_continued_equals_one_that_never_stopped(tmp_path) -> None:
    write(tmp_path / "whole", 1, 2, 3)
    position = write(tmp_path / "log", 1)
    with JsonlSink(tmp_path / "log", append_at=position) as sink:
        sink.emit(saved(9))  # a resume without a new round
    with JsonlSink(tmp_path / "log", append_at=position) as sink:
        assert sink.position() == position
        sink.emit(saved(2))
        sink.emit(saved(3))
    assert (tmp_path / "log").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_log_can_be_begun_again_at_zero(tmp_path) -> None:
    write(tmp_path / "log", 1, 2)
    with JsonlSink(tmp_path / "log", append_at=0) as sink:
        sink.emit(saved(7))
    assert list(read_events(tmp_path / "log")) == [saved(7)]


def test_a_log_shorter_than_the_checkpoint_knew_is_refused_and_left_alone(tmp_path) -> None:
    position = write(tmp_path / "log", 1)
    with pytest.raises(CheckpointError, match=f"has {position} bytes.*it had {position + 1} when.*earlier checkpoint"):
        JsonlSink(tmp_path / "log", append_at=position + 1)
    assert (tmp_path / "log").stat().st_size == position


def test_a_negative_position_is_refused(tmp_path) -> None:
    write(tmp_path / "log", 1)
    with pytest.raises(CheckpointError, match=r"append_at=-1.*position\(\)"):
        JsonlSink(tmp_path / "log", append_at=-1)


def test_a_log_from_the_start_replaces_what_a_killed_run_left(tmp_path) -> None:
    write(tmp_path / "log", 1, 2, 3)
    write(tmp_path / "log", 4)
    assert list(read_events(tmp_path / "log")) == [saved(4)]


def test_a_missing_log_cannot_be_continued(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot open .*log"):
        JsonlSink(tmp_path / "log", append_at=0)


@pytest.mark.parametrize("kept", [1, 20, 37])
def test_a_last_line_cut_short_is_left_out(tmp_path, kept: int) -> None:
    position = write(tmp_path / "log", 1, 2)
    write(tmp_path / "three", 3)
    last = (tmp_path / "three").read_bytes()
    with (tmp_path / "log").open("ab") as file:
        file.write(last[:kept])
    assert kept < len(last) - 1
    assert list(read_events(tmp_path / "log")) == [saved(1), saved(2)]
    assert (tmp_path / "log").stat().st_size == position + kept


def test_a_last_line_that_lacks_only_its_end_is_read(tmp_path) -> None:
    write(tmp_path / "log", 1, 2)
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes()[:-1])
    assert list(read_events(tmp_path / "log")) == [saved(1), saved(2)]


@pytest.mark.parametrize("line", ['{"event": "Saved", "rou', '{"event": "Nonsense"}', '{"event": "Saved"}', "[]", "3", "", "\xff"])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line: str) -> None:
    good = saved(1).to_json()
    (tmp_path / "log").write_text(f"{good}\n{line}\n{good}\n", encoding="latin-1")
    events = read_events(tmp_path / "log")
    assert next(events) == saved(1)
    with pytest.raises(CheckpointError, match=r"log:2 is not an event"):
        next(events)


def test_a_missing_log_error_says_what_a_run_folder_holds(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*events\.jsonl.*run\.json"):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_full_disk_error_says_to_free_space_and_how_to_resume() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot write /dev/full: No space left.*Free some space.*--resume /dev"):
        sink.emit(saved(1))
    with pytest.raises(CheckpointError, match="No space left"):
        sink.close()
    sink.close()


def test_a_folder_in_the_way_is_an_error_with_its_path(tmp_path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot open .*log"):
        JsonlSink(tmp_path / "log")


def test_a_log_that_changed_before_its_checkpoint_is_refused_and_what_follows_may_have(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlSink(path, digested=True) as sink:
        sink.emit(EVENTS[0])
        sink.emit(EVENTS[1])
        record = sink.position_record()
        sink.emit(EVENTS[2])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + b"xxxxx")
    with JsonlSink.at_record(path, record) as sink:
        sink.emit(EVENTS[2])
        again = sink.position_record()
    assert path.read_bytes() == whole
    with JsonlSink.at_record(path, again):
        pass
    for damaged in (whole[: len(whole) // 4], b"", bytes(len(whole)), whole.replace(b"e", b"f", 1)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"Restore it, or resume from an earlier checkpoint"):
            JsonlSink.at_record(path, record)
        assert path.read_bytes() == damaged, "nothing is cut off"


def test_a_log_that_is_a_link_is_not_written(tmp_path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "other")
    for append_at in (None, 0):
        with pytest.raises(CheckpointError, match=r"cannot open .*symbolic link"):
            JsonlSink(tmp_path / "events.jsonl", append_at=append_at)
    assert (tmp_path / "other").read_text() == "precious"


def test_damage_to_a_log_is_described(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlSink(path) as sink:
        sink.emit(RunStarted(recipe="demo", algorithm="DDP", islands=2, params=10, steps=4, seed=0))
        for event in EVENTS:
            sink.emit(event)
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for damaged, found in [
        (whole, None),
        (whole[:-3], None),
        (b"", "is empty"),
        (whole[begin:], "has lost its beginning"),
        (bytes(len(whole)), "has lost its beginning"),
        (whole[:begin] + bytes(20) + whole[begin + 20 :], "is damaged in line 2"),
        (whole[: begin - 2] + whole[begin - 1 :], "is damaged in line 1"),
    ]:
        path.write_bytes(damaged)
        assert log_damage(path) == (None if found is None else f"{path} {found}")
    path.unlink()
    assert log_damage(path) == f"{path} is missing"
