"""What TLS adds to an exchange and to a commit."""

import pytest


@pytest.mark.slow
def test_all_transports_are_measured_in_turn(b):
    cell = b.elastic_transports.transport_costs(b.elastic_transports.Plan(10_000, 2))
    for rank in cell["ranks"]:
        for what in ("exchange", "commit"):
            assert {name: len(turns) for name, turns in rank[what].items()} == dict.fromkeys(b.elastic_transports.TRANSPORTS, 2)
    assert "TLS adds" in b.elastic_transports.transport_section(cell)


def test_what_tls_adds_is_told_apart_from_what_a_commit_adds(b):
    gloo, plain, tls = b.elastic_transports.TRANSPORTS
    exchange = {gloo: [0.1, 0.1], plain: [0.2, 0.2], tls: [0.5, 0.7]}
    commit = {gloo: [0.2, 0.2], plain: [0.3, 0.3], tls: [0.7, 0.9]}
    ranks = [{"exchange": exchange, "commit": commit}, {"exchange": {name: [0.0, 0.0] for name in exchange}, "commit": commit}]
    section = b.elastic_transports.transport_section({"params": 10, "ranks": ranks})
    assert "TLS adds 0.400 s to an exchange over plain sockets, and 0.500 s to a commit." in section
    assert f"| {plain} | 0.200 | 2.00 | 0.300 | 1.50 | 0.100 |" in section
