"""`atoll.run_islands`: a user's own loop in a run whose processes an engine starts.

With the elastic engine islands join and leave, and an island whose process dies rejoins. With Ray they are workers of an
asynchronous algorithm's hub. A file `train.py` has a function with one parameter, the loop:

    def train(member):
        model = make_model().to(member.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with atoll.run_islands(member, model, optimizer, evaluate=evaluate) as islands:
            for shard, position in islands.batches():  # until the run is over
                loss = ...  # of this batch of this shard
                islands.log(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

`atoll run demo-diloco --engine elastic --processes 3 --workload train.py:train` starts it in three processes. Algorithm, steps and
intervals are the run's. The engine works in a thread of its own. It and the loop take turns: the engine assigns the steps of one
round, and exchanges when the loop has taken them.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Work
from atoll.engines.user_code import LoopBatches, LoopMember, LoopProcess, LoopWorkload
from atoll.loop.rule_optimizer import unwrap_optimizer, was_skipped
from atoll.loop.settings import check_holds
from atoll.replica.flat_parameters import ModuleWeights, persistent_buffers
from atoll.replica.local_replica import ComputeResult


def run_islands(
    member: LoopMember,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] = lambda module: {"loss": math.nan},
    examples: int = 1,
) -> RunIslands:
    """Trains your module as one island of a run. Use it in a `with` block around the loop `islands.batches()`.

    Args:
        member: what your loop was called with.
        model: your module, of single precision. Every process makes it with the same weights; one that joins a running run
            then gets the run's.
        optimizer: yours. It takes one step per batch.
        evaluate: returns measures of a module on held-out data, with at least `loss`. One process calls it with a copy of the
            model, as often as the run's `keep.evaluate_every` says. Without it the loss is NaN.
        examples: number of examples of a shard, for DiLoCo(weighting="examples").
    """
    return RunIslands(member, model, optimizer, evaluate, examples)


class _Assigned(NamedTuple):
    """Steps that the engine assigns to the loop, on the batches of a shard from a position on."""

    work: Work
    steps: int


class UserReplica:
    """The user's module as an engine's replica, in the place of a LocalReplica: `train` waits while the loop steps."""

    optimizer_parameters: tuple[nn.Parameter, ...] = ()
    has_trained = False
    """The optimizer is the user's, so that an engine neither sends its moments to a joiner nor takes any."""

    def __init__(self, weights: ModuleWeights, loop: SimpleQueue[Any], engine: SimpleQueue[Any]) -> None:
        self.load, self.borrowed, self.device, self.weights = weights.write, weights.borrowed, str(weights.device), weights
        self._loop, self._engine = loop, engine

    def train(self, steps: int, work: Work, after: int = 0) -> ComputeResult:
        self._loop.put(_Assigned(work.after(after), steps - after))
        result: ComputeResult = self._engine.get()
        return result

    def buffers(self) -> dict[str, Tensor]:
        return persistent_buffers(self.weights.module)


class RunIslands:
    """This process's island, while its block is open. `run_islands` makes it. After the block the module holds the run's last
    weights; with Ray the run's folder has them."""

    def __init__(
        self,
        member: LoopMember,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[nn.Module], Mapping[str, float]],
        examples: int,
    ) -> None:
        if hasattr(member.run.algorithm, "optimizer"):
            name = type(member.run.algorithm).__name__
            raise ConfigError(f"{name} steps by itself, and the loop of a run steps with its own optimizer. Use DiLoCo.")
        if member.run.train.joiner_moments != "empty":
            raise ConfigError(
                f"train.joiner_moments={member.run.train.joiner_moments}: the engine cannot read the moments of the "
                f"loop's own optimizer. Use train.joiner_moments=empty."
            )
        self._member, self._model, self._optimizer = member, model, unwrap_optimizer(optimizer)
        self._evaluate, self._examples, self._weights = evaluate, examples, ModuleWeights(model)
        if (dtype := self._weights.layout.dtype) != torch.float32:
            raise ConfigError(f"the model is {dtype}, and the islands of a run agree on fp32 weights. Use autocast instead.")
        device, found = torch.device(member.device), self._weights.device
        if found.type != device.type or (device.index is not None and found.index != device.index):
            raise ConfigError(f"the model is on {found}, and {member.name} computes on {device}. Use model.to(member.device).")
        check_holds(self._optimizer, self._weights)
        self._loop, self._engine = SimpleQueue[Any](), SimpleQueue[Any]()
        """What the engine assigns to the loop (an exception ends the loop, None the run), and what the loop computed."""
        self._process: LoopProcess | None = None
        self._losses: list[float] = []
        self._tokens = 0
        self._calls = 0
        """Of the optimizer's step, for the present batch."""
        self._over = False
        self.steps = 0
        """Steps of the optimizer in this process. Steps that a GradScaler skips do not count."""

    def __enter__(self) -> RunIslands:
        batches = LoopBatches(self._member.run.shards, self._examples)
        device = str(self._weights.device)
        self._process = self._member.enter(LoopWorkload(batches, self._copy, self._evaluate, self._make_replica, device))
        self._hook = self._optimizer.register_step_post_hook(self._on_step)
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()
        if kind is not None:
            return  # the process ends, which the other islands notice
        if not self._over:
            raise ConfigError("the block ended before the run did. Iterate over `islands.batches()` up to its end.")
        self._thread.join()
        if (params := self._entered.final_params) is not None:
            self._weights.write(params.to(str(self._weights.device)))

    def batches(self) -> Iterator[tuple[int, int]]:
        """The batches to train on, each as its shard and its position there, until the run is over. Take one optimizer step on
        each. Positions do not end: begin a shard again, in another order if you like."""
        while (assigned := self._loop.get()) is not None:
            if isinstance(assigned, BaseException):
                raise assigned
            (work, steps), before = assigned, self.steps
            self._losses, self._tokens = [], 0
            for position in range(work.start, work.start + steps):
                self._calls, gradients = 0, self._gradients()
                yield work.shard, position
                self._check_stepped(f"batch {position} of shard {work.shard}", gradients)
            if self.steps == before:
                raise ConfigError(f"the loop read {steps} batches and took no step of {type(self._optimizer).__name__}.")
            if self._tokens < 1 and getattr(self._member.run.algorithm, "weighting", "uniform") == "tokens":
                raise ConfigError(
                    f"algorithm.weighting=tokens, and the loop has logged {self._tokens} tokens for the {steps} batches of shard "
                    f"{work.shard} from {work.start} on. Call islands.log(loss, tokens=...) for each batch."
                )
            self._engine.put(ComputeResult(self._losses or [math.nan], self._tokens))
        self._over = True

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradients, each with the number of its changes."""
        gradients = [parameter.grad for parameter in self._weights.parameters.values()]
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def _check_stepped(self, where: str, before: Sequence[tuple[Tensor | None, int]]) -> None:
        """Refuses further steps than the one of a batch, and new gradients that wait for a later one. A batch that the loop skipped
        has left none, and one that a GradScaler skipped has left infinite ones."""
        pairs = zip(before, self._gradients(), strict=True)
        new = [
            gradient for (old, count), (gradient, now) in pairs if gradient is not None and (gradient is not old or now != count)
        ]
        waiting = not self._calls and all(bool(gradient.isfinite().all()) for gradient in new)
        if self._calls > 1 or (waiting and any(bool(gradient.any()) for gradient in new)):
            raise ConfigError(
                f"the loop took {self._calls} steps of {type(self._optimizer).__name__} on {where}, and the run counts one. "
                f"Step once for each pair of batches(). To accumulate gradients, compute several micro-batches for it."
            )

    def log(self, loss: float, tokens: int = 0) -> None:
        """Record the loss of a step, and the tokens of its batch, for the run's log."""
        self._losses.append(float(loss))
        self._tokens += tokens

    @property
    def name(self) -> str:
        """This island's, which it keeps when its process is restarted."""
        return self._member.name

    @property
    def rounds(self) -> int:
        """Of the run, as far as this island knows; of a worker of a hub, its own."""
        return self._entered.rounds

    @property
    def _entered(self) -> LoopProcess:
        if self._process is None:
            raise ConfigError("these islands are not entered: use `with atoll.run_islands(...) as islands`.")
        return self._process

    def _run_engine(self) -> None:
        try:
            if self._weights.device.type == "cuda":  # each thread has a current device
                torch.cuda.set_device(self._weights.device)
            self._entered.run()
        except BaseException as error:
            self._loop.put(error)
        else:
            self._loop.put(None)

    def _copy(self) -> nn.Module:
        return copy.deepcopy(getattr(self._model, "_orig_mod", self._model))

    def _make_replica(self) -> UserReplica:
        """A first replica; or one after a delta of this island was refused, with fresh moments."""
        if self.steps:
            self._optimizer.state.clear()
        return UserReplica(self._weights, self._loop, self._engine)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        self.steps += not was_skipped(optimizer)
