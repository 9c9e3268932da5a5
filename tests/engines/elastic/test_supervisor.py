"""The supervisor restarts processes that die, and passes on the events of the log."""

import os
import re
import signal
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.core.errors import CheckpointError, ConfigError, DataError
from atoll.core.events import RunFinished, RunStarted, Saved
from atoll.core.flat_tree import Tree
from atoll.core.serialization import save_tree
from atoll.engines.elastic import launch
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.elastic.supervisor import REFUSED, STATELESS, Child, IslandFailed, LogTail, ProcessHooks, Supervisor, island_name
from atoll.engines.run_lifecycle import RunTask
from atoll.engines.spec import read_spec
from atoll.runs.folder import RunFolder
from atoll.testing.simulated_runs import Recorder

HOST = "127.0.0.1"


def child(tmp_path, code):
    return Child("island-0000", [sys.executable, "-c", code], tmp_path / "logs" / "island.log")


def ended(one):
    one.process.wait(30.0)
    return one


def test_names_sort_as_numbers_do():
    assert sorted(island_name(number) for number in range(12)) == [island_name(number) for number in range(12)]


def test_a_child_that_was_killed_is_restarted(tmp_path):
    one = child(tmp_path, "import sys; sys.stdin.read()")
    one.start()
    os.kill(one.process.pid, signal.SIGKILL)
    ended(one).restart(alone=True)
    assert (one.starts, one.exit_code) == (2, None)
    one.release()  # it reads the end of its input
    assert ended(one).exit_code == 0


def test_a_child_that_refuses_to_start_is_given_up_with_its_error(tmp_path):
    one = child(tmp_path, "import sys; print('error: no such text.'); sys.exit(2)")
    one.start()
    ended(one).restart(alone=False)
    assert (one.given_up, one.starts) == ("no such text", 1)
    one.release()


def test_a_child_that_finds_no_state_is_restarted_while_another_island_may_have_it(tmp_path):
    one = child(tmp_path, "raise SystemExit(4)")
    one.start()
    for _ in range(6):
        ended(one).restart(alone=False)
    assert (one.given_up, one.starts) == ("", 7)
    ended(one).restart(alone=True)
    assert one.given_up
    one.release()


@pytest.mark.parametrize(
    ("error", "code"), [(NoState, STATELESS), (CheckpointError, 1), (ConfigError, REFUSED), (DataError, REFUSED)]
)
def test_an_island_that_cannot_read_a_checkpoint_has_not_refused_to_start(monkeypatch, error, code):
    def fail(*given, **named):
        raise error("no")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(launch, "fetch_join_info", fail)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RUST_LOG", "warn")
    with pytest.raises(SystemExit) as left:
        launch.run_island("127.0.0.1:1", "island-0000", None)
    assert left.value.code == code


def test_a_child_that_dies_repeatedly_right_after_its_start_is_given_up(tmp_path):
    one = child(tmp_path, "raise SystemExit(1)")
    one.start()
    for _ in range(4):
        ended(one).restart(alone=True)
    assert not one.given_up
    ended(one).restart(alone=True)
    assert re.match(r"see .*island\.log", one.given_up)
    one.release()


def test_an_error_from_before_the_last_start_is_no_reason_to_give_a_child_up(tmp_path):
    one = child(tmp_path, "print('12:00:00 island-0000 on box (127.0.0.1), process 7, 1 thread(s)'); raise SystemExit(2)")
    one.log.parent.mkdir()
    one.log.write_text("error: of another time.\n")
    one.start()
    ended(one).restart(alone=True)
    assert one.given_up.startswith("see ")
    one.release()


def supervisor_of(folder, log=print):
    spec = Elastic(processes=1)
    task = RunTask(run=spec.fitted(recipes.ALL["toy-sync"]()), spec=spec, folder=RunFolder(folder), log=log)
    return Supervisor(task, Recorder(), ProcessHooks())


def supervised(tmp_path, *programs, finished=True):
    """A supervisor whose lighthouse sleeps and whose islands are these programs; and the lines that it logged."""
    logged = []
    if finished:
        folder = RunFolder.create(tmp_path, recipes.demo_diloco(), [])
        save_tree(folder.final, Tree.of({"w": torch.zeros(1)}), {})
        folder.events.write_text(lines(STARTED, FINISHED))
    supervisor = supervisor_of(tmp_path, logged.append)
    supervisor.rendezvous = Child("lighthouse", ["sleep", "600"], tmp_path / "lighthouse.log")
    supervisor.islands = [
        Child(island_name(number), [sys.executable, "-S", "-c", program], tmp_path / f"{number}.log")
        for number, program in enumerate(programs)
    ]
    return supervisor, logged


REFUSES = "print('error: my card is broken.'); raise SystemExit(2)"


def test_an_island_that_cannot_be_kept_alive_does_not_end_the_others(tmp_path):
    marker = tmp_path / "done"
    supervisor, logged = supervised(tmp_path, f"import os\nwhile not os.path.exists({str(marker)!r}): pass", REFUSES)
    supervisor._log = lambda text: (logged.append(text), marker.touch())  # the healthy one ends after the other was given up
    supervisor.run()
    assert logged == ["island-0001 cannot be kept alive, and the others go on without it: my card is broken"]
    assert [one.exit_code for one in supervisor.islands] == [0, 2]


def test_islands_that_all_ended_without_an_error_have_not_finished_the_run_unless_it_is_finished(tmp_path):
    supervisor, _ = supervised(tmp_path, "pass", finished=False)
    with pytest.raises(IslandFailed, match=r"the run is not finished\. See .*--resume"):
        supervisor.run()


def test_a_run_of_which_no_island_can_be_kept_alive_ends_with_the_last_error(tmp_path):
    supervisor, _ = supervised(tmp_path, REFUSES, REFUSES)
    with pytest.raises(IslandFailed, match=r"cannot be kept alive: my card is broken\."):
        supervisor.run()
    assert supervisor.rendezvous.exit_code is not None


def test_islands_that_all_find_no_state_do_not_wait_for_each_other(tmp_path):
    supervisor, logged = supervised(tmp_path, "raise SystemExit(4)", "raise SystemExit(4)")
    with pytest.raises(IslandFailed):
        supervisor.run()
    assert sum(one.starts for one in supervisor.islands) <= 4, logged


STARTED = RunStarted(recipe="r", algorithm="DiLoCo", islands=1, params=1, steps=1, seed=0)
FINISHED = RunFinished(
    rounds=1,
    outer_steps=1,
    steps=1,
    tokens=1,
    warm_start_tokens=0,
    local_updates=1,
    virtual_time_s=None,
    wall_time_s=1.0,
    utilisation=1.0,
    sent_bytes_per_island=0.0,
    control_bytes_per_island=0.0,
    val_loss=1.0,
    digest="0",
)
EVENTS = [Saved(round=n, name=f"{n:08}") for n in range(4)]


def lines(*events):
    return "".join(event.to_json() + "\n" for event in events)


def test_a_tail_passes_on_what_is_new_and_whole(tmp_path):
    log, seen = tmp_path / "events.jsonl", Recorder()
    log.write_text(lines(EVENTS[0]))
    tail = LogTail(tmp_path, seen)
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
    tail = LogTail(tmp_path, seen)
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


def test_a_run_keeps_its_port_while_it_is_free(tmp_path, monkeypatch):
    """Joiners find a resumed run at its old address, unless another process has it now. A port that the user chose must be free."""
    seen = []

    def supervisor(task, *_):
        seen.append(task.spec.port)
        (tmp_path / "join_info.json").write_text(JoinInfo(task.run, task.spec, f"{HOST}:1").to_text())
        return SimpleNamespace(address="", run=bool)

    monkeypatch.setattr(launch, "Supervisor", supervisor)
    monkeypatch.setattr(launch, "_PORT_LIMIT_S", 0.1)
    spec = Elastic(processes=1)
    task = RunTask(run=spec.fitted(recipes.ALL["toy-sync"]()), spec=spec, folder=RunFolder(tmp_path))
    task = replace(task, run=replace(task.run, train=replace(task.run.train, warm_start_steps=0)))
    for _ in range(2):
        launch.supervise(task)
    assert seen[0] == seen[1] != 0
    assert read_spec(tmp_path) == spec, "as the user gave it"
    with socket.create_server((HOST, seen[0])):
        launch.supervise(task)
        assert seen[2] != seen[0]
        with pytest.raises(ConfigError, match="this machine cannot listen there"):
            launch.supervise(replace(task, spec=replace(spec, listen=f"{HOST}:{seen[0]}")))


def test_a_lighthouse_keeps_its_address(tmp_path):
    first, second = (
        supervisor_of(tmp_path) and JoinInfo.from_text((tmp_path / "join_info.json").read_text()).lighthouse for _ in range(2)
    )
    assert first == second
