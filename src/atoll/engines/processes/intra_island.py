"""The role of this rank in its island: the island's only device, or one device of several.

Where an island has several devices, each of them holds a slice of its weights. To the algorithm between islands a device is a
Replica of that slice, which it exchanges with its counterparts, the same device of the other islands. So no device sends more than
its slice over the slow links. `train(n)` is n steps of the algorithm inside the island. Weights that come from an exchange between
islands come in slices: the devices gather them, and the algorithm inside takes them over by its own `rebase`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, Replica, Work, fields_owned
from atoll.engines.accounting import count_in_a_row
from atoll.engines.checkpoints import CheckpointPart, PartLoader, ShardSlice
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.rank_context import RankContext
from atoll.engines.round_record import ExchangeRecord, RoundRecord, WallClock, last_update
from atoll.engines.shared_and_sharded_state import donated, owned, pending_tokens, shared_fields, trees_to_device, with_shared
from atoll.engines.timed_replica import ProcessReplica
from atoll.engines.training_setup import TrainingOnlyReplica
from atoll.replica.local_replica import LocalReplica
from atoll.runs.run_settings import with_rate_at


@dataclass
class UpdateCounter:
    """Counts the tokens that go into updates, and the updates skipped in a row."""

    pending_tokens: int = 0
    skipped_in_a_row: int = 0

    def count(self, update: ExchangeRecord | None, read_tokens: int, pending: int, where: str = "") -> int:
        """A round has read tokens, and leaves some pending. Returns how many went into its update. See `count_in_a_row`."""
        skipped = update is not None and update.unusable
        committed = 0 if skipped else self.pending_tokens + read_tokens - pending
        self.pending_tokens = pending
        self.skipped_in_a_row = count_in_a_row(self.skipped_in_a_row, skipped, where)
        return committed

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from `vars` of another counter, which other values may accompany."""
        self.pending_tokens, self.skipped_in_a_row = saved["pending_tokens"], saved["skipped_in_a_row"]


class IslandRole:
    """This rank's part in its island. Of this class is the only device of an island; a device of several overrides the methods.

    Args:
        model: what computes on this rank: its state is one part of a checkpoint.
        replica: what the algorithm between islands trains.
        part: name of that part.
    """

    def __init__(self, model: Any, replica: Replica, part: str) -> None:
        self._model, self.replica, self._part = model, replica, part

    def shard(self, params: Tree) -> Tree:
        """The part of these weights that this rank exchanges with its counterparts: all of them, or its slice."""
        return params

    def gather(self, shard: Tree) -> Tree:
        """The whole weights, from the shards of all devices of the island, which call this together."""
        return shard

    def committed_tokens(self, read: int) -> int:
        """The tokens that went into updates since the last call, of which `read` were read."""
        return read

    def parts(self) -> dict[str, CheckpointPart]:
        return {self._part: CheckpointPart(self._model.state())}

    def restore(self, load: PartLoader) -> None:
        state = load(self._part, CheckpointPart(None))
        if state is not None:  # a new island starts with fresh optimizer state
            self._model.restore(state)


class IslandDevice(IslandRole, TrainingOnlyReplica):
    """One of several devices that train an island together. An IslandRole, and the Replica that it trains.

    Args:
        algorithm: what the devices of an island do together.
        replica: the model, as the algorithm inside sees it.
        assign: assigns batches, in pieces, at a position of the schedule.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        model: LocalReplica,
        replica: ProcessReplica,
        context: RankContext,
        thread: CommunicationThread,
        params: Tree,
        *,
        assign: Callable[[int, int, int], Work],
        record: RoundRecord,
        clock: WallClock,
        timeout: ExchangeTimeout,
    ) -> None:
        assert context.island_devices is not None, "an island of one device has no algorithm inside"
        super().__init__(model, self, f"device-{context.rank}")
        self._algorithm, self._device_replica, self._record = algorithm, replica, record
        self._group, self._island, self._rank = context.island_devices, context.island, context.rank
        self._schedule = self._committed = 0
        self._counter = UpdateCounter()
        self._peers = ProcessPeers(
            self._group,
            thread,
            lambda steps, batches, pieces: assign(batches, pieces, self._schedule),
            params.layout,
            clock=clock,
            timeout=timeout,
            on_exchange=record.island_exchanges.append,
        )
        self._dtype = params.flat.dtype
        """Of the weights that are exchanged between islands."""
        self._loaded: Tree | None = None
        """This device's slice of the loaded weights, until training begins."""
        self._state = algorithm.init(params.copy(), self._peers)
        self._load_held()

    # ------------------------------------------------------------------------------------------------ seen from the island

    def shard(self, params: Tree) -> Tree:
        return params.shard(self._group.rank, self._group.size)

    def gather(self, shard: Tree) -> Tree:
        return self._peers.gather_slices(shard)

    def committed_tokens(self, read: int) -> int:
        committed, self._committed = self._committed, 0
        return committed

    def load(self, params: Tree) -> None:
        self._dtype = params.flat.dtype
        self._loaded = (self.params() if self._loaded is None else self._loaded).overlaid(params)

    def params(self) -> Tree:
        if self._loaded is not None:
            return self._loaded.borrow()
        mine: Tree = self._state.params
        if "params" in shared_fields(self._state):
            mine = self.shard(mine)
        return mine.cast(self._dtype).borrow()

    async def train(self, steps: int, work: Work) -> int:
        """Each device is assigned its own data inside; of `work`, only the position on the schedule counts. Returns the tokens of
        this device's updates."""
        before = self._committed
        await self._rebase()
        for step in range(0, steps, self._algorithm.steps_per_round):
            self._schedule = work.schedule + step
            await self._round()
        return self._committed - before

    # ----------------------------------------------------------------------------------------------------------- a round

    async def _rebase(self) -> None:
        """Continue from the loaded weights, unless all devices hold them already."""
        loaded = self._loaded
        if loaded is None:
            return
        self._loaded = None
        differs = not self.params().same_bits(loaded)
        if await self._peers.total(float(differs)) == 0:
            return
        algorithm: Any = self._algorithm
        before, holds = self._state, isinstance(algorithm, HoldsWeights)
        self._state = algorithm.rebase(before, loaded if holds else await self._peers.all_gather(loaded), self._peers)
        pending = pending_tokens(self._state)
        self._record.dropped_tokens += self._counter.pending_tokens - pending
        self._counter.pending_tokens = pending
        if holds:
            self._model.load(await self._peers.all_gather(algorithm.held(self._state)))
        self._peers.recycle(before, self._state)

    async def _round(self) -> None:
        """One round of the algorithm inside, at this position of the schedule."""
        before, record = self._state, self._record
        spans, exchanges = len(record.computed), len(record.island_exchanges)
        algorithm = with_rate_at(self._algorithm, self._schedule)
        self._state = owned(await algorithm.round(donated(before), self._device_replica, self._peers))
        self._peers.end_round(before, self._state, f"rank {self._rank} leaves a round inside its island")
        update = last_update(record.island_exchanges[exchanges:])
        record.island_updates += 1
        if update is not None and update.unusable:
            record.island_skipped.append(update.nonfinite)
        read = sum(span.tokens for span in record.computed[spans:])
        self._committed += self._counter.count(update, read, pending_tokens(self._state), f" inside island {self._island}")

    def _load_held(self) -> None:
        if isinstance(self._algorithm, HoldsWeights):
            self._model.load(self.gather(self._algorithm.held(self._state)))

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def parts(self) -> dict[str, CheckpointPart]:
        own = {**vars(self._counter), "replica": self._model.state(), "state": fields_owned(self._state, Owner.OWN)}
        mine = ShardSlice(self._group.rank, self._group.size, "devices")
        return {
            f"inside-{self._island}-shared": CheckpointPart(shared_fields(self._state)),
            f"inside-{self._island}-sharded": CheckpointPart(fields_owned(self._state, Owner.SHARDED), mine),
            self._part: CheckpointPart(own),
        }

    def restore(self, load: PartLoader) -> None:
        here = self.parts()
        own = load(self._part, CheckpointPart({**here.pop(self._part).value, "replica": None}))
        if own is None:  # a new island starts with fresh optimizer state, at the weights of the other islands
            return
        self._state = restored_state(self._state, [load(name, part) for name, part in here.items()], own, self._model.device)
        self._counter.restore(own)
        self._model.restore(own["replica"])
        self._load_held()


def restored_state(state: Any, parts: Iterable[Mapping[str, Any] | None], own: Mapping[str, Any] | None, device: str) -> Any:
    """The State with the fields of these parts of a checkpoint, and with those of this rank's own part. None: it has no such."""
    fields = {name: value for part in parts for name, value in (part or {}).items()}
    fields.update({} if own is None else own["state"])
    return with_shared(state, trees_to_device(fields, device))


def check_sliceable(algorithm: Any) -> None:
    """Refuses an algorithm between islands that needs the whole weights on each device."""
    if getattr(algorithm, "pruned", 0.0):
        raise ConfigError(
            f"algorithm.pruned={algorithm.pruned} with several devices per island: each device exchanges a slice of the weights, "
            f"and a neuron's values may lie in two of them. Use pruned=0, or islands of one device."
        )
    if getattr(algorithm, "split", "contiguous") != "contiguous":
        raise ConfigError(
            f"algorithm.split={algorithm.split} with several devices per island: each device exchanges a slice, which "
            f"may have no tensor of a fragment. Use split=contiguous, or islands of one device."
        )
