"""Islands of threaded runs: which take part, with which state, and what becomes of their work."""

import json
import shutil
import time
import uuid
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
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
from atoll.core.serialization import load_tree
from atoll.core.verified_files import sealed, unsealed
from atoll.data.text_dataset import Text
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic import island as island_module, recovery
from atoll.engines.elastic.aggregation import DeltaSummary, Disagreement
from atoll.engines.elastic.commit import CommitProtocol
from atoll.engines.elastic.gpu_claims import claim_gpus
from atoll.engines.elastic.island import FolderLost, IslandOutput, IslandProcess
from atoll.engines.elastic.launch import start
from atoll.engines.elastic.recovery import Recovery
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, Snapshot, SnapshotServer, fetch_snapshot
from atoll.engines.elastic.spec import Elastic, JoinInfo, island_name
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.run_lifecycle import RunRequest, run as simulate
from atoll.engines.training_setup import replica_of
from atoll.models.gpt import GPT
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.faults import UpdateFault
from atoll.testing.chaos.reports import exactly_once_violations
from atoll.testing.simulated_runs import Regression, RegressionBatches


@pytest.mark.parametrize(("size", "weighting"), [(1, "uniform"), (2, "uniform"), (3, "uniform"), (3, "examples")])
def test_without_failures_weights_losses_tokens_and_bytes_equal_the_simulators(tmp_path, threaded, toy, size, weighting):
    run = toy(size, f"algorithm.weighting={weighting}")
    live = threaded(run, Elastic(processes=size))
    live.finish(live.start(*map(island_name, range(size))))
    expected = simulate(run, out=tmp_path / "sim")
    assert load_tree(live.folder / "final.safetensors").equal(expected.params)
    (finished,) = live.events(RunFinished)
    figures = expected.summary
    assert (finished.val_loss, finished.tokens, finished.rounds) == (figures.val_loss, figures.tokens, figures.rounds)
    assert finished.sent_bytes_per_island == figures.sent_bytes_per_island
    (simulated,) = [e for e in read_events(expected.folder / "events.jsonl") if isinstance(e, RunFinished)]
    assert (finished.digest, finished.local_updates) == (simulated.digest, simulated.local_updates)
    for kind in (Evaluated, Exchanged, Compared, RoundFinished):
        count = sum(isinstance(event, kind) for event in read_events(expected.folder / "events.jsonl"))
        assert len(live.events(kind)) == count, kind


def test_islands_train_a_users_workload_with_the_simulators_weights(tmp_path, threaded, toy):
    run = toy(2, "train.warm_start_steps=0")
    live, workload = threaded(run, Elastic(processes=2)), Regression(RegressionBatches(num_shards=2), hidden=3)
    live.workload = workload
    live.finish(live.start("island-0000", "island-0001"))
    assert load_tree(live.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim", workload=workload).params)


@pytest.mark.parametrize("kind", ["corrupt_delta", "corrupt_mean", "corrupt_weight"])
def test_after_a_damaged_message_the_commit_is_repeated_and_weights_equal_the_simulators(tmp_path, threaded, toy, kind):
    run, fault = toy(2, "algorithm.weighting=examples"), UpdateFault(island="island-0000", round=1, kind=kind)
    live = threaded(run, Elastic(processes=2), fault)
    live.finish(live.start("island-0000", "island-0001"))
    assert load_tree(live.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim").params)
    assert {event.round: event.attempts for event in live.events(Attended)}[2] > 1


def test_every_commit_logs_its_members_and_the_settled_leases(threaded, toy):
    live = threaded(toy(2), Elastic(processes=2))
    live.finish(live.start("island-0000", "island-0001"))
    attended = live.events(Attended)
    assert [(e.round, e.known, e.participating, e.attempts) for e in attended] == [(n, 2, 2, 1) for n in (1, 2, 3, 4)]
    assert all(event.alive == 2 for event in attended)
    assert [event.epoch for event in attended] == sorted(event.epoch for event in attended)
    assert len({event.digest for event in attended}) == 4
    delivered = [unit for event in live.events(Leased) for unit in event.delivered]
    assert delivered == [[island, island, 2 * n, 2] for n in range(4) for island in (0, 1)]
    assert [event.island for event in live.events(IslandJoined)] == [0, 1]


def test_a_joiner_fetches_the_state_observes_one_round_and_then_shares_the_work(threaded, toy):
    live = threaded(toy(1, "train.steps=24"), Elastic(processes=1, step_delay=1e-4))
    live.waits["island-0000", 3] = "elsewhere begins with"
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    later = live.start("elsewhere", has_folder=False)
    live.finish([*first, *later])
    joined = {event.island: event.round for event in live.events(IslandJoined)}
    attended = {event.round: event for event in live.events(Attended)}
    assert joined.keys() == {0, 1}, live.logged
    assert attended[joined[1]].participating == 1
    assert max(event.participating for event in attended.values()) == 2
    units = Counter(tuple(unit[1:]) for event in live.events(Leased) for unit in event.delivered)
    assert len(units) == 12
    assert set(units.values()) == {1}
    assert len(attended) < 12, "two that share the work need fewer rounds"
    assert any("fetched from island-0000" in text for text in live.logged)
    assert [(event.donor, event.sent_bytes > 0) for event in live.events(IslandJoined)] == [(None, False), (0, True)]


def test_a_run_whose_islands_all_died_continues_from_its_newest_checkpoint(threaded, toy):
    run = toy(2, "train.steps=16")
    live = threaded(run, Elastic(processes=2))
    for thread in live.start("island-0000", "island-0001", dies_after=5):
        thread.join(60.0)
    assert not live.errors
    assert [event.round for event in live.events(RoundFinished)] == [1, 2, 3, 4]
    live.finish(live.start("island-0000", "island-0001"))
    assert any(text.endswith("begins with round 4, from its checkpoint") for text in live.logged), "one may fetch it from the other"
    assert [event.round for event in live.events(RoundFinished)] == list(range(1, 9))
    units = Counter(tuple(unit[1:]) for event in live.events(Leased) for unit in event.delivered)
    assert len(units) == 16
    assert set(units.values()) == {1}


class Waits(Exception):
    """An island would sleep."""


@pytest.mark.parametrize("has_state", [None, False, True])
def test_the_wait_before_a_checkpoint_is_restored_includes_the_time_of_setting_up(threaded, toy, monkeypatch, has_state):
    live = threaded(toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in live.start("island-0000", dies_after=5):
        thread.join(60.0)
    if has_state is not None:  # its last entry: it may be dead
        version = StateVersion(0, 7) if has_state else NO_VERSION
        status = IslandStatus("island-0001", True, "127.0.0.1:1", IslandPhase.JOINED, version, heartbeat=1)
        RegistryClient(live.rendezvous.address).register(status)
    island, long_s = live.one_island(), 1000.0

    def first():
        return island._recovery.initialize(island._engine, island._registry.stateless_since_s())

    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(Waits):  # it has only just registered
        first()
    island._registry.reachable_since_s -= long_s
    if has_state:
        with pytest.raises(Waits):
            first()
        island._registry._detector._heard["island-0001"] = (1, time.monotonic() - long_s)
    assert first() == "round 4, from its checkpoint"
    island.close(wait=False)


def test_of_two_islands_that_return_at_once_the_later_fetches_the_state_that_the_other_restored(threaded, toy, monkeypatch):
    live = threaded(toy(1, "train.steps=16"), Elastic(processes=1))
    for thread in live.start("island-0000", dies_after=5):
        thread.join(60.0)
    first, second = live.one_island(), live.one_island("island-0001")
    restore_newer = Recovery._restore_newer

    def overtaken(where_from, engine):
        if engine is second._engine:
            first._recovery.restore_checkpoint(first._engine, first._leader_log.checkpoints.newest())
            first._publish()
            first.status.phase = IslandPhase.JOINED
        return restore_newer(where_from, engine)

    monkeypatch.setattr(Recovery, "_restore_newer", overtaken)
    assert second._recovery.initialize(second._engine).startswith("round 4, fetched from island-0000")
    for island in (first, second):
        island.close(wait=False)


def test_a_begun_run_without_a_checkpoint_is_not_started_from_random_weights(threaded, toy):
    live = threaded(toy(1, "keep.save_every=1000"), Elastic(processes=1))
    for thread in live.start("island-0000", dies_after=3):
        thread.join(60.0)
    for thread in live.start("island-0000"):
        thread.join(60.0)
    (error,) = live.errors
    assert isinstance(error, CheckpointError)
    assert "will not start from random weights again by itself" in str(error)


@pytest.mark.parametrize(
    ("recipe", "settings", "says"),
    [
        ("demo-acco", (), "each island holds a slice"),
        ("demo-eager", (), "a commit is one mean of deltas"),
        ("demo-diloco", ("cluster.devices_per_island=2",), "an island is one process there"),
        ("demo-diloco", ("algorithm.missed=agreed",), "Use global"),
        ("demo-async", (), "has a hub and workers"),
    ],
)
def test_algorithms_that_cannot_be_elastic_are_refused(recipe, settings, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        start(RunRequest(run=override(recipes.ALL[recipe](), list(settings)), spec=Elastic(processes=2), out=tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "at least 1"),
        ({"step_delay": -1.0}, "0 or more"),
        ({"quorum_timeout_s": 0.0}, "at least 0.001"),
        ({"max_delta_ratio": 1.0}, "more than 1"),
        ({"heartbeat_timeout_s": 0.2}, "at least 0.5"),
    ],
)
def test_impossible_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Elastic(**settings)


def test_join_info_survives_its_text(toy):
    join_info = JoinInfo(toy(3), Elastic(processes=3, step_delay=0.5), "127.0.0.1:99")
    assert JoinInfo.from_text(join_info.to_text()) == join_info


def test_join_info_of_another_protocol_is_refused_by_name(toy):
    text = JoinInfo(toy(3), Elastic(processes=3), "127.0.0.1:99").to_text()
    early, ours = {**unsealed(text), "atoll": version("atoll")}, version("atoll")
    with pytest.raises(ConfigError, match=rf"run is of atoll {ours}, and this is atoll {ours}, protocol 3\. All islands"):
        JoinInfo.from_text(sealed(early))


def test_an_island_that_fetched_the_state_observes_though_it_holds_a_lease(threaded, toy):
    live = threaded(toy(2, "train.steps=16"), Elastic(processes=2))
    for thread in live.start("island-0001", "island-0000", dies_after=3):
        thread.join(60.0)
    island = live.one_island()
    engine = island._engine
    engine.leases.lease(["island-0000", "island-0001"])
    engine._digest = engine._compute_digest()
    plain, shared = engine.metadata(), engine.shared()
    assert not engine._observes
    engine.restore(plain, shared)
    assert engine.leases.active["island-0000"] is not None
    assert engine._observes, "the others would wait for it"
    engine.resume_alone()
    assert not engine._observes
    island.close(wait=False)


def test_a_joiner_with_other_data_is_refused(tmp_path, threaded, toy):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = Text(corpus=f"files:{text}", tokenizer="bytes", seq_len=16, eval_batches=2)
    run = replace(toy(1), recipe="text", model=GPT(layers=1, width=8, heads=1, head_size=8), data=data)
    live = threaded(Elastic(processes=1).fitted(run), Elastic(processes=1))
    live.waits["island-0000", 1] = "elsewhere ended"
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    text.write_text("0123456789 is another text on the other machine " * 200)
    live.start("elsewhere", has_folder=False)
    live.wait_until("elsewhere ended: the data of this island")
    (error,) = live.errors
    assert isinstance(error, ConfigError)
    live.errors.clear()
    live.finish(first)


def test_the_tokens_of_an_undeliverable_unit_are_not_counted(threaded, toy):
    update_faults = [UpdateFault(island="island-0000", round=number, kind="nan") for number in (1, 2, 3)]
    live = threaded(toy(1), Elastic(processes=1), *update_faults)
    live.finish(live.start("island-0000"))
    assert [event.round for event in live.events(Refused)] == [2, 3, 4]
    assert [event.returned for event in live.events(Leased)] == [[], [[0, 0, 2, 2]], [[0, 0, 2, 2]], [], [], []]
    assert [event.dropped for event in live.events(Leased)] == [[], [], [], [[0, 0, 2, 2]], [], []]
    (finished,) = live.events(RunFinished)
    delivered = sum(len(event.delivered) for event in live.events(Leased))
    assert (delivered, finished.tokens) == (3, 3 * 2 * 8)


class FalseWeights:
    """An algorithm whose first deltas have these weights."""

    def __init__(self, algorithm, weights):
        self._algorithm, self._weights = algorithm, weights
        self.steps_per_round, self.init = algorithm.steps_per_round, algorithm.init

    async def round(self, state, replica, peers):
        def mean(tree, weight, **how):
            return peers.mean(tree, self._weights.pop(0) if self._weights else weight, **how)

        return await self._algorithm.round(state, replica, SimpleNamespace(work=peers.work, catch_up=peers.catch_up, mean=mean))


def test_an_island_of_impossible_weights_is_refused_and_the_others_commit(threaded, toy):
    false = [float("nan"), 1e300, -8.0]
    live = threaded(toy(3), Elastic(processes=3))
    live.interpose = lambda algorithm, membership, status, log: (
        FalseWeights(algorithm, false) if status.name == "island-0002" else algorithm,
        membership,
    )
    live.finish(live.start(*map(island_name, range(3))))
    assert [event.island for event in live.events(Refused)] == [2, 2, 2]
    assert [event.attempts for event in live.events(Attended)] == [1] * 5
    units = Counter(tuple(unit[1:]) for event in live.events(Leased) for unit in event.delivered)
    assert (len(units), {*units.values()}) == (12, {1})


def test_a_state_is_not_fetched_while_a_newer_one_is_about_to_follow(threaded, toy):
    live = threaded(toy(1), Elastic(processes=1))
    donor, newcomer = live.one_island("a"), live.one_island("b")
    donor._publish()
    donor.status.phase = IslandPhase.JOINED
    donor._registry.refresh()
    newcomer._registry.refresh()
    donor.status.exchanging = True
    assert newcomer._recovery._fetch_newest(newcomer._engine, newcomer._engine.version) == ""
    donor.status.exchanging = False
    assert newcomer._recovery._fetch_newest(newcomer._engine, newcomer._engine.version).startswith("round 0, fetched from a")
    for island in (donor, newcomer):
        island.close(wait=False)


def mutated(value, others=(None, [], {}, "x", -1, 2.5)):
    """Copies of JSON data, in each of which one part is missing or replaced by another value."""
    yield from (other for other in others if other != value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from ({**value, key: changed} for changed in mutated(item, others))
    elif isinstance(value, list) and value:
        yield value[1:]
        yield from ([changed, *value[1:]] for changed in mutated(value[0], others))


def test_a_fetched_header_with_any_part_changed_is_used_or_leaves_the_island_as_it_was(threaded, toy, monkeypatch):
    live = threaded(toy(1), Elastic(processes=1))
    donor, newcomer = live.one_island("a"), live.one_island("b")
    donor._engine._protocol.peers = {"c": "127.0.0.1:1"}
    donor._publish()
    engine, intact, sent = newcomer._engine, donor._server._snapshot, []
    monkeypatch.setattr(recovery, "fetch_snapshot", lambda *_: sent[-1])

    def fetch(header):
        sent.append(replace(intact, header=header))
        return newcomer._recovery._fetch(engine, donor.status, StateVersion(0, 0))

    def held():
        return {**engine.metadata(), "wall_time_s": 0.0}

    header, refused = json.loads(json.dumps(intact.header)), 0
    origin = {"origin": header.pop("origin")}  # another one ends the island
    deep = json.loads('{"kind": "list", "items": [' * 450 + "]}" * 450)  # JSON can be nested more deeply than it can be unpacked
    for changed in (*mutated(header), header | {"moments": deep}):
        before = held()
        if not fetch(origin | changed if isinstance(changed, dict) else changed):
            refused += 1
            assert held() == before
        else:
            assert fetch(origin | header)
    assert refused > 200
    assert fetch(origin | header)
    for island in (donor, newcomer):
        island.close(wait=False)


def test_the_run_begins_with_registered_islands_that_answer(threaded, toy):
    live = threaded(toy(2), Elastic(processes=2))
    island = live.one_island()
    RegistryClient(live.rendezvous.address).register(IslandStatus("island-0001", True, "127.0.0.1:1", IslandPhase.JOINED))
    island.status.phase = IslandPhase.JOINED
    island._registry.refresh()
    assert island._registry.alive().keys() == {"island-0000", "island-0001"}
    assert island._ready_islands(2).keys() == {"island-0000"}
    island.close(wait=False)


def test_islands_that_begin_together_have_one_clock(threaded, toy):
    live = threaded(toy(2), Elastic(processes=2))
    live.finish([*live.start("island-0000"), *live.start("island-0001", clock_s=1000.0)])
    assert {event.island for event in live.events(Computed)} == {0, 1}
    assert min(event.start_s for event in live.events(Computed)) >= 1000.0


def test_a_damaged_state_is_refused_and_changes_nothing(threaded, toy):
    live = threaded(toy(1), Elastic(processes=1))
    one, two = live.one_island(), live.one_island("island-0001")
    engine, other = one._engine, two._engine
    engine._validator.record([DeltaSummary(1.0, True, 2.0)], rejected={})
    engine.resume_alone()
    before, plain, shared = other.digest, engine.metadata(), engine.shared()
    for bad in ({"validator": {"norms": [3.0]}}, {"known": ["x"]}, {"leases": {**plain["leases"], "delivered": 1}}):
        with pytest.raises(ExchangeFailed, match="the state of round 0 from b is damaged"):
            other.restore({**plain, **bad}, shared, "b")
    with pytest.raises(ExchangeFailed, match="damaged"):
        other.restore(plain, {**shared, "params": shared["params"] * 2})
    assert (other.digest, two.status.confirmed) == (before, True)
    other.restore(plain, shared, "b")
    assert (other.digest, two.status.confirmed) == (engine.digest, False)
    assert other._validator.to_parts() == engine._validator.to_parts() == {"norms": [2.0]}
    for island in (one, two):
        island.close(wait=False)


def test_an_island_that_resumes_alone_skips_epochs_that_may_have_been_used(threaded, toy):
    island = threaded(toy(1), Elastic(processes=1)).one_island()
    island._engine.version = StateVersion(3, 7)
    island._engine.resume_alone()
    assert island._engine.version == StateVersion(3, 7 + (1 << 20))
    island.close(wait=False)


@pytest.mark.parametrize("read", [True, False])
def test_a_snapshot_that_is_being_read_keeps_its_buffers(threaded, toy, monkeypatch, read):
    published = []

    def snapshot(header, tensors):
        published.append((dict(tensors), {name: tensor.clone() for name, tensor in tensors.items()}))
        return Snapshot(header, tensors)

    monkeypatch.setattr(island_module, "Snapshot", snapshot)
    monkeypatch.setattr(SnapshotServer, "has_readers", property(lambda server: read))
    live = threaded(toy(1, "train.steps=16"), Elastic(processes=1))
    live.finish(live.start("island-0000"))
    assert all(torch.equal(now[name], then[name]) for now, then in published for name in then) == read


def test_an_island_whose_delta_was_rejected_gets_a_fresh_optimizer_and_its_steps_do_not_count(threaded, toy, monkeypatch):
    made = Counter()

    def counted(run, workload, loss, number, *devices):
        made[number] += 1
        return replica_of(run, workload, loss, number, *devices)

    monkeypatch.setattr(island_module, "replica_of", counted)
    fault = UpdateFault(island="island-0001", round=2, kind="nan")
    live = threaded(toy(2, "train.steps=16"), Elastic(processes=2), fault)
    live.finish(live.start("island-0000", "island-0001"))
    assert [event.island for event in live.events(Refused)] == [1]
    assert made == {0: 1, 1: 2}
    (finished,) = live.events(RunFinished)
    assert finished.local_updates == 32


def test_a_joiner_whose_snapshot_was_overtaken_is_waited_for_at_the_second_fetch(threaded, toy, monkeypatch):
    run = toy(1, "train.steps=80", "cluster.step_time_s=[1.0]")
    live, fetched = threaded(run, Elastic(processes=1, step_delay=0.02)), []

    def slow(*where):
        """While it is fetched the quorum commits again, unless it waits."""
        snapshot, before = fetch_snapshot(*where), len(live.logged)
        fetched.append(snapshot)
        with live.something_logged:
            live.something_logged.wait_for(lambda: any("committed" in text for text in live.logged[before + 1 :]), 1.0)
        return snapshot

    monkeypatch.setattr(recovery, "fetch_snapshot", slow)
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    live.finish([*first, *live.start("elsewhere", has_folder=False)])
    assert len(fetched) <= 2, live.logged
    assert max(event.participating for event in live.events(Attended)) == 2


def test_a_diverged_island_contributes_and_fetches_the_others_state(threaded, toy, diverging):
    diverging("island-0001")
    live = threaded(toy(2, "train.steps=12"), Elastic(processes=2))
    live.finish(live.start("island-0000", "island-0001"))
    assert any(text.startswith("island-0001 is behind: its bits differ") for text in live.logged)
    delivered = Counter(unit[0] for event in live.events(Leased) for unit in event.delivered)
    assert delivered[1] >= 2, "its work counts, more than once"
    assert sum(delivered.values()) == 12
    assert exactly_once_violations(live.events(Leased), units=12) == []


@pytest.fixture
def claimed():
    """Claims some of several GPUs that no other test knows."""
    names, claims = [uuid.uuid4().hex for _ in range(4)], []

    def claim(number, count=1, of=3):
        indices, held = claim_gpus(names[:of], number, count)
        claims.extend(held)
        return indices

    yield claim
    for one in claims:
        one.close()


def test_each_island_claims_the_gpu_of_its_number_or_a_free_one(claimed):
    assert [claimed(number) for number in (0, 1, 1)] == [[0], [1], [2]]


def test_when_all_gpus_are_claimed_they_are_shared(claimed):
    assert sorted(claimed(0) for _ in range(3)) == [[0], [1], [2]]
    assert claimed(4) == [1]


def test_a_gpu_is_free_again_when_its_claim_is_closed():
    names = [uuid.uuid4().hex for _ in range(2)]
    for _ in range(2):
        indices, (claim,) = claim_gpus(names, 0)
        assert indices == [0]
        claim.close()


def test_islands_of_several_gpus_claim_adjacent_ones(claimed):
    assert [claimed(number, 2, of=4) for number in (1, 0, 2)] == [[2, 3], [0, 1], [0, 1]]


def test_more_gpus_than_the_machine_has_are_refused(claimed):
    with pytest.raises(ConfigError, match=r"engine.devices=4: this machine has 3 GPUs"):
        claimed(0, 4)


@pytest.mark.parametrize("chosen", [True, False])
def test_an_island_without_the_folder_that_ends_with_the_newest_state_saves_it_where_it_can_be_resumed(
    tmp_path, monkeypatch, threaded, toy, chosen
):
    """In the folder of its user's choice, or in its working directory, whatever the recipe of the run that it fetched is called."""
    (tmp_path / "atoll-rescue-x").mkdir()
    for taken in ("rescue", "rescue-2") if chosen else ():  # by earlier rescues
        RunFolder.create(tmp_path / taken, toy(1), ["test"])
    monkeypatch.chdir(tmp_path)
    spec = Elastic(processes=1, quorum_timeout_s=1.0, rescue_dir=str(tmp_path / "rescue") if chosen else None)
    live = threaded(replace(toy(1, "train.steps=24"), recipe="x/../run/evil"), spec)
    live.waits["island-0000", 3] = "elsewhere begins with"
    first = live.start("island-0000", dies_after=6)
    live.wait_until("committed round 1 ")
    live.finish([*first, *live.start("elsewhere", has_folder=False)])
    last = max(int(text.split()[2]) for text in live.logged if text.startswith("committed round"))
    assert any(text.startswith(f"no island with the run's folder answers, so elsewhere saved round {last}") for text in live.logged)
    (rescue,) = tmp_path.glob("rescue-3" if chosen else "atoll-rescue-x-*")
    assert [event.round for event in read_events(rescue / "events.jsonl", [Attended])][-1] == last
    again = IslandProcess(live.join_info, live.network(), "island-0000", rescue, IslandOutput(live.log))
    assert again._recovery.initialize(again._engine) == f"round {last}, from its checkpoint"
    assert again._engine.leases.done
    again.close(wait=False)


def ends_with_the_last_state(live, **options):
    """The first machine dies, and the joiner `elsewhere` ends with a newer state. Returns its thread and that round."""
    live.waits["island-0000", 3] = "elsewhere begins with"
    first = live.start("island-0000", dies_after=6)
    live.wait_until("committed round 1 ")
    threads = live.start("elsewhere", has_folder=False, **options)
    live.finish(first, last=False)
    return threads


def test_a_joiner_with_a_copy_that_is_interrupted_saves_its_exact_state_in_the_copy(tmp_path, threaded, toy):
    """Between two saves, when the first machine is lost."""
    live = threaded(toy(1, "train.steps=24", "keep.save_every=1000"), Elastic(processes=1, quorum_timeout_s=1.0))
    copy = RunFolder.create(tmp_path / "copy", live.run, ["test"]).path
    joiner = ends_with_the_last_state(live, copy=copy, dies_after=9)
    live.finish(joiner)
    assert any(
        text.startswith(f"no island with the run's folder answers, so elsewhere saved round 9 in {copy}.") for text in live.logged
    )
    again = IslandProcess(live.join_info, live.network(), "island-0000", copy, IslandOutput(live.log))
    assert again._recovery.initialize(again._engine) == "round 9, from its checkpoint"
    assert [event.round for event in read_events(copy / "events.jsonl", [Attended])][-1] == 9
    again.close(wait=False)


def test_a_joiner_whose_disk_is_full_saves_its_state_when_there_is_room(small_disk, threaded, toy, monkeypatch):
    monkeypatch.setattr(island_module, "_RESCUE_RETRY_S", 0.01)
    rescue = small_disk.path / "rescue"
    live = threaded(toy(1, "train.steps=24"), Elastic(processes=1, quorum_timeout_s=1.0, rescue_dir=str(rescue)))
    small_disk.fill()
    joiner = ends_with_the_last_state(live)
    failed = "is not saved, and elsewhere tries again"
    while sum(failed in text for text in live.logged) < 3:
        assert joiner[0].is_alive(), live.logged[-3:]
        time.sleep(0.01)
    small_disk.free()
    live.finish(joiner)
    last = max(int(text.split()[2]) for text in live.logged if text.startswith("committed round"))
    assert [event.round for event in read_events(rescue / "events.jsonl", [Attended])][-1] == last
    assert [*(rescue / "checkpoints").glob(f"*{last}")]
    assert not any("is lost with this island" in text for text in live.logged)


def test_a_joiner_saves_nothing_while_an_island_with_the_folder_has_the_state(tmp_path, threaded, toy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    live = threaded(toy(1, "train.steps=16"), Elastic(processes=1))
    live.waits["island-0000", 3] = "elsewhere begins with"
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    live.finish([*first, *live.start("elsewhere", has_folder=False)])
    assert not list(tmp_path.glob("atoll-rescue*"))


@pytest.mark.parametrize("one_dies", [False, True])
def test_when_the_runs_folder_is_lost_islands_that_have_it_save_the_last_state_elsewhere(
    tmp_path, monkeypatch, threaded, toy, one_dies
):
    """An island that dies while another trains on saves nothing: two folders would go on as two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(island_module, "_LOST_S", 0.0)
    monkeypatch.setattr(island_module, "SILENT_S", 1.0)
    live = threaded(toy(2, "train.steps=24"), Elastic(processes=2, quorum_timeout_s=1.0))
    names = ["island-0000", "island-0001"]
    live.waits.update({(name, 3): "the disk is lost" for name in names})
    threads = [*live.start(names[0], dies_after=4 if one_dies else None), *live.start(names[1])]
    live.wait_until("committed round 3 ")
    shutil.rmtree(live.folder)
    live.log("the disk is lost")
    for thread in threads:
        thread.join(60.0)
    assert not live.folder.exists(), "it was not made anew"
    last = max(int(text.split()[2]) for text in live.logged if text.startswith("committed round"))
    saved = {str(error) for error in live.errors if isinstance(error, FolderLost)}
    rescues = [*tmp_path.glob("atoll-rescue-*")]
    assert len(rescues) == len(saved) >= 1
    shown = RegistryClient(live.rendezvous.address).statuses(names)
    assert saved == {status.waiting for status in shown.values()} - {""}, "which the supervisor shows"
    for rescue in rescues:
        assert any(
            text.startswith("the run's folder cannot be written, so island-000")
            and f" saved round {last} in {rescue}. " in text
            and text.endswith(f"Continue there with: atoll run --resume {rescue}")
            for text in saved
        )
        newest = Checkpoints(RunFolder.open(rescue).checkpoints, keep=1).newest()
        assert newest is not None
        assert newest.round == last
    live.rendezvous.close()


def test_an_evicted_island_stays_away_and_returns_with_a_new_place_and_the_newest_state(threaded, toy, monkeypatch):
    monkeypatch.setattr(island_module, "_EVICTED_S", 0.5)
    live = threaded(toy(2, "train.steps=40"), Elastic(processes=2, step_delay=1e-4))
    evicting = []

    def act(protocol, collectives, *others):
        """The link between the two fails four times from round 3 on."""
        if protocol.last_quorum.leader and len(collectives.names) == 2 and live.reached(3) and len(evicting) < 8:
            evicting.append(protocol)
            raise Disagreement("a bit has flipped", [name for name in collectives.names if name != protocol._status.name])
        return exchange(protocol, collectives, *others)

    exchange = CommitProtocol._exchange
    monkeypatch.setattr(CommitProtocol, "_exchange", act)
    live.finish(live.start("island-0000", "island-0001"))
    gone = [text for text in live.logged if "returns in 0 s at the earliest" in text]
    assert len(gone) == 1, live.logged
    (evicted,) = {text.split()[0] for text in gone}
    attended = live.events(Attended)
    assert {1, 2} <= {event.participating for event in attended}
    assert attended[-2].participating == 2, "it has returned; the last round may have one unit"
    assert exactly_once_violations(live.events(Leased), units=40) == []
    assert evicted in ("island-0000", "island-0001")
