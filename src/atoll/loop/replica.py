"""The user's module as a Replica: whoever trains it is the user, and a round waits for that."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Weigh, Work
from atoll.engines.processes.communication_thread import Request
from atoll.loop.module_weights import Weights, loses_digits, with_digits
from atoll.replica.flat_parameters import ModuleWeights

Form = Literal["train", "gradient"]


class Pause:
    """What a round awaits while the user computes: to be gone on with when a step is done, or there will be no more."""

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class LoopReplica:
    """The user's module. A protocols.Replica.

    Args:
        module: its weights and gradients.
        weights: as far as this process speaks for them.
        form: who steps: the user's optimizer (train), or the algorithm, with gradients that the user brings.
    """

    def __init__(self, module: ModuleWeights, weights: Weights, form: Form) -> None:
        self._module, self._weights, self.form = module, weights, form
        self.through = False
        """There will be no more steps."""
        self.taken = 0
        """Steps since this round began, or since its last agreement."""
        self._asked = 0
        self._ahead = 0
        """Steps of a round that were taken before it was loaded."""
        self._keeps = False
        self._weigh: Weigh = "batches"
        self._tokens: int | None = None
        """Of the micro-batch whose gradients are there now."""
        self.loaded: Tree | None = None
        """The weights that were put into the module last, if they have more digits than it."""

    # ------------------------------------------------------------------------------------------------ seen from the algorithm

    def load(self, params: Tree) -> None:
        if not self._keeps:
            self._weights.write(params)
        self._keeps = False
        self.loaded = params if loses_digits(params) else None

    def params(self) -> Tree:
        now = self._weights.read()
        return now.wide() if self.loaded is None else with_digits(now, self.loaded)

    async def train(self, steps: int, work: Work) -> None:
        self._check("train", "it counts the steps of your own optimizer")
        self._asked += steps
        for _ in range(steps):
            if self._ahead:
                self._ahead -= 1
                self.taken += 1
                continue
            if not self.through:
                await Pause()
            if self.through:
                break
            self.taken += 1

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        self._check("gradient", "it steps by itself, with gradients that you bring")
        if at is not None:
            self.load(at)
        self._asked += 1
        self._weigh = weigh
        if not self.through:
            await Pause()
        if self.through:
            # Behind what is on its way: who asks again and again until that is over would otherwise ask without end.
            await Request(lambda: None)
            return _plain(onto) if onto is not None else Gradient(self._module.no_gradients(wide=wide), 0.0, 0)
        tokens = self._tokens or 0
        weight = float(tokens) if weigh == "tokens" else 1.0
        total = self._module.take_gradients(None if onto is None else onto.sum, weight, wide=wide)
        self.taken += 1
        before = (0.0, 0) if onto is None else (onto.weight, onto.tokens)
        return Gradient(total, before[0] + weight, before[1] + tokens)

    # ------------------------------------------------------------------------------------------------------ seen from the loop

    def bring(self, tokens: int | None) -> None:
        """The gradients of a micro-batch of so many tokens are there."""
        if self._weigh == "tokens" and tokens is None:
            raise ConfigError('weigh="tokens" needs the tokens of each micro-batch: call islands.step(tokens=...).')
        self._module.check_gradients()
        self._tokens = tokens

    def begin_round(self) -> None:
        self.taken = self._asked = 0

    def go_on_from(self, taken: int) -> None:
        """The module's weights are those of a round in which so many steps were taken already; of none, the State has them."""
        self._keeps, self._ahead = taken > 0, taken

    def share(self) -> float:
        """Which part of the steps that were asked for has been taken since the last agreement. Ask once for each of them.

        Where tokens are weighed, the weight itself says so.
        """
        part = self.taken / self._asked if self._asked and self._weigh == "batches" else 1.0
        self.begin_round()
        return part

    def _check(self, form: Form, so: str) -> None:
        if form != self.form:
            given = "an optimizer" if self.form == "train" else "no optimizer"
            raise ConfigError(f"the algorithm was given {given}, and {so}: see atoll.islands for which of them needs one.")


def _plain(gradient: Gradient) -> Gradient:
    """The same under a plain name: what was given is read once, and this may be kept."""
    return gradient._replace(sum=Tree(gradient.sum.layout, gradient.sum.flat))
