"""The section of a report on an asynchronous run has its figures, and stays short whatever the run's size."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from atoll.telemetry import read_asynchrony
from atoll.telemetry.async_summary import AsynchronySummary, Spread
from atoll.telemetry.async_text import asynchrony_section, headlines, histogram


def printed(summary: AsynchronySummary) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80).print(asynchrony_section(summary))
    return file.getvalue().splitlines()


def test_the_section_has_every_figure_and_fits_into_eighty_columns(tmp_path, async_script) -> None:
    summary = read_asynchrony(async_script(rounds=20).write(tmp_path / "run"))
    lines = printed(summary)
    assert max(map(len, lines)) <= 80
    assert lines[:4] == headlines(summary)
    assert lines[0] == "updates    20 arrived, 20 of them applied"
    assert lines[3] == "shards     0: 50, 1: 35, 2: 15 steps"
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"]) and ":" in line]
    assert [row[:3] for row in rows] == [[str(w.island), str(w.rounds), str(w.steps)] for w in summary.workers]
    for row, worker in zip(rows, summary.workers, strict=True):
        assert row[4] == f"{100 * worker.computed_s / worker.present_s:.0f}"


def test_what_went_wrong_is_told_only_if_something_did(tmp_path, async_script) -> None:
    summary = read_asynchrony(async_script().write(tmp_path / "run"))
    assert "refused" not in headlines(summary)[0]
    worse = replace(summary, applied=10, left_out=2, refused=3, returned=1)
    assert headlines(worse)[0] == "updates    12 arrived, 10 of them applied, 2 left out, 3 refused, 1 returned"


def test_a_thousand_workers_do_not_fill_a_thousand_lines(tmp_path, async_script) -> None:
    run = async_script(step_s=tuple(1 + 0.01 * worker for worker in range(1000)), rounds=3000)
    lines = printed(read_asynchrony(run.write(tmp_path / "run")))
    assert len(lines) < 60
    assert "and 984 more workers; --json has them all" in "\n".join(lines)


def test_a_wide_histogram_is_cut_into_ranges_that_hold_everything() -> None:
    lines = histogram("staleness", "updates", Spread.of(dict.fromkeys(range(95), 2)))
    assert [line.split()[0] for line in lines[1:]] == [f"{low}-{low + 9}" for low in range(0, 100, 10)]
    assert [line.split()[-2] for line in lines[1:]] == ["11"] * 9 + ["5.3"]
