"""Slow links: a smoke test where network namespaces are available, predictions and verdicts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import atoll.testing.network_namespaces
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import simulate


@pytest.fixture(scope="module")
def namespaces():
    """The module, where namespaces are available."""
    reason = atoll.testing.network_namespaces.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return atoll.testing.network_namespaces


def test_slow_link_measures_rate_bytes_and_time(b, lines_of, namespaces, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- slow_link:begin -->\n<!-- slow_link:end -->\n")
    arguments = ["--quick", "--rates", "20", "--only", "atoll ACCO", "--record", str(tmp_path), "--docs", str(page), "--quiet"]
    b.slow_link.main(arguments)
    (cell,) = map(json.loads, lines_of(tmp_path))
    assert 15 < cell["line"]["mbit_per_s"] < 40  # at small sizes much passes in the shaper's burst; unshaped it is thousands
    assert b.slow_tables.over_formula(cell) == pytest.approx(1, abs=0.03)
    at_the_rate = cell["formula_bytes"][0] - namespaces.burst_bytes(20)
    assert cell["round_s"] > at_the_rate * 8 / 20e6 > 0  # except for a burst, no byte is faster than the link
    assert "\n### By rate\n" in page.read_text()
    assert "payload on the wire" in capsys.readouterr().out


@pytest.mark.slow
def test_the_payload_of_every_codec_at_full_size_is_the_formulas(b, namespaces):
    size = b.slow_link.Size()
    methods = [method for method in b.slow_link.METHODS if b.slow_link.is_bytes(method)]
    assert len(methods) == len(b.codec_speed.CODECS)
    with namespaces.linked_pair() as islands:
        for island in islands:
            island.keep_from_resending()
        spec = replace(size.spec(islands, methods, (1, 2), None), batch_size=1, alone_steps=1, transfer_bytes=0)
        found = b.slow_link.both(islands, spec, None)
    assert [each.get("error") for each in found] == [None, None]
    for method in methods:
        algorithm = b.slow_atoll.ALGORITHMS[b.slow_worker.OURS[method]](size.inner_steps)
        predicted = b.slow_simulator.predicted(algorithm, params=size.params, step_s=1.0, mbit_per_s=100.0, latency_s=0.0)
        for each in found:
            (turn,) = each["rounds"][method]
            assert turn["payload_bytes"] == pytest.approx(predicted.sent_bytes, rel=b.slow_tables.BYTES_WITHIN), method


def test_without_namespaces_the_benchmark_gives_the_reason_and_writes_no_record(b, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(b.slow_link, "unavailable_reason", lambda: "only root may make network namespaces")
    b.slow_link.main(["--record", str(tmp_path / "none")])
    assert capsys.readouterr().out == "skipped: only root may make network namespaces.\n"
    assert not (tmp_path / "none").exists()


def test_predictions_equal_the_formulas(b):
    params, measured = 1000, {"step_s": 0.5, "mbit_per_s": 0.064, "latency_s": 0.25}
    exchange_s = 2 * (0.25 + 2000 * 8 / 0.064e6)
    int4_bytes = 2 * (256 // 2 + 2)  # of half of the weights: two whole blocks with a scale each
    predicted = b.slow_simulator.predicted
    algorithms = {name: make(20) for name, make in b.slow_atoll.ALGORITHMS.items()}
    found = {name: predicted(each, params=params, **measured) for name, each in algorithms.items()}
    counted = {name: each for name, each in found.items() if name.startswith("bytes of")}
    assert len(counted) == len(b.codec_speed.CODECS)
    for name, each in counted.items():
        codec, control = b.codec_speed.CODECS[name.removeprefix("bytes of ")], 16
        assert each.sent_bytes == control + (
            4000 if codec is None else codec.nbytes(1000) if codec.gathers else 2 * codec.nbytes(500)
        )
        del found[name]
    expected = {"DDP": 0.5 + exchange_s, "ZeRO-1": 0.5 + exchange_s, "DiLoCo": 10 + exchange_s, "ACCO": 2 * exchange_s}
    expected |= {"DiLoCo, int4": 10 + 2 * (0.25 + int4_bytes * 8 / 0.064e6), "streaming": 10, "streaming, int4": 10}
    assert {name: each.round_s for name, each in found.items()} == pytest.approx(expected)
    peaks = {name: each.busiest_second_bytes for name, each in found.items()}
    assert [peaks["DiLoCo"], peaks["DiLoCo, int4"], peaks["streaming"]] == pytest.approx([4000, 2 * int4_bytes, 4 * 167])
    assert [found[name].sent_bytes for name in ("DDP", "ACCO", "DiLoCo, int4")] == [4016, 8032, 2 * int4_bytes + 16]


def test_busy_shares_are_judged_against_the_simulators(b):
    def cell(method, round_s, predicted_s):
        return {"method": method, "rate": 10.0, "steps": 10, "step_s": 1.0, "round_s": round_s, "predicted_s": predicted_s}

    dense, streamed = cell(b.slow_tables.DENSE, 25.0, 25.0), cell(b.slow_tables.STREAMED, 10.4, 10.0)
    busy, shares = b.slow_tables.exchange_lines([dense, streamed])
    assert busy.startswith("**holds here**: at 10 Mbit/s streaming with int4 computes for 96 %")
    assert "DiLoCo in fp32 computes for 40 %" in busy
    assert shares.startswith("**holds here**")
    (slow, off) = b.slow_tables.exchange_lines([dense, cell(b.slow_tables.STREAMED, 12.5, 10.0)])
    assert [slow.split(":")[0], off.split(":")[0]] == ["**does not hold here**"] * 2


def test_a_failed_cell_has_a_verdict_and_a_row_that_say_why(b):
    why = "did not finish within 900 s"
    failed = {"method": b.slow_tables.STREAMED, "rate": b.slow_tables.SLOWEST, "error": why, "tries": 1}
    outcome, table, _ = b.slow_tables.sections_of([failed], params=1000, inner_steps=10)
    assert f"**does not hold here**: {b.slow_tables.STREAMED}, 10 Mbit/s, failed: {why}." in outcome
    assert f"{b.slow_tables.STREAMED}: failed, {why}" in table


def test_virtual_time_does_not_depend_on_the_computation(b):
    real = b.slow_island.workload_of(b.slow_link.QUICK.spec([SimpleNamespace(device="", address="")], [], (1, 1), None))
    cluster = Cluster(islands=2, step_time_s=(0.5,), link=Link(latency_s=0.01, bandwidth_mbit_per_s=3.0))
    weights_only = b.slow_simulator.WeightsOnly(b.slow_link.QUICK.params)
    for make in b.slow_atoll.ALGORITHMS.values():
        algorithm = make(2)
        times_s = [
            simulate(algorithm, steps=4, workload=workload, cluster=cluster, evaluate_every=4).finished.virtual_time_s
            for workload in (real, weights_only)
        ]
        assert times_s[0] == times_s[1], algorithm


def test_a_disturbed_cell_is_measured_again_and_the_steadiest_counts(b):
    def steadiest(*unsteady):
        made = iter([{"unsteady": each, "round_s": number} for number, each in enumerate(unsteady)])
        cell = b.slow_link.steadiest(lambda: next(made), 3)
        return cell["round_s"], cell["tries"]

    assert [steadiest(0.1, 0.0), steadiest(0.9, 0.1, 0.0), steadiest(0.9, 0.5, 0.7)] == [(0, 1), (1, 2), (1, 3)]
    assert b.slow_link.steadiest(lambda: {"error": "timed out"}, 3) == {"error": "timed out", "tries": 1}


def test_the_crossover_is_judged_by_both_conditions(b):
    def verdict(acco_s, rival_s):
        cell = {"mbit_per_s": 50.0, "step_s": 2.0, "exchange_s": 0.9, "update_s": {"atoll ACCO": acco_s, "rival": rival_s}}
        return b.slow_tables.crossing_line(cell).split("**")[1]

    assert [verdict(2.2, 2.3), verdict(2.21, 2.3), verdict(2.1, 2.05)] == ["holds here", *["does not hold here"] * 2]


@pytest.mark.parametrize(
    ("returncode", "out", "err", "error"),
    [
        (1, '{"error": "ConfigError: inner_steps=0"}', "", "ConfigError: inner_steps=0"),
        (-9, "", "", "did not finish within 60 s"),
        (3, "noise", "first\nlast", "ended with code 3 and printed: last"),
    ],
)
def test_the_error_of_an_island_is_its_result(b, tmp_path, returncode, out, err, error):
    log = tmp_path / "island"
    log.write_text(out)
    log.with_suffix(".err").write_text(err)
    assert b.slow_link._result(SimpleNamespace(returncode=returncode), log, 60.0)["error"] == error


def test_payload_is_the_bytes_without_headers(b):
    before, after = b.slow_probe.Counters(100, 1), b.slow_probe.Counters(100 + 5 * 66 + 1234, 6)
    assert after.payload_since(before) == 1234
