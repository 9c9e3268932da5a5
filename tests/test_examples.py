"""The examples run as they are, and show what they say they show."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Runs an example as a script in an empty folder; gives what it printed."""

    def run(name):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def shown_by_two(tmp_path):
    """Runs an example by torchrun in two processes; gives what they printed."""

    def run(name):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_quickstart_trains_and_leaves_a_folder(shown, tmp_path):
    out = shown("quickstart")
    loss = float(re.search(r"validation loss ([\d.]+) after [\d,]+ tokens on 4 islands", out)[1])
    assert loss < 5.0  # bytes at random are at 5.5
    folder = re.search(r"is in (runs/\S+)", out)[1]
    assert (tmp_path / folder / "final.safetensors").exists()


def test_nobody_waits_and_a_dead_workers_round_is_taken_on(shown):
    out = shown("nobody_waits")
    assert re.search(r"25\.0 s: worker 0 dies\n +25\.0 s: its \d+ steps on shard (\d) are put back", out)
    assert re.search(r"worker [123] goes on with shard \d, for \d+ steps", out)
    in_step, hub = re.findall(r"loss ([\d.]+) after (\d+) updates in (\d+) s", out)
    assert int(hub[1]) >= int(in_step[1])
    assert int(hub[2]) < 0.5 * int(in_step[2])
    assert float(hub[0]) < float(in_step[0]) + 0.2


def test_own_module_learns_together_what_one_island_cannot_know(shown):
    alone, together = (int(percent) for percent in re.findall(r"(\d+)% of held-out points right", shown("own_module")))
    assert alone < 75
    assert together > 90


def test_link_speeds_shows_ddp_gaining_from_every_faster_line_and_diloco_ahead_on_all(shown):
    rows = [(float(ddp), float(diloco)) for ddp, diloco in re.findall(r"\d+ +([\d.]+) s +([\d.]+) s", shown("link_speeds"))]
    assert len(rows) == 3
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    assert all(diloco < ddp for ddp, diloco in rows)


def test_until_it_pays_shows_where_acco_hides_all_and_where_zero1_overtakes_it(shown):
    rows = re.findall(r"(\d+) +([\d.]+) s +([\d.]+) s +([\d.]+) s   (.+)", shown("until_it_pays"))
    for _, exchange, zero1, acco, _ in rows:
        assert float(zero1) == pytest.approx(0.5 + float(exchange), abs=0.011)
        assert float(acco) == pytest.approx(max(0.5, 2 * float(exchange)), abs=0.011)
    assert [row[4] for row in rows] == ["all hidden"] * 3 + ["some hidden"] + ["ZeRO-1 is faster"] * 2


def test_two_levels_shows_where_zero1_alone_will_do_and_that_slow_lines_cost_it_most(shown):
    found = re.findall(r"^\w+ \w+ +([\d.]+) +([\d.]+) +([\d.]+)   (.+)$", shown("two_levels"), flags=re.MULTILINE)
    rows = [(float(zero1), float(diloco), float(both)) for zero1, diloco, both, _ in found]
    assert len(rows) == 4
    assert all(min(row) >= 0.1 for row in rows), "nothing is faster than computing alone"
    slowdowns = [zero1 / both for zero1, _, both in rows]
    assert slowdowns == sorted(slowdowns)
    assert found[0][3] == "ZeRO-1 alone will do"
    faster = float(re.fullmatch(r"two levels are ([\d.]+) times as fast as ZeRO-1", found[-1][3])[1])
    assert faster == pytest.approx(slowdowns[-1], abs=0.1)
    assert faster > 3


def test_finetune_own_learns_and_leaves_a_folder_that_transformers_loads(shown, tmp_path):
    pytest.importorskip("transformers")
    out = shown("finetune_own")
    losses = [float(loss) for loss in re.findall(r"after +\d+ updates: loss ([\d.]+)", out)]
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(r"models/sums says '2\+3=\d", out), "it answers in digits"
    assert (tmp_path / "models/sums/model.safetensors").exists()


def test_by_hand_drives_three_rounds_and_finds_slowmo_equal_to_outer_momentum(shown):
    out = shown("by_hand")
    assert "round 0: SlowMo at [-0.5, -0.3" in out
    assert len(out.splitlines()) == 3


def test_come_and_go_tells_of_leaving_joining_losing_and_catching_up(shown):
    out = shown("come_and_go")
    for said in ("round 2: island 1 leaves", "round 4: island 1 joins", "round 4: island 3 joins", "not heard", "catches up"):
        assert said in out
    took, held = (int(number.replace(",", "")) for number in re.search(r"took (\d+) steps; .* hold ([\d,]+) tokens", out).groups())
    assert held <= took * 8 * 32


def test_own_loop_learns_on_two_islands_what_neither_sees_alone(shown_by_two):
    rows = re.findall(
        r"(\w+) on 2 islands: (\d+) steps, (\d+) agreements, ([\d.]+) MB sent, (\d+)% right", shown_by_two("own_loop")
    )
    (diloco, *_), (acco, *_) = rows
    assert (diloco, acco) == ("DiLoCo", "ACCO")
    assert [(int(steps), int(agreements)) for _, steps, agreements, _, _ in rows] == [(300, 16), (600, 300)]
    assert float(rows[1][3]) > 20 * float(rows[0][3])
    assert all(int(right) > 90 for *_, right in rows)


def test_lightning_fit_finds_the_same_line_on_both_islands(shown_by_two):
    pytest.importorskip("lightning")
    lines = re.findall(r"island (\d) of 2: y = ([\d.]+) x \+ (-[\d.]+) after (\d+) agreements", shown_by_two("lightning_fit"))
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
    assert float(lines[0][1]) == pytest.approx(3, abs=0.3)
    assert float(lines[0][2]) == pytest.approx(-1, abs=0.2)


def test_hf_trainer_learns_and_ends_with_the_same_model_on_both_islands(shown_by_two):
    pytest.importorskip("accelerate", reason="Trainer itself needs it")
    lines = re.findall(r"island (\d) of 2: loss ([\d.]+) after (\d+) agreements", shown_by_two("hf_trainer"))
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
    assert float(lines[0][1]) < 4.5  # bytes at random are at 5.5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_says_what_it_is_and_is_tested(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert ast.get_docstring(ast.parse(text))
    tested = re.search(rf'shown(_by_two)?\("{path.stem}"\)', Path(__file__).read_text())
    assert tested, "every example has a test of what it shows"
