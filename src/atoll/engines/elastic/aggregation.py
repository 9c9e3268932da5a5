"""The exchange of one commit attempt: a quorum averages its deltas, rejects invalid ones, and votes that all came to the same.

Every member validates every delta by the same rule, checks every received slice against the checksum that its sender announced, and
in the end compares all that it received with all other members. So a bit that is damaged on the way never reaches a commit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from atoll.core.errors import one_line
from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.core.protocols import Encoding
from atoll.core.verified_files import parse_json
from atoll.engines.elastic.state_version import NO_VERSION, Checksum, StateVersion, checksum, combine_checksums
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.round_record import DeltaSimilarity, ExchangeRecord, RoundRecord, WallClock

NORM_WINDOW = 16
"""Rounds whose delta norms the validator remembers."""
NORM_SAMPLES = 3
"""Norms that must be known before one of them counts as too large."""


class Disagreement(Exception):
    """Members of a quorum came to different results: a message was damaged, or a member computes wrongly. They try again.
    `suspects` are the islands to or from which messages were damaged, as far as this island knows."""

    def __init__(self, why: str, suspects: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.suspects = suspects


class DeltaSummary(NamedTuple):
    """What an island announces of its delta. An island without work has weight 0."""

    weight: float
    finite: bool
    norm: float


_NO_DELTA = DeltaSummary(0.0, True, 0.0)


class UpdateValidator:
    """Rejects deltas that are not finite, or whose norm exceeds `limit` times the median of recent rounds; in the first rounds, of
    the deltas beside it. A limit of infinity rejects only what is not finite. A weight must be finite, not negative and at most
    `most_weight`: weights and norms are what islands announce, and one impossible number would spoil the mean of all."""

    def __init__(self, limit: float, most_weight: float = sys.float_info.max) -> None:
        self._limit, self._most_weight = limit, most_weight
        self._norms: list[float] = []

    def rejections(self, deltas: Sequence[DeltaSummary]) -> dict[int, str]:
        """The reasons to reject deltas, by rank."""
        norms = [one.norm for one in deltas if one.weight and not self._impossible(one)]
        known = self._norms if len(self._norms) >= NORM_SAMPLES else norms
        usual = median(known) if len(known) >= NORM_SAMPLES else 0.0
        reasons = {rank: self._reason(one, usual) for rank, one in enumerate(deltas) if one.weight}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def record(self, deltas: Sequence[DeltaSummary], rejected: Collection[int]) -> None:
        """Remember the norms that a commit accepted."""
        accepted = [one.norm for rank, one in enumerate(deltas) if one.weight and rank not in rejected]
        if accepted:
            self._norms = [*self._norms, median(accepted)][-NORM_WINDOW:]

    def _impossible(self, one: DeltaSummary) -> str:
        """What no sound delta of this run can announce; "" if there is nothing. NaN is in no range."""
        if not 0 <= one.weight <= self._most_weight:
            return f"its weight is {one.weight:g}, and a delta of this run has one of 0 to {self._most_weight:g}"
        if not one.finite:
            return "its delta is not finite"
        return "" if 0 <= one.norm < math.inf else f"its delta has a norm of {one.norm:g}, which is none"

    def _reason(self, one: DeltaSummary, usual: float) -> str:
        if impossible := self._impossible(one):
            return impossible
        if usual and one.norm > self._limit * usual:
            return (
                f"its delta has a norm of {one.norm:.3g}, {one.norm / usual:.6g} times what is usual ({usual:.3g}); "
                f"the limit is {self._limit:g} times"
            )
        return ""

    def to_parts(self) -> dict[str, list[float]]:
        return {"norms": list(self._norms)}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self._norms = list(parts["norms"])


@dataclass(frozen=True)
class IslandReport:
    """What an island reports of itself with its vote."""

    folder: str  # see IslandStatus.folder
    address: str
    donor: str | None = None  # the island that it fetched its state from since its last commit
    received_bytes: int = 0  # from the donor
    written: int = NO_VERSION.number  # the last version that it has written into the event log
    record: RoundRecord = field(default_factory=RoundRecord)
    now_s: float = 0.0

    def to_text(self) -> str:
        return json.dumps([*{**vars(self), "record": self.record.to_json()}.values()])

    @staticmethod
    def from_text(text: str) -> IslandReport:
        """What `to_text` wrote. Raises ValueError or TypeError if this is no report."""
        match parse_json(text):
            case [str(folder), str(address), str() | None as donor, int(received), int(written), str(record), float(now_s)]:
                if not math.isfinite(now_s):
                    raise ValueError(f"its time is {now_s}")
                return IslandReport(folder, address, donor, received, written, _record(record), now_s)
        raise ValueError(f"{text[:80]!r} is none")


@dataclass(frozen=True)
class Proposal:
    """What this island brings to a commit. An opening commit, before the first round, has no delta: the islands only vote."""

    version: StateVersion  # of the state that the island holds
    digest: int
    report: IslandReport  # with the record of its round so far
    tree: Tree | None = None  # the delta
    weight: float = 0.0  # 0 if the island has no work in this round
    working: frozenset[str] = frozenset()  # the islands that have work in this round
    compare: bool = False  # whether the deltas' inner products are recorded
    encoding: Encoding | None = None  # of the delta
    arrived_s: float = 0.0  # when this island was ready to exchange
    background: bool = False  # whether it trains on meanwhile
    before_vote: Callable[[], object] = bool  # called when only the vote is left: from then on other members may commit


@dataclass(frozen=True)
class Agreement:
    """What a quorum agreed on; deltas and reports in rank order."""

    value: Tree
    deltas: Sequence[DeltaSummary]
    rejected: dict[int, str]  # the reasons, by rank
    weight: float  # of all accepted deltas
    reports: Sequence[IslandReport]
    rank: int
    unsent: Tree | None = None  # what the encoding left out of this island's delta, if that is in the value

    @property
    def now_s(self) -> float:
        """Of the clock that is furthest ahead: a joiner does not know how long its start took."""
        return max(one.now_s for one in self.reports)


class ValidatedMean:
    """Carries out the exchange of a proposal."""

    def __init__(self, validator: UpdateValidator, clock: WallClock) -> None:
        self._validator, self._clock = validator, clock
        self._vote_bytes = 0
        """Of the last vote. A vote is about what was counted before it, so its bytes are counted with the next round."""

    def __call__(self, collectives: GroupCollectives, states: Sequence[Sequence[float]], proposal: Proposal) -> Agreement:
        """The participants announced their `states` as numbers. Raises Disagreement if they came to different results."""
        if proposal.tree is None:
            nothing = Tree.of({"nothing": torch.zeros(0)})
            return self._vote(collectives, states, proposal, nothing, None, [], {}, 0.0)
        tree, start_s = proposal.tree, self._clock.now_s()
        rows = self._announce(collectives, tree, proposal)
        # An island without a lease has nothing to deliver, whatever it announces.
        working = [name in proposal.working for name in collectives.names]
        deltas = [_summary(row) if works else _NO_DELTA for row, works in zip(rows, working, strict=True)]
        rejected = self._validator.rejections(deltas)
        weights = [0.0 if rank in rejected else one.weight for rank, one in enumerate(deltas)]
        total = float(sum(weights))
        record = RoundRecord(list(proposal.report.record.computed))
        record.tokens = sum(one.tokens for one in record.computed) if weights[collectives.rank] else 0
        mean, sums, unsent = tree.copy() if total else tree.zeros(), None, None
        products = torch.zeros(collectives.size, collectives.size, dtype=torch.float64) if proposal.compare and total else None
        if total and proposal.encoding is not None:
            unsent = mean.claim(torch.float32)
            mean = Tree(mean.layout, self._average_encoded(collectives, unsent, weights, proposal.encoding, products))
        elif total:
            announced = [row[3 + collectives.rank] for row in rows]
            sums = self._average(collectives, mean, weights, announced, products)
        record.similarities = [DeltaSimilarity(products.tolist(), weights)] if products is not None else []
        times_s = proposal.arrived_s, self._clock.now_s()
        sent, control = collectives.sent_bytes, collectives.control_bytes + self._vote_bytes
        exchange = ExchangeRecord(
            "mean", *times_s, sent, control, total, proposal.background, tuple(rejected), total == 0, start_s=start_s
        )
        record.exchanges = [exchange]
        proposal = replace(proposal, report=replace(proposal.report, record=record))
        agreement = self._vote(collectives, states, proposal, mean, sums, rows, rejected, total)
        return replace(agreement, deltas=deltas, unsent=unsent if weights[collectives.rank] else None)

    def _announce(self, collectives: GroupCollectives, tree: Tree, proposal: Proposal) -> list[list[float]]:
        """All members' summaries, and the checksums of the slices that each sends, by receiving rank; 0 for its own slice, which
        it does not send, and for slices that are encoded while they are sent."""
        sums = [0] * collectives.size
        if not proposal.weight:
            return collectives.all_gather_numbers(0.0, True, 0.0, *sums)
        norm = tree.rough_norm()  # not finite if a value is not
        others = [rank for rank in range(collectives.size) if rank != collectives.rank and proposal.encoding is None]
        for rank, total in zip(others, _slice_sums(tree, collectives.size, others), strict=True):
            sums[rank] = total
        finite = math.isfinite(norm)
        return collectives.all_gather_numbers(proposal.weight, finite, norm if finite else 0.0, *sums)

    def _average(
        self,
        collectives: GroupCollectives,
        mean: Tree,
        weights: Sequence[float],
        announced: Sequence[float],
        products: torch.Tensor | None,
    ) -> list[int]:
        """Returns the checksum of each rank's slice of the mean. Chunks are added to checksums while they are in the cache and
        others are on their way."""
        received, gathered = _running_sums(collectives), _running_sums(collectives)
        collectives.reduce_scatter(
            mean.flat, weights, inner_products=products, on_received=partial(_add_to, received), divide_by=float(sum(weights))
        )
        _check_received(collectives, weights, received, announced)
        collectives.all_gather(mean.flat, on_chunk=partial(_add_to, gathered))
        return [one.value for one in gathered]

    def _average_encoded(
        self,
        collectives: GroupCollectives,
        tree: Tree,
        weights: Sequence[float],
        encoding: Encoding,
        products: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the mean; the tree then holds what the encoding left out. Members announce the checksums of what they sent
        afterwards, since they encode while they send."""
        sent, received = _running_sums(collectives), _running_sums(collectives)
        hooks: dict[str, Any] = {"on_sent": partial(_add_to, sent), "on_received": partial(_add_to, received)}
        mean = collectives.encoded_mean(tree.flat, weights, encoding, inner_products=products, **hooks)
        announced = [row[collectives.rank] for row in collectives.all_gather_numbers(*(one.value for one in sent))]
        _check_received(collectives, weights, received, announced)
        return mean

    def _vote(
        self,
        collectives: GroupCollectives,
        states: Sequence[Sequence[float]],
        proposal: Proposal,
        value: Tree,
        slice_sums: Sequence[int] | None,
        rows: Sequence[Sequence[float]],
        rejected: dict[int, str],
        weight: float,
    ) -> Agreement:
        """Compare all that was received with all members. Only this shows that all members received what a member sent. Without
        `slice_sums`, the checksums of the value's slices are computed."""
        before_bytes = collectives.control_bytes
        try:
            texts = collectives.all_gather_text(replace(proposal.report, now_s=self._clock.now_s()).to_text())
        except (ValueError, OverflowError, RuntimeError) as error:  # no text, or of no possible length
            raise Disagreement(f"an island's report was damaged on the way: {error}") from error
        slice_sums = slice_sums or _slice_sums(value, collectives.size, range(collectives.size), proposal.encoding)
        parts = zip(slice_sums, states, rows or [()] * collectives.size, texts, strict=True)
        sums = [combine_checksums([total], f"{[*state]}{[*row]}{text}") for total, state, row, text in parts]
        reports, malformed = _read_reports(collectives.names, texts, proposal.report.record)
        if malformed is None:  # else no member that received the same can commit
            proposal.before_vote()
        digests = collectives.all_gather_numbers(*sums)
        if any(one != digests[0] for one in digests):
            me, names = collectives.rank, collectives.names
            suspects = [name for rank, name in enumerate(names) if _differs(digests, rank, me) or _differs(digests, me, rank)]
            raise Disagreement(f"islands came to different means, or received different messages ({digests})", suspects)
        if malformed is not None:
            raise malformed
        self._vote_bytes = collectives.control_bytes - before_bytes
        return Agreement(value, (), rejected, weight, reports, collectives.rank)


def _read_reports(names: Sequence[str], texts: Sequence[str], own: RoundRecord) -> tuple[list[IslandReport], Disagreement | None]:
    """The islands' reports, or what is wrong with one of them. Every record has the same exchanges as this island's `own`."""
    reports = []
    for name, text in zip(names, texts, strict=True):
        try:
            reports.append(IslandReport.from_text(text))
            if _common(reports[-1].record) != _common(own):
                raise ValueError("its record of the round has another exchange than this island's")
            _check_products(reports[-1].record, len(names))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            return [], Disagreement(f"the report of {name} is malformed: {one_line(error)}", [name])
    return reports, None


def _common(record: RoundRecord) -> str:
    """What the records of all members have in common, as JSON: an integer differs there from a number with a fraction."""
    exchanges = [(one.what, one.weight, one.nonfinite, one.unusable) for one in record.exchanges]
    return json.dumps([exchanges, [one.weights for one in record.similarities]])


def _check_products(record: RoundRecord, size: int) -> None:
    for similar in record.similarities:
        if [len(row) for row in similar.products] != [size] * size or any(row[i] < 0 for i, row in enumerate(similar.products)):
            raise ValueError(f"its inner products are none of {size} deltas")


def _record(text: str) -> RoundRecord:
    record = RoundRecord.from_json(text)
    finite: list[Any] = [record.tokens, record.dropped_tokens, record.island_updates]
    others: list[Any] = []
    for span in record.computed:
        finite += [*span[:4], *span[5:]]
        others += [*span.losses] or [None]  # their mean is taken
    for one in record.exchanges:
        start_s = 0.0 if one.start_s is None else one.start_s
        finite += [one.arrived_s, one.end_s, start_s, one.sent_bytes, one.control_bytes]
    for similar in record.similarities:
        others += [float(number) if isinstance(number, int) else number for row in similar.products for number in row]
    if not all(isinstance(number, int | float) for number in [*finite, *others]):
        raise ValueError("its record of the round has other values than numbers")
    if not all(map(math.isfinite, finite)):
        raise ValueError("its record of the round has values that are not finite")
    return record


def _running_sums(collectives: GroupCollectives) -> list[Checksum]:
    return [Checksum() for _ in range(collectives.size)]


def _add_to(sums: Sequence[Checksum], rank: int, chunk: torch.Tensor) -> None:
    sums[rank].add(chunk)


def _check_received(
    collectives: GroupCollectives, weights: Sequence[float], received: Sequence[Checksum], announced: Sequence[float]
) -> None:
    others = [rank for rank, weight in enumerate(weights) if weight and rank != collectives.rank]
    if damaged := [collectives.names[rank] for rank in others if received[rank].value != announced[rank]]:
        raise Disagreement(f"the delta of {', '.join(damaged)} does not match its checksum: it was damaged on the way", damaged)


def _slice_sums(tree: Tree, size: int, ranks: Sequence[int], encoding: Encoding | None = None) -> list[int]:
    """The checksums of these ranks' slices. Values that are gathered have no owner, and any slices will do."""
    unit = 1 if encoding is None else encoding.codec.unit
    return [checksum(tree.flat[slice(*shard_range(tree.numel, rank, size, unit))]) for rank in ranks]


def _summary(row: Sequence[float]) -> DeltaSummary:
    return DeltaSummary(row[0], bool(row[1]), row[2])


def _differs(digests: Sequence[Sequence[float]], one: int, sender: int) -> bool:
    """Whether one rank received something else from a sender than the sender sent: its slice of the mean, or its announcements."""
    return digests[one][sender] != digests[sender][sender]
