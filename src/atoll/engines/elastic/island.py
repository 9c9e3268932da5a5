"""The process of one island: it gets the run's state, trains and commits round by round, and stays until the run is finished."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atoll.core.errors import AtollError, CheckpointError, ConfigError, is_disk_full
from atoll.core.events import Progress, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Sink, Workload
from atoll.core.serialization import load_tree, pack, unpack
from atoll.core.verified_files import expanded
from atoll.engines.elastic.commit import StaleState
from atoll.engines.elastic.commit_log import CommitLog, CommitRecord
from atoll.engines.elastic.direct_network import QUERY_S, DirectNetwork
from atoll.engines.elastic.engine import CommittedRound, ElasticEngine
from atoll.engines.elastic.error_buffers import ErrorBufferFiles
from atoll.engines.elastic.gateway_protocol import wire_version
from atoll.engines.elastic.gpu_claims import claim_devices, island_number
from atoll.engines.elastic.leader_event_log import WARNING, LeaderLog, RunAlreadyFinished, is_lost, write_error
from atoll.engines.elastic.membership import Evicted, Membership, MembershipLost
from atoll.engines.elastic.quorum import new_process, numbered
from atoll.engines.elastic.recovery import Recovery
from atoll.engines.elastic.rendezvous import UNREGISTERED_S, Registry
from atoll.engines.elastic.snapshot_server import SILENT_S, IslandPhase, IslandStatus, Snapshot, SnapshotServer, query_islands
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.liveness import log_while_waiting
from atoll.engines.network_interfaces import LOOPBACK
from atoll.engines.run_lifecycle import RunResults, RunTask
from atoll.engines.spec import write_spec
from atoll.engines.training_setup import loss_of, matrix_products, replica_of
from atoll.engines.user_code import LoopWorkload
from atoll.engines.warm_start_training import RunPreparation, WarmStart
from atoll.replica.evaluator import Evaluator
from atoll.runs.folder import RunFolder, folder_name
from atoll.runs.run_settings import dtype_of
from atoll.runs.settings_validation import check_devices_share_batch
from atoll.runs.workloads import partitioned_by_weights
from atoll.telemetry.sinks import Fanout

_POLL_S = 0.2
_FIRST_PROBES_S, _LONGEST_PROBE_S = 20.0, 30.0
"""How long a new process waits for members that do not answer it, before it joins all the same; and the longest pause between two
probes."""
COMMITTED = "committed round"
"""How the line of a commit begins, in the log of an island."""
_RESCUE_RETRY_S = 2.0
"""Between two attempts to save the last state on a full disk."""
_LOST_S = 1.0
"""A folder that still cannot be written after this time is lost."""
_EVICTED_S, _LONGEST_EVICTED_S = 10.0, 3600.0
"""How long an evicted island stays away, at first and at most."""


Interpose = Callable[[Algorithm[Any], Membership, IslandStatus, Callable[[str], object]], tuple[Algorithm[Any], Membership]]
"""Replaces the algorithm and the membership of an island, whose status and log it gets. Fault injection enters here."""


class FolderLost(CheckpointError):
    """The run's folder cannot be written, and this island of its machine has saved the state in another."""


class IslandOutput(NamedTuple):
    """Where an island writes the lines of its log, and the run's events, which a joiner shows."""

    log: Callable[[str], object]
    sink: Sink = Fanout([])


class IslandProcess:
    """One island.

    Args:
        network: how this island reaches the run and the other islands.
        folder: of the run, where this machine has it.
        own: the settings of a joiner: its devices, and where it saves a state that it could not hand on. None: the run's.
        process: the identity of this process, by which its supervisor reports its end. A joiner has no supervisor, and its folder
            is a copy that it writes alone.
        standby: the name of a rendezvous that this process runs, for the case that the run's own is lost.
        workload: the user's, trained instead of the Run's model and data.
    """

    def __init__(
        self,
        join_info: JoinInfo,
        network: DirectNetwork,
        name: str,
        folder: Path | None,
        output: IslandOutput,
        interpose: Interpose | None = None,
        own: Elastic | None = None,
        process: str | None = None,
        standby: str = "",
        workload: Workload | None = None,
    ) -> None:
        self._join_info, self._run, self._spec, self._name = join_info, join_info.run.resolved, join_info.spec, name
        (self._log, self._sink), self._commits, self._delivered, self._loss = output, 0, 0, math.nan
        self._own = own or self._spec
        self._device_count = self._own.devices
        check_devices_share_batch(self._run, self._device_count)
        self._folder = RunFolder(folder) if folder is not None else None
        self._process, self._evictions = process or new_process(name), EvictionBackoff()
        self._network = network
        self.status = IslandStatus(name, folder is not None, run=network.run_id, process=numbered(self._process, 0))
        self.status.has_copy = folder is not None and own is not None
        self._joins = folder is None or self.status.has_copy
        self.status.standby = standby
        self._server = SnapshotServer(network.host, self.status.to_json, network=network)
        self.status.address = network.address_of(self._server.port)
        network.serve(self._server.adopt, self._log)
        self._registry = Registry(network, self.status, self._log, network.places(join_info))
        limit_s = max(self._spec.quorum_timeout_s * 2, 60.0)
        self._membership = Membership(self.status, network, limit_s, self._log, self._server, self._registry.ended)
        self._registry.on_move = self._membership.move
        self._commit_log = CommitLog()
        self._set_up(limit_s, interpose, workload)

    def _set_up(self, limit_s: float, interpose: Interpose | None, own_workload: Workload | None) -> None:
        """Load the data, and build the engine, the leader log and the recovery."""
        run, folder, preparation = self._run, self._folder, RunPreparation(self._run, own_workload)
        joins = self._joins
        if joins and own_workload is None and partitioned_by_weights(run):
            raise ConfigError(
                f"{self._name} joins from another machine, and this run's data are partitioned by the weights of its warm start, "
                f"which are in the run's folder. Use data.partition=random, or start all islands on the machine with the folder."
            )
        if folder is not None and not joins:
            warm = preparation.warm_start(folder.warm_start, Fanout([]))
        else:  # a joiner fetches the weights
            warm = WarmStart(preparation.initial_weights(), 0, math.nan)
        prepared = preparation.prepared(warm, resizable=self._spec.resizable)
        workload, number = prepared.workload, island_number(self._name)
        loop = workload if isinstance(workload, LoopWorkload) else None
        devices = [loop.device] if loop else []  # which its process has claimed before the loop began
        if not loop:
            devices, self._gpu_claims = claim_devices(run, self._name, self._device_count)  # as long as this process lives
        (device, *more_devices), loss = devices, loss_of(run, workload)

        def leader_log(folder: RunFolder) -> LeaderLog:
            given: dict[str, Any] = {"workload": own_workload, "log": self._log, "cache": preparation.cache}
            results = RunResults(RunTask(run=run, spec=self._spec, folder=folder, **given))
            copy_of = self._name if joins else ""
            return LeaderLog(results, prepared, Evaluator(workload, device, dtype_of(run)), self._commit_log, copy_of)

        self._make_leader_log = leader_log
        self._leader_log = leader_log(folder) if folder is not None else None
        self._error_buffers: ErrorBufferFiles | None = None
        if folder is not None:
            self._error_buffers = ErrorBufferFiles(folder, self._name, run.keep, self._log)
        self._origin: dict[str, str | None] = {
            **prepared.origin,
            "atoll": wire_version(),
            "torch": torch.__version__.partition("+")[0],
        }
        sources = self._registry, self._membership, self._leader_log, self._commit_log
        self._recovery = Recovery(self._name, *sources, self._origin, self._log, limit_s)
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        membership = self._membership
        if interpose is not None:
            algorithm, membership = interpose(algorithm, membership, self.status, self._log)
        self._engine = ElasticEngine(
            algorithm,
            membership,
            self.status,
            warm.params.to(device),
            workload.batches,
            loop.make_replica if loop else lambda: replica_of(run, workload, loss, number, device, more_devices),
            run,
            self._spec,
            self._spec.delay_s(run, number % run.effective_cluster.islands),
            self._log,
        )
        self._engine.withdraw = self._server.withdraw

    def compare_code(self, digest: str) -> None:
        """Refuse to train with islands whose workload or loop is in another file than one with this digest."""
        self._origin["code"] = digest

    @property
    def rounds(self) -> int:
        return self._engine.version.round

    @property
    def final_params(self) -> Tree:
        """The run's last weights, which a process that starts after the end of the run reads from the folder."""
        late = self._folder is not None and not self._engine.version.round and self._folder.finished
        return load_tree(self._folder.final) if late and self._folder is not None else self._engine.params

    # --------------------------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Take part until the run is finished."""
        try:
            if self._leader_log is not None and self._leader_log.is_finished:
                raise RunAlreadyFinished
            with matrix_products(self._run):
                self._join()
                self._train()
                self._finish()
        except RunAlreadyFinished:
            self._log(f"{self._name} has nothing to do: the run is finished")
        except BaseException as error:
            saved = self._rescue(together=isinstance(error, MembershipLost))  # the islands of a machine lose the run together
            if saved and not self._joins:
                self.status.waiting = saved  # its log may be lost, too: the supervisor asks the registry
                self._registry.refresh()
                raise FolderLost(saved) from error
            raise
        if self._leader_log is not None:
            self.status.phase = IslandPhase.FINISHED
            self._registry.refresh()  # islands without the folder wait for it
            self._wait_for_joiners()

    @property
    def outcome(self) -> str:
        """What this island has done, in words."""
        steps = f"step {self._engine.steps_taken} of {self._run.train.steps}"
        return f"took part in {self._commits} commits, {self._delivered} with work of its own, up to {steps}, loss {self._loss:.4g}"

    def _join(self) -> None:
        # Setting up takes a while, in which the registry was read: the island need not wait for as long again.
        source = self._recovery.initialize(self._engine, self._registry.stateless_since_s())
        if self._leader_log is not None:
            self._learn_warm_start(self._leader_log)
        self._log(f"{self._name} begins with {source}")
        if self._error_buffers is not None:
            self._error_buffers.restore(self._engine)
        self._sink.emit(Progress(phase="training", done=self._engine.steps_taken, total=self._run.train.steps))
        self._publish()
        self._wait_for_links(_FIRST_PROBES_S)
        self._membership.join()
        self.status.phase = IslandPhase.JOINED  # not before its heartbeats: the quorum waits for an island that has joined
        self._registry.refresh()
        if not self._engine.leases.active and not self._engine.leases.done:
            self._wait_for_planned_islands()

    def _learn_warm_start(self, leader_log: LeaderLog) -> None:
        """A joiner has not trained the warm start: the log of its folder gets the figures that its donor sent."""
        if self._recovery.warm_start is not None and math.isnan(leader_log.warm_start.loss):
            tokens, loss = self._recovery.warm_start
            leader_log.warm_start = replace(leader_log.warm_start, tokens=tokens, loss=loss)

    def _train(self) -> None:
        while not self._engine.leases.done:
            written = self._leader_log.written if self._leader_log is not None else NO_VERSION
            evicted: Evicted | None = None
            try:
                outcome = self._engine.round(len(self._registry.alive()), written)
            except Evicted as error:
                evicted = Evicted(str(error), error.unreachable)  # without its traceback, which refers to connections
            if evicted is not None:
                self._stay_away(evicted)
                continue
            if isinstance(outcome, CommittedRound):
                self._record(outcome)
            elif isinstance(outcome, StaleState):
                self._catch_up(outcome)
            else:
                self._recovery.confirm(self._engine)
                self._publish()

    def _record(self, committed: CommittedRound) -> None:
        """Publish a commit to joiners, log it, and write it if this island leads."""
        engine = self._engine
        self._commit_log.append(CommitRecord(engine.version, committed.opening, committed.events), committed.written)
        self._publish()
        if not committed.opening:  # every island logs its own digest, so that the leader's need not be trusted
            delivered, (round_, epoch) = self._name in committed.commit.delivered, engine.version
            work = "with" if delivered else "without"
            self._log(f"{COMMITTED} {round_} of epoch {epoch} as {engine.digest}, {work} work of its own")
            self._commits, self._delivered = self._commits + 1, self._delivered + delivered
        for event in committed.events:
            self._sink.emit(event)
            self._loss = event.loss if isinstance(event, RoundFinished) else self._loss
        if self._leader_log is not None:
            self._leader_log.append(engine, committed)
        if self._error_buffers is not None:
            self._error_buffers.save_if_due(engine)
        if not self._server.has_readers:
            engine.reclaim(committed)

    def _publish(self) -> None:
        structure, tensors = pack(self._engine.shared())
        moments = pack({"moments": self._moments()})
        commits, origin = self._commit_log.to_parts(), self._origin
        header = {"metadata": self._engine.metadata(), "structure": structure, "commit_log": commits, "origin": origin}
        if self._leader_log is not None and not math.isnan(self._leader_log.warm_start.loss):
            header["warm_start"] = [self._leader_log.warm_start.tokens, self._leader_log.warm_start.loss]
        elif self._recovery.warm_start is not None:
            header["warm_start"] = [*self._recovery.warm_start]
        self._server.publish(Snapshot({**header, "moments": moments.structure}, tensors | moments.tensors))
        self.status.version = self._engine.version
        self.status.exchanging = False

    def _moments(self) -> dict[str, Any] | None:
        """Copies of this island's inner moments, if it has any and joiners get them: the next round computes in them."""
        replica = self._engine.replica
        if self._run.train.joiner_moments == "empty" or not replica.has_trained:
            return None
        copied: dict[str, Any] = unpack(pack(replica.moments_state()), None)
        return copied

    def _catch_up(self, behind: StaleState) -> None:
        """Fetch the quorum's state while the quorum trains on. If a commit overtook the last fetched state, the island stays a
        member, so that the next commit waits for it; unless a fetch fails."""
        self._log(f"{self._name} is behind: {behind}")
        if self.status.confirmed:
            self._membership.leave()
        self._recovery.catch_up(self._engine, behind.version, behind.holders)
        self._publish()
        self._membership.join()

    def _stay_away(self, evicted: Evicted) -> None:
        """Leave the quorum, which goes on without this island, and return when its links work again. Each eviction over the same
        link doubles the time until the island returns: a link may carry a probe, and no exchange."""
        wait_s = self._evictions.evicted(evicted.unreachable, time.monotonic())
        self._log(f"{evicted} {self._name} returns in {wait_s:.0f} s at the earliest, when it reaches all members")
        self._membership.leave()
        if self._leader_log is not None:
            self._leader_log.release()
        self._registry.report_own_end(self.status.process)
        number = int(self.status.process.rpartition(".")[2]) + 1
        self.status.process, self.status.phase = numbered(self._process, number), IslandPhase.JOINING
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self._wait_for_links(math.inf)
        self._evictions.returned(time.monotonic())
        self._recovery.catch_up(self._engine, self._engine.version)
        self._publish()
        self._membership.join()
        self.status.phase = IslandPhase.JOINED
        self._registry.refresh()

    def _wait_for_links(self, limit_s: float) -> None:
        """Wait until all members that are alive answer this island, since a quorum with a member that another cannot reach fails
        for all; but at most for `limit_s`."""
        deadline_s, wait_s = time.monotonic() + limit_s, _POLL_S
        while time.monotonic() < deadline_s:
            self._registry.refresh()
            members = {name: one.address for name, one in self._registry.alive().items() if one.phase == IslandPhase.JOINED}
            members.pop(self._name, None)
            answers = self._membership.query_islands(members, QUERY_S)
            silent = [name for name in members if name not in answers]
            if not silent:
                return
            self._log(f"{self._name} has not joined the quorum: {', '.join(silent)} cannot be reached from here")
            time.sleep(min(wait_s, max(0.0, deadline_s - time.monotonic())))
            wait_s = min(2 * wait_s, _LONGEST_PROBE_S)

    # ---------------------------------------------------------------------------------------------------------- the beginning

    def _wait_for_planned_islands(self) -> None:
        planned = self._spec.processes or self._run.effective_cluster.islands
        deadline_s = time.monotonic() + self._spec.start_timeout_s
        with log_while_waiting(self._log, f"waiting for {planned} islands to begin together"):
            while time.monotonic() < deadline_s:
                ready = self._ready_islands(planned)
                ahead = any(status.version > self._engine.version for status in ready.values())
                if len(ready) >= planned or ahead:
                    # The lighthouse may not have received the last one's heartbeat yet: the quorum waits for expected peers.
                    self._engine.expect_peers({name: status.address for name, status in ready.items()})
                    return
                time.sleep(max(_POLL_S / 4, planned * _POLL_S / 32))  # each of them reads the registry as often
                self._registry.refresh()
        self._log(f"begins with the islands that are present: {sorted(self._registry.alive())}")

    def _ready_islands(self, planned: int) -> dict[str, IslandStatus]:
        """The registered islands that have joined. If they seem to be enough, those that answer, since some may have died."""
        ready = {name: status for name, status in self._registry.alive().items() if status.phase != IslandPhase.JOINING}
        if len(ready) < planned:
            return ready
        answers = query_islands({name: status.address for name, status in ready.items()}, QUERY_S, self._network)
        return {name: status for name, status in ready.items() if name in answers}

    # --------------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Keep the last state until the run's results are written: their writer may die."""
        self._membership.leave()  # a recovering island must not wait for islands that only stay
        if self._leader_log is None:
            # All islands that have the run's folder may die, return, and fetch the last state here. The registry ends with the run.
            what, answers = "an island that has the run's folder", lambda: self._registry.reachable_since_s < math.inf
            if self._stay(what, self._finished_elsewhere, answers, self._spec.quorum_timeout_s):
                self.status.phase = IslandPhase.FINISHED
                self._registry.refresh()
            else:
                self._rescue()
        else:
            self._wait_for_leader(self._leader_log)
            self._leader_log.finish(self._engine, self._recovery.checkpoint, self._spec.quorum_timeout_s)

    def _wait_for_joiners(self) -> None:
        """Wait until joiners have read that the run is finished: the registry ends with the islands of its machine, and a joiner
        that does not know would save the last state."""
        deadline_s = time.monotonic() + UNREGISTERED_S
        while time.monotonic() < deadline_s:
            others = self._registry.alive().values()
            if not any(one.phase == IslandPhase.JOINED and not one.folder for one in others):
                return
            time.sleep(_POLL_S / 4)
            self._registry.refresh()

    def _may_rescue(self) -> bool:
        """Whether this island has a committed state that its folder may lack. On the machine with the run's folder this is so if
        that folder is lost, and still is after a pause: a disk that is full loses nothing."""
        if self.status.version == NO_VERSION or self._engine.version.round == 0:
            return False
        if self._joins or self._folder is None:
            return self._leader_log is None or not self._leader_log.is_finished
        if not is_lost(write_error(self._folder.path)):
            return False
        time.sleep(_LOST_S)
        return is_lost(write_error(self._folder.path))

    def _rescue(self, *, together: bool = True) -> str:
        """Save the newest committed state, unless another island is to: in this island's copy, or else in a new folder. `atoll run
        --resume` takes both. While the disk is full it tries again, since this process may hold the only copy of the state. Returns
        what was saved, in words. For `together` see `_has_other_holder`."""
        if not self._may_rescue():
            return ""
        version, copy = self._engine.version, self._leader_log if self._joins else None
        folder: RunFolder | None = None
        while not self._has_other_holder(version, together=together or self._engine.leases.done):
            try:
                if copy is None:
                    folder = folder or self._new_rescue_folder()
                    # This machine is not the one that the run listened on, and had one island of the run.
                    alone = replace(self._spec, listen=f"{LOOPBACK}:0", advertise="", processes=1, devices=self._device_count)
                    write_spec(folder.path, alone)
                    leader_log = self._make_leader_log(folder)
                else:
                    leader_log = copy
                self._learn_warm_start(leader_log)
                leader_log.rescue(self._engine)
            except (AtollError, OSError) as error:  # a lock's file is closed with what it could not write
                if not is_disk_full(error):
                    self._log(f"round {version.round} is lost with this island: {error}")
                    return ""
                self._log(f"{WARNING}round {version.round} is not saved, and {self._name} tries again: {error}")
                time.sleep(_RESCUE_RETRY_S)
                continue
            path, first = leader_log.folder.path, 1
            if copy is None:
                first = next((record.version.round for record in self._commit_log), version.round)
            missing = f" Its event log begins with round {first}: earlier events are in the run's own folder." if first > 1 else ""
            why = "no island with the run's folder answers" if self._joins else "the run's folder cannot be written"
            what = f"{self._name} saved round {version.round} in {path}.{missing}"
            saved = f"{why}, so {what} Continue there with: atoll run --resume {path}"
            self._log(saved)
            return saved
        return ""

    def _has_other_holder(self, version: StateVersion, *, together: bool) -> bool:
        """Whether another island answers that keeps this state: one with the run's folder or a copy. If this island has lost the
        run's folder, the others of its machine have, too: of those that end `together`, the one with the lowest name saves the
        state. While the others train on, every island that has the state, or is about to commit a newer one, keeps it."""
        addresses = {one.name: one.address for one in self._registry.alive().values()} | dict(self._engine.peer_addresses)
        addresses.pop(self._name, None)
        answers = query_islands(addresses, QUERY_S, self._network).values()
        if not self._joins and not together:
            return any(one.version >= version or one.exchanging for one in answers)
        others = [one for one in answers if self._joins or one.has_copy or one.name < self._name]
        accepts = self._network.accepts_folder
        return any(one.folder and accepts(one.name, one.folder) and one.version >= version for one in others)

    def _new_rescue_folder(self) -> RunFolder:
        """A new folder, with a number behind its name if an earlier rescue has that name."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        default = f"atoll-rescue-{folder_name(self._run.recipe)}-{stamp}-{os.getpid()}"
        path, number = expanded(self._own.rescue_dir or default).absolute(), 1
        while True:
            try:
                further = path if number == 1 else path.with_name(f"{path.name}-{number}")
                return RunFolder.create(further, self._join_info.run, sys.argv)
            except ConfigError as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, BlockingIOError):
                    raise  # it cannot be written, rather than holds a run
                number += 1

    def _finished_elsewhere(self) -> bool:
        self._registry.refresh()
        answers = query_islands(self._engine.peer_addresses, QUERY_S, self._network)  # the registry may be lost
        return any(one.phase == IslandPhase.FINISHED for one in [*self._registry.alive().values(), *answers.values()])

    def _wait_for_leader(self, leader_log: LeaderLog) -> None:
        """Wait until the leader has finished the run, or has died."""
        leader, addresses = leader_log.other_leader, self._engine.peer_addresses
        if leader is None and leader_log.lease is None and not leader_log.is_copy:
            # It fetched the last state, and does not know its leader: if another island with the folder answers, that may be it.
            self._stay("the leader", lambda: leader_log.is_finished or not self._has_folder_peer(), lambda: True, SILENT_S)
        elif leader is not None and leader in addresses:
            self._log(f"{self._name} stays until {leader} has finished the run")
            asked, limit_s = {leader: addresses[leader]}, self._spec.quorum_timeout_s
            ask = partial(query_islands, asked, SILENT_S, self._network)
            if not self._stay(leader, lambda: leader_log.is_finished, ask, limit_s):
                self._log(
                    f"{leader} answers no more, or has not finished the run within {limit_s:g} s, so {self._name} finishes it"
                )

    def _has_folder_peer(self) -> bool:
        answers = query_islands(self._engine.peer_addresses, QUERY_S, self._network)
        return any(one.folder == "run" and self._network.accepts_folder(name, "run") for name, one in answers.items())

    def _stay(self, leader: str, finished: Callable[[], bool], answers: Callable[[], object], limit_s: float = math.inf) -> bool:
        """Wait until the leader has finished the run, but not for longer than `limit_s`, nor for `SILENT_S` without an answer.
        Returns whether it has."""
        began_s = answered_s = time.monotonic()
        with log_while_waiting(self._log, f"waiting for {leader} to finish the run"):
            while not (done := finished()) and time.monotonic() < min(began_s + limit_s, answered_s + SILENT_S):
                if answers():
                    answered_s = time.monotonic()
                time.sleep(_POLL_S)
        return done

    def close(self, *, wait: bool) -> None:
        self._membership.leave()
        self._registry.close()
        self._registry.report_own_end(self._process)
        self._network.close()
        self._server.close()
        if self._leader_log is not None:
            self._leader_log.release()
        self._engine.close(wait=wait)


class EvictionBackoff:
    """How long an evicted island stays away: twice as long after each eviction over the same link. A link that worked for longer
    than the last time away begins anew.

    >>> backoff = EvictionBackoff()
    >>> backoff.evicted(["b"], 0.0), backoff.returned(10.0), backoff.evicted(["b", "c"], 11.0), backoff.evicted(["c"], 12.0)
    (10.0, None, 20.0, 20.0)
    >>> backoff.returned(40.0), backoff.evicted(["c"], 70.0)
    (None, 10.0)
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._returned_s, self._wait_s = math.inf, 0.0

    def evicted(self, unreachable: Iterable[str], now_s: float) -> float:
        """Returns how long to stay away."""
        if now_s - self._returned_s > self._wait_s:
            self._counts.clear()
        self._counts.update(names := [*unreachable] or [""])
        self._wait_s = min(_EVICTED_S * 2.0 ** (max(self._counts[name] for name in names) - 1), _LONGEST_EVICTED_S)
        return self._wait_s

    def returned(self, now_s: float) -> None:
        self._returned_s = now_s
