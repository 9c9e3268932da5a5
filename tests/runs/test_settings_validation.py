"""A Run refuses parts that do not fit together, and settings that would have no effect; the error names settings that fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.runs.cluster import Cluster, Link
from atoll.runs.run_settings import Run, candidates

TWO_LEVELS = recipes.demo_two_level()


def demo(algorithm, **train):
    run = recipes.demo_ddp()
    return replace(run, algorithm=algorithm, train=replace(run.train, **train))


def inside(algorithm, **train):
    return replace(TWO_LEVELS, inside=algorithm, train=replace(TWO_LEVELS.train, **train))


# ------------------------------------------------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("batch_size", range(1, 26))
@pytest.mark.parametrize("pieces_per_half", [1, 2, 3])
def test_a_batch_is_cut_into_equal_pieces_and_the_proposed_values_fit(batch_size, pieces_per_half):
    pieces = 2 * pieces_per_half
    if batch_size % pieces == 0:
        assert demo(ACCO(pieces_per_half=pieces_per_half), batch_size=batch_size)
        return
    with pytest.raises(
        ConfigError, match=rf"train\.batch_size={batch_size} .*algorithm\.pieces_per_half={pieces_per_half}"
    ) as error:
        demo(ACCO(pieces_per_half=pieces_per_half), batch_size=batch_size)
    batches, _, halves = str(error.value).partition("Use ")[2].partition(", or ")
    for fit in re.findall(r"\d+", batches):
        assert demo(ACCO(pieces_per_half=pieces_per_half), batch_size=int(fit))
    for fit in re.findall(r"\d+", halves):
        assert demo(ACCO(pieces_per_half=int(fit)), batch_size=batch_size)
    assert bool(halves) == (batch_size % 2 == 0)


def test_an_algorithm_inside_cuts_batches_too():
    with pytest.raises(ConfigError, match=r"train\.batch_size=7 .*inside\.pieces_per_half=1\. Use train\.batch_size=6 or 8\."):
        inside(ACCO(), batch_size=7)
    assert inside(ZeRO1(), batch_size=7)


def test_an_algorithm_without_halves_is_named_by_its_pieces():
    @dataclass(frozen=True, kw_only=True)
    class Thirds(DDP):
        pieces: int = 3

    with pytest.raises(ConfigError, match=r"the 3 equal pieces of algorithm\.pieces=3.*Use train\.batch_size=15 or 18\.$"):
        demo(Thirds(), batch_size=16)


def test_a_piece_holds_an_example_for_every_micro_batch():
    assert demo(ACCO(pieces_per_half=2), batch_size=16, micro_batches=4)
    with pytest.raises(
        ConfigError, match=r"train\.micro_batches=5 is more than the 4 examples.*Use train\.micro_batches=4 or less"
    ):
        demo(ACCO(pieces_per_half=2), batch_size=16, micro_batches=5)
    assert demo(ZeRO1(), batch_size=16, micro_batches=5)


# ----------------------------------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("kind", [ACCO, DPU, WP], ids=lambda kind: kind.__name__)
def test_a_warmup_as_long_as_the_run_is_refused(kind):
    with pytest.raises(
        ConfigError, match=rf"algorithm\.warmup=40 .*train\.steps=40: .*{kind.__name__} would hide.*algorithm=ZeRO1"
    ):
        demo(kind(warmup=40), steps=40)
    assert demo(kind(warmup=39), steps=40)
    with pytest.raises(ConfigError, match=r"inside\.warmup=40 .*train\.steps=40: .*inside=ZeRO1"):
        inside(kind(warmup=40), steps=40)
    assert inside(kind(warmup=39), steps=40)


def test_a_warmup_as_long_as_a_shortened_run_is_refused_with_one_that_fits():
    with pytest.raises(ConfigError, match=r"Use algorithm\.warmup=5 or another number below 20"):
        override(recipes.demo_dpu(), ["train.steps=20"], candidates)
    assert override(recipes.demo_dpu(), ["train.steps=20", "algorithm.warmup=5"], candidates)


# ------------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("setting", ["fresh_optimizer", "peak_first"])
@pytest.mark.parametrize("algorithm", [DDP(), ZeRO1(), ACCO(), DPU(), WP()], ids=lambda algorithm: type(algorithm).__name__)
def test_settings_of_a_rounds_start_are_refused_without_inner_optimizers(algorithm, setting):
    with pytest.raises(ConfigError, match=rf"train\.{setting} .*algorithm={type(algorithm).__name__} .*Use train\.{setting}=false"):
        demo(algorithm, **{setting: True})
    assert demo(DiLoCo(inner_steps=20), **{setting: True})


@pytest.mark.parametrize("what", ["micro_batches=2", "precision=all-bf16"])
def test_settings_that_exclude_stacking_are_refused(what):
    settings = [f"train.{what}", "train.together=stacked"]
    with pytest.raises(ConfigError, match=rf"train\.together=stacked and train\.{what}: .*Use train\.together=auto"):
        override(recipes.demo_diloco(), settings, candidates)
    assert override(recipes.demo_diloco(), [f"train.{what}"], candidates)


# ------------------------------------------------------------------------------------------------------- inside of islands

SLOW, FAST = Link(latency_s=0.1, bandwidth_mbit_per_s=1.0), Link(latency_s=1e-6, bandwidth_mbit_per_s=1e6)


def alone(**cluster) -> Run:
    return replace(recipes.demo_diloco(), cluster=Cluster(**cluster))


def test_an_algorithm_inside_needs_several_devices():
    with pytest.raises(
        ConfigError, match=r"inside=ACCO .*cluster\.devices_per_island=1.*Use cluster\.devices_per_island=2 or more"
    ):
        override(TWO_LEVELS, ["cluster.devices_per_island=1"], candidates)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"inside": FAST}, r"cluster\.devices_per_island=1: there is no such link"),
        ({"inside": FAST, "islands": 1, "devices_per_island": 8}, r"there is one island.*cluster\.islands=8"),
        ({"inside": SLOW, "devices_per_island": 2}, r"slower than the links between islands.*Set inside=ACCO"),
        ({"inside": FAST, "link": replace(FAST, latency_s=0.0), "devices_per_island": 2}, r"slower than the links"),
    ],
)
def test_an_unused_link_inside_islands_is_refused(cluster, says):
    with pytest.raises(ConfigError, match=says):
        alone(**cluster)


def test_a_faster_link_inside_is_accepted_without_an_algorithm_inside():
    assert alone(inside=FAST, devices_per_island=2).effective_cluster == replace(
        alone(devices_per_island=2).effective_cluster, inside=FAST
    )
    assert replace(TWO_LEVELS, inside=None).cluster.inside == TWO_LEVELS.cluster.inside
