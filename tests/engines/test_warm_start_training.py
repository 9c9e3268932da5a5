"""A warm start is training by one replica, and runs with the same inputs share it."""

from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.protocols import Work
from atoll.engines.training_setup import replica_of
from atoll.engines.warm_start_training import Cache, RunPreparation, train_warm_start
from atoll.runs.run_settings import candidates
from atoll.runs.workloads import single_shard_workload
from atoll.telemetry.sinks import MemorySink
from tests.samples import SMALL as TINY

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
    sink = MemorySink()
    run = small("optimizer=SGD(lr=Cosine(lr=0.1,warmup=2))", "train.warm_start_lr=0.05", "train.clip_norm=none")
    warm = train_warm_start(run, single_shard_workload(run, text), sink)
    assert [(event.done, event.total) for event in sink.events] == [(10, 20), (20, 20)]
    by_hand = replica_of(
        replace(run, optimizer=override(run, ["optimizer=SGD(lr=WSD(lr=0.05,steps=20,warmup=2,decay=0))"], candidates).optimizer),
        single_shard_workload(run, text),
        single_shard_workload(run, text).loss,
        island=-1,
    )
    by_hand.train(20, Work(shard=0, start=0, schedule=0, examples=1))
    assert warm.params.equal(by_hand.params())
    assert warm.tokens == 20 * 4 * 16


def test_a_warm_start_ignores_settings_of_a_rounds_start(text):
    plain, odd = small(), small("train.fresh_optimizer=true", "train.peak_first=true")
    one, two = (train_warm_start(run, single_shard_workload(run, text), MemorySink()) for run in (plain, odd))
    assert one.params.equal(two.params)
    assert one.loss == two.loss


@pytest.mark.parametrize(
    ("setting", "is_trained_again"),
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
def test_runs_share_a_warm_start_exactly_if_its_settings_agree(setting, is_trained_again, tmp_path):
    cache = Cache()
    first, second = (
        RunPreparation(run, cache=cache).warm_start(tmp_path / name, MemorySink())
        for name, run in (("first", small("train.warm_start_steps=2")), ("second", small("train.warm_start_steps=2", setting)))
    )
    assert (first is not second) == is_trained_again


@pytest.mark.parametrize(("given", "is_shared"), [(0.25, True), (0.125, False)])
def test_a_given_rate_equal_to_the_schedules_peak_shares_the_warm_start(given, is_shared, tmp_path):
    """Whether it is given or the schedule's peak: runs at several rates have one warm start in common if they name its rate."""
    cache = Cache(tmp_path / "common")
    usual = small("train.warm_start_steps=2", "optimizer.lr.lr=0.25", "train.warm_start_lr=none")
    other = small("train.warm_start_steps=2", "optimizer.lr.lr=0.5", f"train.warm_start_lr={given}")
    first, second = (
        RunPreparation(run, cache=cache).warm_start(tmp_path / name, MemorySink())
        for name, run in (("first", usual), ("second", other))
    )
    assert (first is second) == is_shared
    assert len(list((tmp_path / "common").iterdir())) == (1 if is_shared else 2)


def test_a_warm_start_in_the_folder_is_read_and_not_trained_again(tmp_path):
    run, sink = small("train.warm_start_steps=2"), MemorySink()
    made = RunPreparation(run).warm_start(tmp_path / "warm", sink)
    signs = len(sink.events)
    read = RunPreparation(run).warm_start(tmp_path / "warm", sink)
    assert signs == len(sink.events) == 1
    assert read.params.equal(made.params)
    assert (read.tokens, read.loss) == (made.tokens, made.loss)


def test_processes_that_share_a_folder_use_the_first_warm_start_bit_for_bit(tmp_path, monkeypatch):
    run = small()

    def warm(name):
        return RunPreparation(run, cache=Cache(tmp_path / "common")).warm_start(tmp_path / name, MemorySink())

    first = warm("one")
    assert warm("two").params.same_bits(first.params)
    assert len(list((tmp_path / "common").iterdir())) == 1, "no temporary file is left"

    (kept,) = (tmp_path / "common").iterdir()
    contents = kept.read_bytes()
    kept.unlink()

    def train_while_another_process_writes(*arguments):
        kept.write_bytes(contents)
        made = train_warm_start(*arguments)
        return replace(made, params=made.params * 2)  # a GPU would make others, too

    monkeypatch.setattr("atoll.engines.warm_start_training.train_warm_start", train_while_another_process_writes)
    assert warm("three").params.same_bits(first.params)
    assert [path.name for path in (tmp_path / "common").iterdir()] == [kept.name]


def test_a_warm_start_on_other_data_is_not_taken_from_the_common_folder(tmp_path, monkeypatch):
    run, other = small(), small("data.limit_bytes=30000")
    mine = RunPreparation(run, cache=Cache(tmp_path / "common")).warm_start(tmp_path / "one", MemorySink())
    monkeypatch.setattr("atoll.engines.warm_start_training.load_data", lambda run, cache, log: other.data.load())
    theirs = RunPreparation(run, cache=Cache(tmp_path / "common")).warm_start(tmp_path / "two", MemorySink())
    assert not theirs.params.same_bits(mine.params), "the same settings, but the text has changed"
    assert len(list((tmp_path / "common").iterdir())) == 2
