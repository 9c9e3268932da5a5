"""Islands of one machine share no card as long as there are others."""

import uuid

import pytest

from atoll.runs.elastic.cards import Card


@pytest.fixture
def claimed():
    """Claims one of three cards that no other test knows."""
    names, cards = [uuid.uuid4().hex for _ in range(3)], []

    def claim(first):
        cards.append(Card(names, first))
        return cards[-1]

    yield claim
    for card in cards:
        card.close()


def test_each_island_has_the_card_of_its_number_and_who_comes_besides_one_that_is_free(claimed):
    assert [claimed(first).number for first in (0, 1, 1)] == [0, 1, 2]


def test_when_all_are_taken_they_are_shared(claimed):
    assert sorted(claimed(0).number for _ in range(3)) == [0, 1, 2]
    assert claimed(4).number == 1


def test_a_card_is_free_again_when_whoever_had_it_is_gone(claimed):
    claimed(0).close()
    assert claimed(0).number == 0
