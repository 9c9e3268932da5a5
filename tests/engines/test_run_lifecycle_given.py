"""`run` refuses arguments of a wrong type before it creates a folder."""

import pytest
import torch

from atoll import recipes
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.engines import run_lifecycle
from atoll.runs.run_settings import candidates
from atoll.testing.simulated_runs import Regression
from tests.samples import SMALL

RUN = override(recipes.demo_diloco(), [*SMALL, "train.steps=2", "train.warm_start_steps=0", "algorithm.inner_steps=1"], candidates)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run."""
    return run_lifecycle.run(RUN, out=tmp_path_factory.mktemp("finished") / "run").folder


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("demo-diloco", r"run='demo-diloco' is not a Run. Give one, such as atoll.recipes.demo_diloco\(\)\."),
        (recipes.demo_diloco, r"run is the function demo_diloco, not a Run. If it returns one, call it: demo_diloco\(...\)\."),
        (DiLoCo(inner_steps=2), r"run is a DiLoCo, not a Run. Give one, such as"),
    ],
)
def test_what_is_no_run_is_refused_before_there_is_a_folder(given, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run_lifecycle.run(given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_folder_is_refused():
    with pytest.raises(ConfigError, match=r"out=1 is not text"):
        run_lifecycle.run(RUN, out=1)
    with pytest.raises(ConfigError, match=r"out is a Run, not text"):
        run_lifecycle.resume(RUN)


class NoLoss:
    """A workload without a loss."""

    batches = Regression().batches

    def module(self):
        return torch.nn.Linear(2, 1)

    def evaluate(self, module):
        return {"loss": 0.0}


class NoShards(NoLoss):
    """A workload whose batches are a list."""

    batches = ()

    def loss(self, module, batch):
        return module(batch).sum()


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            NoLoss(),
            r"workload is a \S*NoLoss, not a Workload: it has no loss. Give something that has batches, module, loss, evaluate",
        ),
        (Regression, r"workload is the class Regression, not a Workload. Give one: Regression\(...\)\."),
        (NoShards(), r"workload.batches=\(\) is not a Batches. Give something that has num_shards, examples, batch, tokens"),
    ],
)
def test_a_workload_that_lacks_something_is_refused_before_there_is_a_folder(workload, said, tmp_path, finished):
    with pytest.raises(ConfigError, match=said):
        run_lifecycle.run(RUN, out=tmp_path / "run", workload=workload)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=said):
        run_lifecycle.resume(finished, workload=workload)
