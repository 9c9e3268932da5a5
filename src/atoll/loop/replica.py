"""The user's module as a Replica: the user's loop trains it, and a round waits for the user's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Literal

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout, shard_range
from atoll.core.protocols import Gradient, Weigh, Work
from atoll.engines.communication_thread import CommunicationThread, Request
from atoll.engines.group_collectives import GroupCollectives
from atoll.replica.flat_parameters import ModuleWeights

SteppedBy = Literal["user", "algorithm"]
"""Who steps: the user's optimizer, or the algorithm with gradients that the user computes."""


class UserStep:
    """What a round awaits while the user computes: the next step, or the end of the loop."""

    def __await__(self) -> Generator[UserStep, None, None]:
        yield self


class WeightSlice:
    """This device's slice of a module that torch's DDP replicates on the devices of the island, which gather it on write."""

    def __init__(self, module: ModuleWeights, intra_island: GroupCollectives, thread: CommunicationThread) -> None:
        self._module, self._intra_island, self._thread = module, intra_island, thread
        self.layout = module.layout.slice(*shard_range(module.layout.numel, intra_island.rank, intra_island.size))

    def read(self, layout: Layout | None = None) -> Tree:
        return self._module.read(layout or self.layout)

    def write(self, params: Tree) -> None:
        """Writes the whole slice, or some pieces of it. The other devices' pieces have other sizes, so they gather whole slices."""
        layout = self._module.layout
        params = params if params.layout == self.layout else self.read().paste_(params)
        mine = Tree(self.layout, params.flat.to(layout.dtype))
        whole = self._thread.call(lambda: self._intra_island.gather_slices(mine, layout))
        self._module.write(whole)
        whole.release()


class LoopReplica:
    """The user's module. A protocols.Replica. `weights` is the part of the module's weights that this process exchanges. A round
    has `steps_per_round` steps. Where deltas are weighed by `tokens`, those of all devices of an island count."""

    def __init__(
        self,
        module: ModuleWeights,
        weights: ModuleWeights | WeightSlice,
        stepped_by: SteppedBy,
        steps_per_round: int,
        weigh: Weigh = "batches",
        intra_island: GroupCollectives | None = None,
    ) -> None:
        self._module, self._weights, self.stepped_by, self._intra_island = module, weights, stepped_by, intra_island
        self.exhausted = False
        """Whether the user's loop has ended."""
        self.steps_done = 0
        """Steps since this round began; if the algorithm steps, since its last exchange."""
        self.uses_weights = False
        """Whether the algorithm has used the module's weights since this round began, besides loading those to train from."""
        self._loads = 0  # in this round
        self._taken: deque[bool] = deque(maxlen=steps_per_round)
        """Of the last steps that rounds requested, as many as a round has, whether the user took them."""
        self._steps_requested = 0
        self._resumed_steps = 0
        """Steps of a resumed round that the user took before the checkpoint."""
        self._skip_load = False
        self.logged_tokens = 0
        """Tokens that the user has logged since this round began."""
        self._weigh: Weigh = weigh
        self._tokens: int | None = None
        """Tokens of the micro-batch whose gradients the module holds."""
        self.loaded: Tree | None = None
        """The weights that were last written to the module, if they are more precise than the module."""
        self.agreed: Tree | None = None
        """Those of the State that this round began with, in which nothing computes."""

    # ------------------------------------------------------------------------------------------------ called by the algorithm

    def load(self, params: Tree) -> None:
        self._loads += 1
        self.uses_weights = self.uses_weights or self._loads > 1
        if not self._skip_load:
            self._weights.write(params)
        self._skip_load = False
        whole = params.layout == self._weights.layout
        if not any(piece.dtype.itemsize < params.flat.element_size() for piece in self._weights.layout.pieces):
            self.loaded = None
        elif self.loaded is not None and not whole:
            self.loaded = self.loaded.overlaid(params)
        elif self.stepped_by == "algorithm" or params.borrowed or params is self.agreed:
            self.loaded = params
        else:  # the algorithm made it, and may replace its fragments one by one before the module gets them
            self.loaded = params.copy().donate()

    def params(self) -> Tree:
        self.uses_weights = True
        return Tree.borrowed_from(self._weights.layout, lambda layout: self._present(layout).flat)

    def _present(self, layout: Layout) -> Tree:
        now = self._weights.read(layout)
        return now.wide() if self.loaded is None else _with_rounding_residual(now, self.loaded.part(layout))

    async def train(self, steps: int, work: Work) -> int:
        self._check("user", "it counts the steps of your own optimizer")
        for _ in range(steps):
            if self._resumed_steps:
                self._resumed_steps -= 1
            elif not self.exhausted:
                await UserStep()
            self._taken.append(not self.exhausted)
            self.steps_done += not self.exhausted
        return 0 if self._weigh == "batches" else await self._count_tokens()

    async def _count_tokens(self) -> int:
        """The tokens that the user has logged in this round, on all devices of the island."""
        tokens, intra_island = self.logged_tokens, self._intra_island
        if intra_island is not None:
            rows = await Request(lambda: intra_island.all_gather_numbers(tokens))
            tokens = int(sum(row[0] for row in rows))
        if self.steps_done and tokens < 1:
            raise ConfigError(
                f'weighting="tokens", and this island has logged {tokens} tokens for the {self.steps_done} steps of this round. '
                f"Call islands.log(loss, tokens=...) before each optimizer.step()."
            )
        return tokens

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        self._check("algorithm", "it steps by itself, with gradients that you compute")
        if at is not None:
            self.load(at)
        self._steps_requested += 1
        self._weigh = weigh
        if not self.exhausted:
            await UserStep()
        if self.exhausted:
            # Queued behind the running exchange: an algorithm that asks for gradients until that ends would otherwise never yield.
            await Request(lambda: None)
            return onto if onto is not None else Gradient(self._module.zero_gradients(wide=wide), 0.0, 0)
        tokens = self._tokens or 0
        weight = float(tokens) if weigh == "tokens" else 1.0
        total = self._module.take_gradients(None if onto is None else onto.sum, weight, wide=wide)
        self.steps_done += 1
        before = (0.0, 0) if onto is None else (onto.weight, onto.tokens)
        return Gradient(total, before[0] + weight, before[1] + tokens)

    # ----------------------------------------------------------------------------------------------------- called by the loop

    def accept_gradients(self, tokens: int | None) -> None:
        """Checks the gradients of a micro-batch, which the user has computed."""
        if self._weigh == "tokens" and tokens is None:
            raise ConfigError('weigh="tokens" needs the tokens of each micro-batch: call islands.step(tokens=...).')
        self._module.check_gradients()
        self._tokens = tokens

    def begin_round(self, agreed: Tree | None = None) -> None:
        self.agreed = agreed
        self.steps_done = self._steps_requested = self._loads = self.logged_tokens = 0
        self.uses_weights = False

    def resume_round(self, steps_done: int) -> None:
        """The module holds the weights after `steps_done` steps of the round; with 0 steps the State has its weights."""
        self._skip_load, self._resumed_steps = steps_done > 0, steps_done

    def take_share(self) -> float:
        """The share of the requested steps that the user took. A delta is that of as many steps as a round has, also if its
        fragments are exchanged at different times; a gradient is that of the steps since the last exchange. With tokens the weight
        contains the share."""
        if self.stepped_by == "user":
            if self._weigh == "tokens":
                return 1.0
            return sum(self._taken) / len(self._taken) if self._taken else 1.0
        share = self.steps_done / self._steps_requested if self._steps_requested and self._weigh == "batches" else 1.0
        self.begin_round()
        return share

    def _check(self, stepped_by: SteppedBy, why: str) -> None:
        if stepped_by != self.stepped_by:
            given = "an optimizer" if self.stepped_by == "user" else "no optimizer"
            raise ConfigError(f"the algorithm was given {given}, and {why}: atoll.islands documents which algorithm needs one.")


def _with_rounding_residual(now: Tree, loaded: Tree) -> Tree:
    """The present weights plus what rounding removed when `loaded` was written to a module of lower precision.

    An island sends how far it moved. The rounding at the start of the round is no part of that.
    """
    full = now.wide()
    for piece, at in zip(full.layout.pieces, full.layout.offsets.values(), strict=True):
        if piece.dtype.itemsize < full.flat.dtype.itemsize:
            part, was = full.flat[at : at + piece.count], loaded.flat[at : at + piece.count]
            part.add_(was - was.to(piece.dtype))
    return full
