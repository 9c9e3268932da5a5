"""Islands of one machine share no card as long as there are others."""

import uuid

import pytest

from atoll.core.errors import ConfigError
from atoll.engines.elastic.gpu_claims import Cards


@pytest.fixture
def claimed():
    """Claims some of several cards that no other test knows."""
    names, claims = [uuid.uuid4().hex for _ in range(4)], []

    def claim(number, count=1, of=3):
        claims.append(Cards(names[:of], number, count))
        return claims[-1]

    yield claim
    for one in claims:
        one.close()


def test_each_island_has_the_card_of_its_number_and_who_comes_besides_one_that_is_free(claimed):
    assert [claimed(number).numbers for number in (0, 1, 1)] == [(0,), (1,), (2,)]


def test_when_all_are_taken_they_are_shared(claimed):
    assert sorted(claimed(0).numbers for _ in range(3)) == [(0,), (1,), (2,)]
    assert claimed(4).numbers == (1,)


def test_a_card_is_free_again_when_whoever_had_it_is_gone(claimed):
    claimed(0).close()
    assert claimed(0).numbers == (0,)


def test_islands_of_several_cards_have_them_side_by_side_and_the_rest_is_shared(claimed):
    assert [claimed(number, 2, of=4).numbers for number in (1, 0, 2)] == [(2, 3), (0, 1), (0, 1)]


def test_more_cards_than_there_are_cannot_be_had(claimed):
    with pytest.raises(ConfigError, match=r"--devices 4: this machine has 3 GPUs"):
        claimed(0, 4)
