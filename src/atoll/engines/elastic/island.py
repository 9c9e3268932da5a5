"""One island of an elastic run: it is given the state, and takes part until the end."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm
from atoll.core.state_packing import pack
from atoll.engines.build import loss_of, replica_of
from atoll.engines.driver import digest_without_size
from atoll.engines.elastic.commit import Finds, Meetings
from atoll.engines.elastic.commit_log import Minute, Minutes
from atoll.engines.elastic.engine import Commit, ElasticEngine
from atoll.engines.elastic.eviction import call
from atoll.engines.elastic.gpu_claims import Cards
from atoll.engines.elastic.leader_log import Desk, Finished
from atoll.engines.elastic.membership import Member, Membership
from atoll.engines.elastic.recovery import Sources
from atoll.engines.elastic.registry import Roll
from atoll.engines.elastic.shutdown import FINISHED, finish, hand_over, stay
from atoll.engines.elastic.snapshot_server import Cargo, Pier
from atoll.engines.elastic.spec import Invitation
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.elastic.wait_log import reminding
from atoll.engines.processes.spec import refuse_too_many_devices
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.engines.warm_start import Cache, WarmStart, load_data, warm_up
from atoll.replica.evaluator import Evaluator
from atoll.replica.master_weights import initial_weights
from atoll.runs.folder import RunFolder
from atoll.runs.run import device_of, dtype_of
from atoll.runs.workloads import fingerprint, island_workload, needs_weights, plain_workload
from atoll.telemetry.sinks import Silent

if TYPE_CHECKING:
    from atoll.testing.chaos import UpdateCorrupter

_LOOK_S, _ANSWER_S = 0.2, 1.0


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
        devices: that compute for it; none: as many as the run's place has it.
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
        devices: int | None = None,
    ) -> None:
        self._run, self._place, self._name, self._say = invitation.run.resolved, invitation.place, name, say
        self._count = devices or self._place.devices
        refuse_too_many_devices(self._run, self._count)
        self._folder = RunFolder(folder) if folder is not None else None
        self._doing = "coming"
        self._engine: ElasticEngine | None = None
        self._published: Generation | None = None
        """What others can fetch here: they must not be told of a state before it is there."""
        self._pier = Pier(host, about=lambda: {"name": name, **self._entry()})
        self._roll = Roll(address, name, self._entry)
        self._limit_s = max(self._place.limit_s * 2, 60.0)
        self._membership = Membership(
            name, host, invitation.lighthouse, pier=self._pier.address, home=folder is not None, limit_s=self._limit_s, say=say
        )
        self._minutes = Minutes()
        self._desk: Desk | None = None
        self._corrupter = self._corrupter_of(chaos) if chaos is not None else None
        self._set_up()

    def _corrupter_of(self, chaos: Path) -> UpdateCorrupter:
        from atoll.testing.chaos import FaultScript, UpdateCorrupter

        def now() -> int:
            return self._engine.generation.round if self._engine is not None else -1

        return UpdateCorrupter(FaultScript.read(chaos).update_faults, self._name, now, self._say)

    def _entry(self) -> dict[str, Any]:
        generation = self._published.number if self._published is not None and self._doing != "coming" else -1
        standing = self._engine.standing if self._engine is not None else {}
        about = {"pier": self._pier.address, "home": self._folder is not None, "generation": generation, "doing": self._doing}
        return {**about, "exchanging": False, **standing}

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
            warm = WarmStart(initial_weights(plain, device_of(run), dtype_of(run)), 0, math.nan)
        workload = island_workload(run, data, warm.params)
        origin = {"run": digest_without_size(run), "data": fingerprint(workload)}
        number = _number(self._name)
        (device, *beside), loss = self._devices(number), loss_of(run, workload)
        if self._folder is not None:
            evaluator = Evaluator(workload, device, dtype_of(run))
            self._desk = Desk(run, self._folder, plain, warm, evaluator, origin, cache, self._minutes, self._say)
        self._origin = {**origin, "atoll": version("atoll"), "torch": torch.__version__.partition("+")[0]}
        self._sources = Sources(
            self._name, self._roll, self._folder, self._desk, self._minutes, self._origin, self._say, self._limit_s
        )
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        limit = ExchangeTimeout(None)
        finds: Finds = self._membership
        if self._corrupter is not None:
            algorithm, finds = self._corrupter.algorithm(algorithm), self._corrupter.membership(finds)
        self._engine = ElasticEngine(
            name=self._name,
            algorithm=algorithm,
            meetings=Meetings(finds, limit, self._say, patience_s=self._place.limit_s),
            params=warm.params.to(device),
            batches=workload.batches,
            make_replica=lambda: replica_of(run, workload, loss, number, device, beside),
            islands=run.world.islands,
            steps=run.train.steps,
            most=self._place.refused_above,
            alive=lambda: len(self._roll.alive()),
            home=self._folder is not None,
            pier=self._pier.address,
            committed=self._committed,
            heal=self._heal,
            confirm=self._confirm,
            written=lambda: self._desk.written if self._desk is not None else NOTHING,
            pause_s=(self._place.pace or 0.0) * run.world.step_time(number % run.world.islands, run.seed),
            busy=lambda: self._pier.busy,
        )

    def _devices(self, number: int) -> list[str]:
        device = device_of(self._run)
        if device != "cuda":
            return [device] * self._count
        cards = [str(torch.cuda.get_device_properties(card).uuid) for card in range(torch.cuda.device_count())]
        self._cards = Cards(cards, number, self._count)  # as long as this process lives
        torch.cuda.set_device(self._cards.numbers[0])
        return [f"cuda:{card}" for card in self._cards.numbers]

    # --------------------------------------------------------------------------------------------------------------- the run

    def carry_out(self) -> None:
        """Take part, until the run is over."""
        try:
            if self._desk is not None and self._desk.is_finished:
                raise Finished
            self._take_part()
        except Finished:
            self._say(f"{self._name} has nothing to do: the run is finished")
        if self._desk is not None:
            self._doing = FINISHED
            self._roll.look()  # those who stay read it

    def _take_part(self) -> None:
        engine = self._engine
        assert engine is not None
        # Setting up takes a while: nobody waits once more for what could have been read meanwhile.
        began = self._sources.first(engine, self._roll.quiet_s(lambda entry: bool(entry["generation"] >= 0)))
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
        self._membership.leave()  # one that was away and comes back must not wait for those who only stay
        if self._desk is None:
            hand_over(self._roll, self._place.limit_s, self._say)
            return
        stay(self._name, engine, self._desk, self._say)
        finish(engine, self._desk, self._sources.checkpoint, self._place.limit_s, self._say)

    def _gather(self, engine: ElasticEngine) -> None:
        """Those who begin wait for all that were started."""
        planned, deadline_s = self._place.processes or self._run.world.islands, time.monotonic() + self._place.gather_s
        with reminding(self._say, f"waiting for {planned} islands to begin together"):
            while time.monotonic() < deadline_s:
                here = self._here(planned)
                ahead = any(entry["generation"] > engine.generation.number for entry in here.values())
                if len(here) >= planned or ahead:
                    # The lighthouse may not have heard the last of them beat yet: they are fellows from now on.
                    engine.expect({name: entry["pier"] for name, entry in here.items()})
                    return
                time.sleep(_LOOK_S / 4)
                self._roll.look()
        self._say(f"begins with those who are here: {sorted(self._roll.alive())}")

    def _here(self, enough: int) -> dict[str, dict[str, Any]]:
        """Who has signed that it has come; where it seems that enough have, of these whoever answers, since some may have died."""
        here = {name: entry for name, entry in self._roll.alive().items() if entry["doing"] != "coming"}
        if len(here) < enough:
            return here
        answers = call([Member(name, entry["pier"], False, 0.0) for name, entry in here.items()], _ANSWER_S)
        return {name: entry for name, entry in here.items() if name in answers}

    def _committed(self, engine: ElasticEngine, commit: Commit) -> None:
        told = [*zip(commit.met.names, commit.met.result.told, strict=True)]
        # One that holds other bits is given the others' state before it goes on, and writes nothing of this.
        writer = next((name for name, one in told if one.home and name not in commit.met.apart), None)
        written = max(Generation.of(one.written) for _, one in told)
        self._minutes.add(Minute(engine.generation, commit.opening, commit.events), written)
        self._publish(engine)
        if not commit.opening:  # every island says what it holds, so that nobody has to trust the one who writes
            worked = self._name in commit.met.result.delivered(commit.met.names)
            work = "with work of its own" if worked else "without work of its own"
            generation = engine.generation
            self._say(f"committed round {generation.round} of epoch {generation.epoch} as {engine.digest}, {work}")
        if self._desk is not None:
            self._desk.committed(engine, commit, writer)

    def _publish(self, engine: ElasticEngine) -> None:
        structure, tensors = pack(engine.shared())
        header = {"plain": engine.plain(), "structure": structure, "minutes": self._minutes.to_parts(), "origin": self._origin}
        with self._pier.changing() as put:
            put(Cargo(header, tensors))
            self._published = engine.generation
        engine.published()

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
        """The others hold what this island does not. They do not wait while it is brought up to date; unless what it was given was
        old before it had it. Then it stays, and no commit can overtake it once more, unless it cannot be fetched at all."""
        if not engine.was_given:
            self._membership.leave()
        self._doing = "healing"
        with reminding(self._say, "waiting for the state that the others hold"):
            self._sources.catch_up(engine, ahead, failed=self._membership.leave)
        self._publish(engine)
        self._doing = "training"
        self._membership.join()

    def _confirm(self, engine: ElasticEngine) -> None:
        self._sources.confirm(engine)
        self._publish(engine)


def _number(name: str) -> int:
    """Which of the planned islands this is, by its name; who joins from elsewhere is none of them, and has a number of its own.

    >>> _number("island-0007"), _number("box-7-00c0ffee")
    (7, 51601)
    """
    planned = re.fullmatch(r"island-(\d+)", name)
    return int(planned[1]) if planned else zlib.crc32(name.encode()) % 100_003  # so many islands have seeds of their own
