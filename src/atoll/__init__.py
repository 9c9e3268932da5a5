"""atoll trains language models on islands of devices that are poorly connected, unequal and unreliable.

    import atoll

    result = atoll.run(atoll.recipes.demo_diloco())
    print(result.summary.val_loss, result.summary.sent_bytes_per_island)

Names are looked up when they are first used, so that importing atoll does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll import recipes as recipes
    from atoll.algorithms.acco import ACCO as ACCO
    from atoll.algorithms.async_local_sgd import AsyncLocalSGD as AsyncLocalSGD
    from atoll.algorithms.ddp import DDP as DDP
    from atoll.algorithms.delayed_update import DPU as DPU
    from atoll.algorithms.diloco import DiLoCo as DiLoCo
    from atoll.algorithms.eager_updates import Eager as Eager
    from atoll.algorithms.streaming import Streaming as Streaming
    from atoll.algorithms.weight_prediction import WP as WP
    from atoll.algorithms.zero import FSDP as FSDP, ZeRO1 as ZeRO1
    from atoll.core.errors import AtollError as AtollError, ConfigError as ConfigError
    from atoll.core.flat_tree import Tree as Tree
    from atoll.data.gaussians import Gaussians as Gaussians
    from atoll.data.instructions import Instructions as Instructions
    from atoll.data.partition import IID as IID, ByDomain as ByDomain, Dirichlet as Dirichlet, KMeans as KMeans
    from atoll.data.text_dataset import Text as Text
    from atoll.engines.elastic.spec import Elastic as Elastic
    from atoll.engines.extend_run import extend as extend
    from atoll.engines.processes.spec import Processes as Processes
    from atoll.engines.ray.spec import Ray as Ray
    from atoll.engines.replay_async_run import replay_run as replay_run
    from atoll.engines.run_lifecycle import Result as Result, resume as resume, run as run
    from atoll.engines.simulator.spec import Simulator as Simulator
    from atoll.loop.context_manager import Islands as Islands, islands as islands
    from atoll.loop.run_islands import RunIslands as RunIslands, run_islands as run_islands
    from atoll.loop.topology import join as join
    from atoll.models.gpt import GPT as GPT
    from atoll.models.mlp import MLP as MLP
    from atoll.models.pretrained import Pretrained as Pretrained
    from atoll.optim.adam import Adam as Adam, AdamW as AdamW
    from atoll.optim.delayed_nesterov import Buffered as Buffered, DelayedNesterov as DelayedNesterov
    from atoll.optim.schedules import WSD as WSD, Constant as Constant, Cosine as Cosine
    from atoll.optim.sgd import SGD as SGD, Momentum as Momentum, Nesterov as Nesterov
    from atoll.optim.staleness import DelayCompensation as DelayCompensation, Polynomial as Polynomial
    from atoll.optim.torch_optimizers import Muon as Muon, TorchOptimizer as TorchOptimizer
    from atoll.runs.cluster import Away as Away, Cluster as Cluster, Link as Link, Lost as Lost, Outage as Outage
    from atoll.runs.export import export as export, load_exported as load_exported
    from atoll.runs.run_settings import Keep as Keep, Run as Run, Train as Train

_NAMES = {
    "algorithms.acco": "ACCO",
    "algorithms.async_local_sgd": "AsyncLocalSGD",
    "algorithms.ddp": "DDP",
    "algorithms.delayed_update": "DPU",
    "algorithms.diloco": "DiLoCo",
    "algorithms.eager_updates": "Eager",
    "algorithms.streaming": "Streaming",
    "algorithms.weight_prediction": "WP",
    "algorithms.zero": "FSDP ZeRO1",
    "core.errors": "AtollError ConfigError",
    "core.flat_tree": "Tree",
    "data.gaussians": "Gaussians",
    "data.instructions": "Instructions",
    "data.partition": "IID ByDomain Dirichlet KMeans",
    "data.text_dataset": "Text",
    "engines.elastic.spec": "Elastic",
    "engines.replay_async_run": "replay_run",
    "engines.extend_run": "extend",
    "engines.processes.spec": "Processes",
    "engines.ray.spec": "Ray",
    "engines.run_lifecycle": "Result resume run",
    "engines.simulator.spec": "Simulator",
    "loop.context_manager": "Islands islands",
    "loop.run_islands": "RunIslands run_islands",
    "loop.topology": "join",
    "models.gpt": "GPT",
    "models.mlp": "MLP",
    "models.pretrained": "Pretrained",
    "optim.adam": "Adam AdamW",
    "optim.delayed_nesterov": "Buffered DelayedNesterov",
    "optim.schedules": "WSD Constant Cosine",
    "optim.sgd": "SGD Momentum Nesterov",
    "optim.staleness": "DelayCompensation Polynomial",
    "optim.torch_optimizers": "Muon TorchOptimizer",
    "runs.cluster": "Link Away Cluster Lost Outage",
    "runs.export": "export load_exported",
    "runs.run_settings": "Keep Run Train",
}
_HOME = {"recipes": "atoll.recipes"} | {name: f"atoll.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def check_platform() -> None:
    """Refuses Windows, which lacks the file locks and process groups that runs use."""
    if sys.platform == "win32":
        from atoll.core.errors import ConfigError

        raise ConfigError("atoll needs Linux or macOS, and this is Windows. Install and start it inside WSL 2.")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("atoll")
    if name not in _HOME:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}. It has: {', '.join(_HOME)}")
    check_platform()
    module = import_module(_HOME[name])
    return module if name == "recipes" else getattr(module, name)


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
