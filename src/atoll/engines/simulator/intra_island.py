"""Two-level training: the devices of one island run an algorithm over fast links, and islands run another between them.

To the inter-island algorithm the devices are one Replica. Its `train(n)` is n steps of the intra-island algorithm, which each
device runs under the same virtual clock, with its own model, optimizer slice and data shard. Weights that the islands agreed on
enter all devices by the algorithm's `rebase`; moments stay on their device.

When an island loads weights, each device receives a slice over the slow link, and the devices gather the whole before training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.algorithms.streaming import FragmentRanges, Streaming
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree, finite_and_set
from atoll.core.layout import shard_range
from atoll.core.memoize import forget
from atoll.core.nested_trees import memories, recycle
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, Work, fields_owned
from atoll.engines.shared_and_sharded_state import adopt_shared, donated, owned, shared_fields, trees_to_device, with_shared
from atoll.engines.simulator.collectives import SimCollectives
from atoll.engines.simulator.member_work import MemberWork, SimMember
from atoll.engines.simulator.peers import SimPeers, SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.engines.training_setup import TrainingOnlyReplica
from atoll.replica.flat_parameters import FlatModule
from atoll.runs.run_settings import with_rate_at


def whole_params(shared: Mapping[str, Any], members: Iterable[SimMember]) -> Tree:
    """The weights in these shared fields. If they are sharded, they are joined from the States of all members in rank order."""
    params: Tree = shared["params"] if "params" in shared else Tree.join([member.state.params for member in members])
    return params


def held_weights(algorithm: HoldsWeights, members: Iterable[SimMember]) -> Tree:
    """The weights that replicas hold between two rounds, joined from the States of all members in rank order."""
    return Tree.join([algorithm.held(member.state) for member in members])


def load_held_weights(algorithm: Any, members: Collection[SimMember]) -> None:
    """Loads them into all replicas, if the algorithm `HoldsWeights`."""
    if isinstance(algorithm, HoldsWeights):
        whole = held_weights(algorithm, members)
        for member in members:
            member.replica.load(whole)


def check_held_weights(differing: Sequence[bool], collectives: SimCollectives) -> None:
    """Raises ExchangeFailed if a replica differs, as `differing_weights` says for each."""
    if any(differing):
        raise ExchangeFailed(
            f"after round {collectives.round} {collectives.name(differing.index(True))} holds other weights than the joined slices "
            f"of all members. An algorithm that has `held` must load what it gathered into the replica before a round ends."
        )


def differing_weights(algorithm: Any, members: Collection[SimMember]) -> list[Tensor]:
    """Flags in rank order: whether a member's replica holds other weights than the slices of all members of this round. None if
    replicas hold no weights between rounds. The host does not wait for a GPU here: it reads them with what else it has to read."""
    if not isinstance(algorithm, HoldsWeights):
        return []
    whole, replicas = held_weights(algorithm, members), [member.replica for member in members]
    on_gpu = whole.flat.device.type != "cpu"
    flat = on_gpu and all(isinstance(replica.weights, FlatModule) for replica in replicas)  # others have no flat buffer to borrow
    borrowed = [replica.weights.borrowed() for replica in replicas if flat]
    if not borrowed or any(weights.layout != whole.layout for weights in borrowed):
        return [torch.tensor(not replica.weights.equals(whole)) for replica in replicas]
    rounded = whole.cast(borrowed[0].flat.dtype).flat  # replicas are of one model
    return [(one.flat != rounded).any() for one in borrowed]


@dataclass(frozen=True, kw_only=True)
class StreamingInSlices(Streaming):
    """Streaming between islands of several devices. Each device exchanges a slice of the weights, which it cuts into fragments: a
    fragment of the island is those of its devices."""

    devices: int

    def _ranges(self, params: Tree) -> tuple[FragmentRanges, ...]:
        slices = [shard_range(params.numel, device, self.devices) for device in range(self.devices)]
        if min(stop - start for start, stop in slices) < self.fragments:
            raise ConfigError(
                f"fragments={self.fragments}: a device's slice of a model of {params.numel} values leaves a fragment empty. Use "
                f"fewer fragments, or islands of one device."
            )
        cuts = [[shard_range(stop - start, number, self.fragments) for start, stop in slices] for number in range(self.fragments)]
        return tuple(
            tuple((start + first, start + last) for (start, _), (first, last) in zip(slices, parts, strict=True)) for parts in cuts
        )


def in_slices(algorithm: Algorithm[Any], devices: int) -> Algorithm[Any]:
    """The algorithm between islands of so many devices, each of which exchanges a slice of the weights."""
    if devices == 1 or type(algorithm) is not Streaming or algorithm.split != "contiguous":
        return algorithm
    return StreamingInSlices(**{field.name: getattr(algorithm, field.name) for field in fields(algorithm)}, devices=devices)


def unshared_fields(state: Any) -> dict[str, Any]:
    """The own and sharded fields of a State."""
    return {**fields_owned(state, Owner.OWN), **fields_owned(state, Owner.SHARDED)}


class IslandDevices(TrainingOnlyReplica):
    """The devices of one island, which run this algorithm between them and begin with the weights `params`. To the inter-island
    algorithm, a protocols.Replica."""

    def __init__(self, work: MemberWork, algorithm: Algorithm[Any], island: int, params: Tree) -> None:
        self._work, self._algorithm, self._island = work, algorithm, island
        self.clock = VirtualClock()  # of the present round between islands
        self.collectives = self._new_collectives()  # of the present round inside
        self._must_gather = False  # whether each device has only its slice of the weights that were loaded last
        self._dtype = params.flat.dtype  # of loaded weights, and so of `params()`
        self._committed_tokens = 0
        self._skipped_in_a_row = 0
        mine = params.copy()  # States reuse their buffers; the caller keeps its own
        self.members = [
            SimMember(island, work.new_replica(reader), algorithm.init(mine, SimPeers(self.collectives, rank)), device=rank)
            for rank, reader in enumerate(work.readers(island))
        ]
        for device in self.members:
            device.state = adopt_shared("a device", device.state, shared_fields(self.members[0].state))
        load_held_weights(algorithm, self.members)

    # --------------------------------------------------------------------------------- a Replica for the inter-island algorithm

    def load(self, params: Tree) -> None:
        """Rebases all devices on these weights, unless the island has them already, as after a mean that left it out."""
        self._dtype = params.flat.dtype
        held = self.params()
        params = held.overlaid(params)
        if held.same_bits(params):
            return
        algorithm: Any = self._algorithm
        whole, before, count = params.copy(), [device.state for device in self.members], len(self.members)
        for rank, device in enumerate(self.members):
            mine = whole.shard(rank, count) if isinstance(algorithm, HoldsWeights) else whole
            device.state = algorithm.rebase(device.state, mine, SimPeers(self.collectives, rank))
            self._work.accounting.totals.dropped_tokens += device.commit_tokens()
        recycle([whole, *before], [device.state for device in self.members])
        load_held_weights(algorithm, self.members)
        self._must_gather = True

    def params(self) -> Tree:
        """The island's weights, borrowed."""
        return whole_params(shared_fields(self.members[0].state), self.members).cast(self._dtype).borrow()

    async def train(self, steps: int, work: Work) -> int:
        """Devices get their own data positions; of `work` only the schedule position counts. Returns their updates' tokens."""
        before = self._committed_tokens
        await Wait(self._begin)
        for step in range(0, steps, self._algorithm.steps_per_round):
            await Wait(partial(self._start_round, work.schedule + step))
        check_held_weights(finite_and_set([], differing_weights(self._algorithm, self.members))[1], self.collectives)
        return self._committed_tokens - before

    def pop_tokens(self) -> int:
        """Tokens of the devices' updates since the last call."""
        tokens, self._committed_tokens = self._committed_tokens, 0
        return tokens

    # ----------------------------------------------------------------------------------------------------------- a round

    def _begin(self, task: ClockTask) -> None:
        """Gathers loaded weights on all devices."""
        start_s = end_s = task.now_s
        if self._must_gather and len(self.members) > 1:
            algorithm = self._algorithm
            whole = held_weights(algorithm, self.members) if isinstance(algorithm, HoldsWeights) else self.params()
            end_s = self.collectives.gather_weights(whole, start_s)
        self._must_gather = False
        for device in self.members:
            device.clock_s = end_s
        task.resume_at(end_s, lambda: None)

    def _start_round(self, schedule: int, task: ClockTask) -> None:
        """Starts a round of the intra-island algorithm at this schedule position. `task` resumes when the last device is done."""
        self.collectives = self._new_collectives()
        algorithm = with_rate_at(self._algorithm, schedule)
        before, running = [device.state for device in self.members], set(range(len(self.members)))

        def leave(rank: int, peers: SimPeers, over: ClockTask) -> None:
            peers.check_closed()
            device = self.members[rank]
            device.clock_s, device.state = over.now_s, owned(over.result)
            running.discard(rank)
            if not running:
                self._end_round(before)
                task.resume_at(max(device.clock_s for device in self.members), lambda: None)

        for rank, device in enumerate(self.members):
            peers = SimPeers(self.collectives, rank, self.clock, schedule)
            replica = SimReplica(device.replica, partial(self._work.compute, device))
            # Devices always hear each other, so no round inside has to be repeated.
            coroutine = algorithm.round(donated(device.state), replica, peers)
            self.clock.spawn(self.collectives.name(rank), coroutine, device.clock_s, partial(leave, rank, peers))
        self.collectives.kept = memories(before)

    def _end_round(self, before: Sequence[Any]) -> None:
        """All devices must have equal shared fields, and hold the same objects from now on."""
        accounting = self._work.accounting
        skipped, after = self.collectives.skipped, [device.state for device in self.members]
        accounting.totals.local_updates += len(self.members)
        for rank, device in enumerate(self.members):
            device.state = adopt_shared(self.collectives.name(rank), device.state, shared_fields(after[0]))
            tokens = device.commit_tokens()
            self._committed_tokens += 0 if skipped else tokens
        recycle([*before, *after, *self.collectives.results], [device.state for device in self.members])
        forget()  # a round between islands has many rounds inside
        self._skipped_in_a_row = accounting.count_skipped(skipped, self._skipped_in_a_row, self._work.sink)

    def _new_collectives(self) -> SimCollectives:
        return SimCollectives(
            self._work, range(self._work.devices), inside=self._island, buckets=getattr(self._algorithm, "buckets", 1)
        )

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """The devices' part of a checkpoint. Between two rounds of islands only."""
        return {
            "shared": shared_fields(self.members[0].state),
            "skipped_in_a_row": self._skipped_in_a_row,
            "devices": [
                {"unshared": unshared_fields(d.state), "replica": d.replica.state(), "uncommitted_tokens": d.uncommitted_tokens}
                for d in self.members
            ],
        }

    def restore(self, parts: dict[str, Any]) -> None:
        self._skipped_in_a_row = parts["skipped_in_a_row"]
        for device, part in zip(self.members, parts["devices"], strict=True):
            unshared = trees_to_device(part["unshared"], device.replica.device)
            device.state = with_shared(device.state, {**parts["shared"], **unshared})
            device.replica.restore(part["replica"])
            device.uncommitted_tokens = part["uncommitted_tokens"]
        load_held_weights(self._algorithm, self.members)
