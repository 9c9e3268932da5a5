"""Who is named when ranks miss each other: the one that went first, as far as the accusations tell."""

import shutil
from datetime import timedelta

from torch.distributed import FileStore, HashStore

from atoll.engines.processes.failure_attribution import Blame


def blames(size=5):
    store = HashStore()
    return [Blame(store, rank, range(size)) for rank in range(size)]


def test_whom_nobody_else_missed_is_named_as_it_was_missed():
    zero, *_ = blames()
    assert zero.accuse(3) == (3, "")


def test_who_left_because_it_missed_another_is_not_named_but_that_other_is():
    zero, one, two, *_ = blames()
    assert zero.accuse(4) == (4, "")
    assert one.accuse(0) == (4, " (rank 0 missed it first)")
    assert two.accuse(1) == (4, " (rank 1 missed it first)"), "along the chain: 1 names what 0 told it"


def test_two_that_miss_each_other_name_each_other_and_never_themselves():
    zero, one, *_ = blames()
    assert zero.accuse(1)[0] == 1
    assert one.accuse(0)[0] == 0
    assert zero.accuse(1)[0] == 1, "also when the other has said so by now"


def test_accusations_in_a_circle_come_to_an_end():
    zero, one, two, three, *_ = blames()
    one.accuse(2)
    two.accuse(3)
    three.accuse(1)
    assert zero.accuse(1)[0] in (1, 2, 3)


def test_members_of_a_group_are_named_by_their_rank_in_it_and_others_by_their_own():
    store = HashStore()
    everybody = [Blame(store, rank, range(6)) for rank in range(6)]
    counterparts = Blame(store, 1, [1, 3, 5])
    assert counterparts.accuse(2) == (2, ""), "which is rank 5 of all"
    assert everybody[0].accuse(1) == (5, " (rank 1 missed it first)")
    everybody[3].accuse(4)
    assert Blame(store, 5, [1, 3, 5]).accuse(1) == (1, ", which missed rank 4"), "rank 4 is in another group"


def test_without_the_store_the_one_that_was_missed_is_named(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    store = FileStore(str(folder / "words"), 3)
    store.set_timeout(timedelta(milliseconds=50))
    blame = Blame(store, 0, range(3))
    shutil.rmtree(folder)
    assert blame.accuse(2) == (2, "")
