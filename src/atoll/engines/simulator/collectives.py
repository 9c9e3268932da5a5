"""Where the islands of one round meet, or the devices of one island: what each exchange comes to, costs and reports.

All come to the same meetings in the same order. A meeting takes place when the last one has come, and is over for all at the same
moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll.core.errors import ExchangeFailed
from atoll.core.events import UpdateSkipped
from atoll.core.flat_tree import Tree, all_finite, products
from atoll.core.protocols import Mean, Scattered, Sink
from atoll.core.pytree import memory_of
from atoll.engines.accounting import RunAccounting
from atoll.engines.simulator.virtual_clock import ClockTask
from atoll.runs import network
from atoll.runs.network import CONTROL_BYTES, Cost, Link, Topology

_CONTROL_BYTES = {"mean": 2 * CONTROL_BYTES, "reduce_scatter": 2 * CONTROL_BYTES, "total": CONTROL_BYTES, "all_gather": 0}
"""What is told each peer at an exchange: a weight, and whether what comes with it is finite; a number; nothing."""


class RoundAborted(Exception):
    """An exchange that needs everybody did without somebody. The engine ends the round there, for all."""

    def __init__(self, what: str, silent: list[int], time_s: float) -> None:
        super().__init__(f"{what} without islands {silent}")
        self.what, self.silent, self.time_s = what, silent, time_s


class Contribution(NamedTuple):
    """An island at a meeting."""

    rank: int
    task: ClockTask
    time_s: float
    tree: Tree
    weight: float


@dataclass
class SimCollectives:
    """Where the islands of one round meet, or the devices of one island.

    Args:
        round: its number.
        islands: who is there, in rank order.
        heard: whether each of them is heard in this round.
        links: each one's line.
        topology: of the exchanges.
        report: takes events.
        accounting: counts the bytes that each island sent.
        inside: the island whose devices meet, if they do.
        devices: of each island, where islands meet: each tells its counterparts.
    """

    round: int
    islands: Sequence[int]
    heard: Sequence[bool]
    links: Sequence[Link]
    topology: Topology
    report: Sink
    accounting: RunAccounting
    inside: int | None = None
    devices: int = 1
    committed: bool = False
    """Whether an exchange of this round carried any weight, or everybody came to a reduce-scatter."""
    left_out: set[int] = field(default_factory=set)
    """Ranks that a mean of this round went on without."""
    skipped: UpdateSkipped | None = None
    """If gradients of this round were of no use, because somebody's were not finite or nobody had any: what there is to report."""
    kept: Set[int] = frozenset()
    """Memory of the States that the round began with."""
    results: list[Tree] = field(default_factory=list)
    """What exchanges made; all islands hold the same object."""
    _waiting: dict[int, list[Contribution]] = field(default_factory=dict)
    _subjects: dict[int, str] = field(default_factory=dict)

    def arrive(self, call: int, what: str, arrival: Contribution, option: bool) -> None:
        """`option` is a mean's `compare` or a reduce-scatter's `wide`."""
        if what != "total" and not (math.isfinite(arrival.weight) and arrival.weight >= 0):
            raise ExchangeFailed(
                f"{self.name(arrival.rank)} comes to a {what} with a weight of {arrival.weight}. "
                f"Give it a finite weight of 0 or more."
            )
        subject = self._subjects.setdefault(call, what)
        if subject != what:
            raise ExchangeFailed(
                f"in round {self.round} {self.name(arrival.rank)} comes to a {what}, but the others are at a {subject}. "
                f"All islands must make the same calls in the same order."
            )
        arrivals = self._waiting.setdefault(call, [])
        arrivals.append(arrival)
        if len(arrivals) == len(self.islands):
            del self._waiting[call]
            self._hold(what, sorted(arrivals, key=lambda a: a.rank), option)

    def gather_anew(self, whole: Tree, start_s: float) -> float:
        """Everybody sends its slice of these weights, without being asked. When that is over."""
        ranks = range(len(self.islands))
        cost = network.all_gather(whole.numel, whole.flat.element_size(), self.links)
        self.report.emit(
            self.accounting.exchanged(
                "all_gather",
                islands=self.islands,
                arrived_s=[start_s for _ in ranks],
                end_s=start_s + cost.seconds,
                sent_bytes=cost.sent_bytes,
                control_bytes=[0 for _ in ranks],
                weight=float(len(ranks)),
                inside=self.inside,
            )
        )
        return start_s + cost.seconds

    def name(self, rank: int) -> str:
        """What this rank is called."""
        who = self.islands[rank]
        return f"island {who}" if self.inside is None else f"device {who} of island {self.inside}"

    def waiting(self) -> list[str]:
        """Who still waits at which meeting, in words."""
        return [
            f"{self.name(arrival.rank)} in {self._subjects[call]}"
            for call, arrivals in self._waiting.items()
            for arrival in arrivals
        ]

    def _hold(self, what: str, arrivals: list[Contribution], option: bool) -> None:
        """The last one has come: compute the outcome, and let everybody go on when it is over."""
        heard = [a for a in arrivals if self.heard[a.rank]]
        start_s = max(arrival.time_s for arrival in arrivals)
        if what != "mean" and len(heard) < len(arrivals):  # without every slice there is no whole
            silent = [self.islands[a.rank] for a in arrivals if a not in heard]
            raise RoundAborted(what, silent, start_s + max(link.latency_s for link in self.links))
        cost = self._cost(what, heard)
        weight = float(len(heard)) if what == "all_gather" else float(sum(a.weight for a in heard))
        self.committed = self.committed or what == "reduce_scatter" or (weight > 0 and what != "total")
        ranks = [a.rank for a in heard]
        self.left_out |= {a.rank for a in arrivals} - set(ranks)
        sent = [cost.sent_bytes[ranks.index(a.rank)] if a.rank in ranks else 0 for a in arrivals]
        told_bytes = self.devices * _CONTROL_BYTES[what] * (len(heard) - 1)
        control = [told_bytes if a.rank in ranks else 0 for a in arrivals]
        self.report.emit(
            self.accounting.exchanged(
                what,
                islands=self.islands,
                heard=[a.rank in ranks for a in arrivals],
                arrived_s=[a.time_s for a in arrivals],
                end_s=start_s + cost.seconds,
                sent_bytes=sent,
                control_bytes=control,
                weight=weight,
                background=arrivals[0].task.flight,
                inside=self.inside,
            )
        )
        outcome = self._outcome(what, arrivals, heard, wide=option)
        if what in ("reduce_scatter", "mean") and heard:
            self._look_whether_it_is_of_use(outcome[heard[0].rank], heard, start_s + cost.seconds)
        if what == "mean" and option and heard and self.inside is None:
            found = products([a.tree for a in heard])
            self.report.emit(self.accounting.compared(found, outcome[heard[0].rank].value.norm()))
        if what in ("mean", "reduce_scatter"):
            self._release_contributions(arrivals)
        for arrival in arrivals:
            result = outcome[arrival.rank]
            arrival.task.resume_at(start_s + cost.seconds, lambda result=result: result)  # type: ignore[misc]

    def _release_contributions(self, arrivals: Sequence[Contribution]) -> None:
        """Contributions are donated. A State that a round may have to go back to is not: its buffers are `kept`."""
        for tree in {id(arrival.tree): arrival.tree for arrival in arrivals}.values():
            if not tree.borrowed and memory_of(tree) not in self.kept:
                tree.release()

    def _cost(self, what: str, heard: Sequence[Contribution]) -> Cost:
        if not heard:  # everybody tried, nobody got through
            return Cost(max(link.latency_s for link in self.links), [])
        links, item_bytes = [self.links[a.rank] for a in heard], heard[0].tree.flat.element_size()
        if what == "mean":
            return network.all_reduce(heard[0].tree.numel, item_bytes, links, self.topology)
        if what == "total":  # a few bytes around the ring, which are control bytes
            cost = network.all_reduce(len(heard), CONTROL_BYTES, links, self.topology)
            return Cost(cost.seconds, [0] * len(heard))
        if what == "reduce_scatter":
            return network.reduce_scatter(heard[0].tree.numel, item_bytes, links)
        return network.all_gather(sum(a.tree.numel for a in heard), item_bytes, links)

    def _look_whether_it_is_of_use(self, outcome: Scattered | Mean, arrivals: Sequence[Contribution], time_s: float) -> None:
        """The last exchange of a round is what its update is made of."""
        self.skipped = None
        if not (outcome.finite and outcome.weight > 0):
            culprits = [self.islands[a.rank] for a in arrivals if not a.tree.is_finite()]
            self.skipped = UpdateSkipped(round=self.round, islands=culprits, virtual_time_s=time_s, inside=self.inside)

    def _outcome(self, what: str, arrivals: Sequence[Contribution], heard: Sequence[Contribution], *, wide: bool) -> dict[int, Any]:
        """What each rank is given."""
        trees = [arrival.tree for arrival in heard]
        if what == "mean":
            weight = float(sum(a.weight for a in heard))
            value = weighted_mean(trees, [a.weight for a in heard]) if weight > 0 else arrivals[0].tree.zeros()
            self.results.append(value)
            ranks, finite = {a.rank for a in heard}, all_finite(trees)
            return {a.rank: Mean(value, weight, a.rank in ranks, finite) for a in arrivals}
        total = float(sum(a.weight for a in heard))
        if what == "total":
            return {a.rank: total for a in arrivals}
        if what == "all_gather":
            whole = _joined(trees, self.results)
            return {a.rank: whole for a in arrivals}
        finite = all_finite(trees)
        whole = ordered_sum([tree.wide() if wide else tree for tree in trees], [1.0] * len(trees))
        self.results.append(whole)
        return {a.rank: Scattered(whole.shard(a.rank, len(arrivals)), total, finite) for a in arrivals}


def ordered_sum(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The weighted sum, added up in rank order, and rounded after every product and every sum: every engine does it so, and
    therefore has these bits, also where it sums slice by slice (what is rounded once is rounded otherwise at the end of a buffer).

    What weighs nothing is left out, whatever it holds: an island that is healing brings no sensible values.
    """
    (first, weight), *rest = [(tree, weight) for tree, weight in zip(trees, weights, strict=True) if weight]
    total = first * weight
    for tree, weight in rest:
        total.add_(tree if weight == 1.0 else tree * weight)
    return total


def _joined(shards: Sequence[Tree], results: list[Tree]) -> Tree:
    """The whole of which these are the shards: the buffer that they lie in already, where a reduce-scatter left them there."""
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
