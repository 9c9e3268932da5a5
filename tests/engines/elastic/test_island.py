"""Islands that come and go: who takes part, with which state, and what becomes of their work."""

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.core.events import (
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
)
from atoll.core.tensor_file import load_tree
from atoll.data.text import Text
from atoll.engines.build import replica_of
from atoll.engines.driver import run as simulate
from atoll.engines.elastic import island as islands
from atoll.engines.elastic import recovery
from atoll.engines.elastic.launch import refuse_inelastic
from atoll.engines.elastic.recovery import Sources
from atoll.engines.elastic.registry import Board
from atoll.engines.elastic.snapshot_server import Cargo, Pier, fetch
from atoll.engines.elastic.spec import Elastic, Invitation
from atoll.engines.elastic.state_version import Generation
from atoll.engines.elastic.supervisor import island_name
from atoll.engines.elastic.update_validation import Brought
from atoll.engines.processes.spec import placed
from atoll.models.gpt import GPT
from atoll.telemetry import read_events
from atoll.testing.chaos import UpdateFault, exactly_once_violations


@pytest.mark.parametrize(("size", "weighting"), [(1, "uniform"), (2, "uniform"), (3, "uniform"), (3, "examples")])
def test_with_nobody_missing_weights_losses_tokens_and_bytes_are_the_simulators(tmp_path, shore_of, toy, size, weighting):
    run = toy(size, f"algorithm.weighting={weighting}")
    shore = shore_of(run, Elastic(processes=size))
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


@pytest.mark.parametrize("kind", ["corrupt_delta", "corrupt_mean", "corrupt_weight"])
def test_whatever_message_is_damaged_it_is_tried_again_and_weights_are_the_simulators(tmp_path, shore_of, toy, kind):
    run, fault = toy(2, "algorithm.weighting=examples"), UpdateFault(island="island-0000", round=1, kind=kind)
    shore = shore_of(run, Elastic(processes=2), fault)
    shore.finish(shore.start("island-0000", "island-0001"))
    assert load_tree(shore.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim").params)
    assert {event.round: event.attempts for event in shore.events(Attended)}[2] > 1


def test_every_commit_says_who_was_there_and_what_became_of_the_data(shore_of, toy):
    shore = shore_of(toy(2), Elastic(processes=2))
    shore.finish(shore.start("island-0000", "island-0001"))
    attended = shore.events(Attended)
    assert [(e.round, e.known, e.participating, e.attempts) for e in attended] == [(n, 2, 2, 1) for n in (1, 2, 3, 4)]
    assert all(event.alive == 2 for event in attended)
    assert [event.epoch for event in attended] == sorted(event.epoch for event in attended)
    assert len({event.digest for event in attended}) == 4
    delivered = [unit for event in shore.events(Leased) for unit in event.delivered]
    assert delivered == [[island, island, 2 * n, 2] for n in range(4) for island in (0, 1)]
    assert [event.island for event in shore.events(IslandJoined)] == [0, 1]


def test_whoever_comes_later_is_given_the_state_listens_first_and_then_shares_the_work(shore_of, toy):
    shore = shore_of(toy(1, "train.steps=24"), Elastic(processes=1, pace=1e-4))
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


def test_a_run_that_everybody_left_goes_on_from_its_newest_checkpoint(shore_of, toy):
    run = toy(2, "train.steps=16")
    shore = shore_of(run, Elastic(processes=2))
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
def test_while_an_island_was_set_up_it_was_seen_whether_anybody_has_the_state(shore_of, toy, monkeypatch, has_state):
    shore = shore_of(toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in shore.start("island-0000", until=5):
        thread.join(60.0)
    if has_state is not None:  # so it signed last: it may be dead
        entry = {"pier": "127.0.0.1:1", "generation": 7 if has_state else -1, "exchanging": False, "beat": 1}
        Board(shore.harbour.address).sign("island-0001", entry)
    island, long_s = shore.one_island(), 1000.0

    def first():
        return island._sources.first(island._engine, island._roll.quiet_s(lambda entry: entry["generation"] >= 0))

    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(Waits):  # it has only just come
        first()
    island._roll.reached_s -= long_s
    if has_state:
        with pytest.raises(Waits):
            first()
        island._roll._seen["island-0001"] = (1, time.monotonic() - long_s)
    assert first() == "round 4, from its checkpoint"
    island.close(wait=False)


def test_of_two_that_come_back_at_once_the_later_fetches_what_the_other_has_just_restored(shore_of, toy, monkeypatch):
    shore = shore_of(toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in shore.start("island-0000", until=5):
        thread.join(60.0)
    first, second = shore.one_island(), shore.one_island("island-0001")
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


def test_an_island_that_comes_alone_to_a_run_without_a_checkpoint_does_not_begin_anew(shore_of, toy):
    shore = shore_of(toy(1, "keep.save_every=1000"), Elastic(processes=1))
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
        ({"silent_s": 0.2}, "at least 0.5"),
    ],
)
def test_a_place_that_cannot_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Elastic(**settings)


def test_an_invitation_says_it_all(toy):
    invitation = Invitation(toy(3), Elastic(processes=3, pace=0.5), "127.0.0.1:99")
    assert Invitation.from_text(invitation.to_text()) == invitation


def test_an_island_that_was_given_the_state_listens_first_though_it_had_work_before(shore_of, toy):
    shore = shore_of(toy(2, "train.steps=16"), Elastic(processes=2))
    for thread in shore.start("island-0001", "island-0000", until=3):
        thread.join(60.0)
    island = shore.one_island()
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


def test_who_joins_with_other_data_is_refused(tmp_path, shore_of, toy):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = Text(corpus=f"files:{text}", tokenizer="bytes", seq_len=16, eval_batches=2)
    run = replace(toy(1), recipe="text", model=GPT(layers=1, width=8, heads=1, head_size=8), data=data)
    shore = shore_of(placed(run, 1), Elastic(processes=1))
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


def test_a_unit_that_gives_nothing_but_nonsense_is_dropped_and_its_tokens_are_counted_nowhere(shore_of, toy):
    update_faults = [UpdateFault(island="island-0000", round=number, kind="nan") for number in (1, 2, 3)]
    shore = shore_of(toy(1), Elastic(processes=1), *update_faults)
    shore.finish(shore.start("island-0000"))
    assert [event.round for event in shore.events(Refused)] == [2, 3, 4]
    assert [event.returned for event in shore.events(Leased)] == [[], [[0, 0, 2, 2]], [[0, 0, 2, 2]], [], [], []]
    assert [event.dropped for event in shore.events(Leased)] == [[], [], [], [[0, 0, 2, 2]], [], []]
    (finished,) = shore.events(RunFinished)
    delivered = sum(len(event.delivered) for event in shore.events(Leased))
    assert (delivered, finished.tokens) == (3, 3 * 2 * 8)


def test_a_state_that_is_about_to_be_followed_by_another_is_not_fetched(shore_of, toy):
    shore = shore_of(toy(1), Elastic(processes=1))
    donor, newcomer = shore.one_island("a"), shore.one_island("b")
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


def test_islands_begin_with_those_who_answer_and_not_with_all_who_have_signed(shore_of, toy):
    shore = shore_of(toy(2), Elastic(processes=2))
    island = shore.one_island()
    Board(shore.harbour.address).sign("island-0001", {**island._entry(), "pier": "127.0.0.1:1", "doing": "ready", "beat": 1})
    island._doing = "ready"
    island._roll.look()
    assert island._roll.alive().keys() == {"island-0000", "island-0001"}
    assert island._here(2).keys() == {"island-0000"}
    island.close(wait=False)


def test_islands_that_begin_together_have_one_clock(shore_of, toy):
    shore = shore_of(toy(2), Elastic(processes=2))
    shore.finish([*shore.start("island-0000"), *shore.start("island-0001", clock_s=1000.0)])
    assert {event.island for event in shore.events(Computed)} == {0, 1}
    assert min(event.start_s for event in shore.events(Computed)) >= 1000.0


def test_a_state_is_taken_whole_or_not_at_all(shore_of, toy):
    shore = shore_of(toy(1), Elastic(processes=1))
    one, two = shore.one_island(), shore.one_island("island-0001")
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


def test_whoever_begins_anew_uses_no_epoch_that_may_have_been_used(shore_of, toy):
    island = shore_of(toy(1), Elastic(processes=1)).one_island()
    island._engine.generation = Generation(3, 7)
    island._engine.begin_anew()
    assert island._engine.generation == Generation(3, 7 + (1 << 20))
    island.close(wait=False)


@pytest.mark.parametrize("read", [True, False])
def test_what_is_being_read_keeps_its_bits_and_what_is_not_is_used_again(shore_of, toy, monkeypatch, read):
    published = []

    def cargo(header, tensors):
        published.append((dict(tensors), {name: tensor.clone() for name, tensor in tensors.items()}))
        return Cargo(header, tensors)

    monkeypatch.setattr(islands, "Cargo", cargo)
    monkeypatch.setattr(Pier, "busy", property(lambda pier: read))
    shore = shore_of(toy(1, "train.steps=16"), Elastic(processes=1))
    shore.finish(shore.start("island-0000"))
    assert all(torch.equal(now[name], then[name]) for now, then in published for name in then) == read


def test_whoever_was_refused_begins_with_fresh_moments_and_its_steps_count_nowhere(shore_of, toy, monkeypatch):
    made = Counter()

    def counted(run, workload, loss, number, *devices):
        made[number] += 1
        return replica_of(run, workload, loss, number, *devices)

    monkeypatch.setattr(islands, "replica_of", counted)
    fault = UpdateFault(island="island-0001", round=2, kind="nan")
    shore = shore_of(toy(2, "train.steps=16"), Elastic(processes=2), fault)
    shore.finish(shore.start("island-0000", "island-0001"))
    assert [event.island for event in shore.events(Refused)] == [1]
    assert made == {0: 1, 1: 2}
    (finished,) = shore.events(RunFinished)
    assert finished.local_updates == 32


def test_a_newcomer_whose_state_is_old_when_it_has_it_is_waited_for_the_next_time(shore_of, toy, monkeypatch):
    run = toy(1, "train.steps=80", "cluster.step_time_s=[1.0]")
    shore, fetched = shore_of(run, Elastic(processes=1, pace=0.02)), []

    def slow(pier, limit_s):
        """By the time it is there others have committed again, unless they wait."""
        cargo, before = fetch(pier, limit_s), len(shore.said)
        fetched.append(cargo)
        with shore.something_said:
            shore.something_said.wait_for(lambda: any("committed" in text for text in shore.said[before + 1 :]), 1.0)
        return cargo

    monkeypatch.setattr(recovery, "fetch", slow)
    first = shore.start("island-0000")
    shore.wait_until("committed round 1 ")
    shore.finish([*first, *shore.start("elsewhere", home=False)])
    assert len(fetched) <= 2, shore.said
    assert max(event.participating for event in shore.events(Attended)) == 2


def test_an_island_that_rounds_otherwise_works_with_the_others_and_is_given_their_state(shore_of, toy, rounding):
    rounding("island-0001")
    shore = shore_of(toy(2, "train.steps=12"), Elastic(processes=2))
    shore.finish(shore.start("island-0000", "island-0001"))
    assert any(text.startswith("island-0001 was left behind: it holds other bits") for text in shore.said)
    delivered = Counter(unit[0] for event in shore.events(Leased) for unit in event.delivered)
    assert delivered[1] >= 2, "its work counts, more than once"
    assert sum(delivered.values()) == 12
    assert exactly_once_violations(shore.events(Leased), units=12) == []
