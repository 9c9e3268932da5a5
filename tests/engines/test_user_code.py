"""A user's workload or loop is loaded by its name, and by its name alone."""

import sys
from zipfile import ZipFile

import pytest
import torch

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.engines.user_code import LoopWorkload, load_user_code, workload_of_loop
from atoll.testing.simulated_runs import Regression

CODE = """
from dataclasses import dataclass
from atoll.testing.simulated_runs import Regression
import own_neighbour

@dataclass
class Settings:
    hidden: int = 3

def make(hidden=Settings().hidden):
    return Regression(hidden=hidden)

def train(member):
    return member

def both(one, other): ...

word = "text"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "own_neighbour.py").write_text("")
    yield tmp_path / "own.py"
    for name in ("own", "own_neighbour"):
        sys.modules.pop(name, None)


def test_the_digest_of_code_is_that_of_its_file(own):
    before = load_user_code(f"{own}:make").digest
    assert load_user_code(f"{own}:train").digest == before
    own.write_text(CODE + "\n")
    assert load_user_code(f"{own}:make").digest != before
    assert load_user_code("atoll.testing.simulated_runs:Regression").digest


def test_a_module_in_an_archive_is_loaded_and_has_the_digest_of_its_file(own, monkeypatch):
    expected = load_user_code(f"{own}:make").digest
    for file in (own, own.with_name("own_neighbour.py")):
        with ZipFile(own.with_name("code.zip"), "a") as archive:
            archive.write(file, file.name)
        file.unlink()
        sys.modules.pop(file.stem, None)
    monkeypatch.setattr(sys, "path", [str(own.with_name("code.zip")), *sys.path])
    made = load_user_code("own:make")
    assert made.open() == Regression(hidden=3)
    assert made.digest == expected


def test_a_function_without_required_parameters_makes_a_workload_and_one_with_a_parameter_is_a_loop(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    made = load_user_code("own.py:make")
    assert made.name == f"{own}:make"
    assert made.open() == Regression(hidden=3)
    loop = load_user_code(f"{own}:train")
    assert loop.loop is not None
    assert loop.loop(7) == 7
    assert isinstance(loop.open(), LoopWorkload)
    assert load_user_code("atoll.testing.simulated_runs:Regression").open() == Regression()


LOOP = """
import torch
import atoll
from atoll.testing.simulated_runs import Regression

def train(member):
    model = Regression(hidden=3).module()
    with atoll.run_islands(member, model, torch.optim.SGD(model.parameters()), evaluate=Regression().evaluate) as islands:
        raise AssertionError("this process does not train")

def enters_nothing(member): ...
"""


def test_the_model_and_the_evaluation_of_a_loop_are_found_without_training(own):
    own.write_text(LOOP)
    run = recipes.toy_sync().resolved
    workload = workload_of_loop(f"{own}:train", run)
    assert Tree.of(workload.module()).equal(Tree.of(Regression(hidden=3).module()))
    with torch.no_grad():
        assert workload.evaluate(workload.module()) == Regression().evaluate(workload.module())
    assert workload.batches.num_shards == run.shards
    with pytest.raises(ConfigError, match="the loop ended without a block"):
        workload_of_loop(f"{own}:enters_nothing", run)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own.py", "it is FILE.py:NAME or MODULE:NAME"),
        ("elsewhere.py:make", "is not a file"),
        ("own.py:missing", "has no function missing"),
        ("own.py:word", "has no function word"),
        ("own.py:both", "both has 2 parameters"),
        ("no_such_module:make", "the module no_such_module, which the workload names, cannot be imported"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(own, monkeypatch, name, says):
    monkeypatch.chdir(own.parent)
    with pytest.raises(ConfigError, match=says):
        load_user_code(name)


def test_a_named_workload_trains_on_other_engines_and_a_loop_is_refused_there(own, tmp_path):
    with pytest.raises(ConfigError, match=r"own\.py:train is a training loop, and the engine simulator trains workloads"):
        atoll.run(recipes.toy_sync(), workload=f"{own}:train", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
