"""The engine of one rank. All ranks run the same code, each on its own device.

In every round this rank runs the algorithm's coroutine: the calling thread computes, and a communication thread exchanges with the
other ranks. The rank posts a record of the round for rank 0, which alone reports and evaluates. All ranks save, each its own parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.algorithms.zero import FSDP
from atoll.core.errors import ExchangeFailed
from atoll.core.events import LimitSet, Progress, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import trees
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, Work, fields_owned, whole_steps
from atoll.engines.accounting import RunAccounting, diverged_weights
from atoll.engines.checkpoints import CheckpointPart, PartLoader, ShardSlice
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.processes.fsdp import FsdpDevice, ShardedModel
from atoll.engines.processes.intra_island import IslandDevice, IslandRole, UpdateCounter, check_sliceable, restored_state
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.rank_context import RankContext
from atoll.engines.round_record import EventAggregator, RoundRecord, WallClock, last_update
from atoll.engines.shared_and_sharded_state import donated, owned, pending_tokens, shared_fields
from atoll.engines.timed_replica import ProcessReplica
from atoll.engines.training_setup import DataPositions, TrainingSetup, passed_multiple
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import check_exchange_dtype

_PROGRESS_S = 0.5  # between two progress events
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProcessSetup(TrainingSetup):
    """What a rank trains. Only rank 0 evaluates and emits events; all ranks save together."""

    make_sharded: Callable[[DeviceMesh], ShardedModel] | None = None
    """Makes a model that FSDP2 shards over these devices, for inside=FSDP."""
    pause_s: float = 0.0
    """The rank sleeps this long for each batch, to emulate a slower machine."""


class StoreMessages:
    """Records for rank 0, barriers around its evaluations, and digests that islands compare.

    Rank 0 reads the records of a round one round later, so that no rank waits for the accounting.
    """

    def __init__(self, context: RankContext, aggregator: EventAggregator) -> None:
        self._context, self._aggregator = context, aggregator
        self._unread: list[tuple[int, int, float]] = []
        """Rounds whose records rank 0 has not read: their numbers, the steps after them, and their ends."""
        self._keys: dict[str, str] = {}
        """The last key of each kind that this rank has set."""

    def post_record(self, record: RoundRecord, round: int, steps: int, now_s: float) -> None:
        """A round is over. Rank 0 adds the rounds before it: ranks may still have to post this one's records."""
        self._context.store.set(f"record/{round}/{self._context.rank}", record.to_json())
        if self._context.is_rank_zero:
            self.add_rounds()
            self._unread.append((round, steps, now_s))

    def add_rounds(self) -> None:
        """Rank 0 adds all rounds that it has not read."""
        for round, steps, now_s in self._unread:
            keys = [f"record/{round}/{rank}" for rank in range(self._context.size)]
            records = [RoundRecord.from_json(self._context.get(key, of=rank)) for rank, key in enumerate(keys)]
            self._aggregator.add_round(records, steps, now_s)
            for key in keys:
                self._context.store.delete_key(key)
        self._unread.clear()

    def wait_for_rank_zero(self, round: int) -> None:
        """The other ranks wait here until rank 0 has evaluated: the timeout of their next exchange does not allow for it."""
        if self._context.is_rank_zero:
            self._replace("evaluated", str(round), "")
        else:
            self._context.get(f"evaluated/{round}", of=0)

    def compare_digests(self, round: int, digests: Sequence[str]) -> None:
        """Check that each device holds the same bits as its counterparts."""
        context = self._context
        self._replace("digests", f"{round}/{context.rank}", " ".join(digests))
        counterparts = range(context.device, context.size, context.devices_per_island)
        texts = [context.get(f"digests/{round}/{rank}", of=rank) for rank in counterparts]
        diverged = [island for island, text in enumerate(texts) if text != texts[0]]
        if diverged:
            raise ExchangeFailed(
                f"islands {diverged} hold other weights than island 0 after round {round}, though they agreed on them. An "
                f"algorithm must compute shared fields from shared fields and results of exchanges only; or a machine computes "
                f"wrongly. Earlier checkpoints are valid."
            )

    def _replace(self, kind: str, key: str, text: str) -> None:
        """Set a value and delete the last one of its kind: all ranks have read that, since they have exchanged a round since."""
        self._context.store.set(f"{kind}/{key}", text)
        before, self._keys[kind] = self._keys.get(kind, key), key
        if before != key:
            self._context.store.delete_key(f"{kind}/{before}")


class ProcessEngine:
    """Runs an algorithm as one of many ranks. `inside` is the algorithm of the devices of an island; None if it is one device."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        context: RankContext,
        setup: ProcessSetup,
        *,
        inside: Algorithm[Any] | None = None,
        timeout: ExchangeTimeout | None = None,
    ) -> None:
        self.algorithm, self.context, self.steps = algorithm, context, setup.steps
        self.accounting = RunAccounting(context.islands, context.devices_per_island if inside is not None else 0, real=True)
        self.clock = WallClock()
        self.round = self.steps_taken = 0
        self._inside, self._layout, self._sink = inside, setup.params.layout, setup.sink
        self._evaluate, self._evaluate_every = setup.evaluate, setup.evaluate_every
        self._save_every = setup.save_every
        self._timeout = timeout or ExchangeTimeout()
        self._start_s = 0.0
        """The time of the run when this process starts or resumes."""
        self._progress_s = time.monotonic()
        self.own_loss_text = "no loss yet"
        """The mean loss of this rank in the last round in which it trained."""
        self._aggregator = EventAggregator(self.accounting, context.devices_per_island, inside=inside is not None, sink=self._sink)
        self._messages = StoreMessages(context, self._aggregator)
        self._positions = DataPositions(setup.batches)
        self._record, self._counter = RoundRecord(), UpdateCounter()
        self._assigned_steps = 0
        self._model = self._make_model(setup)
        self._thread = CommunicationThread(self._model.device)
        self.peers = ProcessPeers(
            context.counterparts,
            self._thread,
            self._assign_work,
            self._layout,
            clock=self.clock,
            timeout=self._timeout,
            on_exchange=self._record.exchanges.append,
            on_similarity=self._record.similarities.append,
        )
        self._role = self._make_role(self._model, setup)
        self._state = algorithm.init(self._role.shard(setup.params).copy(), self.peers)
        self._load_held()

    def _make_model(self, setup: ProcessSetup) -> LocalReplica | ShardedModel:
        if setup.make_sharded is None or not isinstance(self._inside, FSDP):
            return setup.make_replica(self.context.rank)
        self.accounting.counts_device_bytes = False  # torch does not tell what FSDP2 sends
        return setup.make_sharded(self.context.device_mesh(setup.params.flat.device.type, self._timeout.timeout_s))

    def _make_role(self, model: LocalReplica | ShardedModel, setup: ProcessSetup) -> IslandRole:
        self._positions.check_readers(self.context.size, self.algorithm, self._inside)
        for one in (self.algorithm, self._inside):
            check_exchange_dtype(one, self._layout)
        if self._inside is not None:
            check_sliceable(self.algorithm)
        model.on_step = self._report_progress
        on_computed, assign = self._record.computed.append, self._assign_batches
        replica = ProcessReplica(model, clock=self.clock, on_computed=on_computed, pause_s=setup.pause_s, where=self._describe)
        if isinstance(model, ShardedModel):
            return FsdpDevice(model, replica, self.context, setup.params, assign, self._record)
        if self._inside is None:
            return IslandRole(model, replica, f"replica-{self.context.rank}")
        timeout = ExchangeTimeout(self._timeout.fixed_s)
        given = self._inside, model, replica, self.context, self._thread, setup.params
        return IslandDevice(*given, assign=assign, record=self._record, clock=self.clock, timeout=timeout)

    # -------------------------------------------------------------------------------------------------------- the whole run

    def train(self) -> Iterator[None]:
        """Run the remaining rounds. Yields when a checkpoint is due: until it is resumed, all ranks can be saved."""
        self.context.barrier()
        self.clock.set(self._start_s)  # on all ranks at the same moment
        self._aggregator.start(self.clock.now_s())
        self._report_timeout()
        if self.round == 0:
            self._run_evaluation()
        while not self.finished:
            before = self.steps_taken
            self._train_round()
            self._finish_round()
            if self._save_every is not None and self._is_due(before, self._save_every):
                self._messages.add_rounds()
                self._compare_digests()
                yield
                self._timeout.restart()

    def finish(self, warm_start_tokens: int = 0) -> RunFinished | None:
        """The run's figures on rank 0, and None on other ranks."""
        self._compare_digests()
        params = self.params
        if not self.context.is_rank_zero:
            return None
        finished = self.accounting.finished(self.clock.now_s(), warm_start_tokens, params.digest())
        self._sink.emit(finished)
        return finished

    @property
    def finished(self) -> bool:
        return self.steps_taken >= self.steps

    @property
    def params(self) -> Tree:
        """The global weights. All ranks call this together."""
        if "params" in shared_fields(self._state):
            return self._role.gather(self._state.params)
        assert isinstance(self.algorithm, HoldsWeights)
        mine = self._state.params
        # Replicas hold the same weights, unless they look ahead, or the exchange or the module has a lower precision.
        if self.algorithm.held(self._state) is mine and all(piece.dtype == mine.flat.dtype for piece in self._layout.pieces):
            return self._whole_replica().params()
        return self.peers.gather_slices(mine)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers."""
        return self._model.buffers()

    def close(self, *, wait: bool = True) -> None:
        """Close the communication thread. After a failure, do not wait for it: it may hang in an exchange."""
        self._thread.close(wait=wait)

    # ------------------------------------------------------------------------------------------------------------- a round

    def _train_round(self) -> None:
        before = self._state
        self._assigned_steps = 0
        # A round that fails ends the run: its State is never read again.
        after = owned(self._thread.run(self.algorithm.round(donated(before, shared=True), self._role.replica, self.peers)))
        record = self._record
        read = self._role.committed_tokens(sum(span.tokens for span in record.computed))
        update, pending = last_update(record.exchanges), pending_tokens(after)
        if update is not None and update.lacks_weight and any(trees(fields_owned(after, Owner.OWN))):
            # No island sent anything, and each keeps what it has trained: its tokens belong to a later update.
            update, pending = None, self._counter.pending_tokens + read
        record.tokens = self._counter.count(update, read, pending)
        self.peers.end_round(before, after, f"rank {self.context.rank} leaves round {self.round}")
        self._state = after
        if not after.params.is_finite():
            raise diverged_weights(self.round)

    def _finish_round(self) -> None:
        before, shared = self.steps_taken, shared_fields(self._state)
        self.steps_taken = whole_steps(shared["steps"]) if "steps" in shared else before + self.algorithm.steps_per_round
        self._messages.post_record(self._record, self.round, self.steps_taken, self.clock.now_s())
        losses = [span.loss for span in self._record.computed]
        self.own_loss_text = f"loss {fmean(losses):.4g} on this rank" if losses else self.own_loss_text
        self._record.clear()
        self.round += 1
        self._report_timeout()
        if self._is_due(before, self._evaluate_every):
            self._run_evaluation()

    def _is_due(self, before: int, rounds: int) -> bool:
        """Whether the run is over, or has passed a multiple of the steps of so many rounds."""
        return self.finished or passed_multiple(before, self.steps_taken, rounds * self.algorithm.steps_per_round)

    def _run_evaluation(self) -> None:
        self._messages.add_rounds()
        params = self.params
        if self.context.is_rank_zero:
            metrics = self._evaluate(params, self._model.buffers())
            self._sink.emit(self.accounting.evaluated(metrics, self.clock.now_s()))
        self._messages.wait_for_rank_zero(self.round)
        self._timeout.restart()

    def _compare_digests(self) -> None:
        """Check that all islands hold the same bits."""
        held = isinstance(self.algorithm, HoldsWeights)
        compared = [self._whole_replica().weights.read()] if held else trees(shared_fields(self._state))
        self._messages.compare_digests(self.round, [tree.digest() for tree in compared])

    def _whole_replica(self) -> LocalReplica:
        """This rank's replica, which holds the whole weights."""
        assert self._inside is None, "an algorithm that keeps weights in replicas has islands of one device"
        assert isinstance(self._model, LocalReplica)
        return self._model

    def _load_held(self) -> None:
        """Load the gathered weights into a replica that keeps them from round to round."""
        if isinstance(self.algorithm, HoldsWeights):
            self._whole_replica().load(self.peers.gather_slices(self.algorithm.held(self._state)))

    # ------------------------------------------------------------------------------------------------------- during a round

    def _assign_work(self, steps: int, batches: int, pieces: int) -> Work:
        schedule = self.steps_taken + self._assigned_steps
        self._assigned_steps += steps
        if self._inside is None:
            return self._assign_batches(batches, pieces, schedule)
        first = self.context.island * self.context.devices_per_island
        examples = self._positions.examples(range(first, first + self.context.devices_per_island))
        # The devices are assigned their batches when they ask for them inside the island.
        return Work(shard=first, start=0, schedule=schedule, examples=examples, pieces=pieces)

    def _assign_batches(self, batches: int, pieces: int, schedule: int) -> Work:
        """Ranks that share a shard all ask for the same, so each knows what the others are assigned."""
        shards, mine = len(self._positions.positions), self.context.rank
        readers = range(mine % shards, self.context.size, shards)
        return {rank: self._positions.assign(rank, batches, pieces, schedule) for rank in readers}[mine]

    def _describe(self, step: int) -> str:
        return f"island {self.context.island} in round {self.round}, at inner step {self.steps_taken + step}"

    def _report_progress(self) -> None:
        if time.monotonic() - self._progress_s > _PROGRESS_S:
            self._progress_s = time.monotonic()
            done = min(self.steps, self._model.steps_taken)
            # Rank 0 shows the figures of all ranks.
            note = "" if self.context.is_rank_zero else self.own_loss_text
            self._sink.emit(Progress(phase="training", done=done, total=self.steps, note=note))

    def _report_timeout(self) -> None:
        """Report the timeout at first, and when it has changed by a factor of 2."""
        if self.context.is_rank_zero and self._timeout.is_news():
            self._sink.emit(LimitSet(limit_s=self._timeout.timeout_s, why=self._timeout.reason))

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def metadata(self) -> dict[str, Any]:
        """The figures that rank 0 keeps, and the progress that all ranks need. Between two rounds only."""
        progress = {"round": self.round, "steps": self.steps_taken, "wall_time_s": self.clock.now_s()}
        # Rank 0 knows the positions of shards that no rank reads; the ranks that read a shard save its position themselves.
        return {**self.accounting.to_parts(), **progress, "positions": self._positions.to_parts()}

    def parts(self) -> dict[str, CheckpointPart]:
        """This rank's parts of a checkpoint. Parts of one name on several ranks are slices of a whole, or equal."""
        context, rank = self.context, self.context.rank
        position = self._positions.positions[rank % len(self._positions.positions)].as_integer_ratio()
        across_devices = ShardSlice(context.device, context.devices_per_island, "devices")
        across_islands = ShardSlice(context.island, context.islands, "islands")
        return {
            f"read-{rank}": CheckpointPart({"position": position}),
            "shared": CheckpointPart(shared_fields(self._state), across_devices),
            "sharded": CheckpointPart(fields_owned(self._state, Owner.SHARDED), across_islands),
            f"own-{rank}": CheckpointPart({**vars(self._counter), "state": fields_owned(self._state, Owner.OWN)}),
            **self._role.parts(),
        }

    def restore(self, metadata: Mapping[str, Any], load: PartLoader) -> None:
        """Continue from a checkpoint, which another number of ranks may have saved."""
        self.round, self.steps_taken = metadata["round"], metadata["steps"]
        self._start_s = metadata["wall_time_s"]
        self._restore_accounting(metadata)
        self._restore_positions(metadata["positions"], load)
        here, own = self.parts(), f"own-{self.context.rank}"
        saved = load(own, here[own])
        if saved is not None:
            self._counter.restore(saved)
        parts = [load(name, here[name]) for name in ("shared", "sharded")]
        self._state = restored_state(self._state, parts, saved, self._model.device)
        self._role.restore(load)
        self._load_held()

    def _restore_accounting(self, metadata: Mapping[str, Any]) -> None:
        """Islands that are gone are dropped, and new ones start at zero."""
        ledgers, device_ledgers = self.accounting.ledgers, self.accounting.device_ledgers
        self.accounting.from_parts(metadata)
        self.accounting.ledgers = _resized(self.accounting.ledgers, ledgers)
        self.accounting.device_ledgers = _resized(self.accounting.device_ledgers, device_ledgers)

    def _restore_positions(self, saved: Sequence[tuple[int, int]], load: PartLoader) -> None:
        """The position in each shard is its first reader's; without a reader, the one that rank 0 saved."""
        read = [load(f"read-{shard}", CheckpointPart({"position": (0, 1)})) for shard in range(len(saved))]
        self._positions.from_parts(old if new is None else new["position"] for old, new in zip(saved, read, strict=True))


def _resized(saved: Sequence[T], fresh: Sequence[T]) -> list[T]:
    return [*saved, *fresh[len(saved) :]][: len(fresh)]
