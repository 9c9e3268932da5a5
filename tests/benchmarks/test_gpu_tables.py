"""The GPU benchmark: its plan, its verdicts and tables, and the published tables."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.models.gpt import GPT

ROOT = Path(__file__).resolve().parents[2]
HOLDS, DOES_NOT, WITHIN = "**holds here**", "**does not hold here**", "**within the spread**"


# ---------------------------------------------------------------------------------------------------------------- the plan


def test_flops_count_every_matrix_once_and_attention_by_half(b):
    model = GPT(layers=2, width=8, heads=2, head_size=6, tied=False)
    shape = b.gpu_plan.Shape(name="x", model=model, batch_size=1, seq_len=10, vocab_size=50, bare_steps=1)
    decoder = model.build(50, 10, seed=0)
    multiplied = sum(p.numel() for name, p in decoder.named_parameters() if not name.startswith("embedding"))
    assert shape.flops_per_token == 6 * multiplied + 12 * 2 * 12 * 10 * 0.5
    tied = replace(shape, model=replace(model, tied=True))
    assert tied.flops_per_token == shape.flops_per_token  # the shared matrix is multiplied once, as the output head


def published(b):
    return b.gpu_plan.plan_of(list(b.gpu_plan.PRESETS), {"m20": 32}, inner_steps=25, turns=3)


def test_the_plan_has_all_published_presets_and_islands(b):
    plan = published(b)
    large = {shape.name: [(cell.islands, cell.mode) for cell in cells] for shape, cells in plan.presets.items()}
    each = [(1, "apart"), (4, "apart"), (8, "apart"), (64, "apart")]
    assert large == {
        "m150": each,
        "m20": [(1, "apart"), (4, "apart"), (4, "stacked"), (4, "auto"), (8, "apart"), (64, "apart")],
        "m60": each,
        "m400": each,
    }
    assert {shape.name: shape.batch_size for shape in plan.presets} == {"m150": 32, "m20": 32, "m60": 64, "m400": 16}
    named = ("apart", "recorded", "stacked")
    assert {(shape.batch_size, cell.islands, cell.mode) for shape, cells in plan.small.items() for cell in cells} == {
        *((size, islands, mode) for size in (2, 8, 32) for islands in (4, 8, 64) for mode in named),
        *((size, 1, mode) for size in (2, 8, 32) for mode in ("apart", "recorded")),
        (8, 8, "auto"),
    }
    keys = [cell.key for cells in plan.groups.values() for cell in cells]
    assert len(set(keys)) == len(keys) == 18 + 34


def test_rounds_are_shorter_and_fewer_only_with_many_islands(b):
    cells = [cell for cells in published(b).groups.values() for cell in cells]
    assert {(cell.inner_steps, cell.turns) for cell in cells if cell.islands <= 8} == {(25, 3)}
    assert {(cell.shape.seq_len, cell.inner_steps, cell.turns) for cell in cells if cell.islands == 64} == {
        (1024, 2, 2),
        (256, 5, 2),
    }


def test_many_islands_are_planned_for_all_presets_and_fit_where_the_model_is_small(b):
    h200_bytes = 139 * 2**30
    many = {cell.shape.name: cell for cells in published(b).presets.values() for cell in cells if cell.islands == 64}
    assert {name: cell.estimated_bytes < h200_bytes for name, cell in many.items()} == {
        "m150": False,
        "m20": True,
        "m60": True,
        "m400": False,
    }


def test_estimates_grow_with_islands_and_hold_what_each_must(b):
    for cells in published(b).presets.values():
        sizes = [cell.estimated_bytes for cell in cells]
        assert sizes == sorted(sizes)
        assert all(cell.estimated_bytes > 16 * cell.shape.params * cell.islands for cell in cells)


# -------------------------------------------------------------------------------------------------------- verdicts and tables


def islands_line(cell, share=1.0, shares=None, **more):
    """A cell of islands that reach a share of the bare loop's speed, in turns of one second."""
    steps = cell.islands * cell.inner_steps / cell.shape.bare_steps
    rounds_s = [steps / each for each in shares or [share] * cell.turns]
    return {"round_s": rounds_s, "bare_s": [1.0] * cell.turns, "outer_s": [0.1 * round_s for round_s in rounds_s], **more}


def verdicts(b, path, plan=None, shares=((1.0,) * 3,) * 2, gain=2.0, chosen="stacked", **more):
    """Verdicts on synthetic times: islands that reach these shares of the bare loop with k=4 and k=8, and a stack of this gain.
    `more` has further figures of the cells of a mode."""
    plan, record = plan or b.gpu_plan.quick_plan(), b.record.Record(path)
    record.add(b.gpu_results.matrix_key(plan.matrix), {"flops_per_s": 1e9})
    for cells in plan.groups.values():
        for cell in cells:
            plain = {4: shares[0], 8: shares[1]}.get(cell.islands, (1.0,) * 3)
            times = gain if cell.mode in ("stacked", "auto") else 1.0
            about = {"chosen": {"way": chosen, "why": "measured"}} if cell.mode == "auto" else {}
            line = islands_line(cell, shares=[times * share for share in plain], **about)
            record.add(cell.key, {**line, **more.get(cell.mode, {})})
    return b.gpu_report.verdicts(b.gpu_results.Results(plan, record))


def line_with(lines, words):
    (line,) = (line for line in lines if words in line)
    return line


@pytest.mark.parametrize(
    ("four", "eight", "verdict"),
    [
        ((0.971,) * 3, (0.98,) * 3, HOLDS),
        ((0.99,) * 3, (0.96,) * 3, DOES_NOT),
        ((0.96,) * 3, (0.99,) * 3, DOES_NOT),
        ((0.98, 0.96, 0.99), (0.99,) * 3, WITHIN),
        ((0.95, 0.96, 0.98), (0.99,) * 3, WITHIN),
        ((0.98,) * 3, (0.96, 0.99, 1.0), HOLDS),  # not the worse one
    ],
)
def test_throughput_is_judged_by_the_slower_of_four_and_eight_islands_and_its_spread(b, tmp_path, four, eight, verdict):
    line = line_with(verdicts(b, tmp_path, shares=(four, eight)), "DiLoCo trains")
    assert line.startswith(f"{verdict}: m150, 4 x 16: ")
    for k, shares in ((4, four), (8, eight)):
        assert f"{sorted(shares)[1]:.3f} ({min(shares):.3f} to {max(shares):.3f}) with k={k}" in line


@pytest.mark.parametrize(("gain", "holds"), [(2.01, True), (1.99, False)])
def test_a_stack_is_compared_with_islands_one_after_the_other(b, tmp_path, gain, holds):
    lines = verdicts(b, tmp_path, gain=gain)
    line = line_with(lines, "m20, 2 x 16: speed of stacked")
    assert line.startswith(HOLDS if holds else DOES_NOT)
    assert f"{gain:.2f} with k=4" in line
    assert "runs" not in line
    filled = line_with(lines, "which fills the device")
    assert filled.startswith("m150, 4 x 16, which fills"), "it has no verdict"
    assert f"{gain:.2f} with k=4" in filled


def test_cells_of_two_runs_are_compared_with_a_warning(b, tmp_path):
    lines = verdicts(b, tmp_path, apart={"run": "noon"}, recorded={"run": "noon"}, stacked={"run": "night"}, auto={"run": "night"})
    for words in ("m20, 2 x 16: speed of stacked", "which fills the device", "together=auto"):
        assert "These cells were measured in 2 runs" in line_with(lines, words)


@pytest.mark.parametrize(
    ("chosen", "gain", "verdict"),
    [("stacked", 2.0, HOLDS), ("stacked", 0.5, DOES_NOT), ("apart", 2.0, DOES_NOT), ("apart", 0.5, HOLDS)],
)
def test_the_choice_of_auto_is_compared_with_the_fastest_mode(b, tmp_path, chosen, gain, verdict):
    line = line_with(verdicts(b, tmp_path, chosen=chosen, gain=gain), "together=auto")
    assert line.startswith(f"{verdict}: m20, 2 x 16, k=4: together=auto chose {chosen} (measured) and trains ")
    assert "named modes: apart " in line


def test_a_mode_without_a_cell_counts_with_the_speed_of_auto(b, tmp_path):
    plan = b.gpu_plan.quick_plan()
    ((shape, cells),) = plan.small.items()
    plan = replace(plan, small={shape: [cell for cell in cells if cell.mode != "recorded"]})
    slower = {"stacked": islands_line(cells[-1], share=1.5)}
    line = line_with(verdicts(b, tmp_path, plan, chosen="recorded", gain=2.0, **slower), "together=auto")
    assert line.startswith(f"{HOLDS}: m20, 2 x 16, k=4: together=auto chose recorded")


def test_a_choice_that_is_slower_by_less_than_turns_differ_is_within_the_spread(b, tmp_path):
    line = line_with(verdicts(b, tmp_path, shares=((0.9, 1.0, 1.2), (1.0,) * 3), gain=1.1, chosen="apart"), "together=auto")
    assert line.startswith(WITHIN)


@pytest.mark.parametrize(("difference", "steps", "verdict"), [(0.36, "0.96", HOLDS), (0.45, "1.20", DOES_NOT)])
def test_losses_of_all_modes_are_compared_round_by_round(b, tmp_path, difference, steps, verdict):
    losses = {mode: {"losses": [10.0, 9.0, 8.0, 7.0]} for mode in ("apart", "recorded", "auto")}  # 8 steps move it by 3
    losses["stacked"] = {"losses": [10.0, 9.0 + difference, 8.0, 7.0]}
    line = line_with(verdicts(b, tmp_path, **losses), "all modes compute the same")
    assert line.startswith(verdict)
    assert f"differ between modes by at most {steps} of the change per step" in line
    assert "over 3 shapes and numbers of islands" in line
    assert "whose loss is between 7.0000 and 10.0000 in 4 rounds of 2 steps" in line
    assert f"Relative to the loss, modes differ by at most {100 * difference / 7:.2g} %" in line


def test_constant_losses_do_not_hold(b, tmp_path):
    losses = {mode: {"losses": [10.0] * 4} for mode in ("apart", "recorded", "auto", "stacked")}
    assert line_with(verdicts(b, tmp_path, **losses), "all modes compute the same").startswith(DOES_NOT)


def test_an_older_record_without_losses_runs_and_products_has_its_tables(b, tmp_path):
    lines = verdicts(b, tmp_path)
    assert not [line for line in lines if "compute the same" in line]
    plan = b.gpu_plan.quick_plan()
    record = b.record.Record(tmp_path)
    for cell in (cell for cells in plan.groups.values() for cell in cells):
        record.add(cell.key, {**record[cell.key], "peak_bytes": 5, "begin_bytes": 7})
    sections = "".join(b.gpu_report.sections_of(plan, b.gpu_results.Results(plan, record), "a device"))
    assert "0.001 TFLOP/s" in sections
    assert sections.count("| 5 B | 7 B |") == 10


def test_the_tables_have_all_cells_of_a_record_also_of_other_plans(b, tmp_path):
    then = b.gpu_plan.plan_of(["m20", "m400"], {"m400": 8}, inner_steps=10, turns=3, islands=[4])
    now = b.gpu_plan.plan_of(["m400"], {}, inner_steps=25, turns=3, islands=[4])
    record = b.record.Record(tmp_path)
    record.add(b.gpu_results.matrix_key(then.matrix), {"flops_per_s": 1e9})
    cells = [cell for cells in then.groups.values() for cell in cells if cell.mode != "auto"]
    for cell in cells:
        record.add(cell.key, islands_line(cell, peak_bytes=5, begin_bytes=7))
    record.add(cells[0].key.replace("m20", "m30"), {"bare_s": []})  # a model that is in no plan
    found = b.gpu_results.Results(now, record)
    assert [one.cell for one in found.all_measured()] == cells
    sections = "".join(b.gpu_report.sections_of(now, found, "a device"))
    assert sections.count("| 5 B | 7 B |") == len(cells)
    assert "m400, 8 x 1024: DiLoCo trains 1.000 " in sections
    assert "Not measured yet of the present plan: m400, 16 x 1024; m20, 2 x 256; " in sections


def test_utilisation_is_the_flops_of_the_tokens_over_those_of_the_matrix_product(b, tmp_path):
    verdicts(b, tmp_path)
    plan = b.gpu_plan.quick_plan()
    found = b.gpu_results.Results(plan, b.record.Record(tmp_path))
    (shape, cells), *_ = plan.presets.items()
    one = found.measured(cells[0])
    assert one.tokens_per_s == shape.bare_steps * shape.tokens
    assert found.mfu(one) == pytest.approx(one.tokens_per_s * shape.flops_per_token / 1e9)
    assert one.outer_share == pytest.approx(0.1)


def test_utilisation_uses_the_matrix_product_of_the_cells_run_or_the_bare_loops_or_the_first(b, tmp_path):
    plan, record = b.gpu_plan.quick_plan(), b.record.Record(tmp_path)
    record.add(b.gpu_results.matrix_key(plan.matrix), {"flops_per_s": 1e9})
    (shape, (first, second, *_)), (small, (third, *_)) = plan.groups.items()
    bytes_of = {"peak_bytes": None, "begin_bytes": None}
    record.add(b.gpu_results.bare_key(shape, plan.turns), {"bare_s": [1.0] * 3, **bytes_of, "product_flops_per_s": 2e9})
    record.add(first.key, {**islands_line(first), **bytes_of, "product_flops_per_s": 4e9})
    record.add(second.key, {**islands_line(second), **bytes_of})
    record.add(third.key, {**islands_line(third), **bytes_of})
    found = b.gpu_results.Results(plan, record)
    for cell, product in ((first, 4e9), (second, 2e9), (third, 1e9)):
        one = found.measured(cell)
        assert found.mfu(one) == pytest.approx(one.tokens_per_s * cell.shape.flops_per_token / product)
    assert found.bare_mfu(shape) == pytest.approx(shape.bare_steps * shape.tokens * shape.flops_per_token / 2e9)
    assert found.bare_mfu(small) is None
    text = "".join(b.gpu_report.sections_of(plan, found, "a device"))
    assert "Measured in a later process, in which the matrix product reached 0.002 TFLOP/s and 0.004 TFLOP/s." in text
    assert text.count("in a later process") == 1


# ------------------------------------------------------------------------------------------------------------ published tables


def published_lines(page):
    """The lines between the page's markers without links, which depend on the page's folder."""
    marked = re.search(r"<!-- gpu:begin -->\n(.*?)<!-- gpu:end -->", page.read_text("utf-8"), re.DOTALL).group(1)
    return [line for line in marked.strip().splitlines() if not line.startswith(("[The record]", "!["))]


def test_published_tables_equal_the_record(b, tmp_path):
    """With `--minutes 0` no cell starts, also with a GPU."""
    newest = sorted((ROOT / "benchmarks" / "records").glob("*_gpu"))[-1]
    record, page = tmp_path / newest.name, tmp_path / "page.md"
    record.mkdir()
    shutil.copy(newest / "cells.jsonl", record)
    page.write_text("<!-- gpu:begin -->\n<!-- gpu:end -->\n")
    b.gpu.main(["--quiet", "--minutes", "0", "--record", str(record), "--docs", str(page)])
    made = (record / "README.md").read_text("utf-8").split("## How to reproduce")[0]
    assert "of the bare loop's tokens per second" in made
    assert made == (newest / "README.md").read_text("utf-8").split("## How to reproduce")[0]
    assert published_lines(page) == published_lines(ROOT / "docs" / "evidence.md")
    assert not (record / "source.txt").exists(), "a process that measures nothing writes no source"
