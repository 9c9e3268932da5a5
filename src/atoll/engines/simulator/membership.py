"""The islands of a synchronous run: which are present, the shared fields that all hold, and how a joiner or an island that missed a
commit gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.events import CaughtUp, IslandJoined, IslandLeft, Recut
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import tree_bytes
from atoll.core.protocols import Algorithm, HoldsWeights, Owner, fields_owned
from atoll.core.serialization import tensor_bytes
from atoll.engines.shared_and_sharded_state import adopt_shared, reshard, reshard_bytes, shared_fields, trees_to_device, with_shared
from atoll.engines.simulator.collectives import SimCollectives
from atoll.engines.simulator.intra_island import IslandDevices, held_weights, load_held_weights, unshared_fields, whole_params
from atoll.engines.simulator.member_work import MemberWork, SimMember
from atoll.engines.simulator.peers import SimPeers
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.runs.cluster import transfer_s


@dataclass(kw_only=True)
class IslandState(SimMember):
    """One island that is present. Its replica is that of its first device, if devices have an algorithm of their own."""

    version: int  # commits that it knows of, which is the version of its shared fields
    uplink_free_s: float  # when its link has sent what other islands requested
    late: bool = False  # whether the last round ended without it, while it computed
    devices: IslandDevices | None = None


class ClusterState:
    """The islands that are present, in rank order, and the newest shared fields. The run has so many rounds, and `inside` is the
    algorithm between the devices of an island, if there is one."""

    def __init__(self, work: MemberWork, algorithm: Algorithm[Any], inside: Algorithm[Any] | None, rounds: int) -> None:
        self._work, self._algorithm, self._inside, self._rounds = work, algorithm, inside, rounds
        self._cluster, self._accounting, self._sink = work.cluster, work.accounting, work.sink
        self.islands: dict[int, IslandState] = {}
        self.shared: dict[str, Any] = {}
        self._latest_s = 0.0

    @property
    def params(self) -> Tree:
        """The global weights."""
        return whole_params(self.shared, self.islands.values())

    @property
    def virtual_time_s(self) -> float:
        return max([self._latest_s, *(island.clock_s for island in self.islands.values() if not island.late)])

    # -------------------------------------------------------------------------------------------------- joining and leaving

    def start(self, params: Tree) -> None:
        """Makes the islands of the first round, with these weights."""
        present = self._cluster.present(0, self._rounds)
        for rank, island in enumerate(present):
            state = self._fresh_state(params, present, rank)
            self.shared = self.shared or shared_fields(state)
            state = adopt_shared(f"island {island}", state, self.shared)
            self.islands[island] = self._new_island(island, state, 0.0, params)
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
            donor, sent_bytes, begin_s = self._transfer(new, now_s, num_bytes, moments=self._work.gives_moments)
            self._sink.emit(
                IslandJoined(island=new, round=totals.round, virtual_time_s=begin_s, donor=donor, sent_bytes=sent_bytes)
            )
            # A fresh State provides the joiner's own fields. The shared ones come from the donor.
            fresh = self._fresh_state(params, present, present.index(new))
            self.islands[new] = island = self._new_island(new, with_shared(fresh, self.shared), begin_s, params)
            if self._work.gives_moments and donor is not None:
                island.replica.load_moments_state(self.islands[donor].replica.moments_state())
        self.islands = {island: self.islands[island] for island in present}
        if any(before.values()):
            self._reshard(before)
            load_held_weights(self._algorithm, self.islands.values())

    def _fresh_state(self, params: Tree, present: Sequence[int], rank: int) -> Any:
        return self._algorithm.init(params, SimPeers(SimCollectives(self._work, present), rank))

    def _new_island(self, island: int, state: Any, begin_s: float, params: Tree) -> IslandState:
        """With fresh optimizers. Devices that have an algorithm of their own begin with `params`."""
        devices = None if self._inside is None else IslandDevices(self._work, self._inside, island, params)
        replica = devices.members[0].replica if devices else self._work.new_replica(island)
        version = self._accounting.totals.version
        return IslandState(island, replica, state, begin_s, version=version, uplink_free_s=begin_s, devices=devices)

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

    def catch_up(self, island: IslandState, state: Any) -> Wait | None:
        """Fetches the shared fields for an island that missed a commit. None if it missed none, or cannot be reached."""
        if island.version == self._accounting.totals.version or not self._work.delivers(island.id, self.islands):
            return None

        def start(task: ClockTask) -> None:
            start_s, number = task.now_s, self._accounting.totals.round
            donor, sent_bytes, end_s = self._transfer(island.id, start_s, tree_bytes(self.shared))
            self._sink.emit(
                CaughtUp(island=island.id, donor=donor, round=number, start_s=start_s, end_s=end_s, sent_bytes=sent_bytes)
            )
            task.resume_at(end_s, arrive)

        def arrive() -> Any:
            island.version = self._accounting.totals.version  # it can serve others from now on
            return with_shared(state, self.shared)

        return Wait(start)

    def _transfer(self, island: int, start_s: float, num_bytes: int, *, moments: bool = False) -> tuple[int | None, int, float]:
        """An island with the newest version sends these bytes, and its inner moments if asked. Returns that donor, the bytes sent,
        and when they have arrived."""
        donors = [d for d in self.islands.values() if d.version == self._accounting.totals.version and d.id != island]
        if not donors:  # the last island with this version has left; the simulator has its fields, and no link carried them
            return None, 0, start_s
        # An island whose messages are lost in this round serves others only if no other donor is there.
        donor = min(donors, key=lambda d: (not self._work.delivers(d.id, self.islands), d.uplink_free_s, d.id))
        num_bytes += tensor_bytes(donor.replica.moments_state()) if moments else 0
        begin_s = max(start_s, donor.uplink_free_s)
        donor.uplink_free_s = begin_s + transfer_s(num_bytes, self._cluster.link_of(donor.id), self._cluster.link_of(island))
        self._accounting.ledgers[donor.id].sent_bytes += num_bytes
        return donor.id, num_bytes, donor.uplink_free_s

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self, engine: dict[str, Any]) -> dict[str, Any]:
        """The parts of a checkpoint: one for the engine, one for the shared fields, one per island. Between two rounds only."""
        parts = {
            "engine": {**engine, "present": list(self.islands), "latest_s": self._latest_s},
            "shared": dict(self.shared),
        }
        for island in self.islands.values():
            newest = island.version == self._accounting.totals.version  # whose shared fields are saved once for all islands
            parts[f"island-{island.id}"] = {
                "clock_s": island.clock_s,
                "version": island.version,
                "late": island.late,
                "uncommitted_tokens": island.uncommitted_tokens,
                "shared": None if newest else shared_fields(island.state),
                "unshared": unshared_fields(island.state),
                "replica": None if island.devices else island.replica.state(),
                "devices": island.devices.parts() if island.devices else None,
            }
        return parts

    def restore(self, engine: dict[str, Any], load: Callable[[str, Any], Any]) -> None:
        """Restores a checkpoint with this part of the engine. `load(part, like)` returns another part, with the types of `like`."""
        self._latest_s = engine["latest_s"]
        fresh, params, self.islands = self.islands, self.params, {}
        self.shared = load("shared", self.shared)
        for rank, number in enumerate(engine["present"]):
            template = self._fresh_state(params, engine["present"], rank)
            island = self.islands[number] = fresh.get(number) or self._new_island(number, template, 0.0, params)
            devices = island.devices
            like = {"shared": self.shared, "unshared": unshared_fields(template), "devices": devices.parts() if devices else None}
            part = load(f"island-{number}", like)
            if devices is None:
                island.replica.restore(part["replica"])
            else:
                devices.restore(part["devices"])
            unshared = trees_to_device(part["unshared"], island.replica.device)
            island.state = with_shared(template, {**(part["shared"] or self.shared), **unshared})
            island.clock_s = island.uplink_free_s = part["clock_s"]
            island.uncommitted_tokens, island.version, island.late = part["uncommitted_tokens"], part["version"], part["late"]
        load_held_weights(self._algorithm, self.islands.values())
