"""One island's memory equals the papers' formulas; the tracker counts every storage; echo peers use a real engine's buffers."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import LocalReplica, torch_threads
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, simulate
from benchmarks.decoder_workload import DecoderWorkload

RULE = AdamW()
FIVE_MILLION = DecoderWorkload.of(GPT(layers=4, width=256, heads=4, head_size=64), vocab_size=8192)


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.mark.parametrize(
    ("algorithm", "islands", "whole", "sharded"),
    [
        pytest.param(ACCO(optimizer=RULE, clip_norm=1.0), 2, 2 + 2 + 2, 12, id="ACCO-2"),
        pytest.param(ACCO(optimizer=RULE, clip_norm=1.0), 4, 2 + 2 + 2, 12, id="ACCO-4", marks=pytest.mark.slow),
        pytest.param(ZeRO1(optimizer=RULE, clip_norm=1.0, accumulation=2), 4, 2 + 2, 12, id="ZeRO1-4"),
        pytest.param(ZeRO1(optimizer=RULE, clip_norm=1.0, accumulation=2), 2, 2 + 2, 12, id="ZeRO1-2", marks=pytest.mark.slow),
        pytest.param(DPU(optimizer=RULE, warmup=0), 2, 2 + 2 + 2, 12, id="DPU"),
        pytest.param(WP(optimizer=RULE), 2, 2 + 2 + 2, 12 + 4, id="WP"),
    ],
)
def test_all_live_storage_of_an_island_is_within_five_percent_of_the_formula(b, algorithm, islands, whole, sharded):
    measured = b.island_memory.measure_peak_memory(algorithm, FIVE_MILLION, size=islands)
    formula = whole + sharded / islands
    assert measured.params >= 5_000_000
    assert formula <= measured.per_param <= 1.05 * formula, {str(site): size for site, size in measured.at_peak.items()}
    if isinstance(algorithm, ACCO):  # storage that lives only within a stage is a few chunks
        assert {site.stage for site in measured.transient} == {"estimate", "commit"}
        assert max(measured.transient.values()) < 0.5 * measured.params


def test_a_module_in_single_precision_takes_twice_the_memory_and_the_same_optimizer(b):
    small = DecoderWorkload.of(GPT(layers=2, width=64, heads=2, head_size=32), vocab_size=512)
    half, single = (
        b.island_memory.measure_peak_memory(ZeRO1(optimizer=RULE), small, size=2, dtype=dtype) for dtype in (torch.bfloat16, None)
    )
    assert single.peak_bytes - half.peak_bytes == pytest.approx(4 * half.params, rel=0.15)


# --------------------------------------------------------------------------------------------------------- storage tracking


def test_views_are_not_counted(b):
    with b.island_memory.StorageTracker() as tracker:
        whole = torch.zeros(100)
        views = [whole[:50], whole.view(10, 10)]
    assert tracker.live_bytes == 400
    assert len(views) == 2


def test_a_storage_that_was_freed_counts_in_the_peak_alone(b):
    with b.island_memory.StorageTracker() as tracker:
        kept = torch.ones(10)
        total = float((kept + 1).sum())
    assert tracker.live_bytes == 40
    assert tracker.peak_bytes == 40 + 40 + 4
    assert total == 20.0


def test_excluded_storages_are_not_in_the_peak(b):
    with b.island_memory.StorageTracker() as tracker:
        with tracker.excluded():
            large = torch.zeros(1000)
        small = torch.zeros(1)
    assert (tracker.peak_bytes, tracker.excluded_peak_bytes) == (4, 4000)
    assert large.numel() > small.numel()


def test_a_storage_that_outlives_a_wait_is_not_transient(b):
    with b.island_memory.StorageTracker() as tracker:
        kept = torch.zeros(8)
        tracker.wait()
        temporary = kept + 1
        del temporary, kept
    assert [record.num_bytes for record in tracker.transient] == [32]
    assert list(tracker.peak_transient_bytes().values()) == [32]


def test_storages_of_a_backward_pass_are_not_in_the_peak(b):
    weights = torch.ones(64, requires_grad=True)
    with b.island_memory.StorageTracker() as tracker:
        weights.square().sum().backward()
    assert tracker.peak_bytes < 512 <= tracker.excluded_peak_bytes  # 256 for the squares, and 256 for each of their gradients


# -------------------------------------------------------------------------------------------------------------- echo peers


def ones(count=8, dtype=torch.float32):
    return Tree.of({"w": torch.ones(count, dtype=dtype)})


def test_a_slice_lies_in_the_donated_buffer_and_so_does_the_whole(b):
    peers, tree = b.island_memory.EchoPeers(4), ones()
    memory = tree.flat.data_ptr()
    scattered = b.island_memory.run_alternating(peers.reduce_scatter(tree, 1.0), peers)
    whole = b.island_memory.run_alternating(peers.all_gather(scattered.value), peers)
    assert scattered.value.flat.data_ptr() == whole.flat.data_ptr() == memory
    assert whole["w"].tolist() == [4.0] * 8


def test_what_is_exchanged_is_donated_and_what_is_borrowed_is_copied(b):
    peers = b.island_memory.EchoPeers(2)
    for exchange in (peers.reduce_scatter, peers.mean):
        tree, lent = ones(), ones()
        b.island_memory.run_alternating(exchange(tree), peers)
        b.island_memory.run_alternating(exchange(lent.borrow()), peers)
        assert tree.deleted
        assert lent.equal(ones())


def test_a_wide_sum_has_single_precision_and_a_buffer_of_its_own(b):
    peers = b.island_memory.EchoPeers(3)
    scattered = b.island_memory.run_alternating(peers.reduce_scatter(ones(9, torch.bfloat16), wide=True), peers)
    assert scattered.value.flat.dtype == torch.float32
    assert scattered.value["w"].tolist() == [3.0] * 3


def test_a_gradient_that_is_not_finite_is_reported(b):
    peers = b.island_memory.EchoPeers(2)
    assert not b.island_memory.run_alternating(peers.reduce_scatter(ones() * float("nan")), peers).finite


def test_one_background_exchange_at_a_time(b):
    peers = b.island_memory.EchoPeers(2)
    peers.background(peers.total(1.0))
    with pytest.raises(ExchangeFailed, match="open already"):
        peers.background(peers.total(1.0))
    peers.turn()


def test_an_island_whose_only_peer_is_itself_computes_what_the_simulator_computes(b):
    algorithm, workload = ACCO(optimizer=AdamW(lr=0.1)), Regression()
    done = simulate(algorithm, steps=4, workload=workload, cluster=Cluster(islands=1))
    peers, replica = b.island_memory.EchoPeers(1), LocalReplica(workload, optimizer=AdamW(lr=0.1))
    state = algorithm.init(replica.params(), peers)
    for _ in range(4):
        state = b.island_memory.run_alternating(algorithm.round(state, b.island_memory.EchoReplica(replica), peers), peers)
    assert state.params.equal(done.params)
