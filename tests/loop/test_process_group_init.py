"""Without torchrun a process is alone; with it, processes find each other and share their cores."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.core.errors import ConfigError
from atoll.loop import process_group_init

PRINTS = "import atoll, torch; print(*atoll.join(), torch.get_num_threads(), *atoll.join(threads=7), torch.get_num_threads())"


def test_without_torchrun_a_process_is_alone_and_nothing_is_joined():
    assert atoll.join() == (0, 1)
    assert not dist.is_initialized()


def test_a_limit_of_nothing_and_no_threads_at_all_are_refused():
    with pytest.raises(ConfigError, match="limit_s=0: it is more than 0 seconds"):
        atoll.join(limit_s=0)
    with pytest.raises(ConfigError, match="threads=0: it is 1 or more"):
        atoll.join(threads=0)


def test_what_torchrun_tells_is_enough_to_join_and_too_many_threads_are_shared_out_unless_chosen():
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "999"}
    done = subprocess.run([sys.executable, "-c", PRINTS], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "1", "0", "1", "7"]


def test_threads_that_somebody_chose_are_left_alone(monkeypatch):
    monkeypatch.setattr(process_group_init, "_cores", lambda: 4)
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
            process_group_init._share_cores()
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 4, 3, 1]
