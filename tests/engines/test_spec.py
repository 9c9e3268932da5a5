"""Engines by name, their specs in a run's folder, and processes that torchrun started."""

import json

import pytest

import atoll
from atoll.core.errors import CheckpointError, ConfigError
from atoll.engines.spec import SPECS, processes_started, read_spec, refuse_torchrun, spec_named, write_spec

TORCHRUN = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    "spec",
    [
        atoll.Simulator(),
        atoll.Processes(processes=3, step_delay=0.5, exchange_timeout_s=7.0, backend="nccl"),
        atoll.Elastic(processes=2, listen="192.0.2.7:7000", devices=2, max_delta_ratio=float("inf")),
        atoll.Ray(processes=3, devices=2, max_workers=5, step_delay=0.5, address="10.0.0.1:6379", save_every_s=2.0),
    ],
)
def test_a_folder_keeps_the_spec_of_its_run(tmp_path, spec):
    write_spec(tmp_path, spec)
    assert read_spec(tmp_path) == spec


def test_a_spec_of_another_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no engine\.json"):
        read_spec(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"engine": "dist", "processes": 2}))
    with pytest.raises(CheckpointError, match="has format None, and this version of atoll reads format 1"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[]", "it holds a list"),
        ("[" * 1_000_000, "nested more than 200 levels deep"),
        ('{"format": 1}', "KeyError: 'engine'"),
        ('{"format": 1, "engine": "mpi", "settings": {}}', "KeyError: 'mpi'"),
        ('{"format": 1, "engine": "ray", "settings": {"hubs": 2}}', "engine ray has no setting hubs"),
        ('{"format": 1, "engine": "ray", "settings": {"processes": "two"}}', "processes='two'"),
        ('{"format": 1, "engine": "ray", "settings": {"processes": {"type": "Run"}}}', "'Run', which does not fit there"),
        ('{"format": 1, "engine": "ray", "settings": 7}', "TypeError"),
    ],
)
def test_a_damaged_or_foreign_spec_is_refused(tmp_path, text, why):
    (tmp_path / "engine.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"engine\.json cannot be read \(.*{why}.*simulator, processes, .* Restore it"):
        read_spec(tmp_path)


def test_a_spec_is_saved_as_strict_json(tmp_path):
    write_spec(tmp_path, atoll.Elastic(max_delta_ratio=float("inf")))
    json.loads((tmp_path / "engine.json").read_text(), parse_constant=pytest.fail)


def test_engines_are_known_by_their_names_and_former_names():
    assert {name: spec_named(name).name for name in SPECS} == {name: name for name in SPECS}
    assert (spec_named("sim").name, spec_named("dist").name) == ("simulator", "processes")
    with pytest.raises(ConfigError, match=r"no engine 'mpi'\. There are: simulator, processes, elastic, ray"):
        spec_named("mpi")


@pytest.mark.parametrize(
    ("without", "processes"),
    [
        ((), 3),
        (("TORCHELASTIC_RUN_ID",), 3),
        (("MASTER_ADDR",), 3),
        (("TORCHELASTIC_RUN_ID", "MASTER_ADDR"), 1),
        (("RANK",), 1),
        (("WORLD_SIZE",), 1),
    ],
)
def test_the_variables_of_torchrun_are_recognized(without, processes):
    assert processes_started({name: value for name, value in TORCHRUN.items() if name not in without}) == processes


@pytest.mark.parametrize("engine", ["simulator", "elastic", "ray"])
def test_engines_that_start_their_own_processes_are_refused_under_torchrun(monkeypatch, engine):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"3 processes \(WORLD_SIZE=3, RANK=2\).*--engine {engine}\. Use --engine processes"):
        refuse_torchrun(spec_named(engine))
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_torchrun(spec_named(engine))
