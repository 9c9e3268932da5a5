"""One device of an island that has several: it trains the island together with the others, and speaks for a slice of its weights.

To the algorithm between islands each device is a Replica of that slice, which it exchanges with its counterparts, the same device
of the other islands; nobody sends more than that over the slow lines. `train(n)` is n steps of the algorithm inside the island.
Weights that islands agreed on come in by slices and are put together inside, then taken over by the algorithm's own `rebase`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Gradient, HoldsWeights, Owner, Replica, Weigh, Work, fields_owned
from atoll.core.pytree import recycle
from atoll.engines.accounting import MAX_SKIPPED
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.island_role import CheckpointPart, PartLoader, ShardSlice, gathered
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.process_group import RankContext
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.replicated_state import given, pending_tokens, shared_fields, trees_to_device, with_shared
from atoll.engines.round_record import RoundRecord
from atoll.engines.wall_clock import ExchangeTimeout, WallClock
from atoll.replica.local_replica import LocalReplica
from atoll.runs.two_level import at_position


class DeviceGroup:
    """This process's device among those of its island. A seats.IslandRole, and the Replica that islands train.

    Args:
        algorithm: what the devices of an island do together.
        replica: this device's model.
        mine: the same, as the algorithm sees it.
        world: this process among all.
        line: the thread that communicates.
        params: the weights to begin with, as a whole.
        deal: hands out batches, pieces of them, at a position of the schedule.
        diary: the one of the moment.
        clock: of the run.
        limit: of exchanges.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        replica: LocalReplica,
        mine: ProcessReplica,
        world: RankContext,
        line: CommunicationThread,
        params: Tree,
        *,
        deal: Callable[[int, int, int], Work],
        diary: Callable[[], RoundRecord],
        clock: WallClock,
        limit: ExchangeTimeout,
    ) -> None:
        assert world.island_devices is not None, "an island of one device has no inside"
        self.replica = replica
        self._algorithm, self._mine, self._line, self._diary = algorithm, mine, line, diary
        self._wire, self._island, self._layout = world.island_devices, world.island, params.layout
        self._rank = world.rank
        self._schedule = self._uncommitted = self._committed = self._skipped_in_a_row = 0
        self._peers = ProcessPeers(
            world.island_devices,
            line,
            lambda steps, batches, pieces: deal(batches, pieces, self._schedule),
            params.layout,
            clock=clock,
            timeout=limit,
            on_exchange=lambda meeting: diary().island_exchanges.append(meeting),  # noqa: PLW0108 (the diary of the round changes),
        )
        self._dtype = params.flat.dtype
        """Of the weights that came in, and so of those that go out."""
        self._came: Tree | None = None
        """This device's slice of weights that came in, until training begins."""
        self._state = algorithm.init(params.copy(), self._peers)
        self._load_held()

    # ------------------------------------------------------------------------------------------------ seen from the island

    def trained(self) -> Replica:
        return self

    def share(self, params: Tree) -> Tree:
        return params.shard(self._wire.rank, self._wire.size)

    def whole(self, share: Tree) -> Tree:
        return gathered(self._line, self._wire, share, self._layout)

    def tokens(self, read: int) -> int:
        committed, self._committed = self._committed, 0
        return committed

    def load(self, params: Tree) -> None:
        self._dtype, self._came = params.flat.dtype, params

    def params(self) -> Tree:
        if self._came is not None:
            return self._came.copy()
        mine: Tree = self._state.params
        if "params" in shared_fields(self._state):
            mine = self.share(mine)
        return mine.copy().cast(self._dtype)

    async def train(self, steps: int, work: Work) -> None:
        """Where each device reads is dealt out inside; of `work` the position on the schedule counts."""
        await self._take_in()
        for step in range(0, steps, self._algorithm.steps_per_round):
            self._schedule = work.schedule + step
            await self._round()

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        raise ConfigError(
            "an island whose devices have an algorithm of their own (inside) trains, and has no gradient to give. Use an "
            "algorithm between islands that trains, such as DiLoCo, or inside=none."
        )

    # ----------------------------------------------------------------------------------------------------------- a round

    async def _take_in(self) -> None:
        """Go on from the weights that came in, unless all devices hold them already."""
        came = self._came
        if came is None:
            return
        self._came = None
        other = not self.params().same_bits(came)
        if await self._peers.total(float(other)) == 0:
            return
        algorithm: Any = self._algorithm
        before, holds = self._state, isinstance(algorithm, HoldsWeights)
        self._state = algorithm.rebase(before, came if holds else await self._peers.all_gather(came), self._peers)
        waiting = pending_tokens(self._state)
        self._diary().dropped_tokens += self._uncommitted - waiting
        self._uncommitted = waiting
        if holds:
            self.replica.load(await self._peers.all_gather(algorithm.held(self._state)))
        self._recycle(before)

    async def _round(self) -> None:
        """One round of the algorithm inside, at this position of the schedule."""
        before, diary = self._state, self._diary()
        stretches, meetings = len(diary.computed), len(diary.island_exchanges)
        algorithm = at_position(self._algorithm, self._schedule)
        self._state = await algorithm.round(given(before), self._mine, self._peers)
        if self._peers.in_background:
            raise ExchangeFailed(
                f"rank {self._rank} leaves a round inside its island with a flight open. Await it within the round."
            )
        self._recycle(before)
        last = next((m for m in reversed(diary.island_exchanges[meetings:]) if m.what in ("mean", "reduce_scatter")), None)
        useless, waiting = last is not None and last.unusable, pending_tokens(self._state)
        read = self._uncommitted + sum(stretch.tokens for stretch in diary.computed[stretches:])
        self._committed += 0 if useless else read - waiting
        self._uncommitted = waiting
        diary.island_updates += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if useless else 0
        if last is not None and useless:
            diary.island_skipped.append(last.nonfinite)
        if self._skipped_in_a_row == MAX_SKIPPED:
            raise TrainingDiverged(
                f"{MAX_SKIPPED} updates in a row were skipped inside island {self._island}: gradients were not finite, or nobody "
                f"had any. Look at the data, or lower the learning rate."
            )

    def _recycle(self, before: Any) -> None:
        recycle([before, *self._peers.results], [self._state])
        self._peers.results.clear()

    def _load_held(self) -> None:
        if isinstance(self._algorithm, HoldsWeights):
            self.replica.load(self.whole(self._algorithm.held(self._state)))

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, CheckpointPart]:
        own = {"uncommitted": self._uncommitted, "skipped_in_a_row": self._skipped_in_a_row, "replica": self.replica.state()}
        return {
            f"inside-{self._island}-shared": CheckpointPart(shared_fields(self._state)),
            f"inside-{self._island}-sharded": CheckpointPart(
                fields_owned(self._state, Owner.SHARDED), ShardSlice(self._wire.rank, self._wire.size, "devices")
            ),
            f"device-{self._rank}": CheckpointPart({**own, "state": fields_owned(self._state, Owner.OWN)}),
        }

    def restore(self, load: PartLoader) -> None:
        here = self.parts()
        like = {**here[f"device-{self._rank}"].value, "replica": None}
        own = load(f"device-{self._rank}", CheckpointPart(like))
        if own is None:  # an island that is new begins with fresh moments, at the weights that the others agreed on
            return
        fields: dict[str, Any] = {}
        for kind in ("shared", "sharded"):
            fields.update(load(f"inside-{self._island}-{kind}", here[f"inside-{self._island}-{kind}"]) or {})
        fields.update(own["state"])
        self._state = with_shared(self._state, trees_to_device(fields, self.replica.device))
        self._uncommitted, self._skipped_in_a_row = own["uncommitted"], own["skipped_in_a_row"]
        self.replica.restore(own["replica"])
        self._load_held()
