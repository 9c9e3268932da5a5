"""Entering a block: islands compare what they were given, and begin with the same weights, or go on from the same round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.loop.module_weights import Weights
from atoll.loop.notices import warn
from atoll.loop.settings import Settings
from atoll.loop.state_dict import Saved
from atoll.loop.topology import Place
from atoll.replica.flat_parameters import ModuleWeights


class Entry:
    """What this island compares with the others.

    Args:
        settings: what was asked for.
        place: this process among all.
        module: the user's.
        weights: as far as this process speaks for them.
        line: the thread that communicates.
    """

    def __init__(
        self, settings: Settings, place: Place, module: ModuleWeights, weights: Weights, line: CommunicationThread
    ) -> None:
        self._settings, self._place, self._module, self._weights, self._line = settings, place, module, weights, line

    def agree(self, saved: Saved | None) -> None:
        """Begin alike. Where nothing is resumed, all take over what the first island's module has."""
        params = self._weights.read()
        begun = saved is None
        model = f"{_described(params.layout)} {[(n, tuple(t.shape), t.dtype) for n, t in self._module.others()] if begun else ''}"
        mine = [_number(self._settings.text), _number(model), not begun, saved.rounds if saved else 0]
        mine.append(self._fingerprint(params) if begun else 0)
        told = self._line.call(lambda: self._place.between.all_gather_numbers(*mine))
        _check_together([row[2:4] for row in told])
        self._check_alike([row[0] for row in told], "another algorithm or way to finish", self._settings.text)
        self._check_alike(
            [row[1] for row in told], "another model, or one with other buffers", f"one of {_summed_up(params.layout)}"
        )
        differ = any(row[4] != told[0][4] for row in told)
        if self._place.inside is not None:  # what is handed out to one device concerns all of its island
            inside = self._place.inside
            differ = any(row[0] for row in self._line.call(lambda: inside.all_gather_numbers(differ)))
        if differ:
            self._hand_out(params)

    def agree_on(self, saved: Saved) -> None:
        """Go on from the same round, after all."""
        _check_together(self._line.call(lambda: self._place.between.all_gather_numbers(True, saved.rounds)))

    def _check_alike(self, told: Sequence[float], what: str, here: str) -> None:
        others = [f"island {island}" for island, number in enumerate(told) if number != told[0]]
        if others:
            raise ConfigError(
                f"{', '.join(others)} entered with {what} than island 0. Here, on island {self._place.island}, it is {here}. Give "
                f"the same everywhere."
            )

    def _hand_out(self, params: Tree) -> None:
        """The first island's weights are everybody's; so are those that are not trained, and buffers."""
        between = self._place.between
        self._line.call(lambda: between.broadcast(params.flat))
        self._weights.write(params)
        with torch.no_grad():
            for _, tensor in self._module.others():
                taken = tensor.clone(memory_format=torch.contiguous_format)
                data = taken.view(-1).view(torch.uint8)
                self._line.call(lambda data=data: between.broadcast(data))  # type: ignore[misc]
                if not torch.equal(taken, tensor):
                    tensor.copy_(taken)

    def _fingerprint(self, params: Tree) -> float:
        state = hashlib.blake2b(params.digest().encode())
        for _, tensor in self._module.others():
            state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return _number(state.hexdigest())


def check_optimizer(settings: Settings, module: ModuleWeights, own: torch.optim.Optimizer | None) -> None:
    """That what is stepped is what the module has: the user's optimizer, or the one that stands for the algorithm's.

    Raises:
        ConfigError: it is another model's, or what is trained has changed since it was made.
    """
    optimizer = own or settings.counted
    assert optimizer is not None
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in module.parameters.items() if id(parameter) not in stepped]
    if own is not None and missing:
        raise ConfigError(
            f"{missing[0]} is trained now, and was not when atoll.islands was called. Call it after you have unfrozen it."
        )
    if len(missing) == len(module.parameters):
        raise ConfigError(
            f"the optimizer has none of the model's {len(missing)} trainable parameters, so its steps would move nothing: it was "
            f"made for another model, or before this one's parameters were replaced (by fully_shard, say). Make the optimizer last."
        )
    if missing:
        warn(
            f"{len(missing)} of the model's {len(module.parameters)} trainable parameters are not in the optimizer, {missing[0]} "
            f"for one. That is right if another optimizer steps them. Else give them to this one, or freeze them."
        )


def _check_together(told: Sequence[Sequence[float]]) -> None:
    """Whether each island goes on from something saved, and from which round."""
    if any(row != told[0] for row in told):
        rounds = [f"round {number:g}" if saved else "nothing" for saved, number in told]
        raise CheckpointError(f"islands would go on from {', '.join(rounds)}. Load on all of them what was saved at one time.")


def _described(layout: Layout) -> str:
    return f"{[(piece.name, piece.shape, piece.dtype) for piece in layout.pieces]}"


def _summed_up(layout: Layout) -> str:
    first = layout.pieces[0]
    return f"{len(layout.pieces)} trained tensors with {layout.numel} numbers, first {first.name} {first.shape} {first.dtype}"


def _number(text: str) -> float:
    """A fingerprint that a double holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
