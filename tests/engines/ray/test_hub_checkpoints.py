"""A hub's checkpoints, and what is said of them."""

from itertools import count
from threading import Condition

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import CheckpointError
from atoll.core.events import Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_checkpoints import Saver
from atoll.engines.ray.hub_load import Load
from atoll.engines.ray.hub_state import Desk
from atoll.engines.wall_clock import WallClock
from atoll.optim.sgd import SGD
from atoll.telemetry.sinks import Remembered


class Log(Remembered):
    """In memory; its bytes are events."""

    def position(self):
        return len(self.events)


class Keeper:
    """Keeps checkpoints, and what the log had said when each was written."""

    def __init__(self, log, fails):
        self.log, self.fails, self.said_before, self.kept = log, fails, [], []

    def save(self, round, parts, metadata):
        self.said_before = list(self.log.events)
        if self.fails:
            raise CheckpointError("the disk is full")
        self.kept.append((round, metadata))

    def name(self, round):
        return f"{round:08d}"

    def say(self, text):
        pass


def saver(fails=False):
    log, seconds = Log(), count()
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0))
    desk = Desk(
        algorithm=algorithm,
        plan=algorithm.plan,
        params=Tree.of({"w": torch.ones(3)}),
        examples=[100],
        updates=8,
        draw=lambda round: 0.5,
        islands=1,
        places=1,
        evaluate_every=10,
        epoch=1,
        sink=log,
    )
    keeper, load = Keeper(log, fails), Load(now=lambda: float(next(seconds)))
    one = Saver(keeper=keeper, session="a", desk=desk, clock=WallClock(), log=log, sink=log, load=load, changed=Condition())
    return one, desk, keeper, log, load


@pytest.mark.parametrize(("fails", "kind"), [(False, Saved), (True, SaveFailed)])
def test_nothing_is_said_of_a_checkpoint_before_it_is_there_or_has_failed(fails, kind):
    one, desk, keeper, log, _ = saver(fails)
    desk.come({0: 0}, 0.0)
    before = list(log.events)
    assert one.save() is not fails
    assert keeper.said_before == before
    assert [type(event) for event in log.events[len(before) :]] == [kind]


def test_a_checkpoint_goes_with_the_log_as_it_was_when_it_was_begun():
    one, desk, keeper, log, _ = saver()
    desk.come({0: 0}, 0.0)
    one.save()
    assert keeper.kept[0][1]["events_bytes"] == len(log.events) - 1
    one.save()
    assert len(keeper.kept) == 1, "nothing has happened since"


def test_while_a_checkpoint_is_gathered_the_hub_is_busy():
    one, _, _, _, load = saver()
    one.save_at_the_desk()
    report = load.report(0.0)
    assert (report.busy, report.pushes) == (pytest.approx(1 / 3), 0), "one of three ticks of its clock"


def test_what_was_stopped_saves_nothing():
    one, desk, keeper, _, _ = saver()
    desk.come({0: 0}, 0.0)
    one.stop()
    assert not one.save()
    assert keeper.kept == []
