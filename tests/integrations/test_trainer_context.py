"""`alone()` gives each island of a machine its own GPUs. A fake stands for CUDA, which reads its variable once."""

import os

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.integrations.trainer_context import alone

GPUS = 4


class Cuda:
    """A machine with 4 GPUs: the runtime reads CUDA_VISIBLE_DEVICES at its first call, NVML at each."""

    def __init__(self):
        self._runtime = None

    def nvml_count(self):
        return len(self._visible())

    def runtime_count(self):
        if self._runtime is None:
            self._runtime = self._visible()
        return len(self._runtime)

    def _visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")


@pytest.fixture
def cuda(monkeypatch):
    """That machine, in the third of 4 processes that torchrun has started there."""
    variables = {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    before = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    texts = {name: str(value) for name, value in variables.items()}
    monkeypatch.setattr(os, "environ", {**before, **texts, "OMP_NUM_THREADS": "1"})
    machine = Cuda()
    monkeypatch.setattr(torch.cuda, "device_count", machine.nvml_count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.runtime_count() > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", machine.runtime_count, raising=False)
    return machine


def test_cudas_runtime_sees_the_gpu_of_this_island_alone(cuda):
    assert alone() == (2, 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert cuda.runtime_count() == cuda.nvml_count() == 1


def test_a_script_whose_runtime_has_seen_all_gpus_before_is_refused(cuda):
    assert torch.cuda.is_available()
    with pytest.raises(
        ConfigError, match=r"chose the GPUs 2 of 4, but CUDA sees 4: a library used CUDA before, .* Call alone\(\) first"
    ):
        alone()


def test_a_second_call_with_another_number_of_devices_is_refused(cuda):
    alone()
    assert alone() == (2, 4)
    with pytest.raises(ConfigError, match=r"alone\(devices=2\) after alone\(devices=1\): the islands are made once"):
        alone(devices=2)
