"""Without torchrun a process is alone; with it, processes find each other and share their cores."""

import subprocess
import sys

import pytest
import torch.distributed as dist

import atoll
from atoll.errors import ConfigError

PRINTS = "import atoll, torch; print(*atoll.join(), *atoll.join(threads=7), torch.get_num_threads())"


def test_without_torchrun_a_process_is_alone_and_nothing_is_joined():
    assert atoll.join() == (0, 1)
    assert not dist.is_initialized()


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="limit_s=0: it is more than 0 seconds"):
        atoll.join(limit_s=0)


def test_what_torchrun_tells_is_enough_to_join(tmp_path):
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "999"}
    done = subprocess.run([sys.executable, "-c", PRINTS], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "0", "1", "1"]
