from __future__ import annotations

import json
import math
import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import pytest
from hypothesis import given, settings, strategies as st

from atoll.core.config.describe_settings import describe
from atoll.core.config.json_records import find_type, from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.config.toml_settings import assignments, to_toml
from atoll.core.errors import ConfigError

T = TypeVar("T")


class Rule(Protocol):
    def step(self) -> float: ...


class Algorithm(Protocol[T]):
    def round(self) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Cosine:
    lr: float
    steps: int
    warmup: int = 0


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    lr: float = 0.7
    momentum: float = 0.9

    def step(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Adam:
    lr: float | Cosine
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Link:
    latency_s: float
    bandwidth_mbit_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Cluster:
    step_time_s: float | tuple[float, ...] = 1.0
    link: Link = Link(latency_s=0.01)
    links: tuple[Link, ...] = ()
    spare: Link | None = None


@dataclass(frozen=True, kw_only=True)
class IID:
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ByDomain:
    domains: int = 8


@dataclass(frozen=True, kw_only=True)
class Data:
    corpus: str = "shakespeare"
    path: Path | None = None
    partition: IID | ByDomain = IID()
    limit_bytes: int | None = None
    names: tuple[str, ...] = ()
    flag: bool = False


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    inner_steps: int = 10
    outer: Rule = field(default_factory=Nesterov)
    weighting: Literal["equal", "examples"] = "equal"

    def round(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    seed: int = 0
    steps: int = 100
    data: Data = Data()
    optimizer: Adam = Adam(lr=1e-3)
    algorithm: Algorithm[Any] = field(default_factory=DiLoCo)
    cluster: Cluster = Cluster()

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, DiLoCo) and self.steps % self.algorithm.inner_steps:
            raise ConfigError(f"steps={self.steps} is no multiple of inner_steps={self.algorithm.inner_steps}. Change one.")


candidates = {Rule: [Nesterov, Adam], Algorithm: [DiLoCo]}


def changed(*assignments: str, run: Run | None = None) -> Run:
    return override(run or Run(), assignments, candidates)


def message(*assignments: str, run: Run | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        changed(*assignments, run=run)
    return str(caught.value)


FULL = Run(
    seed=3,
    data=Data(
        corpus="my corpus",
        path=Path("a b/c.txt"),
        partition=ByDomain(domains=3),
        limit_bytes=2**60,
        names=("x", "none", "A-b", "global"),
    ),
    optimizer=Adam(lr=Cosine(lr=0.1 + 0.2, steps=7), betas=(0.5, -0.0)),
    algorithm=DiLoCo(inner_steps=20, outer=Adam(lr=1e-300), weighting="examples"),
    cluster=Cluster(
        step_time_s=(0.58, 0.75), links=(Link(latency_s=0.1), Link(latency_s=0.2, bandwidth_mbit_per_s=5.0)), spare=None
    ),
)


# ----------------------------------------------------------------------------------------------------------- as plain data


@pytest.mark.parametrize("run", [Run(), FULL])
def test_a_run_is_equal_after_a_file(run: Run):
    text = json.dumps(to_json(run), allow_nan=False)
    assert from_json(json.loads(text)) == run


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_every_float_keeps_its_bits_in_a_file(value: float):
    back = from_json(json.loads(json.dumps(to_json((value,)), allow_nan=False)))
    assert back[0].hex() == value.hex()


def test_not_a_number_stays_one():
    assert math.isnan(from_json(json.loads(json.dumps(to_json(math.nan), allow_nan=False))))


def test_a_dataclass_is_written_with_the_full_name_of_its_class():
    assert to_json(IID(seed=4)) == {"type": f"{__name__}.IID", "seed": 4}


def test_a_field_that_an_older_file_lacks_gets_its_default():
    node = to_json(FULL)
    del node["algorithm"]["weighting"], node["cluster"]["spare"]
    assert from_json(node) == replace(FULL, algorithm=replace(FULL.algorithm, weighting="equal"))


def test_a_missing_field_without_default_is_refused_with_its_place():
    node = to_json(FULL)
    del node["optimizer"]["lr"]["steps"]
    with pytest.raises(ConfigError, match=r"optimizer\.lr \(Cosine\) is not given steps.*no default.*Add it"):
        from_json(node)


def test_an_unknown_field_is_refused_with_those_that_exist():
    node = to_json(FULL)
    node["algorithm"]["outer_steps"] = 4
    with pytest.raises(
        ConfigError, match=r"algorithm \(DiLoCo\) is given outer_steps.*It has: inner_steps, outer, weighting.*Remove it"
    ):
        from_json(node)


@pytest.mark.parametrize(
    "name",
    ["atoll.nowhere.Thing", "atoll.core.flat_tree.Nothing", "os.system", "atoll.core.flat_tree.Tree", "", None, 3, "x", "a..b"],
)
def test_an_unknown_type_is_refused(name: Any):
    with pytest.raises(ConfigError, match=r"data has the type .*not a known dataclass.*import the module"):
        from_json({**to_json(Run()), "data": {"type": name}})


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data", Adam),
        ("data.partition", Link),
        ("algorithm", Cluster),
        ("algorithm.outer", IID),
        ("cluster.links.0", Adam),
        ("seed", IID),
    ],
)
def test_a_file_may_not_name_a_class_that_does_not_fit_its_place(path: str, kind: type):
    """Its constructor would run before anything is checked; the standard library alone has dozens of dataclasses."""
    node = to_json(FULL)
    inner, (*way, last) = node, path.split(".")
    for name in way:
        inner = inner[int(name) if name.isdecimal() else name]
    inner[int(last) if last.isdecimal() else last] = {"type": f"{__name__}.{kind.__name__}"}
    with pytest.raises(ConfigError, match=rf"^{path} has the type .*{kind.__name__}', which does not fit there"):
        from_json(node, hint=Run)
    with pytest.raises(ConfigError, match="which does not fit there"):
        from_json(node, hint=Data)


def test_a_file_cannot_make_us_import_a_module():
    name = "turtledemo"
    assert name not in sys.modules
    assert find_type(f"{name}.Thing") is None
    assert name not in sys.modules


def test_types_of_atoll_are_found_without_being_imported_first():
    assert find_type("atoll.core.protocols.Work").__name__ == "Work"


def test_a_file_with_impossible_values_is_refused_with_its_place():
    node = to_json(FULL)
    node["steps"] = "many"
    with pytest.raises(ConfigError, match=r"the Run cannot be made from.*Correct the file"):
        from_json(node)


def test_an_error_of_a_dataclass_of_its_own_passes_through_a_file():
    node = to_json(FULL)
    node["steps"] = 101
    with pytest.raises(ConfigError, match=r"^steps=101 is no multiple"):
        from_json(node)


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, 1j, Run, object()])
def test_what_settings_cannot_hold_is_refused_when_it_is_written(value: Any):
    with pytest.raises(ConfigError, match=r"data\.names\.0 is .*cannot be saved.*Use one of these"):
        to_json(replace(Run(), data=Data(names=(value,))))


# --------------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize("run", [Run(), FULL])
def test_what_describe_shows_makes_the_same_run_when_it_is_given_to_override(run: Run):
    shown = [f"{setting.path}={setting.text}" for setting in describe(run, candidates)]
    assert changed(*shown, run=run) == run
    assert changed(*shown) == run


def test_all_paths_are_listed_with_value_and_type():
    shown = {setting.path: setting for setting in describe(FULL, candidates)}
    assert shown["algorithm.weighting"][1:3] == ("examples", "equal | examples")
    assert shown["algorithm.outer"].kind == "Nesterov | Adam"
    assert shown["algorithm.outer"].text == "Adam"
    assert shown["optimizer.lr.steps"].value == 7
    assert shown["cluster.links.1.latency_s"].value == 0.2
    assert shown["cluster.step_time_s"][1:3] == ((0.58, 0.75), "float | [float, ...]")
    assert shown["data.limit_bytes"].kind == "int | none"


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("algorithm.inner_steps=50", "algorithm.inner_steps", 50),
        ("cluster.step_time_s=[0.58,0.75]", "cluster.step_time_s", (0.58, 0.75)),
        ("cluster.step_time_s=0.58, 1", "cluster.step_time_s", (0.58, 1.0)),
        ("cluster.step_time_s=2", "cluster.step_time_s", 2.0),
        ("cluster.link.bandwidth_mbit_per_s=10", "cluster.link.bandwidth_mbit_per_s", 10.0),
        ("cluster.link.bandwidth_mbit_per_s=inf", "cluster.link.bandwidth_mbit_per_s", math.inf),
        ("algorithm.outer=Adam(lr=0.3,eps=0.1)", "algorithm.outer", Adam(lr=0.3, eps=0.1)),
        ("algorithm.outer=Adam(lr=Cosine(lr=1, steps=2))", "algorithm.outer", Adam(lr=Cosine(lr=1.0, steps=2))),
        ("algorithm.outer.lr=0.5", "algorithm.outer", Nesterov(lr=0.5)),
        ("data.partition=ByDomain", "data.partition", ByDomain()),
        ("data.partition=ByDomain()", "data.partition", ByDomain()),
        ("optimizer.lr=Cosine(lr=1e-3,steps=500,warmup=10)", "optimizer.lr", Cosine(lr=1e-3, steps=500, warmup=10)),
        ("optimizer.betas=(0.9, 0.95)", "optimizer.betas", (0.9, 0.95)),
        ("optimizer.betas.1=0.95", "optimizer.betas", (0.9, 0.95)),
        ("algorithm.weighting=examples", "algorithm.weighting", "examples"),
        ("algorithm.weighting='examples'", "algorithm.weighting", "examples"),
        ("data.limit_bytes=none", "data.limit_bytes", None),
        ("data.limit_bytes=1e6", "data.limit_bytes", 1_000_000),
        ("data.limit_bytes=9007199254740993", "data.limit_bytes", 2**53 + 1),
        ("data.flag=true", "data.flag", True),
        ("data.flag=No", "data.flag", False),
        ("data.corpus=tiny-stories", "data.corpus", "tiny-stories"),
        ("data.corpus=none", "data.corpus", "none"),
        ("data.corpus=5", "data.corpus", "5"),
        ("data.corpus='a=b c'", "data.corpus", "a=b c"),
        ("data.corpus=", "data.corpus", ""),
        ("data.path=/a/b-c.txt", "data.path", Path("/a/b-c.txt")),
        ("data.path=NONE", "data.path", None),
        ("data.path='none'", "data.path", Path("none")),
        ("data.names=[a, 'b c', d/e.txt]", "data.names", ("a", "b c", "d/e.txt")),
        ("data.names=[]", "data.names", ()),
        ("cluster.links=[Link(latency_s=1), Link(latency_s=2)]", "cluster.links", (Link(latency_s=1.0), Link(latency_s=2.0))),
        ("cluster.spare=Link(latency_s=-1e-3)", "cluster.spare", Link(latency_s=-1e-3)),
        (" seed = 7 ", "seed", 7),
    ],
)
def test_a_value_is_read_by_the_type_of_its_field(assignment: str, path: str, value: Any):
    found: Any = changed(assignment)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_an_item_of_a_tuple_is_reached_by_its_index():
    run = changed("cluster.links.0.latency_s=0.5", run=FULL)
    assert [link.latency_s for link in run.cluster.links] == [0.5, 0.2]


def test_an_override_changes_nothing_else():
    assert changed("cluster.link.latency_s=5") == replace(Run(), cluster=Cluster(link=Link(latency_s=5.0)))
    assert changed() == Run()


def test_settings_that_are_valid_only_together_can_be_given_in_any_order():
    together = ["steps=90", "algorithm.inner_steps=45"]
    for alone in together:
        assert "no multiple" in message(alone, run=Run(steps=100, algorithm=DiLoCo(inner_steps=100)))
    assert changed(*together) == changed(*reversed(together)) == Run(steps=90, algorithm=DiLoCo(inner_steps=45))


def test_the_last_of_two_values_for_one_path_counts():
    assert changed("seed=1", "seed=2").seed == 2
    assert changed("algorithm.outer.lr=0.1", "algorithm.outer=Nesterov").algorithm.outer == Nesterov()


def test_a_class_and_its_fields_can_be_given_apart():
    run = changed("optimizer.lr=Cosine(lr=1)", "optimizer.lr.steps=5", "optimizer.lr.lr=2")
    assert run.optimizer.lr == Cosine(lr=2.0, steps=5)
    run = changed("cluster.links=[Link, Link(latency_s=1)]", "cluster.links.0.latency_s=3")
    assert [link.latency_s for link in run.cluster.links] == [3, 1]


def test_a_class_of_the_users_own_can_be_named_where_it_stands():
    assert override(Run(), ["algorithm.outer=Nesterov(lr=0.1)"]).algorithm.outer == Nesterov(lr=0.1)


def test_an_unknown_path_is_refused_with_the_nearest_ones():
    assert "algorithm.inner_step: DiLoCo has no such setting. Near it: algorithm.inner_steps" in message("algorithm.inner_step=5")
    assert "inner_steps: Run has no such setting. Near it: algorithm.inner_steps" in message("inner_steps=5")
    assert "optimizer.lr, algorithm.outer.lr" in message("lr=5")
    assert "It has: seed, steps, data, optimizer, algorithm, cluster. `atoll show`" in message("qqq=5")
    assert "algorithm.outer.momentum: Adam has no such setting" in message(
        "algorithm.outer=Adam(lr=1)", "algorithm.outer.momentum=0"
    )


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [
        ("algorithm.inner_steps=many", "Allowed: int. It is 10 now."),
        ("algorithm.inner_steps=5.5", "Allowed: int."),
        ("algorithm.inner_steps=true", "Allowed: int."),
        ("algorithm.inner_steps=", "Allowed: int."),
        ("algorithm.weighting=tokens", "Allowed: equal | examples. It is equal now."),
        ("cluster.link.latency_s=true", "Allowed: float."),
        ("cluster.link.latency_s=none", "Allowed: float."),
        ("cluster.link.latency_s=1+1", "Allowed: float."),
        ("cluster.step_time_s=[1,x]", "cluster.step_time_s.1=x: this value cannot stand here. Allowed: float."),
        ("optimizer.betas=[0.9]", "Allowed: [float, float]. It is [0.9, 0.999] now."),
        ("data.flag=1", "Allowed: bool. It is false now."),
        ("data.partition=ByDomian", "Allowed: IID | ByDomain. Did you mean ByDomain?"),
        ("data.partition=Adam(lr=1)", "Allowed: IID | ByDomain. It is IID now."),
        ("algorithm.outer=SGD", "Allowed: Nesterov | Adam. It is Nesterov now."),
        ("algorithm.outer=__import__('os')", "Allowed: Nesterov | Adam."),
        (
            "optimizer.lr=Cosine(lr=1,steps=x)",
            "optimizer.lr.steps=x: this value cannot stand here. Allowed: int. Correct the value.",
        ),
        ("data.limit_bytes=all", "Allowed: int | none. It is none now."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_allowed(assignment: str, allowed: str):
    text = message(assignment)
    assert allowed in text
    assert assignment in text or ".1=x" in text or "steps=x" in text


def test_a_path_through_a_plain_number_says_that_it_is_one():
    text = message("optimizer.lr.warmup=5")
    assert "optimizer.lr.warmup: optimizer.lr is 0.001 now, which has nothing inside." in text
    assert "Allowed there: float | Cosine. Give optimizer.lr as a whole, such as optimizer.lr=Cosine(warmup=...)." in text
    assert "cluster.spare is none now" in message("cluster.spare.latency_s=5")
    assert "optimizer.lr is 0.1 now" in message("optimizer.lr=0.1", "optimizer.lr.warmup=5")
    assert "algorithm.outer.lr is not set now" in message("algorithm.outer=Adam", "algorithm.outer.lr.warmup=5")


def test_a_class_without_what_it_needs_is_refused_with_what_is_missing():
    assert "Cosine needs lr, steps. Write Cosine(lr=..., steps=...)." in message("optimizer.lr=Cosine")


def test_a_class_whose_types_cannot_be_read_is_refused_with_the_reason():
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        x: Nowhere = 0  # noqa: F821

    with pytest.raises(
        ConfigError, match=r"types of Odd's fields cannot be read: name 'Nowhere'.*import what they name at run time"
    ):
        override(Odd(), ["x=5"])


def test_values_without_names_are_refused():
    assert "values need names. Write Cosine(lr, steps, warmup) with name=value." in message("optimizer.lr=Cosine(1, 2)")
    assert "values need names" in message("optimizer.lr=Cosine(**x)")


def test_an_index_outside_a_tuple_is_refused_with_those_inside():
    text = message("cluster.links.2.latency_s=1", run=FULL)
    assert "cluster.links has 2 items: allowed are cluster.links.0 to cluster.links.1. To change how many" in text
    assert "it is empty" in message("cluster.links.0.latency_s=1")
    assert "has 2 items" in message("cluster.links.first=1", run=FULL)


def test_an_assignment_without_equals_is_refused_with_an_example():
    assert "'seed' has no '='. Settings are given as path=value. Write for example seed=0." in message("seed")
    assert message("cluster.link.latency_s").endswith("Write for example cluster.link.latency_s=0.01.")
    assert message("cluster.link.latncy_s").endswith("Write for example cluster.link.latency_s=0.01.")


def test_a_preset_stands_for_a_whole_value_and_what_is_inside_can_be_changed_after_it():
    presets = {"cluster.link": {"slow": lambda: Link(latency_s=1.0, bandwidth_mbit_per_s=10.0)}}
    made = override(Run(), ["cluster.link.latency_s=2", "cluster.link=slow"], candidates, presets).cluster.link
    assert made == Link(latency_s=1.0, bandwidth_mbit_per_s=10.0)
    made = override(Run(), ["cluster.link=slow", "cluster.link.latency_s=2"], candidates, presets).cluster.link
    assert made == Link(latency_s=2.0, bandwidth_mbit_per_s=10.0)
    with pytest.raises(ConfigError, match=r"Allowed: Link \| slow. Did you mean slow\?"):
        override(Run(), ["cluster.link=slwo"], candidates, presets)
    assert {s.path: s.kind for s in describe(Run(), candidates, presets)}["cluster.link"] == "Link | slow"


def test_an_error_of_a_dataclass_of_its_own_passes_through_an_override():
    assert message("steps=101").startswith("steps=101 is no multiple")


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=20))
def test_any_text_in_quotes_is_that_text_and_no_text_breaks_the_parser(text: str):
    assert changed(f"data.corpus={text!r}").data.corpus == text
    assert changed(f"data.names=[{text!r}]").data.names == (text,)
    for path in ("data.corpus", "data.names", "optimizer.lr", "algorithm.outer", text):
        try:
            changed(f"{path}={text}")
        except ConfigError:
            continue


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.text(max_size=20), st.text(alphabet="a1 .:/'\"()[],=-_", max_size=8)))
def test_any_text_in_a_toml_file_is_that_text(text: str):
    run = replace(Run(), data=Data(corpus=text, names=(text,)))
    assert changed(*assignments(tomllib.loads(to_toml(describe(run))))) == run


def test_a_list_in_a_call_in_a_call_is_read():
    run = changed("algorithm=DiLoCo(inner_steps=2,outer=Adam(lr=Cosine(lr=0.1,steps=4),betas=[0.8,0.95]))")
    assert run.algorithm == DiLoCo(inner_steps=2, outer=Adam(lr=Cosine(lr=0.1, steps=4), betas=(0.8, 0.95)))
