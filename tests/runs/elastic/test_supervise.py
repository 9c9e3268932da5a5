"""Processes that are kept going, and a log that is followed."""

import os
import signal
import sys

import pytest

from atoll.events import RunStarted, Saved
from atoll.runs.elastic.supervise import Child, IslandFailed, Tail, island_name
from atoll.testing.simulate import Recorder


def child(tmp_path, code):
    return Child("island-0000", [sys.executable, "-c", code], tmp_path / "logs" / "island.log")


def ended(one):
    one.process.wait(30.0)
    return one


def test_names_sort_as_numbers_do():
    assert sorted(island_name(number) for number in range(12)) == [island_name(number) for number in range(12)]


def test_a_child_that_was_killed_is_started_again(tmp_path):
    one = child(tmp_path, "import sys; sys.stdin.read()")
    one.start()
    os.kill(one.process.pid, signal.SIGKILL)
    ended(one).died()
    assert (one.started, one.code) == (2, None)
    one.let_go()  # it reads the end of its input
    assert ended(one).code == 0


def test_a_child_that_refuses_to_start_ends_the_run_with_its_words(tmp_path):
    one = child(tmp_path, "import sys; print('error: no such text.'); sys.exit(2)")
    one.start()
    with pytest.raises(IslandFailed, match=r"island-0000 cannot be kept going: no such text\."):
        ended(one).died()
    one.let_go()


def test_a_child_that_dies_at_once_again_and_again_is_given_up(tmp_path):
    one = child(tmp_path, "raise SystemExit(1)")
    one.start()
    for _ in range(4):
        ended(one).died()
    with pytest.raises(IslandFailed, match=r"see .*island\.log"):
        ended(one).died()
    assert 3 <= one.started <= 10
    one.let_go()


EVENTS = [Saved(round=n, name=f"{n:08}") for n in range(4)]


def lines(*events):
    return "".join(event.to_json() + "\n" for event in events)


def test_a_tail_passes_on_what_is_new_and_whole(tmp_path):
    log, seen = tmp_path / "events.jsonl", Recorder()
    log.write_text(lines(EVENTS[0]))
    tail = Tail(tmp_path, [seen])
    tail.follow()
    assert seen.events == []
    with log.open("a") as file:
        file.write(lines(EVENTS[1], EVENTS[2])[:-5])
        file.flush()
        tail.follow()
        assert seen.events == [EVENTS[1]]
        file.write(lines(EVENTS[2])[-5:])
    tail.follow()
    assert seen.events == EVENTS[1:3]


def test_a_log_that_was_cut_and_has_grown_again_is_followed_from_its_next_whole_line(tmp_path):
    log, seen = tmp_path / "events.jsonl", Recorder()
    tail = Tail(tmp_path, [seen])
    log.write_text(lines(*EVENTS[:2]))
    tail.follow()
    longer = RunStarted(recipe="a" * 200, algorithm="DiLoCo", islands=1, params=1, steps=1, seed=0)
    log.write_text(lines(longer, EVENTS[2]))
    tail.follow()
    assert seen.events == [*EVENTS[:2], EVENTS[2]]
    log.write_text(lines(EVENTS[3]))
    tail.follow()
    with log.open("a") as file:
        file.write(lines(EVENTS[3]))
    tail.follow()
    assert seen.events[-1] == EVENTS[3]
