"""How an island gets the run's state: from another island's snapshot, from a checkpoint, or, once only, from initial weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from atoll.core.errors import CheckpointError, ExchangeFailed, one_line
from atoll.core.serialization import Packed, unpack
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.elastic.commit_log import CommitLog
from atoll.engines.elastic.direct_network import QUERY_S
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.leader_event_log import LeaderLog
from atoll.engines.elastic.membership import Membership, MembershipLost
from atoll.engines.elastic.quorum import process_name
from atoll.engines.elastic.rendezvous import UNREGISTERED_S, Registry
from atoll.engines.elastic.snapshot_server import SILENT_S, IslandStatus, fetch_snapshot, query_islands
from atoll.engines.elastic.spec import check_same_origin
from atoll.engines.elastic.state_version import NO_VERSION, VERSION_LIMIT, StateVersion
from atoll.engines.liveness import WAIT_LOG_S, log_while_waiting

_POLL_S = 0.2
_ALONE_S = UNREGISTERED_S
"""How long no island has reported a state, before this one takes itself for the last."""
_FETCH_LIMIT_S = 60.0
"""Without a byte, or by which a donor may be slower than the least rate."""
JOINER_LIMIT_S = 30.0
"""How long a joiner without a state waits while nothing answers at the run's address: the run may be over."""


class NoState(CheckpointError):
    """Neither a live island nor a checkpoint has the state; an island that does not answer now may have it."""


class Recovery:
    """Brings one island's engine up to date.

    Args:
        commit_log: takes over the donor's recent commits.
        origin: of this island's run, data and software, which the donor's must equal.
        limit_s: how long this island waits while neither the registry nor an island with the state answers; a joiner that has no
            state yet waits for `JOINER_LIMIT_S`.
    """

    def __init__(
        self,
        name: str,
        registry: Registry,
        membership: Membership,
        leader_log: LeaderLog | None,
        commit_log: CommitLog,
        origin: Mapping[str, str | None],
        log: Callable[[str], object],
        limit_s: float,
    ) -> None:
        self._name, self._registry, self._membership, self._leader_log = name, registry, membership, leader_log
        self._commit_log, self._origin, self._log, self._limit_s = commit_log, origin, log, limit_s
        self._answered_s = math.inf
        """When an island with the state, or the registry, last answered."""
        self._logged_s = -math.inf
        self._unusable: dict[str, StateVersion] = {}
        """By island, the last version whose failed fetch was logged."""
        self.warm_start: tuple[int, float] | None = None
        """The tokens and the loss of the run's warm start, as the last donor sent them."""
        self.checkpoint: Checkpoint | None = None
        """The last one that was restored."""

    @property
    def _starts_runs(self) -> bool:
        """Whether this island has the run's own folder. A joiner fetches the state from another island, though it has a copy."""
        return self._leader_log is not None and not self._leader_log.is_copy

    def initialize(self, engine: ElasticEngine, stateless_since_s: float = math.inf) -> str:
        """Give a new process its state. Returns what that is, in words. Raises NoState if no state can be read, and MembershipLost
        if no island is left that could have one. By default it observes from now on whether an island reports a state."""
        with log_while_waiting(self._log_silence, "looking for an island that has the run's state, or fetching it"):
            try:
                # Checkpoints are only counted here: a damaged one is harmless while another island has the state.
                if self._starts_runs and self._leader_log is not None and self._leader_log.checkpoints.rounds():
                    last = self._leader_log.last_quorum()
                    found = self._find(engine, NO_VERSION, last.processes, stateless_since_s=stateless_since_s)
                else:
                    found = self._fetch_newest(engine, NO_VERSION)
                return found or self._initial_weights(engine)
            except CheckpointError as error:
                raise NoState(str(error)) from error

    def _log_silence(self, text: str) -> None:
        """Log this, and whether the run's address is silent meanwhile."""
        silent = self._registry.reachable_since_s == math.inf
        self._log(f"{text}; nothing answers at the run's address {self._membership.network.run_address}" if silent else text)

    def catch_up(self, engine: ElasticEngine, target: StateVersion, holders: Collection[str] = ()) -> None:
        """Bring an engine to the version that the processes `holders` have, or a newer one. The island leaves the quorum when a
        fetch fails or no island with the state answers, so that the quorum need not wait."""
        self._replace_state(engine, max(target, engine.version), "the quorum holds a newer state", holders, leaves=True)

    def confirm(self, engine: ElasticEngine) -> None:
        """Continue though the donors of this engine's state are gone. If they went on, they left a checkpoint; else it is the
        newest state."""
        newer = StateVersion(engine.version.round, engine.version.epoch + 1)
        self._replace_state(engine, newer, "no island confirms the state that it fetched", (), leaves=False)

    def _replace_state(
        self, engine: ElasticEngine, at_least: StateVersion, why: str, holders: Collection[str], *, leaves: bool
    ) -> None:
        """Continue from a newer state than the engine holds, or else from its own, for which a checkpoint that cannot be read is no
        replacement."""
        round_ = engine.version.round
        with log_while_waiting(self._log, f"looking for a newer state than round {round_}: {why}"):
            found = self._find(engine, at_least, holders, leaves=leaves)
        if not found:
            engine.resume_alone()
        self._log(f"{self._name} continues with {found or f'its own state, round {round_}: no island has a newer one'}")

    def _find(
        self,
        engine: ElasticEngine,
        at_least: StateVersion,
        holders: Collection[str],
        *,
        leaves: bool = False,
        stateless_since_s: float = math.inf,
    ) -> str:
        """Fetch a state from another island, or else restore a checkpoint; "" if neither is newer than the engine's state.

        A registry that was just restarted is empty, so its first reader is not the last island alive. A checkpoint is restored only
        after no island has reported a state for `_ALONE_S`, in a registry that could be read all the while, and all members of the
        last quorum are known to have ended: else they may go on beyond a network partition. The processes `holders` were members,
        or hold a newer state.
        """
        self._answered_s = holder_answered_s = time.monotonic()
        since_s = min(stateless_since_s, holder_answered_s)
        while True:
            self._registry.refresh()
            if found := self._fetch_newest(engine, at_least, leaves=leaves):
                return found
            answers = _holds(self._holders(engine), at_least)
            holder_answered_s = time.monotonic() if answers else holder_answered_s
            if leaves and time.monotonic() - holder_answered_s > SILENT_S:
                self._membership.leave()  # so that the quorum need not wait for this island
            exists = answers or _holds(self._registered(), at_least)
            if exists:
                since_s = time.monotonic()
            elif time.monotonic() - max(since_s, self._registry.reachable_since_s) >= _ALONE_S and self._is_last(engine, holders):
                try:
                    found = self._restore_newer(engine)
                except CheckpointError as error:
                    if at_least == NO_VERSION:
                        raise  # this island holds no state
                    self._log(f"{error} {self._name} does without it, since it holds round {engine.version.round} itself")
                # Another island that came back at the same time may just have restored that checkpoint.
                if found or not _holds([*self._holders(engine), *self._registered()], at_least):
                    return found
            self._wait(exists, self._limit_s)

    def _is_last(self, engine: ElasticEngine, holders: Collection[str]) -> bool:
        """Whether no other process may go on from this run's state. If some may, it logs which, every so often."""
        if not self._starts_runs and not engine.accounting.quorum.processes:
            return False  # the run has not begun, and begins where its folder is
        others, now_s = [*dict.fromkeys([*engine.successors(), *holders])], time.monotonic()
        ended = self._membership.ended(others)
        awaited = [process_name(one) for one in others if one not in ended]
        if awaited and now_s - self._logged_s > WAIT_LOG_S:
            self._logged_s = now_s
            self._log(
                f"{self._name} waits: {', '.join(awaited)} took part in the last commit and cannot be reached, and may go on "
                f"beyond a network partition. If they are gone for good, stop this run and resume it"
            )
        return not awaited

    def _wait(self, exists: bool, limit_s: float) -> None:
        """Wait for a moment. Raises MembershipLost if no island has been known to have the state, and the registry has not been
        readable, for longer than the limit."""
        now_s = time.monotonic()
        if exists or self._registry.reachable_since_s <= now_s:
            self._answered_s = now_s
        elif now_s - self._answered_s > limit_s:
            raise MembershipLost(
                f"{self._name} waited {limit_s:.0f} s for an island that has the run's state, and no process answers at the run's "
                f"address {self._membership.network.run_address}. Saved checkpoints stand. Is the run over, or its first machine "
                f"down?"
            )
        time.sleep(_POLL_S)

    # ---------------------------------------------------------------------------------------------------------- other islands

    def _registered(self) -> list[IslandStatus]:
        """The other live islands, as they registered: an island that does not answer at once may be far away."""
        return [status for name, status in self._registry.alive().items() if name != self._name]

    def _holders(self, engine: ElasticEngine) -> list[IslandStatus]:
        """The other islands that answer that they have a state, the newest first, and of one state those that confirmed it."""
        addresses = {**engine.peer_addresses, **{one.name: one.address for one in self._registered()}}
        answers = [one for one in query_islands(addresses, QUERY_S, self._membership.network).values() if one.version != NO_VERSION]
        return sorted(answers, key=lambda one: (one.version, one.exchanging, one.confirmed, one.name), reverse=True)

    def _fetch_newest(self, engine: ElasticEngine, at_least: StateVersion, *, leaves: bool = False) -> str:
        """Fetch the newest state of another island; "" if there is none, or if a newer one is about to follow."""
        holders = self._holders(engine)
        if holders and holders[0].exchanging and holders[0].version <= at_least:
            return ""
        confirmed = {one.version for one in holders if one.confirmed}
        for one in holders:
            if one.version < at_least:
                break
            if not one.confirmed and one.version in confirmed:
                continue  # a fetched state is not passed on while an island answers that confirmed it
            found = self._fetch(engine, one, at_least)
            self._answered_s = time.monotonic()  # the fetch may have taken longer than the limit
            if found:
                return found
            if leaves:
                self._membership.leave()
        return ""

    def _fetch(self, engine: ElasticEngine, holder: IslandStatus, at_least: StateVersion) -> str:
        """Fetch this island's state; "" if that fails, or the state is older."""
        try:
            network, weights = self._membership.network, engine.replica.optimizer_parameters
            snapshot = fetch_snapshot(holder.address, _FETCH_LIMIT_S, network, engine.shared(), weights)
            if snapshot is None:
                return ""
            header, metadata = snapshot.header, _checked_metadata(snapshot.header)
            if StateVersion(*metadata["version"]) < at_least:
                return ""
            check_same_origin(self._origin, header["origin"], holder.name)
            shared = unpack(Packed(header["structure"], dict(snapshot.tensors)), engine.shared())
            moments = unpack(Packed(header["moments"], dict(snapshot.tensors)), None)["moments"]
            CommitLog().from_parts(header["commit_log"])  # what cannot be read is an error before the engine changes
            now_s = metadata["wall_time_s"] + snapshot.age_s
            engine.restore({**metadata, "wall_time_s": now_s}, shared, holder.name, snapshot.nbytes, moments)
        except (
            *(ExchangeFailed, CheckpointError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
            RecursionError,  # of a header that is nested more deeply than it can be unpacked
        ) as error:
            if self._unusable.get(holder.name) != holder.version:  # it is tried again several times a second
                self._unusable[holder.name] = holder.version
                self._log(f"the state of {holder.name} cannot be used: {one_line(error)}")
            return ""
        match header.get("warm_start"):
            case [int(tokens), float(loss)]:
                self.warm_start = tokens, loss
        self._commit_log.from_parts(header["commit_log"])
        if self._leader_log is not None:
            self._leader_log.release()  # another island may have written since
        source = "" if holder.confirmed else ", which fetched it itself: no island answers that confirmed it"
        return f"round {engine.version.round}, fetched from {holder.name} ({snapshot.nbytes} bytes){source}"

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def _restore_newer(self, engine: ElasticEngine) -> str:
        """Restore the newest checkpoint, if it is newer than what this island and all others hold."""
        checkpoint = self._leader_log.checkpoints.newest() if self._leader_log is not None else None
        held = max([engine.version, *(one.version for one in self._holders(engine))])
        if checkpoint is None or StateVersion(*checkpoint.metadata["engine"]["version"]) <= held:
            return ""
        return self.restore_checkpoint(engine, checkpoint)

    def restore_checkpoint(self, engine: ElasticEngine, checkpoint: Checkpoint) -> str:
        assert self._leader_log is not None, "a checkpoint lies in the run's folder"
        self._leader_log.restore(checkpoint, engine)
        self.checkpoint = checkpoint
        return f"round {checkpoint.round}, from its checkpoint"

    def _initial_weights(self, engine: ElasticEngine) -> str:
        """The state of a run that has not begun."""
        if self._leader_log is None or not self._starts_runs:
            self._answered_s = time.monotonic()
            while not (found := self._fetch_newest(engine, NO_VERSION)):
                self._wait(bool(self._holders(engine)), JOINER_LIMIT_S)
                self._registry.refresh()
            return found
        if self._leader_log.has_begun:
            raise NoState(
                f"{self._leader_log.folder.path} has a run that was begun, and there is neither an island with its state nor a "
                f"checkpoint. It will not start from random weights again by itself: start a new run, or bring a checkpoint back."
            )
        return "the run's first weights"


def _checked_metadata(header: Any) -> Mapping[str, Any]:
    """The metadata in the header of a snapshot. Raises ValueError if what the state's digest leaves out has other types."""
    match header:
        case {"metadata": {"version": [int(), int()] as version, "wall_time_s": int() | float() as now_s, **others}}:
            match others:
                case {"rounds_without_delta": int(), "peers": {**peers}} if all(isinstance(one, str) for one in peers.values()):
                    if all(0 <= number < VERSION_LIMIT for number in version) and math.isfinite(now_s):
                        return {str(name): value for name, value in header["metadata"].items()}
    raise ValueError("its header is malformed. The next holder of the state is asked")


def _holds(statuses: Iterable[IslandStatus], at_least: StateVersion) -> bool:
    """Whether one of these islands has such a state, or may have it at any moment."""
    return any(one.version != NO_VERSION and (one.version >= at_least or one.exchanging) for one in statuses)
