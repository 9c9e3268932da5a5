"""A Run refuses parts that do not fit together, and a resolved Run has no open settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.config.describe_settings import describe
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Plan, Rebases, Rule
from atoll.data.gaussians import Gaussians
from atoll.data.text_dataset import Text
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import WSD, Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link
from atoll.runs.run_settings import (
    COMPILE_S,
    SAVED_S_PER_LAYER,
    ComputeDevice,
    Run,
    Train,
    TrainsDevices,
    as_recorded,
    candidates,
    check_recorded_precision,
    choose_computing,
    compiling_pays,
)

TOY = Run(
    recipe="toy",
    model=MLP.small(),
    data=Gaussians.small(),
    algorithm=DiLoCo(inner_steps=5),
    optimizer=AdamW(lr=Cosine(lr=2e-4, floor=1e-6)),
    train=Train(steps=20, batch_size=32, fresh_optimizer=True, peak_first=True),
    cluster=Cluster(link=Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)),
)


@dataclass(frozen=True, kw_only=True)
class Pushing:
    """Has what a Run reads of an asynchronous algorithm, and is never carried out."""

    inner_steps: int = 6
    outer: Rule = SGD(lr=Cosine(lr=0.7))

    @property
    def plan(self) -> Plan:
        return Plan(steps=self.inner_steps, grace_s=0.0, pace="even", speeds=(), shards="deficit", ties="last")

    def init(self, params: Any) -> Any:
        return params

    async def round(self, replica: Any, hub: Any) -> None:
        raise AssertionError

    def step(self, state: Any, arrival: Any) -> Any:
        return state


# --------------------------------------------------------------------------------------------------------- model and data


def test_a_perceptron_reads_points_and_a_decoder_reads_text():
    with pytest.raises(ConfigError, match=r"model is MLP and data is Text: .*Set data=Gaussians, or model=GPT"):
        replace(TOY, data=Text())
    with pytest.raises(ConfigError, match=r"model is GPT and data is Gaussians: .*Set data=Text, or model=MLP"):
        replace(TOY, model=GPT.tiny())
    assert replace(TOY, model=GPT.tiny(), data=Text()).data == Text()


def test_model_and_data_can_be_set_together():
    text = replace(TOY, model=GPT.tiny(), data=Text())
    run = override(text, ["data=Gaussians(examples=4096,clusters_per_class=1)", "model=MLP", "model.hidden=128"], candidates)
    assert run.model == MLP.small()
    assert run.data == Gaussians(examples=4096, clusters_per_class=1)
    with pytest.raises(ConfigError, match=r"a GPT reads Text"):
        override(text, ["model=MLP"], candidates)


def test_every_setting_of_the_toy_has_a_path():
    settings = ["model.hidden=32", "data.noise=0.1", "data.shards=2", "train.peak_first=false", "train.fresh_optimizer=no"]
    run = override(TOY, settings, candidates)
    assert (run.model, run.data) == (MLP(hidden=32), replace(Gaussians.small(), noise=0.1, shards=2))
    assert run.train == Train(steps=20, batch_size=32)


def test_a_toy_and_its_free_link_survive_json():
    assert from_json(json.loads(json.dumps(to_json(TOY), allow_nan=False))) == TOY
    assert TOY.cluster.link.bandwidth_mbit_per_s == math.inf
    free = override(TOY, ["cluster.link=Link()", "cluster.link.bandwidth_mbit_per_s=inf"], candidates)
    assert free.cluster.link == Link(bandwidth_mbit_per_s=math.inf)


def test_settings_that_a_file_lacks_have_their_defaults():
    old = to_json(replace(TOY, model=GPT.tiny(), data=Text()))
    del old["data"]["shards"], old["train"]["fresh_optimizer"], old["train"]["peak_first"]
    run = from_json(old)
    assert run.shards == run.cluster.islands
    assert not run.train.fresh_optimizer
    assert not run.train.peak_first


@pytest.mark.parametrize("data", [Text(), Gaussians.small()], ids=["text", "gaussians"])
def test_there_is_one_shard_per_island_by_default(data):
    model = GPT.tiny() if isinstance(data, Text) else MLP.small()
    run = replace(TOY, model=model, data=data, cluster=Cluster(islands=3))
    assert run.shards == 3
    assert replace(run, data=replace(data, shards=7)).shards == 7


# ------------------------------------------------------------------------------------------------------------------ lengths


def test_a_synchronous_schedule_is_as_long_as_the_run_whatever_the_shards():
    run = replace(TOY, data=replace(TOY.data, shards=2)).resolved
    assert run.optimizer.lr.steps == 20


@pytest.mark.parametrize(("shards", "steps"), [(None, 20), (4, 20), (2, 40), (8, 10), (3, 26), (100, 1)])
def test_an_asynchronous_schedule_is_as_long_as_a_shards_share_of_all_steps(shards, steps):
    run = replace(TOY, algorithm=Pushing(), data=replace(TOY.data, shards=shards))
    assert run.resolved.optimizer.lr.steps == run.schedule_steps == steps


def test_a_synchronous_run_ends_with_a_whole_round_and_an_asynchronous_one_has_any_length():
    train = replace(TOY.train, steps=17)
    run = replace(TOY, algorithm=Pushing(), train=train)
    assert (run.rounds(17), run.rounds(5)) == (2, 1)
    with pytest.raises(ConfigError, match=r"train.steps=17 is not a multiple of the 5 inner steps"):
        replace(TOY, train=train)


def test_an_outer_schedule_counts_the_rounds_of_all_islands():
    run = replace(TOY, algorithm=Pushing())
    assert run.resolved.algorithm.outer.lr.steps == 20 * 4 // 6
    assert replace(TOY, algorithm=DiLoCo(inner_steps=5, outer=SGD(lr=Cosine(lr=0.7)))).resolved.algorithm.outer.lr.steps == 4


def test_a_schedule_in_a_wrapped_rule_counts_the_steps_of_that_rule():
    """Thirteen rounds fill a buffer of four three times."""
    wrapped = Buffered(rule=SGD(lr=WSD(lr=0.5, decay=1)), size=4)
    outer = replace(TOY, algorithm=Pushing(outer=wrapped)).resolved.algorithm.outer
    assert outer == Buffered(rule=SGD(lr=WSD(lr=0.5, steps=3, decay=1)), size=4)


def test_given_settings_are_not_changed_by_resolving():
    outer = DelayedNesterov(lr=Cosine(lr=0.7, steps=99), period=4)
    train = replace(TOY.train, precision="fp32", compile=False)
    run = replace(TOY, algorithm=Pushing(outer=outer), optimizer=SGD(lr=Cosine(lr=0.1, steps=77)), train=train)
    assert run.resolved == run
    assert run.resolved.algorithm.outer is outer


# --------------------------------------------------------------------------------------------------------------- candidates


def test_algorithms_and_rules_can_be_named():
    assert {DDP, DiLoCo} <= set(candidates[Algorithm])
    assert {SGD, AdamW} <= set(candidates[Rule])
    assert Run not in candidates
    assert isinstance(Pushing(), AsyncAlgorithm)
    assert not isinstance(DiLoCo(inner_steps=5), AsyncAlgorithm)


# --------------------------------------------------------------------------------------------------------------- two levels

PLAIN = replace(TOY, train=Train(steps=20, batch_size=32))


def test_the_algorithm_inside_gets_the_runs_optimizer_and_clipping():
    run = replace(PLAIN, inside=ACCO(), cluster=Cluster(islands=2, devices_per_island=3))
    inside = run.resolved.inside
    assert inside.optimizer == run.resolved.optimizer
    assert inside.optimizer.lr.steps == 20
    assert inside.clip_norm == 1.0
    own = replace(run, inside=ZeRO1(optimizer=SGD(lr=Cosine(lr=0.3)), clip_norm=2.0)).resolved.inside
    assert (own.optimizer.lr.steps, own.clip_norm) == (20, 2.0)


def test_every_device_has_a_shard_and_without_an_algorithm_inside_it_is_an_island():
    cluster = Cluster(islands=2, devices_per_island=3)
    assert replace(PLAIN, cluster=cluster).shards == replace(PLAIN, cluster=cluster, inside=DDP()).shards == 6
    assert replace(PLAIN, cluster=cluster).effective_cluster.islands == 6
    assert replace(PLAIN, cluster=cluster, inside=DDP()).effective_cluster.islands == 2


def test_an_algorithm_inside_needs_a_training_algorithm_between_islands():
    for algorithm in (ZeRO1(), Pushing()):
        with pytest.raises(ConfigError, match=r"inside=ACCO trains .*Use algorithm=DiLoCo"):
            replace(PLAIN, algorithm=algorithm, inside=ACCO())


def test_settings_of_a_rounds_start_are_refused_with_an_algorithm_inside():
    with pytest.raises(ConfigError, match=r"train.fresh_optimizer is for islands of one device"):
        replace(TOY, inside=ACCO())


def test_an_algorithm_inside_can_be_named_and_survives_json():
    run = override(PLAIN, ["inside=ACCO(pieces_per_half=2)", "cluster.devices_per_island=2"], candidates)
    assert run.inside == ACCO(pieces_per_half=2)
    assert from_json(json.loads(json.dumps(to_json(run), allow_nan=False))) == run
    assert override(run, ["inside=none"], candidates).inside is None


def test_inside_takes_only_algorithms_with_rebase():
    [offered] = [setting.kind for setting in describe(PLAIN, candidates) if setting.path == "inside"]
    assert offered == "DDP | ZeRO1 | FSDP | ACCO | DPU | WP | none"
    assert all(isinstance(kind(), Rebases) for kind in candidates[TrainsDevices])
    with pytest.raises(ConfigError, match=r"inside=DiLoCo\(inner_steps=5\): this value cannot stand here. Allowed: DDP \| ZeRO1"):
        override(PLAIN, ["inside=DiLoCo(inner_steps=5)", "cluster.devices_per_island=2"], candidates)
    with pytest.raises(
        ConfigError, match=r"inside is a DiLoCo, not a TrainsDevices: it has no rebase. Give one, such as atoll.DDP"
    ):
        replace(PLAIN, inside=DiLoCo(inner_steps=5), cluster=Cluster(devices_per_island=2))


@pytest.mark.parametrize(("batch", "clock"), [("fixed", "commits"), ("free", "samples")])
def test_a_resolved_run_has_a_clock(batch, clock):
    run = replace(PLAIN, algorithm=ACCO(batch=batch))
    assert run.algorithm.clock is None
    assert run.resolved.algorithm.clock == clock
    assert run.resolved.resolved == run.resolved


# ------------------------------------------------------------------------------------------- precision and compilation: auto

NO_CUDA = ComputeDevice(None, compiles=False)
HOPPER, TURING = ComputeDevice((9, 0), compiles=True), ComputeDevice((7, 5), compiles=True)
LONG = ("model.layers=6", "train.steps=3000", "train.warm_start_steps=1000", "train.device=auto")


def chosen(*settings, device=HOPPER, **more):
    train, line = choose_computing(override(recipes.demo_diloco(), settings, candidates), device, **more)
    return train.precision, train.compile, line


def test_a_cpu_computes_in_fp32_without_compiling_and_says_nothing():
    assert chosen(*LONG, device=NO_CUDA) == ("fp32", False, None)
    assert chosen(device=NO_CUDA) == ("fp32", False, None)


@pytest.mark.parametrize(("device", "precision"), [(HOPPER, "bf16"), (ComputeDevice((8, 0), True), "bf16"), (TURING, "fp32")])
def test_a_cuda_device_computes_in_bf16_if_it_has_it_and_one_line_says_so(device, precision):
    found, compiled, line = chosen(*LONG, device=device)
    assert (found, compiled) == (precision, True)
    has = "has bf16" if precision == "bf16" else "has no bf16"
    assert line == (
        f"precision {precision}, compiled: this device {has} and the run is long; set train.precision / train.compile to change it"
    )


def test_only_a_run_that_saves_more_time_than_compiling_takes_is_compiled():
    enough = int(COMPILE_S / SAVED_S_PER_LAYER / 6)
    assert not compiling_pays(enough, layers=6)
    assert compiling_pays(enough + 1, layers=6)
    short = chosen("train.steps=60", "train.device=auto")
    assert short[1] is False
    assert "not compiled: this device has bf16 and the run is too short to gain from compiling; set" in short[2]
    four_islands = ("model.layers=6", "train.steps=1500", "train.warm_start_steps=0", "train.device=auto")
    assert chosen(*four_islands)[1] is True
    assert chosen(*four_islands, islands=1)[1] is False, "a process per island has a fourth of the steps"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"own_workload": True}, "the workload is the user's own"),
        ({"device": ComputeDevice((9, 0), compiles=False)}, "torch.compile finds no Triton"),
    ],
)
def test_auto_compiles_nothing_that_it_does_not_know_to_compile(more, why):
    assert chosen(*LONG, **more)[1] is False
    assert why in chosen(*LONG, **more)[2]


def test_a_model_whose_batches_differ_in_length_is_not_compiled():
    train, line = choose_computing(recipes.finetune(), HOPPER)
    assert (train.precision, train.compile) == ("all-bf16", False)
    assert "the model is a Pretrained" in line


def test_settings_of_the_user_are_kept_and_not_announced():
    assert chosen(*LONG, "train.precision=fp32-strict", "train.compile=false") == ("fp32-strict", False, None)
    assert chosen(*LONG, "train.precision=all-bf16", "train.compile=true") == ("all-bf16", True, None)
    precision, compiled, line = chosen(*LONG, "train.precision=fp32")
    assert (precision, compiled) == ("fp32", True)
    assert line.startswith("precision fp32, compiled: the run is long;")


def test_a_resolved_run_on_a_cpu_has_the_values_that_runs_had_before_auto():
    plain = to_json(recipes.demo_diloco().resolved)["train"]
    assert (plain["precision"], plain["compile"]) == ("fp32", False)


def test_a_run_in_bf16_is_resumed_on_a_cuda_device_only():
    recorded = override(recipes.demo_diloco(), ["train.device=auto", "train.precision=bf16"], candidates)
    check_recorded_precision(recorded, HOPPER)
    with pytest.raises(ConfigError, match=r"computes in bf16, and torch sees no CUDA device"):
        check_recorded_precision(recorded, NO_CUDA)


def test_a_given_run_that_leaves_the_precision_open_is_the_recorded_one():
    given = recipes.demo_diloco()
    recorded = override(given, ["train.device=auto", "train.precision=bf16", "train.compile=true"], candidates)
    assert as_recorded(replace(given, train=replace(given.train, device="auto")), recorded) == recorded
    strict = override(given, ["train.precision=fp32-strict"], candidates)
    assert as_recorded(strict, recorded).train.precision == "fp32-strict", "a difference that the folder then refuses"
