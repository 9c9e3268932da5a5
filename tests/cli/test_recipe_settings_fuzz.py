"""Random settings of all recipes and engines, of right and wrong types: each is accepted, or refused with one short line.

Paths come from the listing that `atoll show` prints. What is accepted can also be carried out: a second property runs it.
"""

import time
from contextlib import contextmanager
from unicodedata import category

import pytest
from hypothesis import given, settings, strategies as st

from atoll import recipes
from atoll.cli.recipe_settings import PRESETS, run_of, spec_with
from atoll.core.config.describe_settings import describe
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import hints_of, members_of, settable
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.engines import run_lifecycle
from atoll.engines.spec import SPECS, EngineSettings
from atoll.engines.warm_start_training import Cache
from atoll.models.gpt import GPT
from atoll.optim.schedules import WSD, Constant, Cosine
from atoll.runs.cluster import Away, Cluster, Link, Lost, Outage
from atoll.runs.run_settings import candidates
from tests.fuzzing import FUZZED, FUZZERS
from tests.samples import SMALL

LIMIT_S, LONGEST_MESSAGE = 5.0, 3000

NUMBERS = (
    *("0", "1", "-1", "2", "0.5", "1e-9", "-0.0", "inf", "-inf", "nan", "1e308", "-1e308", "1e-320", "1e400", "3.5e38", "1e19"),
    *("9223372036854775808", "-9223372036854775809", "9" * 400, "-" + "9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "1e12"),
    *("65536", "4294967296", "1e9", "1_000", "0x10", "1+2j", "true", "none", "٣"),
)
TEXTS = (
    *("", " ", ".", "..", "../../../etc", "/", "~", "~nobody-at-all/x", "\0", "a\0b", "\x1b[31m", "a\nb", "\ud800", "\udcff", "'"),
    *("x" * 300, "y" * 4000, "x" * 5000, "x" * 200_000, "x/" * 3000, "a." * 5000),
    *("[" * 300, "(" * 5000, "-" * 5000 + "1", "'''", "{1: 2}"),
    *("files:", "files:/proc", "files:/proc/self/mem", "files:**/*", "hf:", "hf:@:#", "prepared:", "prepared:/proc", "bpe:"),
    *("bpe:99999999999", "bpe:" + "9" * 400, "256.1.1.1:0", "[::1]:0", "a:99999999999", "..:1", ":", "127.0.0.1:-1", "é:1"),
    *("cpu", "cuda", "stacked", "tiny", "m400", "small", "ring", "very", "ramp_up", "measured", "given", "[]", "[[]]", "lambda: 1"),
)
CLASSES = {
    kind.__name__: kind
    for kind in (
        *(kind for kinds in candidates.values() for kind in kinds),
        *(Cluster, Link, Lost, Away, Outage, Cosine, WSD, Constant, GPT),
        *(kind for run in map(recipes.recipe, recipes.ALL) for kind in map(type, (run.data, run.model, run.train, run.keep))),
        *(
            kind
            for run in map(recipes.recipe, recipes.ALL)
            for hint in hints_of(type(run.data)).values()
            for kind in members_of(hint)
            if hasattr(kind, "__dataclass_fields__")
        ),
    )
}
FIELDS = sorted({name for kind in CLASSES.values() for name in settable(kind)})


def _call(name, given):
    return f"{name}({', '.join(f'{field}={value}' for field, value in given.items())})"


def _constructed(values):
    """`Name(field=value)` of the right fields."""
    names = st.sampled_from(sorted(CLASSES))
    return names.flatmap(
        lambda name: st.fixed_dictionaries({}, optional=dict.fromkeys(settable(CLASSES[name]), values)).map(
            lambda given: _call(name, given)
        )
    )


leaves = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(st.characters(), max_size=40),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _constructed(inner),
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3).map(lambda given: _call("Buffered", given)),
        # Nested, the repetitions multiply: the text is cut, or it would not fit into memory.
        st.builds(lambda text, times: (f"Buffered(size=1, rule={text[:10_000]}" * times)[:100_000], inner, st.integers(1, 60)),
    ),
    max_leaves=6,
)
SETTINGS = {name: describe(recipes.recipe(name), candidates, PRESETS) for name in recipes.ALL}
ENGINE_SETTINGS = {name: describe(EngineSettings(spec())) for name, spec in SPECS.items()}
numbers = st.one_of(st.sampled_from(NUMBERS), st.integers(-3, 3000).map(str), st.integers().map(str), st.floats().map(repr))
odd_paths = st.one_of(
    st.text(max_size=20), st.sampled_from(["", ".", "..", "engine.", "engine..x", ":", "demo-diloco:", "x" * 400])
)


def _value_of(setting):
    """Mostly a value of the setting's own kind."""
    fitting = [st.sampled_from(setting.kind.split(" | ")), st.just(setting.text)]
    if "int" in setting.kind or "float" in setting.kind:
        fitting += [numbers] * 4
    if "[" in setting.kind:
        fitting += [st.lists(numbers, max_size=5).map(lambda items: f"[{', '.join(items)}]")] * 2
    return st.one_of(values, *fitting, *fitting)


def _assignment(setting):
    inside = st.sampled_from([*[""] * 16, ".0", ".x", ".lr", "." + "9" * 50])
    return st.builds(lambda value, more: f"{setting.path}{more}={value}", _value_of(setting), inside)


@st.composite
def commands(draw):
    """A recipe, an engine, and settings of both."""
    recipe, engine = draw(st.sampled_from(sorted(SETTINGS))), draw(st.sampled_from(sorted(ENGINE_SETTINGS)))
    own = st.sampled_from(SETTINGS[recipe]).flatmap(_assignment)
    engines = st.sampled_from(ENGINE_SETTINGS[engine]).flatmap(_assignment)
    odd = st.builds("{}={}".format, odd_paths, values)
    given = draw(st.lists(own, max_size=2)) + draw(st.lists(engines, max_size=1)) + draw(st.lists(odd, max_size=1))
    return recipe, engine, given


@contextmanager
def one_short_line():
    """What is refused is refused in time, by one line of bounded length."""
    began_s, refusals = time.process_time(), []
    try:
        yield
    except (ConfigError, DataError) as error:
        refusals.append(str(error))
    assert time.process_time() - began_s < LIMIT_S
    for refusal in refusals:
        assert 20 < len(refusal) < LONGEST_MESSAGE
        assert not {category(character) for character in refusal} & {"Cc", "Cs"}


def check_command(command):
    """Build the Run and the spec, and fit the one to the other."""
    recipe, engine, given = command
    run, spec = None, None
    with one_short_line():
        run = run_of(recipe, given, None)
        assert from_json(to_json(run)) == run
    with one_short_line():
        spec = spec_with(SPECS[engine](), given, None)
    if run is not None and spec is not None:
        with one_short_line():
            fitted = spec.fitted(run).resolved
            fitted.cluster.check_presence(fitted.rounds(fitted.train.steps))
            return fitted
    return None


SETTINGS_FUZZER, RUNS_FUZZER = FUZZERS["settings of recipes and engines"], FUZZERS["settings that are carried out"]


@settings(max_examples=SETTINGS_FUZZER.fast, **FUZZED)
@given(commands())
def test_settings_are_accepted_or_refused_with_one_short_line(command):
    check_command(command)


@pytest.mark.slow
@settings(max_examples=SETTINGS_FUZZER.slow, **FUZZED)
@given(commands())
def test_many_more_settings_are_accepted_or_refused_with_one_short_line(command):
    check_command(command)


# ------------------------------------------------------------------------------------------------------------- carried out

SCRATCH = ("train.warm_start_steps=0", "train.steps=2", "keep.evaluate_every=2", "keep.save_every=2")
POINTS = ("model.hidden=4", "data.dimensions=3", "data.examples=96", "data.eval_examples=8", "train.batch_size=4", *SCRATCH)
ONE_STEP = "algorithm.inner_steps=1"
TINY = {
    "toy-sync": (*POINTS, ONE_STEP),
    "toy-async": (*POINTS, ONE_STEP),
    "demo-diloco": (*SMALL, *SCRATCH, ONE_STEP, "optimizer.lr.warmup=0"),
    "demo-async": (*SMALL, *SCRATCH, ONE_STEP, "optimizer.lr.warmup=0"),
    "demo-acco": (*SMALL, *SCRATCH, "algorithm.warmup=0", "optimizer.lr.warmup=0"),
    "demo-ddp": (*SMALL, *SCRATCH, "optimizer.lr.warmup=0"),
}
EXTREMES = (
    "1e-320",
    "1e-300",
    "1e-45",
    "1e-9",
    "1e-6",
    "1e6",
    "1e7",
    "3e7",
    "1e9",
    "1e12",
    "1e30",
    "3e38",
    "1e299",
    "0.999999999",
    "inf",
)
"""Numbers at the ends of what is accepted."""
CACHE = Cache()


@st.composite
def tiny_runs(draw):
    """A tiny run with a few of its numbers replaced."""
    recipe = draw(st.sampled_from(sorted(TINY)))
    numeric = [s for s in describe(run_of(recipe, TINY[recipe], None), candidates) if "int" in s.kind or "float" in s.kind]
    near = st.one_of(st.sampled_from(NUMBERS), st.integers(0, 5).map(str), st.floats(0, 2).map(repr), st.sampled_from(EXTREMES))
    lists = st.lists(near, min_size=1, max_size=4).map(lambda items: f"[{', '.join(items)}]")
    changed = st.sampled_from(numeric).flatmap(
        lambda setting: (st.one_of(near, lists) if "[" in setting.kind else near).map(lambda value: f"{setting.path}={value}")
    )
    return recipe, draw(st.lists(changed, min_size=1, max_size=2))


def is_small(run):
    """Whether it takes a fraction of a second: what is merely large is no mistake, and takes its time."""
    model, data, train, algorithm = run.model, run.data, run.train, run.algorithm
    if isinstance(model, GPT):
        parameters, elements = model.num_params(257), train.batch_size * data.seq_len * data.eval_batches
    else:
        parameters = model.num_params(data.dimensions, data.classes)
        elements = (train.batch_size + data.examples + data.eval_examples) * data.dimensions
    steps = max(train.steps, getattr(algorithm, "inner_steps", 1)) * getattr(algorithm, "accumulation", 1) + train.warm_start_steps
    return steps <= 4 and run.cluster.devices <= 8 and parameters <= 1e6 and elements <= 1e5 and run.cluster.threads_per_island == 1


def carry_out(tiny, folder):
    """The run, its result, and the error that ended it."""
    recipe, given = tiny
    try:
        run = run_of(recipe, [*TINY[recipe], *given], None)
        if not is_small(run):
            return "large"
    except (ConfigError, DataError):
        return "refused"
    began_s = time.process_time()
    try:
        result = run_lifecycle.run(run, out=folder, cache=CACHE)
    except AtollError:
        return "ended"
    finally:
        assert time.process_time() - began_s < LIMIT_S
    assert result.summary.local_updates > 0
    return "finished"


@settings(max_examples=RUNS_FUZZER.fast, **FUZZED)
@given(tiny_runs())
def test_what_is_accepted_ends_with_a_result_or_an_error_of_atoll(tmp_path_factory, tiny):
    carry_out(tiny, tmp_path_factory.mktemp("fuzz") / "run")


@pytest.mark.slow
@settings(max_examples=RUNS_FUZZER.slow, **FUZZED)
@given(tiny_runs())
def test_many_more_of_them_end_with_a_result_or_an_error_of_atoll(tmp_path_factory, tiny):
    carry_out(tiny, tmp_path_factory.mktemp("fuzz") / "run")
