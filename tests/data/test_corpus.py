"""Corpus specs, and the corpus of the standard library."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.data.corpus import open_corpus, stdlib_corpus


@pytest.mark.parametrize("spec", ["", "wikipedia", "file:a.txt", "files:", "hf:", "stdlib:3", "prepared"])
def test_an_unknown_spec_is_refused_with_all_that_is_allowed(spec: str):
    with pytest.raises(DataError, match=r"is not known. Use stdlib, files:PATH.*hf:.*prepared:"):
        open_corpus(spec)


def test_each_known_spec_opens_its_reader_with_the_limit(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello")
    (document,) = open_corpus(f"files:{tmp_path}", limit_bytes=4)
    assert document.text == "hell"
    assert open_corpus("stdlib", limit_bytes=10).spec == "stdlib"


def test_the_standard_library_is_some_megabytes_in_a_handful_of_domains():
    sizes: Counter[str] = Counter()
    for document in stdlib_corpus():
        sizes[document.domain] += len(document.text.encode())
    assert 5e6 < sum(sizes.values()) < 30e6
    assert 4 <= len(sizes) <= 12
    assert max(sizes.values()) < 0.4 * sum(sizes.values())
    assert "topics" in sizes


def test_tests_installed_packages_and_generated_files_are_left_out():
    names = [document.name for document in stdlib_corpus()]
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "topics.py"}
    assert not [name for name in names if name.startswith("_sysconfigdata")]


def test_names_are_unique_and_their_order_is_the_same_every_time():
    names = [document.name for document in stdlib_corpus()]
    assert len(set(names)) == len(names)
    assert names == [document.name for document in stdlib_corpus()]
    assert "asyncio/tasks.py" in names
    assert "topics/assert" in names
