"""The islands of a synchronous run: which are present, the shared fields that all hold, and how a joiner or an island that missed a
commit gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from atoll.core.events import CaughtUp, IslandJoined, IslandLeft, Recut
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, Peers, Sink, fields_owned
from atoll.core.pytree import tree_bytes
from atoll.engines.accounting import RunAccounting
from atoll.engines.replicated_state import adopt_shared, reshard, reshard_bytes, shared_fields, trees_to_device, with_shared
from atoll.engines.simulator.island_devices import IslandDevices, held_weights, load_held_weights, unshared_fields
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster, transfer_s


@dataclass
class IslandState:
    """One island that is present."""

    id: int
    replica: LocalReplica
    """That of its first device, if devices have an algorithm of their own."""
    state: Any
    version: int
    """Commits that it knows of, which is the version of its shared fields."""
    clock_s: float
    uplink_free_s: float
    """When its link has sent what other islands requested."""
    uncommitted_tokens: int = 0
    devices: IslandDevices | None = None

    def part(self, newest: int) -> dict[str, Any]:
        """Its part of a checkpoint. Shared fields of the newest version are saved once for all islands."""
        return {
            "clock_s": self.clock_s,
            "version": self.version,
            "uncommitted_tokens": self.uncommitted_tokens,
            "shared": shared_fields(self.state) if self.version != newest else None,
            "unshared": unshared_fields(self.state),
            "replica": None if self.devices else self.replica.state(),
            "devices": self.devices.parts() if self.devices else None,
        }


class IslandFactory(Protocol):
    """What the engine does for islands that join."""

    def make_replica(self, island: int, params: Tree) -> tuple[LocalReplica, IslandDevices | None]:
        """A model with a fresh optimizer, and devices if they have an algorithm of their own."""

    def make_peers(self, islands: Sequence[int], rank: int) -> Peers:
        """The peers with which the island of this rank makes its first State."""

    def is_heard(self, island: int, islands: Sequence[int]) -> bool:
        """Whether the messages of this island arrive in this round."""


class ClusterState:
    """The islands that are present, in rank order, and the newest shared fields."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        cluster: Cluster,
        rounds: int,
        accounting: RunAccounting,
        sink: Sink,
        factory: IslandFactory,
    ) -> None:
        self._algorithm, self._cluster, self._rounds = algorithm, cluster, rounds
        self._accounting, self._sink, self._factory = accounting, sink, factory
        self.islands: dict[int, IslandState] = {}
        self.shared: dict[str, Any] = {}
        self._latest_s = 0.0

    @property
    def params(self) -> Tree:
        """The global weights, joined from slices if they are sharded."""
        if "params" not in self.shared:
            return Tree.join([island.state.params for island in self.islands.values()])
        params: Tree = self.shared["params"]
        return params

    @property
    def virtual_time_s(self) -> float:
        return max(self._latest_s, *(island.clock_s for island in self.islands.values()))

    # -------------------------------------------------------------------------------------------------- joining and leaving

    def start(self, params: Tree) -> None:
        """Makes the islands of the first round, with these weights."""
        present = self._cluster.present(0, self._rounds)
        for rank, island in enumerate(present):
            state = self._algorithm.init(params, self._factory.make_peers(present, rank))
            self.shared = self.shared or shared_fields(state)
            self._add(island, adopt_shared(f"island {island}", state, self.shared), 0.0, params)
        load_held_weights(self._algorithm, self.islands.values())

    def update_membership(self) -> None:
        """Removes and adds islands between two rounds, as the cluster's schedule says."""
        totals = self._accounting.totals
        present = self._cluster.present(totals.round, self._rounds, totals.steps // self._algorithm.steps_per_round)
        now_s = self.virtual_time_s
        for island in self.islands.values():
            island.uplink_free_s = island.clock_s  # the sends of the last round are over
        before = {island.id: fields_owned(island.state, Owner.SHARDED) for island in self.islands.values()}
        self._latest_s = now_s  # the cluster's clock does not go back when the island that is furthest ahead leaves
        if list(self.islands) == present:
            return
        params = self.params
        num_bytes = tree_bytes(self.shared)
        if isinstance(self._algorithm, HoldsWeights):
            num_bytes += held_weights(self._algorithm, self.islands.values()).nbytes
        for gone in [island for island in self.islands if island not in present]:
            del self.islands[gone]
            self._sink.emit(IslandLeft(island=gone, round=totals.round, virtual_time_s=now_s))
        for new in [island for island in present if island not in self.islands]:
            donor, sent_bytes, begin_s = self._transfer(new, now_s, num_bytes)
            self._sink.emit(
                IslandJoined(island=new, round=totals.round, virtual_time_s=begin_s, donor=donor, sent_bytes=sent_bytes)
            )
            # A fresh State provides the joiner's own fields. The shared ones come from the donor.
            fresh = self._algorithm.init(params, self._factory.make_peers(present, present.index(new)))
            self._add(new, with_shared(fresh, self.shared), begin_s, params)
        self.islands = {island: self.islands[island] for island in present}
        if any(before.values()):
            self._reshard(before)
            load_held_weights(self._algorithm, self.islands.values())

    def _add(self, island: int, state: Any, begin_s: float, params: Tree) -> None:
        replica, devices = self._factory.make_replica(island, params)
        version = self._accounting.totals.version
        self.islands[island] = IslandState(island, replica, state, version, begin_s, uplink_free_s=begin_s, devices=devices)

    def _reshard(self, before: Mapping[int, dict[str, Any]]) -> None:
        """Cuts sharded fields for the islands that are present now. `before` has the slices by island, in the order of the old
        ranks. Each island sends what others lack; the slices of islands that left are available, and no link carries them."""
        new = list(self.islands)
        sent = reshard_bytes(before, new)
        start_s = max(island.clock_s for island in self.islands.values())
        links = {island: self._cluster.link_of(island) for island in new}
        end_s = start_s + max(links[i].latency_s + sent[i] / links[i].up_bytes_per_s if sent[i] else 0.0 for i in new)
        for island, slices in zip(self.islands.values(), reshard(list(before.values()), len(new)), strict=True):
            island.state = with_shared(island.state, slices)
            ledger = self._accounting.ledgers[island.id]
            ledger.sent_bytes += sent[island.id]
            ledger.present_s += end_s - island.clock_s
            island.clock_s = island.uplink_free_s = end_s
        number = self._accounting.totals.round
        self._sink.emit(Recut(round=number, islands=new, start_s=start_s, end_s=end_s, sent_bytes=list(sent.values())))

    # --------------------------------------------------------------------------------------------------------- catching up

    def catch_up(self, island: int, state: Any) -> Wait | None:
        """Fetches the shared fields for an island that missed a commit. None if it missed none, or cannot be reached."""
        me = self.islands[island]
        if me.version == self._accounting.totals.version or not self._factory.is_heard(island, list(self.islands)):
            return None
        return Wait(partial(self._start_catching_up, me, state))

    def _start_catching_up(self, me: IslandState, state: Any, task: ClockTask) -> None:
        start_s, number = task.now_s, self._accounting.totals.round
        donor, sent_bytes, end_s = self._transfer(me.id, start_s, tree_bytes(self.shared))
        self._sink.emit(CaughtUp(island=me.id, donor=donor, round=number, start_s=start_s, end_s=end_s, sent_bytes=sent_bytes))

        def arrive() -> Any:
            me.version = self._accounting.totals.version  # it can serve others from now on
            return with_shared(state, self.shared)

        task.resume_at(end_s, arrive)

    def _transfer(self, island: int, start_s: float, num_bytes: int) -> tuple[int | None, int, float]:
        """An island with the newest version sends these bytes. Returns that donor, the bytes sent, and when they have arrived."""
        donors = [d for d in self.islands.values() if d.version == self._accounting.totals.version and d.id != island]
        if not donors:  # the last island with this version has left; the simulator has its fields, and no link carried them
            return None, 0, start_s
        # An island whose messages are lost in this round serves others only if no other donor is there.
        donor = min(donors, key=lambda d: (not self._factory.is_heard(d.id, list(self.islands)), d.uplink_free_s, d.id))
        begin_s = max(start_s, donor.uplink_free_s)
        donor.uplink_free_s = begin_s + transfer_s(num_bytes, self._cluster.link_of(donor.id), self._cluster.link_of(island))
        self._accounting.ledgers[donor.id].sent_bytes += num_bytes
        return donor.id, num_bytes, donor.uplink_free_s

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """The parts of a checkpoint: one for the shared fields, one per island. Between two rounds only."""
        newest = self._accounting.totals.version
        return {"shared": dict(self.shared), **{f"island-{number}": island.part(newest) for number, island in self.islands.items()}}

    def to_part(self) -> dict[str, Any]:
        """What the engine's own part holds, so that the other parts can be read."""
        return {"present": list(self.islands), "latest_s": self._latest_s}

    def restore(self, engine: dict[str, Any], load: Callable[[str, Any], Any]) -> None:
        """Restores a checkpoint with this part of the engine. `load(part, like)` returns the others, with the types of `like`."""
        self._latest_s = engine["latest_s"]
        fresh, params = self.islands, self.params
        self.shared = load("shared", self.shared)
        self.islands = {}
        for rank, number in enumerate(engine["present"]):
            template = self._algorithm.init(params, self._factory.make_peers(engine["present"], rank))
            known = fresh.get(number)
            replica, devices = (known.replica, known.devices) if known else self._factory.make_replica(number, params)
            like = {"shared": self.shared, "unshared": unshared_fields(template), "devices": devices.like() if devices else None}
            part = load(f"island-{number}", like)
            if devices is None:
                replica.restore(part["replica"])
            else:
                devices.restore(part["devices"])
            unshared = trees_to_device(part["unshared"], replica.device)
            state = with_shared(template, {**(part["shared"] or self.shared), **unshared})
            clock_s, tokens = part["clock_s"], part["uncommitted_tokens"]
            self.islands[number] = IslandState(number, replica, state, part["version"], clock_s, clock_s, tokens, devices)
        load_held_weights(self._algorithm, self.islands.values())
