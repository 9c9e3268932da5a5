"""The hub's process without Ray: a dictionary is the object store, and threads are workers."""

import copy
import threading
import time

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import CheckpointError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Arrived, Dispatched, Evaluated, HubLoad, HubRestarted, IslandLeft, RunFinished, Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_actor import HubServer
from atoll.engines.ray.hub_spec import HubOrder
from atoll.engines.ray.messages import Brought, bits_of, tree_over
from atoll.engines.ray.storage import Kept, Lost
from atoll.engines.round_record import ComputeRecord
from atoll.optim.sgd import SGD

WEIGHTS = Tree.of({"w": torch.ones(3)})
PATIENCE_S = 20.0


class Store:
    """An object store."""

    def __init__(self):
        self.objects, self.putting, self.may_put = [], threading.Event(), threading.Event()
        self.may_put.set()

    def put(self, bits):
        self.putting.set()
        assert self.may_put.wait(PATIENCE_S)
        self.objects.append(bits.copy())
        return len(self.objects) - 1

    def get(self, reference):
        return self.objects[reference]


class Shelf:
    """A keeping.Keeper in memory, whose bytes are events."""

    def __init__(self, full=False):
        self.events, self.checkpoints, self.said, self.full, self.fails = [], [], [], full, None
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def hold(self):
        pass

    def begin(self):
        return WEIGHTS.copy()

    def newest(self):
        if not self.checkpoints:
            return None
        round, parts, metadata = self.checkpoints[-1]
        return Kept(self.name(round), metadata, lambda part, like: copy.deepcopy(parts[part]))

    def save(self, round, parts, metadata):
        self.writing.set()
        assert self.may_write.wait(PATIENCE_S)
        if self.full:
            raise CheckpointError("the disk is full")
        self.checkpoints.append((round, copy.deepcopy(parts), metadata))

    def name(self, round):
        return f"{round:08d}"

    def lost(self, after):
        arrived = [event for event in self.events[after:] if isinstance(event, Arrived)]
        return Lost(len(arrived), sum(event.steps for event in arrived))

    def log(self, after):
        del self.events[after:]
        return self

    def emit(self, event):
        if self.fails is not None and isinstance(event, self.fails):
            raise OSError("no such disk")
        self.events.append(event)

    def position(self):
        return len(self.events)

    def close(self):
        pass

    def say(self, text):
        self.said.append(text)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def hub(store, shelf, *, updates=40, workers=2, save_every_s=1000.0, session="a", grace_s=0.0, evaluate_every=1000, lost=(0, 0)):
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0), grace_s=grace_s)
    order = HubOrder(
        algorithm=algorithm,
        plan=algorithm.plan,
        layout=WEIGHTS.layout,
        dtype="float32",
        examples=(100, 100),
        updates=updates,
        seed=0,
        islands=2,
        workers=workers,
        places=max(2, workers),
        speeds=(),
        evaluate_every=evaluate_every,
        save_every_s=save_every_s,
        begin_bytes=0,
        lost=Lost(*lost),
        session=session,
        keeper=shelf,
        fingerprint="data",
        threads=1,
        warm_start_tokens=0,
    )
    return HubServer(order, store.put)


def begun(store, shelf, **settings):
    """A hub with two workers."""
    server = hub(store, shelf, **settings)
    for number in (0, 1):
        server.hello(number, number, "data", "a test")
    return server


def brought(told, number, life):
    begin_s = told.now_s
    stretch = ComputeRecord(begin_s, begin_s, told.steps, float(told.steps), 8, 2.0, True)
    return Brought(number, life, told.ticket, begin_s, begin_s, (stretch,), {})


def work(server, store, number, life, rounds=1000, last=None):
    """A worker that moves every weight by 0.01 in each round."""
    server.hello(number, life, "data", "a test")
    taken = 0
    while taken < rounds:
        told = server.pull(number, life, last, PATIENCE_S)
        if told.word != "go":
            assert told.word == "over"
            return last
        there = tree_over(store.get(told.weights[0]), WEIGHTS.layout, told.dtype)
        assert server.push(brought(told, number, life), bits_of(there * 0 + 0.01)) in ("taken", "over")
        taken, last = taken + 1, told.ticket
    return last


def together(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def finished(server):
    news = server.news(-1, 0, 0, 0.0)
    assert news.error is None
    for one in news.to_judge:
        server.judged(news.epoch, one.number, {"loss": 1.0})
    return server.finish()


def test_workers_in_threads_of_their_own_bring_every_update_once():
    store, shelf = Store(), Shelf()
    server = hub(store, shelf)
    together(*(lambda n=n: work(server, store, n, n) for n in (0, 1)))
    end = finished(server)
    assert (end.local_updates, end.rounds) == (40, 10)
    assert len({(event.island, event.round) for event in shelf.of(Arrived)}) == len(shelf.of(Arrived)) == 10
    weights = tree_over(store.get(server.outcome()[0][0]), WEIGHTS.layout, "float32")
    assert torch.allclose(weights["w"], torch.full((3,), 1.0 - 10 * 0.01))
    assert isinstance(shelf.events[-1], RunFinished)
    assert sum(event.pushes for event in shelf.of(HubLoad)) >= 10
    assert 0 < max(event.busy for event in shelf.of(HubLoad)) < 1


def test_weights_are_put_into_the_store_once_for_all_who_are_sent_off_with_them():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    before = len(store.objects)
    told = [server.pull(number, number, None, PATIENCE_S) for number in (0, 1, 0)]
    assert len({one.weights for one in told}) == 1
    assert len(store.objects) <= before + 1, "the first evaluation has them too"


def test_the_first_wait_for_the_others_and_a_late_one_takes_its_place_at_once():
    store, shelf = Store(), Shelf()
    server = hub(store, shelf)
    server.hello(0, 0, "data", "a test")
    assert server.news(-1, 0, 0, 0.0).seats == {}
    server.hello(1, 1, "data", "a test")
    assert server.news(-1, 0, 0, 0.0).seats == {0: (0, False), 1: (1, False)}
    server.left(1, 1)
    assert server.news(-1, 0, 0, 0.0).seats == {0: (0, False)}
    server.hello(1, 2, "data", "another")
    assert server.news(-1, 0, 0, 0.0).seats == {0: (0, False), 1: (2, False)}


def test_who_reads_other_data_is_refused_with_advice():
    server = hub(Store(), Shelf())
    assert "reads other data than the run" in server.hello(0, 0, "something else", "a test")


def test_a_hub_that_dies_goes_on_from_its_checkpoint_and_says_what_was_lost():
    store, shelf = Store(), Shelf()
    one = begun(store, shelf)
    last = work(one, store, 0, 0, rounds=2)
    one.save()
    lost = work(one, store, 0, 0, rounds=3, last=last)
    two = hub(store, shelf)  # with the same log and checkpoints, in the same session
    restarted = shelf.of(HubRestarted)[0]
    assert (restarted.checkpoint, restarted.round, restarted.lost_rounds, restarted.lost_local_updates) == ("00000002", 2, 3, 12)
    assert restarted.wall_time_s >= shelf.of(Arrived)[-1].wall_time_s
    assert [event.name for event in shelf.of(Saved)] == ["00000000", "00000002"], "the log was cut before it said the last"
    told = two.pull(0, 0, lost, PATIENCE_S)
    assert told.fresh, "its moments have seen what is lost"
    assert two.pull(1, 1, None, PATIENCE_S).ticket[0] == 1, "and the other is in the round that it was in"
    together(lambda: work(two, store, 1, 1), lambda: work(two, store, 0, 2))
    assert finished(two).local_updates == 40
    rounds = [(event.island, event.round) for event in shelf.of(Arrived)]
    assert len(set(rounds)) == len(rounds) == 10


def test_a_hub_that_dies_before_it_has_saved_anything_begins_again_and_says_so():
    store, shelf = Store(), Shelf()
    one = begun(store, shelf)
    work(one, store, 0, 0, rounds=2)
    del shelf.checkpoints[:]
    two = hub(store, shelf)
    restarted = shelf.of(HubRestarted)[0]
    assert (restarted.checkpoint, restarted.lost_rounds) == (None, 2)
    assert any("begins again with the weights that the run began with" in line for line in shelf.said)
    weights = tree_over(store.get(two.outcome()[0][0]), WEIGHTS.layout, "float32")
    assert weights.equal(WEIGHTS)


def test_another_session_goes_on_from_the_saved_time_with_other_workers():
    store, shelf = Store(), Shelf()
    one = begun(store, shelf)
    work(one, store, 0, 0, rounds=2)
    one.save()
    two = hub(store, shelf, session="b")
    assert not shelf.of(HubRestarted), "nothing is lost"
    assert two.news(-1, 0, 0, 0.0).seats == {}
    together(*(lambda n=n: work(two, store, n, n) for n in (0, 1)))
    assert finished(two).local_updates == 40
    arrived = shelf.of(Arrived)
    assert [event.wall_time_s for event in arrived] == sorted(event.wall_time_s for event in arrived)


def test_a_hub_saves_by_itself_and_only_if_something_has_happened():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf, save_every_s=0.02)
    work(server, store, 0, 0, rounds=1)
    deadline = time.monotonic() + PATIENCE_S
    while len(shelf.checkpoints) < 2:
        assert time.monotonic() < deadline
        server.news(-1, 0, 0, 0.02)
    count = len(shelf.checkpoints)
    for _ in range(5):
        server.news(server.news(-1, 0, 0, 0.0).epoch, 10**6, 10**6, 0.02)
    assert len(shelf.checkpoints) <= count + 1
    assert next(event.name for event in shelf.of(Saved)) == "00000000", "the first before anybody is sent off"


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_next_may_succeed():
    store, shelf = Store(), Shelf(full=True)
    server = begun(store, shelf)
    work(server, store, 0, 0, rounds=1)
    assert not server.save()
    assert [event.round for event in shelf.of(SaveFailed)] == [0, 1]
    assert "the disk is full" in shelf.of(SaveFailed)[0].reason
    shelf.full = False
    assert server.save()
    assert [round for round, _, _ in shelf.checkpoints] == [1]
    assert server.news(-1, 0, 0, 0.0).error is None


def test_a_window_that_runs_out_sends_its_workers_off_without_anybody_asking():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf, grace_s=0.05)
    last = work(server, store, 0, 0, rounds=1)
    told = server.pull(0, 0, last, PATIENCE_S)
    assert told.word == "go"
    assert told.ticket != last


def test_a_hub_that_believes_in_the_dead_is_told_by_a_census():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    server.census({0: 0, 1: 7})
    assert server.news(-1, 0, 0, 0.0).seats == {0: (0, False)}


def test_a_hub_that_dies_after_its_last_words_is_followed_by_one_that_says_them_again():
    store, shelf = Store(), Shelf()
    one = hub(store, shelf)
    together(*(lambda n=n: work(one, store, n, n) for n in (0, 1)))
    first = finished(one)
    two = hub(store, shelf)
    assert two.finish() is None, "its weights are not judged yet"
    again = finished(two)
    assert (again.digest, again.local_updates) == (first.digest, 40)
    assert len(shelf.of(RunFinished)) == 1
    assert isinstance(shelf.events[-1], RunFinished)


def test_the_time_that_a_hub_was_away_counts():
    store, shelf = Store(), Shelf()
    begun(store, shelf)
    shelf.checkpoints[-1][2]["zero_s"] -= 100.0
    begun(store, shelf)
    assert shelf.of(HubRestarted)[0].wall_time_s > 100.0


def test_what_was_lost_before_the_session_is_told_though_the_log_was_cut_since():
    store, shelf = Store(), Shelf()
    work(begun(store, shelf), store, 0, 0, rounds=1)
    hub(store, shelf, session="b", lost=(7, 28))
    assert (shelf.of(HubRestarted)[0].lost_rounds, shelf.of(HubRestarted)[0].lost_local_updates) == (8, 32)


def test_the_hubs_load_is_measured_from_when_the_run_begins():
    store, shelf = Store(), Shelf()
    server = hub(store, shelf, updates=8)
    server.hello(0, 0, "data", "a test")
    before = time.monotonic()
    server.hello(1, 1, "data", "a test")
    together(*(lambda n=n: work(server, store, n, n) for n in (0, 1)))
    finished(server)
    assert sum(event.seconds for event in shelf.of(HubLoad)) < time.monotonic() - before


def test_who_waits_for_others_begins_without_them_after_a_while(monkeypatch):
    monkeypatch.setattr("atoll.engines.ray.start_barrier._GATHER_S", -1.0)
    server = hub(Store(), Shelf())
    server.hello(1, 0, "data", "a test")
    assert server.news(-1, 0, 0, 0.0).seats == {1: (0, False)}


def test_who_died_while_it_waited_is_not_waited_with():
    server = hub(Store(), Shelf())
    server.hello(0, 0, "data", "a test")
    server.left(0, 0)
    server.hello(1, 1, "data", "a test")
    assert server.news(-1, 0, 0, 0.0).seats == {}


def test_more_than_are_waited_for_may_come_at_any_time():
    store, shelf = Store(), Shelf()
    server = hub(store, shelf, workers=1)
    server.hello(1, 0, "data", "the first to come")
    last = work(server, store, 1, 0, rounds=1)
    server.hello(0, 1, "data", "one more")
    assert server.news(-1, 0, 0, 0.0).seats == {1: (0, True), 0: (1, False)}
    together(lambda: work(server, store, 0, 1), lambda: work(server, store, 1, 0, last=last))
    assert finished(server).local_updates == 40


def test_the_last_weights_are_judged_however_many_wait():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf, evaluate_every=4)
    together(*(lambda n=n: work(server, store, n, n) for n in (0, 1)))
    waiting = server.news(-1, 0, 0, 0.0).to_judge
    assert [one.due.local_updates for one in waiting] == [0, 4, 8, 12, 40]


def test_what_was_judged_for_a_dead_hub_is_not_taken_for_the_next_ones():
    store, shelf = Store(), Shelf()
    one = begun(store, shelf)
    two = begun(store, shelf)
    assert [due.number for due in two.news(-1, 0, 0, 0.0).to_judge] == [1], "both have filed under this number"
    two.judged(one.news(-1, 0, 0, 0.0).epoch, 1, {"loss": 123.0})
    assert not two.news(-1, 0, 0, 0.0).judged
    assert not shelf.of(Evaluated)


def test_weights_that_were_lost_are_published_again_and_judged_if_they_are_the_present_ones():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf, evaluate_every=4)
    work(server, store, 0, 0, rounds=1)
    news = server.news(-1, 0, 0, 0.0)
    _, second = news.to_judge
    for one in news.to_judge:
        server.lost(one.weights)
        server.leave_unjudged(news.epoch, one.number)
    server.leave_unjudged(news.epoch - 1, 3)  # of another hub
    (again,) = server.news(-1, 0, 0, 0.0).to_judge
    assert (again.due, again.number) == (second.due, 3), "under a number that was not handed out before"
    assert again.weights != second.weights
    assert store.get(again.weights[0]).tolist() == store.get(second.weights[0]).tolist()


def test_what_a_worker_has_lost_is_published_again_and_judged_all_the_same():
    server = begun(Store(), Shelf())
    told = server.pull(1, 1, None, PATIENCE_S)
    (waiting,) = server.news(-1, 0, 0, 0.0).to_judge
    assert told.weights == waiting.weights
    server.lost(told.weights)
    assert server.pull(1, 1, None, PATIENCE_S).weights != told.weights
    assert server.news(-1, 0, 0, 0.0).to_judge == [waiting]


def test_weights_to_be_judged_are_put_into_the_store_while_the_next_update_is_applied():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf, updates=8, evaluate_every=4)
    told = [server.pull(number, number, None, PATIENCE_S) for number in (0, 1)]
    store.putting.clear()
    store.may_put.clear()
    pushes = [threading.Thread(target=server.push, args=(brought(told[n], n, n), bits_of(WEIGHTS * 0.01))) for n in (0, 1)]
    pushes[0].start()
    assert store.putting.wait(PATIENCE_S)
    pushes[1].start()
    while len(shelf.of(Arrived)) < 2:
        assert server.news(-1, 0, 0, 0.01).error is None
    assert server.finish() is None
    assert not server.news(-1, 0, 0, 0.0).judged, "the run is over, and what is on its way is not judged yet"
    store.may_put.set()
    for push in pushes:
        push.join(PATIENCE_S)
    _, first, last = server.news(-1, 0, 0, 0.0).to_judge
    for one, updates in ((first, 4), (last, 8)):
        weights = tree_over(store.get(one.weights[0]), WEIGHTS.layout, "float32")
        assert one.due.local_updates == updates
        assert torch.allclose(weights["w"], torch.full((3,), 1.0 - updates / 4 * 0.01))


def test_a_payload_of_another_length_is_refused():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    told = server.pull(0, 0, None, PATIENCE_S)
    assert server.push(brought(told, 0, 0), bits_of(WEIGHTS)[:8]) == "refused"
    assert server.news(-1, 0, 0, 0.0).error is None


def test_a_run_that_cannot_get_better_ends_and_what_was_good_is_saved():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    last = work(server, store, 0, 0, rounds=1)
    for _ in range(3):
        told = server.pull(0, 0, last, PATIENCE_S)
        assert server.push(brought(told, 0, 0), bits_of(WEIGHTS * float("nan"))) == "refused"
        last = told.ticket
    assert isinstance(server.news(-1, 0, 0, 0.0).error, TrainingDiverged)
    assert server.pull(0, 0, last, 0.0).word == "over"
    assert server.save()
    two = hub(store, shelf, session="b")
    together(*(lambda n=n: work(two, store, n, n) for n in (0, 1)))
    assert finished(two).local_updates == 40


@pytest.mark.parametrize(
    ("fails", "act"),
    [
        (IslandLeft, lambda server, told: server.pull(0, 0, (77, 77), 0.0)),
        (Dispatched, lambda server, told: server.began(0, 0, told.ticket, 0.0)),
        (Arrived, lambda server, told: server.push(brought(told, 0, 0), bits_of(WEIGHTS))),
        (IslandLeft, lambda server, told: server.left(0, 0)),
    ],
    ids=["pull", "began", "push", "left"],
)
def test_an_error_in_the_middle_of_a_step_ends_the_run_and_is_never_saved(fails, act):
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    told = server.pull(0, 0, None, PATIENCE_S)
    shelf.fails = fails
    act(server, told)
    shelf.fails = None
    error = server.news(-1, 0, 0, 0.0).error
    assert isinstance(error, ExchangeFailed)
    assert "OSError: no such disk" in str(error)
    assert not server.save()
    assert [round for round, _, _ in shelf.checkpoints] == [0]
    assert any("Traceback" in line for line in shelf.said)


def test_a_checkpoint_holds_what_there_was_at_its_moment_though_updates_come_while_it_is_written():
    store, shelf = Store(), Shelf()
    one = begun(store, shelf)
    last = work(one, store, 0, 0, rounds=2)
    shelf.may_write.clear()
    shelf.writing.clear()
    saving = threading.Thread(target=one.save)
    saving.start()
    assert shelf.writing.wait(PATIENCE_S)
    work(one, store, 0, 0, rounds=3, last=last)
    assert [event.round for event in shelf.of(Saved)] == [0], "it is not there yet"
    shelf.may_write.set()
    saving.join(PATIENCE_S)
    assert [event.round for event in shelf.of(Saved)] == [0, 2]
    work(one, store, 1, 1, rounds=2)  # what was held meanwhile is in use again
    two = hub(store, shelf)
    weights = tree_over(store.get(two.outcome()[0][0]), WEIGHTS.layout, "float32")
    assert torch.allclose(weights["w"], torch.full((3,), 1.0 - 2 * 0.01))


def test_a_run_is_not_over_before_it_is_saved():
    store, shelf = Store(), Shelf()
    server = begun(store, shelf)
    shelf.may_write.clear()
    together(*(lambda n=n: work(server, store, n, n) for n in (0, 1)))
    ends = []
    finishing = threading.Thread(target=lambda: ends.append(finished(server)))
    finishing.start()
    finishing.join(0.05)
    assert not ends
    shelf.may_write.set()
    finishing.join(PATIENCE_S)
    assert ends[0].local_updates == 40
    assert shelf.checkpoints[-1][0] == 10
