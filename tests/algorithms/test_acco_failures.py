"""If all islands read the same data, ACCO is gradient descent: with any number of islands, failed rounds, and islands that join and
leave."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.core.events import Computed, Evaluated, Recut, RoundFailed
from atoll.core.flat_tree import Tree
from atoll.engines.simulator.collectives import RoundAborted
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Lost
from atoll.testing.simulated_runs import Recorder, Regression, RegressionBatches, simulate

# ---------------------------------------------------------------------------------------------------------- gradient descent


class Doubled(RegressionBatches):
    """All examples of one shard, twice over: both halves of every batch are the same on every island."""

    def batch(self, shard, position):
        inputs, targets = super().batch(0, 0)
        return torch.cat([inputs, inputs]), torch.cat([targets, targets])


DOUBLED = Regression(Doubled(full_batch=True))


def descent(steps, lr=0.05):
    """Plain torch on the full batch."""
    module = DOUBLED.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        DOUBLED.loss(module, DOUBLED.batches.batch(0, 0)).backward()
        optimizer.step()
    return Tree.of(module)


@pytest.mark.parametrize("islands", [1, 2, 4])
@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_full_batch_gradient_descent_through_it_is_gradient_descent(islands, batch):
    """Every gradient is the full one, so the estimate is the commit, and both are a plain step."""
    cluster = Cluster(islands=islands, step_time_s=(1.0, 0.3))
    done = simulate(ACCO(optimizer=SGD(lr=0.05), batch=batch, clock="commits"), workload=DOUBLED, steps=20, cluster=cluster)
    assert float((done.params.flat - descent(20).flat).abs().max()) < 1e-6


# --------------------------------------------------------------------------------------------------------- islands that are lost


def counted(engine):
    """By island: the weight of what was committed by all, of what waits, and of what was dropped."""
    return [(island.state.committed, island.state.first.weight, island.state.dropped) for island in engine.islands.values()]


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_a_round_that_misses_an_island_is_void_and_keeps_the_old_weights_and_the_waiting_half(lost, batch):
    """Every batch is the same, so the run with one void round must have the bits of a run that is one round shorter."""
    algorithm = ACCO(optimizer=AdamW(lr=0.05), batch=batch)
    never = Cluster(islands=3, lost=(Lost(island=0, round=10**6),))
    lossy = Cluster(islands=3, lost=(Lost(island=1, round=lost),))
    clear = simulate(algorithm, steps=4, workload=DOUBLED, cluster=never)
    done = simulate(algorithm, steps=5, workload=DOUBLED, cluster=lossy)
    assert [(event.round, event.what, event.islands) for event in done.of(RoundFailed)] == [(lost, "reduce_scatter", [1])]
    assert done.params.equal(clear.params)
    assert counted(done.engine) == counted(clear.engine)
    assert done.finished.tokens == clear.finished.tokens
    assert done.finished.virtual_time_s > clear.finished.virtual_time_s


class Cut:
    """Peers whose link fails at this reduce-scatter or all-gather of a round, by its number."""

    def __init__(self, peers, at):
        self._peers, self._left = peers, at

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def _count(self, what):
        self._left -= 1
        if self._left == 0:
            raise RoundAborted(what, [1], 100.0)

    async def reduce_scatter(self, tree, weight=1.0, **options):
        self._count("reduce_scatter")
        return await self._peers.reduce_scatter(tree, weight, **options)

    async def all_gather(self, shard):
        self._count("all_gather")
        return await self._peers.all_gather(shard)


class CutOff:
    """An algorithm whose first island loses its link once, in the round after `commits`, at that exchange."""

    def __init__(self, algorithm, *, commits, exchange):
        self._algorithm, self._commits, self._exchange = algorithm, commits, exchange
        self._struck = False

    def __getattr__(self, name):
        return getattr(self._algorithm, name)

    async def round(self, state, replica, peers):
        if peers.rank == 0 and state.steps == self._commits and not self._struck:
            self._struck = True
            peers = Cut(peers, self._exchange)
        return await self._algorithm.round(state, replica, peers)


@pytest.mark.parametrize("exchange", [1, 2, 3, 4])
def test_an_island_lost_in_any_exchange_of_a_round_voids_it_whole(exchange):
    """The estimate's two exchanges and the commit's two: the weights, moments and waiting halves before them stand."""
    cluster = Cluster(islands=2, lost=(Lost(island=0, round=10**6),))
    algorithm = ACCO(optimizer=AdamW(lr=0.05))
    clear = simulate(algorithm, steps=4, workload=DOUBLED, cluster=cluster)
    done = simulate(CutOff(algorithm, commits=2, exchange=exchange), steps=5, workload=DOUBLED, cluster=cluster)
    whats = ["reduce_scatter", "all_gather"]
    assert [(event.round, event.what) for event in done.of(RoundFailed)] == [(2, whats[(exchange - 1) % 2])]
    assert done.params.equal(clear.params)
    assert counted(done.engine) == counted(clear.engine)


class Laborious:
    """Regression that takes some milliseconds, and notes when it is through."""

    def __init__(self):
        self._workload, self.through = Regression(), []

    def __getattr__(self, name):
        return getattr(self._workload, name)

    def loss(self, module, batch):
        for _ in range(10):
            torch.ones(400, 400) @ torch.ones(400, 400)
        self.through.append(1)
        return self._workload.loss(module, batch)

    def evaluate(self, module):
        return {"loss": 0.0}


class Noting(Recorder):
    """Remembers how much a laborious workload was through with at each event of these kinds."""

    def __init__(self, workload):
        super().__init__()
        self.workload, self.noted = workload, []

    def emit(self, event):
        super().emit(event)
        if isinstance(event, Evaluated | RoundFailed):
            self.noted.append(len(self.workload.through))


def test_a_void_round_leaves_nothing_behind_that_computes_on():
    """Both islands computed a first half. Then one of them had begun with the second when the other's link failed: a replica that
    is still busy cannot begin the next round."""
    sink, lossy = Noting(Laborious()), Cluster(islands=2, lost=(Lost(island=1, round=0),))
    simulate(ACCO(optimizer=SGD(lr=0.05)), steps=1, cluster=lossy, workload=sink.workload, sink=sink)
    start, failed, _ = sink.noted
    assert failed - start == 3


# ---------------------------------------------------------------------------------------------- islands that join and leave


def test_islands_that_join_and_leave_change_nothing_where_all_read_the_same():
    """The islands re-shard and keep their moments: it is still gradient descent, with any islands. The waiting gradients of a
    leaver are lost."""
    cluster = Cluster(islands=4, away=(Away(island=1, start=2, stop=5), Away(island=3, start=0, stop=3)))
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=8, workload=DOUBLED, cluster=cluster)
    assert float((done.params.flat - descent(8).flat).abs().max()) < 1e-6
    assert [(event.round, event.islands) for event in done.of(Recut)] == [(2, [0, 2]), (3, [0, 2, 3]), (5, [0, 1, 2, 3])]
    [committed] = {commits for commits, _, _ in counted(done.engine)}
    waiting = sum(first + dropped for _, first, dropped in counted(done.engine))
    assert sum(2 * event.batches for event in done.of(Computed)) == committed + waiting + 1


def test_a_joiner_starts_without_a_waiting_half():
    """It computes three halves in its first round, the others two."""
    cluster = Cluster(islands=3, away=(Away(island=2, start=0, stop=2),))
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=4, cluster=cluster)
    halves = {
        (island, round): sum(2 * e.batches for e in done.of(Computed) if (e.island, e.round) == (island, round))
        for island in (0, 2)
        for round in (2, 3)
    }
    assert halves == {(0, 2): 2, (0, 3): 2, (2, 2): 3, (2, 3): 2}
