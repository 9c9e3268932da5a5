"""Processes join, divide their cores, and find their topology."""

import logging
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.loop import topology
from atoll.loop.settings import LoopSettings
from atoll.loop.topology import GridPosition, find_topology, log_info

PRINTS = "import atoll, torch; print(*atoll.join(), torch.get_num_threads(), *atoll.join(threads=7), torch.get_num_threads())"


def settings(**arguments):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return LoopSettings(model=model, optimizer=optimizer, algorithm=DiLoCo(inner_steps=2), **arguments)


def test_without_torchrun_a_process_is_one_island_without_process_groups():
    assert atoll.join() == (0, 1)
    topology = find_topology(settings())
    assert topology.position == GridPosition(island=0, islands=1, device=0, devices=1)
    assert topology.groups == ()
    assert not dist.is_initialized()
    flat = torch.tensor([1.0, 2.0])
    assert topology.inter_island.reduce_scatter(flat.clone(), [0.5]).tolist() == [0.5, 1.0]
    assert topology.inter_island.reduce_scatter(flat.bfloat16(), [1.0], torch.float32).dtype == torch.float32
    assert topology.inter_island.sent_bytes == 0


def test_join_refuses_a_timeout_or_threads_of_zero():
    with pytest.raises(ConfigError, match="limit_s=0: give more than 0 seconds"):
        atoll.join(limit_s=0)
    with pytest.raises(ConfigError, match="threads=0: give 1 or more"):
        atoll.join(threads=0)


def test_join_uses_torchruns_variables_and_divides_the_cores():
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "999"}
    done = subprocess.run([sys.executable, "-c", PRINTS], env=variables, capture_output=True, text=True, check=True)
    *_, printed = done.stdout.splitlines()  # torch 2.9's gloo writes there, too
    assert printed.split() == ["0", "1", "1", "0", "1", "7"]


def test_after_torchrun_is_hidden_join_and_a_second_hiding_return_the_hidden_rank(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(f"ATOLL_HIDDEN_{name}", value)
    assert atoll.join() == (1, 3)
    assert topology.hide_torchrun() == GridPosition(1, 3)
    assert not dist.is_initialized()


def test_devices_that_torchruns_processes_cannot_be_divided_by_are_refused(monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for devices in (0, 2, 4):
        with pytest.raises(ConfigError, match=f"devices={devices}: torchrun started 6 processes, 3 of them here"):
            topology.hide_torchrun(devices)
    assert not topology.is_hidden()


def test_a_chosen_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setattr(topology, "_cores", lambda: 4)
    for name, value in {"RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    seen = []
    try:
        for chosen, threads in ((None, 4), ("4", 4), (None, 3), (None, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if chosen is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", chosen)
            torch.set_num_threads(threads)
            topology._divide_cores()
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 4, 3, 1]


def test_if_the_rendezvous_is_unreachable_the_error_says_what_to_do(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        variables = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused.getsockname()[1]}
        for name, value in variables.items():
            monkeypatch.setenv(f"ATOLL_HIDDEN_{name}", str(value))
        with pytest.raises(ExchangeFailed, match=r"not all islands entered the block within 0.2 s: .* raise islands\(limit_s="):
            find_topology(settings(limit_s=0.2))


def test_log_info_writes_to_stderr_if_logging_is_not_configured(monkeypatch, capsys):
    logger = logging.getLogger("atoll")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's handlers are on the root logger
    log_info("something")
    assert capsys.readouterr().err == "atoll: something\n"
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        log_info("something else")
    finally:
        logger.removeHandler(silent)
    assert capsys.readouterr().err == ""


def test_log_info_writes_to_the_logger_if_logging_is_configured(caplog):
    with caplog.at_level(logging.INFO, "atoll"):
        log_info("something")
    assert caplog.messages == ["something"]
