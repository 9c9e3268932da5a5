"""The figure shows what the islands did, and refuses a run that has nothing of the kind."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.core.errors import AtollError
from atoll.core.events import RoundFinished
from atoll.runs.cluster import Cluster
from atoll.runs.network import Link
from atoll.telemetry import JsonlSink, plot_overlap, read_overlap
from atoll.telemetry.plots_overlap import last_rounds, overlap_figure
from atoll.testing.simulated_runs import simulate


@pytest.fixture
def acco(tmp_path):
    """The events of a run of ACCO on unequal islands, and a folder with them."""
    torch.set_num_threads(1)
    line = Link(latency_s=0.05, bandwidth_mbit_per_s=math.inf)
    done = simulate(ACCO(), steps=8, cluster=Cluster(islands=3, step_time_s=(1.0, 1.0, 3.0), link=line))
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        for event in done.events:
            sink.emit(event)
    return done, tmp_path


def test_the_panels_show_the_last_rounds_and_the_whole_run(acco) -> None:
    _, folder = acco
    timeline, times, batches = overlap_figure(folder).axes
    islands = read_overlap(folder).islands
    assert [tick.get_text() for tick in timeline.get_yticklabels()] == ["0", "1", "2"]
    stacked: dict[int, float] = {}
    for bar in times.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        stacked[at] = stacked.get(at, 0.0) + bar.get_height()
    assert stacked == pytest.approx({island.island: 100.0 for island in islands})
    assert [bar.get_height() for bar in batches.patches] == [island.batches for island in islands]


def test_the_last_rounds_are_those_and_no_others(acco) -> None:
    done, _ = acco
    boundary_s = done.of(RoundFinished)[-3].virtual_time_s
    lanes = last_rounds(done.events, rounds=2)
    assert set(lanes) == {0, 1, 2}
    assert len(lanes[0].computing) == 4  # two halves in each of two rounds
    assert lanes[0].hidden
    assert not lanes[0].talking
    slowest = lanes[2].computing
    assert min(start for start, _ in slowest) == pytest.approx(boundary_s)


def test_a_run_that_has_just_begun_is_drawn_as_far_as_it_is(acco, tmp_path) -> None:
    done, _ = acco
    assert last_rounds(done.events[:6])
    (tmp_path / "young").mkdir()
    with JsonlSink(tmp_path / "young" / "events.jsonl") as sink:
        for event in done.events[:12]:
            sink.emit(event)
    assert plot_overlap(tmp_path / "young", tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_a_hub_or_without_exchanges_is_named(tmp_path, async_script) -> None:
    with pytest.raises(AtollError, match="has a hub"):
        plot_overlap(async_script().write(tmp_path / "hub"), tmp_path / "figure.png")
    (tmp_path / "empty").mkdir()
    with JsonlSink(tmp_path / "empty" / "events.jsonl"):
        pass
    with pytest.raises(AtollError, match="exchanged nothing yet"):
        plot_overlap(tmp_path / "empty", tmp_path / "figure.png")
