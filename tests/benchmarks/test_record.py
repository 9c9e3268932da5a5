"""Records and pages: finished cells persist, and tables are written between the markers."""

import json
import re

import pytest

from atoll.core.errors import ConfigError
from atoll.data.prepare import Preparation, prepare


def test_the_next_process_reads_finished_cells(b, tmp_path):
    b.record.Record(tmp_path).add("one", {"loss": 0.1})
    again = b.record.Record(tmp_path)
    assert again["one"] == {"key": "one", "loss": 0.1}
    assert again.get("two") is None
    assert (tmp_path / "source.txt").read_text().count("commit:") == 1, "a process that only reads writes no source"
    again.add("two", {})
    again.add("three", {})
    assert (tmp_path / "source.txt").read_text().count("commit:") == 2


def test_the_page_has_the_commands_that_measured_cells(b, tmp_path):
    b.record.Record(tmp_path, ["measure", "--minutes", "3"]).add("one", {})
    b.record.Record(tmp_path, ["measure", "--minutes", "4"]).add("two", {})
    again = b.record.Record(tmp_path, ["measure", "--minutes", "0"])
    assert "```\nmeasure --minutes 3\nmeasure --minutes 4\n```" in again.write("Title", []).read_text()
    nothing = b.record.Record(tmp_path / "empty", ["measure"])
    assert "```\nmeasure\n```" in nothing.write("Title", []).read_text()


def test_published_pages_end_with_the_commands_of_their_source(b):
    """So that writing the tables again changes nothing there."""
    pages = [page for page in b.record.RECORDS.glob("*/README.md") if (page.parent / "source.txt").exists()]
    shown = [page for page in pages if "## How to reproduce" in page.read_text("utf-8")]
    assert len(shown) > 25
    for page in shown:
        assert page.read_text("utf-8").endswith(f"\n\n{b.record.Record(page.parent).reproduced}\n"), page


def test_the_readme_of_the_benchmarks_names_every_module_and_commands_that_exist(b):
    folder = b.record.RECORDS.parent
    page = (folder / "README.md").read_text("utf-8")
    assert [module.name for module in folder.glob("*.py") if module.name not in page] == []
    commands = re.findall(r"`python benchmarks/(\w+)\.py([^`]*)`", page)
    assert len(commands) > 25
    for script, arguments in commands:
        source = (folder / f"{script}.py").read_text("utf-8")
        for docs in re.findall(r"docs/\w+\.md|README\.md", arguments):
            marker = f"<!-- {getattr(b, script).MARKER}:begin -->"
            assert marker in (folder.parent / docs).read_text("utf-8"), (script, docs)
        assert "__main__" in source, script


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


def test_another_text_of_equal_counts_is_refused(b, tmp_path):
    folders = {}
    for name, word in (("one", "abcd"), ("two", "abce")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join([f"{word} " * 40] * 8))
        corpus = f"files:{tmp_path}/{name}.txt"
        prepare(Preparation(corpus=corpus, tokenizer="bytes", validation_corpus=corpus), tmp_path / name)
        folders[name] = tmp_path / name
    record = b.record.Record(tmp_path / "record")
    b.record.check_texts(record, {"text": folders["one"]})
    file = record.path / "text.json"
    known = json.loads(file.read_text())
    assert {*known["text"]["token_digests"]} == {"train", "validation"}
    known["text"]["domains"] = json.loads((folders["two"] / "meta.json").read_text())["domains"]  # the digest alone differs
    file.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="holds another text"):
        b.record.check_texts(record, {"text": folders["two"]})
    del known["text"]["token_digests"]  # as in a record of an older version
    file.write_text(json.dumps(known))
    b.record.check_texts(record, {"text": folders["two"]})
    assert json.loads(file.read_text()) == known
