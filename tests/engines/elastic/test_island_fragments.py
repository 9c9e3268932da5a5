"""Threaded runs of streaming and of codecs: each fragment is a commit, and every batch is in one of them."""

import re
import shutil
from dataclasses import replace

import pytest

from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming
from atoll.core.events import Attended, Exchanged, IslandJoined, Leased, Refused, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.serialization import load_tree
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic.error_buffers import ErrorBufferFiles
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.run_lifecycle import run as simulate
from atoll.optim.sgd import SGD
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Keep
from atoll.testing.chaos.faults import UpdateFault
from atoll.testing.chaos.reports import exactly_once_violations

FOUR_BITS = Streaming(inner_steps=4, fragments=2, overlap=1, codec="int4")
SEVERAL_FLIGHTS = Streaming(inner_steps=4, fragments=3, overlap=3, codec="int4")
TOP_K = DiLoCo(inner_steps=2, codec="topk", feedback=0.95, outer=SGD(lr=1.0))


def of(toy, size, algorithm, *settings):
    """The small run with this algorithm."""
    return Elastic(processes=size).fitted(replace(toy(size, *settings), algorithm=algorithm))


def batches_of(live):
    return sum(unit[3] for event in live.events(Leased) for unit in event.delivered)


def check_digests(live):
    """All islands that logged a commit of the event log logged its digest."""
    commits = [found for text in live.logged if (found := re.match(r"committed round (\d+) of epoch (\d+) as (\w+)", text))]
    expected = {(event.round, event.epoch): event.digest for event in live.events(Attended)}
    compared = [expected.get((int(one[1]), int(one[2])), one[3]) == one[3] for one in commits]
    assert len(compared) >= len(expected)
    assert all(compared)


def record_rounds(live, island, begun):
    """Append the State at the beginning of each of this island's rounds to `begun`."""
    inject = live.interpose

    def interpose(algorithm, membership, status, log):
        algorithm, membership = inject(algorithm, membership, status, log)
        round_ = algorithm.round

        async def recorded(state, replica, peers):
            if status.name == island:
                begun.append(state)
            return await round_(state, replica, peers)

        vars(algorithm)["round"] = recorded
        return algorithm, membership

    live.interpose = interpose


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [
        (3, DiLoCo(inner_steps=2, codec="bf16-stochastic")),
        (2, TOP_K),
        (1, Streaming(inner_steps=4, fragments=2, overlap=0)),
        (3, Streaming(inner_steps=4, fragments=2, overlap=1, mixing=0.5)),
        (2, Streaming(inner_steps=8, fragments=4, overlap=6)),
    ],
)
def test_without_failures_weights_equal_the_simulators(tmp_path, threaded, toy, size, algorithm):
    run = of(toy, size, algorithm, "train.steps=16", "train.fresh_optimizer=true", "train.peak_first=true")
    live = threaded(run, Elastic(processes=size))
    live.finish(live.start(*map(island_name, range(size))))
    expected = simulate(run, out=tmp_path / "sim")
    assert load_tree(live.folder / "final.safetensors").equal(expected.params)
    (finished,) = live.events(RunFinished)
    assert finished.sent_bytes_per_island == expected.summary.sent_bytes_per_island
    commits = run.train.steps // run.algorithm.steps_per_round * len(getattr(algorithm, "offsets", (0,)))
    assert [event.round for event in live.events(Attended)] == list(range(1, commits + 1))
    assert {event.background for event in live.events(Exchanged)} == {bool(getattr(algorithm, "overlap", 0))}
    assert not exactly_once_violations(live.events(Leased))


@pytest.mark.parametrize(
    ("algorithm", "dies_after"),
    [
        (FOUR_BITS, 1),
        (SEVERAL_FLIGHTS, 2),
        *(
            pytest.param(one, after, marks=pytest.mark.slow)
            for one, after in ((FOUR_BITS, 2), (FOUR_BITS, 3), (SEVERAL_FLIGHTS, 3))
        ),
    ],
)
def test_an_island_that_dies_after_any_fragment_returns_and_every_batch_is_in_exactly_one_commit(
    threaded, toy, algorithm, dies_after
):
    live, begun = threaded(of(toy, 2, algorithm, "train.steps=24"), Elastic(processes=2)), []
    record_rounds(live, "island-0001", begun)
    first, (second,) = live.start("island-0000"), live.start("island-0001", dies_after=dies_after)
    live.wait_until(f"committed round {dies_after + 2} ")
    second.join(60.0)
    died = len(begun)
    live.waits["island-0000", dies_after + 4] = "island-0001 begins with round"
    live.finish([*first, *live.start("island-0001")])
    assert not any(begun[died].unsent), "its error buffers are lost"
    assert all(begun[-1].unsent)
    assert [event.island for event in live.events(IslandJoined)] == [0, 1, 1]
    assert not exactly_once_violations(live.events(Leased))
    assert batches_of(live) == 2 * 24
    check_digests(live)


def test_a_commit_of_a_fragment_checks_its_values_alone(threaded, toy, monkeypatch):
    checked, is_finite = set(), Tree.is_finite

    def recorded(tree):
        checked.add(tree.numel)
        return is_finite(tree)

    monkeypatch.setattr(Tree, "is_finite", recorded)
    live = threaded(of(toy, 1, Streaming(inner_steps=4, fragments=2)), Elastic(processes=1))
    live.finish(live.start("island-0000"))
    whole = load_tree(live.folder / "final.safetensors").numel
    assert checked == {whole // 2, whole - whole // 2}


def test_commits_of_fragments_are_computed_in_one_buffer(threaded, toy):
    live, buffers = threaded(of(toy, 1, Streaming(inner_steps=4, fragments=2)), Elastic(processes=1)), set()
    inject = live.interpose

    def interpose(algorithm, membership, status, log):
        algorithm, membership = inject(algorithm, membership, status, log)
        agreed = algorithm.agreed

        def recorded(state, number, mean):
            state = agreed(state, number, mean)
            buffers.add(state.params.flat.data_ptr())
            return state

        vars(algorithm)["agreed"] = recorded
        return algorithm, membership

    live.interpose = interpose
    live.finish(live.start("island-0000"))
    assert len(live.events(Attended)) > 2
    assert len(buffers) == 1


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        (FOUR_BITS, "corrupt_delta"),
        pytest.param(TOP_K, "corrupt_delta", marks=pytest.mark.slow),
        (DiLoCo(inner_steps=2, codec="int4"), "corrupt_mean"),
        pytest.param(FOUR_BITS, "corrupt_mean", marks=pytest.mark.slow),
    ],
)
def test_an_aborted_attempt_neither_loses_nor_doubles_what_an_island_owes(tmp_path, threaded, toy, algorithm, kind):
    run = of(toy, 2, algorithm)
    live = threaded(run, Elastic(processes=2), UpdateFault(island="island-0000", round=1, kind=kind))
    live.finish(live.start("island-0000", "island-0001"))
    assert load_tree(live.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim").params)
    assert {event.round: event.attempts for event in live.events(Attended)}[2] > 1


def test_after_a_refused_delta_the_rest_of_the_unit_is_leased_again_and_the_island_owes_what_it_owed(threaded, toy):
    fault, begun = UpdateFault(island="island-0001", round=3, kind="nan"), []
    live = threaded(of(toy, 2, FOUR_BITS, "train.steps=16"), Elastic(processes=2), fault)
    record_rounds(live, "island-0001", begun)
    live.finish(live.start("island-0000", "island-0001"))
    (refused,) = live.events(Refused)
    assert (refused.island, refused.round) == (1, 4)
    assert {event.round: event.returned for event in live.events(Leased) if event.returned} == {4: [[1, 1, 5, 3]]}
    assert not exactly_once_violations(live.events(Leased))
    assert batches_of(live) == 2 * 16
    check_digests(live)
    second, after = begun[1], begun[2]  # its second round ends with the refusal, and it starts the third from the shared weights
    assert after.local is None
    assert after.unsent[1] is second.unsent[1], "of the refused fragment"
    assert not after.unsent[0].equal(second.unsent[0]), "of the fragment that was committed before in that round"


def test_an_island_that_computes_other_bits_owes_what_the_commit_left_out_of_its_delta(threaded, toy, diverging):
    diverging("island-0001")
    live, begun = threaded(of(toy, 3, DiLoCo(inner_steps=2, codec="int4")), Elastic(processes=3)), []
    record_rounds(live, "island-0001", begun)
    live.finish(live.start("island-0000", "island-0001", "island-0002"))
    assert [state.unsent is None for state in begun[:3]] == [True, False, False]
    assert not begun[2].unsent.equal(begun[1].unsent), "of its second commit, after which it fetched the others' state"


def test_a_joiner_between_two_fragments_fetches_the_current_ones_and_observes_the_rest_of_the_round(threaded, toy):
    live = threaded(of(toy, 1, replace(FOUR_BITS, fragments=4, overlap=0), "train.steps=48"), Elastic(processes=1))
    live.waits["island-0000", 1] = "elsewhere begins with"
    first = live.start("island-0000")
    live.wait_until("committed round 1 ")
    live.finish([*first, *live.start("elsewhere", has_folder=False)])
    assert any(text.startswith("elsewhere begins with round 1, fetched from island-0000") for text in live.logged)
    _, joined = live.events(IslandJoined)
    attended = {event.round: event.participating for event in live.events(Attended)}
    end = -(-joined.round // 4) * 4
    assert [attended[number] for number in range(1, end + 2)] == [1] * end + [2]
    assert not exactly_once_violations(live.events(Leased))
    assert batches_of(live) == 48
    check_digests(live)


def test_a_run_with_error_feedback_that_is_resumed_has_the_weights_of_one_without_a_break(tmp_path, threaded, toy):
    run = of(toy, 2, TOP_K, "train.steps=16", "train.fresh_optimizer=true")
    live = threaded(run, Elastic(processes=2))
    for thread in live.start("island-0000", "island-0001", dies_after=5):
        thread.join(60.0)
    live.finish(live.start("island-0000", "island-0001"))
    assert {text for text in live.logged if "error buffers" in text} == {
        f"{name} continues with its error buffers of round 4" for name in ("island-0000", "island-0001")
    }
    assert load_tree(live.folder / "final.safetensors").equal(simulate(run, out=tmp_path / "sim").params)


def test_error_buffers_of_another_state_or_a_damaged_file_are_not_used_and_a_lost_folder_is_not_made_anew(threaded, toy):
    live = threaded(of(toy, 1, TOP_K), Elastic(processes=1))
    live.finish(live.start("island-0000"))
    (island, engine), logged = ((one := live.one_island()), one._engine), []
    folder = RunFolder(live.folder)
    checkpoint = Checkpoints(folder.checkpoints, keep=2).newest()
    buffers = ErrorBufferFiles(folder, "island-0000", Keep(save_every=4, checkpoints=2), logged.append)
    files = Checkpoints(folder.error_buffers / "island-0000", keep=2)
    assert files.rounds()[-1] == checkpoint.round

    def restored():
        buffers.restore(engine)
        found, engine.state = engine.residuals()["unsent"], replace(engine.state, unsent=None)
        return found is not None, len(logged)

    assert restored() == (False, 0), "the run's first weights"
    island._recovery.restore_checkpoint(engine, checkpoint)
    assert restored() == (True, 1)
    first = engine.params.flat[0].item()
    engine.params.flat[0] += 1.0
    assert restored() == (False, 1), "another attempt at the same round"
    engine.params.flat[0] = first
    (path,) = files.at(checkpoint.round).path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert restored() == (False, 2), "damaged"
    assert "does not match its digest" in logged[-1]
    engine.state = replace(engine.state, unsent=engine.params)
    shutil.rmtree(folder.path)
    buffers._steps = 0
    buffers.save_if_due(engine)
    assert f"are not saved: cannot read {folder.settings}" in logged[-1]
    assert not folder.path.exists()
    island.close(wait=False)


def test_a_run_whose_islands_all_died_between_two_fragments_continues_from_its_newest_checkpoint(threaded, toy):
    live, begun = threaded(of(toy, 2, FOUR_BITS, "train.steps=16"), Elastic(processes=2)), []
    record_rounds(live, "island-0001", begun)
    for thread in live.start("island-0000", "island-0001", dies_after=5):
        thread.join(60.0)
    assert [event.round for event in live.events(Attended)][:4] == [1, 2, 3, 4]
    live.finish(live.start("island-0000", "island-0001"))
    before, after = begun[2:4]  # rounds of two commits each
    assert [one.equal(two) for one, two in zip(before.unsent, after.unsent, strict=True)] == [True, True]
    assert any(text.endswith("from its checkpoint") for text in live.logged)
    assert [event.round for event in live.events(Attended)] == list(range(1, 9))
    assert not exactly_once_violations(live.events(Leased))
    check_digests(live)
