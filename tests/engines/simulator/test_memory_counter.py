"""The memory counter counts live tensors of islands, finds what the formulas predict, and counts the same in every run."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.events import MemoryCounted
from atoll.engines.simulator.memory_counter import is_counted
from atoll.optim.adam import AdamW
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, simulate

RULE = AdamW(lr=0.01)


def counts(algorithm, *, steps=6, islands=2, dtype=torch.float32, **options):
    workload = Regression(hidden=64, dtype=dtype)
    cluster = Cluster(islands=islands, **options)
    return simulate(algorithm, steps=steps, workload=workload, inner=RULE, cluster=cluster).of(MemoryCounted)


def per_param(event):
    kinds = ("parameters", "gradients", "communication", "optimizer", "copies")
    return [round(getattr(event, f"{kind}_bytes") / event.params, 1) for kind in kinds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "algorithm",
    [
        ACCO(optimizer=RULE),
        ACCO(optimizer=RULE, batch="free", pieces_per_half=2),
        ZeRO1(optimizer=RULE, accumulation=2),
        DPU(optimizer=RULE, warmup=0),
    ],
    ids=["ACCO", "ACCO free", "ZeRO1", "DPU"],
)
def test_a_round_in_steady_state_holds_what_the_formula_has(algorithm, dtype):
    last = counts(algorithm, dtype=dtype)[-2:]
    assert [event.peak_bytes for event in last] == [pytest.approx(event.formula_bytes, rel=0.01) for event in last]


def test_each_kind_of_memory_is_counted_separately():
    assert per_param(counts(ACCO(optimizer=RULE))[-1]) == [4.0, 4.0, 4.0, 6.0, 0.0]
    assert per_param(counts(DPU(optimizer=RULE, warmup=0))[-1]) == [4.0, 4.0, 4.0, 6.0, 0.0]
    assert per_param(counts(DiLoCo(inner_steps=2))[-1])[:1] == [4.0]
    assert per_param(counts(DiLoCo(inner_steps=2))[-1])[3:] == [8.0, 16.0]  # global weights and momentum, old and new


def test_weight_prediction_holds_its_predicted_slice_besides():
    event = counts(WP(optimizer=RULE), dtype=torch.bfloat16)[-1]
    assert event.peak_bytes / event.params == pytest.approx(2 + 2 + 2 + 12 / 2 + 2 / 2, rel=0.01)


def test_more_islands_hold_less_of_the_optimizer_each():
    two, four = (counts(ZeRO1(optimizer=RULE), islands=islands)[-1] for islands in (2, 4))
    assert two.optimizer_bytes == pytest.approx(2 * four.optimizer_bytes, rel=0.01)
    assert two.parameters_bytes == four.parameters_bytes


def test_what_islands_share_in_the_simulator_counts_for_each():
    events = counts(DDP(optimizer=RULE), steps=1)
    assert [event.island for event in events] == [0, 1]
    assert all(event.optimizer_bytes >= 12 * event.params for event in events)


def test_the_first_round_and_powers_of_two_are_counted_and_so_what_begins_late_is_seen():
    assert [number for number in range(20) if is_counted(number)] == [0, 1, 2, 4, 8, 16]
    events = [event for event in counts(DPU(optimizer=RULE, warmup=2)) if event.island == 0]
    assert [event.round for event in events] == [0, 1, 2, 4]
    before, after = events[1], events[-1]
    assert after.peak_bytes > before.peak_bytes


@pytest.mark.parametrize("algorithm", [ACCO(optimizer=RULE, batch="free"), WP(optimizer=RULE)], ids=["ACCO", "WP"])
def test_two_runs_count_the_same_whatever_threads_do(algorithm):
    once, again = (counts(algorithm, islands=4, step_time_s=(0.1, 0.17, 0.3, 1.1)) for _ in range(2))
    assert once == again
