"""A replay computes a run again from its log alone."""

import json
import shutil

import pytest

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.serialization import load_tree, save_tree
from atoll.core.verified_files import read_record
from atoll.engines.replay_async_run import TOLERANCE, replay_run
from atoll.runs.run_settings import candidates

SMALL = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=4",
    "train.steps=24",
    "train.batch_size=8",
    "keep.evaluate_every=8",
    "keep.save_every=8",
)


def simulated(folder, *settings, recipe=recipes.toy_async):
    return atoll.run(override(recipe(), [*SMALL, *settings], candidates), out=folder).folder


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.fresh_optimizer=false", "train.warm_start_steps=3"),
        ("train.fresh_optimizer=false", "cluster.drop_probability=0.3", "algorithm.grace_s=0"),
        (
            "train.fresh_optimizer=false",
            "cluster.outages=[Outage(island=0,start_s=4,stop_s=9),Outage(island=2,start_s=0,stop_s=5)]",
        ),
        ("algorithm.outer=DelayedNesterov(period=4)", "algorithm.pace=measured", "algorithm.weight=1/k"),
        ("algorithm.outer=Buffered(rule=Nesterov(lr=0.5),size=3)", "algorithm.correction=DelayCompensation(strength=0.5)"),
        ("algorithm.correction=Polynomial(threshold=2)", "algorithm.grace_s=0"),
        (
            "algorithm.codec=int4",
            "algorithm.correction=DelayCompensation(strength=0.5)",
            "cluster.drop_probability=0.3",
            "cluster.outages=[Outage(island=0,start_s=4,stop_s=9)]",
        ),
    ],
    ids=["toy", "moments", "lost", "outages", "delayed", "buffered", "discarded", "encoded"],
)
def test_a_simulated_run_is_replayed_to_the_bit(tmp_path, settings):
    found = replay_run(simulated(tmp_path / "run", *settings))
    assert found.same_bits
    assert (found.largest, found.relative, found.agrees) == (0.0, 0.0, True)
    assert found.local_updates >= 96


def test_a_log_of_other_weights_does_not_agree(tmp_path):
    folder = simulated(tmp_path / "run")
    (folder / "digests.json").unlink()
    weights = load_tree(folder / "final.safetensors")
    save_tree(folder / "final.safetensors", weights + 0.01)
    found = replay_run(folder)
    assert not found.agrees
    assert found.relative > TOLERANCE
    assert "DOES NOT AGREE" in str(found)


def test_a_round_that_is_missing_in_the_log_is_named(tmp_path):
    folder = simulated(tmp_path / "run")
    (folder / "digests.json").unlink()
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    begun = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "Dispatched")
    log.write_text("".join(lines[:begun] + lines[begun + 1 :]))
    with pytest.raises(ConfigError, match=r"round 0 of worker 0 arrived, but the log has no dispatch of it"):
        replay_run(folder)


def test_what_has_no_hub_or_is_not_finished_is_refused(tmp_path):
    whole = simulated(tmp_path / "run")
    half = shutil.copytree(whole, tmp_path / "half")
    (half / "final.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"is not finished"):
        replay_run(half)
    with pytest.raises(ConfigError, match=r"only runs with a hub"):
        replay_run(simulated(tmp_path / "sync", recipe=recipes.toy_sync))


def test_rounds_that_several_devices_computed_are_cut_as_they_were(tmp_path):
    folder = simulated(tmp_path / "run", "train.micro_batches=4")
    assert replay_run(folder).same_bits
    (folder / "digests.json").unlink()
    settings = read_record(folder / "run.json")
    settings["train"]["micro_batches"] = 2
    (folder / "run.json").write_text(json.dumps(settings))
    assert not replay_run(folder).same_bits
    log = (folder / "events.jsonl").read_text()
    assert log.count('"devices": 1') > 10
    (folder / "events.jsonl").write_text(log.replace('"devices": 1', '"devices": 2'))
    assert replay_run(folder).same_bits
