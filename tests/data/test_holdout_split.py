"""The held-out split depends on the content of documents, not on their order, and is never empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from atoll.core.errors import ConfigError
from atoll.data.document_sources import Document
from atoll.data.holdout_split import TRAIN, VALIDATION, Split, plan_split, split_documents


def some(count: int) -> list[Document]:
    return [Document(f"d{n}", "a", f"text {n}") for n in range(count)]


def side_of(documents: list[Document], fraction: float, side: int) -> set[Document]:
    return {document for at, document in split_documents(documents, plan_split(documents, fraction)) if at == side}


def test_about_the_fraction_is_held_out():
    assert 60 <= len(side_of(some(2000), 0.05, VALIDATION)) <= 140


def test_the_same_documents_are_held_out_in_any_order():
    documents = some(200)
    assert side_of(documents, 0.1, VALIDATION) == side_of(documents[::-1], 0.1, VALIDATION)


def test_more_text_moves_no_document_to_the_other_side():
    few, many = some(500), some(1000)
    assert side_of(few, 0.1, VALIDATION) == side_of(many, 0.1, VALIDATION) & set(few)


def test_another_name_or_text_is_another_draw():
    documents = some(400)
    renamed = [replace(d, name=d.name + "x") for d in documents]
    rewritten = [replace(d, text=d.text + "x") for d in documents]
    held = {d.name for d in side_of(documents, 0.5, VALIDATION)}
    assert held != {d.name.removesuffix("x") for d in side_of(renamed, 0.5, VALIDATION)}
    assert held != {d.name for d in side_of(rewritten, 0.5, VALIDATION)}


@given(st.integers(2, 30), st.floats(1e-9, 1 - 1e-9))
def test_two_documents_or_more_leave_at_least_one_on_each_side_and_lose_none(count: int, fraction: float):
    documents = some(count)
    train, validation = side_of(documents, fraction, TRAIN), side_of(documents, fraction, VALIDATION)
    assert train
    assert validation
    assert len(train) + len(validation) == count
    assert train | validation == set(documents)


def test_a_lone_document_is_cut_after_a_line_near_the_fraction():
    document = Document("a", "a", "".join(f"line {n:03}\n" for n in range(100)))
    (_, train), (_, validation) = split_documents([document], plan_split([document], 0.1))
    assert train.text + validation.text == document.text
    assert train.text.endswith("\n")
    assert len(validation.text.splitlines()) in (10, 11)


def test_a_lone_document_without_lines_is_cut_where_the_fraction_falls():
    document = Document("a", "a", "x" * 100)
    (_, train), (_, validation) = split_documents([document], plan_split([document], 0.25))
    assert (len(train.text), len(validation.text)) == (75, 25)


def test_a_text_held_out_by_itself_is_all_for_validation():
    train, other = some(3), [Document("v", "a", "held out")]
    assert list(split_documents(train, Split(0), other)) == [*((TRAIN, d) for d in train), (VALIDATION, other[0])]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2, float("nan")])
def test_a_fraction_that_leaves_a_side_empty_is_refused(fraction: float):
    with pytest.raises(ConfigError, match=r"validation_fraction=.*between 0 and 1"):
        plan_split(some(3), fraction)


def test_a_copy_of_a_text_that_is_held_out_is_held_out_too():
    """Three hundred texts, each twice under different names: no text may be on both sides."""
    documents = [Document(f"{copy}/{number}", "domain", f"text {number}") for number in range(300) for copy in "ab"]
    split = plan_split(documents, 0.1)
    sides = [set(), set()]
    for side, document in split_documents(documents, split):
        sides[side].add(document.text)
    assert not sides[0] & sides[1]
    assert sides[0]
    assert sides[1]


def test_copies_of_one_text_alone_are_on_both_sides():
    documents = [Document(name, "domain", "the same") for name in "abc"]
    assert {side for side, _ in split_documents(documents, plan_split(documents, 0.1))} == {0, 1}
