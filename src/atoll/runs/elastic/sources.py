"""Where an island comes by the state of the run: from another island, from a checkpoint, or, once only, from the beginning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.generation import Generation
from atoll.engines.elastic.membership import Member
from atoll.engines.elastic.pier import fetch
from atoll.engines.elastic.reminding import reminding
from atoll.engines.elastic.roll import SILENT_S, Roll
from atoll.engines.elastic.votes import call
from atoll.errors import CheckpointError, ExchangeFailed
from atoll.events import RoundFinished
from atoll.runs.checkpoint import Checkpoint
from atoll.runs.elastic.desk import Desk
from atoll.runs.elastic.minutes import Minutes
from atoll.runs.elastic.place import check_alike
from atoll.runs.folder import RunFolder
from atoll.runs.pack import Packed, unpack
from atoll.telemetry.jsonl import read_events

_LOOK_S, _ASK_S = 0.2, 1.0
_ALONE_S = SILENT_S
"""So long nobody has signed, before an island takes itself for the last one."""
_ANY = Generation(-1, 0)
_FETCH_LIMIT_S = 60.0
"""Without a byte."""


class NoState(CheckpointError):
    """There is neither an island with the state nor a checkpoint; though an island may have it that does not answer just now."""


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
    ) -> None:
        self._name, self._roll, self._folder, self._desk, self._say = name, roll, folder, desk, say
        self._minutes, self._origin = minutes, origin
        self.checkpoint: Checkpoint | None = None
        """The last one that was restored."""

    def first(self, engine: ElasticEngine, quiet_s: float = math.inf) -> str:
        """What a process that was just started begins with, in words.

        Args:
            engine: of this island.
            quiet_s: since when nobody on the roll has a state, as far as it could be read; by default that is seen from now on.
        """
        # They are only counted: one that is damaged harms nobody as long as another island has the state.
        if self._desk is None or not self._desk.checkpoints.rounds():
            return self._fetched(engine, at_least=_ANY) or self._fresh(engine)
        with reminding(self._say, "looking whether another island has the run's state, before a checkpoint is restored"):
            return self._found(engine, at_least=_ANY, quiet_s=quiet_s) or self._fresh(engine)

    def catch_up(self, engine: ElasticEngine, ahead: Generation, failed: Callable[[], object] = bool) -> None:
        """The others hold what this island does not.

        Args:
            engine: of this island.
            ahead: what they hold.
            failed: called when somebody has it and it could not be fetched; perhaps more than once.
        """
        healed = self._found(engine, max(ahead, engine.generation), failed)
        if healed:
            self._say(f"{self._name} goes on with {healed}")
        else:
            self._say(f"{self._name} is alone, and goes on with what it has: round {engine.generation.round}")
            engine.begin_anew()

    def confirm(self, engine: ElasticEngine) -> None:
        """Those who gave this island its state are gone. Where they went on, they left a checkpoint; else this is the newest."""
        found = self._found(engine, Generation(engine.generation.round, engine.generation.epoch + 1))
        self._say(f"{self._name} finds nobody who gave it its state, and goes on with {found or 'it'}")
        if not found:
            engine.begin_anew()

    def _found(
        self, engine: ElasticEngine, at_least: Generation, failed: Callable[[], object] = bool, quiet_s: float = math.inf
    ) -> str:
        """A state that another island has, or else a checkpoint; nothing if there is nothing newer than what this island holds.

        A roll that was just started is empty, and whoever reads it first is not the last one alive: the others have not signed
        yet. So it waits until nobody has signed for long that it has the state, on a roll that could be read all the while.
        """
        since_s = min(quiet_s, time.monotonic())
        while True:
            self._roll.look()
            if found := self._fetched(engine, at_least, failed):
                return found
            if self._somebody_has_it(engine, at_least):
                since_s = time.monotonic()
            elif time.monotonic() - max(since_s, self._roll.reached_s) >= _ALONE_S:
                found = self._newer_checkpoint(engine)
                # Of several that came back at once one may just have restored that checkpoint: then it has the state.
                if found or not self._somebody_has_it(engine, at_least):
                    return found
            time.sleep(_LOOK_S)

    # ---------------------------------------------------------------------------------------------------------- other islands

    def _others(self, engine: ElasticEngine) -> list[tuple[Generation, bool, str, str]]:
        """Who else has a state, as they say themselves, the newest first: which, whether a newer one may follow at any moment, name
        and pier."""
        signed = {name: entry["pier"] for name, entry in self._roll.alive().items()}
        piers = {name: pier for name, pier in {**engine.fellows, **signed}.items() if name != self._name}
        said = call([Member(name, pier, False, 0.0) for name, pier in piers.items()], _ASK_S)
        states = [(Generation.of(s["generation"]), s["exchanging"], n, piers[n]) for n, s in said.items() if s["generation"] >= 0]
        return sorted(states, reverse=True)

    def _somebody_has_it(self, engine: ElasticEngine, at_least: Generation) -> bool:
        """Whether anybody else says that it has such a state, or may have it at any moment; or has signed so, since whoever does
        not answer at once may be far away."""
        signed = [entry for name, entry in self._roll.alive().items() if name != self._name and entry["generation"] >= 0]
        states = [(Generation.of(entry["generation"]), bool(entry["exchanging"])) for entry in signed]
        states += [(generation, exchanging) for generation, exchanging, _, _ in self._others(engine)]
        return any(generation >= at_least or exchanging for generation, exchanging in states)

    def _fetched(self, engine: ElasticEngine, at_least: Generation, failed: Callable[[], object] = bool) -> str:
        """The newest state that another island has committed; nothing if there is none, or if a newer one is about to follow."""
        others = self._others(engine)
        if others and others[0][1] and others[0][0] <= at_least:
            return ""
        for generation, _, name, pier in others:
            if generation < at_least:
                break
            try:
                cargo = fetch(pier, _FETCH_LIMIT_S)
            except ExchangeFailed as error:
                self._say(str(error))
                continue
            if cargo is None or Generation(*cargo.header["plain"]["generation"]) < at_least:
                continue
            check_alike(self._origin, cargo.header["origin"], name)
            shared = unpack(Packed(cargo.header["structure"], dict(cargo.tensors)), engine.shared())
            plain = cargo.header["plain"]
            plain = {**plain, "wall_time_s": plain["wall_time_s"] + cargo.age_s}
            try:
                engine.restore(plain, shared, name, cargo.nbytes)
            except ExchangeFailed as error:
                self._say(str(error))
                continue
            self._minutes.from_parts(cargo.header["minutes"])
            if self._desk is not None:
                self._desk.brought_up_to_date(engine)
            return f"round {engine.generation.round}, fetched from {name} ({cargo.nbytes} bytes)"
        failed()
        return ""

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
        held = max([engine.generation, *(generation for generation, *_ in self._others(engine))])
        if checkpoint is None or Generation(*checkpoint.metadata["engine"]["generation"]) <= held:
            return ""
        return self._restored(engine)

    # ----------------------------------------------------------------------------------------------------------- the beginning

    def _fresh(self, engine: ElasticEngine) -> str:
        """A run that has not begun."""
        if self._folder is None:
            with reminding(self._say, "waiting for an island that has the run's state"):
                while not (found := self._fetched(engine, at_least=_ANY)):
                    time.sleep(_LOOK_S)
                    self._roll.look()
            return found
        done = self._folder.events.exists() and any(True for _ in read_events(self._folder.events, [RoundFinished]))
        if done:
            raise NoState(
                f"{self._folder.path} has a run that was begun, and there is neither an island with its state nor a checkpoint. "
                f"It will not start from random weights again by itself: start a new run, or bring a checkpoint back."
            )
        return "the run's first weights"
