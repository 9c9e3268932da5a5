"""atoll trains language models on islands of devices that are poorly connected, unequal and unreliable.

    import atoll

    result = atoll.run(atoll.recipes.demo_diloco())
    print(result.summary.val_loss, result.summary.sent_bytes_per_island)

Names are looked up when they are first used, so that importing atoll does not import torch.
"""

from __future__ import annotations

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
    from atoll.algorithms.fsdp import FSDP as FSDP
    from atoll.algorithms.weight_prediction import WP as WP
    from atoll.algorithms.zero1 import ZeRO1 as ZeRO1
    from atoll.data.gaussians import Gaussians as Gaussians
    from atoll.data.instructions import Instructions as Instructions
    from atoll.data.partition import IID as IID
    from atoll.data.partition import ByDomain as ByDomain
    from atoll.data.partition import Dirichlet as Dirichlet
    from atoll.data.partition import KMeans as KMeans
    from atoll.data.text import Text as Text
    from atoll.engines.sim.network import Link as Link
    from atoll.engines.sim.world import Away as Away
    from atoll.engines.sim.world import Cluster as Cluster
    from atoll.engines.sim.world import Lost as Lost
    from atoll.engines.sim.world import Outage as Outage
    from atoll.errors import AtollError as AtollError
    from atoll.errors import ConfigError as ConfigError
    from atoll.loop.islands import Islands as Islands
    from atoll.loop.islands import islands as islands
    from atoll.loop.joining import join as join
    from atoll.models.gpt import GPT as GPT
    from atoll.models.mlp import MLP as MLP
    from atoll.models.pretrained import Pretrained as Pretrained
    from atoll.optim.adam import Adam as Adam
    from atoll.optim.adam import AdamW as AdamW
    from atoll.optim.delayed import Buffered as Buffered
    from atoll.optim.delayed import DelayedNesterov as DelayedNesterov
    from atoll.optim.schedules import WSD as WSD
    from atoll.optim.schedules import Constant as Constant
    from atoll.optim.schedules import Cosine as Cosine
    from atoll.optim.sgd import SGD as SGD
    from atoll.optim.sgd import Momentum as Momentum
    from atoll.optim.sgd import Nesterov as Nesterov
    from atoll.optim.stale import DelayCompensation as DelayCompensation
    from atoll.optim.stale import Polynomial as Polynomial
    from atoll.runs.elastic.place import Elastic as Elastic
    from atoll.runs.elastic.start import resume_elastic as resume_elastic
    from atoll.runs.elastic.start import run_elastic as run_elastic
    from atoll.runs.execute import Result as Result
    from atoll.runs.execute import resume as resume
    from atoll.runs.execute import run as run
    from atoll.runs.export import export as export
    from atoll.runs.export import load_exported as load_exported
    from atoll.runs.on_ray import resume_on_ray as resume_on_ray
    from atoll.runs.on_ray import run_on_ray as run_on_ray
    from atoll.runs.place import Dist as Dist
    from atoll.runs.ray_place import Ray as Ray
    from atoll.runs.real import resume_on as resume_on
    from atoll.runs.real import run_on as run_on
    from atoll.runs.replaying import replay_run as replay_run
    from atoll.runs.run import Keep as Keep
    from atoll.runs.run import Run as Run
    from atoll.runs.run import Train as Train
    from atoll.tree import Tree as Tree

_HOME = {
    "recipes": "atoll.recipes",
    "ACCO": "atoll.algorithms.acco",
    "AsyncLocalSGD": "atoll.algorithms.async_local_sgd",
    "DDP": "atoll.algorithms.ddp",
    "DPU": "atoll.algorithms.delayed_update",
    "DiLoCo": "atoll.algorithms.diloco",
    "FSDP": "atoll.algorithms.fsdp",
    "WP": "atoll.algorithms.weight_prediction",
    "ZeRO1": "atoll.algorithms.zero1",
    "Gaussians": "atoll.data.gaussians",
    "Instructions": "atoll.data.instructions",
    "IID": "atoll.data.partition",
    "ByDomain": "atoll.data.partition",
    "Dirichlet": "atoll.data.partition",
    "KMeans": "atoll.data.partition",
    "Text": "atoll.data.text",
    "Link": "atoll.engines.sim.network",
    "Away": "atoll.engines.sim.world",
    "Cluster": "atoll.engines.sim.world",
    "Lost": "atoll.engines.sim.world",
    "Outage": "atoll.engines.sim.world",
    "AtollError": "atoll.errors",
    "ConfigError": "atoll.errors",
    "Islands": "atoll.loop.islands",
    "islands": "atoll.loop.islands",
    "join": "atoll.loop.joining",
    "GPT": "atoll.models.gpt",
    "MLP": "atoll.models.mlp",
    "Pretrained": "atoll.models.pretrained",
    "Adam": "atoll.optim.adam",
    "AdamW": "atoll.optim.adam",
    "Buffered": "atoll.optim.delayed",
    "DelayedNesterov": "atoll.optim.delayed",
    "WSD": "atoll.optim.schedules",
    "Constant": "atoll.optim.schedules",
    "Cosine": "atoll.optim.schedules",
    "SGD": "atoll.optim.sgd",
    "Momentum": "atoll.optim.sgd",
    "Nesterov": "atoll.optim.sgd",
    "DelayCompensation": "atoll.optim.stale",
    "Polynomial": "atoll.optim.stale",
    "resume_on": "atoll.runs.real",
    "run_on": "atoll.runs.real",
    "Result": "atoll.runs.execute",
    "resume": "atoll.runs.execute",
    "run": "atoll.runs.execute",
    "export": "atoll.runs.export",
    "load_exported": "atoll.runs.export",
    "Dist": "atoll.runs.place",
    "Elastic": "atoll.runs.elastic.place",
    "resume_elastic": "atoll.runs.elastic.start",
    "run_elastic": "atoll.runs.elastic.start",
    "Ray": "atoll.runs.ray_place",
    "replay_run": "atoll.runs.replaying",
    "resume_on_ray": "atoll.runs.on_ray",
    "run_on_ray": "atoll.runs.on_ray",
    "Keep": "atoll.runs.run",
    "Run": "atoll.runs.run",
    "Train": "atoll.runs.run",
    "Tree": "atoll.tree",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("atoll")
    if name not in _HOME:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}. It has: {', '.join(_HOME)}")
    module = import_module(_HOME[name])
    return module if name == "recipes" else getattr(module, name)


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
