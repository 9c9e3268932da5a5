"""The simulator of synchronous algorithms: islands really train, under a virtual clock.

In every round each present island runs the algorithm's coroutine under the virtual clock, and a pool of threads trains. Between two
rounds the engine checks that the islands of a commit hold the same bits, accounts, evaluates, saves, and adds and removes islands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean
from typing import Any

import torch

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Progress, RoundFailed, RunFinished
from atoll.core.flat_tree import Tree, finite_and_set
from atoll.core.memoize import sharing
from atoll.core.nested_trees import memories, recycle, trees
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, Replica, fields_owned, whole_steps
from atoll.engines.accounting import diverged_weights
from atoll.engines.shared_and_sharded_state import adopt_shared, borrowed, donated, owned, pending_tokens, shared_fields
from atoll.engines.simulator.collectives import RoundAborted, RoundQuorum, SimCollectives
from atoll.engines.simulator.intra_island import check_held_weights, differing_weights, held_weights, in_slices, load_held_weights
from atoll.engines.simulator.member_work import MemberWork, SimSetup
from atoll.engines.simulator.membership import ClusterState, IslandState
from atoll.engines.simulator.memory_counter import MemoryCounter, is_counted
from atoll.engines.simulator.peers import SimPeers, SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock
from atoll.engines.training_setup import passed_multiple, same_batches_everywhere
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import check_exchange_dtype
from atoll.runs.settings_validation import check_two_level, check_whole_rounds


class BaseSimEngine(ABC):
    """What both simulators have in common. `inside` is the algorithm between the devices of an island, if there is one."""

    def __init__(self, setup: SimSetup, algorithm: Any, inside: Algorithm[Any] | None = None) -> None:
        self.cluster, self.steps, self.algorithm = setup.cluster, setup.steps, algorithm
        self._setup, self._sink = setup, setup.sink
        devices, in_step = setup.cluster.devices_per_island if inside else 0, same_batches_everywhere(algorithm, inside)
        self._work = MemberWork(setup, lambda: self._sink.emit(self._progress()), devices=devices, in_step=in_step)
        self._pool, self.accounting = self._work.pool, self._work.accounting

    def train(self) -> Generator[None, None, None]:
        """Trains to the end of the run. Yields when a checkpoint is due: until it is resumed, the engine can be saved."""
        with self._pool.open(self._any_replica):
            if not self.accounting.totals.metrics:
                self._evaluate()
            yield from self._train()

    def finish(self, warm_start_tokens: int = 0) -> RunFinished:
        """The figures of the whole run."""
        finished = self.accounting.finished(self.virtual_time_s, warm_start_tokens, self.params.digest())
        self._sink.emit(finished)
        return finished

    @property
    def steps_taken(self) -> int:
        return self.accounting.totals.steps

    @property
    def round(self) -> int:
        """Finished rounds; with a hub, its steps."""
        return self.accounting.totals.round

    @property
    @abstractmethod
    def params(self) -> Tree:
        """The global weights."""

    @abstractmethod
    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers, which are evaluated and saved with the weights. Each island has its own."""

    @property
    @abstractmethod
    def virtual_time_s(self) -> float: ...

    @property
    @abstractmethod
    def _any_replica(self) -> LocalReplica: ...

    @abstractmethod
    def _train(self) -> Iterator[None]: ...

    @abstractmethod
    def _progress(self) -> Progress: ...

    def _evaluate(self) -> None:
        metrics = self._pool.run(lambda: self._setup.evaluate(self.params, self.buffers()))
        self._sink.emit(self.accounting.evaluated(metrics, self.virtual_time_s))


class SimEngine(BaseSimEngine):
    """Runs a synchronous algorithm on a simulated cluster. `inside` is the algorithm between the devices of each island, if it has
    several. With `count_memory` the engine counts each island's memory in a few rounds."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        setup: SimSetup,
        *,
        inside: Algorithm[Any] | None = None,
        count_memory: bool = True,
    ) -> None:
        cluster, per_round = setup.cluster, algorithm.steps_per_round
        cluster.check_synchronous()
        if cluster.topology == "star" and isinstance(algorithm, HoldsWeights):
            raise ConfigError(
                f"cluster.topology=star, but {type(algorithm).__name__} scatters and gathers slices, which go round a ring. Use "
                f"cluster.topology=ring, or an algorithm that takes means."
            )
        check_whole_rounds(setup.steps, per_round)
        for one in (algorithm, inside):
            check_exchange_dtype(one, setup.params.layout)
        if inside is not None:
            check_two_level(algorithm, inside)
            algorithm = in_slices(algorithm, cluster.devices_per_island)
        super().__init__(setup, algorithm, inside)
        self._count_memory = count_memory
        self._cluster_state = ClusterState(self._work, algorithm, inside, setup.steps // per_round)
        self._agreed: dict[str, Any] | None = None  # the shared fields of the first island that left this round
        self._updates_before = 0
        self._cluster_state.start(setup.params.copy())  # States reuse their buffers; the caller keeps its own

    # -------------------------------------------------------------------------------------------------------- the whole run

    def _train(self) -> Iterator[None]:
        while (before := self.steps_taken) < self.steps:
            self._run_round()
            self._end_round()
            if self._setup.save_every is not None and self._is_due(before, self._setup.save_every):
                yield

    @property
    def params(self) -> Tree:
        return self._cluster_state.params

    @property
    def islands(self) -> dict[int, IslandState]:
        """The present islands, in rank order."""
        return self._cluster_state.islands

    @property
    def _any_replica(self) -> LocalReplica:
        return next(iter(self.islands.values())).replica

    def buffers(self) -> dict[str, torch.Tensor]:
        return self._any_replica.buffers()

    @property
    def virtual_time_s(self) -> float:
        return self._cluster_state.virtual_time_s

    # ------------------------------------------------------------------------------------------------------------- a round

    def _run_round(self) -> None:
        self._cluster_state.update_membership()
        present = list(self.islands.values())
        buckets, schedule = getattr(self.algorithm, "buckets", 1), self.steps_taken
        collectives = SimCollectives(self._work, list(self.islands), buckets=buckets, quorum=self._quorum(present))
        counter = MemoryCounter() if self._count_memory and is_counted(self.round) else None
        clock = VirtualClock(counter) if counter else VirtualClock()
        before, self._agreed = [island.state for island in present], None
        self._work.begin_round(self.islands)
        self._updates_before = self.accounting.totals.local_updates
        for rank, island in enumerate(present):
            # A round has to be repeated only where messages are lost.
            state = borrowed(island.state) if self.cluster.loses_messages else donated(island.state)
            peers = SimPeers(collectives, rank, clock, schedule, partial(self._cluster_state.catch_up, island))
            replica: Replica = SimReplica(island.replica, partial(self._work.compute, island))
            if island.devices:
                island.devices.clock, replica = clock, island.devices
            coroutine = self.algorithm.round(state, replica, peers)
            leave = partial(self._leave_round, island, collectives, peers)
            task = clock.spawn(collectives.name(rank), coroutine, island.clock_s, leave)
            if counter and not island.devices and not island.late:  # a late island does not train in this round
                counter.watch(task, island.id, island.replica, state)
        collectives.kept = memories(before)
        try:
            with nullcontext() if counter else sharing():  # memory is counted with each island computing its own copy
                unfinished = clock.run()
        except RoundAborted as aborted:
            self._abandon(present, collectives, aborted)
            return
        if unfinished:
            inside = [island.devices.collectives for island in present if island.devices]
            waiting = [name for one in (collectives, *inside) for name in one.waiting()]
            raise ExchangeFailed(
                f"round {self.round} cannot end: {', '.join(waiting)}; the other islands have left the round. "
                f"All islands must make the same calls in the same order."
            )
        self._commit(collectives)
        for event in counter.events(self.algorithm, self.round) if counter else ():
            self._sink.emit(event)
        recycle([*before, *collectives.results], [self._cluster_state.shared, *(island.state for island in present)])

    def _quorum(self, present: Sequence[IslandState]) -> RoundQuorum | None:
        islands: int | None = getattr(self.algorithm, "quorum", None)
        if islands is None:
            return None
        return RoundQuorum(islands, self.algorithm.grace_s, {rank for rank, island in enumerate(present) if island.late})

    def _abandon(self, present: Sequence[IslandState], collectives: SimCollectives, aborted: RoundAborted) -> None:
        """Discards the round: every island continues from the State it had before."""
        self.accounting.totals.failed_rounds += 1
        self._pool.drain()
        what, time_s = aborted.what, aborted.time_s
        self._sink.emit(RoundFailed(round=self.round, what=what, islands=aborted.missing, virtual_time_s=time_s))
        if isinstance(self.algorithm, HoldsWeights):  # replicas may hold an estimate of other weights
            load_held_weights(self.algorithm, present)
            time_s = collectives.gather_weights(held_weights(self.algorithm, present), time_s)
        for island in present:
            self.accounting.ledgers[island.id].present_s += time_s - island.clock_s
            island.clock_s, island.uncommitted_tokens = time_s, pending_tokens(island.state)

    def _leave_round(self, island: IslandState, collectives: SimCollectives, peers: SimPeers, task: ClockTask) -> None:
        """Ends an island's round. If the island took part in the commit, its shared fields must equal those of the first such
        island, and it adopts these objects at once, so that at most one further copy of the new fields is in memory."""
        peers.check_closed()
        self.accounting.ledgers[island.id].present_s += task.now_s - island.clock_s
        island.clock_s, island.late = task.now_s, peers.rank in collectives.late
        island.uncommitted_tokens += island.devices.pop_tokens() if island.devices else 0
        island.state = state = owned(task.result)
        if collectives.committed and peers.rank not in collectives.left_out:
            mine = shared_fields(state)
            self._agreed = self._agreed or mine
            if any(value is not self._agreed[name] for name, value in mine.items()):
                island.state = adopt_shared(f"island {island.id}", state, self._agreed)
                if any(trees(mine)):
                    kept = [self._agreed, self._cluster_state.shared, *(other.state for other in self.islands.values())]
                    recycle([state], kept)
        elif (island.late and self.algorithm.late == "dropped") or not list(trees(fields_owned(state, Owner.OWN))):
            island.uncommitted_tokens = 0  # it was left out and kept no weights of its own: that work is lost

    def _commit(self, collectives: SimCollectives) -> None:
        """The fields that the heard islands agreed on become the shared fields of the run."""
        if self._agreed is None:
            return
        slices = [fields_owned(island.state, Owner.SHARDED) for island in self.islands.values()]
        flags = differing_weights(self.algorithm, self.islands.values())
        finite, differing = finite_and_set(trees([self._agreed, slices]), flags)
        if not finite:
            raise TrainingDiverged(self.accounting.divergence) if self.accounting.divergence else diverged_weights(self.round)
        check_held_weights(differing, collectives)
        totals, skipped = self.accounting.totals, collectives.skipped
        totals.skipped_in_a_row = self.accounting.count_skipped(skipped, totals.skipped_in_a_row, self._sink)
        self._cluster_state.shared = self._agreed
        totals.version += 1
        totals.outer_steps += not skipped
        for island in (island for rank, island in enumerate(self.islands.values()) if rank not in collectives.left_out):
            island.version = totals.version
            tokens = island.commit_tokens()
            totals.tokens += 0 if skipped else tokens

    def _end_round(self) -> None:
        totals, per_round = self.accounting.totals, self.algorithm.steps_per_round
        if totals.local_updates == self._updates_before:  # no island trained: the round's gradients are one update of each
            totals.local_updates += len(self.islands)
        before = totals.steps
        shared = self._cluster_state.shared
        steps = before + per_round
        if "steps" in shared:  # the State counts the steps of committed rounds; failed rounds count too
            steps = whole_steps(shared["steps"]) + totals.failed_rounds * per_round
        self._sink.emit(self.accounting.round_finished(steps, len(self.islands), self.virtual_time_s))
        if self._is_due(before, self._setup.evaluate_every):
            self._evaluate()

    def _is_due(self, before: int, rounds: int) -> bool:
        """Whether the run is over, or has passed a multiple of the steps of so many rounds."""
        now = self.steps_taken
        return now >= self.steps or passed_multiple(before, now, rounds * self.algorithm.steps_per_round)

    def _progress(self) -> Progress:
        """The mean progress of the islands within the round."""
        steps = fmean(island.replica.steps_taken for island in self.islands.values())
        return Progress(phase="training", done=int(min(steps, self.steps)), total=self.steps)

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """The parts of a checkpoint. Between two rounds only."""
        engine = {**self.accounting.to_parts(), "batched_compute": self._pool.to_part(), "positions": self._work.data.to_parts()}
        return self._cluster_state.parts(engine)

    def restore(self, load: Callable[[str, Any], Any]) -> None:
        """Restores a checkpoint. `load(part, like)` returns a part, with the types of `like`."""
        engine = load("engine", None)
        self.accounting.from_parts(engine)
        self._pool.from_part(engine["batched_compute"])
        self._work.data.from_parts(engine["positions"])
        self._cluster_state.restore(engine, load)
