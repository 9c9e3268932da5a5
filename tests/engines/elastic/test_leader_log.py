"""The desk of one island, driven by hand: what is written, judged and saved, whoever was frozen or killed over it."""

from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.events import Attended, Evaluated, RoundFinished, RunFinished, Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import RunAccounting
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic import leader_log as desks
from atoll.engines.elastic import shutdown
from atoll.engines.elastic.commit_log import Minute, Minutes
from atoll.engines.elastic.launch import create_elastic
from atoll.engines.elastic.leader_log import Desk
from atoll.engines.elastic.recovery import Sources
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.processes.spec import placed
from atoll.engines.warm_start import Cache, WarmStart, load_data
from atoll.runs.folder import RunFolder
from atoll.runs.workloads import plain_workload
from atoll.telemetry import read_events

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
        self.generation, self.accounting = Generation(0, 1), RunAccounting(1, real=True)
        self.params = Tree.of({"w": torch.zeros(2)})

    @property
    def steps_taken(self):
        return self.generation.round * 10

    def reach(self, number, epoch):
        self.generation = Generation(number, epoch)
        self.accounting.totals.round, self.accounting.totals.steps = number, self.steps_taken
        self.accounting.totals.metrics = {"loss": 1.0}
        self.accounting.ledgers[0].present_s = 1.0

    def shared(self):
        return {"params": self.params}

    def plain(self):
        return {"generation": list(self.generation)}

    def restore(self, plain, shared):
        self.reach(*plain["generation"])

    def begin_anew(self):
        self.generation = self.generation._replace(epoch=self.generation.epoch + 1000)


class Evaluator:
    """Finds all weights equally good."""

    module = None

    def __call__(self, params, buffers):
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
    last = one.engine.accounting.finished

    def frozen(*given):
        if not others:
            others.append(island())
            others[0].commit(1, 1)
        return last(*given)

    one.engine.accounting.finished = frozen
    monkeypatch.setattr(shutdown, "_AGAIN_S", 0.0)
    shutdown.finish(one.engine, one.desk, None, 60.0, one.said.append)
    assert one.desk.is_finished
    assert [text for text in one.said if text.startswith("not finished, and tried again: another island")]


def test_what_another_writes_while_the_log_is_taken_over_is_read_once_more_and_neither_cut_off_nor_written_twice(
    island, monkeypatch
):
    one, other, read = island(), island(), desks.agreed_part
    one.commit(1, 1)

    def reads(path, epochs):
        found = read(path, epochs)
        if len(one.commits) == 1:
            one.commit(2, 2)
        return found

    monkeypatch.setattr(desks, "agreed_part", reads)
    other.commit(2, 2)
    other.commit(3, 3)
    assert other.commits == [(1, 1), (2, 2), (3, 3)]
    assert not [text for text in other.said if text.startswith("not written")]


class Fetching(Sources):
    """Of an island whom another gives the state."""

    def __init__(self, desk):
        self._desk, self._say = desk, lambda text: None

    def _found(self, *given, **named):
        return "round 6, fetched from b"


def test_a_checkpoint_that_cannot_be_read_harms_nobody_as_long_as_another_island_has_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(5, {})
    (tmp_path / "00000005" / "meta.json").unlink()
    assert Fetching(SimpleNamespace(checkpoints=checkpoints)).first(SimpleNamespace()) == "round 6, fetched from b"


@pytest.mark.parametrize("dies", ["judge", "save"])
def test_whoever_takes_over_makes_up_for_what_the_last_one_died_over(island, dies):
    first, second = island(), island()
    for number in range(1, 10):
        first.commit(number, number)

    def die(*given):
        raise Died

    setattr(first.desk, f"_{dies}", die)
    with pytest.raises(Died):
        first.commit(10, 10)
    assert first.commits[-1] == (10, 10), "the log tells of the round in which it was due"
    for number in range(1, 13):
        second.commit(number, number, writer="a" if number > 10 else "dead")
    assert [event.round for event in second.events(Evaluated)] == ([11] if dies == "judge" else [10])
    assert [event.round for event in second.events(Saved)] == [11]


def test_what_could_not_be_saved_is_tried_again_long_before_the_next_is_due(island):
    one = island()
    one.folder.checkpoints.write_text("in the way")
    for number in range(1, 13):
        one.commit(number, number)
    one.folder.checkpoints.unlink()
    for number in range(13, 23):
        one.commit(number, number)
    assert [event.round for event in one.events(SaveFailed)] == [10, 11, 12]
    assert [event.round for event in one.events(Saved)] == [13, 20]


def commits(one, *generations, writer="a"):
    for number, epoch in generations:
        one.commit(number, epoch, writer=writer)


BEFORE = [(number, number) for number in range(1, 10)]
SAVED, ANEW = (10, 10), (10, 20)
"""The tenth round, of which a checkpoint was saved, and as others did it again."""


def test_a_checkpoint_of_a_commit_that_came_to_nothing_goes_when_a_better_one_stands(island):
    one, other = island(), island()
    commits(one, *BEFORE, SAVED)
    commits(other, *BEFORE, ANEW, writer="one")
    assert other.desk.checkpoints.rounds() == [10]
    commits(other, (11, 21))
    assert other.commits == [*BEFORE, ANEW, (11, 21)]
    assert other.desk.checkpoints.rounds() == [11]
    commits(other, (12, 22))
    assert other.desk.checkpoints.rounds() == [11], "and no more than one besides"


def test_one_that_is_ahead_of_what_counts_goes_too_and_one_of_the_same_round_is_replaced(island):
    one, other = island(), island()
    commits(one, *BEFORE, SAVED)
    one.engine.reach(24, 24)
    one.desk._save(one.engine, one.desk._log)
    assert one.desk.checkpoints.rounds() == [10, 24]
    commits(other, *BEFORE, writer="one")
    commits(other, ANEW)
    assert other.desk.checkpoints.rounds() == [10]
    assert other.desk.checkpoints.newest().metadata["engine"]["generation"] == [*ANEW]


def test_the_log_has_no_hole_where_all_go_on_from_a_checkpoint_that_it_tells_nothing_of(island):
    one, other, last = island(), island(), island()
    commits(one, *BEFORE, SAVED)
    commits(other, *BEFORE, writer="one")
    other.desk._save = lambda engine, log: None  # it dies first, and so do all
    commits(other, ANEW)
    assert other.commits == [*BEFORE, ANEW]
    last.desk.restored(last.desk.checkpoints.newest(), last.engine)
    commits(last, (11, 1021))
    assert last.commits == [*BEFORE, SAVED, (11, 1021)]
    assert [event.round for event in last.events(RoundFinished)] == [*range(1, 12)]


def test_an_island_that_was_frozen_while_it_saved_saves_nothing_when_others_went_on(island):
    frozen, other = island(), island()
    commits(frozen, *BEFORE)
    shared = frozen.engine.shared

    def freeze():
        commits(other, *BEFORE, SAVED, writer="frozen")
        commits(other, *((number, number) for number in range(11, 21)))
        return shared()

    frozen.engine.shared = freeze
    commits(frozen, SAVED)
    assert other.desk.checkpoints.rounds() == [11, 20]
    assert frozen.said[-1] == "round 10 is not saved: another island has taken the log over"
