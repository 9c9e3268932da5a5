"""The simulator's overhead: speed, outer steps and memory."""

import pytest

from atoll.core.protocols import Work
from atoll.models.gpt import GPT


def test_sim_overhead_measures_every_cell_once(b, lines_of, tmp_path, capsys):
    arguments = ["--quick", "--only", "speed", "--only", "outer", "--record", str(tmp_path), "--quiet"]
    b.sim_overhead.main(arguments)
    cells = lines_of(tmp_path)
    assert len(cells) == 1 + 4
    b.sim_overhead.main(arguments)
    assert lines_of(tmp_path) == cells
    assert "whole outer step" in capsys.readouterr().out


def test_the_bare_loop_has_the_losses_of_an_island(b):
    small = ("model=GPT(layers=1,width=8,heads=1,head_size=8)", "data.seq_len=16", "data.limit_bytes=60000", "optimizer.lr=0.01")
    plan = b.sim_speed.SpeedPlan(islands=2, steps=4, inner_steps=4, more=small)
    run, workload = plan.run(), b.sim_speed.workload_of(plan)
    replica = b.sim_speed.replica_of(run, workload, workload.loss, 1)
    losses = replica.train(4, Work(shard=1, start=0, schedule=0, examples=0)).losses
    assert b.sim_speed.bare_loop(plan, 1, 4) == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_memory_is_reported_per_further_island(b):
    held = b.sim_memory.use_memory(b.sim_memory.run_of(2, GPT(layers=1, width=8, heads=1, head_size=8), 257))
    assert 0 < held["rss_bytes"] <= held["peak_bytes"]
    few = {"islands": 4, "params": 10, "rss_bytes": 1000, "peak_bytes": 1000}
    many = {"islands": 8, "params": 10, "rss_bytes": 1000 + 4 * 160, "peak_bytes": 1000 + 4 * 240}
    assert [row[-1] for row in b.sim_overhead.memory_section(few, many).rows] == ["1.00", "1.50"]
