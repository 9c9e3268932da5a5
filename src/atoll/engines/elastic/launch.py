"""Launching an elastic run: this process supervises the rendezvous and the islands of this machine until the run is finished."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm
from atoll.engines.driver import Driver, Result, RunRequest, RunTask
from atoll.engines.elastic.rendezvous import free_port, is_free
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.state_version import refuse_unreplicated
from atoll.engines.elastic.supervisor import ProcessHooks, Supervisor
from atoll.engines.spec import refuse_torchrun, write_spec
from atoll.runs.run import Run, precision_notice
from atoll.runs.validation import check_devices_share_batch
from atoll.telemetry.sinks import Fanout


def start(request: RunRequest) -> Result:
    refuse_torchrun(Elastic())
    if request.run is not None:
        check_algorithm(request.run)
    with request.open() as task:
        if not task.finished:
            supervise(task)
        return replace(task, workload=None).reopen()


def check_algorithm(run: Run) -> None:
    """Refuse an algorithm whose state would be lost with an island."""
    algorithm: Any = run.resolved.algorithm
    if not isinstance(algorithm, AsyncAlgorithm):  # the spec refuses those
        refuse_unreplicated(algorithm, algorithm.init(Tree.of({"w": torch.zeros(1)}), _SinglePeer()))


class _SinglePeer:
    """Peers of an algorithm that is initialised only to look at its State."""

    rank, size = 0, 1


def supervise(task: RunTask) -> None:
    """Start the islands of this machine, restart those that die, and return when the run is finished."""
    spec = task.spec
    assert isinstance(spec, Elastic)
    check_devices_share_batch(task.run, spec.devices)
    notice = precision_notice(task.run)
    if notice is not None:
        task.log(notice)
    # The run's work stays divided by the planned islands. Its port stays the same, so that joiners find it again, if it is free.
    port = spec.port if spec.port and is_free(spec.host, spec.port) else free_port(spec.host)
    spec = replace(spec, processes=spec.processes or task.run.cluster.islands, listen=f"{spec.host}:{port}")
    task = replace(task, spec=spec)
    write_spec(task.folder.path, spec)
    with Fanout(list(task.sinks)) as sink:
        if task.run.train.warm_start_steps:  # once, before the islands that all start from it
            driver = Driver(replace(task, workload=None))
            driver.make_warm_start(driver.plain_workload(), sink, resuming=False)
        injected = task.faults.attach(task) if task.faults is not None else nullcontext(ProcessHooks())
        with injected as hooks:
            supervisor = Supervisor(task, sinks=[sink], hooks=hooks)
            task.log(hooks.joining or f"join this run from another machine: atoll run --join {supervisor.address}")
            supervisor.run()
