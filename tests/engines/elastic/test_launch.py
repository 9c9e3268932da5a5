"""What the launcher of an elastic run refuses."""

import gc
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.engines.elastic import launch
from atoll.engines.elastic.launch import joining_lines
from atoll.engines.elastic.run_identity import run_id_of
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.rank_store import open_store
from atoll.testing.simulated_runs import Regression


def test_a_workload_that_only_this_process_has_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r'a user\'s workload lives in this process.* workload="FILE.py:NAME"'):
        atoll.run(recipes.toy_sync(), engine=atoll.Elastic(processes=2), workload=Regression(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_systems_than_linux_are_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="elastic runs need Linux, and this is darwin"):
        atoll.run(atoll.recipes.toy_sync(), engine=atoll.Elastic(processes=2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_interrupt_a_joiner_as_ctrl_c_does_and_a_second_signal_does_nothing(monkeypatch, first):
    signals, ended = (signal.SIGTERM, signal.SIGHUP), []
    before = [signal.getsignal(one) for one in signals]

    def island(*_, **__):
        try:
            signal.raise_signal(first)
        finally:
            for one in signals:
                signal.raise_signal(one)
            ended.append("its rescue is complete")

    monkeypatch.setattr(launch, "run_island", island)
    with pytest.raises(KeyboardInterrupt):
        launch.join_run("127.0.0.1:1", ())
    assert ended == ["its rescue is complete"]
    assert [signal.getsignal(one) for one in signals] == before


def test_a_joiner_under_nohup_outlives_its_terminal(monkeypatch):
    before, seen = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    monkeypatch.setattr(launch, "run_island", lambda *_, **__: seen.append(signal.raise_signal(signal.SIGHUP)))
    try:
        launch.join_run("127.0.0.1:1", ())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [None]


def test_a_loop_has_no_warm_start(tmp_path):
    (tmp_path / "own.py").write_text("def train(member): pass\n")
    with pytest.raises(ConfigError, match=r"warm_start_steps=10 with the loop .*own.py:train: a warm start needs a workload"):
        atoll.run(
            override(recipes.toy_sync(), ["train.warm_start_steps=10"]),
            engine=atoll.Elastic(processes=2),
            workload=f"{tmp_path}/own.py:train",
            out=tmp_path / "run",
        )


def test_a_run_says_how_to_join_it_and_what_a_trusted_network_means(tmp_path):
    secured = Elastic(listen="192.0.2.7:7000")
    assert secured.secured
    assert joining_lines(secured, tmp_path, "192.0.2.7:7000").startswith(f"join this run: `atoll invite {tmp_path}` here")
    trusted = replace(secured, network="trusted")
    assert not trusted.secured
    text = joining_lines(trusted, tmp_path, "192.0.2.7:7000")
    assert "--join 192.0.2.7:7000 --set engine.network=trusted" in text
    assert "every machine that reaches the ports of 192.0.2.7 can read, replace and stop this run" in text


@pytest.mark.parametrize(
    ("settings", "secured"),
    [
        ({}, False),
        ({"listen": "localhost:7000"}, False),
        ({"listen": "127.0.0.1:0", "advertise": "203.0.113.5:7000"}, True),
        ({"listen": "0.0.0.0:7000", "advertise": "203.0.113.5:7000"}, True),
        ({"listen": "box.example:7000"}, True),
    ],
)
def test_a_run_beyond_loopback_has_a_gateway(settings, secured):
    assert Elastic(**settings).secured == secured


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": "0.0.0.0:7000"},
        {"listen": "0.0.0.0:7000", "network": "trusted", "advertise": "203.0.113.5:7000"},
        {"listen": "192.0.2.7:7000", "network": "trusted", "advertise": "203.0.113.5:7000"},
        {"listen": "192.0.2.7:7000", "advertise": "203.0.113.5:7000,"},
        {"listen": "192.0.2.7:7000", "network": "vpn"},
    ],
)
def test_addresses_that_no_machine_could_dial_are_refused(settings):
    with pytest.raises(ConfigError):
        Elastic(**settings)


SECURED = Elastic(processes=1, advertise="192.0.2.7:7000")


def test_an_island_of_the_first_machine_takes_the_run_from_its_folder_and_not_from_the_registry(tmp_path):
    """Every member can write to the registry."""
    store, port = open_store("127.0.0.1")
    run = SECURED.fitted(recipes.ALL["toy-sync"]())
    own = JoinInfo(run, SECURED, "127.0.0.1:1", f"127.0.0.1:{port}", run_id_of(tmp_path))
    (tmp_path / "join_info.json").write_text(own.to_text())
    store.set("join_info", replace(own, run=replace(run, recipe="evil"), lighthouse="127.0.0.1:2").to_text())
    info, network = launch.find_run(own.registry, "island-0000", tmp_path, launch.Joiner(), pytest.fail)
    with closing(network):
        assert (info.to_text(), network.lighthouse) == (own.to_text(), own.lighthouse)


@pytest.mark.parametrize("spec", [SECURED, Elastic(processes=1)])
@pytest.mark.parametrize("lighthouse", ["192.0.2.7:1", "", "127.0.0.1:65536", "127.0.0.1:1,127.0.0.1:2", f"{'a' * 64}:1"])
def test_what_describes_a_run_names_servers_that_an_island_can_dial_and_behind_a_gateway_on_loopback(lighthouse, spec):
    text = JoinInfo(spec.fitted(recipes.ALL["toy-sync"]()), spec, lighthouse, "127.0.0.1:2").to_text()
    if not spec.secured and lighthouse == "192.0.2.7:1":
        assert JoinInfo.from_text(text).lighthouse == lighthouse
        return
    with pytest.raises(ConfigError, match=r"is no address of a registry or a lighthouse|are on 127\.0\.0\.1"):
        JoinInfo.from_text(text)


LOOP = """
def train(member):
    (Path(__file__).parent / member.name).write_text(member.device)
"""


def test_each_islands_loop_begins_with_a_gpu_of_its_own_as_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "gpu_loop.py").write_text(f"from pathlib import Path\n{LOOP}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    join_info = SimpleNamespace(run=override(recipes.toy_sync(), ["train.device=cuda"]), spec=Elastic())
    monkeypatch.setattr(launch, "find_run", lambda *_: (join_info, SimpleNamespace(host="")))
    monkeypatch.setattr(launch, "end_with_supervisor", lambda: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    uuids, chosen = [uuid4().hex for _ in range(2)], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    threads = torch.get_num_threads()
    for number in range(2):
        with pytest.raises(SystemExit):  # its loop enters no block
            launch.run_island("127.0.0.1:1", f"island-000{number}", tmp_path, code=f"{tmp_path}/gpu_loop.py:train")
    torch.set_num_threads(threads)
    gc.unfreeze()
    del sys.modules["gpu_loop"]
    assert chosen == [0, 1]
    assert [(tmp_path / f"island-000{number}").read_text() for number in range(2)] == ["cuda:0", "cuda:1"]
