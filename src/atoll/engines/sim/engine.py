"""The simulator: islands that really train, on a clock that is not real.

Every round, each island present runs the algorithm's coroutine under the virtual clock. Training is handed to a pool of threads at
the moment it begins and asked for at the virtual moment it ends, so islands compute side by side, and the order in which
real threads finish changes nothing. Between two rounds the engine checks that islands which agreed hold the same bits, counts,
evaluates, saves, and lets islands come and go.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from types import TracebackType
from typing import Any

import torch

from atoll.engines.local import LocalReplica, Trained
from atoll.engines.sim.clock import Loop, Task, Wait
from atoll.engines.sim.network import transfer_s
from atoll.engines.sim.peers import Room, SimPeers, SimReplica
from atoll.engines.sim.world import Cluster
from atoll.engines.states import agree, recycle, shared_fields, tree_bytes, with_shared
from atoll.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.events import CaughtUp, Computed, Evaluated, Event, IslandJoined, IslandLeft, RoundFinished, RunFinished
from atoll.protocols import Algorithm, Batches, Owner, Sink, Work, fields_owned
from atoll.tree import Tree


@dataclass
class Ledger:
    """What one island has done since the warm start, also while it was away."""

    sent_bytes: int = 0
    control_bytes: int = 0
    computed_s: float = 0.0
    present_s: float = 0.0
    stretches: int = 0


@dataclass
class Island:
    """One island that takes part."""

    id: int
    replica: LocalReplica
    state: Any
    version: int
    """Of the shared fields it holds: the number of commits it knows of."""
    clock_s: float
    uncommitted_tokens: int = 0
    uplink_free_s: float = 0.0


@dataclass
class Totals:
    """Counts over all islands, since the warm start."""

    round: int = 0
    steps: int = 0
    outer_steps: int = 0
    tokens: int = 0
    local_updates: int = 0
    version: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class SimEngine:
    """Runs one algorithm on a simulated cluster.

    Args:
        algorithm: what each island does.
        cluster: the islands and their lines.
        params: the weights to begin with.
        batches: the data; one shard per island.
        make_replica: makes island i's replica, with a fresh optimizer.
        evaluate: judges the global weights.
        sink: takes events.
        steps: inner steps that each island takes in all.
        seed: of everything the cluster draws.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        save: writes a checkpoint of the engine it is given; none saves nothing.
        save_every: rounds between checkpoints; the last round is always saved.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm[Any],
        cluster: Cluster,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        evaluate: Callable[[Tree], Mapping[str, float]],
        sink: Sink,
        steps: int,
        seed: int = 0,
        evaluate_every: int = 1,
        save: Callable[[SimEngine], None] | None = None,
        save_every: int = 1,
    ) -> None:
        if steps < 1 or steps % algorithm.steps_per_round:
            raise ConfigError(
                f"steps={steps} is not a positive multiple of the {algorithm.steps_per_round} steps of a round of "
                f"{type(algorithm).__name__}. Use {max(1, round(steps / algorithm.steps_per_round)) * algorithm.steps_per_round}."
            )
        self.algorithm = algorithm
        self.cluster = cluster
        self.steps = steps
        self.rounds = steps // algorithm.steps_per_round
        self.seed = seed
        self.totals = Totals()
        self.ledgers = {island: Ledger() for island in range(cluster.islands)}
        self.positions = [0] * batches.num_shards
        self.islands: dict[int, Island] = {}
        self._batches = batches
        self._make_replica = make_replica
        self._evaluate = evaluate
        self._sink = sink
        self._evaluate_every = evaluate_every
        self._save = save
        self._save_every = save_every
        self._pool: ThreadPoolExecutor | None = None
        self._room: Room | None = None
        self._losses: list[float] = []
        self._admit_first(params)

    # -------------------------------------------------------------------------------------------------------- the whole run

    def run(self, warm_start_tokens: int = 0) -> RunFinished:
        """All rounds that remain, with one CPU thread setting throughout: reductions depend on it in the last bits."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.cluster.threads_per_island)
        try:
            with _Pool(self._workers(), self.cluster.threads_per_island) as self._pool:
                if self.totals.round == 0 and not self.totals.metrics:
                    self._judge()
                while self.totals.round < self.rounds:
                    self._play_round()
                    self._close_round()
            finished = self._summary(warm_start_tokens)
            self._sink.emit(finished)
            return finished
        finally:
            torch.set_num_threads(threads)

    @property
    def params(self) -> Tree:
        """The global weights."""
        params: Tree = self._shared["params"]
        return params

    @property
    def virtual_time_s(self) -> float:
        return max(island.clock_s for island in self.islands.values())

    def _workers(self) -> int:
        if any(island.replica.draws_randomness for island in self.islands.values()):
            return 1  # torch's generators are the process's: two islands at a time would draw from each other's
        return max(1, (os.cpu_count() or 1) // self.cluster.threads_per_island)

    # ------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> None:
        number = self.totals.round
        self._let_come_and_go(number)
        present = list(self.islands.values())
        room = self._room = self._open_room(number)
        loop = Loop()
        tasks: dict[int, Task] = {}
        for rank, island in enumerate(present):
            island.uplink_free_s = island.clock_s
            coroutine = self.algorithm.round(island.state, SimReplica(self, island.id, island.replica), SimPeers(self, room, rank))
            tasks[island.id] = loop.spawn(f"island {island.id}", coroutine, island.clock_s)
        stuck = loop.run()
        if stuck:
            raise ExchangeFailed(
                f"round {number} cannot end: {', '.join(room.waiting())}; the others have left the round. "
                f"All islands must make the same calls in the same order."
            )
        before = [island.state for island in present]
        for rank, island in enumerate(present):
            task = tasks[island.id]
            self.ledgers[island.id].present_s += task.now_s - island.clock_s
            island.clock_s = task.now_s
            island.state = task.result
            if room.heard[rank]:
                self.totals.tokens += island.uncommitted_tokens
                island.uncommitted_tokens = 0
        self._agree([island for rank, island in enumerate(present) if room.heard[rank]], room.committed)
        recycle([*before, *room.results], [self._shared, *(island.state for island in present)])

    def _open_room(self, number: int) -> Room:
        ids = list(self.islands)
        return Room(
            round=number,
            islands=ids,
            heard=[self.cluster.heard(island, number, self.seed) for island in ids],
            links=[self.cluster.line(island) for island in ids],
            topology=self.cluster.topology,
            report=self._sink,
            account=lambda sent, control: self._account(ids, sent, control),
        )

    def _account(self, ids: Sequence[int], sent: Sequence[int], control: Sequence[int]) -> None:
        for island, payload, extra in zip(ids, sent, control, strict=True):
            self.ledgers[island].sent_bytes += payload
            self.ledgers[island].control_bytes += extra

    def _agree(self, heard: Sequence[Island], committed: bool) -> None:
        """Those who were heard must hold the same shared fields; from now on they hold the same objects."""
        if not heard or not committed:
            return
        self._shared = shared_fields(heard[0].state)
        self.totals.version += 1
        self.totals.outer_steps += 1
        for island in heard:
            state = island.state
            island.state = agree(f"island {island.id}", state, self._shared)
            island.version = self.totals.version
            recycle([state], [island.state, self._shared])

    def _close_round(self) -> None:
        totals = self.totals
        totals.round += 1
        totals.steps += self.algorithm.steps_per_round
        self.report(
            RoundFinished(
                round=totals.round,
                islands=len(self.islands),
                steps=totals.steps,
                virtual_time_s=self.virtual_time_s,
                tokens=totals.tokens,
                local_updates=totals.local_updates,
                loss=fmean(self._losses) if self._losses else math.nan,
                sent_bytes_per_island=self._mean_of("sent_bytes"),
            )
        )
        self._losses = []
        last = totals.round == self.rounds
        if last or totals.round % self._evaluate_every == 0:
            self._judge()
        if self._save is not None and (last or totals.round % self._save_every == 0):
            self._save(self)

    def _judge(self) -> None:
        assert self._pool is not None
        self.totals.metrics = dict(self._pool.submit(self._evaluate, self.params).result())
        self.report(
            Evaluated(
                round=self.totals.round,
                steps=self.totals.steps,
                virtual_time_s=self.virtual_time_s,
                tokens=self.totals.tokens,
                local_updates=self.totals.local_updates,
                sent_bytes_per_island=self._mean_of("sent_bytes"),
                metrics=self.totals.metrics,
            )
        )

    def report(self, event: Event) -> None:
        self._sink.emit(event)

    def _mean_of(self, name: str) -> float:
        return fmean(getattr(ledger, name) for ledger in self._ledgers_in_use())

    def _ledgers_in_use(self) -> list[Ledger]:
        """Of islands that have been there at all."""
        return [ledger for island, ledger in self.ledgers.items() if ledger.present_s > 0 or island in self.islands]

    def _summary(self, warm_start_tokens: int) -> RunFinished:
        ledgers = [ledger for ledger in self._ledgers_in_use() if ledger.present_s > 0]
        return RunFinished(
            rounds=self.totals.round,
            outer_steps=self.totals.outer_steps,
            steps=self.totals.steps,
            tokens=self.totals.tokens,
            warm_start_tokens=warm_start_tokens,
            local_updates=self.totals.local_updates,
            virtual_time_s=self.virtual_time_s,
            utilisation=fmean(ledger.computed_s / ledger.present_s for ledger in ledgers),
            sent_bytes_per_island=self._mean_of("sent_bytes"),
            control_bytes_per_island=self._mean_of("control_bytes"),
            val_loss=self.totals.metrics["loss"],
            digest=self.params.digest(),
        )

    # -------------------------------------------------------------------------------------------- what islands ask for (Host)

    def compute(self, island: int, function: Callable[[], tuple[Any, Trained]], *, steps: int, batches: int) -> Wait:
        return Wait(partial(self._start_computing, island, function, steps, batches))

    def _start_computing(
        self, island: int, function: Callable[[], tuple[Any, Trained]], steps: int, batches: int, task: Task
    ) -> None:
        assert self._pool is not None
        ledger = self.ledgers[island]
        step_s = self.cluster.step_time(island, self.seed) * self.cluster.jitter(island, ledger.stretches, self.seed)
        ledger.stretches += 1
        start_s, end_s = task.now_s, task.now_s + batches * step_s
        future = self._pool.submit(function)

        def finish() -> Any:
            result, trained = future.result()
            self._computed(island, start_s, end_s, steps, batches, trained)
            return result

        task.resume_at(end_s, finish)

    def _computed(self, island: int, start_s: float, end_s: float, steps: int, batches: int, trained: Trained) -> None:
        for step, loss in enumerate(trained.losses):
            if not math.isfinite(loss):
                raise TrainingDiverged(
                    f"the loss is {loss} on island {island} in round {self.totals.round}, {step} steps after the round began "
                    f"(inner step {self.totals.steps + step}). Nothing was saved after that: lower the learning rate, "
                    f"set train.clip_norm, or look at the data there."
                )
        self.ledgers[island].computed_s += end_s - start_s
        self.islands[island].uncommitted_tokens += trained.tokens
        self.totals.local_updates += steps
        loss = fmean(trained.losses)
        self._losses.append(loss)
        self._sink.emit(
            Computed(
                island=island,
                round=self.totals.round,
                start_s=start_s,
                end_s=end_s,
                steps=steps,
                batches=batches,
                tokens=trained.tokens,
                loss=loss,
            )
        )

    def hand_out(self, island: int, steps: int, batches: int) -> Work:
        shard = island % self._batches.num_shards
        start = self.positions[shard]
        self.positions[shard] += batches
        return Work(shard=shard, start=start, schedule=self.totals.steps, examples=self._batches.examples(shard))

    def catch_up(self, island: int, state: Any) -> Wait | None:
        me = self.islands[island]
        if me.version == self.totals.version or not self.cluster.heard(island, self.totals.round, self.seed):
            return None
        return Wait(partial(self._start_catching_up, me, state))

    def _start_catching_up(self, me: Island, state: Any, task: Task) -> None:
        start_s = task.now_s
        donor, sent_bytes, end_s = self._receive_shared(me.id, start_s)
        self._sink.emit(
            CaughtUp(island=me.id, donor=donor, round=self.totals.round, start_s=start_s, end_s=end_s, sent_bytes=sent_bytes)
        )
                def arrive() -> Any:
            me.version = self.totals.version  # from now on it can serve others
            return with_shared(state, self._shared)

        task.resume_at(end_s, arrive)

    def _receive_shared(self, island: int, start_s: float) -> tuple[int | None, int, float]:
        """An up-to-date island sends the shared fields: who, how many bytes, and when they are there."""
        donors = [d for d in self.islands.values() if d.version == self.totals.version and d.id != island]
        if not donors:  # the last one that knew has left; its legacy is at hand, but nobody's line carried it
            return None, 0, start_s
        donor = min(donors, key=lambda d: (d.uplink_free_s, d.id))
        num_bytes = tree_bytes(self._shared)
        begin_s = max(start_s, donor.uplink_free_s)
        end_s = begin_s + transfer_s(num_bytes, self.cluster.line(donor.id), self.cluster.line(island))
        donor.uplink_free_s = end_s
        self.ledgers[donor.id].sent_bytes += num_bytes
        return donor.id, num_bytes, end_s

    # ---------------------------------------------------------------------------------------------------- coming and going

    def _admit_first(self, params: Tree) -> None:
        present = self.cluster.present(0, self.rounds)
        room = Room(0, present, [True] * len(present), [], self.cluster.topology, self._sink, lambda sent, control: None)
        for rank, island in enumerate(present):
            state = self.algorithm.init(params, SimPeers(self, room, rank))
            if rank == 0:
                self._shared = shared_fields(state)
            state = agree(f"island {island}", state, self._shared)
            self.islands[island] = Island(island, self._make_replica(island), state, version=0, clock_s=0.0)

    def _let_come_and_go(self, number: int) -> None:
        present = self.cluster.present(number, self.rounds)
        now_s = self.virtual_time_s
        if present != list(self.islands) and fields_owned(next(iter(self.islands.values())).state, Owner.SHARDED):
            raise ConfigError(
                f"{type(self.algorithm).__name__} keeps sharded state, which this engine cannot cut anew: keep the pool constant."
            )
        for gone in [island for island in self.islands if island not in present]:
            del self.islands[gone]
            self._sink.emit(IslandLeft(island=gone, round=number, virtual_time_s=now_s))
        for new in [island for island in present if island not in self.islands]:
            donor, sent_bytes, begin_s = self._receive_shared(new, now_s)
            self._sink.emit(IslandJoined(island=new, round=number, virtual_time_s=begin_s, donor=donor, sent_bytes=sent_bytes))
            # The fresh State gives the newcomer's own fields; all that is shared comes from the others.
            room = Room(number, present, [True] * len(present), [], self.cluster.topology, self._sink, lambda sent, control: None)
            state = with_shared(self.algorithm.init(self.params, SimPeers(self, room, present.index(new))), self._shared)
            self.islands[new] = Island(new, self._make_replica(new), state, self.totals.version, clock_s=begin_s, uplink_free_s=begin_s)
        self.islands = {island: self.islands[island] for island in present}

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """Everything a checkpoint must hold, by part. Between two rounds only."""
        engine = {
            "totals": asdict(self.totals),
            "positions": list(self.positions),
            "ledgers": [asdict(ledger) for ledger in self.ledgers.values()],
            "present": list(self.islands),
        }
        return {
            "engine": engine,
            "shared": dict(self._shared),
            **{f"island-{island.id}": self._island_part(island) for island in self.islands.values()},
        }

    def _island_part(self, island: Island) -> dict[str, Any]:
        behind = island.version != self.totals.version
        return {
            "clock_s": island.clock_s,
            "version": island.version,
            "uncommitted_tokens": island.uncommitted_tokens,
            "own": fields_owned(island.state, Owner.OWN),
            "sharded": fields_owned(island.state, Owner.SHARDED),
            "shared": shared_fields(island.state) if behind else None,
            "replica": island.replica.state(),
        }

    def restore(self, load: Callable[[str, Any], Any]) -> None:
        """Go on from a checkpoint. `load(part, like)` gives a part back, with the types of `like`."""
        engine = load("engine", None)
        self.totals = Totals(**engine["totals"])
        self.positions = list(engine["positions"])
        self.ledgers = {island: Ledger(**ledger) for island, ledger in enumerate(engine["ledgers"])}
        template = next(iter(self.islands.values())).state
        self._shared = load("shared", shared_fields(template))
        islands = {}
        for number in engine["present"]:
            like = {
                "own": fields_owned(template, Owner.OWN),
                "sharded": fields_owned(template, Owner.SHARDED),
                "shared": self._shared,
            }
            part = load(f"island-{number}", like)
            replica = self.islands[number].replica if number in self.islands else self._make_replica(number)
            replica.restore(part["replica"])
            state = with_shared(template, part["shared"] or self._shared)
            state = with_shared(state, {**part["own"], **part["sharded"]})
            islands[number] = Island(
                number, replica, state, part["version"], part["clock_s"], uncommitted_tokens=part["uncommitted_tokens"]
            )
        self.islands = islands


class _Pool(ThreadPoolExecutor):
    """Threads to compute on, each with its own number of torch threads; on an error, what has not begun is dropped."""

    def __init__(self, workers: int, torch_threads: int) -> None:
        super().__init__(workers, "island", initializer=torch.set_num_threads, initargs=(torch_threads,))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)
