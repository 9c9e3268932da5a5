"""A warm start is plain training, and is made once for all runs that share what it depends on."""

from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.protocols import Work
from atoll.engines.training_setup import replica_of
from atoll.engines.warm_start import Cache, load_data, warm_start, warm_up
from atoll.runs.run import candidates
from atoll.runs.workloads import plain_workload
from atoll.telemetry.sinks import MemorySink
from atoll.testing.simulated_runs import SMALL as TINY

SMALL = [*TINY, "train.steps=12", "train.warm_start_steps=20", "algorithm.inner_steps=3"]


def small(*more):
    settings = [
        setting for setting in SMALL if not (setting.startswith("optimizer.lr.") and any(m.startswith("optimizer=") for m in more))
    ]
    return override(recipes.demo_diloco(), [*settings, *more], candidates).resolved


@pytest.fixture(scope="module")
def text():
    return small().data.load()


def test_a_warm_start_warms_up_and_then_keeps_its_own_rate(text):
    """With plain SGD the weights show the rates: twenty steps at a constant rate after two of warm-up, as in the schedule."""
    seen = []
    run = small("optimizer=SGD(lr=Cosine(lr=0.1,warmup=2))", "train.warm_start_lr=0.05", "train.clip_norm=none")
    warm = warm_start(run, plain_workload(run, text), lambda done, total, loss: seen.append((done, total)))
    assert seen == [(10, 20), (20, 20)]
    by_hand = replica_of(
        replace(run, optimizer=override(run, ["optimizer=SGD(lr=WSD(lr=0.05,steps=20,warmup=2,decay=0))"], candidates).optimizer),
        plain_workload(run, text),
        plain_workload(run, text).loss,
        island=-1,
    )
    by_hand.train(20, Work(shard=0, start=0, schedule=0, examples=1))
    assert warm.params.equal(by_hand.params())
    assert warm.tokens == 20 * 4 * 16


def test_a_warm_start_has_no_rounds_and_so_nothing_that_begins_with_each_of_them(text):
    plain, odd = small(), small("train.fresh_optimizer=true", "train.peak_first=true")
    one, two = (warm_start(run, plain_workload(run, text), lambda *_: None) for run in (plain, odd))
    assert one.params.equal(two.params)
    assert one.loss == two.loss


@pytest.mark.parametrize(
    ("setting", "makes_it_anew"),
    [
        ("train.steps=24", False),
        ("data.shards=2", False),
        ("data.partition=ByDomain", False),
        ("train.fresh_optimizer=true", False),
        ("train.together=stacked", False),
        ("optimizer.lr.warmup=1", True),
        ("train.warm_start_steps=5", True),
        ("train.batch_size=3", True),
        ("model.tied=false", True),
        ("seed=1", True),
    ],
)
def test_runs_share_a_warm_start_exactly_if_nothing_that_it_depends_on_differs(setting, makes_it_anew, tmp_path):
    cache = Cache()
    first, second = (
        warm_up(run, plain_workload(run, load_data(run, cache)), file=tmp_path / name, cache=cache, sink=MemorySink())
        for name, run in (("first", small("train.warm_start_steps=2")), ("second", small("train.warm_start_steps=2", setting)))
    )
    assert (first is not second) == makes_it_anew


@pytest.mark.parametrize(("given", "is_shared"), [(0.25, True), (0.125, False)])
def test_a_rate_of_its_own_is_a_matter_of_what_it_comes_to(given, is_shared, tmp_path):
    """Whether it is given or the schedule's peak: runs at several rates have one warm start in common if they name its rate."""
    cache = Cache(tmp_path / "common")
    usual = small("train.warm_start_steps=2", "optimizer.lr.lr=0.25", "train.warm_start_lr=none")
    other = small("train.warm_start_steps=2", "optimizer.lr.lr=0.5", f"train.warm_start_lr={given}")
    first, second = (
        warm_up(run, plain_workload(run, load_data(run, cache)), file=tmp_path / name, cache=cache, sink=MemorySink())
        for name, run in (("first", usual), ("second", other))
    )
    assert (first is second) == is_shared
    assert len(list((tmp_path / "common").iterdir())) == (1 if is_shared else 2)


def test_a_warm_start_in_the_folder_is_read_and_not_made_again(tmp_path):
    run, sink = small("train.warm_start_steps=2"), MemorySink()
    plain = plain_workload(run, run.data.load())
    made = warm_up(run, plain, file=tmp_path / "warm", cache=None, sink=sink)
    signs = len(sink.events)
    read = warm_up(run, plain, file=tmp_path / "warm", cache=None, sink=sink)
    assert signs == len(sink.events) == 1
    assert read.params.equal(made.params)
    assert (read.tokens, read.loss) == (made.tokens, made.loss)


def test_processes_that_share_a_folder_begin_with_the_bits_of_whoever_was_first(tmp_path, monkeypatch):
    run = small()
    plain = plain_workload(run, run.data.load())

    def warm(name):
        return warm_up(run, plain, file=tmp_path / name, cache=Cache(tmp_path / "common"), sink=MemorySink())

    first = warm("one")
    assert warm("two").params.same_bits(first.params)
    assert len(list((tmp_path / "common").iterdir())) == 1, "and nothing lies about"

    (kept,) = (tmp_path / "common").iterdir()
    contents = kept.read_bytes()
    kept.unlink()

    def made_while_another_is_done(*arguments):
        kept.write_bytes(contents)
        made = warm_start(*arguments)
        return replace(made, params=made.params * 2)  # a GPU would make others, too

    monkeypatch.setattr("atoll.engines.warm_start.warm_start", made_while_another_is_done)
    assert warm("three").params.same_bits(first.params)
    assert [path.name for path in (tmp_path / "common").iterdir()] == [kept.name]


def test_a_warm_start_on_other_data_is_not_taken_from_the_common_folder(tmp_path):
    run, other = small(), small("data.limit_bytes=30000")
    common = Cache(tmp_path / "common")
    plain = {each: plain_workload(each, each.data.load()) for each in (run, other)}
    mine = warm_up(run, plain[run], file=tmp_path / "one", cache=common, sink=MemorySink())
    theirs = warm_up(run, plain[other], file=tmp_path / "two", cache=Cache(tmp_path / "common"), sink=MemorySink())
    assert not theirs.params.same_bits(mine.params), "the same settings, but the text has changed"
    assert len(list((tmp_path / "common").iterdir())) == 2
