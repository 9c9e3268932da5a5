"""The engine of one island: it trains a round, proposes its delta, and returns what the quorum committed.

All of a run is one state that every island replicates: the algorithm's shared fields, the data leases, the accounting and the
members. A commit advances all of it at once. So any island can replace any other, a joiner fetches the state from any island, and
the newest checkpoint has everything when all islands have died.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.events import Event
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Algorithm, Batches, Work
from atoll.engines.accounting import count_in_a_row, diverged_weights
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.elastic.accounting import ElasticAccounting
from atoll.engines.elastic.aggregation import IslandReport, Proposal, UpdateValidator, ValidatedMean
from atoll.engines.elastic.commit import DIVERGED, Commit, CommitProtocol, StaleState, UnconfirmedState
from atoll.engines.elastic.data_leases import DataLeases, DataUnit
from atoll.engines.elastic.membership import LastQuorum, Membership
from atoll.engines.elastic.peers import ElasticPeers, ObserverReplica
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.state_version import NO_VERSION, VERSION_LIMIT, StateVersion, refuse_unreplicated, state_digest
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.round_record import RoundRecord, WallClock
from atoll.engines.shared_and_sharded_state import shared_fields, trees_to_device, with_shared
from atoll.engines.timed_replica import ProcessReplica
from atoll.replica.local_replica import LocalReplica
from atoll.runs.run_settings import Run

_EPOCH_GAP = 1 << 20
"""A commit without failures takes at most 256 epochs, so 4,096 commits after a checkpoint take no more than this."""


@dataclass(frozen=True)
class CommittedRound:
    """A round was committed, and the engine holds the new state. `superseded` are the buffers of the state before. An `opening`
    commit precedes the first round."""

    commit: Commit
    events: Sequence[Event]
    superseded: Sequence[Any] = ()
    opening: bool = False

    def leader(self, folder: str) -> str | None:
        """The island that writes this commit into the log of this folder: the first that has the folder, and has not diverged."""
        reports = self.commit.reports.items()
        return next((name for name, one in reports if one.folder == folder and name not in self.commit.diverged), None)

    @property
    def written(self) -> StateVersion:
        """How far the logs of all folders go, as the participants reported."""
        reached: dict[str, StateVersion] = {}
        for one in self.commit.result.reports:
            if one.folder:
                reached[one.folder] = max(reached.get(one.folder, NO_VERSION), StateVersion.of(one.written))
        return min(reached.values(), default=NO_VERSION)


class ElasticEngine:
    """One island's engine.

    Args:
        algorithm: the run's, or one that injects faults into it.
        status: of this island. The engine keeps `exchanging`, `confirmed` and `suspects` up to date.
        params: the initial weights, the same on every island.
        make_replica: makes this island's replica, with a fresh optimizer.
        pause_s: how long this island sleeps for each batch besides computing it.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        membership: Membership,
        status: IslandStatus,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[], LocalReplica],
        run: Run,
        spec: Elastic,
        pause_s: float,
        log: Callable[[str], object],
    ) -> None:
        self.name, self.algorithm, self._status = status.name, algorithm, status
        self._batches, self._make_replica, self._pause_s = batches, make_replica, pause_s
        self.clock = WallClock()
        self.version = StateVersion(0, 0)
        self.accounting = ElasticAccounting()
        self._validator = UpdateValidator(spec.max_delta_ratio)
        mean = ValidatedMean(self._validator, self.clock)
        self._protocol = CommitProtocol(membership, mean, status, ExchangeTimeout(None), log, spec.quorum_timeout_s)
        self._batches_per_round = algorithm.steps_per_round * getattr(algorithm, "accumulation", 1)
        self._planned_islands = run.effective_cluster.islands
        units = -(-run.train.steps // algorithm.steps_per_round) * self._planned_islands  # however many islands deliver them
        self.leases = DataLeases(shards=batches.num_shards, batches=self._batches_per_round, units=units)
        self.replica = make_replica()
        self._thread = CommunicationThread(self.replica.device)
        self.peers = ElasticPeers(self._protocol, self._thread, self.clock)
        self.state = algorithm.init(params.copy(), self.peers)
        refuse_unreplicated(algorithm, self.state)
        self._rounds_without_delta = 0
        self._donor: str | None = None
        self._received_bytes = 0
        self._observes = False
        """Whether it has just fetched the state: a lease that it held before is old, and the quorum would wait for it."""
        self._digest = self._compute_digest()

    @property
    def steps_taken(self) -> int:
        """Position on the schedule, as if the planned islands had shared the work evenly."""
        return self.leases.settled * self.algorithm.steps_per_round // self._planned_islands

    @property
    def params(self) -> Tree:
        params: Tree = self.state.params
        return params

    @property
    def digest(self) -> str:
        """Of the replicated state."""
        return f"{self._digest:08x}"

    @property
    def peer_addresses(self) -> Mapping[str, str]:
        """The other participants of the last commit. The quorum waits for those that are alive."""
        return self._protocol.peers

    def successors(self) -> list[str]:
        """The other processes that may go on from the state that this engine holds, or already have."""
        return [process for process in self._protocol.successors() if process != self._status.identity]

    def expect_peers(self, addresses: Mapping[str, str]) -> None:
        self._protocol.peers = {name: address for name, address in addresses.items() if name != self.name}

    def close(self, *, wait: bool = True) -> None:
        self._thread.close(wait=wait)

    def resume_alone(self) -> None:
        """Continue from the held state without any other island: leased units return. Epochs skip those of commits that died with
        their islands. From now on this island is the whole quorum, which others join."""
        self._observes = False
        self.version = StateVersion(self.version.round, self.version.epoch + _EPOCH_GAP)
        self.leases.settle(())
        self._protocol.peers, self._status.confirmed = {}, True
        self.accounting.quorum = LastQuorum((self._status.identity,), self._status.identity)
        self._protocol.hold(StateVersion(VERSION_LIMIT, 0), self.accounting.quorum)  # all that took part in an attempt have ended
        self._digest = self._compute_digest()

    # ---------------------------------------------------------------------------------------------------------------- a round

    def round(self, alive: int, written: StateVersion) -> CommittedRound | StaleState | UnconfirmedState:
        """Train and commit one round, or open the run with the islands that are present. The caller knows how many islands are
        alive, and the last version that this island has written into the event log."""
        try:
            return self._train(alive, written) if self.leases.active else self._open(written)
        except (StaleState, UnconfirmedState) as error:
            return error.with_traceback(None)  # which refers to connections that are to be closed

    def reclaim(self, committed: CommittedRound) -> None:
        """Reuse the buffers of the state before this commit: nothing reads them any more."""
        recycle(committed.superseded, [self.state])

    def _open(self, written: StateVersion) -> CommittedRound:
        commit = self.peers.open(self._begin_round(None, written))
        self.version = StateVersion(self.version.round, commit.epoch)
        self.clock.set(commit.result.now_s)
        self.accounting.begin(commit.result.now_s)
        self._record_members(commit)
        self.leases.lease(commit.names)
        self._digest = self._compute_digest()
        return CommittedRound(commit, self.accounting.drain(), opening=True)

    def _train(self, alive: int, written: StateVersion) -> CommittedRound | StaleState:
        before, unit = self.state, None if self._observes else self.leases.active.get(self.name)
        record = self._begin_round(unit, written).report.record
        after = self._thread.run(self.algorithm.round(before, self._round_replica(unit, record), self.peers))
        commit = self.peers.commit
        if commit is None:
            raise ConfigError(f"{type(self.algorithm).__name__} ended a round without a mean, and so without a commit.")
        if self.name in commit.diverged:  # its delta counts, but its new state does not
            self._status.exchanging = False
            return StaleState(StateVersion(self.version.round + 1, commit.epoch), DIVERGED, commit.quorum.processes)
        self._advance(after, commit, alive)
        self._check_progress(commit)
        return CommittedRound(commit, self.accounting.drain(), [before, commit.result.value])

    def _begin_round(self, unit: DataUnit | None, written: StateVersion) -> Proposal:
        status = self._status
        report = IslandReport(status.folder, status.address, self._donor, self._received_bytes, written.number)
        proposal = Proposal(self.version, self._digest, report)
        shard, start, _ = unit or DataUnit(0, 0, self._batches_per_round)
        self.peers.begin(proposal, unit, Work(shard, start, self.steps_taken, self._batches.examples(shard)))
        return proposal

    def _round_replica(self, unit: DataUnit | None, record: RoundRecord) -> Any:
        if unit is None:
            return ObserverReplica(self.params)
        on_computed = record.computed.append
        return ProcessReplica(self.replica, clock=self.clock, on_computed=on_computed, pause_s=self._pause_s, allow_nonfinite=True)

    def _advance(self, after: Any, commit: Commit, alive: int) -> None:
        """Move all of the replicated state to this commit."""
        agreement, number = commit.result, self.version.round + 1
        self.state = after
        self.version = StateVersion(number, commit.epoch)
        self._validator.record(agreement.deltas, agreement.rejected)
        self._record_members(commit)
        rejected = [commit.names[rank] for rank in agreement.rejected]
        settled = self.leases.settle(commit.delivered, rejected)
        self.leases.lease(commit.names)
        self.leases.check()
        self._digest = self._compute_digest()
        self.accounting.record_round(commit, settled, self.steps_taken, number=number, alive=alive, digest=self.digest)
        if self.name in rejected:
            self.replica = self._make_replica()  # its optimizer moments are as unusable as its delta

    def _record_members(self, commit: Commit) -> None:
        """The participants are present, and this island is one of them."""
        self.accounting.record_members(commit, self.version.round)
        self.expect_peers({name: one.address for name, one in commit.reports.items()})
        self._observes = False
        self._donor, self._received_bytes = None, 0

    def _check_progress(self, commit: Commit) -> None:
        why = "no delta was valid. Lower the learning rate."
        self._rounds_without_delta = count_in_a_row(self._rounds_without_delta, not commit.delivered, why=why)
        if not self.params.is_finite():
            raise diverged_weights(self.version.round, "delta")

    # ---------------------------------------------------------------------------------------------------------------- saving

    def _compute_digest(self) -> int:
        return state_digest(self.shared(), self._replicated())

    def _replicated(self) -> dict[str, Any]:
        """What islands replicate besides the algorithm's state. The digest leaves out the ledgers, which follow from the rest."""
        return {"leases": self.leases.to_parts(), "validator": self._validator.to_parts(), **self.accounting.to_parts()}

    def metadata(self) -> dict[str, Any]:
        """All of the state but the algorithm's, as JSON data. Between two rounds only."""
        return {
            **self._replicated(),
            "version": list(self.version),
            "wall_time_s": self.clock.now_s(),
            "peers": {**self._protocol.peers, self.name: self._status.address},
            "rounds_without_delta": self._rounds_without_delta,
            "digest": self.digest,
        }

    def shared(self) -> dict[str, Any]:
        """The algorithm's shared fields."""
        return shared_fields(self.state)

    def restore(
        self, metadata: Mapping[str, Any], shared: Mapping[str, Any], donor: str | None = None, received_bytes: int = 0
    ) -> None:
        """Continue from a committed state, of a checkpoint or of the island `donor`. Raises ExchangeFailed, and changes nothing, if
        the state does not match its digest."""
        shared = trees_to_device(dict(shared), self.replica.device)
        if (found := f"{state_digest(shared, metadata):08x}") != metadata["digest"]:
            raise ExchangeFailed(
                f"the state of round {metadata['version'][0]} from {donor or 'a checkpoint'} is damaged: it was committed as "
                f"{metadata['digest']}, and is {found}. Use another island's."
            )
        self._observes = True
        self.version = StateVersion(*metadata["version"])
        self.clock.set(metadata["wall_time_s"])
        self.leases.from_parts(metadata["leases"])
        self._validator.from_parts(metadata["validator"])
        self.accounting.from_parts(metadata)
        self.accounting.begin(metadata["wall_time_s"])
        self._protocol.hold(self.version, self.accounting.quorum)
        self._rounds_without_delta = metadata["rounds_without_delta"]
        self.expect_peers(metadata["peers"])
        self._donor, self._received_bytes = donor, received_bytes
        self._status.confirmed = False
        self.state = with_shared(self.algorithm.init(self.params, self.peers), shared)
        self._digest = self._compute_digest()
