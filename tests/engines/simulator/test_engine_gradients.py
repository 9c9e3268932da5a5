"""The simulator with algorithms that exchange gradients: what is counted, drawn, left out and refused."""

import math
from itertools import accumulate, pairwise

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Computed, Exchanged, IslandJoined, RoundFailed, RoundFinished, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import whole_steps
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.optim.delayed_nesterov import Buffered
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster, Link, Lost
from atoll.testing.simulated_runs import Recorder, Regression, RegressionBatches, run_engine, simulate


def test_a_pool_shares_the_run_evenly_also_where_rounds_differ_in_length():
    """Free batches hold several nominal ones, so the run has fewer rounds than steps."""
    acco = ACCO(optimizer=SGD(lr=0.02), batch="free", clock="samples")
    done = simulate(acco, steps=40, cluster=Cluster(islands=4, step_time_s=(1.0, 1.0, 1.0, 4.0), pool="doubling"))
    joined, rounds = [event.round for event in done.of(IslandJoined)], done.of(RoundFinished)
    assert len(joined) == 2
    before = next(event for event in rounds if event.round == joined[0])
    assert 20 <= before.steps < 20 + 8


def test_bytes_of_a_run_are_those_of_its_exchanges_after_a_failed_round_too():
    cluster = Cluster(islands=3, lost=(Lost(island=1, round=2),))
    done = simulate(ACCO(optimizer=SGD(lr=0.02)), steps=5, cluster=cluster, workload=Regression(hidden=3))
    assert len(done.of(RoundFailed)) == 1
    assert sum(sum(event.sent_bytes) for event in done.of(Exchanged)) == pytest.approx(3 * done.finished.sent_bytes_per_island)


@pytest.mark.parametrize(
    "algorithm", [DDP(accumulation=3), ZeRO1(), ACCO(pieces_per_half=2), ACCO(batch="free"), DPU(warmup=1), WP()], ids=repr
)
def test_gradients_make_one_local_update_per_island_and_round(algorithm):
    done = simulate(algorithm, steps=6, cluster=Cluster(islands=3, step_time_s=(1.0, 2.0)))
    assert done.finished.local_updates == 3 * done.finished.rounds


def test_slices_do_not_travel_over_a_star():
    with pytest.raises(ConfigError, match=r"topology=star.*ring"):
        simulate(ACCO(), steps=2, cluster=Cluster(islands=2, topology="star"))


def test_pieces_of_a_batch_share_its_jitter():
    """Else cutting batches finer would average delays away."""
    cluster = Cluster(islands=2, step_time_jitter=0.5, link=Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf))
    for pieces in (1, 4):
        done = simulate(ACCO(pieces_per_half=pieces), steps=6, cluster=cluster)
        spans = [event.end_s - event.start_s for event in done.of(Computed) if event.island == 0]
        batches = [spans[at : at + 2 * pieces] for at in range(0, len(spans) - 2 * pieces, 2 * pieces)]
        assert all(batch == pytest.approx([batch[0]] * len(batch)) for batch in batches)
        assert len({round(batch[0], 9) for batch in batches}) == len(batches)


@pytest.mark.parametrize(
    ("algorithm", "waits"),
    [
        (DDP(clip_norm=1.0), 3),
        (ZeRO1(clip_norm=1.0), 3),
        (DPU(clip_norm=1.0, warmup=1), 3),
        (WP(clip_norm=1.0), 3),
        (ACCO(clip_norm=1.0), 5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_host_reads_once_per_pass_once_per_exchange_and_once_per_commit(algorithm, waits, monkeypatch):
    """On a GPU each read waits until the device has computed all that was launched. Islands are stacked, so one pass is that of
    all of them."""
    reads, at_round, workload = [], [], Regression(hidden=3)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, read=read: (reads.append(read), read(tensor))[1])

    class Counting(Recorder):
        def emit(self, event):
            if isinstance(event, RoundFinished):
                at_round.append(len(reads))

    setup = SimSetup(
        cluster=Cluster(islands=4),
        params=Tree.of(workload.module()),
        batches=workload.batches,
        make_replica=lambda island: LocalReplica(workload, optimizer=SGD(lr=0.02)),
        evaluate=lambda params, buffers: {"loss": 0.0},
        sink=Counting(),
        steps=6,
        evaluate_every=6,
        batched_compute=BatchedCompute("stacked", 4, workload.loss, compiled=False, on_decision=lambda how, why: None),
    )
    run_engine(SimEngine(algorithm, setup, count_memory=False))
    assert [after - before for before, after in pairwise(at_round[1:])] == [waits] * 4


class Poison(Regression):
    """One batch of shard 1 makes the loss not a number."""

    def loss(self, module, batch):
        loss = super().loss(module, batch)
        return loss * math.nan if torch.equal(batch[0], self.batches.batch(1, 1)[0]) else loss


def test_data_parallel_training_skips_and_reports_an_update_that_is_not_finite():
    workload = Poison(batches=RegressionBatches(num_shards=2))
    done = simulate(DDP(optimizer=SGD(lr=0.05)), steps=3, cluster=Cluster(islands=2), workload=workload)
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(1, [1])]
    assert done.finished.outer_steps == 2
    assert done.params.is_finite()


def test_the_island_of_a_skipped_update_is_not_blamed_for_a_later_divergence():
    workload = Poison(batches=RegressionBatches(num_shards=2))
    done = simulate(ZeRO1(optimizer=SGD(lr=0.05)), steps=4, cluster=Cluster(islands=2), workload=workload)
    assert done.engine.accounting.divergence == ""


def test_a_run_by_samples_ends_with_the_commit_that_completes_them_though_thirds_do_not_add_up():
    """Of three islands, commits of 10 pieces are 10/6 nominal batches each; 9 of them are 15, and not 14.999."""
    *_, steps = accumulate([10 / 6] * 9)  # from Python 3.12 on, `sum` would compensate for the rounding
    assert steps != 15.0
    assert whole_steps(steps) == 15


def test_a_rule_without_a_rate_cannot_go_by_samples():
    with pytest.raises(ConfigError, match=r"Buffered has none.*Use clock=commits"):
        ACCO(optimizer=Buffered(rule=Nesterov(lr=0.1), size=2), clock="samples")
