"""Who waits for a place at a hub."""

import pytest

from atoll.engines.ray.start_barrier import Gathering


def test_the_first_wait_for_the_others_and_later_ones_for_nobody():
    gathering = Gathering(2, first=True)
    gathering.add(0, 0)
    assert gathering.seated() == {}
    gathering.add(1, 1)
    assert gathering.seated() == {0: 0, 1: 1}
    assert gathering.seated() == {}, "each takes its place once"
    gathering.add(0, 2)
    assert gathering.seated() == {0: 2}


@pytest.mark.parametrize("life", [0, 1])
def test_who_has_died_waits_no_more_but_whoever_took_its_place_does(life):
    gathering = Gathering(2, first=True)
    gathering.add(0, 1)
    gathering.drop(0, life)
    assert gathering.has(0, 1) == (life != 1)
