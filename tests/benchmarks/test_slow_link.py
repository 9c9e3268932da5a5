"""A line that is really slow: in miniature where namespaces can be made, and what is made of figures everywhere."""

import json
from types import SimpleNamespace

import pytest

import atoll.testing.namespaces
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import simulate


@pytest.fixture(scope="module")
def namespaces():
    """The module, where it can be used."""
    reason = atoll.testing.namespaces.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return atoll.testing.namespaces


def test_a_slow_line_is_measured_in_miniature_and_not_twice(b, lines_of, namespaces, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- slow_link:begin -->\n<!-- slow_link:end -->\n")
    arguments = ["--quick", "--rates", "20", "--only", "atoll ACCO", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    b.slow_link.main(arguments)
    (cell,) = map(json.loads, lines_of(tmp_path))
    assert 15 < cell["line"]["mbit_per_s"] < 40  # in miniature a good part passes in the shaper's burst; unshaped it is thousands
    assert b.slow_tables.over_formula(cell) == pytest.approx(1, abs=0.03)
    at_the_rate = cell["formula_bytes"][0] - namespaces.burst_bytes(20)
    assert cell["round_s"] > at_the_rate * 8 / 20e6 > 0  # but for a burst, nothing goes faster than the line
    assert "\n### By rate\n" in page.read_text()
    b.slow_link.main(arguments)
    assert len(lines_of(tmp_path)) == 1
    assert "payload on the wire" in capsys.readouterr().out


def test_islands_that_fail_are_a_cell_with_an_error(b, namespaces):
    with namespaces.linked_pair() as islands:
        spec = b.slow_link.QUICK.spec(islands, ["atoll DDP"], (1, 1), None)
        specs = [b.slow_link.replace(spec, rank=rank, inner_steps=0, methods=["atoll DiLoCo"]) for rank in range(2)]
        (found,) = b.slow_link.carried_out(islands, specs, limit_s=60.0)
    assert found["error"].startswith("ConfigError: inner_steps=0")


def test_without_namespaces_the_benchmark_says_why_and_leaves_nothing(b, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(b.slow_link, "unavailable_reason", lambda: "only root may make network namespaces")
    b.slow_link.main(["--record", str(tmp_path / "none")])
    assert capsys.readouterr().out == "skipped: only root may make network namespaces.\n"
    assert not (tmp_path / "none").exists()


def test_predictions_are_the_formulas(b):
    params, measured = 1000, {"inner_steps": 7, "step_s": 0.5, "mbit_per_s": 0.064, "latency_s": 0.25}
    exchange_s = 2 * (0.25 + 2000 * 8 / 0.064e6)
    found = {name: b.slow_simulator.predicted_s(name, params=params, **measured) for name in b.slow_atoll.ALGORITHMS}
    expected = {"DDP": 0.5 + exchange_s, "ZeRO-1": 0.5 + exchange_s, "DiLoCo": 3.5 + exchange_s, "ACCO": 2 * exchange_s}
    assert found == pytest.approx(expected)


def test_what_is_computed_does_not_change_the_virtual_time(b):
    real = b.slow_island.workload_of(b.slow_link.QUICK.spec([SimpleNamespace(device="", address="")], [], (1, 1), None))
    cluster = Cluster(islands=2, step_time_s=(0.5,), link=Link(latency_s=0.01, bandwidth_mbit_per_s=3.0))
    weighing = b.slow_simulator.Weighing(b.slow_link.QUICK.params)
    for make in b.slow_atoll.ALGORITHMS.values():
        algorithm = make(2)
        times_s = [
            simulate(algorithm, steps=4, workload=workload, cluster=cluster, evaluate_every=4).finished.virtual_time_s
            for workload in (real, weighing)
        ]
        assert times_s[0] == times_s[1], algorithm


def test_a_cell_that_was_disturbed_is_measured_again_and_the_steadiest_counts(b):
    def found(*unsteady):
        made = iter([{"unsteady": each, "round_s": number} for number, each in enumerate(unsteady)])
        cell = b.slow_link.calmest(lambda: next(made), 3)
        return cell["round_s"], cell["tries"]

    assert [found(0.1, 0.0), found(0.9, 0.1, 0.0), found(0.9, 0.5, 0.7)] == [(0, 1), (1, 2), (1, 3)]
    assert b.slow_link.calmest(lambda: {"error": "timed out"}, 3) == {"error": "timed out", "tries": 1}


def test_a_crossover_is_judged_by_both_of_its_conditions(b):
    def told(acco_s, rival_s):
        cell = {"mbit_per_s": 50.0, "step_s": 2.0, "exchange_s": 0.9, "update_s": {"atoll ACCO": acco_s, "rival": rival_s}}
        return b.slow_tables.crossing_line(cell).split("**")[1]

    assert [told(2.2, 2.3), told(2.21, 2.3), told(2.1, 2.05)] == ["holds here", *["does not hold here"] * 2]
