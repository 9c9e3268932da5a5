"""The process of one island: it gets the run's state, trains and commits round by round, and stays until the run is finished."""

from __future__ import annotations

import math
import re
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm
from atoll.core.serialization import pack
from atoll.engines.driver import digest_without_islands
from atoll.engines.elastic.commit import QuorumSource
from atoll.engines.elastic.engine import BehindQuorum, CommittedRound, ElasticEngine, RoundInputs, StateUnconfirmed, TrainingPlan
from atoll.engines.elastic.leader_log import CommitLog, CommitRecord, LeaderLog, RunAlreadyFinished
from atoll.engines.elastic.membership import Membership, log_while_waiting
from atoll.engines.elastic.recovery import Recovery
from atoll.engines.elastic.rendezvous import Registry
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, Snapshot, SnapshotServer, query_islands
from atoll.engines.elastic.spec import JoinInfo
from atoll.engines.elastic.state_version import NO_VERSION
from atoll.engines.training_setup import loss_of, replica_of
from atoll.engines.warm_start import Cache, WarmStart, get_warm_start, load_data
from atoll.replica.evaluator import Evaluator
from atoll.replica.master_weights import initial_weights
from atoll.runs.folder import RunFolder
from atoll.runs.run import device_of, dtype_of
from atoll.runs.validation import check_devices_share_batch
from atoll.runs.workloads import data_fingerprint, partitioned_by_weights, sharded_workload, single_shard_workload
from atoll.telemetry.sinks import NullSink

_POLL_S, _QUERY_S = 0.2, 1.0
_SILENT_S = 6.0
"""A leader that has not answered for so long after the last commit has died, and a registry that has not is gone with the run."""


class Interposer(Protocol):
    """Replaces parts of an island before it uses them. Fault injection enters here."""

    def algorithm(self, algorithm: Algorithm[Any]) -> Algorithm[Any]: ...

    def membership(self, membership: QuorumSource) -> QuorumSource: ...


Interpose = Callable[[IslandStatus, Callable[[str], object]], Interposer]
"""Makes an island's interposer, from its status and its log."""


class IslandProcess:
    """One island.

    Args:
        host: the address by which other islands reach this machine.
        folder: of the run, where this machine has it.
        devices: that compute for this island; None: as many as the run's settings say.
    """

    def __init__(
        self,
        join_info: JoinInfo,
        address: str,
        host: str,
        name: str,
        folder: Path | None,
        log: Callable[[str], object],
        interpose: Interpose | None = None,
        devices: int | None = None,
    ) -> None:
        self._run, self._spec, self._name, self._log = join_info.run.resolved, join_info.spec, name, log
        self._device_count = devices or self._spec.devices
        check_devices_share_batch(self._run, self._device_count)
        self._folder = RunFolder(folder) if folder is not None else None
        self.status = IslandStatus(name, folder is not None)
        self._server = SnapshotServer(host, self.status.to_json)
        self.status.address = self._server.address
        self._registry = Registry(address, name, self.status.to_json)
        limit_s = max(self._spec.quorum_timeout_s * 2, 60.0)
        self._membership = Membership(self.status, host, join_info.lighthouse, limit_s, log)
        self._commit_log = CommitLog()
        self._interposer = interpose(self.status, log) if interpose is not None else None
        self._set_up(limit_s)

    def _set_up(self, limit_s: float) -> None:
        """Load the data, and build the engine, the leader log and the recovery."""
        run, folder, cache = self._run, self._folder, Cache()
        data = load_data(run, cache)
        plain = single_shard_workload(run, data)
        if folder is None and partitioned_by_weights(run):
            raise ConfigError(
                f"{self._name} joins from another machine, and this run's data are partitioned by the weights of its warm start, "
                f"which are in the run's folder. Use data.partition=random, or start all islands on the machine with the folder."
            )
        if folder is not None:
            warm = get_warm_start(run, plain, file=folder.warm_start, cache=None, sink=NullSink())
        else:  # a joiner fetches the weights
            warm = WarmStart(initial_weights(plain, device_of(run), dtype_of(run)), 0, math.nan)
        workload = sharded_workload(run, data, warm.params)
        origin = {"run": digest_without_islands(run), "data": data_fingerprint(workload)}
        number = _island_number(self._name)
        (device, *more_devices), loss = self._claim_devices(number), loss_of(run, workload)
        self._leader_log: LeaderLog | None = None
        if folder is not None:
            evaluator = Evaluator(workload, device, dtype_of(run))
            self._leader_log = LeaderLog(run, folder, plain, warm, evaluator, origin, cache, self._commit_log, self._log)
        self._origin = {**origin, "atoll": version("atoll"), "torch": torch.__version__.partition("+")[0]}
        sources = self._registry, self._membership, folder, self._leader_log, self._commit_log
        self._recovery = Recovery(self._name, *sources, self._origin, self._log, limit_s)
        algorithm: Algorithm[Any] = run.algorithm  # type: ignore[assignment]
        membership: QuorumSource = self._membership
        if self._interposer is not None:
            algorithm, membership = self._interposer.algorithm(algorithm), self._interposer.membership(membership)
        pause_s = (self._spec.step_delay or 0.0) * run.effective_cluster.step_time(number % run.effective_cluster.islands, run.seed)
        self._engine = ElasticEngine(
            algorithm,
            membership,
            self.status,
            warm.params.to(device),
            workload.batches,
            lambda: replica_of(run, workload, loss, number, device, more_devices),
            TrainingPlan(
                run.effective_cluster.islands, run.train.steps, self._spec.max_delta_ratio, self._spec.quorum_timeout_s, pause_s
            ),
            self._log,
        )

    def _claim_devices(self, number: int) -> list[str]:
        device = device_of(self._run)
        if device != "cuda":
            return [device] * self._device_count
        gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        self._gpus = GpuClaims(gpus, number, self._device_count)  # as long as this process lives
        torch.cuda.set_device(self._gpus.indices[0])
        return [f"cuda:{index}" for index in self._gpus.indices]

    # --------------------------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Take part until the run is finished."""
        try:
            if self._leader_log is not None and self._leader_log.is_finished:
                raise RunAlreadyFinished
            self._join()
            self._train()
            self._finish()
        except RunAlreadyFinished:
            self._log(f"{self._name} has nothing to do: the run is finished")
        if self._leader_log is not None:
            self.status.phase = IslandPhase.FINISHED
            self._registry.refresh()  # islands without the folder wait for it

    def _join(self) -> None:
        # Setting up takes a while, in which the registry was read: the island need not wait for as long again.
        source = self._recovery.initialize(self._engine, self._registry.stateless_since_s())
        self._log(f"{self._name} begins with {source}")
        self._publish()
        self._membership.join()
        self.status.phase = IslandPhase.READY  # not before its heartbeats: the quorum waits for an island that is ready
        self._registry.refresh()
        if not self._engine.leases.active and not self._engine.over:
            self._wait_for_planned_islands()

    def _train(self) -> None:
        self.status.phase = IslandPhase.TRAINING
        while not self._engine.over:
            written = self._leader_log.written if self._leader_log is not None else NO_VERSION
            self._act_on(self._engine.round(RoundInputs(len(self._registry.alive()), written)))

    def _act_on(self, outcome: CommittedRound | BehindQuorum | StateUnconfirmed) -> None:
        if isinstance(outcome, CommittedRound):
            self._record(outcome)
        elif isinstance(outcome, BehindQuorum):
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
            work = "with" if committed.includes_work_of(self._name) else "without"
            round_, epoch = engine.version
            self._log(f"committed round {round_} of epoch {epoch} as {engine.digest}, {work} work of its own")
        if self._leader_log is not None:
            self._leader_log.append(engine, committed)
        if not self._server.has_readers:
            engine.reclaim(committed)

    def _publish(self) -> None:
        structure, tensors = pack(self._engine.shared())
        commits, origin = self._commit_log.to_parts(), self._origin
        header = {"metadata": self._engine.metadata(), "structure": structure, "commit_log": commits, "origin": origin}
        self._server.publish(Snapshot(header, tensors))
        self.status.version = self._engine.version
        self.status.exchanging = False

    def _catch_up(self, behind: BehindQuorum) -> None:
        """Fetch the quorum's state while the quorum trains on. If a commit overtook the last fetched state, the island stays a
        member, so that the next commit waits for it; unless a fetch fails."""
        self._log(f"{self._name} is behind: {behind.reason}")
        if self.status.confirmed:
            self._membership.leave()
        self.status.phase = IslandPhase.RECOVERING
        with log_while_waiting(self._log, "waiting for the state that the quorum holds"):
            self._recovery.catch_up(self._engine, behind.version)
        self._publish()
        self.status.phase = IslandPhase.TRAINING
        self._membership.join()

    # ---------------------------------------------------------------------------------------------------------- the beginning

    def _wait_for_planned_islands(self) -> None:
        planned = self._spec.processes or self._run.effective_cluster.islands
        deadline_s = time.monotonic() + self._spec.start_timeout_s
        with log_while_waiting(self._log, f"waiting for {planned} islands to begin together"):
            while time.monotonic() < deadline_s:
                ready = self._ready_islands(planned)
                ahead = any(entry["version"] > self._engine.version.number for entry in ready.values())
                if len(ready) >= planned or ahead:
                    # The lighthouse may not have received the last one's heartbeat yet: the quorum waits for expected peers.
                    self._engine.expect_peers({name: entry["address"] for name, entry in ready.items()})
                    return
                time.sleep(_POLL_S / 4)
                self._registry.refresh()
        self._log(f"begins with the islands that are present: {sorted(self._registry.alive())}")

    def _ready_islands(self, planned: int) -> dict[str, dict[str, Any]]:
        """The registered islands that have joined. If they seem to be enough, those that answer, since some may have died."""
        ready = {name: e for name, e in self._registry.alive().items() if e["phase"] != IslandPhase.JOINING}
        if len(ready) < planned:
            return ready
        answers = query_islands({name: entry["address"] for name, entry in ready.items()}, _QUERY_S)
        return {name: entry for name, entry in ready.items() if name in answers}

    # --------------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Keep the last state until the run's results are written: their writer may die."""
        self.status.phase = IslandPhase.FINISHING
        self._membership.leave()  # a recovering island must not wait for islands that only stay
        if self._leader_log is None:
            self._wait_until_finished()
            return
        self._wait_for_leader(self._leader_log)
        self._leader_log.finish(self._engine, self._recovery.checkpoint, self._spec.quorum_timeout_s)

    def _wait_for_leader(self, leader_log: LeaderLog) -> None:
        """Wait until the leader has finished the run, or has died."""
        leader, addresses = leader_log.other_leader, self._engine.peer_addresses
        if leader is None and leader_log.lease is None:
            self._give_leader_a_start(leader_log)
        if leader is None or leader not in addresses:
            return
        self._log(f"{self._name} stays until {leader} has finished the run")
        answered_s = time.monotonic()
        with log_while_waiting(self._log, f"waiting for {leader} to finish the run"):
            while not leader_log.is_finished and time.monotonic() - answered_s < _SILENT_S:
                if query_islands({leader: addresses[leader]}, _SILENT_S):
                    answered_s = time.monotonic()
                time.sleep(_POLL_S)

    def _give_leader_a_start(self, leader_log: LeaderLog) -> None:
        """An island that fetched the last state does not know its leader: if another island with the folder answers, that is it."""
        deadline_s = time.monotonic() + _SILENT_S
        while not leader_log.is_finished and time.monotonic() < deadline_s:
            answers = query_islands(self._engine.peer_addresses, _QUERY_S)
            if not any(status["has_folder"] for status in answers.values()):
                return
            time.sleep(_POLL_S)

    def _wait_until_finished(self) -> None:
        """Wait without the run's folder: all islands that have it may die, come back, and fetch the last state here."""
        now_s = reachable_s = time.monotonic()
        deadline_s = now_s + self._spec.quorum_timeout_s
        with log_while_waiting(self._log, "waiting until an island that has the run's folder has finished it"):
            while now_s < min(deadline_s, reachable_s + _SILENT_S):
                self._registry.refresh()
                if any(entry["phase"] == IslandPhase.FINISHED for entry in self._registry.alive().values()):
                    return
                now_s = time.monotonic()
                reachable_s = now_s if self._registry.reachable_since_s <= now_s else reachable_s  # it ends with the run
                time.sleep(_POLL_S)

    def close(self, *, wait: bool) -> None:
        self._membership.leave()
        self._registry.close()
        self._server.close()
        if self._leader_log is not None:
            self._leader_log.release()
        self._engine.close(wait=wait)


def _island_number(name: str) -> int:
    """The number of a planned island, by its name; a joiner from another machine gets one of 100,003 others.

    >>> _island_number("island-0007"), _island_number("box-7-00c0ffee")
    (7, 51601)
    """
    planned = re.fullmatch(r"island-(\d+)", name)
    return int(planned[1]) if planned else zlib.crc32(name.encode()) % 100_003


class GpuClaims:
    """Claims `count` GPUs of this machine, given by their unique ids, for one island until its process ends. Island 0 claims the
    first GPUs, if they are free. If too few are free, the island shares some."""

    def __init__(self, gpus: Sequence[str], number: int, count: int = 1) -> None:
        if count > len(gpus):
            raise ConfigError(f"engine.devices={count}: this machine has {len(gpus)} GPUs. Use at most as many.")
        first = number * count % len(gpus)
        order = (*range(first, len(gpus)), *range(first))
        self._claims: dict[int, socket.socket] = {}
        for index in order:
            if len(self._claims) < count:
                self._claim(index, gpus[index])
        shared = [index for index in order if index not in self._claims]
        self.indices = (*self._claims, *shared)[:count]

    def _claim(self, index: int, gpu: str) -> None:
        # Linux keeps this socket name as long as the socket exists, so a killed process leaves nothing behind.
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            claim.bind(f"\0atoll gpu {gpu}")
            self._claims[index] = claim
            return
        claim.close()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
