"""One island of an elastic run, as a process: it finds the run by its address, is given the state, and takes part until the end."""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.engines.dist.clock import Limit
from atoll.engines.elastic.engine import Commit, ElasticEngine
from atoll.engines.elastic.generation import Generation
from atoll.engines.elastic.meetings import Finds, Meetings
from atoll.engines.elastic.membership import Membership
from atoll.engines.elastic.pier import Cargo, Pier, ask, fetch
from atoll.engines.elastic.reminding import reminding
from atoll.engines.elastic.roll import Board, Roll
from atoll.engines.evaluator import Evaluator
from atoll.engines.masters import initial
from atoll.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.events import RoundFinished
from atoll.protocols import Algorithm
from atoll.runs.build import loss_of, replica_of
from atoll.runs.checkpoint import Checkpoint
from atoll.runs.elastic.desk import Desk
from atoll.runs.elastic.place import Invitation
from atoll.runs.execute import digest_without_size
from atoll.runs.folder import RunFolder
from atoll.runs.pack import Packed, pack, unpack
from atoll.runs.run import device_of, dtype_of
from atoll.runs.warm import Cache, WarmStart, load_data, warm_up
from atoll.runs.workloads import fingerprint, island_workload, needs_weights, plain_workload
from atoll.telemetry.fanout import Silent
from atoll.telemetry.jsonl import read_events

if TYPE_CHECKING:
    from atoll.testing.chaos import Spoiler

_LOOK_S, _ASK_S = 0.2, 1.0
_ANY = Generation(-1, 0)
_FETCH_LIMIT_S = 60.0
"""Without a byte."""


def take_part(
    address: str, name: str, *, folder: Path | None, say: Callable[[str], object], start_limit_s: float, chaos: Path | None = None
) -> None:
    """Be an island of the run at this address, until it is over.

    Args:
        address: of the run.
        name: of the island, unlike all others'.
        folder: of the run, where this machine has it.
        say: takes what a person may want to know.
        start_limit_s: how long the run is waited for.
        chaos: a script of faults, some of which are this island's own.
    """
    invitation = invited(address, say, start_limit_s)
    host = _host_towards(address)
    torch.set_num_threads(invitation.run.cluster.threads_per_island)
    say(f"{name} on {platform.node()} ({host}), process {os.getpid()}, {torch.get_num_threads()} thread(s)")
    with ExitStack() as stack:
        island = Island(invitation, address, host, name, folder, say, chaos)
        stack.push(lambda kind, error, trace: island.close(wait=kind is None))
        island.carry_out()


def invited(address: str, say: Callable[[str], object], limit_s: float) -> Invitation:
    """What the run at this address is."""
    board, deadline_s = Board(address), time.monotonic() + limit_s
    with reminding(say, f"waiting for the run at {address}"):
        while True:
            try:
                text = board.order()
                if text is not None:
                    return Invitation.from_text(text)
            except ExchangeFailed:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_LOOK_S)


def _host_towards(address: str) -> str:
    """The address by which a machine that is reached there reaches this one."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        found: str = connection.getsockname()[0]
        return found


class Island:
    """One island.

    Args:
        invitation: what the run is.
        address: of the run.
        host: the address of this machine, as others reach it.
        name: of the island.
        folder: of the run, where this machine has it.
        say: takes what a person may want to know.
        chaos: a script of faults, some of which are this island's own.
    """

    def __init__(
        self,
        invitation: Invitation,
        address: str,
        host: str,
        name: str,
        folder: Path | None,
        say: Callable[[str], object],
        chaos: Path | None = None,
    ) -> None:
        self._run, self._place, self._name, self._say = invitation.run.resolved, invitation.place, name, say
        self._folder = RunFolder(folder) if folder is not None else None
        self._doing = "coming"
        self._engine: ElasticEngine | None = None
        self._checkpoint: Checkpoint | None = None
        self._published: Generation | None = None
        """What others can fetch here: they must not be told of a state before it is there."""
        self._pier = Pier(host, about=lambda: {"name": name, **self._entry()})
        self._roll = Roll(address, name, self._entry)
        limit_s = max(self._place.limit_s * 2, 60.0)
        self._membership = Membership(name, host, invitation.lighthouse, limit_s=limit_s, say=say)
        self._desk: Desk | None = None
        self._spoiler = self._spoiler_of(chaos) if chaos is not None else None
        self._set_up()

    def _spoiler_of(self, chaos: Path) -> Spoiler:
        from atoll.testing.chaos import Script, Spoiler

        def now() -> int:
            return self._engine.generation.round if self._engine is not None else -1

        return Spoiler(Script.read(chaos).spoils, self._name, now, self._say)

    def _entry(self) -> dict[str, Any]:
        generation = self._published.number if self._published is not None and self._doing != "coming" else -1
        exchanging = self._engine is not None and self._engine.exchanging
        return {"pier": self._pier.address, "generation": generation, "doing": self._doing, "exchanging": exchanging}

    def _set_up(self) -> None:
        run, cache = self._run, Cache()
        data = load_data(run, cache)
        plain = plain_workload(run, data)
        if self._folder is None and needs_weights(run):
            raise ConfigError(
                f"{self._name} joins from elsewhere, and this run's data are dealt out by what the weights of its warm start make "
                f"of them, which are in the run's folder. Use data.partition=random, or start all islands where the folder is."
            )
        if self._folder is not None:
            warm = warm_up(run, plain, file=self._folder.warm_start, cache=None, sink=Silent())
        else:  # whoever joins is given the weights
            warm = WarmStart(initial(plain, device_of(run), dtype_of(run)), 0, math.nan)
        workload = island_workload(run, data, warm.params)
        origin = {"run": digest_without_size(run), "data": fingerprint(workload)}
        device, loss, number = _device(run, self._name), loss_of(run, workload), _number(self._name)
        if self._folder is not None:
            evaluator = Evaluator(workload, device, dtype_of(run))
            self._desk = Desk(run, self._folder, plain, warm, evaluator, origin, cache, self._say)
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        limit = Limit(None)
        finds: Finds = self._membership
        if self._spoiler is not None:
            algorithm, finds = self._spoiler.algorithm(algorithm), self._spoiler.membership(finds)
        self._engine = ElasticEngine(
            name=self._name,
            algorithm=algorithm,
            meetings=Meetings(finds, limit, self._say, patience_s=self._place.limit_s),
            params=warm.params.to(device),
            batches=workload.batches,
            make_replica=lambda: replica_of(run, workload, loss, number, device),
            islands=run.world.islands,
            steps=run.train.steps,
            most=self._place.refused_above,
            alive=lambda: len(self._roll.alive()),
            home=self._folder is not None,
            pier=self._pier.address,
            committed=self._committed,
            heal=self._heal,
            confirm=self._confirm,
            pause_s=(self._place.pace or 0.0) * run.world.step_time(number % run.world.islands, run.seed),
            busy=lambda: self._pier.busy,
        )

    # --------------------------------------------------------------------------------------------------------------- the run

    def carry_out(self) -> None:
        engine = self._engine
        assert engine is not None
        began = self._fetched(engine, at_least=_ANY) or self._restored(engine) or self._fresh(engine)
        self._say(f"{self._name} begins with {began}")
        self._publish(engine)
        self._membership.join()
        self._doing = "ready"  # not before it beats: whoever reads this takes it for one that will be waited for
        self._roll.look()
        if not engine.leases.out and not engine.over:
            self._gather(engine)
        self._doing = "training"
        engine.run()
        self._doing = "over"
        if self._desk is not None:
            self._desk.finish(engine, self._checkpoint)

    def _gather(self, engine: ElasticEngine) -> None:
        """Those who begin wait for all that were started."""
        planned, deadline_s = self._place.processes or self._run.world.islands, time.monotonic() + self._place.gather_s
        with reminding(self._say, f"waiting for {planned} islands to begin together"):
            while time.monotonic() < deadline_s:
                here = {name: entry for name, entry in self._roll.alive().items() if entry["doing"] != "coming"}
                ahead = any(entry["generation"] > engine.generation.number for entry in here.values())
                if len(here) >= planned or ahead:
                    # The lighthouse may not have heard the last of them beat yet: they are fellows from now on.
                    engine.expect({name: entry["pier"] for name, entry in here.items()})
                    return
                time.sleep(_LOOK_S / 4)
                self._roll.look()
        self._say(f"begins with those who are here: {sorted(self._roll.alive())}")

    def _committed(self, engine: ElasticEngine, commit: Commit) -> None:
        self._publish(engine)
        if not commit.opening:  # every island says what it holds, so that nobody has to trust the one who writes
            worked = self._name in commit.met.result.delivered(commit.met.names)
            work = "with work of its own" if worked else "without work of its own"
            generation = engine.generation
            self._say(f"committed round {generation.round} of epoch {generation.epoch} as {engine.digest}, {work}")
        if self._desk is not None:
            self._desk.committed(engine, commit)

    def _publish(self, engine: ElasticEngine) -> None:
        structure, tensors = pack(engine.shared())
        with self._pier.changing() as put:
            put(Cargo({"plain": engine.plain(), "structure": structure}, tensors))
            self._published = engine.generation

    def close(self, *, wait: bool) -> None:
        self._membership.leave()
        self._roll.close()
        self._pier.close()
        if self._desk is not None:
            self._desk.close()
        if self._engine is not None:
            self._engine.close(wait=wait)

    # ------------------------------------------------------------------------------------------------------ coming by the state

    def _heal(self, engine: ElasticEngine, ahead: Generation) -> None:
        """The others hold what this island does not. They do not wait while it is brought up to date."""
        self._membership.leave()
        self._doing = "healing"
        while True:
            self._roll.look()
            healed = self._fetched(engine, at_least=max(ahead, engine.generation)) or self._newer_checkpoint(engine)
            if healed:
                self._say(f"{self._name} goes on with {healed}")
                break
            if self._roll.reached and not self._others():
                self._say(f"{self._name} is alone, and goes on with what it has: round {engine.generation.round}")
                engine.begin_anew()
                break
            time.sleep(_LOOK_S)
        self._publish(engine)
        self._doing = "training"
        self._membership.join()

    def _confirm(self, engine: ElasticEngine) -> None:
        """Those who gave this island its state are gone. Where they went on, they left a checkpoint; else this is the newest."""
        newer = Generation(engine.generation.round, engine.generation.epoch + 1)
        self._roll.look()
        found = self._fetched(engine, at_least=newer) or self._newer_checkpoint(engine)
        self._say(f"{self._name} finds nobody who gave it its state, and goes on with {found or 'it'}")
        if not found:
            engine.begin_anew()
        self._publish(engine)

    def _others(self) -> list[tuple[Generation, bool, str, str]]:
        """Who else has a state, as they say themselves, the newest first: which, whether a newer one may follow at any moment, name
        and pier."""
        piers = {name: entry["pier"] for name, entry in self._roll.alive().items() if name != self._name}
        said = {name: ask(pier, _ASK_S) for name, pier in piers.items()}
        states = [
            (Generation.of(s["generation"]), s["exchanging"], n, piers[n]) for n, s in said.items() if s and s["generation"] >= 0
        ]
        return sorted(states, reverse=True)

    def _fetched(self, engine: ElasticEngine, at_least: Generation) -> str:
        """The newest state that another island has committed; nothing if there is none, or if a newer one is about to follow."""
        others = self._others()
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
            shared = unpack(Packed(cargo.header["structure"], dict(cargo.tensors)), engine.shared())
            plain = cargo.header["plain"]
            engine.restore({**plain, "wall_time_s": plain["wall_time_s"] + cargo.age_s}, shared)
            if self._desk is not None:
                self._desk.brought_up_to_date(engine)
            return f"round {engine.generation.round}, fetched from {name} ({cargo.nbytes} bytes)"
        return ""

    def _restored(self, engine: ElasticEngine) -> str:
        """The newest checkpoint, where there is one."""
        checkpoint = self._desk.checkpoints.newest() if self._desk is not None else None
        if checkpoint is None or self._desk is None:
            return ""
        self._desk.restored(checkpoint, engine)
        self._checkpoint = checkpoint
        return f"round {checkpoint.round}, from its checkpoint"

    def _newer_checkpoint(self, engine: ElasticEngine) -> str:
        """Of a run that others went on with and have all died since."""
        checkpoint = self._desk.checkpoints.newest() if self._desk is not None else None
        held = max([engine.generation, *(generation for generation, *_ in self._others())])
        if checkpoint is None or Generation(*checkpoint.metadata["engine"]["generation"]) <= held:
            return ""
        return self._restored(engine)

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
            raise CheckpointError(
                f"{self._folder.path} has a run that was begun, and there is neither an island with its state nor a checkpoint. "
                f"It will not start from random weights again by itself: start a new run, or bring a checkpoint back."
            )
        return "the run's first weights"


def _number(name: str) -> int:
    """Which of the planned islands this is, by the digits at the end of its name."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else 0


def _device(run: Any, name: str) -> str:
    device = device_of(run)
    if device != "cuda":
        return device
    number = _number(name) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return f"cuda:{number}"
