"""A user's workload or training loop, which every process of a run loads for itself from a file or a module.

Code is named where a command starts or joins a run. Neither a run's folder nor a network names code that atoll loads.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.core.verified_files import blake2b
from atoll.runs.run_settings import Run, device_of

_FORMS = "FILE.py:NAME or MODULE:NAME, such as train.py:make"


@dataclass(frozen=True)
class LoopBatches:
    """What an engine knows of the data that a user's loop reads: shards, and how many examples each counts for. A Batches."""

    num_shards: int = 1
    shard_examples: int = 1

    def examples(self, shard: int) -> int:
        return self.shard_examples

    def batch(self, shard: int, position: int) -> NoReturn:
        raise ConfigError("a user's loop reads its own batches. A warm start cannot: use train.warm_start_steps=0.")

    def tokens(self, batch: Any) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class LoopWorkload:
    """A user's loop in the place of a workload. The model, the evaluation and the replica exist in a process whose loop has begun.
    The process that supervises has none of them."""

    batches: LoopBatches = LoopBatches()
    make_module: Callable[[], nn.Module] = nn.Identity
    metrics: Callable[[nn.Module], Mapping[str, float]] = lambda module: {}
    make_replica: Callable[[], Any] = field(default=lambda: None)
    device: str = "cpu"

    def module(self) -> nn.Module:
        return self.make_module()

    def loss(self, module: nn.Module, batch: Any) -> NoReturn:
        raise ConfigError("a user's loop computes its own losses.")

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return self.metrics(module)


@dataclass(frozen=True)
class OwnCode:
    """Code that `load_user_code` found. Exactly one of both is given.

    Args:
        name: by which other processes load it, with an absolute path.
        module: that has it.
        workload: makes the workload.
        loop: a user's training loop; see `atoll.run_islands`.
    """

    name: str
    module: ModuleType
    workload: Callable[[], Workload] | None = None
    loop: Callable[[Any], object] | None = None

    @property
    def digest(self) -> str:
        """Of the file that has it, which may lie in an archive, without those that this imports; "" if there is none."""
        spec, file = self.module.__spec__, getattr(self.module, "__file__", None)
        read = getattr(spec.loader if spec is not None else None, "get_data", None)
        return blake2b(read(file)).hexdigest() if read is not None and file is not None else ""

    def open(self) -> Workload:
        """The workload; of a loop, one that stands for it."""
        return LoopWorkload() if self.workload is None else self.workload()


class LoopProcess(Protocol):
    """The engine's part of a process that runs a user's loop."""

    @property
    def rounds(self) -> int:
        """Of the run, as far as this process knows; of a worker of a hub, its own."""

    @property
    def final_params(self) -> Tree | None:
        """The run's last weights; None if this process does not have them."""

    def run(self) -> object:
        """Take part until the run is over."""


class LoopMember:
    """A process of a run that runs a user's loop, to which it is given. `atoll.run_islands` takes it.

    Args:
        run: the run, whose algorithm and number of steps all processes share.
        open_process: makes the engine's part of this process, once.
        name: of this process's island or worker.
        device: where the model belongs, such as "cuda:1": each island of a machine has its own GPU.
    """

    def __init__(self, run: Run, open_process: Callable[[LoopWorkload], LoopProcess], name: str, device: str) -> None:
        self.run, self._open_process, self.name, self.device = run, open_process, name, device
        self._entered = False

    def enter(self, workload: LoopWorkload) -> LoopProcess:
        if self._entered:
            raise ConfigError("this process has taken part in its run. The loop of a run has one block of atoll.run_islands.")
        self._entered = True
        return self._open_process(workload)

    def check_entered(self) -> None:
        if not self._entered:
            raise ConfigError("the loop ended without a block of `with atoll.run_islands(...)`, so it took no part in the run.")


class _Entered(BaseException):
    """A loop has come to its block in a process that does not train."""


def workload_of_loop(code: str, run: Run) -> LoopWorkload:
    """What a loop trains: this process runs it up to its block, for its model and its evaluation."""
    own, found = load_user_code(code), list[LoopWorkload]()
    assert own.loop is not None, "the code is a loop"

    def enter(workload: LoopWorkload) -> NoReturn:
        found.append(workload)
        raise _Entered

    member = LoopMember(run, enter, "the command that drives the run", device_of(run))
    with suppress(_Entered):
        own.loop(member)
    member.check_entered()
    return found[0]


def load_user_code(name: str) -> OwnCode:
    """The function of this name: without parameters it makes a workload, with one parameter it is a loop."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ConfigError(f"workload={name}: it is {_FORMS}.")
    path = Path(where).absolute()
    module = _module_of(path) if where.endswith(".py") else _imported(where)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"workload={name}: {where} has no function {attribute}. Give {_FORMS}.")
    full = f"{path}:{attribute}" if where.endswith(".py") else name
    empty, parameters = inspect.Parameter.empty, inspect.signature(found).parameters.values()
    required = sum(parameter.default is empty and parameter.kind < inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if required > 1:
        raise ConfigError(
            f"workload={name}: {attribute} has {required} parameters. A function without parameters returns a Workload; a function "
            f"with one is a training loop, for atoll.run_islands."
        )
    return OwnCode(full, module, loop=found) if required else OwnCode(full, module, workload=found)


def _module_of(path: Path) -> Any:
    """The module in a file. Its folder can be imported from, as in a script."""
    if not path.is_file():
        raise ConfigError(f"{path}, which the workload names, is not a file. Give {_FORMS}.")
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path):
        return sys.modules[path.stem]
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "the file's name ends as a module's does"
    assert spec.loader is not None, "a file has a loader"
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the module {name}, which the workload names, cannot be imported ({error}). Give {_FORMS}.") from error
