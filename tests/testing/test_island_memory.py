"""One island's memory is what the papers' formulas say; the tracker sees storages allocated and freed."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import torch_threads
from atoll.testing.island_memory import DecoderWorkload, StorageTracker, measure_peak_memory

RULE = AdamW()
FIVE_MILLION = DecoderWorkload.of(GPT(layers=4, width=256, heads=4, head_size=64), vocab_size=8192)


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.mark.parametrize("islands", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "whole"),
    [(ACCO(optimizer=RULE, clip_norm=1.0), 2 + 2 + 2), (ZeRO1(optimizer=RULE, clip_norm=1.0, accumulation=2), 2 + 2)],
    ids=["ACCO", "ZeRO1"],
)
def test_all_live_storage_of_an_island_is_within_five_percent_of_the_formula(algorithm, whole, islands):
    measured = measure_peak_memory(algorithm, FIVE_MILLION, size=islands)
    formula = whole + 12 / islands
    assert measured.params >= 5_000_000
    assert formula <= measured.per_param <= 1.05 * formula, {str(site): size for site, size in measured.at_peak.items()}


@pytest.mark.parametrize(
    ("algorithm", "per_param"),
    [(DPU(optimizer=RULE, warmup=0), 2 + 2 + 2 + 12 / 2), (WP(optimizer=RULE), 2 + 2 + 2 + 12 / 2 + 4 / 2)],
    ids=["DPU", "WP"],
)
def test_the_baselines_need_what_their_formulas_say(algorithm, per_param):
    measured = measure_peak_memory(algorithm, FIVE_MILLION, size=2)
    assert per_param <= measured.per_param <= 1.05 * per_param


def test_transient_storage_within_a_stage_is_a_few_chunks():
    measured = measure_peak_memory(ACCO(optimizer=RULE, clip_norm=1.0), FIVE_MILLION, size=2, rounds=2)
    assert {site.stage for site in measured.transient} == {"estimate", "commit"}
    assert max(measured.transient.values()) < 0.5 * measured.params


def test_a_module_in_single_precision_takes_twice_the_memory_and_the_same_optimizer():
    small = DecoderWorkload.of(GPT(layers=2, width=64, heads=2, head_size=32), vocab_size=512)
    half, single = (measure_peak_memory(ZeRO1(optimizer=RULE), small, size=2, dtype=dtype) for dtype in (torch.bfloat16, None))
    assert single.peak_bytes - half.peak_bytes == pytest.approx(4 * half.params, rel=0.15)


# --------------------------------------------------------------------------------------------------------- storage tracking


def test_views_are_not_counted():
    with StorageTracker() as tracker:
        whole = torch.zeros(100)
        views = [whole[:50], whole.view(10, 10)]
    assert tracker.live_bytes == 400
    assert len(views) == 2


def test_a_storage_that_was_freed_counts_in_the_peak_alone():
    with StorageTracker() as tracker:
        kept = torch.ones(10)
        total = float((kept + 1).sum())
    assert tracker.live_bytes == 40
    assert tracker.peak_bytes == 40 + 40 + 4
    assert total == 20.0


def test_excluded_storages_are_not_in_the_peak():
    with StorageTracker() as tracker:
        with tracker.excluded():
            large = torch.zeros(1000)
        small = torch.zeros(1)
    assert (tracker.peak_bytes, tracker.excluded_peak_bytes) == (4, 4000)
    assert large.numel() > small.numel()


def test_a_storage_that_outlives_a_wait_is_not_transient():
    with StorageTracker() as tracker:
        kept = torch.zeros(8)
        tracker.wait()
        temporary = kept + 1
        del temporary, kept
    assert [record.num_bytes for record in tracker.transient] == [32]
    assert list(tracker.peak_transient_bytes().values()) == [32]
