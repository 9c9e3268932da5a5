"""`atoll.islands`: a few lines around a plain PyTorch loop.

    with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=500)) as islands:
        for batch in loader:
            model(batch).loss.backward()
            optimizer.step()  # every 500 steps the islands agree
            optimizer.zero_grad()

Under torchrun every process is an island. Without it there is one island, and no network is needed:

>>> import atoll, torch
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=2)) as islands:
...     for _ in range(5):
...         model(torch.ones(1, 2)).square().sum().backward()
...         optimizer.step()
...         optimizer.zero_grad()
>>> islands.steps, islands.rounds
(5, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm
from atoll.loop.change_detection import footprints
from atoll.loop.context import Live
from atoll.loop.notices import warn
from atoll.loop.optimizer import IslandsOptimizer, was_skipped
from atoll.loop.settings import Settings
from atoll.loop.state_dict import Saved

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
) -> Islands:
    """Trains a module of yours together with the other islands. Use it in a `with` block around your loop.

    Args:
        model: stays as it is: weights are copied in and out. On entry all islands take over the first one's.
        optimizer: yours, for an algorithm that trains (DiLoCo): when it has stepped so many times, the islands agree. With several
            optimizers, the one that steps last. None for an algorithm that steps by itself (ACCO, DDP, ZeRO1, DPU, WP): call
            `islands.step()` after each micro-batch's `loss.backward()`.
        algorithm: what the islands do, the same on all of them.
        mesh: where islands have several devices: a DeviceMesh ("island", "device"), with the model wrapped over mesh["device"].
        limit_s: how long to wait for another island, on entry and in each exchange, before that has failed. None: ten minutes on
            entry and in the first exchange, then ten times the longest time between two, and at least a minute. The first island
            says what it is.
        finish: what an island does whose batches are used up. together: it stays, and weighs nothing, until all are through, so
            that all end with the same weights. alone: it leaves after one more exchange, and the others go on without it.
        examples: of this island's data, for DiLoCo(weighting="examples").
    """
    return Islands(
        Settings(
            model=model, optimizer=optimizer, algorithm=algorithm, mesh=mesh, limit_s=limit_s, finish=finish, examples=examples
        )
    )


_OPEN: WeakSet[Islands] = WeakSet()
"""Blocks that are open in this process: one at most. Only here can two of them know of each other."""


class Islands:
    """This island among all, for as long as its block is open. Made by `islands`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own: IslandsOptimizer | None = None
        if settings.form == "gradient":
            parameters = [parameter for parameter in settings.model.parameters() if parameter.requires_grad]
            self._own = IslandsOptimizer(parameters, settings.algorithm.optimizer, _uncompiled(self._take))
        self._live: Live | None = None
        self._open = False
        self._hook: RemovableHandle | None = None
        self._pending: Saved | None = None
        self._tokens: int | None = None
        self._asked = False
        """Whether somebody wanted to know, in the block, how to share data out, or what to step."""
        self.steps = 0
        """Steps of your optimizer, or micro-batches that you brought, on this island. What a GradScaler skips does not count."""
        self.dropped = 0
        """Micro-batches since the last update when the state was saved that was loaded here: they went into no update."""

    def __enter__(self) -> Islands:
        if self._live is not None:
            raise ConfigError("these islands were entered before. Make new ones, and give them the state_dict() of these to go on.")
        if _OPEN:
            raise ConfigError(
                "another block of atoll.islands is open in this process. In two of them islands with different numbers of batches "
                "would wait for each other. Leave it first; or put the models into one nn.ModuleDict and one block, and give the "
                "optimizer that steps last. (A trainer that failed leaves its block open, unless it runs in `with callback:`.)"
            )
        _OPEN.add(self)
        try:
            counted = self._settings.counted
            self._hook = None if counted is None else counted.register_step_post_hook(_uncompiled(self._stepped))
            self._live = Live(self._settings, self._own, self._pending)
            self._note_beginning()
            self._open = True
        except BaseException:
            self._unhook()
            _OPEN.discard(self)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        live = self._alive()
        self._open = False
        self._unhook()
        worked = footprints(self._settings.model) != self._begun_with
        try:
            if kind is not None:
                live.abandon()
            else:
                _finish(live)
                self._tell_if_nothing_stepped(worked=worked)
        finally:
            _OPEN.discard(self)

    def _note_beginning(self) -> None:
        """What there is before the first step."""
        self._begun_with, self._steps_before, self._rounds_before = footprints(self._settings.model), self.steps, self.rounds

    def _tell_if_nothing_stepped(self, *, worked: bool) -> None:
        """An island may be without batches. It is not if its model was worked on; nor if no island took a step, probably."""
        if self.steps > self._steps_before or not (worked or (self._asked and self.rounds == self._rounds_before)):
            return
        what = "no island took a step in this block: nothing was trained."
        if worked:
            what = (
                f"island {self.rank} took no step in this block, though its model's weights or gradients were changed there. What "
                f"it did is lost."
            )
        warn(f"{what} {self._settings.how_to_step}")

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    # --------------------------------------------------------------------------------------------------------------- training

    def _stepped(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open and not was_skipped(optimizer):
            self.steps += 1
            self._alive().stepped()

    def step(self, tokens: int | None = None) -> None:
        """Take the gradients of a micro-batch, where the algorithm steps by itself.

        Args:
            tokens: that the micro-batch has, for algorithms that weigh by them.

        Gradients that are taken are gone: no zero_grad() is needed. With a GradScaler use `scaler.step(islands.optimizer)` instead.
        """
        if self._own is None:
            name = type(self._settings.algorithm).__name__
            raise ConfigError(f"{name} counts the steps of your own optimizer: call optimizer.step() instead.")
        self._tokens = tokens
        self._own.step()  # by way of the optimizer: schedulers look whether it has stepped

    def _take(self) -> None:
        tokens, self._tokens = self._tokens, None
        if not self._open:
            raise ConfigError("islands.step() was called outside of its block. Step inside of `with atoll.islands(...)`.")
        self._alive().brought(tokens)
        self.steps += 1

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What to step: your own optimizer, or one whose `step()` is `islands.step()`, for schedulers and trainers to hold."""
        self._asked |= self._open
        optimizer = self._own or self._settings.optimizer
        assert optimizer is not None
        return optimizer

    # ------------------------------------------------------------------------------------------------------------------ figures

    @property
    def rank(self) -> int:
        """This island's number, from 0; it stays the same when others leave. Shard your data by it."""
        self._asked |= self._open
        return self._alive().place.island

    @property
    def size(self) -> int:
        """How many islands began."""
        self._asked |= self._open
        return self._alive().place.islands

    @property
    def present(self) -> int:
        """How many islands there are now."""
        return self._alive().present

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of all: the one to print and to save."""
        place = self._alive().place
        return place.island == place.device == 0

    @property
    def rounds(self) -> int:
        """Rounds in which the islands agreed on new weights."""
        return self._alive().rounds

    @property
    def sent_bytes(self) -> int:
        """Weights or gradients that this process has sent to other islands in its rounds."""
        return self._alive().sent_bytes

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights that the islands last agreed on, by name. In the middle of a round the module's are others."""
        live = self._alive()
        if self._settings.sharded or live.place.devices > 1:
            raise ConfigError(
                "the agreed weights lie in slices here, one on each process. Read the model itself; after the block it holds them."
            )
        tensors: dict[str, Tensor] = live.state.params.tensors()
        return tensors

    # ------------------------------------------------------------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, besides your own model and optimizer: plain dictionaries of numbers, text and tensors.

        Every process saves its own. Of an algorithm that steps by itself it is the state after the last update: micro-batches since
        then are left out.
        """
        return self._alive().saved(self.steps).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Call it before the block, on all islands, and load model and optimizer too.

        Or call it in the block, before the first step, and load the model's weights there, before this: on entry all islands took
        over the first one's.
        """
        saved = Saved.from_dict(state)
        if self._open and self.steps != (self._pending.steps if self._pending else 0):
            raise ConfigError(f"{self.steps} steps were taken in this block already. Load a state before the first.")
        if self._live is not None and not self._open:
            raise ConfigError("this block is over. Make new islands and load the state into them.")
        self._pending, self.steps = saved, saved.steps
        self.dropped = saved.taken if self._own is not None else 0
        if self._open:
            self._alive().load(saved)
            self._note_beginning()

    def _alive(self) -> Live:
        if self._live is None:
            raise ConfigError(
                "these islands were not entered yet: use `with atoll.islands(...) as islands`. atoll.join() has rank and size."
            )
        return self._live


def _uncompiled(function: T) -> T:
    """The function, as it is also where a user compiles the step that calls it: what islands do after it is no part of that."""
    disabled: T = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _finish(live: Live) -> None:
    try:
        live.finish()
    except BaseException:
        live.abandon()
        raise
