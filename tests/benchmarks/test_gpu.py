"""The benchmark of islands on one GPU: on a CPU in miniature, and what it makes of figures."""

import doctest
import json
from dataclasses import replace

import pytest
import torch

from atoll.engines.local import torch_threads
from atoll.errors import ConfigError
from atoll.events import Computed, RoundFinished
from atoll.models.gpt import GPT
from atoll.protocols import Batches, ReadsAhead, Work
from atoll.tree import trainable

QUICK = ["--quick", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def cells_in(record):
    return [json.loads(line) for line in (record / "cells.jsonl").read_text().splitlines()]


def subject_of(b):
    (shape,) = b.gpu_plan.quick_plan().small
    return b.gpu_loops.Subject(shape, "cpu")


# ------------------------------------------------------------------------------------------------------------ in miniature


def test_everything_is_measured_in_miniature_and_not_twice(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path)])
    cells, said = cells_in(tmp_path), capsys.readouterr().out
    b.gpu.main([*QUICK, "--record", str(tmp_path)])
    assert cells_in(tmp_path) == cells
    assert capsys.readouterr().out == said
    assert len({cell["key"] for cell in cells}) == len(cells) == 1 + 2 + 3 + 3  # the product, bare loops, and islands of each shape
    for cell in cells[1:]:
        assert all(len(cell[kind]) == 3 for kind in ("bare_s", "round_s", "outer_s") if kind in cell)
    assert all(
        outer < whole for cell in cells if "round_s" in cell for outer, whole in zip(cell["outer_s"], cell["round_s"], strict=True)
    )
    for line in ("m150, 4 x 16: DiLoCo trains", "stacked is so many times as fast", "model FLOP utilisation of"):
        assert line in said
    assert said.split("record: ")[0].strip() in (tmp_path / "README.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_part_is_measured_alone_and_the_whole_goes_on_from_it(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path), "--only", "small", "--islands", "4"])
    part = cells_in(tmp_path)
    assert [cell["key"].split(" H=")[0].split(") ")[-1] for cell in part[2:]] == ["k=4 apart", "k=4 recorded", "k=4 stacked"]
    b.gpu.main([*QUICK, "--record", str(tmp_path)])
    assert cells_in(tmp_path)[: len(part)] == part
    assert len(cells_in(tmp_path)) == 9


def test_no_cell_begins_when_time_is_up_and_the_record_says_what_is_missing(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    assert [cell["key"] for cell in cells_in(tmp_path)] == ["matrix product 128"]
    assert "Not measured yet: m150, 4 x 16; m20, 2 x 16." in capsys.readouterr().out


def test_without_a_gpu_only_the_miniature_is_measured(b, tmp_path):
    with pytest.raises(ConfigError, match=r"--device cpu: .* --quick"):
        b.gpu.main(["--device", "cpu", "--record", str(tmp_path)])


@pytest.mark.parametrize("given", ["m20", "m20=0", "m20=2000", "m30=4", "m20=x"])
def test_a_batch_size_that_makes_no_sense_is_refused(b, given):
    with pytest.raises(ConfigError, match="NAME=SEQUENCES"):
        b.gpu.main(["--batches", given])


def measure(b, path, plan, **options):
    """Makes the cells of a plan; what failed, and the lines that were written."""
    with b.progress.Watch("gpu", 1, quiet=True) as watch:
        measuring = b.gpu.Measuring(plan, b.record.Record(path), "cpu", watch, **options)
        measuring.all()
    return measuring.failed, cells_in(path)


def small_plan(b):
    return replace(b.gpu_plan.quick_plan(), presets={})


def test_a_cell_that_fails_leaves_the_others_and_no_line(b, tmp_path, capsys):
    plan = small_plan(b)
    ((shape, (apart, _, stacked)),) = plan.small.items()
    broken = replace(apart, inner_steps=0)
    failed, lines = measure(b, tmp_path, replace(plan, small={shape: [broken, stacked]}))
    assert [line.partition(" (")[0] for line in failed] == ["m20, 2 x 16, k=4, apart"]
    assert "inner_steps=0" in failed[0]
    assert [line["key"] for line in lines[2:]] == [stacked.key]
    assert "Traceback" in capsys.readouterr().err


def test_a_cell_that_would_not_fit_is_skipped_with_a_line(b, tmp_path):
    plan = small_plan(b)
    failed, lines = measure(b, tmp_path, plan, room=lambda device: 1_000)
    assert not failed
    assert [line["skipped"].split(", and ")[1] for line in lines[2:]] == ["1.00 kB are free"] * 3
    told = "\n".join(b.gpu_tables.sections_of(plan, b.gpu_tables.Found(plan, b.record.Record(tmp_path)), "a CPU"))
    assert told.count("would take about") == 3


# -------------------------------------------------------------------------------------------------------------- both loops


def test_the_bare_loop_and_an_island_take_the_same_steps(b):
    subject = subject_of(b)
    bare, replica = b.gpu_loops.Bare(subject), b.gpu_loops.replica_of(subject)
    bare.steps(2)
    bare.steps(3)
    replica.train(5, Work(shard=0, start=0, schedule=0, examples=1))
    ours = replica.weights.read()
    for name, parameter in trainable(bare.module).items():
        assert torch.allclose(ours[name], parameter, rtol=1e-5, atol=1e-7)
        assert not torch.equal(parameter, dict(subject.module().named_parameters())[name])


def test_random_batches_are_the_same_for_whoever_asks_and_differ_by_place(b):
    batches = subject_of(b).batches
    assert isinstance(batches, ReadsAhead)
    protocol: Batches = batches
    ahead = list(batches.ahead(3, 5, 2, "cpu"))
    assert all(torch.equal(one, protocol.batch(3, 5 + at)) for at, one in enumerate(ahead))
    assert not torch.equal(ahead[0], ahead[1])
    assert not torch.equal(ahead[0], protocol.batch(4, 5))
    assert {protocol.batch(shard, 1000 * shard).shape for shard in range(64)} == {(2, 17)}
    assert protocol.tokens(ahead[0]) == 2 * 16


def test_the_other_has_a_turn_before_each_round_but_the_first(b):
    order = []

    def bare():
        order.append("bare")
        return 0.5

    turns = b.gpu_loops.Turns("cpu", 2, bare)
    computed = Computed(island=0, round=0, start_s=0.0, end_s=1.0, steps=1, batches=1, tokens=1, loss=1.0)
    finished = RoundFinished(
        round=1, islands=1, steps=1, virtual_time_s=1.0, tokens=1, local_updates=1, loss=1.0, sent_bytes_per_island=0.0
    )
    for _ in range(3):
        order.append("round")
        turns.emit(computed)
        turns.emit(finished)
    assert order == ["round", "bare", "round", "bare", "round"]
    assert turns.found["bare_s"] == [0.5, 0.5]
    assert len(turns.found["round_s"]) == 2
    assert all(0 <= outer <= whole for outer, whole in zip(turns.found["outer_s"], turns.found["round_s"], strict=True))


# ------------------------------------------------------------------------------------------------------- figures and verdicts


def test_examples_in_docstrings_are_true(b):
    assert doctest.testmod(b.gpu_plan).failed == 0


def test_flops_count_every_matrix_once_and_attention_by_half(b):
    model = GPT(layers=2, width=8, heads=2, head_size=6, tied=False)
    shape = b.gpu_plan.Shape(name="x", model=model, batch_size=1, seq_len=10, vocab_size=50, bare_steps=1)
    decoder = model.build(50, 10, seed=0)
    multiplied = sum(p.numel() for name, p in decoder.named_parameters() if not name.startswith("embedding"))
    assert shape.flops_per_token == 6 * multiplied + 12 * 2 * 12 * 10 * 0.5
    tied = replace(shape, model=replace(model, tied=True))
    assert tied.flops_per_token == shape.flops_per_token  # the one table multiplies, and is looked up besides


def published(b):
    return b.gpu_plan.plan_of(list(b.gpu_plan.PRESETS), {"m20": 32}, inner_steps=25, turns=3)


def test_the_plan_has_all_presets_and_islands_that_are_published(b):
    plan = published(b)
    assert {shape.name: (shape.batch_size, [cell.islands for cell in cells]) for shape, cells in plan.presets.items()} == {
        "m150": (32, [1, 4, 8]),
        "m20": (32, [1, 4, 8, 64]),
        "m60": (64, [1, 4, 8]),
        "m400": (16, [1, 4, 8]),
    }
    assert {(shape.batch_size, cell.islands, cell.way) for shape, cells in plan.small.items() for cell in cells} == {
        (size, islands, way) for size in (2, 8, 32) for islands in (4, 8, 64) for way in ("apart", "recorded", "stacked")
    }
    keys = [cell.key for cells in plan.groups.values() for cell in cells]
    assert len(set(keys)) == len(keys) == 13 + 27


def test_estimates_grow_with_islands_and_hold_what_each_must(b):
    for cells in published(b).presets.values():
        sizes = [cell.estimated_bytes for cell in cells]
        assert sizes == sorted(sizes)
        assert all(cell.estimated_bytes > 16 * cell.shape.params * cell.islands for cell in cells)


def told(b, path, shares=(1.0, 1.0), gain=2.0):
    """Verdicts over made-up seconds: islands that reach these shares of the bare loop, and a stack of that gain."""
    plan, record = b.gpu_plan.quick_plan(), b.record.Record(path)
    record.add(b.gpu_tables.matrix_key(plan.matrix), {"flops_per_s": 1e9})
    for cells in plan.groups.values():
        for cell in cells:
            share = {4: shares[0], 8: shares[1]}.get(cell.islands, 1.0) * (gain if cell.way == "stacked" else 1.0)
            round_s = cell.islands / share  # as many steps as the bare loop takes in a turn of one second, on each
            record.add(cell.key, {"round_s": [round_s] * 3, "bare_s": [1.0] * 3, "outer_s": [0.1] * 3})
    return b.gpu_tables.verdicts(plan, b.gpu_tables.Found(plan, record))


@pytest.mark.parametrize(("shares", "holds"), [((0.971, 0.98), True), ((0.99, 0.96), False), ((0.96, 0.99), False)])
def test_throughput_is_judged_by_the_worse_of_four_and_eight_islands(b, tmp_path, shares, holds):
    line = told(b, tmp_path, shares=shares)[0]
    assert line.startswith("**holds here**" if holds else "**does not hold here**")
    assert f"{shares[0]:.3f} with k=4 and {shares[1]:.3f} with k=8" in line


@pytest.mark.parametrize(("gain", "holds"), [(2.01, True), (1.99, False)])
def test_a_stack_is_judged_against_islands_one_after_the_other(b, tmp_path, gain, holds):
    line = told(b, tmp_path, gain=gain)[1]
    assert line.startswith("**holds here**" if holds else "**does not hold here**")
    assert f"{gain:.2f} with k=4" in line


def test_utilisation_is_flops_of_the_tokens_over_those_of_the_matrix_product(b, tmp_path):
    told(b, tmp_path)
    plan = b.gpu_plan.quick_plan()
    found = b.gpu_tables.Found(plan, b.record.Record(tmp_path))
    (shape, cells), *_ = plan.presets.items()
    one = found.measured(cells[0])
    assert one.tokens_per_s == shape.bare_steps * shape.tokens
    assert found.mfu(shape, one.tokens_per_s) == pytest.approx(one.tokens_per_s * shape.flops_per_token / 1e9)
    assert one.outer_share == pytest.approx(0.1)


def test_a_shape_of_a_later_run_is_compared_with_the_product_of_that_run(b, tmp_path):
    plan, record = b.gpu_plan.quick_plan(), b.record.Record(tmp_path)
    record.add(b.gpu_tables.matrix_key(plan.matrix), {"flops_per_s": 1e9})
    shape = next(iter(plan.presets))
    bare = {"bare_s": [1.0] * 3, "peak_bytes": None, "begin_bytes": None}
    record.add(b.gpu_tables.bare_key(shape, plan.turns), {**bare, "product_flops_per_s": 2e9})
    found = b.gpu_tables.Found(plan, record)
    assert found.mfu(shape, 1000.0) == pytest.approx(1000.0 * shape.flops_per_token / 2e9)
    assert "in which the matrix product reached 0.002 TFLOP/s" in "".join(b.gpu_tables.sections_of(plan, found, "a device"))
