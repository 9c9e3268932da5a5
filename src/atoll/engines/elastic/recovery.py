"""Where an island comes by the state of the run: from another island, from a checkpoint, or, once only, from the beginning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.core.errors import CheckpointError, ExchangeFailed
from atoll.core.events import RoundFinished
from atoll.core.state_packing import Packed, unpack
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.elastic.commit_log import Minutes
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.eviction import call
from atoll.engines.elastic.leader_log import Desk
from atoll.engines.elastic.membership import CutOff, Member
from atoll.engines.elastic.registry import SILENT_S, Roll
from atoll.engines.elastic.snapshot_server import fetch
from atoll.engines.elastic.spec import check_alike
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.elastic.wait_log import reminding
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import read_events

_LOOK_S, _ASK_S = 0.2, 1.0
_ALONE_S = SILENT_S
"""So long nobody has signed, before an island takes itself for the last one."""
_SILENT_S = 6.0
"""So long nobody has answered who has the state, before the others need not wait for whoever asks."""
_FETCH_LIMIT_S = 60.0
"""Without a byte."""


class NoState(CheckpointError):
    """There is neither an island with the state nor a checkpoint; though an island may have it that does not answer just now."""


class _Other(NamedTuple):
    """Another island that has a state, as it says itself.

    Attributes:
        generation: which.
        exchanging: whether a newer one may follow at any moment.
        vouched: whether it has committed it itself, or else was given it.
        name: of the island.
        pier: where it is asked.
    """

    generation: Generation
    exchanging: bool
    vouched: bool
    name: str
    pier: str


class Sources:
    """All that one island can be given the state by.

    Args:
        name: of the island.
        roll: says who else is there.
        folder: of the run, where this machine has it.
        desk: keeps its checkpoints.
        minutes: what others remember of the last commits goes here.
        origin: what this island has: the same as whoever gives it the state.
        say: takes what a person may want to know.
        limit_s: how long nobody is found who has the state, on a roll that cannot be read, before this island ends.
    """

    def __init__(
        self,
        name: str,
        roll: Roll,
        folder: RunFolder | None,
        desk: Desk | None,
        minutes: Minutes,
        origin: Mapping[str, str | None],
        say: Callable[[str], object],
        limit_s: float = 1200.0,
    ) -> None:
        self._name, self._roll, self._folder, self._desk, self._say = name, roll, folder, desk, say
        self._minutes, self._origin, self._limit_s = minutes, origin, limit_s
        self._heard_s = math.inf
        """When somebody was last found who has the state, or the roll could last be read."""
        self.checkpoint: Checkpoint | None = None
        """The last one that was restored."""

    def first(self, engine: ElasticEngine, quiet_s: float = math.inf) -> str:
        """What a process that was just started begins with, in words.

        Args:
            engine: of this island.
            quiet_s: since when nobody on the roll has a state, as far as it could be read; by default that is seen from now on.

        Raises:
            CutOff: there is nobody any more to be given it by.
            NoState: there is none, or none that can be read.
        """
        with reminding(self._say, "looking for an island that has the run's state, or fetching it"):
            try:
                # They are only counted: one that is damaged harms nobody as long as another island has the state.
                if self._desk is None or not self._desk.checkpoints.rounds():
                    return self._fetched(engine, at_least=NOTHING) or self._fresh(engine)
                return self._found(engine, at_least=NOTHING, quiet_s=quiet_s) or self._fresh(engine)
            except CheckpointError as error:
                raise NoState(str(error)) from error

    def catch_up(self, engine: ElasticEngine, ahead: Generation, failed: Callable[[], object] = bool) -> None:
        """The others hold what this island does not.

        Args:
            engine: of this island.
            ahead: what they hold.
            failed: called when somebody has it and it could not be fetched, or nobody has answered for long who has it; perhaps
                more than once.

        Raises:
            CutOff: there is nobody any more to be given it by.
        """
        healed = self._newer(engine, max(ahead, engine.generation), failed)
        if healed:
            self._say(f"{self._name} goes on with {healed}")
        else:
            self._say(f"{self._name} is alone, and goes on with what it has: round {engine.generation.round}")
            engine.begin_anew()

    def confirm(self, engine: ElasticEngine) -> None:
        """Those who gave this island its state are gone. Where they went on, they left a checkpoint; else this is the newest."""
        with reminding(self._say, "looking whether anybody has gone on from the state that this island was given"):
            found = self._newer(engine, Generation(engine.generation.round, engine.generation.epoch + 1))
        self._say(f"{self._name} finds nobody who gave it its state, and goes on with {found or 'it'}")
        if not found:
            engine.begin_anew()

    def _newer(self, engine: ElasticEngine, at_least: Generation, failed: Callable[[], object] = bool) -> str:
        """A newer state than the one that this island holds, which is not lost over a checkpoint that cannot be read."""
        try:
            return self._found(engine, at_least, failed)
        except CheckpointError as error:
            self._say(f"{error} {self._name} does without it, since it holds round {engine.generation.round} itself")
            return ""

    def _found(
        self, engine: ElasticEngine, at_least: Generation, failed: Callable[[], object] = bool, quiet_s: float = math.inf
    ) -> str:
        """A state that another island has, or else a checkpoint; nothing if there is nothing newer than what this island holds.

        A roll that was just started is empty, and whoever reads it first is not the last one alive: the others have not signed
        yet. So it waits until nobody has signed for long that it has the state, on a roll that could be read all the while.
        """
        self._heard_s = answered_s = time.monotonic()
        since_s = min(quiet_s, answered_s)
        while True:
            self._roll.look()
            if found := self._fetched(engine, at_least, failed):
                return found
            answers = self._somebody_answers(engine, at_least)
            answered_s = time.monotonic() if answers else answered_s
            if time.monotonic() - answered_s > _SILENT_S:
                failed()
            has_it = answers or self._somebody_signed(at_least)
            if has_it:
                since_s = time.monotonic()
            elif time.monotonic() - max(since_s, self._roll.reached_s) >= _ALONE_S:
                found = self._newer_checkpoint(engine)
                # Of several that came back at once one may just have restored that checkpoint: then it has the state.
                if found or not (self._somebody_answers(engine, at_least) or self._somebody_signed(at_least)):
                    return found
            self._wait(has_it)

    def _wait(self, has_it: bool) -> None:
        """A moment.

        Args:
            has_it: whether somebody is known who has the state.

        Raises:
            CutOff: it was not so for too long, and all that time the roll could not be read.
        """
        now_s = time.monotonic()
        if has_it or self._roll.reached_s <= now_s:
            self._heard_s = now_s
        elif now_s - self._heard_s > self._limit_s:
            raise CutOff(
                f"{self._name} waited {self._limit_s:.0f} s for an island that has the run's state, and nobody answers at the "
                f"run's address. What was saved stands. Is the run over, or its first machine gone?"
            )
        time.sleep(_LOOK_S)

    # ---------------------------------------------------------------------------------------------------------- other islands

    def _others(self, engine: ElasticEngine) -> list[_Other]:
        """Who else has a state, the newest first, and of one state those who have committed it."""
        signed = {name: entry["pier"] for name, entry in self._roll.alive().items()}
        piers = {name: pier for name, pier in {**engine.fellows, **signed}.items() if name != self._name}
        said = call([Member(name, pier, False, 0.0) for name, pier in piers.items()], _ASK_S)
        have = {name: one for name, one in said.items() if one["generation"] >= 0}
        states = [
            _Other(Generation.of(one["generation"]), one["exchanging"], one["vouched"], name, piers[name])
            for name, one in have.items()
        ]
        return sorted(states, reverse=True)

    def _somebody_answers(self, engine: ElasticEngine, at_least: Generation) -> bool:
        """Whether anybody else says that it has such a state, or may have it at any moment."""
        return any(one.generation >= at_least or one.exchanging for one in self._others(engine))

    def _somebody_signed(self, at_least: Generation) -> bool:
        """Or has signed so: whoever does not answer at once may be far away."""
        signed = [entry for name, entry in self._roll.alive().items() if name != self._name and entry["generation"] >= 0]
        return any(Generation.of(entry["generation"]) >= at_least or entry["exchanging"] for entry in signed)

    def _fetched(self, engine: ElasticEngine, at_least: Generation, failed: Callable[[], object] = bool) -> str:
        """The newest state that another island has committed; nothing if there is none, or if a newer one is about to follow."""
        others = self._others(engine)
        if others and others[0].exchanging and others[0].generation <= at_least:
            return ""
        committed = {one.generation for one in others if one.vouched}
        for one in others:
            if one.generation < at_least:
                break
            if not one.vouched and one.generation in committed:
                continue  # nobody is given a state by one that was given it itself, as long as one answers that has committed it
            if found := self._taken(engine, one, at_least):
                return found
            failed()
        return ""

    def _taken(self, engine: ElasticEngine, other: _Other, at_least: Generation) -> str:
        """The state that this one has; nothing if it cannot be fetched, or is older."""
        try:
            cargo = fetch(other.pier, _FETCH_LIMIT_S)
            if cargo is None or Generation(*cargo.header["plain"]["generation"]) < at_least:
                return ""
            check_alike(self._origin, cargo.header["origin"], other.name)
            shared = unpack(Packed(cargo.header["structure"], dict(cargo.tensors)), engine.shared())
            plain = cargo.header["plain"]
            engine.restore({**plain, "wall_time_s": plain["wall_time_s"] + cargo.age_s}, shared, other.name, cargo.nbytes)
        except ExchangeFailed as error:
            self._say(str(error))
            return ""
        self._minutes.from_parts(cargo.header["minutes"])
        if self._desk is not None:
            self._desk.brought_up_to_date(engine)
        given = "" if other.vouched else ", which was given it itself: nobody answers who has committed it"
        return f"round {engine.generation.round}, fetched from {other.name} ({cargo.nbytes} bytes){given}"

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def _restored(self, engine: ElasticEngine) -> str:
        """The newest checkpoint, where there is one."""
        checkpoint = self._desk.checkpoints.newest() if self._desk is not None else None
        if checkpoint is None or self._desk is None:
            return ""
        self._desk.restored(checkpoint, engine)
        self.checkpoint = checkpoint
        return f"round {checkpoint.round}, from its checkpoint"

    def _newer_checkpoint(self, engine: ElasticEngine) -> str:
        """Of a run that others went on with and have all died since."""
        checkpoint = self._desk.checkpoints.newest() if self._desk is not None else None
        held = max([engine.generation, *(one.generation for one in self._others(engine))])
        if checkpoint is None or Generation(*checkpoint.metadata["engine"]["generation"]) <= held:
            return ""
        return self._restored(engine)

    # ----------------------------------------------------------------------------------------------------------- the beginning

    def _fresh(self, engine: ElasticEngine) -> str:
        """A run that has not begun."""
        if self._folder is None:
            self._heard_s = time.monotonic()
            while not (found := self._fetched(engine, at_least=NOTHING)):
                self._wait(self._somebody_answers(engine, at_least=NOTHING))
                self._roll.look()
            return found
        done = self._folder.events.exists() and any(True for _ in read_events(self._folder.events, [RoundFinished]))
        if done:
            raise NoState(
                f"{self._folder.path} has a run that was begun, and there is neither an island with its state nor a checkpoint. "
                f"It will not start from random weights again by itself: start a new run, or bring a checkpoint back."
            )
        return "the run's first weights"
