"""A report has the figures of its run, and stays short whatever the size of the run."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from atoll.telemetry.async_summary import AsynchronySummary, CountDistribution, read_asynchrony
from atoll.telemetry.report import ASYNCHRONY, MEMORY, PARTICIPATION, histogram, render, section_lines
from atoll.telemetry.summary import MemorySummary, ParticipationSummary


def printed(summary: AsynchronySummary) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80).print(render(ASYNCHRONY, summary))
    return file.getvalue().splitlines()


def test_the_section_has_every_figure_and_fits_into_eighty_columns(tmp_path, async_script) -> None:
    summary = read_asynchrony(async_script(rounds=20).write(tmp_path / "run"))
    lines = printed(summary)
    assert max(map(len, lines)) <= 80
    assert lines[:4] == section_lines(ASYNCHRONY, summary)
    assert lines[0] == "updates    20 arrived, 20 of them applied"
    assert lines[3] == "shards     0: 50, 1: 35, 2: 15 steps"
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"]) and ":" in line]
    assert [row[:3] for row in rows] == [[str(w.island), str(w.rounds), str(w.steps)] for w in summary.workers]
    for row, worker in zip(rows, summary.workers, strict=True):
        assert row[4] == f"{100 * worker.computed_s / worker.present_s:.0f}"


def test_failures_are_reported_only_if_there_were_any(tmp_path, async_script) -> None:
    summary = read_asynchrony(async_script().write(tmp_path / "run"))
    assert "refused" not in section_lines(ASYNCHRONY, summary)[0]
    worse = replace(summary, applied=10, left_out=2, refused=3, returned=1)
    assert section_lines(ASYNCHRONY, worse)[0] == "updates    12 arrived, 10 of them applied, 2 left out, 3 refused, 1 returned"


def test_a_thousand_workers_do_not_fill_a_thousand_lines(tmp_path, async_script) -> None:
    run = async_script(step_s=tuple(1 + 0.01 * worker for worker in range(1000)), rounds=3000)
    lines = printed(read_asynchrony(run.write(tmp_path / "run")))
    assert len(lines) < 60
    assert "and 984 more workers; --json has them all" in "\n".join(lines)


def test_a_wide_histogram_is_cut_into_ranges_that_hold_everything() -> None:
    lines = histogram("staleness", "updates", CountDistribution.of(dict.fromkeys(range(95), 2)))
    assert [line.split()[0] for line in lines[2:]] == [f"{low}-{low + 9}" for low in range(0, 100, 10)]
    assert [line.split()[-2] for line in lines[2:]] == ["11"] * 9 + ["5.3"]


def test_the_memory_line_has_the_largest_island_and_the_formula() -> None:
    kinds = {
        "parameters_bytes": 2000,
        "gradients_bytes": 2000,
        "communication_bytes": 0,
        "optimizer_bytes": 6000,
        "copies_bytes": 0,
    }
    islands = tuple({"island": island, **kinds, "peak_bytes": peak} for island, peak in ((0, 10_000), (1, 8010)))
    (line,) = section_lines(MEMORY, MemorySummary(islands=islands, formula="2+2+12/2", formula_bytes=10_000))
    assert "10.0 kB per island at most: parameters 2.00 kB, gradients 2.00 kB, optimizer 6.00 kB" in line
    assert line.endswith("2+2+12/2 bytes per parameter, 10.0 kB")
    (line,) = section_lines(MEMORY, MemorySummary(islands=islands, formula=None, formula_bytes=None))
    assert "formula" not in line


def test_the_lines_of_an_elastic_run_have_its_commits_and_failures() -> None:
    counts = {"commits": 2, "attempts": 4, "known": 4, "delivered": 5, "returned": 1, "refused": 1, "not_saved": 1}
    assert section_lines(PARTICIPATION, ParticipationSummary(alive=3.0, participating=2.5, **counts)) == [
        "islands    4 known; on average 3 alive and 2.5 participating (83 %)",
        "commits    2, after 2 failed attempts",
        "data       5 leases delivered, each once; 1 assigned again",
        "refused    1 delta",
        "not saved  1 checkpoint",
    ]
