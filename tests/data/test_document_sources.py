"""Corpora can be read again; a limit keeps every domain; specs; the corpus of the standard library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from atoll.core.errors import ConfigError, DataError
from atoll.data.document_sources import Corpus, Document, open_corpus, stdlib_corpus


def corpus_of(**texts: list[str]) -> Corpus:
    def reader(domain: str) -> Callable[[], Iterator[Document]]:
        return lambda: (Document(f"{domain}/{n}", domain, text) for n, text in enumerate(texts[domain]))

    return Corpus(spec="test", domains={domain: reader(domain) for domain in texts})


def test_every_iteration_gives_the_same_documents():
    corpus = corpus_of(a=["one", "two"], b=["three"])
    assert list(corpus) == list(corpus)
    assert [d.text for d in corpus] == ["one", "two", "three"]


def test_blank_documents_are_left_out():
    assert [d.text for d in corpus_of(a=["", " \n\t", "x"])] == ["x"]


def test_a_corpus_of_blank_documents_is_refused():
    with pytest.raises(DataError, match="test holds no text"):
        list(corpus_of(a=["", "\n"], b=[]))


def test_a_limit_gives_every_domain_its_share():
    corpus = replace(corpus_of(large=["x" * 10] * 100, small=["y" * 10] * 3), limit_bytes=100)
    sizes = Counter(d.domain for d in corpus)
    assert sizes == {"large": 7, "small": 3}


def test_a_limit_keeps_the_documents_of_a_domain_together_and_in_order():
    corpus = corpus_of(a=["1", "2", "3", "4"], b=["5", "6", "7"])
    assert [d.text for d in replace(corpus, limit_bytes=5)] == ["1", "2", "3", "5", "6"]


def test_a_limit_that_the_whole_text_keeps_to_changes_nothing():
    corpus = corpus_of(a=["x" * 80], b=["y", "z"])
    assert list(replace(corpus, limit_bytes=82)) == list(corpus)
    assert list(replace(corpus, limit_bytes=81)) != list(corpus)


def test_one_long_document_is_cut_to_the_limit_and_does_not_push_others_out():
    corpus = replace(corpus_of(a=["x" * 1000], b=["y" * 5]), limit_bytes=20)
    assert [d.text for d in corpus] == ["x" * 10, "y" * 5]


def test_a_limit_never_cuts_through_a_character():
    (document,) = replace(corpus_of(a=["ééé"]), limit_bytes=5)
    assert document.text == "éé"


@given(st.lists(st.lists(st.text(max_size=12), max_size=5), min_size=1, max_size=4), st.integers(1, 60))
def test_a_limit_is_never_passed_and_unlimited_text_is_never_lost(texts: list[list[str]], limit: int):
    corpus = corpus_of(**{f"d{i}": [t.encode(errors="replace").decode() + "." for t in part] for i, part in enumerate(texts)})
    whole = sum(len(d.text.encode()) for part in corpus.domains.values() for d in part())
    try:
        given_bytes = sum(len(d.text.encode()) for d in replace(corpus, limit_bytes=limit))
    except DataError:  # nothing there, or nothing but parts of characters within the limit
        return
    assert given_bytes <= min(limit, whole)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="limit_bytes=0"):
        replace(corpus_of(a=["x"]), limit_bytes=0)


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
