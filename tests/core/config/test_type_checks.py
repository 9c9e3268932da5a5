import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.type_checks import Seconds, SecondsOrInfinite, check_type, check_types, shown
from atoll.core.errors import ConfigError
from atoll.data.text_dataset import Text
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
        (lambda: DiLoCo(inner_steps=5, weighting=1), r"weighting=1 is not one of 'uniform', 'examples', 'tokens'. Give one"),
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


@dataclass(frozen=True, kw_only=True)
class Limited:
    count: int = 1
    rate: float = 1.0
    wait_s: Seconds | None = None
    times_s: tuple[Seconds, ...] = ()
    grace_s: SecondsOrInfinite = 0.0
    name: str = ""

    def __post_init__(self):
        check_types(self)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 10**10}, r"count=10000000000: it is at most 1,000,000,000\. Give such a number"),
        ({"count": -(10**10)}, r"count=-10000000000: it is at least -1,000,000,000\."),
        ({"count": 10**5000}, r"count=a number of too many digits: it is at most"),
        ({"rate": 10**400}, r"rate=1000.*\.\.\.: it is at most 1e\+300"),
        ({"wait_s": math.inf}, r"wait_s=inf: it is at most 31,622,400 seconds \(a year\)"),
        ({"wait_s": math.nan}, r"wait_s=nan: it is at most"),
        ({"wait_s": 10**400}, r"wait_s=1000.*at most 31,622,400"),
        ({"times_s": (1.0, 1e308)}, r"times_s\[1\]=1e\+308: it is at most"),
        ({"grace_s": 1e300}, r"grace_s=1e\+300: it is at most 31,622,400 seconds \(a year\), or inf\."),
        ({"grace_s": -math.inf}, r"grace_s=-inf: it is at least"),
        ({"name": "x" * 5000}, r"name='xxx.*\.\.\. has 5000 characters, and a text has at most 4096"),
        ({"name": "a\0b"}, r"has the control character or half of a character '\\x00'"),
        ({"name": "\ud800"}, r"half of a character '\\ud800'"),
    ],
)
def test_numbers_and_texts_beyond_their_limits_are_refused_in_one_short_line(given, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Limited(**given)
    assert len(str(refused.value)) < 250
    assert str(refused.value).isprintable()


def test_numbers_within_their_limits_are_taken():
    largest = 366 * 86_400.0
    Limited(count=10**9, rate=1e300, wait_s=largest, times_s=(0.0, largest), grace_s=math.inf, name="é\u202f" * 2048)
    Limited(rate=Fraction(1, 3), wait_s=np.float32(0.5))
    assert Limited(rate=math.inf).rate == math.inf, "its own record would refuse it, with advice"


def test_what_is_shown_of_a_value_is_one_short_line():
    assert shown("a\nb") == "'a\\nb'"
    assert shown("x" * 100) == "'" + "x" * 59 + "..."
