"""The corpus that everybody has."""

from __future__ import annotations

from collections import Counter

from atoll.data.stdlib_corpus import stdlib_corpus


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
