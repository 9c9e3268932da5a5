"""Outer steps, in miniature."""

import json

import pytest


def test_outer_steps_are_measured_in_miniature_and_not_twice(b, lines_of, tmp_path, capsys):
    pytest.importorskip("torchft")
    for _ in range(2):
        b.outer_step.main(["--quick", "--record", str(tmp_path), "--quiet"])
        (cell,) = map(json.loads, lines_of(tmp_path))
    assert "atoll's outer step takes" in capsys.readouterr().out
    for rank in cell["ranks"]:
        parts = [sum(turn) for turn in zip(*rank["parts"].values(), strict=True)]
        assert all(whole >= part for whole, part in zip(rank["seconds"]["atoll"], parts, strict=True))
