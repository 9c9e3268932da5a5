"""Who is through, and who has left."""

import pytest
import torch

from atoll.core.errors import ExchangeFailed
from atoll.loop.uneven_inputs import GOES_ON, GONE, THROUGH, Company, Lone


class Scripted(Lone):
    """A wire over which the others say what they were told to: a row for each exchange, none for who is missed."""

    def __init__(self, *rows):
        super().__init__()
        self._rows, self.size = list(rows), 1 + len(rows[0])

    def all_gather_surviving(self, *numbers, has_left):
        return [list(numbers), *self._rows.pop(0)]

    def remove(self, ranks):
        self.size -= len(ranks)


def company(wire, *, together=True, needs_all=None):
    return Company(wire, left=lambda island: True, together=together, needs_all=needs_all)


def test_who_is_through_stays_until_all_are():
    others = company(Scripted([[5.0, 0.0, THROUGH], [6.0, 0.0, GOES_ON]], [[0.0, 0.0, THROUGH], [6.0, 0.0, THROUGH]]))
    others.through = True
    assert others.all_gather_numbers(1.0) == [[1.0], [5.0], [6.0]]
    assert (others.over, others.size) == (False, 3)
    others.all_gather_numbers(1.0)
    assert (others.over, others.size) == (True, 3)


def test_who_leaves_alone_is_left_out_after_the_exchange_in_which_it_said_so():
    others = company(Scripted([[5.0, 0.0, THROUGH], [6.0, 0.0, GOES_ON]], [[7.0, 0.0, GOES_ON]]), together=False)
    assert others.all_gather_numbers(1.0) == [[1.0], [5.0], [6.0]]
    assert (others.over, others.size) == (False, 3)
    assert others.all_gather_numbers(2.0) == [[2.0], [7.0]]
    assert others.size == 2


def test_who_is_gone_is_left_out_at_once_whether_it_said_so_or_not():
    others = company(Scripted([None, [0.0, 0.0, GONE], [6.0, 1.0, GOES_ON]]))
    assert others.all_gather_numbers(1.0, True) == [[1.0, True], [6.0, 1.0]]
    assert others.size == 2


def test_where_nobody_may_be_lost_who_is_gone_is_named_by_its_first_number():
    others = company(Scripted([[0.0, 0.0, GONE], [6.0, 1.0, GOES_ON]]), needs_all="its slice went with it")
    with pytest.raises(ExchangeFailed, match=r"island 1 left by an exception, and its slice went with it\. Mend it"):
        others.all_gather_numbers(1.0)


def test_islands_keep_their_names_when_others_have_left():
    others = company(Scripted([None, [6.0, 1.0, GOES_ON], [7.0, 1.0, GOES_ON]]))
    assert others.names([1, 2]) == "island 1, island 2"
    others.all_gather_numbers(1.0)
    assert others.names([1, 2]) == "island 2, island 3"


def test_a_lone_island_adds_up_what_it_has():
    flat = torch.tensor([1.0, 2.0])
    assert Lone().reduce_scatter(flat, [0.5]).tolist() == [0.5, 1.0]
    assert Lone().reduce_scatter(flat.bfloat16(), [1.0], torch.float32).dtype == torch.float32
