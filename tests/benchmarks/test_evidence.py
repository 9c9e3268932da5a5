"""The papers' claims on a GPU, in miniature on the CPU: cells, seeds, time that runs out, and going on."""

import importlib
import json
from pathlib import Path

import pytest

from atoll.data.prepare import prepare

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    prepare("stdlib", "bytes", folder / "prepared", limit_bytes=150_000)
    return folder / "prepared"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: importlib.import_module(f"evidence_{name}") for name in ("acco", "async", "diloco")}


def cells(record):
    return [json.loads(line) for line in (record / "cells.jsonl").read_text().splitlines()]


def test_rows_of_the_headline_have_all_seeds_and_others_the_first(scripts, text, tmp_path, capsys):
    common = ["--text", str(text), "--quick", "--quiet", "--seeds", "0", "1", "--record", str(tmp_path / "record")]
    scripts["diloco"].main([*common, "--only", "headline", "--only", "drop"])
    found = cells(tmp_path / "record")
    seeds = sorted((cell["recipe"], tuple(cell["settings"][7:]), cell["seed"]) for cell in found)
    alone, lost = ("cluster.islands=1",), ("cluster.drop_probability=0.5",)
    assert seeds == [
        *(("demo-ddp", (), seed) for seed in (0, 1)),
        *(("demo-ddp", alone, seed) for seed in (0, 1)),
        *(("demo-diloco", (), seed) for seed in (0, 1)),
        ("demo-diloco", lost, 0),
    ]
    said = capsys.readouterr().out
    assert "[DiLoCo] - [one worker] = " in said
    assert "(one seed): Losing half of the deltas" in said
    assert "Rows of one seed, where they are trained like the steady rows" in said
    assert "rows have not been run yet" not in said
    assert (tmp_path / "record" / "plot.png").exists()
    scripts["diloco"].main([*common, "--only", "headline"])
    assert len(cells(tmp_path / "record")) == len(found), "what is there is not made again"


def test_when_time_is_up_no_cell_begins_and_the_next_call_goes_on(scripts, text, tmp_path, capsys):
    common = ["--text", str(text), "--quick", "--quiet", "--seeds", "0", "--record", str(tmp_path / "record"), "--only", "methods"]
    scripts["acco"].main([*common, "--minutes", "0"])
    assert not (tmp_path / "record" / "cells.jsonl").exists()
    assert "give the same command again" in capsys.readouterr().out
    scripts["acco"].main(common)
    assert len(cells(tmp_path / "record")) == 6
    assert "ACCO ends within 0.02 of DDP" in capsys.readouterr().out


def test_settings_of_the_gpu_are_understood(scripts, text):
    for script in scripts.values():
        plan = script.plan(False)
        for group in script.groups(plan):
            for row in group.rows.values():
                run = row.run(0)
                on_gpu = group.name != "line"  # virtual time needs none
                assert (run.train.device, run.train.compile) == (("cuda", True) if on_gpu else ("cpu", False))
                assert run.train.together == ("stacked" if on_gpu else "auto")


def test_rows_with_one_seed_are_judged_by_what_the_headline_scatters(scripts):
    spread = importlib.import_module("spread")
    figures = [spread.Sample((1.0, 2.0, 3.0)), spread.Sample((2.0, 3.0, 4.0))]
    assert spread.scatter(figures).std == pytest.approx(0.0), "rows that differ by the same in every seed do not scatter"
    assert spread.scatter(figures[:1]) is None
    found = spread.Scatter(0.1, 2).about([(1.0, 5.0), (-1.0, 4.0)])
    assert (found.value, found.high) == (1.0, pytest.approx(1.0 + 4.303 * 0.1 * 2**0.5))
