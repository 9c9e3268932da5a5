"""Launching a run on Ray: the parts that need no Ray."""

import fcntl
import os

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.engines.ray import bootstrap
from atoll.engines.ray.hub_checkpoints import lock_folder
from atoll.engines.ray.launch import RayDriver
from atoll.engines.ray.spec import Ray
from atoll.engines.run_lifecycle import RunTask, resume, run as start_run
from atoll.engines.spec import write_spec
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import CHAOS_LOG, FaultScript, Kill, TimedFault
from tests.samples import arrived

AT_ONCE = Ray(hub_timeout_s=0.001, processes=2)


@pytest.fixture
def folder(tmp_path):
    """Of a run whose hub has received a round, and saved nothing."""
    run = override(recipes.toy_async(), ["data.examples=512", "data.eval_examples=128"], candidates)
    folder = RunFolder.create(tmp_path / "run", AT_ONCE.fitted(run), ["a test"])
    write_spec(folder.path, Ray(max_workers=3))
    with JsonlSink(folder.events) as log:
        log.emit(arrived())
    return folder


def test_a_run_is_not_resumed_while_an_earlier_hub_writes(folder):
    hub = os.open(folder.path / "hub.lock", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(hub, fcntl.LOCK_EX)
    before, task = folder.events.read_bytes(), RunTask(run=folder.run, spec=AT_ONCE, folder=folder)
    with pytest.raises(ExchangeFailed, match=r"after 0.001 s \(engine.hub_timeout_s\).*end it, and resume"):
        RayDriver(task, AT_ONCE).carry_out()
    assert folder.events.read_bytes() == before
    os.close(hub)
    with pytest.raises(CheckpointError, match="has no checkpoint, but its log has 1 rounds"):
        RayDriver(task, AT_ONCE).carry_out()


def test_a_log_of_ray_that_is_a_link_is_refused_and_its_target_stays(folder, tmp_path):
    (tmp_path / "other").write_text("precious")
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "ray.log").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"ray\.log.*It is a symbolic link"):
        resume(folder.path)
    assert (tmp_path / "other").read_text() == "precious"


def test_a_run_on_a_cluster_beyond_loopback_starts_only_in_a_trusted_network_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "check_reachable", lambda address: address)
    run = override(recipes.toy_async(), ["data.examples=512", "data.eval_examples=128"], candidates)
    with pytest.raises(ConfigError, match=r"Ray at 10\.0\.0\.1:6379: .*give --set engine\.network=trusted"):
        start_run(run, engine=Ray(address="10.0.0.1:6379"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(RayDriver, "carry_out", lambda self: None)
    logged = []
    start_run(run, engine=Ray(address="10.0.0.1:6379", network="trusted"), out=tmp_path / "run", log=logged.append)
    assert logged.count(f"engine.network=trusted: {bootstrap.TRUSTED}") == 1


def test_a_driver_that_waits_for_a_hub_logs_it_once_and_holds_nothing_afterwards(folder):
    hub, logged = os.open(folder.path / "hub.lock", os.O_WRONLY | os.O_CREAT), []
    fcntl.flock(hub, fcntl.LOCK_EX)

    def log(line):
        logged.append(line)
        os.close(hub)

    os.close(lock_folder(folder.path, log, 20.0))
    os.close(lock_folder(folder.path, logged.append, 20.0))
    assert len(logged) == 1


def test_a_script_of_faults_that_the_run_cannot_have_is_refused(folder):
    left = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    script = FaultScript(faults=(TimedFault(at_s=1.0, fault=Kill(victim="worker-3")),))
    with pytest.raises(ConfigError, match=r"names worker-3; the run starts hub, worker-0, worker-1, worker-2"):
        resume(folder.path, faults=RunFaults(script))
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path in left} == left
    assert not (folder.path / CHAOS_LOG).exists()
