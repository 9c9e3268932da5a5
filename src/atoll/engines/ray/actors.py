"""Hub and workers as Ray has them: actors, which import Ray where they run."""

from __future__ import annotations

from typing import Any

from atoll.engines.ray import bootstrap
from atoll.engines.ray.hub_actor import HubServer
from atoll.engines.ray.hub_spec import HubOrder
from atoll.engines.ray.worker import Worker, WorkerOrder

_CALLS = 16  # besides those of workers


class HubActor(HubServer):
    """The hub."""

    def __init__(self, order: HubOrder) -> None:
        super().__init__(order, bootstrap.library().put)


class WorkerActor(Worker):
    """A worker."""

    def __init__(self, order: WorkerOrder, hub: Any) -> None:
        super().__init__(order, bootstrap.library(), hub)


def start_hub(ray: Any, order: HubOrder) -> Any:
    """A hub on this very machine, which has the run's folder. It comes back when it dies, as often as it must."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(HubActor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # who asks knows what may be asked twice
        max_concurrency=2 * order.places + _CALLS,
        scheduling_strategy=here,
    )
    return actor.remote(order)


def start_worker(ray: Any, order: WorkerOrder, hub: Any, *, cpus: float, gpus: float) -> tuple[Any, Any]:
    """A worker wherever there is room, and a reference to what its work will come to."""
    actor = ray.remote(WorkerActor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
    worker = actor.remote(order, hub)
    return worker, worker.work.remote()
