"""The devices of one island, which train it together: an algorithm between them over fast lines, and another between islands.

To the algorithm between islands the devices are one Replica. Its `train(n)` is n steps of the algorithm inside, which each device
runs under the clock of all: its own model, its own slice of the optimizer, its own shard of the data. Weights that islands agreed
on are put into all devices by the algorithm's own `rebase`; moments stay where they are, and are sent to nobody outside.

An island that is given weights has each of its devices take a slice off the slow line, so the whole is gathered inside before
training begins. Devices of one island always hear each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.memoize import forget
from atoll.core.protocols import Algorithm, Gradient, HoldsWeights, Owner, Sink, Weigh, Work, fields_owned
from atoll.core.pytree import memories, recycle
from atoll.engines.accounting import RunAccounting
from atoll.engines.replicated_state import adopt_shared, donated, owned, pending_tokens, shared_fields, trees_to_device, with_shared
from atoll.engines.simulator.collectives import SimCollectives
from atoll.engines.simulator.compute_pool import TimedCompute
from atoll.engines.simulator.peers import SimPeers, SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.replica.flat_parameters import FlatModule
from atoll.replica.local_replica import ComputeResult, LocalReplica
from atoll.runs.cluster import Cluster
from atoll.runs.two_level import at_position


class WeightHolder(Protocol):
    """An island among islands, or a device among those of one island."""

    state: Any
    replica: LocalReplica


def held_weights(algorithm: HoldsWeights, members: Iterable[WeightHolder]) -> Tree:
    """What replicas hold between two rounds. Members are in rank order."""
    return Tree.join([algorithm.held(member.state) for member in members])


def load_held_weights(algorithm: Any, members: Iterable[WeightHolder]) -> None:
    """Have all replicas hold it, if the algorithm is of this kind."""
    if isinstance(algorithm, HoldsWeights):
        members = list(members)
        whole = held_weights(algorithm, members)
        for member in members:
            member.replica.load(whole)


def check_held_weights(algorithm: Any, members: Mapping[str, WeightHolder], round: int) -> None:
    """Replicas must hold the weights that their slices make up. Members are by name, in rank order."""
    if not isinstance(algorithm, HoldsWeights):
        return
    whole = held_weights(algorithm, members.values())
    for name, differs in zip(members, _who_differs(whole, [member.replica for member in members.values()]), strict=True):
        if differs:
            raise ExchangeFailed(
                f"{name} holds other weights than all slices make up, after round {round}. An algorithm that has `held` must "
                f"load what it gathered into the replica before a round ends."
            )


def _who_differs(whole: Tree, replicas: Sequence[LocalReplica]) -> list[bool]:
    """Which replicas hold other weights than these. A GPU is asked once for all of them."""
    flat = all(isinstance(replica.weights, FlatModule) for replica in replicas)  # others would lend a copy
    lent = [replica.weights.borrowed() for replica in replicas if flat and whole.flat.device.type != "cpu"]
    if not lent or any(weights.layout != whole.layout for weights in lent):
        return [not replica.weights.equals(whole) for replica in replicas]
    found: list[bool] = torch.stack([(one.flat != whole.flat.to(one.flat.dtype)).any() for one in lent]).tolist()
    return found


@dataclass(frozen=True, kw_only=True)
class IntraIsland:
    """What the devices of all islands have in common.

    Args:
        algorithm: what they do together.
        cluster: how many an island has, and the line between them.
        accounting: their accounts.
        stretches: has them compute.
        deal: deals out the data, by reader, batches, pieces and position of the schedule: device j of island i is reader
            i * devices + j.
        sink: takes events.
        make_replica: makes the replica of a reader.
    """

    algorithm: Algorithm[Any]
    cluster: Cluster
    accounting: RunAccounting
    stretches: TimedCompute
    deal: Callable[[int, int, int, int], Work]
    sink: Sink
    make_replica: Callable[[int], LocalReplica]

    def readers(self, island: int) -> range:
        """The island's devices among those of all islands."""
        count = self.cluster.devices_per_island
        return range(island * count, (island + 1) * count)


@dataclass
class IslandDevice:
    """One device of an island."""

    replica: LocalReplica
    state: Any
    clock_s: float = 0.0
    uncommitted_tokens: int = 0


class IslandDevices:
    """The devices of one island.

    Args:
        inside: what all islands' devices have in common.
        island: whose they are.
        params: the weights that they begin with.
    """

    def __init__(self, inside: IntraIsland, island: int, params: Tree) -> None:
        self._inside, self._island = inside, island
        self._room = self._new_room()
        self._schedule = 0
        self._moved = False
        """Whether there are weights that the devices still have to hand each other."""
        self._dtype = params.flat.dtype
        """Of the weights that came in, and so of those that go out."""
        self._committed_tokens = 0
        self._skipped_in_a_row = 0
        mine = params.copy()  # buffers of States go back into circulation; the caller keeps its own
        self.members = [
            IslandDevice(inside.make_replica(reader), inside.algorithm.init(mine, SimPeers(self, self._room, rank)))
            for rank, reader in enumerate(inside.readers(island))
        ]
        for device in self.members:
            device.state = adopt_shared("a device", device.state, shared_fields(self.members[0].state))
        load_held_weights(inside.algorithm, self.members)

    # ------------------------------------------------------------------------------------------------ seen from the island

    def under(self, loop: VirtualClock) -> IslandReplica:
        """What the algorithm between islands is handed in a round."""
        return IslandReplica(self, loop)

    def load(self, params: Tree) -> None:
        """All devices go on from these weights, unless they hold them already: an island that the others did not hear goes on."""
        self._dtype = params.flat.dtype
        if self.params().same_bits(params):
            return
        algorithm: Any = self._inside.algorithm
        whole, before, count = params.copy(), [device.state for device in self.members], len(self.members)
        for rank, device in enumerate(self.members):
            mine = whole.shard(rank, count) if isinstance(algorithm, HoldsWeights) else whole
            device.state = algorithm.rebase(device.state, mine, SimPeers(self, self._room, rank))
            self._inside.accounting.totals.dropped_tokens += device.uncommitted_tokens - pending_tokens(device.state)
            device.uncommitted_tokens = pending_tokens(device.state)
        recycle([whole, *before], [device.state for device in self.members])
        load_held_weights(algorithm, self.members)
        self._moved = True

    def params(self) -> Tree:
        """The island's weights, borrowed."""
        first = self.members[0].state
        if "params" in shared_fields(first):
            whole: Tree = first.params
        else:
            whole = Tree.join([device.state.params for device in self.members])
        return whole.cast(self._dtype).borrow()

    def take_tokens(self) -> int:
        """Tokens in updates of the devices since this was last asked."""
        tokens, self._committed_tokens = self._committed_tokens, 0
        return tokens

    def waiting(self) -> list[str]:
        """Which devices still wait for others, in words."""
        return self._room.waiting()

    # ----------------------------------------------------------------------------------------------------------- a round

    def begin(self, task: ClockTask) -> None:
        """The weights that came in, if any did, reach all devices."""
        start_s = end_s = task.now_s
        if self._moved and len(self.members) > 1:
            end_s = self._gather(start_s)
        self._moved = False
        for device in self.members:
            device.clock_s = end_s
        task.resume_at(end_s, lambda: None)

    def _gather(self, start_s: float) -> float:
        """Each device has a slice and sends it to the others. When that is over."""
        algorithm = self._inside.algorithm
        whole = held_weights(algorithm, self.members) if isinstance(algorithm, HoldsWeights) else self.params()
        return self._new_room().gather_anew(whole, start_s)

    def start_round(self, loop: VirtualClock, schedule: int, task: ClockTask) -> None:
        """One round of the algorithm inside, at this position of the schedule. `task` goes on when the last device is through."""
        self._room, self._schedule = self._new_room(), schedule
        algorithm = at_position(self._inside.algorithm, schedule)
        before, under_way = [device.state for device in self.members], set(range(len(self.members)))

        def leave(rank: int, peers: SimPeers, over: ClockTask) -> None:
            self._leave_round(rank, peers, over)
            under_way.discard(rank)
            if not under_way:
                self._close_round(before)
                task.resume_at(max(device.clock_s for device in self.members), lambda: None)

        for rank, device in enumerate(self.members):
            peers = SimPeers(self, self._room, rank, loop)
            # Devices always hear each other, so no round inside has to be repeated.
            coroutine = algorithm.round(donated(device.state), SimReplica(self, rank, device.replica), peers)
            loop.spawn(self._room.name(rank), coroutine, device.clock_s, partial(leave, rank, peers))
        self._room.kept = memories(before)

    def _leave_round(self, rank: int, peers: SimPeers, over: ClockTask) -> None:
        device, name = self.members[rank], self._room.name(rank)
        if peers.flying:
            raise ExchangeFailed(f"{name} leaves a round with a flight open. Await it within the round.")
        device.clock_s, device.state = over.now_s, owned(over.result)

    def _close_round(self, before: Sequence[Any]) -> None:
        """All devices are through: they must hold the same shared fields, and from now on the same objects."""
        skipped, after = self._room.skipped, [device.state for device in self.members]
        self._inside.accounting.totals.local_updates += len(self.members)
        for rank, device in enumerate(self.members):
            device.state = adopt_shared(self._room.name(rank), device.state, shared_fields(after[0]))
            waiting = pending_tokens(device.state)  # they belong to the next update
            self._committed_tokens += 0 if skipped else device.uncommitted_tokens - waiting
            device.uncommitted_tokens = waiting
        recycle([*before, *after, *self._room.results], [device.state for device in self.members])
        forget()  # a round between islands has many of these
        self._skipped_in_a_row = self._inside.accounting.count_skipped(skipped, self._skipped_in_a_row, self._inside.sink)

    def check(self) -> None:
        """After a round between islands: devices hold the weights that their slices make up."""
        names = {self._room.name(rank): device for rank, device in enumerate(self.members)}
        check_held_weights(self._inside.algorithm, names, self._inside.accounting.totals.round)

    @property
    def steps_per_round(self) -> int:
        return self._inside.algorithm.steps_per_round

    def _new_room(self) -> SimCollectives:
        cluster, count = self._inside.cluster, self._inside.cluster.devices_per_island
        return SimCollectives(
            round=self._inside.accounting.totals.round,
            islands=range(count),
            heard=[True] * count,
            links=[cluster.inside] * count,
            topology="ring",
            report=self._inside.sink,
            accounting=self._inside.accounting,
            inside=self._island,
        )

    # ------------------------------------------------------------------------------------------- what devices ask for (Host)

    def compute(
        self, device: int, function: Callable[[], tuple[Any, ComputeResult]], *, steps: int, batches: float, draw: str | None = None
    ) -> Wait:
        count = partial(self._count, self.members[device])
        wait = self._inside.stretches.wait
        return wait(self._island, function, steps=steps, batches=batches, count=count, device=device, draw=draw)

    def _count(self, device: IslandDevice, tokens: int) -> None:
        device.uncommitted_tokens += tokens

    def hand_out(self, device: int, steps: int, batches: int, pieces: int) -> Work:
        return self._inside.deal(self._inside.readers(self._island)[device], batches, pieces, self._schedule)

    def catch_up(self, device: int, state: Any) -> None:
        return None

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """All that a checkpoint must hold. Between two rounds of islands only."""
        return {
            "shared": shared_fields(self.members[0].state),
            "skipped_in_a_row": self._skipped_in_a_row,
            "devices": [
                {"rest": unshared_fields(d.state), "replica": d.replica.state(), "uncommitted_tokens": d.uncommitted_tokens}
                for d in self.members
            ],
        }

    def like(self) -> dict[str, Any]:
        """What a checkpoint's part is like, for whoever reads it."""
        return {
            "shared": shared_fields(self.members[0].state),
            "devices": [{"rest": unshared_fields(device.state)} for device in self.members],
        }

    def restore(self, parts: dict[str, Any]) -> None:
        """Go on from what `parts` returned."""
        self._skipped_in_a_row = parts["skipped_in_a_row"]
        for device, part in zip(self.members, parts["devices"], strict=True):
            rest = trees_to_device(part["rest"], device.replica.device)
            device.state = with_shared(device.state, {**parts["shared"], **rest})
            device.replica.restore(part["replica"])
            device.uncommitted_tokens = part["uncommitted_tokens"]
        load_held_weights(self._inside.algorithm, self.members)


class IslandReplica:
    """An island of several devices, seen by the algorithm between islands. A protocols.Replica."""

    def __init__(self, devices: IslandDevices, loop: VirtualClock) -> None:
        self._devices, self._loop = devices, loop

    def load(self, params: Tree) -> None:
        self._devices.load(params)

    def params(self) -> Tree:
        return self._devices.params()

    async def train(self, steps: int, work: Work) -> None:
        """Where each device reads is dealt out inside; of `work` the position on the schedule counts."""
        await Wait(self._devices.begin)
        for step in range(0, steps, self._devices.steps_per_round):
            await Wait(partial(self._devices.start_round, self._loop, work.schedule + step))
        self._devices.check()

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


def unshared_fields(state: Any) -> dict[str, Any]:
    """The fields of a State that are not shared."""
    return {**fields_owned(state, Owner.OWN), **fields_owned(state, Owner.SHARDED)}
