"""The GPU benchmark: a smoke test on a CPU, its loops, and its device figures."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.core.events import Computed, RoundFinished
from atoll.core.flat_tree import trainable
from atoll.core.protocols import Batches, ReadsAhead, Work
from atoll.replica.local_replica import torch_threads

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


# -------------------------------------------------------------------------------------------------------------- the command


def test_the_command_measures_every_cell_once(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path)])
    cells, printed = cells_in(tmp_path), capsys.readouterr().out
    b.gpu.main([*QUICK, "--record", str(tmp_path)])
    assert cells_in(tmp_path) == cells
    assert capsys.readouterr().out == printed
    assert len({cell["key"] for cell in cells}) == len(cells) == 1 + 2 + 4 + 6  # the product, bare loops, and islands of each shape
    assert len({cell["run"] for cell in cells}) == 1
    assert {cell["product_flops_per_s"] for cell in cells[1:]} == {cells[0]["flops_per_s"]}
    assert all(len(cell["losses"]) == 1 + 3 for cell in cells if "round_s" in cell)
    for cell in cells[1:]:
        assert all(len(cell[kind]) == 3 for kind in ("bare_s", "round_s", "outer_s") if kind in cell)
    assert all(
        outer < whole for cell in cells if "round_s" in cell for outer, whole in zip(cell["outer_s"], cell["round_s"], strict=True)
    )
    assert "**holds here**: all modes compute the same within rounding" in printed
    assert "over 3 shapes and numbers of islands" in printed
    assert printed.split("record: ")[0].strip() in (tmp_path / "README.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 1000


def another_device(path):
    """Changes the device of a record."""
    lines = cells_in(path)
    lines[0]["device"] = "NVIDIA H100"
    (path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_record_of_another_device_is_not_continued_but_its_tables_can_be_written(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    another_device(tmp_path)
    part = cells_in(tmp_path)
    with pytest.raises(ConfigError, match="measured on NVIDIA H100, and this is a CPU"):
        b.gpu.main([*QUICK, "--record", str(tmp_path)])
    b.gpu.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    assert cells_in(tmp_path) == part
    assert "On NVIDIA H100, " in capsys.readouterr().out


def test_no_cell_starts_after_the_time_limit_and_the_record_lists_missing_cells(b, tmp_path, capsys):
    b.gpu.main([*QUICK, "--record", str(tmp_path), "--minutes", "0"])
    assert [cell["key"] for cell in cells_in(tmp_path)] == ["matrix product 128"]
    assert "Not measured yet: m150, 4 x 16; m20, 2 x 16." in capsys.readouterr().out


def test_without_a_gpu_only_quick_is_allowed(b, tmp_path):
    with pytest.raises(ConfigError, match=r"--device cpu: .* --quick"):
        b.gpu.main(["--device", "cpu", "--record", str(tmp_path)])


@pytest.mark.parametrize("given", ["m20", "m20=0", "m20=2000", "m30=4", "m20=x"])
def test_an_invalid_batch_size_is_refused(b, given):
    with pytest.raises(ConfigError, match="NAME=SEQUENCES"):
        b.gpu.main(["--batches", given])


def measure(b, path, plan, **options):
    """Measures the cells of a plan. Returns the failures and the record's cells."""
    with b.progress.CellProgress("gpu", 1, quiet=True) as progress:
        measuring = b.gpu.Measuring(plan, b.record.Record(path), "cpu", progress, **options)
        measuring.all()
    return measuring.failed, cells_in(path)


def small_plan(b):
    return replace(b.gpu_plan.quick_plan(), presets={})


def test_a_failed_cell_is_not_recorded_and_the_others_are(b, tmp_path, capsys):
    plan = small_plan(b)
    ((shape, cells),) = plan.small.items()
    apart, _, stacked, _ = (cell for cell in cells if cell.islands == 4)
    broken = replace(apart, inner_steps=0)
    failed, lines = measure(b, tmp_path, replace(plan, small={shape: [broken, stacked]}))
    assert [line.partition(" (")[0] for line in failed] == ["m20, 2 x 16, k=4, apart"]
    assert "inner_steps=0" in failed[0]
    assert [line["key"] for line in lines[2:]] == [stacked.key]
    assert "Traceback" in capsys.readouterr().err


def test_a_cell_that_does_not_fit_is_recorded_as_skipped(b, tmp_path):
    plan = small_plan(b)
    failed, lines = measure(b, tmp_path, plan, free=lambda device: 1_000)
    assert not failed
    assert [line["skipped"].split(", and ")[1] for line in lines[2:]] == ["1.00 kB are free"] * 6
    text = "\n".join(b.gpu_report.sections_of(plan, b.gpu_results.Results(plan, b.record.Record(tmp_path)), "a CPU"))
    assert text.count("needs about") == 6


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


def test_shard_and_position_determine_a_random_batch(b):
    batches = subject_of(b).batches
    assert isinstance(batches, ReadsAhead)
    protocol: Batches = batches
    ahead = list(batches.ahead(3, 5, 2, "cpu"))
    assert all(torch.equal(one, protocol.batch(3, 5 + at)) for at, one in enumerate(ahead))
    assert not torch.equal(ahead[0], ahead[1])
    assert not torch.equal(ahead[0], protocol.batch(4, 5))
    assert {protocol.batch(shard, 1000 * shard).shape for shard in range(64)} == {(2, 17)}
    assert protocol.tokens(ahead[0]) == 2 * 16


def test_the_bare_loop_has_a_turn_before_each_round_but_the_first(b):
    order = []

    def bare():
        order.append("bare")
        return 0.5

    turns = b.gpu_loops.Turns("cpu", 2, bare)
    computed = Computed(island=0, round=0, start_s=0.0, end_s=1.0, steps=1, batches=1, tokens=1, loss=1.0)
    finished = RoundFinished(
        round=1, islands=1, steps=1, virtual_time_s=1.0, tokens=1, local_updates=1, loss=1.0, sent_bytes_per_island=0.0
    )
    for loss in (3.0, 2.0, 1.0):
        order.append("round")
        turns.emit(computed)
        turns.emit(replace(finished, loss=loss))
    assert order == ["round", "bare", "round", "bare", "round"]
    assert turns.found["bare_s"] == [0.5, 0.5]
    assert turns.found["losses"] == [3.0, 2.0, 1.0]
    assert len(turns.found["round_s"]) == 2
    assert all(0 <= outer <= whole for outer, whole in zip(turns.found["outer_s"], turns.found["round_s"], strict=True))


@pytest.mark.parametrize("mode", ["recorded", "stacked", "auto"])
def test_all_modes_compute_the_same_losses(b, mode):
    ((shape, _),) = small_plan(b).small.items()
    subject = b.gpu_loops.Subject(shape, "cpu")
    cell = b.gpu_plan.Cell(shape=shape, islands=4, mode=mode, inner_steps=2, turns=2)

    def losses(cell):
        return b.gpu_loops.measure_islands(cell, subject, b.gpu_loops.Bare(subject))["losses"]

    apart = losses(replace(cell, mode="apart"))
    assert losses(cell) == pytest.approx(apart, rel=1e-6)
    assert losses(replace(cell, islands=3)) != pytest.approx(apart, rel=1e-6), "the fourth island has other batches"


@pytest.mark.parametrize(("mode", "how", "rows"), [("recorded", "stacked", 1), ("stacked", "stacked", 4), ("auto", "auto", 4)])
def test_recorded_is_a_stack_of_one_row_and_auto_may_stack_all(b, monkeypatch, mode, how, rows):
    monkeypatch.setattr(b.gpu_loops, "BatchedCompute", lambda how, rows, loss, **rest: (how, rows))
    subject = subject_of(b)
    cell = b.gpu_plan.Cell(shape=subject.shape, islands=4, mode=mode, inner_steps=2, turns=2)
    assert b.gpu_loops.batched_compute_of(cell, subject, print) == (how, rows)
    assert b.gpu_loops.batched_compute_of(replace(cell, mode="apart"), subject, print) is None


@pytest.mark.parametrize(
    ("settled", "mode"),
    [
        ({"how": "stacked", "one": True, "all": True}, "stacked"),
        ({"how": "apart", "one": True, "all": False}, "recorded"),
        ({"how": "apart", "one": False, "all": False}, "apart"),
    ],
)
def test_auto_chose_recorded_if_it_kept_a_stack_of_one_row(b, settled, mode):
    batched = b.gpu_loops.BatchedCompute("auto", 4, lambda module, batch: None, compiled=False, on_decision=print)
    batched.from_part({**settled, "decided": True, "min_jobs": 2})
    assert b.gpu_loops.chosen_by(batched) == mode


# -------------------------------------------------------------------------------------------------------------- the device


def segment(pool, total, allocated, device=0):
    return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


def test_idle_pool_bytes_are_the_unallocated_bytes_of_this_devices_pools(b):
    segments = [segment((0, 0), 100, 10), segment((0, 1), 50, 20), segment((0, 2), 7, 0), segment((0, 1), 1000, 0, device=1)]
    assert b.gpu_device.idle_pool_bytes(segments, 0) == (50 - 20) + 7
    assert b.gpu_device.idle_pool_bytes(segments, 1) == 1000
    assert b.gpu_device.idle_pool_bytes([], 0) == 0


def test_a_pool_adds_to_the_peak_after_its_capture_and_not_twice_during_it(b, monkeypatch):
    device = {"now": 10, "most": 10, "segments": [segment((0, 0), 500, 10)]}
    for name, fake in {
        "memory_allocated": lambda device_name: device["now"],
        "max_memory_allocated": lambda device_name: device["most"],
        "reset_peak_memory_stats": lambda device_name: device.update(most=device["now"]),
        "memory_snapshot": lambda: device["segments"],
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    peak = b.gpu_device.Peak("cuda")
    # A pass is captured: its working memory, 80, is allocated then, and belongs to its pool afterwards.
    device.update(now=30, most=110, segments=[segment((0, 0), 500, 30), segment((0, 1), 80, 0)])
    assert peak.reached() == 110 - 10
    assert peak.pool_bytes() == 80
    peak.begin()
    assert peak.reached() == 30 + 80 - 10
    device.update(now=30, most=45)
    assert peak.reached() == 45 + 80 - 10
    assert b.gpu_device.Peak("cpu").reached() is None


def test_the_matrix_product_is_the_median_of_the_second_half(b, monkeypatch):
    turns_s = iter([9.0, 1.0, 2.0, 4.0, 3.0])
    clock = iter(range(100))
    monkeypatch.setattr(b.gpu_device, "seconds", lambda device, call: next(turns_s))
    monkeypatch.setattr(b.gpu_device, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    # The function reads the clock once before, and again from the second turn on: three more turns fit into four seconds.
    assert b.gpu_device.product_flops_per_s("cpu", 10, for_s=4.0, products=6) == 6 * 2 * 10**3 / 3.0
