"""A run's memory from its log: the most of each island, and a line to read."""

from atoll.core.events import MemoryCounted
from atoll.telemetry.memory import memory_line, memory_of, read_memory


def counted(island, round, gradients, **more):
    return MemoryCounted(
        **{
            "island": island,
            "round": round,
            "params": 1000,
            "parameters_bytes": 2000,
            "gradients_bytes": gradients,
            "communication_bytes": 0,
            "optimizer_bytes": 6000,
            "copies_bytes": 0,
            "peak_bytes": 8000 + gradients,
            "formula": "2+2+12/2",
            "formula_bytes": 10000,
            **more,
        }
    )


def test_each_island_is_told_by_its_largest_round():
    summary = memory_of([counted(1, 0, 10), counted(0, 0, 1000), counted(0, 1, 2000), counted(0, 2, 500)])
    assert [(island.island, island.peak_bytes) for island in summary.islands] == [(0, 10000), (1, 8010)]
    assert summary.largest.island == 0
    assert summary.to_dict()["islands"][0]["gradients_bytes"] == 2000


def test_the_line_says_what_was_held_and_what_the_formula_has():
    line = memory_line(memory_of([counted(0, 1, 2000)]))
    assert "10.0 kB an island at most: parameters 2.00 kB, gradients 2.00 kB, optimizer 6.00 kB" in line
    assert line.endswith("2+2+12/2 bytes a parameter, 10.0 kB")
    assert "formula" not in memory_line(memory_of([counted(0, 1, 2000, formula=None, formula_bytes=None)]))


def test_where_nothing_was_counted_there_is_nothing_to_tell(tmp_path):
    assert memory_of([]) is None
    assert read_memory(tmp_path) is None
    (tmp_path / "events.jsonl").write_text(counted(0, 1, 5).to_json() + "\n")
    assert read_memory(tmp_path).largest.gradients_bytes == 5
