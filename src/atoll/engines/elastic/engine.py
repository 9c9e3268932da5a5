"""The engine of one island: it trains a round, proposes its deltas, and returns what the quorum committed.

All of a run is one state that every island replicates: the algorithm's shared fields, the data leases, the accounting and the
members. A commit advances all of it at once. So any island can replace any other, a joiner fetches the state from any island, and
the newest checkpoint has everything when all islands have died.

Of an algorithm that agrees on its model in fragments (`protocols.Fragmented`), each fragment is a commit. Its round is then
suspended at every commit, until the caller has published the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.events import Event
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Algorithm, Batches, Work
from atoll.engines.accounting import ComputeSpan, count_in_a_row, diverged_weights
from atoll.engines.communication_thread import CommunicationThread
from atoll.engines.elastic.accounting import ElasticAccounting
from atoll.engines.elastic.aggregation import IslandReport, Proposal, UpdateValidator, ValidatedMean
from atoll.engines.elastic.commit import DIVERGED, Commit, CommitProtocol, StaleState, UnconfirmedState
from atoll.engines.elastic.data_leases import DataLeases, DataUnit
from atoll.engines.elastic.membership import Membership
from atoll.engines.elastic.peers import ElasticPeers, LeasedReplica, ObserverReplica
from atoll.engines.elastic.quorum import LastQuorum
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.spec import Elastic, quorum_of
from atoll.engines.elastic.state_version import (
    NO_VERSION,
    VERSION_LIMIT,
    StateVersion,
    differing_digest,
    digest_text,
    refuse_unreplicated,
    state_digest,
)
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.round_record import WallClock
from atoll.engines.shared_and_sharded_state import owned, residuals, restarted, shared_fields, trees_to_device, with_shared
from atoll.engines.user_code import LoopBatches
from atoll.replica.local_replica import LocalReplica
from atoll.runs.run_settings import Run

_EPOCH_GAP = 1 << 20
"""A commit without failures takes at most 256 epochs, so 4,096 commits after a checkpoint take no more than this."""

_WEIGHT_MARGIN = 1024
"""A batch may have so many times the tokens of the first one: examples that are padded differ in length."""
_LOOP_TOKENS = 1 << 32
"""More tokens than a batch has, where a user's loop counts its own."""


@dataclass(frozen=True)
class CommittedRound:
    """A round was committed, and the engine holds the new state. `folders` are those that the participants are believed to write,
    by name and in rank order. `superseded` are the buffers of the state before. An `opening` commit precedes the first round."""

    commit: Commit
    events: Sequence[Event]
    folders: Mapping[str, str]
    superseded: Sequence[Any] = ()
    opening: bool = False

    def leader(self, folder: str) -> str | None:
        """The island that writes this commit into the log of this folder: the first that has the folder, and has not diverged."""
        return next((name for name, one in self.folders.items() if one == folder and name not in self.commit.diverged), None)

    @property
    def written(self) -> StateVersion:
        """How far the logs of all folders go, as the participants reported."""
        reached, reports = dict[str, StateVersion](), self.commit.reports
        for name, folder in self.folders.items():
            reached[folder] = max(reached.get(folder, NO_VERSION), StateVersion.of(reports[name].written))
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
        self._network = membership.network
        self.clock = WallClock()
        self.version = StateVersion(0, 0)
        self.accounting = ElasticAccounting()
        enough, patience_s = quorum_of(run), spec.quorum_timeout_s
        self._batches_per_round = algorithm.steps_per_round * getattr(algorithm, "accumulation", 1)
        self._validator = UpdateValidator(spec.max_delta_ratio, _most_weight(batches, self._batches_per_round))
        mean = ValidatedMean(self._validator, self.clock)
        self._protocol = CommitProtocol(membership, mean, status, ExchangeTimeout(None), log, patience_s, enough)
        self._planned_islands = run.effective_cluster.islands
        units = -(-run.train.steps // algorithm.steps_per_round) * self._planned_islands  # however many islands deliver them
        self._fragmented, offsets = hasattr(algorithm, "offsets"), getattr(algorithm, "offsets", (0,))
        self._means = len(offsets)
        self.leases = DataLeases(shards=batches.num_shards, batches=self._batches_per_round, units=units, cuts=offsets[:-1])
        self.replica = make_replica()
        self._thread = CommunicationThread(self.replica.device)
        self.peers = ElasticPeers(self._protocol, self._thread, self.clock, self._means, self._batches_per_round)
        self._round: Coroutine[Any, Any, Any] | None = None
        """The suspended round of a fragmented algorithm, and the answer that it waits for."""
        self._answer: Any = None
        self._computed: list[ComputeSpan] = []
        """Spans that no commit has counted yet."""
        self._residuals: Mapping[str, Any] = {}
        """The error buffers of this island since a commit whose state it did not compute right."""
        self.state = algorithm.init(params.copy(), self.peers)
        refuse_unreplicated(algorithm, self.state)
        self._rounds_without_delta = 0
        self._donor: str | None = None
        self._received_bytes = 0
        self._observes = False
        """Whether it has just fetched the state: a lease that it held before is old, and the quorum would wait for it."""
        self._digest = self._compute_digest()
        self.withdraw: Callable[[], bool] = bool
        """Withdraws the published state, so that the commit of a fragment is computed in its buffers; False if it is being read."""

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
        return digest_text(self._digest)

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
        self.peers.end()
        self._thread.close(wait=wait)

    def resume_alone(self) -> None:
        """Continue from the held state without any other island: leased units return. Epochs skip those of commits that died with
        their islands. From now on this island is the whole quorum, which others join."""
        self._observes = False
        self.version = StateVersion(self.version.round, self.version.epoch + _EPOCH_GAP)
        self.leases.settle(())  # what is left of them
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
        commit = self.peers.open(self._proposal(written))
        self.version = StateVersion(self.version.round, commit.epoch)
        self.clock.set(commit.result.now_s)
        self.accounting.begin(commit.result.now_s)
        self._record_members(commit)
        self.leases.lease(commit.names)
        self._digest = self._compute_digest()
        return CommittedRound(commit, self.accounting.drain(), self._folders(commit), opening=True)

    def _train(self, alive: int, written: StateVersion) -> CommittedRound | StaleState:
        before = self.state
        try:
            after, commit = (self._next_fragment if self._fragmented else self._whole_round)(self._proposal(written))
        except BaseException:
            self._end_round()
            raise
        if self.name in commit.diverged:  # its delta counts, but its new state does not
            self._end_round()
            self._status.exchanging, self._residuals = False, residuals(after)
            return StaleState(StateVersion(self.version.round + 1, commit.epoch), DIVERGED, commit.quorum.processes)
        self._advance(after, commit, alive)
        self._check_progress(commit)
        # The rest of a round still reads the mean and the outer rule's state.
        superseded = [before.params] if self._fragmented else [before, commit.result.value]
        return CommittedRound(commit, self.accounting.drain(), self._folders(commit), superseded)

    def _folders(self, commit: Commit) -> dict[str, str]:
        """The folders that participants report, where the network accepts them: a joiner cannot take over the run's own log."""
        folders = {name: one.folder for name, one in commit.reports.items() if one.folder}
        return {name: folder for name, folder in folders.items() if self._network.accepts_folder(name, folder)}

    def _proposal(self, written: StateVersion) -> Proposal:
        status = self._status
        report = IslandReport(status.folder, status.address, self._donor, self._received_bytes, written.number)
        return Proposal(self.version, self._digest, report, working=frozenset(self.leases.active))

    def _begin_round(self, proposal: Proposal) -> Coroutine[Any, Any, Any]:
        """A round of the algorithm. An island that comes in the middle of a round observes the rest of it."""
        unit = None if self._observes or self.leases.part else self.leases.active.get(self.name)
        shard, start, batches = unit or DataUnit(0, 0, self._batches_per_round)
        work = Work(shard, start + batches - self._batches_per_round, self.steps_taken, self._batches.examples(shard))
        self.peers.begin(unit, work, self._computed, missed=self.leases.part)
        self.peers.offer(proposal)
        return self.algorithm.round(self.state, self._round_replica(unit), self.peers)

    def _whole_round(self, proposal: Proposal) -> tuple[Any, Commit]:
        """Train a round of one commit. Returns the new State, and the commit."""
        after = self._thread.run(self._begin_round(proposal))
        if self.peers.committed is None:
            raise ConfigError(f"{type(self.algorithm).__name__} ended a round without a mean, and so without a commit.")
        return after, self.peers.committed[0]

    def _next_fragment(self, proposal: Proposal) -> tuple[Any, Commit]:
        """Train up to the next commit. Returns the State after it, and the commit. What follows in the round waits for the next
        call."""
        if self._round is not None:
            self.peers.offer(proposal)
        while self.peers.committed is None:
            self._round = self._round or self._begin_round(proposal)
            try:
                request = self._round.send(self._answer)
            except StopIteration as end:
                if self.leases.part:
                    raise ConfigError(f"{type(self.algorithm).__name__} ended a round with fewer means than its offsets.") from None
                # The engine has computed the shared fields, too.
                self.state, self._round, self._answer = owned(with_shared(end.value, self.shared())), None, None
            else:
                self._answer = self._thread.fulfil(request)
        (commit, mean), self.peers.committed = self.peers.committed, None
        algorithm: Any = self.algorithm
        state = self.state
        # A diverged island returns to the state that it has.
        if self.name not in commit.diverged and _donates_params(state) and self.withdraw():
            state = replace(state, params=state.params.donate())
        return owned(algorithm.agreed(state, self.leases.part, mean)), commit

    def _end_round(self) -> None:
        """Give up what is left of the round, and with it this island's own weights."""
        self.peers.end()
        self._computed.clear()
        if self._round is not None:
            self._round.close()
            self.state, self._round, self._answer = restarted(self.state), None, None

    def _round_replica(self, unit: DataUnit | None) -> Any:
        if unit is None:
            return ObserverReplica(self.params)
        options: dict[str, Any] = {"clock": self.clock, "on_computed": self._computed.append, "pause_s": self._pause_s}
        return LeasedReplica(self.replica, unit, self.peers, allow_nonfinite=True, **options)

    def _advance(self, after: Any, commit: Commit, alive: int) -> None:
        """Move all of the replicated state to this commit."""
        agreement, number = commit.result, self.version.round + 1
        self.state = after
        self.version = StateVersion(number, commit.epoch)
        self._validator.record(agreement.deltas, agreement.rejected)
        self._record_members(commit)
        rejected = [commit.names[rank] for rank in agreement.rejected]
        part, settled = self.leases.part, self.leases.settle(commit.delivered, rejected)
        if not self.leases.active:
            self.leases.lease(commit.names)
        self.leases.check()
        self._digest = self._compute_digest()
        self.accounting.record_round(commit, settled, self.steps_taken, number=number, alive=alive, digest=self.digest)
        if self.name in rejected:
            self.replica = self._make_replica()  # its optimizer moments are as unusable as its delta
        if self.name in rejected or self.leases.part != (part + 1) % self._means:
            self._end_round()  # in the second case no lease is left

    def _record_members(self, commit: Commit) -> None:
        """The participants are present, and this island is one of them."""
        self.accounting.record_members(commit, self.version.round)
        self.expect_peers({name: one.address for name, one in commit.reports.items()})
        self._observes = False
        self._donor, self._received_bytes = None, 0

    def _check_progress(self, commit: Commit) -> None:
        why = "no delta was valid. Lower the learning rate."
        self._rounds_without_delta = count_in_a_row(self._rounds_without_delta, not commit.delivered, why=why)
        if not self.params.part(commit.result.value.layout).is_finite():  # a commit changes no other pieces
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

    def residuals(self) -> dict[str, Any]:
        """This island's error buffers, as of the last commit."""
        return residuals(self.state)

    def set_residuals(self, found: Mapping[str, Any]) -> None:
        """Continue with error buffers that were saved with this state."""
        self.state = replace(self.state, **trees_to_device(dict(found), self.replica.device))

    def restore(
        self,
        metadata: Mapping[str, Any],
        shared: Mapping[str, Any],
        donor: str | None = None,
        received_bytes: int = 0,
        moments: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from a committed state, of a checkpoint or of the island `donor`, and with its inner moments if this island has
        none. Raises ExchangeFailed if the state does not match its digest, and the error of a malformed part; then nothing has
        changed."""
        shared = trees_to_device(dict(shared), self.replica.device)
        if (found := differing_digest(shared, metadata, of_checkpoint=donor is None)) is not None:
            raise ExchangeFailed(
                f"the state of round {metadata['version'][0]} from {donor or 'a checkpoint'} is damaged: it was committed as "
                f"{metadata['digest']}, and is {found}. Use another island's."
            )
        state = with_shared(self.algorithm.init(self.params, self.peers), shared)
        for own, parts in ((self.leases, "leases"), (self._validator, "validator"), (self.accounting, None)):
            copy(own).from_parts(metadata if parts is None else metadata[parts])  # an error must leave this engine as it is
        if moments is not None and not self.replica.has_trained:
            self.replica.load_moments_state(moments)
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
        self.state, self._residuals = replace(state, **self._residuals), {}
        self._digest = self._compute_digest()


def _donates_params(state: Any) -> bool:
    return any(f.name == "params" and f.metadata.get("donated") for f in fields(state))


def _most_weight(batches: Batches, batches_per_round: int) -> float:
    """What a delta of one round weighs at most: deltas are weighted by 1, by the examples of a shard, or by the tokens of their
    batches. All islands read the same data, and so come to the same."""
    loops = isinstance(batches, LoopBatches)
    tokens = _LOOP_TOKENS if loops else _WEIGHT_MARGIN * max(1, batches.tokens(batches.batch(0, 0)))
    return float(max(tokens * batches_per_round, *map(batches.examples, range(batches.num_shards))))
