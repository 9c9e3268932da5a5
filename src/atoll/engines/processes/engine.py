"""Islands that are processes: the engine of one of them. All run the same text, each with its own rank.

Every round, this process runs the algorithm's coroutine: it computes itself, and a thread of its own exchanges with the others.
What it did it writes down and leaves for the first rank, which is one round behind in reading, so that nobody waits for the
books. The first rank alone reports and judges; all of them save, each what it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.algorithms.fsdp import FSDP
from atoll.core.errors import ExchangeFailed, TrainingDiverged
from atoll.core.events import LimitSet, Progress, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Batches, HoldsWeights, Owner, Sink, Work, fields_owned, whole_steps
from atoll.core.pytree import recycle, trees
from atoll.engines.accounting import MAX_SKIPPED, RunAccounting
from atoll.engines.data_positions import DataPositions
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.device_group import DeviceGroup
from atoll.engines.processes.fsdp import FsdpDevice, ShardedModel
from atoll.engines.processes.island_role import (
    CheckpointPart,
    IslandRole,
    PartLoader,
    ShardSlice,
    SingleDevice,
    check_sliced,
    gathered,
)
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.process_group import RankContext
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.processes.store_messages import StoreMessages
from atoll.engines.replicated_state import given, pending_tokens, shared_fields, trees_to_device, with_shared
from atoll.engines.round_record import EventAggregator, RoundRecord
from atoll.engines.wall_clock import ExchangeTimeout, WallClock
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import check_exchange_dtype

_ALIVE_S = 0.5  # between two signs of life


class ProcessEngine:
    """Runs one algorithm, as one of many processes.

    Args:
        algorithm: what each island does.
        world: this process among all.
        params: the weights to begin with, the same everywhere.
        batches: the data; process i reads shard i, or i modulo the number of shards where there are fewer.
        make_replica: makes process i's replica, with a fresh optimizer.
        make_sharded: makes a model that FSDP2 cuts over these devices, where the algorithm inside islands is FSDP.
        evaluate: judges the global weights, with the buffers of the first process.
        sink: takes events, on the first rank.
        steps: inner steps that each island takes in all.
        inside: what the devices of each island do together; none if an island is one device.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        save: writes a checkpoint, together with all others; none saves nothing.
        save_every: rounds between checkpoints; the last round is always saved.
        limit: of exchanges.
        pause_s: so long this process sleeps for each batch besides computing it.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm[Any],
        world: RankContext,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        evaluate: Callable[[Tree, Mapping[str, torch.Tensor]], Mapping[str, float]],
        sink: Sink,
        steps: int,
        inside: Algorithm[Any] | None = None,
        make_sharded: Callable[[DeviceMesh], ShardedModel] | None = None,
        evaluate_every: int = 1,
        save: Callable[[ProcessEngine], None] | None = None,
        save_every: int = 1,
        limit: ExchangeTimeout | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.algorithm, self.world, self.steps = algorithm, world, steps
        self.accounting = RunAccounting(
            world.size // world.devices_per_island, world.devices_per_island if inside is not None else 0, real=True
        )
        self.clock = WallClock()
        self.round = self.steps_taken = 0
        self._limit = limit or ExchangeTimeout()
        self._began_s = 0.0
        """What the clock shows when this process begins, or goes on."""
        self._told_s: float | None = None
        """The limit that was last reported."""
        self._evaluate, self._sink, self._save = evaluate, sink, save
        self._evaluate_every, self._save_every = evaluate_every, save_every
        self._layout = params.layout
        self._clerk = EventAggregator(self.accounting, world.devices_per_island, inside=inside is not None, sink=sink)
        self._journal = StoreMessages(world, self._clerk)
        self._dealing = DataPositions(batches)
        self._diary = RoundRecord()
        self._handed_out = self._read = self._uncommitted = self._skipped_in_a_row = 0
        self._seen_s = time.monotonic()
        sharded = make_sharded is not None and isinstance(inside, FSDP)
        model = make_sharded(self._mesh(params)) if make_sharded is not None and sharded else make_replica(world.rank)
        self._line = CommunicationThread(model.device)
        self.accounting.counts_device_bytes = not sharded  # what FSDP2 sends, only torch knows
        # Through the diary of the moment: a new one is begun every round.
        self.peers = ProcessPeers(
            world.counterparts,
            self._line,
            self._hand_out,
            params.layout,
            clock=self.clock,
            timeout=self._limit,
            on_exchange=lambda meeting: self._diary.exchanges.append(meeting),  # noqa: PLW0108, each round has another diary
            on_similarity=lambda likeness: self._diary.similarities.append(likeness),  # noqa: PLW0108
            last=True,  # a round that fails ends the run: nobody goes back to its beginning
        )
        self._seat = self._seated(model, inside, params, pause_s)
        self._state = algorithm.init(self._seat.share(params).copy(), self.peers)
        self._load_held()

    def _mesh(self, params: Tree) -> DeviceMesh:
        return self.world.device_mesh(params.flat.device.type, self._limit.timeout_s)

    def _seated(
        self, model: LocalReplica | ShardedModel, inside: Algorithm[Any] | None, params: Tree, pause_s: float
    ) -> IslandRole:
        self._dealing.check_readers(self.world.size, self.algorithm, inside)
        for one in (self.algorithm, inside):
            check_exchange_dtype(one, params.layout)
        if inside is not None:
            check_sliced(self.algorithm)
        common: dict[str, Any] = {"deal": self._deal, "diary": lambda: self._diary, "clock": self.clock}
        model.stopped = self._sign_of_life
        if isinstance(model, ShardedModel):
            return FsdpDevice(model, self.world, params, pause_s=pause_s, **common)
        mine = ProcessReplica(model, clock=self.clock, on_computed=self._computed, pause_s=pause_s, where=self._where)
        if inside is None:
            return SingleDevice(model, mine, self.world.rank)
        return DeviceGroup(
            inside, model, mine, self.world, self._line, params, limit=ExchangeTimeout(self._limit.fixed_s), **common
        )

    # -------------------------------------------------------------------------------------------------------- the whole run

    def run(self, warm_start_tokens: int = 0) -> RunFinished | None:
        """All rounds that remain. The first rank's figures; none elsewhere."""
        self.world.barrier()
        self.clock.set(self._began_s)  # all at the same moment
        self._clerk.start(self.clock.now_s())
        self._tell_limit()
        if self.round == 0:
            self._judge()
        while not self.over:
            self._play_round()
            self._close_round()
        self.check_digests()
        params = self.params()
        if not self.world.is_rank_zero:
            return None
        finished = self.accounting.finished(self.clock.now_s(), warm_start_tokens, params.digest())
        self._sink.emit(finished)
        return finished

    @property
    def over(self) -> bool:
        return self.steps_taken >= self.steps

    @property
    def limit_s(self) -> float:
        return self._limit.timeout_s

    def params(self) -> Tree:
        """The global weights. All processes ask for them together."""
        if "params" in shared_fields(self._state):
            return self._seat.whole(self._state.params)
        assert isinstance(self.algorithm, HoldsWeights)
        mine = self._state.params
        # Replicas hold the very same, unless they look ahead or something was lost on the way, or in the module.
        if self.algorithm.held(self._state) is mine and all(piece.dtype == mine.flat.dtype for piece in self._layout.pieces):
            return self._local().params()
        return gathered(self._line, self.world.counterparts, mine, self._layout)

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the module keeps besides its weights."""
        return self._seat.replica.buffers()

    def close(self, *, wait: bool = True) -> None:
        """The line takes nothing more on. After a failure it is not waited for: it may hang in an exchange."""
        self._line.close(wait=wait)

    # ------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> None:
        before = self._state
        self._handed_out = self._read = 0
        coroutine = self.algorithm.round(given(before), self._seat.trained(), self.peers)
        after = self._line.run(coroutine)
        if self.peers.in_background:
            raise ExchangeFailed(f"rank {self.world.rank} leaves round {self.round} with a flight open. Await it within the round.")
        self._count(after)
        recycle([before, *self.peers.results], [after])
        self.peers.results.clear()
        self._state = after
        if not after.params.is_finite():
            raise TrainingDiverged(
                f"the global weights are no longer finite after round {self.round}, though every loss was. The run stops; what was "
                f"saved before this round stands. Lower the learning rates, the outer one too, or set train.clip_norm."
            )

    def _count(self, after: Any) -> None:
        """What went into this round's update."""
        useless = next((m.unusable for m in reversed(self._diary.exchanges) if m.what in ("mean", "reduce_scatter")), False)
        waiting, read = pending_tokens(after), self._uncommitted + self._seat.tokens(self._read)
        self._diary.tokens = 0 if useless else read - waiting
        self._uncommitted = waiting
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if useless else 0
        if self._skipped_in_a_row == MAX_SKIPPED:
            raise TrainingDiverged(
                f"{MAX_SKIPPED} updates in a row were skipped: gradients were not finite, or nobody had any. Look at the data, or "
                f"lower the learning rate."
            )

    def _close_round(self) -> None:
        before, per_round = self.steps_taken, self.algorithm.steps_per_round
        shared = shared_fields(self._state)
        self.steps_taken = whole_steps(shared["steps"]) if "steps" in shared else before + per_round
        self._journal.leave(self._diary, self.round, self.steps_taken, self.clock.now_s())
        self._diary = RoundRecord()
        self.round += 1
        self._tell_limit()
        if self.over or self._passed(before, self._evaluate_every):
            self._judge()
        if self._save is not None and (self.over or self._passed(before, self._save_every)):
            self._journal.enter_all()
            self.check_digests()
            self._save(self)
            self._limit.restart()

    def _passed(self, before: int, rounds: int) -> bool:
        """Whether the run has just passed a multiple of so many rounds' steps."""
        interval = rounds * self.algorithm.steps_per_round
        return self.steps_taken // interval > before // interval

    def _judge(self) -> None:
        self._journal.enter_all()
        params = self.params()

        def judge() -> None:
            metrics = self._evaluate(params, self.buffers())
            self._sink.emit(self.accounting.evaluated(metrics, self.clock.now_s()))

        self._journal.first_does(self.round, judge)
        self._limit.restart()

    def check_digests(self) -> None:
        """Islands that agreed hold the same bits."""
        held = self._local().weights.read() if isinstance(self.algorithm, HoldsWeights) else None
        digests = [tree.digest() for tree in ([held] if held is not None else trees(shared_fields(self._state)))]
        self._journal.compare(self.round, digests)

    def _local(self) -> LocalReplica:
        """The replica, where it has the whole of the weights."""
        assert isinstance(self._seat, SingleDevice), "an algorithm that keeps weights in replicas has islands of one device"
        return self._seat.replica

    def _load_held(self) -> None:
        """Where replicas keep the weights from round to round, they are gathered."""
        if isinstance(self.algorithm, HoldsWeights):
            mine = self.algorithm.held(self._state)
            self._local().load(gathered(self._line, self.world.counterparts, mine, self._layout))

    # ------------------------------------------------------------------------------------------------------- what is asked for

    def _hand_out(self, steps: int, batches: int, pieces: int) -> Work:
        schedule = self.steps_taken + self._handed_out
        self._handed_out += steps
        if not isinstance(self._seat, SingleDevice):  # its devices are dealt theirs when they ask
            readers = range(
                self.world.island * self.world.devices_per_island, (self.world.island + 1) * self.world.devices_per_island
            )
            return Work(shard=readers[0], start=0, schedule=schedule, examples=self._dealing.examples(readers), pieces=pieces)
        return self._deal(batches, pieces, schedule)

    def _deal(self, batches: int, pieces: int, schedule: int) -> Work:
        """Where several processes share a shard, all of them ask alike, so each knows what the others are dealt."""
        shards, mine = len(self._dealing.positions), self.world.rank
        dealt = {r: self._dealing.assign(r, batches, pieces, schedule) for r in range(mine % shards, self.world.size, shards)}
        return dealt[mine]

    def _computed(self, stretch: Any) -> None:
        self._diary.computed.append(stretch)
        self._read += stretch.tokens

    def _where(self, step: int) -> str:
        return f"island {self.world.island} in round {self.round}, at inner step {self.steps_taken + step}"

    def _sign_of_life(self) -> bool:
        """Asked before each step. Nobody has to stop."""
        if self.world.is_rank_zero and time.monotonic() - self._seen_s > _ALIVE_S:
            self._seen_s = time.monotonic()
            done = min(self.steps, self._seat.replica.steps_taken)
            self._sink.emit(Progress(phase="training", done=done, total=self.steps))
        return False

    def _tell_limit(self) -> None:
        """Reported when it is first known, and when it has grown a lot."""
        limit_s = self._limit.timeout_s
        if self.world.is_rank_zero and (self._told_s is None or not self._told_s / 2 < limit_s < self._told_s * 2):
            self._told_s = limit_s
            self._sink.emit(LimitSet(limit_s=limit_s, why=self._limit.reason))

    # -------------------------------------------------------------------------------------------------------------- saving

    def plain(self) -> dict[str, Any]:
        """What the first rank knows, and what all of them must know to go on. Between two rounds only."""
        progress = {"round": self.round, "steps": self.steps_taken, "wall_time_s": self.clock.now_s()}
        # Of shards that nobody reads now the first rank knows the position; of others those who read them do.
        return {**self.accounting.to_parts(), **progress, "positions": self._dealing.to_parts()}

    def parts(self) -> dict[str, CheckpointPart]:
        """What this process holds, by part. Parts of one name on several processes are slices of a whole, or equal."""
        world, rank = self.world, self.world.rank
        position = self._dealing.positions[rank % len(self._dealing.positions)].as_integer_ratio()
        own = {"uncommitted": self._uncommitted, "skipped_in_a_row": self._skipped_in_a_row}
        return {
            f"read-{rank}": CheckpointPart({"position": position}),
            "shared": CheckpointPart(shared_fields(self._state), ShardSlice(world.device, world.devices_per_island, "devices")),
            "sharded": CheckpointPart(
                fields_owned(self._state, Owner.SHARDED),
                ShardSlice(world.island, world.size // world.devices_per_island, "islands"),
            ),
            f"own-{rank}": CheckpointPart({**own, "state": fields_owned(self._state, Owner.OWN)}),
            **self._seat.parts(),
        }

    def restore(self, plain: Mapping[str, Any], load: PartLoader) -> None:
        """Go on from a checkpoint, which another number of processes may have saved."""
        self.round, self.steps_taken = plain["round"], plain["steps"]
        self._began_s = plain["wall_time_s"]
        self._restore_books(plain)
        here = self.parts()
        state = {name: load(name, here[name]) for name in ("shared", "sharded")}
        own = load(f"own-{self.world.rank}", here[f"own-{self.world.rank}"])
        if own is not None:
            self._uncommitted, self._skipped_in_a_row = own["uncommitted"], own["skipped_in_a_row"]
        self._restore_positions(plain, load)
        device = self._seat.replica.device
        rest = {**(state["sharded"] or {}), **(own["state"] if own is not None else {})}
        self._state = with_shared(self._state, {**trees_to_device(state["shared"], device), **trees_to_device(rest, device)})
        self._seat.restore(load)
        self._load_held()

    def _restore_positions(self, plain: Mapping[str, Any], load: PartLoader) -> None:
        """In each shard, as its first reader left it; else as the first rank knew it, while nobody read it."""
        self._dealing.from_parts(plain["positions"])
        for shard in range(len(self._dealing.positions)):
            read = load(f"read-{shard}", CheckpointPart({"position": (0, 1)}))
            if read is not None:
                self._dealing.set(shard, read["position"])

    def _restore_books(self, plain: Mapping[str, Any]) -> None:
        """Islands that have gone are forgotten, and new ones begin with nothing."""
        fresh = RunAccounting(
            len(self.accounting.ledgers), self.world.devices_per_island if self.accounting.device_ledgers else 0, real=True
        )
        self.accounting.from_parts(plain)
        self.accounting.ledgers = [*self.accounting.ledgers, *fresh.ledgers[len(self.accounting.ledgers) :]][: len(fresh.ledgers)]
        self.accounting.device_ledgers = [
            *self.accounting.device_ledgers,
            *fresh.device_ledgers[len(self.accounting.device_ledgers) :],
        ][: len(fresh.device_ledgers)]
