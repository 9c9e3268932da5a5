"""The desk of one island, driven by hand: what is written, judged and saved, whoever was frozen or killed over it."""

from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.engines.books import Books
from atoll.engines.elastic.generation import NOTHING, Generation
from atoll.events import Attended, RoundFinished, RunFinished
from atoll.runs.checkpoint import Checkpoints
from atoll.runs.elastic import ending
from atoll.runs.elastic.desk import Desk
from atoll.runs.elastic.minutes import Minute, Minutes
from atoll.runs.elastic.place import Elastic
from atoll.runs.elastic.sources import Sources
from atoll.runs.elastic.start import create_elastic
from atoll.runs.folder import RunFolder
from atoll.runs.overrides import override
from atoll.runs.place import placed
from atoll.runs.warm import Cache, WarmStart, load_data
from atoll.runs.workloads import plain_workload
from atoll.telemetry import read_events
from atoll.tree import Tree

SETTINGS = (
    "model.hidden=4",
    "data.examples=64",
    "data.dimensions=4",
    "data.clusters_per_class=1",
    "data.eval_examples=16",
    "train.warm_start_steps=0",
    "keep.evaluate_every=100",
    "keep.save_every=100",
    "keep.checkpoints=2",
)
ORIGIN = {"run": "r", "data": "d"}


class Engine:
    """Holds what it is told to. A round is ten steps."""

    name, over = "a", False
    replica, clock = SimpleNamespace(buffers=dict), SimpleNamespace(now_s=lambda: 1.0)

    def __init__(self):
        self.generation, self.books = Generation(0, 1), Books(1, real=True)
        self.params = Tree.of({"w": torch.zeros(2)})

    @property
    def steps_taken(self):
        return self.generation.round * 10

    def reach(self, number, epoch):
        self.generation = Generation(number, epoch)
        self.books.totals.round, self.books.totals.steps = number, self.steps_taken
        self.books.totals.metrics = {"loss": 1.0}
        self.books.ledgers[0].present_s = 1.0

    def shared(self):
        return {"params": self.params}

    def plain(self):
        return {"generation": list(self.generation)}

    def restore(self, plain, shared):
        self.reach(*plain["generation"])

    def begin_anew(self):
        self.generation = self.generation._replace(epoch=self.generation.epoch + 1000)


class Evaluator:
    """Finds every weight equally good, unless it dies of it."""

    module, dies = None, False

    def __call__(self, params, buffers):
        if self.dies:
            raise Died
        return {"loss": 1.0}

    def load(self, params, buffers):
        pass


class Died(BaseException):
    """The island is gone."""


class Island:
    """A desk and an engine that commit what they are told to."""

    def __init__(self, folder):
        run = placed(override(recipes.ALL["toy-sync"](), SETTINGS), 1)
        if not folder.exists():
            create_elastic(run, Elastic(processes=1), folder, ["test"])
        run, cache = run.resolved, Cache()
        self.engine, self.minutes, self.evaluator, self.said = Engine(), Minutes(), Evaluator(), []
        self.folder, plain, warm = (
            RunFolder(folder),
            plain_workload(run, load_data(run, cache)),
            WarmStart(self.engine.params, 0, 1.0),
        )
        self.desk = Desk(run, self.folder, plain, warm, self.evaluator, ORIGIN, cache, self.minutes, self.said.append)

    def commit(self, number, epoch, *, writer="a"):
        self.engine.reach(number, epoch)
        self.minutes.add(Minute(self.engine.generation, False, [finished(number), attended(number, epoch)]), NOTHING)
        self.desk.committed(self.engine, SimpleNamespace(opening=False), writer)

    def events(self, kind):
        return [event for event in read_events(self.folder.events) if isinstance(event, kind)]

    @property
    def commits(self):
        return [(event.round, event.epoch) for event in self.events(Attended)]


@pytest.fixture
def island(tmp_path):
    made = []

    def make():
        made.append(Island(tmp_path / "run"))
        return made[-1]

    yield make
    for one in made:
        one.desk.close()


def attended(number, epoch):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=epoch, virtual_time_s=None, wall_time_s=1.0, **who)


def finished(number):
    figures = {"islands": 1, "steps": number * 10, "tokens": 1, "local_updates": 1, "loss": 1.0, "sent_bytes_per_island": 0.0}
    return RoundFinished(round=number, virtual_time_s=None, wall_time_s=1.0, **figures)


def test_an_island_that_was_frozen_at_the_end_finishes_the_run_if_whoever_took_the_log_meanwhile_has_died(island):
    frozen, other = island(), island()
    frozen.commit(1, 1)
    other.commit(1, 1)
    other.desk.close()  # before it has finished the run
    frozen.desk.finish(frozen.engine, None)
    assert frozen.desk.is_finished
    assert frozen.commits == [(1, 1)]
    assert len(frozen.events(RunFinished)) == 1


def test_when_the_log_is_taken_over_while_the_run_is_finished_that_is_tried_again(island, monkeypatch):
    one, others = island(), []
    one.commit(1, 1)
    last = one.engine.books.finished

    def frozen(*given):
        if not others:
            others.append(island())
            others[0].commit(1, 1)
        return last(*given)

    one.engine.books.finished = frozen
    monkeypatch.setattr(ending, "_AGAIN_S", 0.0)
    ending.finish(one.engine, one.desk, None, 60.0, one.said.append)
    assert one.desk.is_finished
    assert [text for text in one.said if text.startswith("not finished, and tried again: another island")]


class Fetching(Sources):
    """Of an island whom another gives the state."""

    def _fetched(self, engine, at_least, failed=bool):
        return "round 6, fetched from b"


def test_a_checkpoint_that_cannot_be_read_harms_nobody_as_long_as_another_island_has_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(5, {})
    (tmp_path / "00000005" / "meta.json").unlink()
    roll = SimpleNamespace(look=lambda: None)
    sources = Fetching("a", roll, None, SimpleNamespace(checkpoints=checkpoints), None, {}, lambda text: None)
    assert sources.first(SimpleNamespace()) == "round 6, fetched from b"
