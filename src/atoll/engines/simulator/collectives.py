"""Collectives between the islands of one simulated round, or between the devices of one island: results, costs and events.

All members make the same calls in the same order. An exchange starts when the last member has arrived, and ends at the same moment
for all of them. An algorithm whose gradients are exchanged in buckets starts earlier: the first bucket travels while the backward
pass computes the next. Then an exchange event covers what the backward pass does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.core.events import UpdateSkipped
from atoll.core.flat_tree import Tree, all_finite, measure, products
from atoll.core.layout import Layout, shard_range
from atoll.core.nested_trees import memory_of
from atoll.core.protocols import Encoding, Mean, Scattered
from atoll.engines.chunk_reduction import encoded_mean
from atoll.engines.simulator.member_work import MemberWork
from atoll.engines.simulator.virtual_clock import ClockTask
from atoll.runs.cluster import CONTROL_BYTES, CollectiveCost, all_gather_cost, all_reduce_cost, reduce_scatter_cost

BACKWARD = 2 / 3
"""The share of the backward pass in the time of a batch: it has twice the operations of the forward pass."""
_CONTROL_BYTES = {"mean": 2 * CONTROL_BYTES, "reduce_scatter": 2 * CONTROL_BYTES, "total": CONTROL_BYTES, "all_gather": 0}
"""Control bytes to each peer: a weight and whether the tree is finite; a number; nothing."""


class RoundAborted(Exception):
    """A collective that needs every island missed some. The engine ends the round for all islands."""

    def __init__(self, what: str, missing: list[int], time_s: float) -> None:
        super().__init__(f"{what} without islands {missing}")
        self.what, self.missing, self.time_s = what, missing, time_s


class RoundQuorum(NamedTuple):
    """An exchange ends when so many islands have sent a delta of this round, and the window after that is over."""

    islands: int
    grace_s: float
    behind: Set[int]  # ranks whose delta is of an earlier round, or of none: they do not count


class Contribution(NamedTuple):
    """One member's part of an exchange."""

    rank: int
    task: ClockTask
    tree: Tree
    weight: float
    encoding: Encoding | None = None


class SimCollectives:
    """The exchanges of one round between these islands, or between these devices of island `inside`, whose messages always
    arrive. Members are in rank order. With a quorum the first mean decides which islands take part in the round."""

    def __init__(
        self,
        work: MemberWork,
        members: Sequence[int],
        inside: int | None = None,
        *,
        buckets: int = 1,
        quorum: RoundQuorum | None = None,
    ) -> None:
        cluster, between = work.cluster, inside is None
        self.work, self.members, self.inside, self._buckets = work, members, inside, buckets
        self._links = [cluster.link_of(member) if between else cluster.inside for member in members]
        self._topology = cluster.topology if between else "ring"  # of means; slices always travel on a ring
        self._waiting: dict[int, tuple[str, bool, list[Contribution]]] = {}  # operation, its option, contributions by call
        self._quorum, self._closed_s = quorum, 0.0  # until the first mean, and the end of that mean
        self.late: set[int] = set()
        """Ranks that a quorum did not wait for. They are left out of the whole round."""
        self.left_out = {rank for rank, member in enumerate(members) if between and not work.delivers(member, members)}
        """Ranks whose messages are lost in this round, or that are late. A mean leaves them out, and any other exchange aborts the
        round."""
        self.committed = False  # whether an exchange of this round had any weight, or was a reduce-scatter
        self.skipped: UpdateSkipped | None = None  # set if the last gradients of this round were not finite, or had no weight
        self.kept: Set[int] = frozenset()  # memory of the States that the round began with
        self.results: list[Tree] = []  # trees that exchanges made; all members hold the same object

    @property
    def round(self) -> int:
        return self.work.accounting.totals.round

    def contribute(self, call: int, what: str, mine: Contribution, option: bool) -> None:
        """Joins the exchange number `call`. `option` is a mean's `compare` or a reduce-scatter's `wide`."""
        if what != "total" and not (math.isfinite(mine.weight) and mine.weight >= 0):
            raise ExchangeFailed(
                f"{self.name(mine.rank)} calls {what} with a weight of {mine.weight}. Give it a finite weight of 0 or more."
            )
        if self.late and what != "mean":
            raise ExchangeFailed(f"{self.name(mine.rank)} calls {what} in a round with a quorum, which only means have. Use means.")
        if mine.rank in self.late:
            nothing = Mean(mine.tree.zeros(), 0.0, heard=False, late=True)
            mine.task.resume_at(max(mine.task.now_s, self._closed_s), lambda: nothing)
            return
        expected, _, contributions = self._waiting.setdefault(call, (what, option, []))
        if expected != what:
            raise ExchangeFailed(
                f"in round {self.round} {self.name(mine.rank)} calls {what}, but the other members are in {expected}. All islands "
                f"must make the same calls in the same order."
            )
        contributions.append(mine)
        if len(contributions) == len(self.members) - len(self.late):
            self._start(call, mine.task.now_s)
        elif self._quorum is not None and what == "mean" and self._completes_quorum(mine, contributions):
            deadline_s = mine.task.now_s + self._quorum.grace_s
            mine.task.clock.spawn(f"quorum of round {self.round}", self._close(call, deadline_s), deadline_s)

    def gather_weights(self, whole: Tree, start_s: float) -> float:
        """Every member sends its slice of these weights, outside of the algorithm's calls. Returns when that ends."""
        count, cost = len(self.members), all_gather_cost(whole.numel, whole.flat.element_size(), self._links)
        return self._account("all_gather", cost, range(count), [start_s] * count, start_s, float(count), left_out=set())

    def name(self, rank: int) -> str:
        number = self.members[rank]
        return f"island {number}" if self.inside is None else f"device {number} of island {self.inside}"

    def waiting(self) -> list[str]:
        """Which members wait in which collective, in words."""
        return [f"{self.name(one.rank)} in {what}" for what, _, contributions in self._waiting.values() for one in contributions]

    def _completes_quorum(self, mine: Contribution, arrived: Sequence[Contribution]) -> bool:
        assert self._quorum is not None
        excluded = self.left_out | self._quorum.behind
        return mine.rank not in excluded and sum(one.rank not in excluded for one in arrived) == self._quorum.islands

    async def _close(self, call: int, time_s: float) -> None:
        """The window of a quorum is over: starts the exchange, unless all have come by then."""
        if call in self._waiting:
            self.late = {*range(len(self.members))} - {one.rank for one in self._waiting[call][2]}
            self.left_out |= self.late
            self._start(call, time_s)

    def _start(self, call: int, time_s: float) -> None:
        what, option, contributions = self._waiting.pop(call)
        if what == "mean":
            self._quorum = None
        self._exchange(what, sorted(contributions, key=lambda c: c.rank), option, time_s)

    def _exchange(self, what: str, arrived: list[Contribution], option: bool, start_s: float) -> None:
        arrived_s, heard = [c.task.now_s for c in arrived], [c for c in arrived if c.rank not in self.left_out]
        if what != "mean" and self.left_out:  # a slice is missing
            missing = [self.members[rank] for rank in sorted(self.left_out)]
            raise RoundAborted(what, missing, max(arrived_s) + max(link.latency_s for link in self._links))
        weight = float(len(heard)) if what == "all_gather" else float(sum(c.weight for c in heard))
        self.committed = self.committed or what == "reduce_scatter" or (weight > 0 and what != "total")
        if len({one.encoding.codec if one.encoding is not None else None for one in arrived}) > 1:
            raise ExchangeFailed(f"in round {self.round} islands call {what} with different codecs. Use one codec for all.")
        cost, background = self._cost(what, heard), arrived[0].task.flight
        if self._buckets > 1 and what in ("mean", "reduce_scatter") and heard:
            cost = cost._replace(seconds=self._exposed_s(what, arrived, heard, start_s))
        ranks = [c.rank for c in arrived]
        end_s = self._account(what, cost, ranks, arrived_s, start_s, weight, left_out=self.left_out, background=background)
        self._closed_s = end_s
        compared = what == "mean" and option and weight > 0 and self.inside is None
        inner_products = torch.zeros(len(heard), len(heard), dtype=torch.float64) if compared else None
        results = self._results(what, arrived, heard, weight, inner_products, wide=option)
        if what in ("mean", "reduce_scatter"):
            if heard:
                result, self.skipped = results[heard[0].rank], None  # the last exchange decides whether the update is skipped
                if not (result.finite and result.weight > 0):
                    nonfinite = [self.members[c.rank] for c in heard if not c.tree.is_finite()]
                    self.skipped = UpdateSkipped(round=self.round, islands=nonfinite, virtual_time_s=end_s, inside=self.inside)
                if inner_products is not None:
                    self.work.sink.emit(self.work.accounting.compared(inner_products.tolist(), [c.weight for c in heard]))
            # Contributions are donated, except for a State that the round may have to be repeated from: its buffers are `kept`.
            for tree in {id(one.tree): one.tree for one in arrived}.values():
                if not tree.borrowed and memory_of(tree) not in self.kept:
                    tree.release()
        for one in arrived:
            one.task.resume_at(end_s, lambda result=results[one.rank]: result)  # type: ignore[misc]

    def _account(
        self,
        what: str,
        cost: CollectiveCost,
        ranks: Sequence[int],
        arrived_s: list[float],
        start_s: float,
        weight: float,
        *,
        left_out: Set[int],
        background: bool = False,
    ) -> float:
        """Accounts an exchange of these ranks that costs this, and returns when it ends."""
        heard, sent_bytes = [rank not in left_out for rank in ranks], iter(cost.sent_bytes)
        devices = self.work.devices if self.inside is None else 1  # each device of an island sends to its counterparts
        control_bytes = devices * _CONTROL_BYTES[what] * (sum(heard) - 1)
        event = self.work.accounting.exchanged(
            what,
            islands=[self.members[rank] for rank in ranks],
            heard=heard,
            arrived_s=arrived_s,
            start_s=start_s,
            end_s=start_s + cost.seconds,
            sent_bytes=[next(sent_bytes) if one else 0 for one in heard],
            control_bytes=[control_bytes if one else 0 for one in heard],
            weight=weight,
            background=background,
            inside=self.inside,
        )
        self.work.sink.emit(event)
        return event.end_s

    def _exposed_s(self, what: str, arrived: Sequence[Contribution], heard: Sequence[Contribution], last_s: float) -> float:
        """How much longer than the last member's backward pass the exchange takes, if each bucket is sent when all members have it
        and the bucket before it is through. Members whose messages are lost are waited for like the others."""
        spans = [self.work.last_span_s[self._member(c.rank)] for c in arrived]
        bucket_s, free_s = self._cost(what, heard, self._buckets).seconds, 0.0
        for number in range(1, self._buckets + 1):
            left = BACKWARD * (1 - number / self._buckets)  # the share of a batch's time that follows this bucket
            ready_s = max(end_s - left * (end_s - start_s) for start_s, end_s in spans)
            free_s = max(free_s, ready_s) + bucket_s
        return max(0.0, free_s - last_s)

    def _member(self, rank: int) -> tuple[int, int | None]:
        return (self.members[rank], None) if self.inside is None else (self.inside, self.members[rank])

    def _cost(self, what: str, heard: Sequence[Contribution], buckets: int = 1) -> CollectiveCost:
        """Of the exchange, or of one of so many buckets of it."""
        if not heard:  # every island sent, and no message arrived
            return CollectiveCost(max(link.latency_s for link in self._links), [])
        links, item_bytes = [self._links[c.rank] for c in heard], heard[0].tree.flat.element_size()
        if what == "mean" and not any(c.weight for c in heard):  # the islands exchange their weights first, and then no tree
            what = "total"
        if what == "mean":
            codec = heard[0].encoding.codec if heard[0].encoding is not None else None
            whole = all_reduce_cost(math.ceil(heard[0].tree.numel / buckets), item_bytes, links, self._topology, codec)
            if (cuts := self._cuts(heard[0].tree)) is None:
                return whole
            each = [all_reduce_cost(stop - start, item_bytes, links, self._topology, codec).sent_bytes for start, stop in cuts]
            return whole._replace(sent_bytes=[sum(sent) for sent in zip(*each, strict=True)])
        if what == "total":  # a few bytes, which count as control bytes
            cost = all_reduce_cost(len(heard), CONTROL_BYTES, links, self._topology)
            return CollectiveCost(cost.seconds, [0] * len(heard))
        if what == "reduce_scatter":
            return reduce_scatter_cost(math.ceil(heard[0].tree.numel / buckets), item_bytes, links)
        return all_gather_cost(sum(c.tree.numel for c in heard), item_bytes, links)

    def _cuts(self, tree: Tree) -> list[tuple[int, int]] | None:
        """Where the part of each device begins and ends in a tree that islands of several devices exchange. None: it is whole."""
        if self.inside is not None or self.work.devices == 1:
            return None
        return device_cuts(self.work.layout, tree.layout, self.work.devices)

    def _results(
        self,
        what: str,
        arrived: Sequence[Contribution],
        heard: Sequence[Contribution],
        weight: float,
        inner_products: Tensor | None,
        *,
        wide: bool,
    ) -> dict[int, Any]:
        """The result of the exchange, by rank. The inner products of what a mean is made of are added to `inner_products`."""
        trees = [c.tree for c in heard]
        if what == "mean":
            unsent, encodings = dict[int, Tree | None](), [c.encoding for c in heard if c.encoding is not None]
            if not weight > 0:
                value = arrived[0].tree.zeros()
            elif encodings:
                value, errors = encoded_mean(trees, [c.weight for c in heard], encodings, self._cuts(trees[0]), inner_products)
                unsent = {c.rank: error for c, error in zip(heard, errors, strict=True)}
            else:
                value = weighted_mean(trees, [c.weight for c in heard])
                if inner_products is not None:
                    inner_products += products([tree.flat for tree in trees])
            # A value that is not finite makes the mean so, unless its tree has no weight or a codec sends something else. The
            # norm of the mean shows that, and is what clipping needs.
            in_the_mean = weight > 0 and not encodings and all(c.weight for c in heard)
            finite = (in_the_mean and measure([value])) or all_finite(trees)
            self.results.append(value)
            ranks = {c.rank for c in heard}
            return {c.rank: Mean(value, weight, c.rank in ranks, finite, unsent.get(c.rank)) for c in arrived}
        if what == "total":
            return {c.rank: weight for c in arrived}
        if what == "all_gather":
            whole = _joined(trees, self.results)
            return {c.rank: whole for c in arrived}
        whole = ordered_sum([tree.wide() if wide else tree for tree in trees], [1.0] * len(trees))
        self.results.append(whole)
        shards = [whole.shard(c.rank, len(arrived)) for c in arrived]
        finite = measure(shards) or all_finite(trees)  # a value that is not finite makes the sum so; the sum alone may overflow
        return {c.rank: Scattered(shard, weight, finite) for c, shard in zip(arrived, shards, strict=True)}


def device_cuts(whole: Layout, part: Layout, devices: int) -> list[tuple[int, int]]:
    """Each device of an island holds and exchanges a slice of the whole weights. Where the slices lie in a part of these.

    >>> import torch
    >>> whole = Layout.of({"w": torch.zeros(10)})
    >>> device_cuts(whole, whole, 2), device_cuts(whole, whole.slice(3, 9), 2)
    ([(0, 5), (5, 10)], [(0, 2), (2, 6)])
    """
    slices = [shard_range(whole.numel, device, devices) for device in range(devices)]
    ranges = whole.ranges(part)
    held = [sum(max(0, min(stop, last) - max(start, first)) for start, stop in ranges) for first, last in slices]
    return [*pairwise(accumulate(held, initial=0))]


def ordered_sum(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The weighted sum in rank order, rounded after every product and every sum. Every engine computes it so, also slice by slice,
    and therefore gets the same bits; a fused multiply-add would round the end of a buffer differently.

    A tree of weight 0 is left out, because its values need not be finite.
    """
    (first, weight), *rest = [(tree, weight) for tree, weight in zip(trees, weights, strict=True) if weight]
    total = first * weight
    for tree, weight in rest:
        total.add_(tree if weight == 1.0 else tree * weight)
    return total


def _joined(shards: Sequence[Tree], results: list[Tree]) -> Tree:
    """The whole of these shards: the buffer of an earlier reduce-scatter, if they still lie in it."""
    for whole in results:
        if not whole.deleted and all(
            shard.flat.data_ptr() == whole.shard(rank, len(shards)).flat.data_ptr() and shard.flat.dtype == whole.flat.dtype
            for rank, shard in enumerate(shards)
        ):
            return whole
    results.append(Tree.join(shards))
    return results[-1]


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    return ordered_sum(trees, weights).div_(sum(weights))
