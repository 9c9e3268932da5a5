"""A whole run on real processes in one call, for tests: what `testing.simulate` is to the simulator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from atoll.algorithms.fsdp import FSDP
from atoll.core.events import Event, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Workload
from atoll.engines.processes.engine import ProcessEngine
from atoll.engines.processes.fsdp import ShardedModel
from atoll.engines.processes.process_group import RankContext, create_context
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.optim.sgd import SGD
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.testing.simulated_runs import Recorder

_LIMIT_S = 60.0


class Ran(NamedTuple):
    """What came of it on one rank: figures and events on the first alone."""

    params: Tree
    finished: RunFinished | None
    events: list[Event]


def context_of(group: dist.ProcessGroup, devices: int = 1, *, inside: bool = False) -> RankContext:
    """The processes of a group as islands of so many devices each, which may have an algorithm of their own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    place: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    return create_context(
        FileStore(str(Path(place[0]) / "words"), size), rank, size, devices=devices, inside=inside, start_limit_s=_LIMIT_S
    )


def engine_of(
    world: RankContext,
    algorithm: Algorithm[Any],
    workload: Workload,
    steps: int,
    inner: InnerRule | None = None,
    inside: Algorithm[Any] | None = None,
    **options: Any,
) -> tuple[ProcessEngine, Recorder]:
    """An engine ready to run, and what it reports to. The same choices as `testing.simulate.simulator`."""
    sink = Recorder()
    engine = ProcessEngine(
        algorithm=algorithm,
        world=world,
        params=Tree.of(workload.module()),
        batches=workload.batches,
        make_replica=lambda number: LocalReplica(workload, optimizer=inner or SGD(lr=0.05), seed=number),
        make_sharded=lambda mesh: ShardedModel(workload, mesh=mesh, algorithm=_fsdp(inside), device="cpu", seed=world.rank),
        evaluate=Evaluator(workload),
        sink=sink,
        steps=steps,
        inside=inside,
        limit=ExchangeTimeout(_LIMIT_S),
        **options,
    )
    return engine, sink


def _fsdp(inside: Any) -> FSDP:
    assert isinstance(inside, FSDP)
    return inside


def ran(
    group: dist.ProcessGroup,
    algorithm: Algorithm[Any],
    workload: Workload,
    steps: int,
    inner: InnerRule | None = None,
    inside: Algorithm[Any] | None = None,
    devices: int = 1,
) -> Ran:
    """An algorithm's run on the processes of a group."""
    world = context_of(group, devices, inside=inside is not None)
    engine, sink = engine_of(world, algorithm, workload, steps, inner, inside)
    finished = engine.run()
    params = engine.params().copy()
    engine.close()
    return Ran(params, finished, sink.events)
