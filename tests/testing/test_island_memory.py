"""One island's memory: what the papers' formulas say, and no buffer more."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero1 import ZeRO1
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import torch_threads
from atoll.testing.island_memory import SmallBatches, hold

RULE = AdamW()
FIVE_MILLION = SmallBatches.of(GPT(layers=4, width=256, heads=4, head_size=64), vocab_size=8192)


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
    held = hold(algorithm, FIVE_MILLION, size=islands)
    formula = whole + 12 / islands
    assert held.params >= 5_000_000
    assert formula <= held.per_param <= 1.05 * formula, {str(site): size for site, size in held.at_peak.items()}


@pytest.mark.parametrize(
    ("algorithm", "per_param"),
    [(DPU(optimizer=RULE, warmup=0), 2 + 2 + 2 + 12 / 2), (WP(optimizer=RULE), 2 + 2 + 2 + 12 / 2 + 4 / 2)],
    ids=["DPU", "WP"],
)
def test_the_baselines_hold_what_they_say_they_hold(algorithm, per_param):
    held = hold(algorithm, FIVE_MILLION, size=2)
    assert per_param <= held.per_param <= 1.05 * per_param


def test_what_is_in_passing_within_a_stage_is_a_few_chunks():
    held = hold(ACCO(optimizer=RULE, clip_norm=1.0), FIVE_MILLION, size=2, rounds=2)
    assert {site.stage for site in held.passing} == {"estimate", "commit"}
    assert max(held.passing.values()) < 0.5 * held.params


def test_a_module_in_single_precision_takes_twice_the_room_and_the_same_optimizer():
    small = SmallBatches.of(GPT(layers=2, width=64, heads=2, head_size=32), vocab_size=512)
    half, single = (hold(ZeRO1(optimizer=RULE), small, size=2, dtype=dtype) for dtype in (torch.bfloat16, None))
    assert single.peak_bytes - half.peak_bytes == pytest.approx(4 * half.params, rel=0.15)
