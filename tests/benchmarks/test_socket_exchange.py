"""A smoke test of socket_exchange.py, and its verdict."""

import json


def test_all_transports_are_measured_in_turn(b, lines_of, tmp_path, capsys):
    b.socket_exchange.main(["--quick", "--record", str(tmp_path), "--quiet"])
    (cell,) = map(json.loads, lines_of(tmp_path))
    for rank in cell["ranks"]:
        for what in ("exchange", "commit"):
            assert {name: len(turns) for name, turns in rank[what].items()} == dict.fromkeys(b.socket_exchange.TRANSPORTS, 2)
    assert "TLS adds" in capsys.readouterr().out


def test_a_commit_that_costs_more_than_allowed_does_not_hold(b):
    names = b.socket_exchange.TRANSPORTS

    def words(commit_s):
        rank = {"exchange": {name: [0.1, 0.1] for name in names}, "commit": {name: [commit_s, 0.15] for name in names}}
        return b.socket_exchange.sections_of({"params": 10, "ranks": [rank, rank]})[0]

    assert "it holds" in words(0.15)
    assert "**it does not hold**" in words(0.5)
