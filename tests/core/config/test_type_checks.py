from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.type_checks import check_type, check_types
from atoll.core.errors import ConfigError
from atoll.data.text import Text
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import Nesterov
from atoll.optim.staleness import DelayCompensation
from atoll.runs.cluster import Away, Cluster, Link, Lost, Outage
from atoll.runs.run_settings import Keep, Train


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(inner_steps=2, weighting="exampels"), r"weighting='exampels' is none of 'uniform', 'examples'"),
        (lambda: DiLoCo(inner_steps=2, missed="globl"), r"missed='globl'"),
        (lambda: DiLoCo(inner_steps=2.5), r"inner_steps=2.5 is not a whole number"),
        (lambda: Cluster(topology="mesh"), r"topology='mesh' is none of 'ring', 'star'"),
        (lambda: Cluster(pool="doublng"), r"pool='doublng'"),
        (lambda: Train(steps=1, batch_size=1, precision="fp16"), r"precision='fp16'"),
        (lambda: Train(steps=1, batch_size=1, device="gpu"), r"device='gpu'"),
        (lambda: Train(steps=1, batch_size=True), r"batch_size=True is not a whole number"),
        (lambda: Train(steps="40", batch_size=1), r"steps='40' is text, not a whole number. Leave out the quotation marks"),
        (lambda: Train(steps=None, batch_size=1), r"steps=None is not a whole number. Give one"),
        (lambda: Train(steps=1, batch_size=1, compile="no"), r"compile='no'"),
        (lambda: Keep(tensorboard=1), r"tensorboard=1 is not True or False"),
        (lambda: DiLoCo(inner_steps="5"), r"inner_steps='5' is text, not a whole number"),
        (lambda: DiLoCo(inner_steps=5, weighting=1), r"weighting=1 is not one of 'uniform', 'examples'. Give one"),
        (lambda: AdamW(lr="fast"), r"lr='fast' is not a number, a Constant, a Cosine or a WSD. Give one"),
        (lambda: AdamW(lr=1e-3, betas=0.9), r"betas=0.9 is not a list. Give one, such as \[0.9\]"),
        (lambda: AdamW(lr=1e-3, betas=(0.9,)), r"betas=\(0.9,\) has 1 entries, and takes 2. Give as many"),
        (lambda: AdamW(lr=1e-3, betas=(0.9, "0.95")), r"betas\[1\]='0.95' is text, not a number"),
        (lambda: Nesterov(lr=0.7, momentum=None), r"momentum=None is not a number"),
        (lambda: Cosine(lr=0.1, steps="9"), r"steps='9' is text, not a whole number"),
        (lambda: DelayCompensation(strength="0.1"), r"strength='0.1' is text, not a number"),
        (lambda: replace(Cluster(), link=10), r"link=10 is not a Link. Give one, such as atoll.Link\(...\)"),
        (lambda: Cluster(links=[Link(), 10]), r"links\[1\]=10 is not a Link"),
        (lambda: Cluster(step_time_s=1.0), r"step_time_s=1.0 is not a list. Give one, such as \[1.0\]"),
        (lambda: Cluster(lost=Lost(island=0, round=1)), r"lost=Lost\(island=0, round=1\) is not a list. Give one, such as \[Lost"),
        (lambda: Cluster(away=[Away(island=0, start="1", stop=2)]), r"start='1' is text, not a whole number"),
        (lambda: Cluster(outages=[Outage(island=0, start_s="1")]), r"start_s='1' is text, not a number"),
        (lambda: Text(partition="iid"), r"partition='iid' is none of atoll.IID\(...\), atoll.ByDomain\(...\)"),
    ],
)
def test_what_is_misspelt_in_python_is_refused_as_on_the_command_line(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def torch_rule(kind=torch.optim.AdamW):
    return kind(torch.nn.Linear(2, 1).parameters(), lr=0.1)


RULES = r"Give one, such as atoll.AdamW\(lr=4e-4\) or atoll.Nesterov\(lr=0.7\)\."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ACCO(optimizer=torch_rule()), rf"optimizer is a torch.optim.adamw.AdamW, not a Rule: it has no init, .*{RULES}"),
        (lambda: DiLoCo(inner_steps=5, outer=torch_rule(torch.optim.SGD)), rf"outer is a torch.optim.sgd.SGD, .*{RULES}"),
        (lambda: DiLoCo(inner_steps=5, outer=0.7), rf"outer=0.7 is not a Rule. {RULES}"),
        (lambda: DiLoCo(inner_steps=5, outer=None), rf"outer=None is not a Rule. {RULES}"),
        (lambda: DiLoCo(inner_steps=5, outer=Nesterov), r"outer is the class Nesterov, not a Rule. Give one: Nesterov\(...\)\."),
        (lambda: DiLoCo(inner_steps=5, outer=torch.optim.SGD), rf"outer is the class SGD, not a Rule. {RULES}"),
        (lambda: DiLoCo(inner_steps=5, outer=torch_rule), r"outer is the function torch_rule, .* call it: torch_rule\(...\)\."),
        (
            lambda: replace(recipes.demo_diloco(), algorithm="DDP"),
            r"algorithm='DDP' is not an Algorithm or .*, such as atoll.DiLoCo\(",
        ),
        (
            lambda: replace(recipes.demo_diloco(), optimizer=torch_rule()),
            r"AdamW, not an AdamW, .* an SGD, .*such as atoll.AdamW\(",
        ),
        (lambda: AsyncLocalSGD(inner_steps=5, correction=0.5), r"correction=0.5 is not a Correction. Give one, such as atoll.Poly"),
    ],
)
def test_what_lacks_the_methods_of_a_protocol_is_refused_with_an_example(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Speaks(Protocol):
    @property
    def language(self) -> str: ...

    def greet(self, whom: str) -> str: ...


class Parrot:
    language = "parrot"


class Person(Parrot):
    @property
    def language(self):
        raise AssertionError("no warning was expected")

    def greet(self, whom):
        return f"good morning, {whom}"


def test_a_protocol_of_a_users_own_names_what_is_missing_and_asks_no_property_for_its_value():
    check_type("guest", Person(), Speaks)
    with pytest.raises(
        ConfigError, match=r"guest is a \S*Parrot, not a Speaks: it has no greet. Give something that has language, "
    ):
        check_type("guest", Parrot(), Speaks)


@dataclass(frozen=True)
class Settings:
    steps: int = 1
    rate: float = 0.5
    path: str = ""
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        check_types(self)


def test_what_is_as_natural_to_write_is_taken():
    assert Settings(path=Path("a") / "b").path == "a/b"
    assert Settings(sizes=[1, 2]).sizes == (1, 2)
    assert Settings(rate=1).rate == 1
    assert Settings(steps=np.int64(3), rate=np.float32(0.5)) == Settings(steps=3)


def test_a_long_value_is_shown_by_its_beginning():
    with pytest.raises(ConfigError, match=r"steps='a{59}\.\.\. is not a whole number"):
        Settings(steps="a" * 1000)
