"""The simulator: islands that really train, on a clock that is not real.

Every round, each island present runs the algorithm's coroutine under the virtual clock. Training is handed to a pool of threads at
the moment it begins and asked for at the virtual moment it ends, so islands compute side by side, and the order in which
real threads finish changes nothing. Between two rounds the engine checks that islands which agreed hold the same bits, counts,
evaluates, saves, and lets islands come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import torch

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Progress, RoundFailed, RunFinished, UpdateSkipped
from atoll.core.flat_tree import Tree, all_finite
from atoll.core.memoize import sharing
from atoll.core.protocols import Algorithm, Batches, HoldsWeights, Owner, Sink, Work, fields_owned, whole_steps
from atoll.core.pytree import memories, recycle, trees
from atoll.engines.accounting import RunAccounting
from atoll.engines.data_positions import DataPositions, same_batches_everywhere
from atoll.engines.replicated_state import adopt_shared, borrowed, donated, owned, pending_tokens, shared_fields
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.cluster_state import ClusterState, IslandState
from atoll.engines.simulator.collectives import RoundAborted, SimCollectives
from atoll.engines.simulator.compute_pool import ComputePool, TimedCompute
from atoll.engines.simulator.island_devices import IntraIsland, IslandDevices, check_held_weights, held_weights, load_held_weights
from atoll.engines.simulator.memory_counter import MemoryCounter, is_counted
from atoll.engines.simulator.peers import SimPeers, SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.replica.local_replica import ComputeResult, LocalReplica
from atoll.replica.master_weights import check_exchange_dtype
from atoll.runs.cluster import Cluster
from atoll.runs.two_level import check_inside


class SimEngine:
    """Runs one algorithm on a simulated cluster.

    Args:
        algorithm: what each island does.
        cluster: the islands and their lines.
        params: the weights to begin with.
        batches: the data; island i reads shard i, or i modulo the number of shards where there are fewer.
        make_replica: makes island i's replica, with a fresh optimizer.
        inside: what the devices of each island do together; none if an island is one device. Device j of island i then is number
            i * devices_per_island + j to `batches` and `make_replica`.
        evaluate: judges the global weights, with the buffers of the first island present.
        sink: takes events.
        steps: inner steps that each island takes in all.
        seed: of everything the cluster draws.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        save: writes a checkpoint of the engine it is given; none saves nothing.
        save_every: rounds between checkpoints; the last round is always saved.
        together: computes for several islands at a time, where one device serves them all.
        count_memory: whether to count what each island holds, in a few rounds.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm[Any],
        cluster: Cluster,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        evaluate: Callable[[Tree, Mapping[str, torch.Tensor]], Mapping[str, float]],
        sink: Sink,
        steps: int,
        seed: int = 0,
        evaluate_every: int = 1,
        save: Callable[[SimEngine], None] | None = None,
        save_every: int = 1,
        inside: Algorithm[Any] | None = None,
        together: BatchedCompute | None = None,
        count_memory: bool = True,
    ) -> None:
        cluster.check_synchronous()
        if cluster.topology == "star" and isinstance(algorithm, HoldsWeights):
            raise ConfigError(
                f"cluster.topology=star, but {type(algorithm).__name__} scatters and gathers slices, which go round a ring. Use "
                f"cluster.topology=ring, or an algorithm that takes means."
            )
        check_exchange_dtype(algorithm, params.layout)
        if inside is not None:
            check_inside(algorithm, inside)
            check_exchange_dtype(inside, params.layout)
        per_round = algorithm.steps_per_round
        if steps < 1 or steps % per_round:
            raise ConfigError(
                f"steps={steps} is not a positive multiple of the {per_round} steps of a round of {type(algorithm).__name__}. "
                f"Use {max(1, round(steps / per_round)) * per_round}."
            )
        self.algorithm = algorithm
        self.cluster = cluster
        self.steps = steps
        self.rounds = steps // per_round
        self.seed = seed
        self.accounting = RunAccounting(cluster.islands, cluster.devices_per_island if inside is not None else 0)
        self._dealing, self._ask_alike = DataPositions(batches), same_batches_everywhere(algorithm, inside)
        self._make_replica = make_replica
        self._evaluate = evaluate
        self._sink = sink
        self._evaluate_every = evaluate_every
        self._save = save
        self._save_every = save_every
        self._count_memory = count_memory
        self._computing = ComputePool(cluster, lambda: sink.emit(self._progress()), together)
        self._stretches = TimedCompute(cluster, seed, self._computing, self.accounting, sink)
        self._inside = self._make_inside(inside) if inside is not None else None
        self._archipelago = ClusterState(algorithm, cluster, self.rounds, self.accounting, sink, self)
        self._agreed: dict[str, Any] | None = None
        """The shared fields of the first island that left the round."""
        self._handed_out: dict[int, int] = {}
        """Steps of work that each island was given in this round."""
        self._updates_before = 0
        for number in range(self.rounds):
            cluster.present(number, self.rounds)  # refuses a schedule that leaves nobody, before anything is trained
        self._archipelago.settle(params.copy())  # buffers of States go back into circulation; the caller keeps its own

    # -------------------------------------------------------------------------------------------------------- the whole run

    def run(self, warm_start_tokens: int = 0) -> RunFinished:
        """All rounds that remain."""
        with self._computing.open(next(iter(self.islands.values())).replica):
            if not self.accounting.totals.metrics:
                self._judge()
            while not self.over:
                self._play_round()
                self._close_round()
        finished = self.accounting.finished(self.virtual_time_s, warm_start_tokens, self.params.digest())
        self._sink.emit(finished)
        return finished

    @property
    def over(self) -> bool:
        """Whether the run has taken the steps it was given."""
        return self.accounting.totals.steps >= self.steps

    @property
    def positions(self) -> list[Fraction]:
        """In each shard, in batches."""
        return self._dealing.positions

    @property
    def params(self) -> Tree:
        """The global weights."""
        return self._archipelago.params

    @property
    def islands(self) -> dict[int, IslandState]:
        """Those that are there, in rank order."""
        return self._archipelago.islands

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the first island's module keeps besides its weights: buffers are each island's own, and one must stand for all."""
        return next(iter(self.islands.values())).replica.buffers()

    @property
    def round(self) -> int:
        """Rounds that are over."""
        return self.accounting.totals.round

    @property
    def virtual_time_s(self) -> float:
        return self._archipelago.virtual_time_s

    # ------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> None:
        self._archipelago.let_come_and_go()
        present = list(self.islands.values())
        room = self._room(list(self.islands))
        count = MemoryCounter() if self._count_memory and is_counted(self.round) else None
        loop = VirtualClock(count) if count else VirtualClock()
        before, self._agreed = [island.state for island in present], None
        self._handed_out = dict.fromkeys(self.islands, 0)
        self._dealing.begin_round()
        self._updates_before = self.accounting.totals.local_updates
        for rank, island in enumerate(present):
            # A round has to be repeated only where messages are lost.
            state = borrowed(island.state) if self.cluster.loses_messages else donated(island.state)
            peers = SimPeers(self, room, rank, loop)
            replica = island.devices.under(loop) if island.devices else SimReplica(self, island.id, island.replica)
            coroutine = self.algorithm.round(state, replica, peers)
            task = loop.spawn(f"island {island.id}", coroutine, island.clock_s, partial(self._leave_round, island, room, peers))
            if count and not island.devices:
                count.watch(task, island.id, island.replica, state)
        room.kept = memories(before)
        try:
            with nullcontext() if count else sharing():  # what each island needs is counted where each computes by itself
                stuck = loop.run()
        except RoundAborted as void:
            self._abandon(present, void)
            return
        if stuck:
            waiting = [*room.waiting(), *(who for island in present if island.devices for who in island.devices.waiting())]
            raise ExchangeFailed(
                f"round {self.round} cannot end: {', '.join(waiting)}; the others have left the round. "
                f"All islands must make the same calls in the same order."
            )
        self._commit([island for rank, island in enumerate(present) if rank not in room.left_out], skipped=room.skipped)
        for event in count.events(self.algorithm, self.round) if count else ():
            self._sink.emit(event)
        recycle([*before, *room.results], [self._archipelago.shared, *(island.state for island in present)])

    def _abandon(self, present: Sequence[IslandState], void: RoundAborted) -> None:
        """The round is void: everybody goes on from what it had before, and what was computed is lost."""
        self.accounting.totals.failed_rounds += 1
        self._stretches.see_through()  # what was begun beside a flight
        self._sink.emit(RoundFailed(round=self.round, what=void.what, islands=void.silent, virtual_time_s=void.time_s))
        time_s = self._put_weights_back(void.time_s)
        for island in present:
            self.accounting.ledgers[island.id].present_s += time_s - island.clock_s
            island.clock_s, island.uncommitted_tokens = time_s, pending_tokens(island.state)

    def _put_weights_back(self, time_s: float) -> float:
        """Replicas that keep the weights from round to round may hold an estimate of others: they are gathered anew. When that is
        over."""
        if not isinstance(self.algorithm, HoldsWeights):
            return time_s
        load_held_weights(self.algorithm, self.islands.values())
        return self._room(list(self.islands)).gather_anew(held_weights(self.algorithm, self.islands.values()), time_s)

    def _leave_round(self, island: IslandState, room: SimCollectives, peers: SimPeers, task: ClockTask) -> None:
        """An island is through. If it was heard it must hold the shared fields of the others, and from now on the same objects:
        at once, so that no more than one island's new fields lie beside those that all hold."""
        if peers.flying:
            raise ExchangeFailed(f"island {island.id} leaves round {self.round} with a flight open. Await it within the round.")
        self.accounting.ledgers[island.id].present_s += task.now_s - island.clock_s
        island.clock_s = task.now_s
        island.uncommitted_tokens += island.devices.take_tokens() if island.devices else 0
        island.state = state = owned(task.result)
        if room.committed and peers.rank not in room.left_out:
            mine = shared_fields(state)
            self._agreed = self._agreed or mine
            if any(value is not self._agreed[name] for name, value in mine.items()):
                island.state = adopt_shared(f"island {island.id}", state, self._agreed)
                if any(trees(mine)):
                    recycle([state], [self._agreed, self._archipelago.shared, *(other.state for other in self.islands.values())])
        elif not list(trees(fields_owned(state, Owner.OWN))):
            island.uncommitted_tokens = 0  # it was not heard and kept no weights of its own: that work is lost

    def _commit(self, heard: Sequence[IslandState], *, skipped: UpdateSkipped | None) -> None:
        """What those who were heard agreed on is what holds."""
        if self._agreed is None:
            return
        self._check_finite()
        check_held_weights(self.algorithm, {f"island {island.id}": island for island in self.islands.values()}, self.round)
        totals = self.accounting.totals
        totals.skipped_in_a_row = self.accounting.count_skipped(skipped, totals.skipped_in_a_row, self._sink)
        self._archipelago.shared = self._agreed
        totals.version += 1
        totals.outer_steps += not skipped
        for island in heard:
            island.version = totals.version
            waiting = pending_tokens(island.state)  # they belong to the next update
            totals.tokens += 0 if skipped else island.uncommitted_tokens - waiting
            island.uncommitted_tokens = waiting

    def _check_finite(self) -> None:
        slices = [fields_owned(island.state, Owner.SHARDED) for island in self.islands.values()]
        if not all_finite(trees([self._agreed, slices])):
            raise TrainingDiverged(
                self.accounting.divergence
                or f"the global weights are no longer finite after round {self.round}, though every loss was. The run stops; what "
                f"was saved before this round stands. Lower the learning rates, the outer one too, or set train.clip_norm."
            )

    def _room(self, islands: Sequence[int]) -> SimCollectives:
        return SimCollectives(
            round=self.round,
            islands=islands,
            heard=[self.is_heard(island, islands) for island in islands],
            links=[self.cluster.line(island) for island in islands],
            topology=self.cluster.topology,
            report=self._sink,
            accounting=self.accounting,
            devices=1 if self._inside is None else self.cluster.devices_per_island,
        )

    def _close_round(self) -> None:
        totals = self.accounting.totals
        if totals.local_updates == self._updates_before:  # nobody trained: all gradients of the round are one update of each island
            totals.local_updates += len(self.islands)
        before = totals.steps
        per_round = self.algorithm.steps_per_round
        if "steps" in self._archipelago.shared:  # the State knows how far the run is; rounds that failed are spent all the same
            steps = whole_steps(self._archipelago.shared["steps"]) + self.accounting.totals.failed_rounds * per_round
        else:
            steps = before + per_round
        self._sink.emit(self.accounting.round_finished(steps, len(self.islands), self.virtual_time_s))
        if self.over or self._passed(before, self._evaluate_every):
            self._judge()
        if self._save is not None and (self.over or self._passed(before, self._save_every)):
            self._save(self)

    def _passed(self, before: int, rounds: int) -> bool:
        """Whether the run has just passed a multiple of so many rounds' steps."""
        interval = rounds * self.algorithm.steps_per_round
        return self.accounting.totals.steps // interval > before // interval

    def _judge(self) -> None:
        metrics = self._computing.result(self._computing.begin(lambda: self._evaluate(self.params, self.buffers())))
        self._sink.emit(self.accounting.evaluated(metrics, self.virtual_time_s))

    # -------------------------------------------------------------------------------------------- what islands ask for (Host)

    def compute(
        self, island: int, function: Callable[[], tuple[Any, ComputeResult]], *, steps: int, batches: float, draw: str | None = None
    ) -> Wait:
        count = partial(self._count, island)
        return self._stretches.wait(island, function, steps=steps, batches=batches, count=count, draw=draw)

    def _count(self, island: int, tokens: int) -> None:
        self.islands[island].uncommitted_tokens += tokens

    def _progress(self) -> Progress:
        """How far the islands are within the round, on the average."""
        within = fmean(island.replica.steps_taken for island in self.islands.values())
        return Progress(phase="training", done=int(min(within, self.steps)), total=self.steps)

    def hand_out(self, island: int, steps: int, batches: int, pieces: int) -> Work:
        schedule = self.accounting.totals.steps + self._handed_out[island]
        self._handed_out[island] += steps
        if self._inside is not None:  # its devices are dealt theirs when they ask
            readers = self._inside.readers(island)
            return Work(shard=readers[0], start=0, schedule=schedule, examples=self._dealing.examples(readers), pieces=pieces)
        return self._deal(island, batches, pieces, schedule)

    def _deal(self, reader: int, batches: int, pieces: int, schedule: int) -> Work:
        if not self._ask_alike:
            return self._dealing.assign(reader, batches, pieces, schedule)
        readers = [one for island in self.islands for one in (self._inside.readers(island) if self._inside else (island,))]
        return self._dealing.assign_in_step(reader, batches, pieces, schedule, readers)

    def catch_up(self, island: int, state: Any) -> Wait | None:
        return self._archipelago.catch_up(island, state)

    # -------------------------------------------------------------------------------------- what islands that come need (Equips)

    def equip(self, island: int, params: Tree) -> tuple[LocalReplica, IslandDevices | None]:
        if self._inside is None:
            return self._new_replica(island), None
        devices = IslandDevices(self._inside, island, params)
        return devices.members[0].replica, devices

    def _new_replica(self, number: int) -> LocalReplica:
        replica = self._make_replica(number)
        replica.cancelled = self._computing.closing
        if self.islands:  # all are of one kind: find out once
            replica.traits = next(iter(self.islands.values())).replica.traits
        return replica

    def introduce(self, islands: Sequence[int], rank: int) -> SimPeers:
        return SimPeers(self, self._room(islands), rank)

    def is_heard(self, island: int, islands: Sequence[int]) -> bool:
        """Alone, there is nobody whom a message could fail to reach."""
        return len(islands) == 1 or self.cluster.heard(island, self.round, self.seed)

    def _make_inside(self, algorithm: Algorithm[Any]) -> IntraIsland:
        return IntraIsland(
            algorithm=algorithm,
            cluster=self.cluster,
            accounting=self.accounting,
            stretches=self._stretches,
            deal=self._deal,
            sink=self._sink,
            make_replica=self._new_replica,
        )

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """Everything a checkpoint must hold, by part. Between two rounds only."""
        return {
            "engine": {
                **self.accounting.to_parts(),
                "together": self._computing.to_part(),
                "positions": self._dealing.to_parts(),
                **self._archipelago.to_part(),
            },
            **self._archipelago.parts(),
        }

    def restore(self, load: Callable[[str, Any], Any]) -> None:
        """Go on from a checkpoint. `load(part, like)` gives a part back, with the types of `like`."""
        engine = load("engine", None)
        self.accounting.from_parts(engine)
        self._computing.from_part(engine.get("together"))
        self._dealing.from_parts(engine["positions"])
        self._archipelago.restore(engine, load)
