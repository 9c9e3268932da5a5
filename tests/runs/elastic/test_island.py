"""Islands that come and go, as threads of one process, which meet over a real lighthouse and real sockets."""

import gc
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.data.text import Text
from atoll.engines.elastic import roll
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.generation import NOTHING, Generation
from atoll.engines.elastic.harbour import Harbour, free_port
from atoll.engines.elastic.judging import Brought
from atoll.engines.elastic.pier import Cargo, Pier, fetch
from atoll.engines.elastic.roll import Board
from atoll.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.events import (
    Attended,
    Compared,
    Computed,
    Evaluated,
    Exchanged,
    IslandJoined,
    Leased,
    Refused,
    RoundFinished,
    RunFinished,
    Saved,
    SaveFailed,
)
from atoll.models.gpt import GPT
from atoll.runs.build import replica_of
from atoll.runs.elastic import ending, sources
from atoll.runs.elastic import island as islands
from atoll.runs.elastic.desk import Desk, Finished
from atoll.runs.elastic.island import Island
from atoll.runs.elastic.log import TakenLog
from atoll.runs.elastic.minutes import Minute
from atoll.runs.elastic.place import Elastic, Invitation
from atoll.runs.elastic.sources import Sources
from atoll.runs.elastic.start import create_elastic, refuse_inelastic
from atoll.runs.elastic.supervise import island_name
from atoll.runs.execute import run as simulate
from atoll.runs.folder import RunFolder
from atoll.runs.overrides import override
from atoll.runs.place import placed
from atoll.runs.warm import Cache, load_data, warm_up
from atoll.runs.workloads import plain_workload
from atoll.telemetry import read_events
from atoll.tensorfile import load_tree
from atoll.testing.chaos import Script, Spoil, exactly_once
from atoll.testing.simulate import Recorder

HOST = "127.0.0.1"
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=8",
    "train.warm_start_steps=3",
    "train.batch_size=8",
    "keep.evaluate_every=4",
    "keep.save_every=4",
)


@pytest.fixture(scope="module", autouse=True)
def _light():
    """An island that leaves collects what it holds: what was here before the tests is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Islands sign and look more often, and are taken for dead sooner."""
    monkeypatch.setattr(roll, "BEAT_S", 0.1)
    monkeypatch.setattr(roll, "SILENT_S", 1.0)
    monkeypatch.setattr(sources, "_ALONE_S", 1.0)
    for room in (sources, ending, islands):
        monkeypatch.setattr(room, "_LOOK_S", 0.05)


def toy(islands, *settings):
    return placed(override(recipes.ALL["toy-sync"](), [*SETTINGS, *settings]), islands)


class Died(BaseException):
    """An island is gone, between a commit and the log of it."""


class Shore:
    """A run whose islands are threads here."""

    def __init__(self, folder, run, place, *spoils):
        self.run, self.folder = run, create_elastic(run, place, folder, ["test"])
        self.chaos = self.folder / "chaos.json"
        self.chaos.write_text(Script(spoils=spoils).to_text())
        port, self.errors, self.said = free_port(HOST), [], []
        self.invitation = Invitation(run, place, f"{HOST}:{port}")
        self.something_said = threading.Condition()
        self.waits = {}
        """What is waited for, by whom, after which of its rounds: until something is said that begins so."""
        resolved = run.resolved  # whoever starts islands makes the warm start first, and threads share their random numbers
        plain = plain_workload(resolved, load_data(resolved, Cache()))
        warm_up(resolved, plain, file=RunFolder(self.folder).warm_start, cache=None, sink=Recorder())
        self.harbour = Harbour(HOST, 0, port, self.invitation.to_text(), join_limit_s=30.0, heartbeat_limit_s=0.8)

    def start(self, *names, home=True, until=None, clock_s=None):
        """Islands that take part, each in a thread; they die when they have committed a round, if one is given."""
        threads = [threading.Thread(target=self._take_part, args=(name, home, until, clock_s), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        return threads

    def _take_part(self, name, home, until, clock_s):
        torch.set_num_threads(1)

        def say(text):
            self.note(text)
            if until is not None and text.startswith(f"committed round {until} "):
                raise Died
            if text.startswith(f"{name} begins with") and clock_s is not None:
                island._engine.clock.set(clock_s)
            for (who, number), what in self.waits.items():
                if who == name and text.startswith(f"committed round {number} "):
                    self.wait_until(what)

        try:
            island = Island(self.invitation, self.harbour.address, HOST, name, self.folder if home else None, say, self.chaos)
            sound = False
            try:
                island.carry_out()
                sound = True
            finally:  # a thread that is left asks the roll while the interpreter ends, which aborts it
                island.close(wait=sound)
        except Died:
            return
        except Exception as error:
            self.errors.append(error)
            self.note(f"{name} ended: {error}")

    def wait_until(self, what):
        """Until something is said that begins so."""
        with self.something_said:
            assert self.something_said.wait_for(lambda: any(text.startswith(what) for text in self.said), 30.0), (what, self.said)

    def note(self, text):
        with self.something_said:
            self.said.append(text)
            self.something_said.notify_all()

    def finish(self, threads):
        for thread in threads:
            thread.join(60.0)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), self.said
        self.harbour.close()

    def events(self, kind):
        return [event for event in read_events(RunFolder(self.folder).events) if isinstance(event, kind)]


@pytest.mark.parametrize(("size", "weighting"), [(1, "uniform"), (2, "uniform"), (3, "uniform"), (3, "examples")])
def test_with_nobody_missing_weights_losses_tokens_and_bytes_are_the_simulators(tmp_path, size, weighting):
    run = toy(size, f"algorithm.weighting={weighting}")
    shore = Shore(tmp_path / "elastic", run, Elastic(processes=size))
    shore.finish(shore.start(*map(island_name, range(size))))
    expected = simulate(run, out=tmp_path / "sim")
    assert load_tree(shore.folder / "final.safetensors").equal(expected.params)
    (finished,) = shore.events(RunFinished)
    figures = expected.summary
    assert (finished.val_loss, finished.tokens, finished.rounds) == (figures.val_loss, figures.tokens, figures.rounds)
    assert finished.sent_bytes_per_island == figures.sent_bytes_per_island
    (simulated,) = [e for e in read_events(expected.folder / "events.jsonl") if isinstance(e, RunFinished)]
    assert (finished.digest, finished.local_updates) == (simulated.digest, simulated.local_updates)
    for kind in (Evaluated, Exchanged, Compared, RoundFinished):
        count = sum(isinstance(event, kind) for event in read_events(expected.folder / "events.jsonl"))
        assert len(shore.events(kind)) == count, kind


@pytest.mark.parametrize("how", ["damage", "damage late", "damage told"])
def test_whatever_message_is_damaged_it_is_tried_again_and_weights_are_the_simulators(tmp_path, how):
    run, spoil = toy(2, "algorithm.weighting=examples"), Spoil(island="island-0000", round=1, how=how)
    shore = Shore(tmp_path / "elastic", run, Elastic(processes=2), spoil)
    shore.finish(shore.start("island-0000", "island-0001"))
    assert load_tree(shore.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim").params)
    assert {event.round: event.attempts for event in shore.events(Attended)}[2] > 1


def test_every_commit_says_who_was_there_and_what_became_of_the_data(tmp_path):
    shore = Shore(tmp_path / "run", toy(2), Elastic(processes=2))
    shore.finish(shore.start("island-0000", "island-0001"))
    attended = shore.events(Attended)
    assert [(e.round, e.known, e.participating, e.attempts) for e in attended] == [(n, 2, 2, 1) for n in (1, 2, 3, 4)]
    assert all(event.alive == 2 for event in attended)
    assert [event.epoch for event in attended] == sorted(event.epoch for event in attended)
    assert len({event.digest for event in attended}) == 4
    delivered = [unit for event in shore.events(Leased) for unit in event.delivered]
    assert delivered == [[island, island, 2 * n, 2] for n in range(4) for island in (0, 1)]
    assert [event.island for event in shore.events(IslandJoined)] == [0, 1]


def test_whoever_comes_later_is_given_the_state_listens_first_and_then_shares_the_work(tmp_path):
    shore = Shore(tmp_path / "run", toy(1, "train.steps=24"), Elastic(processes=1, pace=1e-4))
    shore.waits["island-0000", 3] = "elsewhere begins with"
    first = shore.start("island-0000")
    shore.wait_until("committed round 1 ")
    later = shore.start("elsewhere", home=False)
    shore.finish([*first, *later])
    joined = {event.island: event.round for event in shore.events(IslandJoined)}
    attended = {event.round: event for event in shore.events(Attended)}
    assert joined.keys() == {0, 1}, shore.said
    assert attended[joined[1]].participating == 1
    assert max(event.participating for event in attended.values()) == 2
    units = Counter(tuple(unit[1:]) for event in shore.events(Leased) for unit in event.delivered)
    assert len(units) == 12
    assert set(units.values()) == {1}
    assert len(attended) < 12, "two that share the work need fewer rounds"
    assert any("fetched from island-0000" in text for text in shore.said)
    assert [(event.donor, event.sent_bytes > 0) for event in shore.events(IslandJoined)] == [(None, False), (0, True)]


def test_a_run_that_everybody_left_goes_on_from_its_newest_checkpoint(tmp_path):
    run = toy(2, "train.steps=16")
    shore = Shore(tmp_path / "run", run, Elastic(processes=2))
    for thread in shore.start("island-0000", "island-0001", until=5):
        thread.join(60.0)
    assert not shore.errors
    assert [event.round for event in shore.events(RoundFinished)] == [1, 2, 3, 4]
    shore.finish(shore.start("island-0000", "island-0001"))
    assert any(text.endswith("begins with round 4, from its checkpoint") for text in shore.said), "one may fetch it from the other"
    assert [event.round for event in shore.events(RoundFinished)] == list(range(1, 9))
    units = Counter(tuple(unit[1:]) for event in shore.events(Leased) for unit in event.delivered)
    assert len(units) == 16
    assert set(units.values()) == {1}


class Waits(Exception):
    """An island would sleep."""


@pytest.mark.parametrize("has_state", [None, False, True])
def test_while_an_island_was_set_up_it_was_seen_whether_anybody_has_the_state(tmp_path, monkeypatch, has_state):
    shore = Shore(tmp_path / "run", toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in shore.start("island-0000", until=5):
        thread.join(60.0)
    if has_state is not None:  # so it signed last: it may be dead
        entry = {"pier": f"{HOST}:1", "generation": 7 if has_state else -1, "exchanging": False, "beat": 1}
        Board(shore.harbour.address).sign("island-0001", entry)
    island, long_s = one_island(shore), 1000.0

    def first():
        return island._sources.first(island._engine, island._roll.quiet_s(lambda entry: entry["generation"] >= 0))

    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(Waits):  # it has only just come
        first()
    island._roll.reached_s -= long_s
    if has_state:
        with pytest.raises(Waits):
            first()
        island._roll._seen["island-0001"] = (1, time.monotonic() - long_s)
    assert first() == "round 4, from its checkpoint"
    island.close(wait=False)


def test_of_two_that_come_back_at_once_the_later_fetches_what_the_other_has_just_restored(tmp_path, monkeypatch):
    shore = Shore(tmp_path / "run", toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in shore.start("island-0000", until=5):
        thread.join(60.0)
    first, second = one_island(shore), one_island(shore, "island-0001")
    newer_checkpoint = Sources._newer_checkpoint

    def overtaken(where_from, engine):
        if engine is second._engine:
            first._sources._restored(first._engine)
            first._publish(first._engine)
            first._doing = "ready"
        return newer_checkpoint(where_from, engine)

    monkeypatch.setattr(Sources, "_newer_checkpoint", overtaken)
    assert second._sources.first(second._engine).startswith("round 4, fetched from island-0000")
    for island in (first, second):
        island.close(wait=False)


def test_when_the_one_who_writes_dies_the_next_goes_on_where_the_log_ends(tmp_path):
    shore = Shore(tmp_path / "run", toy(2, "train.steps=16"), Elastic(processes=2))
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


def test_when_the_one_who_writes_dies_after_the_last_commit_another_finishes_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "_SILENT_S", 0.2)
    shore = Shore(tmp_path / "run", toy(2, "keep.save_every=1000"), Elastic(processes=2))
    shore.finish([*shore.start("island-0000", until=4), *shore.start("island-0001")])
    assert [event.round for event in shore.events(Attended)] == [1, 2, 3, 4]
    assert len(shore.events(RunFinished)) == 1


def test_whoever_has_the_folder_stays_until_the_one_who_writes_has_finished_the_run(tmp_path):
    shore = Shore(tmp_path / "run", toy(2), Elastic(processes=2))
    shore.waits["island-0000", 4] = "island-0001 stays until island-0000 has finished the run"
    shore.finish(shore.start("island-0000", "island-0001"))
    assert len([text for text in shore.said if "writes the log" in text]) == 1
    assert len(shore.events(RunFinished)) == 1


def test_when_all_who_have_the_folder_die_after_the_last_commit_one_that_joined_has_kept_the_state_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "_SILENT_S", 1000.0)  # nor is it waited for as if it could write
    shore = Shore(tmp_path / "run", toy(2, "keep.save_every=1000"), Elastic(processes=2))
    first, other = shore.start("island-0000", until=4), shore.start("zz-elsewhere", home=False)
    for thread in first:
        thread.join(60.0)
    shore.finish([*shore.start("island-0000"), *other])
    assert any(text.startswith("island-0000 begins with round 4, fetched from zz-elsewhere") for text in shore.said)
    assert [event.round for event in shore.events(Attended)] == [1, 2, 3, 4]
    assert len(shore.events(RunFinished)) == 1


def test_a_run_whose_end_cannot_be_written_is_finished_when_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "_AGAIN_S", 0.0)
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    in_the_way, note = RunFolder(shore.folder).timing, shore.note
    in_the_way.mkdir()
    shore.note = lambda text: (note(text), text.startswith("not finished, and tried again") and in_the_way.rmdir())
    shore.finish(shore.start("island-0000"))
    assert len([text for text in shore.said if text.startswith("not finished")]) == 1
    assert len(shore.events(RunFinished)) == 1
    assert len(shore.events(Evaluated)) == 3


@pytest.mark.parametrize(("awake", "wrote"), [(True, True), (True, False), (False, False)])
def test_an_island_that_was_away_over_the_end_leaves_the_finished_run_as_it_is(tmp_path, awake, wrote):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    late = one_island(shore, "island-0001")  # frozen since before the beginning
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


def test_an_island_that_comes_alone_to_a_run_without_a_checkpoint_does_not_begin_anew(tmp_path):
    shore = Shore(tmp_path / "run", toy(1, "keep.save_every=1000"), Elastic(processes=1))
    for thread in shore.start("island-0000", until=3):
        thread.join(60.0)
    for thread in shore.start("island-0000"):
        thread.join(60.0)
    (error,) = shore.errors
    assert isinstance(error, CheckpointError)
    assert "will not start from random weights again by itself" in str(error)


@pytest.mark.parametrize(
    ("recipe", "settings", "says"),
    [
        ("demo-acco", (), "each island holds a slice"),
        ("demo-diloco", ("cluster.devices_per_island=2",), "an island is one process there"),
        ("demo-diloco", ("algorithm.missed=agreed",), "Use global"),
        ("demo-async", (), "has a hub and workers"),
    ],
)
def test_what_islands_that_come_and_go_cannot_do_is_refused(recipe, settings, says):
    with pytest.raises(ConfigError, match=says):
        refuse_inelastic(placed(override(recipes.ALL[recipe](), list(settings)), 2))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "at least 1"),
        ({"pace": -1.0}, "0 or more"),
        ({"limit_s": 0.0}, "more than 0"),
        ({"refused_above": 1.0}, "more than 1"),
    ],
)
def test_a_place_that_cannot_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Elastic(**settings)


def test_an_invitation_says_it_all():
    invitation = Invitation(toy(3), Elastic(processes=3, pace=0.5), "127.0.0.1:99")
    assert Invitation.from_text(invitation.to_text()) == invitation


def test_a_desk_that_was_brought_up_to_date_writes_behind_what_others_have_written_since(tmp_path):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    island = Island(shore.invitation, shore.harbour.address, HOST, "island-0000", shore.folder, lambda text: None)
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


def test_an_island_that_was_given_the_state_listens_first_though_it_had_work_before(tmp_path):
    shore = Shore(tmp_path / "run", toy(2, "train.steps=16"), Elastic(processes=2))
    for thread in shore.start("island-0001", "island-0000", until=3):
        thread.join(60.0)
    island = Island(shore.invitation, shore.harbour.address, HOST, "island-0000", shore.folder, lambda text: None)
    engine = island._engine
    engine.leases.lease(["island-0000", "island-0001"])
    engine._digest = engine._digested()
    plain, shared = engine.plain(), engine.shared()
    assert not engine._listens
    engine.restore(plain, shared)
    assert engine.leases.out["island-0000"] is not None
    assert engine._listens, "the others would wait for it"
    engine.begin_anew()
    assert not engine._listens
    island.close(wait=False)


def test_what_islands_without_the_folder_commit_alone_is_written_by_whoever_has_it_next(tmp_path):
    shore = Shore(tmp_path / "run", toy(1, "train.steps=28", "keep.save_every=1000"), Elastic(processes=1))
    shore.waits = {("island-0000", 3): "zz-elsewhere begins with", ("zz-elsewhere", 9): "island-0000 begins with round 9"}
    first, other = shore.start("island-0000", until=5), shore.start("zz-elsewhere", home=False)
    for thread in first:
        thread.join(60.0)
    shore.wait_until("committed round 9 ")
    shore.finish([*shore.start("island-0000"), *other])
    rounds = [event.round for event in shore.events(Attended)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert exactly_once(shore.events(Leased), units=14) == []
    assert len(shore.events(RunFinished)) == 1


def test_what_the_one_who_writes_could_not_write_is_remembered_by_the_others_until_it_can(tmp_path, monkeypatch):
    shore, tries = Shore(tmp_path / "run", toy(2, "train.steps=16", "keep.save_every=1000"), Elastic(processes=2)), []
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


def test_who_joins_with_other_data_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = Text(corpus=f"files:{text}", tokenizer="bytes", seq_len=16, eval_batches=2)
    run = replace(toy(1), recipe="text", model=GPT(layers=1, width=8, heads=1, head_size=8), data=data)
    shore = Shore(tmp_path / "run", placed(run, 1), Elastic(processes=1))
    shore.waits["island-0000", 1] = "elsewhere ended"
    first = shore.start("island-0000")
    shore.wait_until("committed round 1 ")
    text.write_text("0123456789 is another text on the other machine " * 200)
    shore.start("elsewhere", home=False)
    shore.wait_until("elsewhere ended: the data here")
    (error,) = shore.errors
    assert isinstance(error, ConfigError)
    shore.errors.clear()
    shore.finish(first)


def test_a_checkpoint_that_could_not_be_saved_is_not_told_of_as_saved(tmp_path):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    (shore.folder / "checkpoints").write_text("in the way")
    shore.finish(shore.start("island-0000"))
    assert [event.round for event in shore.events(SaveFailed)] == [2, 3, 4]
    assert shore.events(Saved) == []


def test_the_last_figures_are_of_the_last_weights_though_another_island_judged_before(tmp_path):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    shore.finish(shore.start("island-0000"))
    (finished,) = shore.events(RunFinished)
    (shore.folder / "final.safetensors").unlink()
    island = Island(shore.invitation, shore.harbour.address, HOST, "island-0000", shore.folder, lambda text: None)
    island._sources.first(island._engine)
    island._engine.books.totals.metrics = {"loss": -1.0}  # of weights that have changed since
    island._desk.finish(island._engine, None)
    assert [event.val_loss for event in shore.events(RunFinished)] == [finished.val_loss]
    island.close(wait=False)


def test_a_unit_that_gives_nothing_but_nonsense_is_dropped_and_its_tokens_are_counted_nowhere(tmp_path):
    spoils = [Spoil(island="island-0000", round=number, how="nan") for number in (1, 2, 3)]
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1), *spoils)
    shore.finish(shore.start("island-0000"))
    assert [event.round for event in shore.events(Refused)] == [2, 3, 4]
    assert [event.returned for event in shore.events(Leased)] == [[], [[0, 0, 2, 2]], [[0, 0, 2, 2]], [], [], []]
    assert [event.dropped for event in shore.events(Leased)] == [[], [], [], [[0, 0, 2, 2]], [], []]
    (finished,) = shore.events(RunFinished)
    delivered = sum(len(event.delivered) for event in shore.events(Leased))
    assert (delivered, finished.tokens) == (3, 3 * 2 * 8)


def test_a_state_that_is_about_to_be_followed_by_another_is_not_fetched(tmp_path):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    donor, newcomer = (
        Island(shore.invitation, shore.harbour.address, HOST, name, shore.folder, lambda text: None) for name in ("a", "b")
    )
    donor._publish(donor._engine)
    donor._doing = "training"
    donor._roll.look()
    newcomer._roll.look()
    donor._engine._meetings.exchanging = True
    assert newcomer._sources._fetched(newcomer._engine, newcomer._engine.generation) == ""
    donor._engine._meetings.exchanging = False
    assert newcomer._sources._fetched(newcomer._engine, newcomer._engine.generation).startswith("round 0, fetched from a")
    for island in (donor, newcomer):
        island.close(wait=False)


def test_islands_begin_with_those_who_answer_and_not_with_all_who_have_signed(tmp_path):
    shore = Shore(tmp_path / "run", toy(2), Elastic(processes=2))
    island = one_island(shore)
    Board(shore.harbour.address).sign("island-0001", {**island._entry(), "pier": f"{HOST}:1", "doing": "ready", "beat": 1})
    island._doing = "ready"
    island._roll.look()
    assert island._roll.alive().keys() == {"island-0000", "island-0001"}
    assert island._here(2).keys() == {"island-0000"}
    island.close(wait=False)


def test_islands_that_begin_together_have_one_clock(tmp_path):
    shore = Shore(tmp_path / "run", toy(2), Elastic(processes=2))
    shore.finish([*shore.start("island-0000"), *shore.start("island-0001", clock_s=1000.0)])
    assert {event.island for event in shore.events(Computed)} == {0, 1}
    assert min(event.start_s for event in shore.events(Computed)) >= 1000.0


def one_island(shore, name="island-0000"):
    return Island(shore.invitation, shore.harbour.address, HOST, name, shore.folder, lambda text: None)


def test_a_state_is_taken_whole_or_not_at_all(tmp_path):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    one, two = one_island(shore), one_island(shore, "island-0001")
    engine, other = one._engine, two._engine
    engine._judge.remember([Brought(1.0, True, 2.0)], refused={})
    engine.begin_anew()
    before, plain, shared = other.digest, engine.plain(), engine.shared()
    for bad in ({"judge": {"norms": [3.0]}}, {"known": ["x"]}, {"leases": {**plain["leases"], "delivered": 1}}):
        with pytest.raises(ExchangeFailed, match="the state that b has of round 0 is damaged"):
            other.restore({**plain, **bad}, shared, "b")
    with pytest.raises(ExchangeFailed, match="damaged"):
        other.restore(plain, {**shared, "params": shared["params"] * 2})
    assert (other.digest, other.was_given) == (before, False)
    other.restore(plain, shared, "b")
    assert (other.digest, other.was_given) == (engine.digest, True)
    assert other._judge.to_parts() == engine._judge.to_parts() == {"norms": [2.0]}
    for island in (one, two):
        island.close(wait=False)


def test_whoever_begins_anew_uses_no_epoch_that_may_have_been_used(tmp_path):
    island = one_island(Shore(tmp_path / "run", toy(1), Elastic(processes=1)))
    island._engine.generation = Generation(3, 7)
    island._engine.begin_anew()
    assert island._engine.generation == Generation(3, 7 + (1 << 20))
    island.close(wait=False)


@pytest.mark.parametrize(("theirs", "told"), [(1, [1, 2, 3]), (4, [4])])
def test_a_log_that_one_who_was_behind_has_taken_is_taken_back_and_one_that_tells_more_is_not(tmp_path, theirs, told):
    shore = Shore(tmp_path / "run", toy(1), Elastic(processes=1))
    island = one_island(shore)
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


def attended(number):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=number, virtual_time_s=None, wall_time_s=1.0, **who)


@pytest.mark.parametrize("read", [True, False])
def test_what_is_being_read_keeps_its_bits_and_what_is_not_is_used_again(tmp_path, monkeypatch, read):
    published = []

    def cargo(header, tensors):
        published.append((dict(tensors), {name: tensor.clone() for name, tensor in tensors.items()}))
        return Cargo(header, tensors)

    monkeypatch.setattr(islands, "Cargo", cargo)
    monkeypatch.setattr(Pier, "busy", property(lambda pier: read))
    shore = Shore(tmp_path / "run", toy(1, "train.steps=16"), Elastic(processes=1))
    shore.finish(shore.start("island-0000"))
    assert all(torch.equal(now[name], then[name]) for now, then in published for name in then) == read


def test_whoever_was_refused_begins_with_fresh_moments_and_its_steps_count_nowhere(tmp_path, monkeypatch):
    made = Counter()

    def counted(run, workload, loss, number, *devices):
        made[number] += 1
        return replica_of(run, workload, loss, number, *devices)

    monkeypatch.setattr(islands, "replica_of", counted)
    spoil = Spoil(island="island-0001", round=2, how="nan")
    shore = Shore(tmp_path / "run", toy(2, "train.steps=16"), Elastic(processes=2), spoil)
    shore.finish(shore.start("island-0000", "island-0001"))
    assert [event.island for event in shore.events(Refused)] == [1]
    assert made == {0: 1, 1: 2}
    (finished,) = shore.events(RunFinished)
    assert finished.local_updates == 32


def test_a_newcomer_whose_state_is_old_when_it_has_it_is_waited_for_the_next_time(tmp_path, monkeypatch):
    run = toy(1, "train.steps=80", "cluster.step_time_s=[1.0]")
    shore, fetched = Shore(tmp_path / "run", run, Elastic(processes=1, pace=0.02)), []

    def slow(pier, limit_s):
        """By the time it is there others have committed again, unless they wait."""
        cargo, before = fetch(pier, limit_s), len(shore.said)
        fetched.append(cargo)
        with shore.something_said:
            shore.something_said.wait_for(lambda: any("committed" in text for text in shore.said[before + 1 :]), 1.0)
        return cargo

    monkeypatch.setattr(sources, "fetch", slow)
    first = shore.start("island-0000")
    shore.wait_until("committed round 1 ")
    shore.finish([*first, *shore.start("elsewhere", home=False)])
    assert len(fetched) <= 2, shore.said
    assert max(event.participating for event in shore.events(Attended)) == 2


class OtherBits:
    """An algorithm on a machine that rounds otherwise."""

    def __init__(self, algorithm):
        self._algorithm, self.steps_per_round = algorithm, algorithm.steps_per_round
        self.init = algorithm.init

    async def round(self, state, replica, peers):
        after = await self._algorithm.round(state, replica, peers)
        return replace(after, params=after.params * (1 + 2**-23))


@pytest.fixture
def rounding(monkeypatch):
    """Has one island round otherwise than the others."""

    def one(who):
        def engine(*, name, algorithm, **others):
            return ElasticEngine(name=name, algorithm=OtherBits(algorithm) if name == who else algorithm, **others)

        monkeypatch.setattr(islands, "ElasticEngine", engine)

    return one


def test_an_island_that_rounds_otherwise_works_with_the_others_and_is_given_their_state(tmp_path, rounding):
    rounding("island-0001")
    shore = Shore(tmp_path / "run", toy(2, "train.steps=12"), Elastic(processes=2))
    shore.finish(shore.start("island-0000", "island-0001"))
    assert any(text.startswith("island-0001 was left behind: it holds other bits") for text in shore.said)
    delivered = Counter(unit[0] for event in shore.events(Leased) for unit in event.delivered)
    assert delivered[1] >= 2, "its work counts, more than once"
    assert sum(delivered.values()) == 12
    assert exactly_once(shore.events(Leased), units=12) == []


def test_though_the_first_who_could_write_rounds_otherwise_every_commit_is_written_judged_and_saved_in_time(tmp_path, rounding):
    rounding("island-0000")
    shore = Shore(tmp_path / "run", toy(3, "train.steps=12"), Elastic(processes=3))
    shore.finish(shore.start(*map(island_name, range(3))))
    steps = [0, *(event.steps for event in shore.events(RoundFinished))]
    assert [event.round for event in shore.events(RoundFinished)] == list(range(1, len(steps)))
    passed = [number for number in range(1, len(steps)) if steps[number] // 4 > steps[number - 1] // 4]
    assert [event.round for event in shore.events(Saved)] == passed
    assert [event.round for event in shore.events(Evaluated)] == [0, *passed]


def test_what_was_passed_while_nobody_wrote_is_judged_by_whoever_writes_next(tmp_path):
    shore = Shore(tmp_path / "run", toy(1, "train.steps=28", "keep.evaluate_every=10"), Elastic(processes=1))
    shore.waits = {("island-0000", 3): "zz-elsewhere begins with", ("zz-elsewhere", 6): "island-0000 begins with round 6"}
    first, other = shore.start("island-0000", until=4), shore.start("zz-elsewhere", home=False)
    for thread in first:
        thread.join(60.0)
    shore.wait_until("committed round 6 ")
    shore.finish([*shore.start("island-0000"), *other])
    again = next(event.round for event in shore.events(IslandJoined) if event.island == 0 and event.round)
    assert again in [event.round for event in shore.events(Evaluated)], "the tenth step was passed before"


def test_others_find_the_state_before_the_one_who_writes_has_judged_it(tmp_path, monkeypatch):
    shore, seen = Shore(tmp_path / "run", toy(1), Elastic(processes=1)), []
    judge = Desk._judge

    def judged(desk, engine, log):
        seen.append(engine.standing["exchanging"])
        judge(desk, engine, log)

    monkeypatch.setattr(Desk, "_judge", judged)
    shore.finish(shore.start("island-0000"))
    assert seen == [False] * 3
