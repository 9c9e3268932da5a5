"""The parts of each island's time add up, and the hidden part of an exchange is the part that the island computed through."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.zero import ZeRO1
from atoll.core.events import Computed, Exchanged, RoundFailed, RoundFinished, RunStarted, UpdateSkipped
from atoll.runs.cluster import Cluster, Link, Lost
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.report import OVERLAP, render, section_lines
from atoll.telemetry.summary import read_summary
from atoll.telemetry.sync_summary import overlap_of, read_overlap, reports_overlap
from atoll.testing.simulated_runs import SimulatedRun, simulate

UNEQUAL = Cluster(islands=3, step_time_s=(1.0, 1.0, 3.0), link=Link(latency_s=0.05, bandwidth_mbit_per_s=math.inf))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def summary_of(done: SimulatedRun):
    return overlap_of(done.events)


def computed(island: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=0, start_s=start_s, end_s=end_s, steps=1, batches=0.5, tokens=8, loss=1.0)


def exchange(start_s: float, end_s: float, *, background: bool) -> Exchanged:
    return Exchanged(
        round=0,
        what="mean",
        islands=[0],
        heard=[True],
        arrived_s=[start_s],
        start_s=start_s,
        end_s=end_s,
        sent_bytes=[0],
        control_bytes=[0],
        weight=1.0,
        background=background,
    )


@pytest.mark.parametrize("algorithm", [DDP(), ZeRO1(), ACCO(), ACCO(batch="free", clock="samples")], ids=repr)
def test_each_islands_time_adds_up_and_the_mean_share_is_the_runs_utilisation(algorithm) -> None:
    done = simulate(algorithm, steps=6, cluster=UNEQUAL)
    islands = summary_of(done).islands
    for island in islands:
        assert island.computed_s + island.talked_s + island.waited_s == pytest.approx(island.present_s)
        assert 0 <= island.hidden_s <= island.exchanged_s
    assert sum(island.computed_s / island.present_s for island in islands) / 3 == pytest.approx(done.finished.utilisation)


def test_the_hidden_part_of_an_exchange_is_the_part_during_which_the_island_computed() -> None:
    events = [
        exchange(1.0, 4.0, background=True),
        computed(0, 0.0, 2.0),
        computed(0, 3.0, 3.5),
        exchange(5.0, 6.0, background=False),
    ]
    (island,) = overlap_of(events).islands
    assert (island.exchanged_s, island.hidden_s, island.batches) == (4.0, 1.5, 1.0)


def test_data_parallel_training_hides_nothing_and_equal_islands_of_acco_hide_all_that_fits() -> None:
    equal = Cluster(islands=2, step_time_s=(1.0,), link=Link(latency_s=0.1, bandwidth_mbit_per_s=math.inf))
    assert summary_of(simulate(DDP(), steps=4, cluster=equal)).hidden == 0.0
    assert summary_of(simulate(ACCO(), steps=4, cluster=equal)).hidden == pytest.approx(1.0)


def test_with_free_batches_a_fast_island_computes_more_and_no_island_waits() -> None:
    free = summary_of(simulate(ACCO(batch="free", clock="samples"), steps=12, cluster=UNEQUAL))
    fixed = summary_of(simulate(ACCO(), steps=12, cluster=UNEQUAL))
    assert free.islands[0].batches > 2 * free.islands[2].batches
    assert len({island.batches for island in fixed.islands}) == 1
    assert all(island.computed_s == pytest.approx(island.present_s) for island in free.islands)
    assert fixed.islands[0].computed_s < 0.5 * fixed.islands[0].present_s


def test_a_joiner_is_present_from_its_join_on() -> None:
    done = simulate(ZeRO1(), steps=8, cluster=Cluster(islands=2, pool=(1, 2), step_time_s=(1.0,)))
    early, late = summary_of(done).islands
    assert 0 < late.present_s < 0.6 * early.present_s


def test_failed_rounds_and_skipped_updates_are_counted_and_reported() -> None:
    summary = summary_of(simulate(ZeRO1(), steps=6, cluster=Cluster(islands=2, lost=(Lost(island=1, round=2),))))
    assert (summary.failed, summary.skipped) == (1, 0)
    assert section_lines(OVERLAP, summary) == ["failed     1 round, because an island missed the exchange"]
    skipped = overlap_of(UpdateSkipped(round=number, islands=[1], virtual_time_s=1.0) for number in (1, 2))
    assert "2 updates" in section_lines(OVERLAP, skipped)[0]


def test_overlap_is_reported_if_an_exchange_ran_in_the_background(tmp_path, script, async_script) -> None:
    plain = script().write(tmp_path / "plain")
    assert not reports_overlap(plain)
    assert read_summary(plain).overlap is None
    assert read_overlap(plain).hidden == 0.0
    assert read_overlap(async_script().write(tmp_path / "hub")) is None
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    with JsonlSink(hidden / "events.jsonl") as sink:
        for event in simulate(ACCO(), steps=2).events:
            sink.emit(event)
    assert reports_overlap(hidden)
    found = json.loads(json.dumps(read_overlap(hidden).to_dict()))
    assert len(found["islands"]) == 4
    assert found["background"] == found["exchanges"]


def test_a_failed_round_is_reported(tmp_path) -> None:
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        sink.emit(RunStarted(recipe="r", algorithm="ZeRO1", islands=2, params=1, steps=2, seed=0))
        assert not reports_overlap(tmp_path)
        sink.emit(RoundFailed(round=0, what="reduce_scatter", islands=[1], virtual_time_s=1.0))
    assert reports_overlap(tmp_path)


def test_commits_of_different_size_are_known_by_their_tokens() -> None:
    free = summary_of(simulate(ACCO(batch="free", clock="samples"), steps=12, cluster=UNEQUAL))
    fixed = summary_of(simulate(ACCO(), steps=12, cluster=UNEQUAL))
    assert free.most_tokens > free.fewest_tokens > 0
    assert fixed.most_tokens == fixed.fewest_tokens == 3 * 8
    done = {"islands": 1, "steps": 1, "virtual_time_s": 1.0, "local_updates": 1, "loss": 1.0, "sent_bytes_per_island": 0.0}
    rounds = [RoundFinished(round=number, tokens=tokens, **done) for number, tokens in enumerate((10, 10, 25), start=1)]
    summary = overlap_of(rounds)
    assert (summary.fewest_tokens, summary.most_tokens) == (10, 15), "a round that committed nothing is no commit"


def test_the_section_names_every_island_and_stays_short() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(OVERLAP, summary_of(simulate(ACCO(), steps=2, cluster=UNEQUAL))))
    text = console.file.getvalue()
    assert "exchanges  8, 8 of them in the background of computing, which hid" in text
    assert [line.split()[0] for line in text.splitlines()[-5:] if line.strip()][-3:] == ["0", "1", "2"]
    console.print(render(OVERLAP, overlap_of(computed(island, 0.0, 1.0) for island in range(20))))
    assert "and 4 more islands" in console.file.getvalue()
