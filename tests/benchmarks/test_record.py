"""Records and pages: finished cells persist, and tables are written between the markers."""

import json

import pytest

from atoll.core.errors import ConfigError


def test_the_next_process_reads_finished_cells(b, tmp_path):
    b.record.Record(tmp_path).add("one", {"loss": 0.1})
    again = b.record.Record(tmp_path)
    assert again["one"] == {"key": "one", "loss": 0.1}
    assert again.get("two") is None
    assert (tmp_path / "source.txt").read_text().count("commit:") == 1, "a process that only reads writes no source"
    again.add("two", {})
    again.add("three", {})
    assert (tmp_path / "source.txt").read_text().count("commit:") == 2


def test_a_truncated_last_line_is_dropped(b, lines_of, tmp_path):
    b.record.Record(tmp_path).add("one", {})
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "two", "lo')
    again = b.record.Record(tmp_path)
    assert again.get("two") is None
    again.add("three", {})
    assert [json.loads(line)["key"] for line in lines_of(tmp_path)] == ["one", "three"]


def test_an_invalid_line_is_named(b, tmp_path):
    (tmp_path / "cells.jsonl").write_text('{"key": "one"}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*cells\.jsonl is not a cell"):
        b.record.Record(tmp_path)


def test_tables_replace_only_the_text_between_the_markers(b, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n")
    for text in ("new", "newer"):
        assert b.record.replace_between(page, "x", text)
    assert page.read_text() == "before\n<!-- x:begin -->\n\nnewer\n\n<!-- x:end -->\nafter\n"


def test_a_page_without_markers_is_refused_and_a_missing_page_is_not(b, tmp_path):
    page = tmp_path / "page.md"
    assert not b.record.replace_between(page, "x", "text")
    page.write_text("<!-- x:end --> <!-- x:begin -->")
    with pytest.raises(ConfigError, match="x:begin"):
        b.record.has_markers(page, "x")
