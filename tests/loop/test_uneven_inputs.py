"""Exhausted islands stay or leave, and failed islands are excluded."""

from types import SimpleNamespace

import pytest
from torch import nn

from atoll.core.errors import ExchangeFailed
from atoll.core.protocols import Work
from atoll.loop.replica import LoopReplica
from atoll.loop.uneven_inputs import CONTINUES, EXHAUSTED, LEFT, UnevenCollectives
from atoll.replica.flat_parameters import ModuleWeights


class ScriptedCollectives(UnevenCollectives):
    """The other islands send scripted rows, one list per exchange; None for an island that does not answer."""

    def __init__(self, *rows, finish_together=True, needs_all=""):
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 1 + len(rows[0]))
        super().__init__(group, range(group.size()), None, timeout_s=1.0, finish_together=finish_together, needs_all=needs_all)
        self._rows = list(rows)

    def all_gather_surviving(self, *numbers, has_left):
        return [list(numbers), *self._rows.pop(0)]


def test_with_finish_together_an_exhausted_island_stays_until_all_are_exhausted():
    islands = ScriptedCollectives([[5.0, 0.0, EXHAUSTED], [6.0, 0.0, CONTINUES]], [[0.0, 0.0, EXHAUSTED], [6.0, 0.0, EXHAUSTED]])
    islands.exhausted = True
    assert islands.all_gather_numbers(1.0) == [[1.0], [5.0], [6.0]]
    assert (islands.finished, islands.size) == (False, 3)
    islands.all_gather_numbers(1.0)
    assert (islands.finished, islands.size) == (True, 3)


def test_with_finish_alone_an_exhausted_island_is_excluded_after_its_last_round():
    both = [[5.0, 0.0, EXHAUSTED], [6.0, 0.0, CONTINUES]]
    islands = ScriptedCollectives(both, both, [[7.0, 0.0, CONTINUES]], finish_together=False)
    for _ in range(2):  # a round may have several exchanges
        assert islands.all_gather_numbers(1.0) == [[1.0], [5.0], [6.0]]
        assert (islands.finished, islands.size) == (False, 3)
    islands.begin_round()
    assert islands.all_gather_numbers(2.0) == [[2.0], [7.0]]
    assert islands.size == 2


def test_a_failed_island_is_excluded_at_once_with_or_without_its_message():
    islands = ScriptedCollectives([None, [0.0, 0.0, LEFT], [6.0, 1.0, CONTINUES]])
    assert islands.all_gather_numbers(1.0, True) == [[1.0, True], [6.0, 1.0]]
    assert islands.size == 2


def test_if_all_islands_are_needed_a_failed_one_raises():
    islands = ScriptedCollectives([[0.0, 0.0, LEFT], [6.0, 1.0, CONTINUES]], needs_all="its slice is lost")
    with pytest.raises(ExchangeFailed, match=r"island 1 left by an exception, and its slice is lost\."):
        islands.all_gather_numbers(1.0)


def test_islands_keep_their_initial_numbers_after_others_left():
    islands = ScriptedCollectives([None, [6.0, 1.0, CONTINUES], [7.0, 1.0, CONTINUES]])
    assert islands.listed([1, 2]) == "island 1, island 2"
    islands.all_gather_numbers(1.0)
    assert islands.listed([1, 2]) == "island 2, island 3"


@pytest.mark.parametrize(("weigh", "tokens", "share"), [("batches", 0, 0.5), ("tokens", 8, 1.0)])
def test_a_half_round_has_half_of_the_weight_and_its_tokens_have_it_already(weigh, tokens, share):
    weights = ModuleWeights(nn.Linear(2, 1))
    replica = LoopReplica(weights, weights, "user", 2, weigh)
    training = replica.train(2, Work(shard=0, start=0, schedule=0, examples=1))
    training.send(None)
    replica.logged_tokens = 8
    training.send(None)  # the user has taken the first of two steps
    replica.exhausted = True
    with pytest.raises(StopIteration) as ended:
        training.send(None)
    assert (ended.value.value, replica.take_share()) == (tokens, share)
