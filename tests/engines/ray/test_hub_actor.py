"""The hub process without Ray: a list is the object store, and threads are workers."""

import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import CheckpointError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Arrived, Dispatched, Evaluated, HubLoad, HubRestarted, IslandLeft, RunFinished, Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.core.serialization import save_tree
from atoll.engines.accounting import ComputeSpan
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.ray.hub_actor import HubProcess, LoadMeter, WeightPublisher
from atoll.engines.ray.hub_checkpoints import INITIAL_WEIGHTS
from atoll.engines.ray.messages import HubProcessSpec, LostRounds, UpdateMessage, tree_bytes, tree_view
from atoll.engines.ray.spec import Ray
from atoll.optim.sgd import SGD
from atoll.recipes.toy import toy_async
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Train
from atoll.telemetry.event_log import JsonlSink, read_events

WEIGHTS = Tree.of({"w": torch.ones(3)})
TIMEOUT_S = 20.0


class Store:
    """An object store."""

    def __init__(self):
        self.objects, self.putting, self.may_put = [], threading.Event(), threading.Event()
        self.may_put.set()

    def put(self, bits):
        self.putting.set()
        assert self.may_put.wait(TIMEOUT_S)
        self.objects.append(bits.copy())
        return len(self.objects) - 1

    def get(self, reference):
        return self.objects[reference]


class HubFolder:
    """The folder of a hub's run, in which checkpoints can be held up or fail, and so can the log."""

    def __init__(self, path, monkeypatch):
        self.path, self.full, self.fails, self.hubs = path, False, None, []
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()
        save_tree(path / INITIAL_WEIGHTS, WEIGHTS)
        JsonlSink(path / "events.jsonl").close()
        save, emit = Checkpoints.save, JsonlSink.emit

        def save_checkpoint(checkpoints, *given):
            self.writing.set()
            assert self.may_write.wait(TIMEOUT_S)
            if self.full:
                raise CheckpointError("the disk is full")
            return save(checkpoints, *given)

        def emit_event(sink, event):
            if self.fails is not None and isinstance(event, self.fails):
                raise OSError("no such disk")
            emit(sink, event)

        monkeypatch.setattr(Checkpoints, "save", save_checkpoint)
        monkeypatch.setattr(JsonlSink, "emit", emit_event)
        monkeypatch.setattr("atoll.engines.ray.hub_actor.lock_folder", lambda *_: None)  # hubs of a test share this process

    @property
    def events(self):
        return list(read_events(self.path / "events.jsonl"))

    @property
    def rounds(self):
        return Checkpoints(self.path / "checkpoints", keep=1).rounds()

    @property
    def lines(self):
        return (self.path / "logs" / "hub.log").read_text()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def storage(tmp_path, monkeypatch):
    folder = HubFolder(tmp_path, monkeypatch)
    yield folder
    for process in folder.hubs:
        process._outbox.log.close()


def hub(
    store,
    storage,
    *,
    updates=40,
    workers=2,
    save_every_s=1000.0,
    session="a",
    grace_s=0.0,
    evaluate_every=1000,
    lost=(0, 0),
    codec="fp32",
):
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), grace_s=grace_s, codec=codec)
    run = replace(
        toy_async(),
        algorithm=algorithm,
        train=Train(steps=updates // 2, batch_size=1),
        cluster=Cluster(islands=2),
        keep=Keep(evaluate_every=evaluate_every // 2),
    )
    spec = HubProcessSpec(
        run=run,
        engine=Ray(processes=workers, save_every_s=save_every_s),
        examples=(100, 100),
        layout=WEIGHTS.layout,
        dtype="float32",
        begin_bytes=0,
        lost=LostRounds(*lost),
        session=session,
        folder=storage.path,
        origin={"run": "settings", "data": "data"},
        warm_start_tokens=0,
    )
    storage.hubs.append(HubProcess(spec, store.put))
    return storage.hubs[-1]


def started_hub(store, storage, **settings):
    """A hub with two workers."""
    process = hub(store, storage, **settings)
    for number in (0, 1):
        process.register(number, number, "data", "a test")
    return process


def update(task, number, incarnation):
    begin_s = task.now_s
    stretch = ComputeSpan(begin_s, begin_s, task.steps, float(task.steps), [2.0], 8, True)
    return UpdateMessage(number, incarnation, task.round_id, begin_s, begin_s, (stretch,), {})


def work(process, store, number, incarnation, rounds=1000, last=None):
    """A worker that moves every weight by 0.01 in each round."""
    process.register(number, incarnation, "data", "a test")
    taken = 0
    while taken < rounds:
        task = process.pull(number, incarnation, last, TIMEOUT_S)
        if task.status != "train":
            assert task.status == "finished"
            return last
        there = tree_view(store.get(task.weights[0]), WEIGHTS.layout, task.dtype)
        assert process.push(update(task, number, incarnation), tree_bytes(there * 0 + 0.01)) in ("accepted", "finished")
        taken, last = taken + 1, task.round_id
    return last


def together(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def finish_run(process):
    status = process.status(-1, 0, 0, 0.0)
    assert status.error is None
    for one in status.evaluations:
        process.evaluated(status.epoch, one.number, {"loss": 1.0})
    return process.finish()


def test_concurrent_workers_push_every_update_once(storage):
    store = Store()
    process = hub(store, storage)
    together(*(lambda n=n: work(process, store, n, n) for n in (0, 1)))
    end = finish_run(process)
    assert (end.local_updates, end.rounds) == (40, 10)
    assert len({(event.island, event.round) for event in storage.of(Arrived)}) == len(storage.of(Arrived)) == 10
    weights = tree_view(store.get(process.result()[0][0]), WEIGHTS.layout, "float32")
    assert torch.allclose(weights["w"], torch.full((3,), 1.0 - 10 * 0.01))
    assert isinstance(storage.events[-1], RunFinished)
    assert sum(event.pushes for event in storage.of(HubLoad)) >= 10
    assert 0 < max(event.busy for event in storage.of(HubLoad)) < 1


def test_weights_are_published_once_for_all_workers_of_a_version(storage):
    store = Store()
    process = started_hub(store, storage)
    before = len(store.objects)
    task = [process.pull(number, number, None, TIMEOUT_S) for number in (0, 1, 0)]
    assert len({one.weights for one in task}) == 1
    assert len(store.objects) <= before + 1, "the first evaluation has published them"


def test_the_first_workers_wait_for_each_other_and_a_late_one_joins_at_once(storage):
    store = Store()
    process = hub(store, storage)
    process.register(0, 0, "data", "a test")
    assert process.status(-1, 0, 0, 0.0).workers == {}
    process.register(1, 1, "data", "a test")
    assert process.status(-1, 0, 0, 0.0).workers == {0: (0, False), 1: (1, False)}
    process.worker_died(1, 1)
    assert process.status(-1, 0, 0, 0.0).workers == {0: (0, False)}
    process.register(1, 2, "data", "another")
    assert process.status(-1, 0, 0, 0.0).workers == {0: (0, False), 1: (2, False)}


def test_a_worker_with_other_data_is_refused(storage):
    process = hub(Store(), storage)
    assert "reads other data than the run" in process.register(0, 0, "something else", "a test")


def test_a_restarted_hub_resumes_from_its_checkpoint_and_reports_lost_rounds(storage):
    store = Store()
    one = started_hub(store, storage)
    last = work(one, store, 0, 0, rounds=2)
    one.save()
    lost = work(one, store, 0, 0, rounds=3, last=last)
    two = hub(store, storage)  # with the same log and checkpoints, in the same session
    restarted = storage.of(HubRestarted)[0]
    assert (restarted.checkpoint, restarted.round, restarted.lost_rounds, restarted.lost_local_updates) == ("00000002", 2, 3, 12)
    assert restarted.wall_time_s >= storage.of(Arrived)[-1].wall_time_s
    assert [event.name for event in storage.of(Saved)] == ["00000000", "00000002"], (
        "the restarted hub logs the last checkpoint again"
    )
    task = two.pull(0, 0, lost, TIMEOUT_S)
    assert task.fresh_optimizer, "its optimizer has seen lost rounds"
    assert two.pull(1, 1, None, TIMEOUT_S).round_id[0] == 1, "the other worker keeps its round"
    together(lambda: work(two, store, 1, 1), lambda: work(two, store, 0, 2))
    assert finish_run(two).local_updates == 40
    rounds = [(event.island, event.round) for event in storage.of(Arrived)]
    assert len(set(rounds)) == len(rounds) == 10


def test_a_restarted_hub_without_a_checkpoint_begins_with_the_initial_weights(storage):
    store = Store()
    one = started_hub(store, storage)
    work(one, store, 0, 0, rounds=2)
    shutil.rmtree(storage.path / "checkpoints")
    two = hub(store, storage)
    restarted = storage.of(HubRestarted)[0]
    assert (restarted.checkpoint, restarted.lost_rounds) == (None, 2)
    assert "restarted from the run's initial weights" in storage.lines
    weights = tree_view(store.get(two.result()[0][0]), WEIGHTS.layout, "float32")
    assert weights.equal(WEIGHTS)


def test_another_session_resumes_from_the_saved_time_with_new_workers(storage):
    store = Store()
    one = started_hub(store, storage)
    work(one, store, 0, 0, rounds=2)
    one.save()
    two = hub(store, storage, session="b")
    assert not storage.of(HubRestarted), "nothing is lost"
    assert two.status(-1, 0, 0, 0.0).workers == {}
    together(*(lambda n=n: work(two, store, n, n) for n in (0, 1)))
    assert finish_run(two).local_updates == 40
    arrived = storage.of(Arrived)
    assert [event.wall_time_s for event in arrived] == sorted(event.wall_time_s for event in arrived)


def test_a_hub_saves_periodically_and_only_after_changes(storage):
    store = Store()
    process = started_hub(store, storage, save_every_s=0.02)
    work(process, store, 0, 0, rounds=1)
    deadline = time.monotonic() + TIMEOUT_S
    while len(storage.of(Saved)) < 2:
        assert time.monotonic() < deadline
        process.status(-1, 0, 0, 0.02)
    count = len(storage.of(Saved))
    for _ in range(5):
        process.status(process.status(-1, 0, 0, 0.0).epoch, 10**6, 10**6, 0.02)
    assert len(storage.of(Saved)) <= count + 1
    assert next(event.name for event in storage.of(Saved)) == "00000000", "the first before any dispatch"


def test_a_failed_checkpoint_is_reported_and_the_next_may_succeed(storage):
    store, storage.full = Store(), True
    process = started_hub(store, storage)
    work(process, store, 0, 0, rounds=1)
    assert not process.save()
    assert [event.round for event in storage.of(SaveFailed)] == [0, 1]
    assert "the disk is full" in storage.of(SaveFailed)[0].reason
    storage.full = False
    assert process.save()
    assert storage.rounds == [1]
    assert process.status(-1, 0, 0, 0.0).error is None


def test_a_window_closes_at_its_deadline_without_a_call(storage):
    store = Store()
    process = started_hub(store, storage, grace_s=0.05)
    last = work(process, store, 0, 0, rounds=1)
    task = process.pull(0, 0, last, TIMEOUT_S)
    assert task.status == "train"
    assert task.round_id != last


def test_set_live_workers_removes_dead_workers(storage):
    store = Store()
    process = started_hub(store, storage)
    process.set_live_workers({0: 0, 1: 7})
    assert process.status(-1, 0, 0, 0.0).workers == {0: (0, False)}


def test_a_hub_that_died_after_the_end_is_followed_by_one_that_ends_the_same(storage):
    store = Store()
    one = hub(store, storage)
    together(*(lambda n=n: work(one, store, n, n) for n in (0, 1)))
    first = finish_run(one)
    two = hub(store, storage)
    assert two.finish() is None, "its weights are not evaluated yet"
    again = finish_run(two)
    assert (again.digest, again.local_updates) == (first.digest, 40)
    assert len(storage.of(RunFinished)) == 1
    assert isinstance(storage.events[-1], RunFinished)


def test_the_clock_includes_the_time_without_a_hub(storage, monkeypatch):
    store = Store()
    started_hub(store, storage)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0, strftime=time.strftime)
    monkeypatch.setattr("atoll.engines.ray.hub_checkpoints.time", later)
    started_hub(store, storage)
    assert storage.of(HubRestarted)[0].wall_time_s > 100.0


def test_rounds_lost_before_the_session_are_reported(storage):
    store = Store()
    work(started_hub(store, storage), store, 0, 0, rounds=1)
    hub(store, storage, session="b", lost=(7, 28))
    assert (storage.of(HubRestarted)[0].lost_rounds, storage.of(HubRestarted)[0].lost_local_updates) == (8, 32)


def test_the_load_is_measured_from_the_start_of_the_run(storage):
    store = Store()
    process = hub(store, storage, updates=8)
    process.register(0, 0, "data", "a test")
    before = time.monotonic()
    process.register(1, 1, "data", "a test")
    together(*(lambda n=n: work(process, store, n, n) for n in (0, 1)))
    finish_run(process)
    assert sum(event.seconds for event in storage.of(HubLoad)) < time.monotonic() - before


def test_a_run_starts_without_missing_workers_after_the_timeout(monkeypatch, storage):
    monkeypatch.setattr("atoll.engines.ray.hub_state._START_TIMEOUT_S", -1.0)
    process = hub(Store(), storage)
    process.register(1, 0, "data", "a test")
    assert process.status(-1, 0, 0, 0.0).workers == {1: (0, False)}


def test_a_worker_that_died_in_the_start_barrier_does_not_count(storage):
    process = hub(Store(), storage)
    process.register(0, 0, "data", "a test")
    process.worker_died(0, 0)
    process.register(1, 1, "data", "a test")
    assert process.status(-1, 0, 0, 0.0).workers == {}


def test_additional_workers_join_at_any_time(storage):
    store = Store()
    process = hub(store, storage, workers=1)
    process.register(1, 0, "data", "the first to come")
    last = work(process, store, 1, 0, rounds=1)
    process.register(0, 1, "data", "one more")
    assert process.status(-1, 0, 0, 0.0).workers == {1: (0, True), 0: (1, False)}
    together(lambda: work(process, store, 0, 1), lambda: work(process, store, 1, 0, last=last))
    assert finish_run(process).local_updates == 40


def test_the_last_weights_are_evaluated_however_many_evaluations_are_outstanding(storage):
    store = Store()
    process = started_hub(store, storage, evaluate_every=4)
    together(*(lambda n=n: work(process, store, n, n) for n in (0, 1)))
    waiting = process.status(-1, 0, 0, 0.0).evaluations
    assert [one.due.local_updates for one in waiting] == [0, 4, 8, 12, 40]


def test_metrics_for_a_dead_hub_are_ignored_by_the_next(storage):
    store = Store()
    one = started_hub(store, storage)
    two = started_hub(store, storage)
    assert [due.number for due in two.status(-1, 0, 0, 0.0).evaluations] == [1], "both hubs have a request with this number"
    two.evaluated(one.status(-1, 0, 0, 0.0).epoch, 1, {"loss": 123.0})
    assert not two.status(-1, 0, 0, 0.0).evaluated
    assert not storage.of(Evaluated)


def test_lost_weights_are_published_again_for_evaluation_if_they_are_the_present_ones(storage):
    store = Store()
    process = started_hub(store, storage, evaluate_every=4)
    work(process, store, 0, 0, rounds=1)
    status = process.status(-1, 0, 0, 0.0)
    _, second = status.evaluations
    for one in status.evaluations:
        process.weights_lost(one.weights)
        process.evaluated(status.epoch, one.number, None)
    process.evaluated(status.epoch - 1, 3, None)  # of another hub
    (again,) = process.status(-1, 0, 0, 0.0).evaluations
    assert (again.due, again.number) == (second.due, 3), "with a new number"
    assert again.weights != second.weights
    assert store.get(again.weights[0]).tolist() == store.get(second.weights[0]).tolist()


def test_weights_that_a_worker_lost_are_published_again_and_still_evaluated(storage):
    process = started_hub(Store(), storage)
    task = process.pull(1, 1, None, TIMEOUT_S)
    (waiting,) = process.status(-1, 0, 0, 0.0).evaluations
    assert task.weights == waiting.weights
    process.weights_lost(task.weights)
    assert process.pull(1, 1, None, TIMEOUT_S).weights != task.weights
    assert process.status(-1, 0, 0, 0.0).evaluations == [waiting]


def test_weights_for_evaluation_are_published_while_the_next_update_is_applied(storage):
    store = Store()
    process = started_hub(store, storage, updates=8, evaluate_every=4)
    task = [process.pull(number, number, None, TIMEOUT_S) for number in (0, 1)]
    store.putting.clear()
    store.may_put.clear()
    pushes = [threading.Thread(target=process.push, args=(update(task[n], n, n), tree_bytes(WEIGHTS * 0.01))) for n in (0, 1)]
    pushes[0].start()
    assert store.putting.wait(TIMEOUT_S)
    pushes[1].start()
    while len(storage.of(Arrived)) < 2:
        assert process.status(-1, 0, 0, 0.01).error is None
    assert process.finish() is None
    assert not process.status(-1, 0, 0, 0.0).evaluated, "the run is over, and the last weights are not evaluated yet"
    store.may_put.set()
    for push in pushes:
        push.join(TIMEOUT_S)
    _, first, last = process.status(-1, 0, 0, 0.0).evaluations
    for one, updates in ((first, 4), (last, 8)):
        weights = tree_view(store.get(one.weights[0]), WEIGHTS.layout, "float32")
        assert one.due.local_updates == updates
        assert torch.allclose(weights["w"], torch.full((3,), 1.0 - updates / 4 * 0.01))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_delta_of_another_length_is_refused(storage, codec):
    store = Store()
    process = started_hub(store, storage, codec=codec)
    task = process.pull(0, 0, None, TIMEOUT_S)
    given = update(task, 0, 0)._replace(encoded=codec != "fp32")
    assert process.push(given, tree_bytes(WEIGHTS)[:8]) == "refused"
    assert process.status(-1, 0, 0, 0.0).error is None


def test_a_diverged_run_ends_and_its_good_state_is_saved(storage):
    store = Store()
    process = started_hub(store, storage)
    last = work(process, store, 0, 0, rounds=1)
    for _ in range(3):
        task = process.pull(0, 0, last, TIMEOUT_S)
        assert process.push(update(task, 0, 0), tree_bytes(WEIGHTS * float("nan"))) == "refused"
        last = task.round_id
    assert isinstance(process.status(-1, 0, 0, 0.0).error, TrainingDiverged)
    assert process.pull(0, 0, last, 0.0).status == "finished"
    assert process.save()
    two = hub(store, storage, session="b")
    together(*(lambda n=n: work(two, store, n, n) for n in (0, 1)))
    assert finish_run(two).local_updates == 40


@pytest.mark.parametrize(
    ("fails", "act"),
    [
        (IslandLeft, lambda process, task: process.pull(0, 0, (77, 77), 0.0)),
        (Dispatched, lambda process, task: process.round_started(0, 0, task.round_id, 0.0)),
        (Arrived, lambda process, task: process.push(update(task, 0, 0), tree_bytes(WEIGHTS))),
        (IslandLeft, lambda process, task: process.worker_died(0, 0)),
    ],
    ids=["pull", "round_started", "push", "worker_died"],
)
def test_an_exception_within_a_step_ends_the_run_and_is_never_saved(fails, act, storage):
    store = Store()
    process = started_hub(store, storage)
    task = process.pull(0, 0, None, TIMEOUT_S)
    storage.fails = fails
    act(process, task)
    storage.fails = None
    error = process.status(-1, 0, 0, 0.0).error
    assert isinstance(error, ExchangeFailed)
    assert "OSError: no such disk" in str(error)
    assert not process.save()
    assert storage.rounds == [0]
    assert "Traceback" in storage.lines


def test_a_checkpoint_is_consistent_though_updates_arrive_while_it_is_written(storage):
    store = Store()
    one = started_hub(store, storage)
    last = work(one, store, 0, 0, rounds=2)
    storage.may_write.clear()
    storage.writing.clear()
    saving = threading.Thread(target=one.save)
    saving.start()
    assert storage.writing.wait(TIMEOUT_S)
    work(one, store, 0, 0, rounds=3, last=last)
    assert [event.round for event in storage.of(Saved)] == [0], "the checkpoint is not written yet"
    storage.may_write.set()
    saving.join(TIMEOUT_S)
    assert [event.round for event in storage.of(Saved)] == [0, 2]
    work(one, store, 1, 1, rounds=2)  # reuses the buffers that the snapshot held
    two = hub(store, storage)
    weights = tree_view(store.get(two.result()[0][0]), WEIGHTS.layout, "float32")
    assert torch.allclose(weights["w"], torch.full((3,), 1.0 - 2 * 0.01))


def test_a_run_is_not_over_before_it_is_saved(storage):
    store = Store()
    process = started_hub(store, storage)
    storage.may_write.clear()
    together(*(lambda n=n: work(process, store, n, n) for n in (0, 1)))
    ends = []
    finishing = threading.Thread(target=lambda: ends.append(finish_run(process)))
    finishing.start()
    finishing.join(0.05)
    assert not ends
    storage.may_write.set()
    finishing.join(TIMEOUT_S)
    assert ends[0].local_updates == 40
    assert storage.rounds[-1] == 10


# ----------------------------------------------------------------------------------------------------------------- publisher


def publisher():
    stored = []
    return WeightPublisher(lambda array: stored.append(array.copy()) or len(stored)), stored


def test_a_version_is_published_once_while_it_is_recent():
    one, stored = publisher()
    trees = [Tree.of({"w": torch.full((2,), float(value))}) for value in range(6)]
    assert [one.publish(tree) for tree in (trees[0], trees[0], trees[1], trees[0])] == [1, 1, 2, 1]
    for tree in trees:
        one.publish(tree)
    assert len(stored) == 6
    assert one.publish(trees[0]) == 7, "old references are not kept"


def test_weights_whose_buffer_was_released_are_forgotten():
    one, stored = publisher()
    old, new = Tree.of({"w": torch.ones(2)}), Tree.of({"w": torch.zeros(2)})
    one.publish(old)
    old.release()
    assert one.publish(new) == 2
    assert stored[0].view("float32").tolist() == [1.0, 1.0]


def test_lost_weights_are_published_again():
    one, _ = publisher()
    tree = Tree.of({"w": torch.ones(2)})
    one.forget(one.publish(tree))
    assert one.publish(tree) == one.publish(tree) == 2


# ---------------------------------------------------------------------------------------------------------------------- load


def meter_of(monkeypatch, *seconds):
    """A meter that reads these times, the last one for ever after."""
    times = list(seconds)
    clock = SimpleNamespace(monotonic=lambda: times.pop(0) if len(times) > 1 else times[0])
    monkeypatch.setattr("atoll.engines.ray.hub_actor.time", clock)
    return LoadMeter(), clock


def test_concurrent_pushes_wait_together_and_are_applied_one_at_a_time(monkeypatch):
    meter, clock = meter_of(monkeypatch, 0.0, 1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 5.0)
    arrived_s = [meter.arrived(), meter.arrived()]
    for came_s in arrived_s:
        meter.applied(came_s, lock_s=clock.monotonic())
    load = meter.report(5.0)
    assert (load.pushes, load.most_waiting, load.seconds) == (2, 2, 5.0)
    assert load.busy == (1.0 + 1.0) / 5.0
    assert load.waited_s == ((2.0 - 1.0) + (3.0 - 1.5)) / 2
    assert load.wall_time_s == 5.0


def test_snapshots_count_as_busy_and_a_report_resets_the_meter(monkeypatch):
    meter, _ = meter_of(monkeypatch, 0.0, 4.0, 4.0, 5.0)
    load = meter.report(4.0, snapshot_s=2.0)
    assert (load.busy, load.pushes, load.apply_s) == (0.5, 0, 0.0)
    again = meter.report(5.0)
    assert (again.seconds, again.pushes, again.busy, again.apply_s) == (1.0, 0, 0.0, 0.0)
