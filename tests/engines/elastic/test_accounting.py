"""The accounting and the data leases of a run that many islands join and leave. No processes."""

import json
from fractions import Fraction

import pytest
import torch

from atoll.core.events import Attended, IslandJoined, IslandLeft, Leased
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import ComputeSpan
from atoll.engines.elastic.accounting import ElasticAccounting
from atoll.engines.elastic.aggregation import Agreement, DeltaSummary, IslandReport
from atoll.engines.elastic.commit import Commit
from atoll.engines.elastic.data_leases import ABSENT_KEPT, DataLeases
from atoll.engines.elastic.state_version import state_digest
from atoll.engines.round_record import ExchangeRecord, RoundRecord

STARTS, GROUP = 10_000, 20
NOTHING = Tree.of({"nothing": torch.zeros(0)})


class Replicated:
    """What an island replicates besides the model."""

    def __init__(self):
        self.leases, self.accounting = DataLeases(shards=3, batches=2, units=10 * STARTS), ElasticAccounting()

    def parts(self):
        return {"leases": self.leases.to_parts(), "validator": {}, **self.accounting.to_parts()}

    @staticmethod
    def joined(sent):
        """An island that fetches this."""
        new, parts = Replicated(), json.loads(sent)
        new.leases.from_parts(parts["leases"])
        new.accounting.from_parts(parts)
        new.accounting.begin(parts["accounting"]["totals"]["round"])
        return new

    @property
    def digest(self):
        return state_digest({}, self.parts())

    def commit(self, names, number):
        """Commits round `number`, one second after the round before. Returns the events."""
        times_s = number - 0.25, number - 0.125
        reports = []
        for rank, name in enumerate(names):
            span = ComputeSpan(number - 0.75, times_s[0], 1, 1, [1.0], 4)
            exchange = ExchangeRecord("mean", *times_s, sent_bytes(name, number), 7 + rank, 1.0, background=False)
            record = RoundRecord([span], [exchange], tokens=4)
            reports.append(IslandReport("", "", record=record, now_s=float(number)))
        deltas = [DeltaSummary(1.0, True, 1.0)] * len(names)
        commit = Commit(tuple(names), (), number, 1, Agreement(NOTHING, deltas, {}, float(len(names)), reports, 0))
        self.accounting.record_members(commit, number)
        leased = [name for name in names if name in self.leases.active]
        settled = self.leases.settle(leased)
        self.leases.lease(names)
        self.leases.check()
        self.accounting.record_round(commit, settled, number, number=number, alive=len(names), digest="")
        return self.accounting.drain()


def sent_bytes(name, number):
    return 1000 + number % 11 + len(name)


def test_what_islands_replicate_stays_small_over_many_starts_of_joiners_and_counts_them_all():
    """Every start of a joiner has a new name. An island that joins late replicates the same as one that was always there."""
    one, late = Replicated(), None
    sizes, figures, left, delivered = [], {}, 0, []
    for number in range(1, 2 * STARTS // GROUP + 1):
        first = (number - 1) // 2 * GROUP
        names = ["island-0000", *(f"joiner-{start}" for start in range(first, first + GROUP))]  # each stays for two rounds
        events = one.commit(names, number)
        left += sum(isinstance(event, IslandLeft) for event in events)
        delivered += [tuple(unit) for event in events if isinstance(event, Leased) for _, *unit in event.delivered]
        for name in names:
            sent, rounds = figures.get(name, (0, 0))
            figures[name] = sent + sent_bytes(name, number), rounds + 1
        if late is not None:
            assert late.commit(names, number) == events
        if number == STARTS // GROUP:
            late = Replicated.joined(json.dumps(one.parts()))
        if number % 100 == 0:
            sizes.append(len(json.dumps(one.parts())))
    assert late.digest == one.digest
    assert late.parts() == one.parts()
    assert (len(figures), left) == (STARTS + 1, STARTS - GROUP)
    assert max(sizes) < 1.05 * sizes[0] < 150_000
    assert next(event.known for event in events if isinstance(event, Attended)) == len(figures)
    assert len({*delivered}) == len(delivered) == one.leases.delivered == (STARTS // GROUP) * (GROUP + 2) - 1
    one.accounting.set_metrics({"loss": 1.0})
    finished = one.accounting.finished(float(number), 0, "")
    assert finished.sent_bytes_per_island == float(Fraction(sum(sent for sent, _ in figures.values()), len(figures)))
    assert finished.utilisation == pytest.approx(0.5)


def test_a_number_is_reused_only_after_many_others_have_left():
    one, numbers = Replicated(), {}
    for number in range(1, ABSENT_KEPT + 10):
        for event in one.commit(["island-0000", f"joiner-{number}"], number):
            if isinstance(event, IslandJoined):
                numbers[number] = event.island
    assert [numbers[number] for number in range(2, ABSENT_KEPT + 3)] == [*range(2, ABSENT_KEPT + 3)]
    assert numbers[ABSENT_KEPT + 3] == numbers[1]
    back = [
        event for event in one.commit(["island-0000", f"joiner-{ABSENT_KEPT}"], ABSENT_KEPT + 10) if isinstance(event, IslandJoined)
    ]
    assert [event.island for event in back] == [numbers[ABSENT_KEPT]], "an island that returns soon has its number"


def test_units_of_islands_that_left_together_return_under_their_own_numbers():
    one, many = Replicated(), [f"joiner-{number}" for number in range(2 * ABSENT_KEPT)]
    one.commit(["island-0000", *many], 1)
    events = one.commit(["island-0000", *(f"new-{number}" for number in range(2 * ABSENT_KEPT))], 2)
    (leased,) = (event for event in events if isinstance(event, Leased))
    assert sorted(island for island, *_ in leased.returned) == [*range(1, 2 * ABSENT_KEPT + 1)]


def test_names_of_an_older_checkpoint_have_the_numbers_of_their_places():
    one = Replicated()
    one.commit(["a", "b"], 1)
    parts = one.parts()
    del parts["accounting"]["departed"]
    other = Replicated.joined(json.dumps({**parts, "known": ["a", "b"]}))
    assert other.parts() == one.parts()
