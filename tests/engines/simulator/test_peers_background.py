"""Background exchanges: one at a time, awaited within the round, and done at the moment they end."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ExchangeFailed
from atoll.core.events import Computed, Exchanged
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, own, sharded, shared
from atoll.engines.shared_and_sharded_state import donated, pending_tokens
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link, Lost
from atoll.testing.conformance import digests
from atoll.testing.simulated_runs import simulate

HALF_A_SECOND = Link(latency_s=0.5, bandwidth_mbit_per_s=math.inf)
"""Between two islands: a total or a mean takes 1 s, a reduce-scatter and an all-gather half of it each."""


@dataclass(frozen=True)
class State:
    params: Tree = shared()


@dataclass(frozen=True)
class Scripted:
    """An algorithm whose round is `play(replica, peers)`."""

    play: Any
    steps_per_round: int = 1

    def init(self, params, peers):
        return State(params)

    async def round(self, state, replica, peers):
        replica.load(state.params)
        await self.play(replica, peers)
        return state


def run(play, **options):
    return simulate(Scripted(play), steps=1, cluster=Cluster(islands=2, link=HALF_A_SECOND, **options))


# ------------------------------------------------------------------------------------------------------------- what is refused


def test_flights_follow_each_other_and_may_be_awaited_in_any_order():
    totals = []

    async def play(replica, peers):
        one = peers.background(peers.total(1.0))
        two = peers.background(peers.total(2.0))
        totals.append((await two, await one))

    finished = run(play)
    assert totals == [(4.0, 2.0)] * 2
    assert [(event.start_s, event.end_s) for event in finished.events if isinstance(event, Exchanged)] == [(0.0, 1.0), (1.0, 2.0)]


def test_an_exchange_beside_an_open_flight_is_rejected():
    async def play(replica, peers):
        flight = peers.background(peers.total(1.0))
        await peers.total(2.0)
        await flight

    with pytest.raises(
        ExchangeFailed, match=r"calls total while its background exchange is open.*Await the background exchange first"
    ):
        run(play)


def test_a_round_that_ends_with_a_flight_open_is_rejected():
    async def play(replica, peers):
        peers.background(peers.total(1.0))

    with pytest.raises(
        ExchangeFailed, match=r"island 0 leaves round 0 with a background exchange open\. Await it within the round"
    ):
        run(play)


def test_a_flight_that_one_island_skips_is_an_error_not_a_hang():
    async def play(replica, peers):
        if peers.rank == 0:
            await peers.background(peers.total(1.0))

    with pytest.raises(ExchangeFailed, match=r"cannot end: island 0 in total.*same calls in the same order"):
        run(play)


# --------------------------------------------------------------------------------------------------------------- what happens


def test_a_flight_runs_while_its_island_computes_and_returns_its_result():
    """Computing takes 1 s and the exchange 1 s: both together take 1 s, and the event says that it was hidden."""
    brought = []

    async def play(replica, peers):
        flight = peers.background(peers.total(peers.rank + 1.0))
        assert not flight.done()
        await replica.train(1, peers.work(1))
        assert flight.done(), "it ends at the very moment at which computing ends"
        brought.append(await flight)

    done = run(play)
    assert brought == [3.0, 3.0]
    assert done.finished.virtual_time_s == 1.0
    assert [event.background for event in done.of(Exchanged)] == [True]
    assert done.finished.utilisation == 1.0


def test_flights_one_after_the_other_and_exchanges_between_them_keep_their_order():
    brought = []

    async def play(replica, peers):
        first = await peers.background(peers.total(1.0))
        between = await peers.total(10.0)
        flight = peers.background(peers.total(100.0))
        await replica.train(1, peers.work(1))
        brought.append((first, between, await flight))

    done = run(play, step_time_s=(0.5, 0.25))
    assert brought == [(2.0, 20.0, 200.0)] * 2
    assert [event.background for event in done.of(Exchanged)] == [True, False, True]
    assert done.finished.virtual_time_s == 3.0


def test_a_flight_of_several_exchanges_waits_for_the_slowest_at_each():
    ends = {}

    async def play(replica, peers):
        async def exchange():
            whole = await peers.reduce_scatter(replica.params(), 1.0)
            return await peers.all_gather(whole.value)

        await replica.train(1, peers.work(1))
        flight, counted = peers.background(exchange()), 0
        while not flight.done():
            await replica.train(1, peers.work(1))
            counted += 1
        await flight
        ends[peers.rank] = counted

    run(play, step_time_s=(1.0, 0.25))
    # The fast one waits from 0.25 on for the slow one, which arrives at 1; both are done at 2.
    assert ends == {0: 1, 1: 7}


def test_a_flight_without_waits_is_done_at_once():
    async def play(replica, peers):
        async def nothing():
            return "nothing"

        flight = peers.background(nothing())
        assert flight.done()
        assert await flight == "nothing"
        await replica.train(1, peers.work(1))

    assert run(play).finished.virtual_time_s == 1.0


# -------------------------------------------------------------------------------------------------------- fields that are donated


@dataclass(frozen=True)
class DonatedState:
    params: Tree = shared()
    slice: Tree = sharded(donated=True)
    kept: Tree = sharded()
    waiting: Gradient | None = own(donated=True)


@dataclass(frozen=True)
class Taking:
    """Notes what it is given."""

    seen: list = field(default_factory=list)
    steps_per_round: int = 1

    def init(self, params, peers):
        mine = params.shard(peers.rank, peers.size)
        return DonatedState(params, mine.copy(), mine.copy(), Gradient(params.copy(), 1.0, 1))

    async def round(self, state, replica, peers):
        self.seen.append((state.params.donated, state.slice.donated, state.kept.donated, state.waiting.sum.donated))
        mean = await peers.mean(state.params)
        waiting = Gradient(state.waiting.sum.copy(), 1.0, 1)
        return DonatedState(mean.value, state.slice.copy(), state.kept.copy(), waiting)


def test_a_round_gets_the_declared_fields_donated_and_no_others():
    simulate(algorithm := Taking(), steps=2, cluster=Cluster(islands=2))
    assert set(algorithm.seen) == {(False, True, False, True)}


@pytest.mark.parametrize("trouble", [{"lost": (Lost(island=0, round=10**6),)}, {"drop_probability": 0.001}], ids=repr)
def test_where_a_round_may_have_to_be_repeated_nothing_is_donated(trouble):
    simulate(algorithm := Taking(), steps=2, cluster=Cluster(islands=2, **trouble))
    assert set(algorithm.seen) == {(False, False, False, False)}


@pytest.mark.parametrize(
    "algorithm",
    [
        ZeRO1(optimizer=AdamW(lr=0.1)),
        ACCO(optimizer=AdamW(lr=0.1), batch="free"),
        ACCO(optimizer=SGD(lr=0.05), wire="bf16", sums="fp32"),
        DPU(optimizer=AdamW(lr=0.1), warmup=1),
        WP(optimizer=AdamW(lr=0.1), warmup=1),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_computing_in_donated_buffers_changes_no_bit(algorithm):
    """With a loss far in the future nothing is donated: the same run, twice the memory."""
    options = {"steps": 6, "evaluate_every": 100}
    frugal = simulate(algorithm, cluster=Cluster(islands=3), **options)
    careful = simulate(algorithm, cluster=Cluster(islands=3, lost=(Lost(island=0, round=10**6),)), **options)
    states = [[digests(tuple(vars(island.state).values())) for island in one.engine.islands.values()] for one in (frugal, careful)]
    assert states[0] == states[1]


def test_donation_marks_nested_trees_and_waiting_tokens_are_counted():
    state = DonatedState(*(Tree.of({"w": torch.ones(2)}) for _ in range(3)), Gradient(Tree.of({"w": torch.ones(2)}), 3.0, 48))
    assert pending_tokens(state) == 48
    marked = donated(state)
    assert (marked.slice.donated, marked.waiting.sum.donated, marked.kept.donated) == (True, True, False)
    assert (state.slice.deleted, state.waiting.sum.deleted, state.kept.deleted) == (True, True, False)
    assert marked.waiting[1:] == (3.0, 48)


def test_computing_beside_a_flight_is_reported_in_pieces_of_batches():
    done = simulate(ACCO(optimizer=SGD(lr=0.05), pieces_per_half=2), steps=2, cluster=Cluster(islands=2))
    assert {event.batches for event in done.of(Computed)} == {0.25}
    assert all(event.background for event in done.of(Exchanged))
