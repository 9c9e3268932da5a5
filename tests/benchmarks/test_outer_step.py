"""A smoke test of outer_step.py."""

import json

import pytest


def test_the_parts_of_an_outer_step_sum_to_no_more_than_its_time(b, lines_of, tmp_path, capsys):
    pytest.importorskip("torchft")
    b.outer_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
    (cell,) = map(json.loads, lines_of(tmp_path))
    assert "atoll's outer step takes" in capsys.readouterr().out
    for rank in cell["ranks"]:
        parts = [sum(turn) for turn in zip(*rank["parts"].values(), strict=True)]
        assert all(whole >= part for whole, part in zip(rank["seconds"]["atoll"], parts, strict=True))
