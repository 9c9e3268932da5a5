"""Figures are written where and as asked, leave pyplot alone, and put the right curve on the right axis."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Evaluated
from atoll.telemetry import plot_comparison, plot_run
from atoll.telemetry.plots import comparison_figure, run_figure


@pytest.fixture
def folders(tmp_path, script):
    ddp = script(rounds=20, steps_per_round=1, payload_bytes=4_000_000)
    diloco = script(recipe="demo-diloco", algorithm="DiLoCo", rounds=2, steps_per_round=10, payload_bytes=4_000_000)
    return [ddp.write(tmp_path / "a"), diloco.write(tmp_path / "b")]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_a_comparison_is_one_wide_picture(folders, tmp_path) -> None:
    path = plot_comparison(folders, tmp_path / "new" / "figure.png")
    assert path == tmp_path / "new" / "figure.png"
    assert png_size(path) == (1800, 600)


def test_each_panel_shows_every_runs_evaluations_against_its_own_quantity(folders, script) -> None:
    tokens, time, sent = comparison_figure(folders).axes
    ddp = [
        event for event in script(rounds=20, steps_per_round=1, payload_bytes=4_000_000).events() if isinstance(event, Evaluated)
    ]
    line = tokens.get_lines()[0]
    assert list(line.get_xdata()) == [event.tokens for event in ddp]
    assert list(line.get_ydata()) == [event.metrics["loss"] for event in ddp]
    assert list(time.get_lines()[0].get_xdata()) == [event.virtual_time_s for event in ddp]
    assert list(sent.get_lines()[0].get_xdata()) == [event.sent_bytes_per_island for event in ddp if event.sent_bytes_per_island]
    assert [len(panel.get_lines()) for panel in (tokens, time, sent)] == [2, 2, 2]


def test_an_axis_is_logarithmic_where_runs_lie_a_decade_apart(folders) -> None:
    assert [panel.get_xscale() for panel in comparison_figure(folders).axes] == ["linear", "linear", "log"]
    assert [panel.get_xscale() for panel in comparison_figure(folders[:1]).axes] == ["linear"] * 3


def test_there_is_one_legend_for_all_panels(folders) -> None:
    figure = comparison_figure(folders)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["demo-ddp (2.35)", "demo-diloco (2.35)"]
    assert all(panel.get_legend() is None for panel in figure.axes)


def test_a_run_that_sends_nothing_can_be_drawn(tmp_path, script) -> None:
    silent = script(payload_bytes=0).write(tmp_path / "a")
    assert comparison_figure([silent]).axes[2].get_xscale() == "linear"
    plot_comparison([silent], tmp_path / "figure.svg")


def test_more_runs_than_colours_still_look_different(tmp_path, script) -> None:
    runs = [script(seed=seed, rounds=2).write(tmp_path / str(seed)) for seed in range(9)]
    lines = comparison_figure(runs).axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 9


def test_one_run_shows_losses_cosines_and_norms(folders, tmp_path) -> None:
    assert png_size(plot_run(folders[0], tmp_path / "run.png")) == (1800, 600)
    assert [panel.get_ylabel() for panel in run_figure(folders[0]).axes] == ["loss", "cosine between deltas (mean ± std)", "norm"]


def test_the_panels_of_one_run_span_the_same_steps(folders) -> None:
    assert len({panel.get_xlim() for panel in run_figure(folders[1]).axes}) == 1


def test_a_comparison_of_deltas_stands_at_the_step_where_its_round_ended(folders) -> None:
    _, cosine, norm = run_figure(folders[1]).axes
    assert list(cosine.get_lines()[0].get_xdata()) == list(norm.get_lines()[0].get_xdata()) == [10, 20]


def test_a_run_whose_islands_were_not_compared_shows_losses_alone(folders) -> None:
    log = folders[0] / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "Compared" not in line))
    assert [panel.get_ylabel() for panel in run_figure(folders[0]).axes] == ["loss"]


def test_an_unfinished_run_can_be_drawn(tmp_path, script) -> None:
    folder = script(finished=False).write(tmp_path / "run")
    assert plot_run(folder, tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_without_evaluations_is_named(tmp_path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(AtollError, match="has not been evaluated yet"):
        plot_comparison([tmp_path], tmp_path / "figure.png")
    with pytest.raises(AtollError, match="has not finished a round yet"):
        plot_run(tmp_path, tmp_path / "figure.png")


@pytest.mark.parametrize("name", ["figure", "figure.bmp"])
def test_a_format_that_cannot_be_written_is_refused(folders, tmp_path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not end in \.png, \.svg, \.pdf"):
        plot_comparison(folders, tmp_path / name)


def test_nothing_to_draw_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_comparison([], tmp_path / "figure.png")


def test_pyplot_and_its_backend_are_never_touched(folders, tmp_path) -> None:
    # Reading the setting `backend` would itself load pyplot, so it is left out; a backend is chosen in pyplot only.
    code = (
        "import sys, matplotlib; from atoll.telemetry import plot_run\n"
        "settings = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = settings()\n"
        f"plot_run({str(folders[0])!r}, {str(tmp_path / 'figure.png')!r})\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_without_matplotlib_name_their_extra(tmp_path, script, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # Python's own way to say that a module cannot be imported
    with pytest.raises(ConfigError, match=r'pip install "atoll\[plot\]"'):
        plot_run(script().write(tmp_path / "run"), tmp_path / "figure.png")
