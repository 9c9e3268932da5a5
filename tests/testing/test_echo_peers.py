"""Echo peers contribute the same, in the buffers that a real engine would use."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.echo_peers import EchoPeers, EchoReplica, run_alternating
from atoll.testing.simulated_runs import Regression, simulate


def ones(count=8, dtype=torch.float32):
    return Tree.of({"w": torch.ones(count, dtype=dtype)})


def test_a_slice_lies_in_the_donated_buffer_and_so_does_the_whole():
    peers, tree = EchoPeers(4), ones()
    memory = tree.flat.data_ptr()
    scattered = run_alternating(peers.reduce_scatter(tree, 1.0), peers)
    whole = run_alternating(peers.all_gather(scattered.value), peers)
    assert scattered.value.flat.data_ptr() == whole.flat.data_ptr() == memory
    assert whole["w"].tolist() == [4.0] * 8


def test_what_is_exchanged_is_donated_and_what_is_borrowed_is_copied():
    peers = EchoPeers(2)
    for exchange in (peers.reduce_scatter, peers.mean):
        tree, lent = ones(), ones()
        run_alternating(exchange(tree), peers)
        run_alternating(exchange(lent.borrow()), peers)
        assert tree.deleted
        assert lent.equal(ones())


def test_a_wide_sum_has_single_precision_and_a_buffer_of_its_own():
    peers = EchoPeers(3)
    scattered = run_alternating(peers.reduce_scatter(ones(9, torch.bfloat16), wide=True), peers)
    assert scattered.value.flat.dtype == torch.float32
    assert scattered.value["w"].tolist() == [3.0] * 3


def test_a_gradient_that_is_not_finite_is_reported():
    peers = EchoPeers(2)
    assert not run_alternating(peers.reduce_scatter(ones() * float("nan")), peers).finite


def test_one_background_exchange_at_a_time():
    peers = EchoPeers(2)
    peers.background(peers.total(1.0))
    with pytest.raises(ExchangeFailed, match="open already"):
        peers.background(peers.total(1.0))
    peers.turn()


def test_an_island_whose_only_peer_is_itself_computes_what_the_simulator_computes():
    algorithm, workload = ACCO(optimizer=AdamW(lr=0.1)), Regression()
    done = simulate(algorithm, steps=4, workload=workload, cluster=Cluster(islands=1))
    peers, replica = EchoPeers(1), LocalReplica(workload, optimizer=AdamW(lr=0.1))
    state = algorithm.init(replica.params(), peers)
    for _ in range(4):
        state = run_alternating(algorithm.round(state, EchoReplica(replica), peers), peers)
    assert state.params.equal(done.params)
