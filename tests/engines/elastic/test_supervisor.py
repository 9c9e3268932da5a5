"""The supervisor restarts processes that die, and passes on the events of the log."""

import errno
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.core.errors import CheckpointError, ConfigError, DataError
from atoll.core.events import RunFinished, RunStarted, Saved
from atoll.core.flat_tree import Tree
from atoll.core.serialization import save_tree
from atoll.engines.elastic import launch, rendezvous_health, supervisor as supervisor_module
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.rendezvous_health import RendezvousHealth
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.spec import Elastic, JoinInfo, island_name
from atoll.engines.elastic.supervised_process import REFUSED, STATELESS, Backoff, Child
from atoll.engines.elastic.supervisor import (
    EndReports,
    IslandFailed,
    LogTail,
    ProcessHooks,
    Supervisor,
    former_processes,
)
from atoll.engines.liveness import last_error, last_lines
from atoll.engines.network_interfaces import free_port
from atoll.engines.rank_store import open_store
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


def again(one, **given):
    """Restarts a child that ends, without its delay, unless it is given up."""
    ended(one).plan_restart(**given)
    if not one.given_up:
        one.start()
    return one


def test_names_sort_as_numbers_do():
    assert sorted(island_name(number) for number in range(12)) == [island_name(number) for number in range(12)]


def test_a_child_that_was_killed_is_restarted(tmp_path):
    one = child(tmp_path, "import sys; sys.stdin.read()")
    one.start()
    os.kill(one.process.pid, signal.SIGKILL)
    ended(one).plan_restart(alone=True)
    assert one.restart_s <= time.monotonic(), "at once, the first time"
    again(one, alone=True)
    assert (one.starts, one.exit_code) == (2, None)
    one.release()  # it reads the end of its input
    assert ended(one).exit_code == 0


def test_a_child_writes_no_log_through_a_link(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "island.log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        child(tmp_path, "print(1)").start()
    assert not (tmp_path / "other").exists()


def test_a_folder_in_the_place_of_a_childs_log_has_no_lines_and_ends_no_supervisor(tmp_path):
    one = child(tmp_path, "raise SystemExit(1)")
    one.log.mkdir(parents=True)
    assert one.new_warnings() == []
    assert last_error(one.log) == last_lines(one.log) == ""


def test_a_child_that_refuses_to_start_is_given_up_with_its_error(tmp_path):
    one = child(tmp_path, "import sys; print('error: no such text.'); sys.exit(2)")
    one.start()
    again(one, alone=False)
    assert (one.given_up, one.starts) == ("no such text", 1)
    one.release()


def test_a_child_that_finds_no_state_is_restarted_while_another_island_may_have_it(tmp_path):
    one = child(tmp_path, "raise SystemExit(4)")
    one.start()
    for _ in range(6):
        again(one, alone=False)
    assert (one.given_up, one.starts) == ("", 7)
    again(one, alone=True)
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
    with pytest.raises(SystemExit) as left:
        launch.run_island("127.0.0.1:1", "island-0000", None)
    assert left.value.code == code


def test_a_child_that_dies_repeatedly_right_after_its_start_is_given_up(tmp_path):
    one = child(tmp_path, "raise SystemExit(1)")
    one.start()
    for _ in range(4):
        again(one, alone=True)
    assert not one.given_up
    again(one, alone=True)
    assert re.match(r"see .*island\.log", one.given_up)
    one.release()


def test_an_error_from_before_the_last_start_is_no_reason_to_give_a_child_up(tmp_path):
    one = child(tmp_path, "print('12:00:00 island-0000 on box (127.0.0.1), process 7, 1 thread(s)'); raise SystemExit(2)")
    one.log.parent.mkdir()
    one.log.write_text("error: of another time.\n")
    one.start()
    again(one, alone=True)
    assert one.given_up.startswith("see ")
    one.release()


def test_a_child_is_not_given_up_while_the_disk_is_full(tmp_path):
    one = child(tmp_path, "raise SystemExit(2)")
    one.start()
    for _ in range(6):
        again(one, alone=True, disk_full=True)
    assert (one.given_up, one.starts) == ("", 7)
    ended(one).release()


@pytest.mark.parametrize(
    ("code", "lived_s", "delays_s"),
    [
        (1, 30.0, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (1, 100.0, [0.0] * 8),  # a long life ends the row
        (3, 30.0, [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]),  # an eviction, after which the others wait for it again
        (3, 100.0, [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]),
        (3, 700.0, [5.0] * 8),
    ],
)
def test_restarts_back_off_and_start_anew_after_a_long_life(tmp_path, code, lived_s, delays_s):
    one = child(tmp_path, f"raise SystemExit({code})")
    one.start()
    ended(one).release()
    for longest_s in delays_s:
        now_s = time.monotonic()
        one.started_s = now_s - lived_s
        one.plan_restart(alone=True)
        assert longest_s / 2 <= one.restart_s - now_s <= longest_s + (time.monotonic() - now_s)


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


def until(condition):
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def running(supervisor):
    """A thread that supervises, and ends when the islands do."""
    thread = threading.Thread(target=supervisor.run, daemon=True)
    thread.start()
    return thread


WAITS = "import os, time\nwhile not os.path.exists({marker!r}): time.sleep(0.01)"
FAILS_ONCE = """
import os, sys, time
if not os.path.exists({seen!r}):
    open({seen!r}, "w").close()
    print({says!r}, flush=True)
    {ends}
"""


@pytest.mark.parametrize(
    ("says", "ends", "shown"),
    [
        ("error: my card is broken.", "sys.exit(1)", "(exit code 1) and is restarted: my card is broken"),
        ("one\\n\\ntwo\\nthree\\nfour", "sys.exit(7)", "(exit code 7) and is restarted: two | three | four"),
        ("nothing of interest", "os.abort()", "(by SIGABRT) and is restarted"),
    ],
)
def test_the_supervisor_prints_why_a_process_died(tmp_path, says, ends, shown):
    says = says.replace("\\n", "\n")
    supervisor, logged = supervised(tmp_path, FAILS_ONCE.format(seen=str(tmp_path / "seen"), says=says, ends=ends))
    supervisor.run()
    assert logged == [f"island-0000 has died {shown}"]
    kept = (tmp_path / "logs" / "supervisor.log").read_text()
    assert datetime.fromisoformat(kept.partition(" ")[0]).utcoffset() is not None
    assert kept.partition(" ")[2] == f"island-0000 has died {shown}\n"


def test_a_warning_of_an_island_is_shown_once_and_not_that_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_LOOK_S", 0.0)
    marker = tmp_path / "done"
    says = "print('2026-01-01T00:00:00 warning: round', {}, 'is not in the event log yet', flush=True)"
    program = "\n".join(["import time", *(says.format(number) for number in (4, 5)), WAITS.format(marker=str(marker))])
    supervisor, logged = supervised(tmp_path, program)
    supervisor.islands[0].log.write_text("2026-01-01T00:00:00 warning: of long ago\n")
    thread = running(supervisor)
    until(lambda: logged)
    until(lambda: supervisor.islands[0].read_bytes == supervisor.islands[0].log.stat().st_size)
    marker.touch()
    thread.join(30.0)
    assert logged == ["island-0000: round 4 is not in the event log yet"]


def test_logs_that_cannot_be_read_do_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_LOOK_S", 0.0)

    def unreadable(self):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Child, "new_warnings", unreadable)
    marker = tmp_path / "done"
    supervisor, logged = supervised(tmp_path, WAITS.format(marker=str(marker)))
    supervisor._tail._path.unlink()
    supervisor._tail._path.mkdir()
    thread = running(supervisor)
    until(lambda: len(logged) >= 3)
    supervisor._tail._path.rmdir()
    supervisor._tail._path.write_text(lines(STARTED, FINISHED))
    marker.touch()
    thread.join(30.0)
    assert supervisor.islands[0].exit_code == 0
    assert sorted(logged) == [
        *(f"{name}: its log cannot be read ([Errno 5] Input/output error)" for name in ("island-0000", "lighthouse")),
        f"the events of {tmp_path} cannot be shown ([Errno 21] Is a directory: '{tmp_path}/events.jsonl'); the run goes on",
    ]


def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path):
    """Its events and its messages cannot be shown."""

    def gone(shown):
        raise OSError(errno.EIO, "Input/output error")

    supervisor, _ = supervised(tmp_path, FAILS_ONCE.format(seen=str(tmp_path / "seen"), says="", ends="sys.exit(1)"))
    islands, rendezvous = supervisor.islands, supervisor.rendezvous
    supervisor = supervisor_of(tmp_path, gone)
    supervisor.islands, supervisor.rendezvous, supervisor._tail._sink, supervisor._tail._at = (
        islands,
        rendezvous,
        SimpleNamespace(emit=gone),
        0,
    )
    supervisor.run()
    assert islands[0].starts == 2


SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)
    def log_message(self, *given):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_rendezvous_that_is_stopped_is_replaced_on_its_ports(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_health, "_PROBE_S", 0.1)
    monkeypatch.setattr(supervisor_module, "RendezvousHealth", partial(RendezvousHealth, limit_s=0.5))
    marker = tmp_path / "done"
    supervisor, logged = supervised(tmp_path, WAITS.format(marker=str(marker)))
    registry = open_store(HOST, int(supervisor.address.rpartition(":")[2]))
    port = supervisor._lighthouse.rpartition(":")[2]
    supervisor.rendezvous = one = Child("lighthouse", [sys.executable, "-c", SERVER, port], tmp_path / "lighthouse.log")
    thread = running(supervisor)
    until(lambda: one.starts == 1 and supervisor.health._answered)
    first = one.process.pid
    os.kill(first, signal.SIGSTOP)
    until(lambda: one.starts == 2 and supervisor.health._answered)
    assert one.process.pid != first
    assert not supervisor.health.hangs
    marker.touch()
    thread.join(30.0)
    assert logged == ["lighthouse does not answer, and is replaced", "lighthouse has died (by SIGKILL) and is restarted"], registry


@pytest.mark.slow
def test_a_stopped_lighthouse_of_torchft_is_replaced(tmp_path):
    pytest.importorskip("torchft")
    marker = tmp_path / "done"
    supervisor, logged = supervised(tmp_path, WAITS.format(marker=str(marker)))
    info = tmp_path / "join_info.json"
    command = [sys.executable, "-m", "atoll", "rendezvous", str(info), supervisor.address]
    supervisor.rendezvous = one = Child("lighthouse", command, tmp_path / "lighthouse.log")
    thread = running(supervisor)
    until(lambda: one.starts == 1 and supervisor.health._answered)
    os.kill(one.process.pid, signal.SIGSTOP)
    until(lambda: one.starts == 2)
    until(lambda: supervisor.health._answered)
    assert RegistryClient(supervisor.address).join_info() == info.read_text()
    marker.touch()
    thread.join(30.0)
    assert logged[0] == "lighthouse does not answer, and is replaced"


def test_a_rendezvous_that_never_answered_is_not_taken_for_hung_and_its_successor_is():
    health = RendezvousHealth(f"{HOST}:{free_port(HOST)}", f"{HOST}:1", start_s=0.0)
    assert not health.hangs
    health._probe()
    assert not health.hangs
    health._reachable = True
    assert health.hangs
    health.close()


NEEDS_ROOM = """
import sys, traceback
try:
    with open({path!r}, "wb", buffering=0) as file:
        file.write(bytes(8192))
except OSError as error:
    sys.exit(1)
"""


def test_on_a_full_disk_no_island_is_given_up_and_the_run_finishes_when_there_is_room(small_disk, monkeypatch):
    monkeypatch.setattr(supervisor_module, "BACKOFF", Backoff(0.0, 0.05, 0.1, 60.0))
    supervisor, logged = supervised(small_disk.path, NEEDS_ROOM.format(path=str(small_disk.path / "result")))
    small_disk.fill()
    thread = running(supervisor)
    until(lambda: supervisor.islands[0].starts > 6)
    small_disk.free()
    thread.join(30.0)
    assert supervisor.islands[0].exit_code == 0
    where = re.escape(str(small_disk.path))
    full = f"the disk of {where} is full \\(0 B free, No space left on device\\): no checkpoint.*Free space there"
    assert any(re.match(full, text) for text in logged), logged
    assert any(re.match(f"island-0000 has died \\(exit code 1\\) and is restarted.*: {full}", text) for text in logged), logged


@pytest.mark.parametrize(
    ("codes", "registered", "says"),
    [
        ((1, 5), ["", "it saved round 7 in /elsewhere."], "is not finished: it saved round 7 in /elsewhere."),
        ((5, 5), ["it saved round 9 in /one.", "it saved round 8 in /two."], "is not finished: it saved round 9 in /one."),
        ((1, 5), ["", ""], "is not finished: the run's folder cannot be written, and the state is saved in /chosen*"),
        ((1, 1), ["", ""], "cannot be written (No such file or directory), and no island is left. Make it writable again, then"),
    ],
)
def test_the_end_of_a_run_whose_folder_is_lost_says_where_the_state_is(tmp_path, monkeypatch, codes, registered, says):
    monkeypatch.setattr(supervisor_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(supervisor_module, "BACKOFF", Backoff(0.0, 0.05, 0.1, 60.0))
    folder, marker = tmp_path / "run", tmp_path / "lost"
    waits = WAITS.format(marker=str(marker))
    supervisor, logged = supervised(folder, *(f"{waits}\nraise SystemExit({code})" for code in codes))
    supervisor._rescue_dir = "/chosen"
    store = open_store(HOST, int(supervisor.address.rpartition(":")[2]))
    for one, text in zip(supervisor.islands, registered, strict=True):
        status = IslandStatus(one.name, True)
        status.waiting = text
        RegistryClient(supervisor.address).register(status)
    for one in supervisor._children:
        one.log = folder / "logs" / one.log.name

    def lose_the_folder():
        until(lambda: all(one.starts for one in supervisor.islands))
        shutil.rmtree(folder)
        until(lambda: logged)
        marker.touch()

    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(lose_the_folder)
        with pytest.raises(IslandFailed) as ended:
            supervisor.run()
        losing.result()
    assert says in str(ended.value), store
    assert str(folder) in str(ended.value)
    lost = f"{folder} cannot be written: No such file or directory. Make it writable again"
    assert any(text.startswith(f"{lost}; the run goes on") for text in logged)
    for one, text in zip(supervisor.islands, registered, strict=True):
        assert logged.count(f"{one.name}: {text}") == bool(text)
    assert not folder.exists(), "it was not made anew"


def test_a_run_that_is_finished_ends_well_though_an_island_has_saved_the_state_elsewhere(tmp_path):
    supervisor, logged = supervised(tmp_path, "print('error: it saved round 7 in /elsewhere.'); raise SystemExit(5)")
    supervisor.run()
    assert logged == ["island-0000: it saved round 7 in /elsewhere"], "as its log says"


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


def test_each_end_is_reported_once_to_each_registry_and_kept_for_the_next_supervisor(tmp_path, monkeypatch):
    """The registry cuts old reports, which must not come back."""
    monkeypatch.setattr(supervisor_module, "Heartbeat", lambda *_, **__: SimpleNamespace(close=lambda wait: None))
    monkeypatch.setattr(supervisor_module, "ENDS_KEPT", 8)
    store, port = open_store(HOST)
    island = Child("island-0000", [], tmp_path / "log", is_island=True)
    island.processes += [f"a#{number}" for number in range(10)]
    ends = EndReports(tmp_path, f"{HOST}:{port}", [island], bool)
    registry = RegistryClient(f"{HOST}:{port}")
    ends._report()
    assert registry.ended() == [f"a#{number}" for number in range(6, 9)], "the last one runs"
    store.set("ended", "")
    ends._report()
    assert registry.ended() == []
    island.processes.append("a#10")
    ends._report()
    assert registry.ended() == ["a#9"]
    assert former_processes(tmp_path) == ["a#7", "a#8", "a#9", "a#10"]
    for key in ("ended", f"known to {ends._id}"):  # as of a registry that was restarted
        store.delete_key(key)
    ends._report()
    assert registry.ended() == ["a#7", "a#8", "a#9"]
    ends.close()


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


@pytest.mark.parametrize("name", ["events.jsonl", "events.lease", "finish.lock", "quorum.json", "processes.json"])
def test_a_folder_in_the_place_of_a_file_that_islands_write_is_refused_before_any_starts(tmp_path, name):
    """Islands would else die and restart, or try to write it for ever."""
    (tmp_path / name).mkdir()
    spec = Elastic(processes=1)
    task = RunTask(run=spec.fitted(recipes.ALL["toy-sync"]()), spec=spec, folder=RunFolder(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"{name} is a folder, and an elastic run writes a file of this name\. Remove the folder"
    ):
        launch.supervise(task)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_lighthouse_keeps_its_address(tmp_path):
    first, second = (
        supervisor_of(tmp_path) and JoinInfo.from_text((tmp_path / "join_info.json").read_text()).lighthouse for _ in range(2)
    )
    assert first == second
