"""Fully sharded: ZeRO-1's bits, and half as many bytes again."""

import pytest

from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.events import Exchanged
from atoll.optim.adam import AdamW
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import simulate

RULE = AdamW(lr=0.1)
CLUSTER = Cluster(islands=3, link=Link(latency_s=0.1, bandwidth_mbit_per_s=1e9))


@pytest.mark.parametrize("batches", [1, 3])
def test_the_weights_are_zero1s_to_the_bit(batches):
    one, other = (
        simulate(kind(optimizer=RULE, accumulation=batches, clip_norm=1.0), steps=4, cluster=CLUSTER) for kind in (ZeRO1, FSDP)
    )
    assert other.params.equal(one.params)


@pytest.mark.parametrize("batches", [1, 2])
def test_weights_are_gathered_twice_per_batch_and_gradients_reduced_once(batches):
    done = simulate(FSDP(optimizer=RULE, accumulation=batches), steps=2, cluster=CLUSTER)
    first = [event.what for event in done.of(Exchanged) if event.round == 0]
    assert first == ["all_gather"] * (2 * batches - 1) + ["reduce_scatter", "all_gather"]
    plain = simulate(ZeRO1(optimizer=RULE, accumulation=batches), steps=2, cluster=CLUSTER)
    assert done.finished.sent_bytes_per_island == pytest.approx((1 + 2 * batches) / 2 * plain.finished.sent_bytes_per_island)
