"""Sinks: several behind one, events in memory, and what TensorBoard would show, read back with its own reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Compared, Evaluated, Event, Progress, RoundFinished, Saved, WindowClosed
from atoll.telemetry.sinks import Fanout, MemorySink, TensorBoardSink

EVENT = Saved(round=1, name="round-1")


class FailingSink:
    """A sink that can be closed and may raise."""

    def __init__(self, closed: list[str], name: str, error: Exception | None = None) -> None:
        self.closed, self.name, self.error = closed, name, error

    def emit(self, event: Event) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


def test_every_sink_gets_every_event_in_order() -> None:
    one, two = MemorySink(), MemorySink()
    both = Fanout([one, two])
    progress = Progress(phase="train", done=1, total=2)
    both.emit(EVENT)
    both.emit(progress)
    assert one.events == two.events == [EVENT, progress]


def test_an_event_that_the_log_failed_to_record_is_not_shown() -> None:
    shown = MemorySink()
    with pytest.raises(OSError, match="full"):
        Fanout([FailingSink([], "log", OSError("full")), shown]).emit(EVENT)
    assert shown.events == []


def test_all_sinks_are_closed_even_if_one_refuses() -> None:
    closed: list[str] = []
    with (
        pytest.raises(OSError, match="stuck"),
        Fanout([FailingSink(closed, "a"), MemorySink(), FailingSink(closed, "b", OSError("stuck"))]),
    ):
        pass
    assert closed == ["b", "a"]


def test_importing_telemetry_imports_no_heavy_package() -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tensorboard', 'rich'}"
    code = f"import sys, atoll.telemetry; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def write(folder: Path, events: Iterable[Event], replay: Iterable[Event] | None = None) -> None:
    with TensorBoardSink(folder, replay=replay) as sink:
        for event in events:
            sink.emit(event)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar by tag, as (position, value)."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def near(points: list[tuple[float, float]]) -> list[tuple[int, object]]:
    """TensorBoard keeps values in single precision."""
    return [(round(at), pytest.approx(value, rel=1e-6)) for at, value in points]


@pytest.fixture
def events(script) -> list[Event]:
    return list(script(rounds=6).events())


def test_losses_stand_against_steps_tokens_bytes_and_virtual_time(tmp_path, events) -> None:
    write(tmp_path, events)
    read = curves(tmp_path)
    for tag, points in (
        ("train_loss", [(event, event.loss) for event in events if isinstance(event, RoundFinished)]),
        ("val_loss", [(event, event.metrics["loss"]) for event in events if isinstance(event, Evaluated)]),
        ("val_accuracy", [(event, event.metrics["accuracy"]) for event in events if isinstance(event, Evaluated)]),
    ):
        assert read[f"{tag}/by_steps"] == near([(event.steps, value) for event, value in points])
        assert read[f"{tag}/by_tokens"] == near([(event.tokens, value) for event, value in points])
        assert read[f"{tag}/by_sent_bytes"] == near([(event.sent_bytes_per_island, value) for event, value in points])
        assert read[f"{tag}/by_virtual_ms"] == near([(1000 * event.virtual_time_s, value) for event, value in points])


def test_norms_and_cosines_stand_against_rounds(tmp_path, events) -> None:
    write(tmp_path, events)
    read = curves(tmp_path)
    compared = [event for event in events if isinstance(event, Compared)]
    assert read["delta/norm_of_mean_by_round"] == near([(event.round, event.mean_norm) for event in compared])
    assert read["delta/cosine_mean_by_round"] == near([(event.round, event.cosine_mean) for event in compared])
    assert read["delta/mean_of_norms_by_round"] == near([(event.round, sum(event.norms) / len(event.norms)) for event in compared])


def test_a_single_island_has_no_cosine(tmp_path) -> None:
    write(tmp_path, [Compared(round=1, norms=[1.0], mean_norm=1.0, cosine_mean=None, cosine_std=None)])
    assert sorted(curves(tmp_path)) == ["delta/mean_of_norms_by_round", "delta/norm_of_mean_by_round"]


def test_a_resumed_run_has_the_curves_of_one_that_never_stopped(tmp_path, events) -> None:
    write(tmp_path / "whole", events)
    write(tmp_path / "resumed", events[:20])
    write(tmp_path / "resumed", events[12:], replay=events[:12])
    assert curves(tmp_path / "resumed") == curves(tmp_path / "whole")


def test_staleness_and_windows_of_a_hub_have_curves(tmp_path, async_script) -> None:
    events = list(async_script(rounds=20).events())
    write(tmp_path, events)
    read = curves(tmp_path)
    arrivals = [event for event in events if isinstance(event, Arrived)]
    windows = [event for event in events if isinstance(event, WindowClosed)]
    assert read["hub/staleness_by_arrival"] == near([(number, e.staleness) for number, e in enumerate(arrivals, start=1)])
    assert read["hub/staleness_by_virtual_ms"] == near([(1000 * e.virtual_time_s, e.staleness) for e in arrivals])
    assert read["delta/norm_by_arrival"] == near([(number, e.norm) for number, e in enumerate(arrivals, start=1)])
    assert read["hub/arrivals_by_window"] == near([(e.window, len(e.islands)) for e in windows])
    assert read["hub/waited_s_by_window"] == near([(e.window, sum(e.idle_s)) for e in windows])


def test_a_resumed_run_with_a_hub_counts_its_arrivals_on(tmp_path, async_script) -> None:
    events = list(async_script(rounds=20).events())
    write(tmp_path / "whole", events)
    write(tmp_path / "resumed", events[40:], replay=events[:40])
    assert curves(tmp_path / "resumed") == curves(tmp_path / "whole")


def test_a_tensorboard_log_without_tensorboard_names_its_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r'pip install -e ".*\[tensorboard\]"'):
        TensorBoardSink(tmp_path)
