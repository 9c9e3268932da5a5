"""ACCO in virtual time: an update takes the longer of computing and two exchanges, and free islands never wait."""

import itertools
import math

import pytest

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.zero import ZeRO1
from atoll.core.events import Computed, Exchanged, RoundFinished
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import Regression, simulate


def times_per_update(algorithm, m, step_time_s=(1.0,), islands=2, steps=6):
    """Seconds between one round's end and the next, and when the first ended. `m` is a reduce-scatter and an all-gather."""
    link = Link(latency_s=m / (2 * (islands - 1)), bandwidth_mbit_per_s=math.inf)
    cluster = Cluster(islands=islands, step_time_s=step_time_s, link=link)
    done = simulate(algorithm, steps=steps, cluster=cluster, evaluate_every=100)
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    return [later - earlier for earlier, later in itertools.pairwise(ends)], ends[0]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("step_time_s", "islands"), [((1.0,), 2), ((1.0,), 5), ((0.25, 1.0, 0.5), 3)])
def test_an_update_takes_the_longer_of_computing_and_two_exchanges(ratio, step_time_s, islands):
    """c = 1 s, of the slowest; m = ratio / 2. Once the first half-batch is there, max(c, 2m); ZeRO-1 and DDP take c + m."""
    m = ratio / 2
    each, first = times_per_update(ACCO(optimizer=SGD(lr=0.02)), m, step_time_s, islands)
    assert each == pytest.approx([max(1.0, 2 * m)] * 5)
    assert first == pytest.approx(0.5 + max(1.0, 2 * m))
    for other in (ZeRO1(optimizer=SGD(lr=0.02)), DDP(optimizer=SGD(lr=0.02))):
        each, first = times_per_update(other, m, step_time_s, islands)
        assert [first, *each] == pytest.approx([1.0 + m] * 6)


@pytest.mark.parametrize("islands", [2, 3, 4])
def test_each_commit_sends_exactly_twice_zero1s_bytes(islands):
    options = {"cluster": Cluster(islands=islands), "workload": Regression(hidden=3)}

    def per_update(algorithm):
        done = simulate(algorithm, steps=4, **options)
        return [[sum(e.sent_bytes[i] for e in done.of(Exchanged) if e.round == r) for i in range(islands)] for r in range(4)]

    acco, zero1 = per_update(ACCO(optimizer=AdamW(lr=0.1))), per_update(ZeRO1(optimizer=AdamW(lr=0.1)))
    assert acco == [[2 * sent for sent in round] for round in zero1]


def test_in_the_free_mode_no_island_is_idle_and_a_faster_one_contributes_in_proportion():
    cluster = Cluster(islands=4, step_time_s=(1.0, 1.0, 1.0, 0.25), link=Link(latency_s=0.2))
    done = simulate(ACCO(optimizer=SGD(lr=0.01), batch="free"), steps=20, cluster=cluster, evaluate_every=100)
    for ledger in done.engine.accounting.ledgers:
        assert ledger.computed_s == pytest.approx(ledger.present_s)
    counts = [sum(event.batches for event in done.of(Computed) if event.island == island) for island in range(4)]
    assert counts[3] / counts[0] == pytest.approx(4.0, rel=0.05)
    fixed = simulate(ACCO(optimizer=SGD(lr=0.01)), steps=8, cluster=cluster, evaluate_every=100)
    assert fixed.engine.accounting.ledgers[3].computed_s < 0.3 * fixed.engine.accounting.ledgers[3].present_s


@pytest.mark.parametrize(("latency_s", "halves"), [(0.25, 1), (0.25 + 2.0**-30, 2), (0.25 - 2.0**-30, 1), (0.5, 2)])
def test_an_exchange_that_ends_at_the_moment_a_micro_batch_ends_is_over(latency_s, halves):
    """Half a batch takes 0.5 s and an exchange twice the latency: all numbers are exact in binary."""
    cluster = Cluster(islands=2, link=Link(latency_s=latency_s, bandwidth_mbit_per_s=math.inf))
    done = simulate(ACCO(optimizer=SGD(lr=0.01), batch="free", clock="commits"), steps=5, cluster=cluster)
    assert sum(2 * event.batches for event in done.of(Computed)) == 2 * (1 + 2 * 5 * halves)
