"""The end of a run: nobody who has the last state goes before it is written, since whoever writes it may die."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core.errors import CheckpointError
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.leader_log import Desk
from atoll.engines.elastic.registry import Roll
from atoll.engines.elastic.snapshot_server import ask
from atoll.engines.elastic.wait_log import reminding

FINISHED = "finished"
"""What an island signs the roll with that knows that the run is."""
_LOOK_S = 0.2
_SILENT_S = 6.0
"""Whoever has not answered for so long does not finish the run, and a roll that has not is gone with it."""
_AGAIN_S = 2.0
"""Between two attempts to write."""


def stay(name: str, engine: ElasticEngine, desk: Desk, say: Callable[[str], object]) -> None:
    """An island that has the folder stays until the one who writes has finished the run, or has died."""
    if desk.writer is None and not desk.writes:
        _look_for_whoever_writes(engine, desk)
    if desk.writer is None or desk.writer not in engine.fellows:
        return
    say(f"{name} stays until {desk.writer} has finished the run")
    heard_s = time.monotonic()
    with reminding(say, f"waiting for {desk.writer} to finish the run"):
        while not desk.is_finished and time.monotonic() - heard_s < _SILENT_S:
            said = ask(engine.fellows[desk.writer], _SILENT_S)
            if said is not None and said["name"] == desk.writer:
                heard_s = time.monotonic()
            time.sleep(_LOOK_S)


def _look_for_whoever_writes(engine: ElasticEngine, desk: Desk) -> None:
    """An island that was given the last state does not know who writes of it: another, if others are there, who gets a start."""
    deadline_s = time.monotonic() + _SILENT_S
    while not desk.is_finished and time.monotonic() < deadline_s and _another_can_write(engine):
        time.sleep(_LOOK_S)


def _another_can_write(engine: ElasticEngine) -> bool:
    """Whether another island answers that has the folder."""
    said = [(name, ask(pier, 1.0)) for name, pier in engine.fellows.items()]
    return any(one is not None and one["name"] == name and one["home"] for name, one in said)


def hand_over(roll: Roll, limit_s: float, say: Callable[[str], object]) -> None:
    """An island that does not have the folder stays too: whoever has it may die, come back, and fetch the last state."""
    now_s = heard_s = time.monotonic()
    deadline_s = now_s + limit_s
    with reminding(say, "waiting until an island that has the run's folder has finished it"):
        while now_s < min(deadline_s, heard_s + _SILENT_S):
            roll.look()
            if any(entry["doing"] == FINISHED for entry in roll.alive().values()):
                return
            now_s = time.monotonic()
            heard_s = now_s if roll.reached_s <= now_s else heard_s  # whoever started the run ends its roll with it
            time.sleep(_LOOK_S)


def finish(engine: ElasticEngine, desk: Desk, checkpoint: Checkpoint | None, limit_s: float, say: Callable[[str], object]) -> None:
    """Leave what is to be left of the run. A disk that is full is waited for.

    Args:
        engine: with the last state.
        desk: that writes.
        checkpoint: that this island went on from, if any.
        limit_s: how long it is tried.
        say: takes what a person may want to know.

    Raises:
        CheckpointError: it could not be written.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with reminding(say, "finishing the run, or waiting for another island that does"):
                desk.finish(engine, checkpoint)
        except CheckpointError as error:
            if time.monotonic() > deadline_s:
                raise
            say(f"not finished, and tried again: {error}")
            time.sleep(_AGAIN_S)
        else:
            return
