"""`atoll.islands`: a `with` block around a plain PyTorch loop.

Under torchrun every process is an island. Without torchrun there is one island and no network:

>>> import atoll, torch
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=2)) as islands:
...     for _ in range(5):
...         model(torch.ones(1, 2)).square().sum().backward()
...         optimizer.step()  # every 2 steps the islands average
...         optimizer.zero_grad()
>>> islands.steps, islands.rounds
(5, 3)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, Sink
from atoll.loop.rounds import LoopCheckpoint, LoopContext
from atoll.loop.rule_optimizer import IslandsOptimizer, was_skipped
from atoll.loop.settings import LoopSettings

T = TypeVar("T", bound=Callable[..., None])


def islands(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    algorithm: Algorithm[Any],
    *,
    mesh: DeviceMesh | None = None,
    limit_s: float | None = None,
    finish: Literal["together", "alone"] = "together",
    examples: int | None = None,
    trusted_network: bool = False,
    average_buffers: bool = False,
    out: str | Path | None = None,
    sinks: Sequence[Sink] = (),
) -> Islands:
    """Trains your module together with the other islands. Use it in a `with` block around your loop.

    Args:
        model: your module. Weights are copied in and out; parameters are never rebound. On entry every island loads island 0's.
        optimizer: yours, for an algorithm that counts its steps (DiLoCo). With several optimizers, the one that steps last. None
            for an algorithm that steps by itself (ACCO, DDP, ZeRO1, DPU, WP): call `islands.step()` after each `loss.backward()`.
        algorithm: the same on all islands.
        mesh: for islands of several devices: a DeviceMesh ("island", "device"), with the model wrapped over mesh["device"].
        limit_s: timeout of the handshake on entry and of each exchange. None: 600 s for the handshake and the first exchange, then
            ten times the longest interval between two exchanges, at least 60 s. The first process logs it.
        finish: what an island does when its batches are used up. "together": it stays, with weight 0, until all islands are done;
            all end with the same weights. "alone": it leaves after one more exchange, and the others continue without it.
        examples: number of examples of this island, for DiLoCo(weighting="examples").
        trusted_network: allows islands on several machines: everyone on the network between them can read and change the run. See
            `atoll.join`.
        average_buffers: at the end of each round all islands get the mean of their floating-point buffers, such as BatchNorm's
            statistics. Otherwise these stay the island's own.
        out: new folder for the events of all islands, which `atoll report` reads. The first process writes it.
        sinks: further receivers of events, in the first process. Give `out` and `sinks` on all islands or on none.
    """
    return Islands(
        LoopSettings(
            model=model,
            optimizer=optimizer,
            algorithm=algorithm,
            mesh=mesh,
            limit_s=limit_s,
            finish=finish,
            examples=examples,
            trusted_network=trusted_network,
            average_buffers=average_buffers,
            out=None if out is None else str(out),
            sinks=sinks,
        )
    )


_OPEN: WeakSet[Islands] = WeakSet()
"""The open block of this process."""


class Islands:
    """This island, while its block is open. `islands` makes it."""

    def __init__(self, settings: LoopSettings) -> None:
        self._settings = settings
        self._own_optimizer: IslandsOptimizer | None = None
        if settings.stepped_by == "algorithm":
            parameters = [parameter for parameter in settings.model.parameters() if parameter.requires_grad]
            self._own_optimizer = IslandsOptimizer(parameters, settings.algorithm.optimizer, _not_compiled(self._on_own_step))
        self._context: LoopContext | None = None
        self._is_open = False
        self._unentered = _warn_if_stepped_before_entry(settings)
        self._holds_agreed = False
        """Whether the model holds the agreed weights for an evaluation."""
        self._checkpoint: LoopCheckpoint | None = None
        self._tokens: int | None = None
        self._queried = False
        """Whether the user asked inside of the block for rank, size or optimizer, and so probably meant to train."""
        self.steps = 0
        """Steps of your optimizer, or micro-batches of `step()`, on this island. Steps that a GradScaler skips do not count."""
        self.dropped = 0
        """Micro-batches after the last update of the loaded state. They are in no update."""

    def __enter__(self) -> Islands:
        if self._context is not None:
            raise ConfigError("these islands were entered before. Make new ones, and load the state_dict() of these to continue.")
        if _OPEN:
            raise ConfigError(
                "another block of atoll.islands is open in this process. In two blocks, islands with different numbers of batches "
                "would deadlock. Leave the other first; or put the models into one nn.ModuleDict and one block, and give the "
                "optimizer that steps last. (A trainer that failed leaves its block open, unless it runs in `with callback:`.)"
            )
        self._unentered.close()
        with ExitStack() as cleanup:
            _OPEN.add(self)
            cleanup.callback(_OPEN.discard, self)
            optimizer = self._settings.user_optimizer
            if optimizer is not None:
                cleanup.callback(optimizer.register_step_post_hook(_not_compiled(self._on_user_step)).remove)
            self._context = LoopContext(self._settings, self._own_optimizer, self._checkpoint)
            self._remember_start()
            self._is_open = True
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        context = self._entered()
        self._is_open = False
        changed = _version_counters(self._settings.model) != self._start_versions
        with self._cleanup:
            if kind is not None:
                context.abandon()
            else:
                context.finish()
                self._warn_if_unstepped(changed=changed)

    def _remember_start(self) -> None:
        self._start_versions = _version_counters(self._settings.model)
        self._start_steps, self._start_rounds = self.steps, self.rounds

    def _warn_if_unstepped(self, *, changed: bool) -> None:
        """An island may have no batches. But it had some if its model changed; and if no island took a step, that is suspicious."""
        if self.steps > self._start_steps or not (changed or (self._queried and self.rounds == self._start_rounds)):
            return
        what = "no island took a step in this block: nothing was trained."
        if changed:
            what = f"island {self.rank} took no step in this block, though its weights or gradients changed. The changes are lost."
        logging.getLogger("atoll").warning(f"atoll: {what} {self._settings.how_to_step}")

    def _on_user_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_open and not was_skipped(optimizer):
            if self._holds_agreed:
                raise ConfigError(
                    "the loop stepped inside of `with islands.agreed()`, where the model holds other weights. Leave it."
                )
            self.steps += 1
            self._entered().user_stepped()

    def step(self, tokens: int | None = None) -> None:
        """Hands the gradients of a micro-batch to an algorithm that steps by itself, and clears them.

        Args:
            tokens: of the micro-batch, for algorithms with weigh="tokens".

        With a GradScaler call `scaler.step(islands.optimizer)` instead.
        """
        if self._own_optimizer is None:
            name = type(self._settings.algorithm).__name__
            raise ConfigError(f"{name} counts the steps of your own optimizer: call optimizer.step() instead.")
        self._tokens = tokens
        self._own_optimizer.step()  # through the optimizer, because schedulers check that it has stepped

    def _on_own_step(self) -> None:
        tokens, self._tokens = self._tokens, None
        if not self._is_open:
            raise ConfigError("islands.step() was called outside of its block. Step inside of `with atoll.islands(...)`.")
        self._entered().user_computed(tokens)
        self.steps += 1

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer to step, for schedulers, scalers and trainers: yours, or one whose `step()` is `islands.step()`."""
        self._queried |= self._is_open
        optimizer = self._own_optimizer or self._settings.optimizer
        assert optimizer is not None
        return optimizer

    @property
    def rank(self) -> int:
        """This island's number, from 0. It does not change when others leave. Shard your data by it."""
        self._queried |= self._is_open
        return self._entered().topology.position.island

    @property
    def size(self) -> int:
        """The number of islands at the start."""
        self._queried |= self._is_open
        return self._entered().topology.position.islands

    @property
    def present(self) -> int:
        """The number of islands now."""
        return self._entered().topology.inter_island.size

    @property
    def is_first(self) -> bool:
        """Whether this is device 0 of island 0: the process to print and to save."""
        position = self._entered().topology.position
        return position.island == position.device == 0

    @property
    def rounds(self) -> int:
        """Completed rounds that changed the agreed weights."""
        return self._entered().rounds

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights or gradients that this process has sent to other islands."""
        return self._entered().sent_bytes

    def weights(self) -> dict[str, Tensor]:
        """Copies of the last agreed weights, by name. In the middle of a round the module holds this island's own."""
        context = self._entered()
        if self._settings.sharded or context.topology.position.devices > 1:
            raise ConfigError("every process holds a slice of the agreed weights. Read the model; after the block it holds them.")
        tensors: dict[str, Tensor] = context.state.params.tensors()
        return tensors

    def finish(self) -> None:
        """Complete the last round together with the other islands before the block ends, to evaluate or save the agreed weights,
        which the model then holds. No step may follow. The end of the block does it otherwise."""
        self._entered().complete()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context in which the model holds the last agreed weights, to evaluate them. Then it holds this island's own again. With
        several devices per island all of them enter it."""
        if self._entered().final_params is not None:  # the model holds them anyway
            yield
            return
        if self._settings.sharded:
            raise ConfigError("every process holds a slice of the agreed weights. Evaluate after the block.")
        with self._entered().agreed():
            self._holds_agreed = True
            try:
                yield
            finally:
                self._holds_agreed = False

    def log(self, loss: float, tokens: int = 0) -> None:
        """Record the loss of a step, and the tokens of its batches, in the events of `out` and `sinks`; DiLoCo(weighting="tokens")
        weighs the island's delta by these tokens. Call it before the step, which may end the round. `step(tokens=...)` counts
        tokens, too."""
        self._entered().log(loss, tokens)

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record measures of the agreed weights, with at least `loss`, in the events. Those of other islands than the first are
        ignored."""
        self._entered().recorder.log_evaluation(metrics)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed loop needs besides your model and optimizer. Every process saves its own.

        If the algorithm steps by itself, this is the state after the last update, without later micro-batches. Inside of
        `with islands.agreed()` the state contains this island's own weights, so the model's file may have the agreed ones.
        """
        return self._entered().checkpoint(self.steps).to_dict()

    def state_dicts(self) -> list[dict[str, Any]]:
        """The `state_dict()` of every device of this island, on its first device; an empty list on the others. All devices of the
        island call it together, for a checkpoint that one process writes."""
        return self._entered().gather_from_devices(self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`. Call it on all islands, before the block, and load your model and optimizer too.

        Inside of the block, call it before the first step and after you loaded the model, because entry overwrites the weights.
        """
        checkpoint = LoopCheckpoint.from_dict(state)
        if self._is_open and self.steps != (self._checkpoint.steps if self._checkpoint else 0):
            raise ConfigError(f"this block has taken {self.steps} steps. Load a state before the first step.")
        if self._context is not None and not self._is_open:
            raise ConfigError("this block is over. Make new islands and load the state into them.")
        self._checkpoint, self.steps = checkpoint, checkpoint.steps
        self.dropped = checkpoint.steps_in_round if self._own_optimizer is not None else 0
        if self._is_open:
            self._entered().load(checkpoint)
            self._remember_start()

    def _entered(self) -> LoopContext:
        if self._context is None:
            raise ConfigError(
                "these islands are not entered: use `with atoll.islands(...) as islands`. atoll.join() has rank and size."
            )
        return self._context


def _warn_if_stepped_before_entry(settings: LoopSettings) -> ExitStack:
    """Has the user's optimizer warn at its first step, until the returned stack is closed. The optimizer may outlive the islands: a
    user who forgets the `with` keeps no reference to them."""
    hook, optimizer = ExitStack(), settings.user_optimizer
    if optimizer is None:  # `islands.step()` refuses to step outside of the block
        return hook

    def warn(*_: Any) -> None:
        hook.close()
        logging.getLogger("atoll").warning(
            "atoll: the optimizer steps, and the block of atoll.islands that it was given to has not been entered: this process "
            "trains apart from the other islands. Put the loop into `with atoll.islands(...) as islands:`."
        )

    hook.callback(optimizer.register_step_post_hook(_not_compiled(warn)).remove)
    return hook


def _not_compiled(function: T) -> T:
    """The function, excluded from a user's torch.compile of the step that calls it."""
    disabled: T = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _version_counters(model: nn.Module) -> list[tuple[int, tuple[int, int] | None]]:
    """torch's version counters of weights and gradients: they stay equal while nothing writes to them."""
    return [
        (parameter._version, None if parameter.grad is None else (id(parameter.grad), parameter.grad._version))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
