"""Every example runs unchanged, and its output shows what its docstring claims."""

import ast
import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture
def output_of(tmp_path, monkeypatch, capsys):
    """Runs an example as a script in an empty folder and returns what it printed."""

    def run(name):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def torchrun_output_of(tmp_path):
    """Runs an example by torchrun in two processes and returns what they printed."""

    def run(name):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_quickstart_trains_and_writes_a_run_folder(output_of, tmp_path):
    out = output_of("quickstart")
    loss = float(re.search(r"validation loss ([\d.]+) after [\d,]+ tokens on 4 islands", out)[1])
    assert loss < 5.0  # random bytes have 5.5
    folder = re.search(r"are in (runs/\S+)", out)[1]
    assert (tmp_path / folder / "final.safetensors").exists()


def test_async_vs_sync_reassigns_a_failed_workers_steps_and_takes_less_time(output_of):
    out = output_of("async_vs_sync")
    assert re.search(r"25\.0 s: worker 0 fails\n +25\.0 s: the hub takes back \d+ steps on shard \d", out)
    assert re.search(r"worker [123] continues shard \d for \d+ steps", out)
    synchronous, asynchronous = re.findall(r"loss ([\d.]+) after (\d+) updates in (\d+) s", out)
    assert int(asynchronous[1]) >= int(synchronous[1])
    assert int(asynchronous[2]) < 0.5 * int(synchronous[2])
    assert float(asynchronous[0]) < float(synchronous[0]) + 0.2


def test_custom_workload_is_learned_by_four_islands_and_not_by_one(output_of):
    one, four = (int(percent) for percent in re.findall(r"(\d+)% of held-out points correct", output_of("custom_workload")))
    assert one < 75
    assert four > 90


def test_link_speeds_shows_that_bandwidth_helps_ddp_and_diloco_is_faster_on_every_link(output_of):
    rows = [(float(ddp), float(diloco)) for ddp, diloco in re.findall(r"\d+ +([\d.]+) s +([\d.]+) s", output_of("link_speeds"))]
    assert len(rows) == 3
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    assert all(diloco < ddp for ddp, diloco in rows)


def test_overlap_limit_shows_where_acco_hides_the_exchange_and_where_zero1_is_faster(output_of):
    rows = re.findall(r"(\d+) +([\d.]+) s +([\d.]+) s +([\d.]+) s   (.+)", output_of("overlap_limit"))
    for _, exchange, zero1, acco, _ in rows:
        assert float(zero1) == pytest.approx(0.5 + float(exchange), abs=0.011)
        assert float(acco) == pytest.approx(max(0.5, 2 * float(exchange)), abs=0.011)
    assert [row[4] for row in rows] == ["all hidden"] * 3 + ["some hidden"] + ["ZeRO-1 is faster"] * 2


def test_two_levels_shows_that_zero1_is_enough_on_fast_links_and_falls_behind_on_slow_ones(output_of):
    found = re.findall(r"^\w+ \w+ +([\d.]+) +([\d.]+) +([\d.]+)   (.+)$", output_of("two_levels"), flags=re.MULTILINE)
    rows = [(float(zero1), float(diloco), float(both)) for zero1, diloco, both, _ in found]
    assert len(rows) == 4
    assert all(min(row) >= 0.1 for row in rows), "a step takes at least its computation"
    slowdowns = [zero1 / both for zero1, _, both in rows]
    assert slowdowns == sorted(slowdowns)
    assert found[0][3] == "ZeRO-1 alone is enough"
    faster = float(re.fullmatch(r"two levels are ([\d.]+) times as fast as ZeRO-1", found[-1][3])[1])
    assert faster == pytest.approx(slowdowns[-1], abs=0.1)
    assert faster > 3


def test_finetune_huggingface_learns_and_exports_a_folder_that_transformers_loads(output_of, tmp_path):
    pytest.importorskip("transformers")
    out = output_of("finetune_huggingface")
    losses = [float(loss) for loss in re.findall(r"after +\d+ updates: loss ([\d.]+)", out)]
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(r"models/sums generates '2\+3=\d", out), "the answer is a digit"
    assert (tmp_path / "models/sums/model.safetensors").exists()


def test_write_an_algorithm_runs_three_rounds_in_which_slowmo_equals_outer_momentum(output_of):
    out = output_of("write_an_algorithm")
    assert "round 0: SlowMo [-0.5, -0.3" in out
    assert len(out.splitlines()) == 3


def test_join_and_leave_prints_leaving_joining_missing_and_catching_up(output_of):
    out = output_of("join_and_leave")
    for printed in ("round 2: island 1 leaves", "round 4: island 1 joins", "round 4: island 3 joins", "missed", "catches up"):
        assert printed in out
    trained, kept = (int(n.replace(",", "")) for n in re.search(r"took (\d+) steps; ([\d,]+) tokens of them", out).groups())
    assert kept <= trained * 8 * 32


def output_in_group(group, name):
    """Runs an example in a process that has initialized torch.distributed."""
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return out.getvalue()


def test_pytorch_loop_learns_on_two_islands_what_neither_island_sees_alone(two):
    out = "".join(two.run(output_in_group, "pytorch_loop"))
    rows = re.findall(r"(\w+) on 2 islands: (\d+) steps, (\d+) rounds, ([\d.]+) MB sent, (\d+)% correct", out)
    (diloco, *_), (acco, *_) = rows
    assert (diloco, acco) == ("DiLoCo", "ACCO")
    assert [(int(steps), int(rounds)) for _, steps, rounds, _, _ in rows] == [(300, 16), (600, 300)]
    assert float(rows[1][3]) > 20 * float(rows[0][3])
    assert all(int(correct) > 90 for *_, correct in rows)


@pytest.mark.slow
def test_elastic_loop_learns_both_spirals_in_processes_that_see_a_stretch_each(output_of, tmp_path):
    pytest.importorskip("torchft")
    loss, folder = re.search(r"loss ([\d.]+) on the whole spirals after 76,800 points; (\S+)", output_of("elastic_loop")).groups()
    assert float(loss) < 0.3  # a guess has 0.69
    assert (tmp_path / folder / "final.safetensors").exists()


def test_the_page_about_own_loops_prints_the_loop_of_the_example():
    page = (EXAMPLES.parent / "docs/own_loop.md").read_text()
    (printed,) = re.findall(r"```text\n# examples/elastic_loop.py\n(.*?)```", page, flags=re.DOTALL)
    assert f"\n{printed}\n" in (EXAMPLES / "elastic_loop.py").read_text()


@pytest.mark.slow
def test_lightning_trainer_fits_the_same_line_on_both_islands(torchrun_output_of):
    pytest.importorskip("lightning")
    lines = re.findall(r"island (\d) of 2: y = ([\d.]+) x \+ (-[\d.]+) after (\d+) rounds", torchrun_output_of("lightning_trainer"))
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
    assert float(lines[0][1]) == pytest.approx(3, abs=0.3)
    assert float(lines[0][2]) == pytest.approx(-1, abs=0.2)


@pytest.mark.slow
def test_hf_trainer_learns_and_ends_with_the_same_model_on_both_islands(torchrun_output_of):
    pytest.importorskip("accelerate", reason="Trainer itself needs it")
    lines = re.findall(r"island (\d) of 2: loss ([\d.]+) after (\d+) rounds", torchrun_output_of("hf_trainer"))
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
    assert float(lines[0][1]) < 4.5  # random bytes have 5.5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_has_a_docstring_and_has_a_test(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert ast.get_docstring(ast.parse(text))
    assert f'"{path.stem}")' in Path(__file__).read_text()
