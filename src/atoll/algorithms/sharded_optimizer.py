"""A sharded optimizer: what ZeRO-1 and the algorithms that hide its exchanges have in common.

Each island keeps a slice of the weights in single precision, with the optimizer's moments for it, and no other island has them. An
exchange is a reduce-scatter of gradients, a step on the slice, and an all-gather of the new weights. The whole of the weights lies
in the replica alone, in the model's own precision, from one round to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from atoll.algorithms.ddp import StepsOnGradients, check_accumulation
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Peers, PendingExchange, Replica, Rule, whole_steps
from atoll.optim import chunked_step
from atoll.optim.chunked_step import Stepped
from atoll.optim.schedules import at
from atoll.optim.torch_optimizers import check_takes_slices

Precision = Literal["own", "fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reduced(NamedTuple):
    """This island's slice of the gradients of all islands, added up."""

    sum: Tree  # a step writes the new weights into its buffer
    weight: float  # of all gradients together
    shortening: float  # the factor by which the mean gradient is clipped


@dataclass(frozen=True, kw_only=True)
class Sharded(StepsOnGradients):
    """The common settings and steps. The optimizer's rule is applied to slices, so it is elementwise.

    Args:
        wire: the precision in which gradients and weights are sent: the model's `own`, `fp32` or `bf16`.
        sums: the precision in which gradients are added up: `own`, which is the model's over batches and that of `wire` over
            islands, or `fp32`.
    """

    wire: Precision = "own"
    sums: Literal["own", "fp32"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_takes_slices(self.optimizer, self)

    def cut(self, params: Tree, peers: Peers) -> tuple[Tree, Any]:
        """This island's slice of these weights, and an optimizer state for it."""
        mine = self.master(params.shard(peers.rank, peers.size))
        return mine, self.rule.init(mine)

    def master(self, mine: Tree) -> Tree:
        """A slice as it is kept: in single precision, with a buffer of its own."""
        return mine.copy(torch.promote_types(mine.flat.dtype, torch.float32))

    def wire_dtype(self, tree: Tree) -> torch.dtype:
        """The precision in which this tree is sent."""
        return _DTYPES.get(self.wire, tree.layout.dtype)

    async def add_up(
        self, replica: Replica, peers: Peers, count: int, *, pieces: int = 1, onto: Gradient | None = None
    ) -> Gradient:
        """The gradients of this island's next batches, or pieces of them, at the weights that its replica holds."""
        total = onto
        for _ in range(count):
            work = peers.work(0, 1, pieces=pieces)
            total = await replica.gradient(work, onto=total, weigh=self.weigh, wide=self.sums == "fp32")
        assert total is not None, "nothing was to be added up"
        return total

    async def reduce(self, gradient: Gradient, peers: Peers, *, keep: bool = False) -> Reduced | None:
        """The gradients of all islands, added up. None if there is nothing to step with, as all islands then know: gradients of
        some island are not finite, or no island has any. `keep`: the round goes on adding to this gradient, as ACCO adds a batch's
        second half to its first. Islands then exchange a snapshot of it."""
        wire = self.wire_dtype(gradient.sum)
        sent = gradient.sum.copy(wire) if keep else gradient.sum
        summed = await peers.reduce_scatter(sent, gradient.weight, wide=self.sums == "fp32", wire=wire)
        if not summed.finite or summed.weight == 0:
            return None
        if self.clip_norm is None:
            return Reduced(summed.value, summed.weight, 1.0)
        # The norm of the whole: each island knows the squares of its own slice.
        length = math.sqrt(await peers.total(summed.value.dot(summed.value))) / summed.weight
        shortening = self.clip_norm / (length + 1e-6) if length > self.clip_norm else 1.0
        return Reduced(summed.value, summed.weight, shortening)

    def preview(self, rule: Rule, params: Tree, optimizer: Any, reduced: Reduced) -> Tree:
        """The slice of the weights after a step, as it is sent. Nothing is kept of the step."""
        over, times, sent = reduced.weight, reduced.shortening, self.wire_dtype(params)
        return chunked_step.preview(rule, params, reduced.sum, optimizer, over=over, times=times, sent=sent)

    def step(self, rule: Rule, params: Tree, optimizer: Any, reduced: Reduced, *, send: bool = True) -> Stepped:
        """A step on the slice. Without `send` islands do not need the new weights, because the algorithm takes a second step with
        the same gradient, as WP does to predict weights."""
        over, times, sent = reduced.weight, reduced.shortening, self.wire_dtype(params)
        return chunked_step.step(rule, params, reduced.sum, optimizer, over=over, times=times, sent=sent, send=send)

    def on_wire(self, params: Tree) -> Tree:
        """The slice in the precision in which it is sent."""
        return params.cast(self.wire_dtype(params))

    def held(self, state: Any) -> Tree:
        """The slice of the weights that replicas hold between rounds: those that were sent."""
        return self.on_wire(state.params)


@dataclass(frozen=True, kw_only=True)
class Accumulating(Sharded):
    """Algorithms that add up whole batches before an exchange.

    Args:
        accumulation: batches whose gradients an island adds up before it exchanges them.
    """

    accumulation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulation(self.accumulation)


@dataclass(frozen=True, kw_only=True)
class Overlapped(Sharded):
    """Algorithms that compute during an exchange.

    Args:
        batch: the batches of an island per update: `fixed`, the same number on each; or `free`, which adds those that it computes
            until its exchange is over, so that a fast island contributes more, and none is idle.
        clock: what the learning rate follows: updates ("commits"), or samples, that is, how many nominal batches were applied. The
            run ends by the same clock. None: samples where batches are free, else commits; commits also where tokens are weighed.
        warmup: updates at the beginning that hide nothing: a batch is computed, then exchanged, as ZeRO-1 does it.
    """

    batch: Literal["fixed", "free"] = "fixed"
    clock: Literal["commits", "samples"] | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup}: it is 0 updates or more. Use 0 to hide exchanges from the start.")
        if self.clock == "samples" and self.weigh == "tokens":
            raise ConfigError(
                "clock=samples counts micro-batches, and with weigh=tokens islands exchange numbers of tokens only. "
                "Use clock=commits, or weigh=batches."
            )
        if self.ticks == "samples" and self.optimizer is not None and not hasattr(self.optimizer, "lr"):
            why = "" if self.clock else ", the default for free batches,"
            raise ConfigError(
                f"clock=samples{why} sets the learning rate of the optimizer, and {type(self.optimizer).__name__} has none. "
                f"Use clock=commits, or a rule with an lr."
            )

    async def accumulate(
        self,
        replica: Replica,
        peers: Peers,
        count: int,
        *,
        pieces: int = 1,
        onto: Gradient | None = None,
        until: PendingExchange[Any] | None = None,
    ) -> Gradient:
        """The gradients of the next batches, or pieces of them. Free batches go on until the exchange `until` is over."""
        total = await self.add_up(replica, peers, count, pieces=pieces, onto=onto)
        while self.batch == "free" and until is not None and not until.done():
            total = await self.add_up(replica, peers, 1, pieces=pieces, onto=total)
        return total

    @property
    def ticks(self) -> Literal["commits", "samples"]:
        """The clock in use."""
        if self.clock is not None:
            return self.clock
        # An update of free batches holds more than one nominal batch: by updates, a run would read several times its samples.
        return "samples" if self.batch == "free" and self.weigh == "batches" else "commits"

    def tick(self, steps: float, weight: float, nominal: int) -> float:
        """How far the run is after an update of this weight, where a nominal one has the weight `nominal`."""
        return steps + (1.0 if self.ticks == "commits" else weight / nominal)

    def rule_at(self, steps: float) -> Rule:
        """The rule at this position of its schedule. Updates the rule counts itself."""
        if self.ticks == "commits":
            return self.rule
        rule: Any = self.rule
        at_position: Rule = replace(rule, lr=at(rule.lr, whole_steps(steps)))
        return at_position
