"""All islands of a synchronous run: who is there, what all of them hold, and how those who come or were not heard are given it."""

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
from atoll.runs.cluster import Cluster
from atoll.runs.network import transfer_s


@dataclass
class IslandState:
    """One island that takes part."""

    id: int
    replica: LocalReplica
    """Its model; the first of them where devices have an algorithm of their own."""
    state: Any
    version: int
    """Of the shared fields it holds: the number of commits it knows of."""
    clock_s: float
    uplink_free_s: float
    """When its line has sent what others asked of it."""
    uncommitted_tokens: int = 0
    devices: IslandDevices | None = None

    def part(self, newest: int) -> dict[str, Any]:
        """What a checkpoint must hold of it. Shared fields of the newest version are saved elsewhere, once for all."""
        return {
            "clock_s": self.clock_s,
            "version": self.version,
            "uncommitted_tokens": self.uncommitted_tokens,
            "shared": shared_fields(self.state) if self.version != newest else None,
            "rest": unshared_fields(self.state),
            "replica": None if self.devices else self.replica.state(),
            "devices": self.devices.parts() if self.devices else None,
        }


def reshard_islands(
    islands: Mapping[int, IslandState], before: Mapping[int, dict[str, Any]], cluster: Cluster, accounting: RunAccounting
) -> Recut:
    """What each island holds a slice of is cut for the islands that are there now. Each sends what others lack; the slices of those
    who left are at hand, but nobody's line carries them. `before` are the slices by island, in the order of the old ranks."""
    new = list(islands)
    sent = reshard_bytes(before, new)
    start_s = max(island.clock_s for island in islands.values())
    lines = {island: cluster.line(island) for island in new}
    end_s = start_s + max(lines[i].latency_s + sent[i] / lines[i].up_bytes_per_s if sent[i] else 0.0 for i in new)
    for (number, mine), slices in zip(islands.items(), reshard(list(before.values()), len(new)), strict=True):
        mine.state = with_shared(mine.state, slices)
        accounting.ledgers[number].sent_bytes += sent[number]
        accounting.ledgers[number].present_s += end_s - mine.clock_s
        mine.clock_s = mine.uplink_free_s = end_s
    return Recut(round=accounting.totals.round, islands=new, start_s=start_s, end_s=end_s, sent_bytes=list(sent.values()))


class IslandFactory(Protocol):
    """What an engine does for islands that come."""

    def equip(self, island: int, params: Tree) -> tuple[LocalReplica, IslandDevices | None]:
        """A model with a fresh optimizer, and devices if they have an algorithm of their own."""

    def introduce(self, islands: Sequence[int], rank: int) -> Peers:
        """The peers with which the island of this rank makes its first State."""

    def is_heard(self, island: int, islands: Sequence[int]) -> bool:
        """Whether the others hear it in this round."""


class ClusterState:
    """The islands that are there.

    Args:
        algorithm: of the run.
        cluster: says who is there when, and how far.
        rounds: of the run.
        accounting: are told what was sent.
        sink: takes events.
        engine: equips islands that come.
    """

    def __init__(
        self, algorithm: Algorithm[Any], cluster: Cluster, rounds: int, accounting: RunAccounting, sink: Sink, engine: IslandFactory
    ) -> None:
        self._algorithm, self._cluster, self._rounds = algorithm, cluster, rounds
        self._accounting, self._sink, self._engine = accounting, sink, engine
        self.islands: dict[int, IslandState] = {}
        """In rank order."""
        self.shared: dict[str, Any] = {}
        """The newest shared fields, which every island that was heard holds too."""
        self._latest_s = 0.0

    @property
    def params(self) -> Tree:
        """The global weights, put together from slices where no island holds them as a whole."""
        if "params" not in self.shared:
            return Tree.join([island.state.params for island in self.islands.values()])
        params: Tree = self.shared["params"]
        return params

    @property
    def virtual_time_s(self) -> float:
        return max(self._latest_s, *(island.clock_s for island in self.islands.values()))

    # ---------------------------------------------------------------------------------------------------- coming and going

    def settle(self, params: Tree) -> None:
        """The islands of the first round, with these weights."""
        present = self._cluster.present(0, self._rounds)
        for rank, island in enumerate(present):
            state = self._algorithm.init(params, self._engine.introduce(present, rank))
            self.shared = self.shared or shared_fields(state)
            self._admit(island, adopt_shared(f"island {island}", state, self.shared), 0.0, params)
        load_held_weights(self._algorithm, self.islands.values())

    def let_come_and_go(self) -> None:
        """Between two rounds."""
        totals = self._accounting.totals
        present = self._cluster.present(totals.round, self._rounds, totals.steps // self._algorithm.steps_per_round)
        now_s = self.virtual_time_s
        for island in self.islands.values():
            island.uplink_free_s = island.clock_s  # what it sent in the last round is through
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
            donor, sent_bytes, begin_s = self._receive(new, now_s, num_bytes)
            self._sink.emit(
                IslandJoined(island=new, round=totals.round, virtual_time_s=begin_s, donor=donor, sent_bytes=sent_bytes)
            )
            # The fresh State gives the newcomer's own fields; all that is shared comes from the others.
            fresh = self._algorithm.init(params, self._engine.introduce(present, present.index(new)))
            self._admit(new, with_shared(fresh, self.shared), begin_s, params)
        self.islands = {island: self.islands[island] for island in present}
        if any(before.values()):
            self._sink.emit(reshard_islands(self.islands, before, self._cluster, self._accounting))
            load_held_weights(self._algorithm, self.islands.values())

    def _admit(self, island: int, state: Any, begin_s: float, params: Tree) -> None:
        replica, devices = self._engine.equip(island, params)
        version = self._accounting.totals.version
        self.islands[island] = IslandState(island, replica, state, version, begin_s, uplink_free_s=begin_s, devices=devices)

    # --------------------------------------------------------------------------------------------------------- catching up

    def catch_up(self, island: int, state: Any) -> Wait | None:
        """What brings an island that missed a commit up to date; none if it knows all of them, or cannot be reached."""
        me = self.islands[island]
        if me.version == self._accounting.totals.version or not self._engine.is_heard(island, list(self.islands)):
            return None
        return Wait(partial(self._start_catching_up, me, state))

    def _start_catching_up(self, me: IslandState, state: Any, task: ClockTask) -> None:
        start_s, number = task.now_s, self._accounting.totals.round
        donor, sent_bytes, end_s = self._receive(me.id, start_s, tree_bytes(self.shared))
        self._sink.emit(CaughtUp(island=me.id, donor=donor, round=number, start_s=start_s, end_s=end_s, sent_bytes=sent_bytes))

        def arrive() -> Any:
            me.version = self._accounting.totals.version  # from now on it can serve others
            return with_shared(state, self.shared)

        task.resume_at(end_s, arrive)

    def _receive(self, island: int, start_s: float, num_bytes: int) -> tuple[int | None, int, float]:
        """An up-to-date island sends the shared fields, and the weights if nobody's are shared: who, how many bytes, and when they
        are there."""
        donors = [d for d in self.islands.values() if d.version == self._accounting.totals.version and d.id != island]
        if not donors:  # the last one that knew has left; its legacy is at hand, but nobody's line carried it
            return None, 0, start_s
        # Lost is a delta that was not heard and an answer that did not come; its sender can still serve others, if need be.
        donor = min(donors, key=lambda d: (not self._engine.is_heard(d.id, list(self.islands)), d.uplink_free_s, d.id))
        begin_s = max(start_s, donor.uplink_free_s)
        donor.uplink_free_s = begin_s + transfer_s(num_bytes, self._cluster.line(donor.id), self._cluster.line(island))
        self._accounting.ledgers[donor.id].sent_bytes += num_bytes
        return donor.id, num_bytes, donor.uplink_free_s

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """What a checkpoint must hold of each island, and of all of them. Between two rounds only."""
        newest = self._accounting.totals.version
        return {"shared": dict(self.shared), **{_part(number): island.part(newest) for number, island in self.islands.items()}}

    def to_part(self) -> dict[str, Any]:
        """What the engine's own part must hold of them, so that the others can be read."""
        return {"present": list(self.islands), "latest_s": self._latest_s}

    def restore(self, engine: dict[str, Any], load: Callable[[str, Any], Any]) -> None:
        """Go on from a checkpoint, whose engine's own part this is. `load(part, like)` gives the others back, with the types of
        `like`."""
        self._latest_s = engine["latest_s"]
        fresh, begun = self.islands, self.params
        self.shared = load("shared", self.shared)
        self.islands = {}
        for rank, number in enumerate(engine["present"]):
            template = self._algorithm.init(begun, self._engine.introduce(engine["present"], rank))
            known = fresh.get(number)
            replica, devices = (known.replica, known.devices) if known else self._engine.equip(number, begun)
            like = {"shared": self.shared, "rest": unshared_fields(template), "devices": devices.like() if devices else None}
            part = load(_part(number), like)
            if devices is None:
                replica.restore(part["replica"])
            else:
                devices.restore(part["devices"])
            rest = trees_to_device(part["rest"], replica.device)
            state = with_shared(template, {**(part["shared"] or self.shared), **rest})
            clock_s, tokens = part["clock_s"], part["uncommitted_tokens"]
            self.islands[number] = IslandState(number, replica, state, part["version"], clock_s, clock_s, tokens, devices)
        load_held_weights(self._algorithm, self.islands.values())


def _part(island: int) -> str:
    """The name of an island's part of a checkpoint."""
    return f"island-{island}"
