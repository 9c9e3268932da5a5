"""The commit protocol: all live islands that hold the same state commit a proposal together, or none of them does.

An attempt forms a quorum, compares the members' states, and leaves out members with an older one. It commits when every participant
has received from every other that all came to the same. If a member dies on the way, the survivors try again with a new quorum;
their state has not changed. A member that dies after it received all votes, and before the others did, holds a state from which no
island continues: the survivors repeat the round in a later epoch.

In a network partition only one side commits: the majority of the last commit's participants, less those that were reported to have
ended. The other side waits. A participant that sent its vote and received not all others does not know whether they committed. It
then goes on only with enough participants of that attempt, too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.core.errors import ExchangeFailed
from atoll.core.verified_files import parse_json
from atoll.engines.elastic.aggregation import Agreement, Disagreement, IslandReport, Proposal, ValidatedMean
from atoll.engines.elastic.direct_network import QUERY_S
from atoll.engines.elastic.membership import Evicted, Membership, MembershipLost
from atoll.engines.elastic.quorum import LastQuorum, Member, Quorum, process_name
from atoll.engines.elastic.quorum_monitor import QuorumMonitor
from atoll.engines.elastic.snapshot_server import SILENT_S, IslandStatus, query_islands
from atoll.engines.elastic.state_version import VERSION_LIMIT, HeldState, StateVersion, attempt_epoch, select_state
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import ExchangeTimeout

_CONNECT_S, _LONGEST_S = 2.0, 60.0
"""The limit for connecting. It doubles with every failed attempt, as QUERY_S and SILENT_S do, since a link may be slow, up to the
last."""
_QUERIES_PER_S = 8
"""Status queries that each member of a quorum can be sure to get answers to in a second."""
_EVICT_AFTER = 3
"""Failures of the same quorum in a row, before one of its members has to leave."""
_RETRY_S, _LONGEST_RETRY_S, _LOG_S = 0.1, 1.0, 10.0


class StaleState(Exception):
    """The quorum holds a newer state than this island, or other bits. The island must fetch `version` before it can continue. The
    processes `holders` have that state."""

    def __init__(self, version: StateVersion, why: str, holders: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.version, self.holders = version, tuple(holders)


DIVERGED = "its bits differ from the other islands': its kind of machine computes otherwise than theirs"


class UnconfirmedState(Exception):
    """All members fetched the state that they hold, from islands that are gone and may have committed further rounds."""


class MemberMissing(Exception):
    """An island is alive and not in this quorum, or is in it and about to leave."""


class MinoritySide(MemberMissing):
    """The islands of this quorum are no majority of the last commit's: the others may go on beyond a network partition."""


@dataclass(frozen=True)
class Commit:
    """A committed proposal."""

    names: tuple[str, ...]  # of the participants, in rank order
    diverged: tuple[str, ...]  # participants whose bits differ. Each must fetch the others' state afterwards
    epoch: int
    attempts: int
    result: Agreement
    quorum: LastQuorum = LastQuorum()

    @property
    def reports(self) -> dict[str, IslandReport]:
        return dict(zip(self.names, self.result.reports, strict=True))

    @property
    def delivered(self) -> list[str]:
        """The islands whose deltas are in the mean."""
        ranks = [rank for rank, one in enumerate(self.result.deltas) if one.weight and rank not in self.result.rejected]
        return [self.names[rank] for rank in ranks]


class CommitProtocol:
    """One island's side of all commits. A peer that is alive and does not ask for a quorum is waited for `patience_s`, or only
    until `enough` islands with work ask for one."""

    def __init__(
        self,
        membership: Membership,
        mean: ValidatedMean,
        status: IslandStatus,
        timeout: ExchangeTimeout,
        log: Callable[[str], object],
        patience_s: float,
        enough: int | None = None,
    ) -> None:
        self._enough = enough
        self._membership, self._mean, self._status, self._timeout = membership, mean, status, timeout
        self._log, self._patience_s = log, patience_s
        self.peers: Mapping[str, str] = {}
        """The participants of the last commit besides this island, and their addresses."""
        self._wasted_bytes, self._failures = (0, 0), 0
        """The payload and control bytes of the failed attempts of this commit, and their number."""
        self.last_quorum = LastQuorum()
        """Of the state that this island holds: who may go on from it."""
        self._in_doubt: list[tuple[StateVersion, LastQuorum]] = []
        """Failed attempts since then that this island voted in: other participants may have received all votes, and hold this
        version."""
        self._last_epoch = 0
        """Of the attempts that this island took part in."""
        self._last_members: tuple[Member, ...] = ()
        self._failures_in_a_row = 0
        """The members of the last quorum, and how often they have failed."""

    def commit(self, proposal: Proposal) -> Commit:
        """Commit a proposal with all live islands that hold the same state.

        After a commit `status.exchanging` stays set until the caller has published the new state. Islands that are in a round go on
        without an island that proposes an opening commit.

        Raises:
            StaleState: the quorum goes on without this island.
            UnconfirmedState: no member knows whether this is the newest state.
            MembershipLost: this island cannot take part any more.
        """
        self._wasted_bytes, self._failures, self._failures_in_a_row = (0, 0), 0, 0
        began_s = logged_s = time.monotonic()
        retry_s = _RETRY_S
        while True:
            try:
                return self._attempt(proposal, began_s)
            except MembershipLost:
                raise
            except MemberMissing as missing:
                failed, why = False, str(missing)
                self._status.waiting = why if isinstance(missing, MinoritySide) else ""
            except (ExchangeFailed, Disagreement) as error:
                failed, why = True, str(error)
            if failed:
                # Outside of the except block: the exception's traceback refers to the connections that are to be closed.
                self._membership.abort()
                self._failures, self._failures_in_a_row = self._failures + 1, self._failures_in_a_row + 1
                number = proposal.version.round
                self._log(f"attempt {self._failures} of round {number} has failed, and the survivors try again: {why}")
                self._timeout.restart()
                continue
            if time.monotonic() - logged_s > _LOG_S:
                logged_s = time.monotonic()
                self._log(why)
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _attempt(self, proposal: Proposal, began_s: float) -> Commit:
        quorum = self._membership.form_quorum(proposal.version, self._failures)
        _check_names(quorum)
        enough = self._enough is not None and len(proposal.working.intersection(quorum.names)) >= self._enough
        self._check_missing_peers(proposal.version, quorum.names, began_s, -math.inf if enough else self._patience_s)
        limit_s = _CONNECT_S if quorum.connected else self._check_members(quorum)
        group = self._membership.connect(quorum, limit_s)
        collectives = GroupCollectives(group, timeout_s=self._timeout.start(), names=quorum.names)
        collectives.sent_bytes, collectives.control_bytes = self._wasted_bytes
        self._status.exchanging = True
        monitor = QuorumMonitor(quorum.others, group, self._scaled(SILENT_S), self._membership.query)
        try:
            with monitor:
                commit = self._exchange(collectives, monitor, quorum, proposal)
        except BaseException as error:
            self._status.exchanging = False
            self._wasted_bytes = collectives.sent_bytes, collectives.control_bytes
            suspects = {*(error.suspects if isinstance(error, Disagreement) else ())}
            self._status.suspects |= suspects | ({monitor.failed} if monitor.failed else set())
            if monitor.failed and isinstance(error, ExchangeFailed):
                raise ExchangeFailed(f"{monitor.failed} has not answered for {self._scaled(SILENT_S):.0f} s") from error
            raise
        self._timeout.finish()
        self._status.suspects = frozenset()
        self._status.confirmed, self._status.waiting = True, ""
        return commit

    def _exchange(self, collectives: GroupCollectives, monitor: QuorumMonitor, quorum: Quorum, proposal: Proposal) -> Commit:
        """Compare the members' states, and exchange the proposal among those that hold the valid one."""
        version, in_round, network = proposal.version, proposal.tree is not None, self._membership.network
        self._last_epoch = max(self._last_epoch, version.epoch)
        confirmed, has_folder = self._status.confirmed, quorum.own.has_folder
        state = *version, in_round, self._last_epoch + 1, proposal.digest, confirmed, has_folder
        rows = collectives.all_gather_numbers(*state, bool(self._in_doubt))
        damaged = [name for name, row in zip(quorum.names, rows, strict=True) if not _is_possible(row)]
        if damaged:
            raise Disagreement(f"the state that {', '.join(damaged)} announced is impossible: it was damaged on the way", damaged)
        folders = [bool(row[6]) and network.accepts_folder(name, "run") for name, row in zip(quorum.names, rows, strict=True)]
        states = [
            HeldState(tuple(map(int, row[:3])), int(row[4]), bool(row[5]), own) for row, own in zip(rows, folders, strict=True)
        ]
        valid, diverged = select_state(states)
        first = int(max(rows[rank][3] for rank in (*valid, *diverged)))
        # The delta of an island whose bits differ counts, if the island computed those bits itself.
        diverged = [rank for rank in diverged if states[rank].confirmed]
        if quorum.rank not in (*valid, *diverged):
            newest, holders = StateVersion(*states[valid[0]].position[:2]), [quorum.members[rank].identity for rank in valid]
            why = DIVERGED if newest == version else f"the quorum holds {newest}, and this island {version}"
            raise StaleState(newest, why, holders)
        if not any(states[rank].confirmed for rank in valid):
            raise UnconfirmedState
        stale = [rank for rank in range(collectives.size) if rank not in (*valid, *diverged)]
        collectives.remove(stale)
        monitor.ignore(stale)
        names = collectives.names
        epoch = self._last_epoch = attempt_epoch(names, first)
        announced = [row for rank, row in enumerate(rows) if rank not in stale]
        # Without an island of the run's own folder, the first with a copy leads.
        leads = min((rank for rank in valid if rows[rank][6]), key=lambda rank: not folders[rank], default=None)
        leader = None if leads is None else quorum.members[leads].identity
        members = LastQuorum(tuple(quorum.members[rank].identity for rank in range(len(rows)) if rank not in stale), leader)
        self._check_majority(collectives, members.processes, any(row[7] for row in announced))
        after = StateVersion(version.round + in_round, epoch)
        vote = replace(proposal, before_vote=lambda: self._in_doubt.append((after, members)))
        result = self._mean(collectives, announced, vote)
        self.hold(after, members)
        return Commit(names, tuple(quorum.names[rank] for rank in diverged), epoch, self._failures + 1, result, members)

    def _check_majority(self, collectives: GroupCollectives, present: Sequence[str], in_doubt: object) -> None:
        """Raise MinoritySide unless these participants may go on from the state that they hold, and also could if each failed
        attempt that one of them took part in had been completed by other participants, which may be on another side by now."""
        if not in_doubt and {*self.last_quorum.processes} <= {*present}:
            return
        own = [sorted(self._membership.ended(self.successors())), [doubt for _, doubt in self._in_doubt]]
        known, quorums = set[str](), {self.last_quorum}
        try:
            for text in collectives.all_gather_text(json.dumps(own)):
                theirs, doubts = parse_json(text)
                known.update(map(str, theirs))
                quorums.update(LastQuorum(tuple(map(str, processes)), leader) for processes, leader in doubts)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise Disagreement(f"what an island knows of ended islands was damaged on the way: {error}") from error
        for last in quorums:
            if not last.allows(present, known):
                raise MinoritySide(
                    f"{', '.join(map(process_name, present))} {'waits' if len(present) == 1 else 'wait'}: "
                    f"{', '.join(last.absent(present, known))} took part in the last commit and cannot be reached, and may go on "
                    f"beyond a network partition, as the larger side or the one with the leader. If that side is gone for good, "
                    f"stop this run and resume it"
                )

    def hold(self, version: StateVersion, quorum: LastQuorum) -> None:
        """This island holds the state of this version, which this quorum committed. Attempts before it are settled."""
        self.last_quorum, self._in_doubt = quorum, [(after, doubt) for after, doubt in self._in_doubt if after > version]

    def successors(self) -> list[str]:
        """The processes that may go on from the state that this island holds, or already have."""
        quorums = [self.last_quorum, *(doubt for _, doubt in self._in_doubt)]
        return [*dict.fromkeys(process for last in quorums for process in last.processes)]

    # -------------------------------------------------------------------------------------------------------------- membership

    def _check_missing_peers(self, version: StateVersion, present: Sequence[str], began_s: float, patience_s: float) -> None:
        """Query the peers that are not in the quorum: a restarted lighthouse may form a quorum of one while another island lives,
        and both would go on alone. If a peer is ahead, this island needs its state."""
        missing = {name: address for name, address in self.peers.items() if name not in present}
        for name, status in query_islands(missing, self._scaled(QUERY_S), self._membership.network).items():
            if status.version > version:
                raise StaleState(status.version, f"{name} holds {status.version}, and this island {version}", [status.identity])
            if status.version == version and time.monotonic() - began_s < patience_s:
                raise MemberMissing(f"{name} is alive and not in this round's quorum yet. The quorum waits for it.")

    def _check_members(self, quorum: Quorum) -> float:
        """Query the members before connecting, which needs all of them. Returns how long connecting may take."""
        if quorum.members != self._last_members:
            self._last_members, self._failures_in_a_row = quorum.members, 0
        began_s = time.monotonic()
        others = {member.name: member.address for member in quorum.others.values()}
        # All members query all others at once, and may share few cores.
        answers = self._membership.query_members(quorum, self._scaled(QUERY_S * max(1.0, len(others) / _QUERIES_PER_S)))
        took_s = time.monotonic() - began_s
        silent = [name for name in others if name not in answers]
        self._status.suspects |= set(silent)
        if self._failures_in_a_row >= _EVICT_AFTER:
            self._failures_in_a_row = 0
            theirs = {name: status.suspects for name, status in answers.items()}
            self._evict(quorum, {quorum.own.name: self._status.suspects, **theirs})
        if silent:
            raise ExchangeFailed(f"{', '.join(silent)} joined this quorum and does not answer any more")
        return self._scaled(_CONNECT_S + 10 * took_s)

    def _evict(self, quorum: Quorum, suspects: Mapping[str, Collection[str]]) -> None:
        """Make one member of a quorum that fails again and again leave. All members that answer choose the same one."""
        evicted = quorum.choose_eviction(suspects)
        others = ", ".join(member.name for member in quorum.members if member is not evicted)
        if evicted is quorum.own:
            links = {*suspects[evicted.name], *(name for name, others in suspects.items() if evicted.name in others)}
            raise Evicted(
                f"{evicted.name} and {others} have failed {_EVICT_AFTER} times in a row. {evicted.name} has most faulty links, or "
                f"joined last, and is evicted. Check that all of them reach each other on any port, {evicted.name} at "
                f"{evicted.address.rpartition(':')[0]}, and that its link changes no bits.",
                sorted(links.intersection(quorum.names)),
            )
        self._log(
            f"{evicted.name} is evicted: this quorum has failed {_EVICT_AFTER} times in a row, and {evicted.name} has most faulty "
            f"links, or joined last"
        )
        raise MemberMissing(f"{evicted.name} was evicted, and has not left yet.")

    def _scaled(self, seconds: float) -> float:
        return min(seconds * 2.0**self._failures, _LONGEST_S)


def _check_names(quorum: Quorum) -> None:
    """Data are leased by name: of two islands of one name the later leaves."""
    later = quorum.find_duplicate()
    if later is not None and later is quorum.own:
        raise MembershipLost(f"another island is called {later.name} too, and joined earlier. Give this one a name of its own.")
    if later is not None:
        raise MemberMissing(f"there are two islands called {later.name}. The later one leaves.")


def _is_possible(row: Sequence[float]) -> bool:
    """Whether an announced state is one that an island can hold. Else a damaged round or epoch would be later than any other, and
    stay so. The vote finds smaller damage."""
    return all(map(math.isfinite, row)) and all(0 <= number < VERSION_LIMIT for number in (row[0], row[1], row[3]))
