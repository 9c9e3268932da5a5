"""Collectives of a process group, by pieces: the simulator's sums, to the bit, and the formula's bytes.

gloo's own reduce-scatter sends what an all-reduce sends, and its all-reduce adds in an order of its own. Here every rank sends each
other rank the slice that is to be its own, in pieces, and adds what it receives in rank order. So sums have the simulator's bits
at any number of ranks, a rank sends exactly what it would send round a ring, and nothing needs more room than a few pieces.

A wire is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.errors import ExchangeFailed
from atoll.tree import shard_range

PIECE_BYTES = 1 << 20
"""gloo moves large messages one way at a time, and messages of this size both ways together."""
CONTROL = 8  # bytes of a number that travels beside the payload


class _Open(NamedTuple):
    """A message on its way."""

    work: dist.Work
    rank: int
    doing: str


class Wire:
    """The collectives of one group.

    Args:
        group: a process group that nobody else uses: two threads on one group get each other's messages.
        limit_s: how long a piece may take before the exchange has failed.
        piece_bytes: at most so much is sent in one message.
    """

    def __init__(self, group: dist.ProcessGroup, *, limit_s: float, piece_bytes: int = PIECE_BYTES) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = self.control_bytes = 0
        """Since the beginning: payload, and what travels beside it."""
        self._group, self._limit_s, self._piece_bytes = group, limit_s, piece_bytes

    def tell(self, *numbers: float) -> list[list[float]]:
        """Everybody's numbers, in rank order."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        theirs = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._wait([message for rank in self._others() for message in (self._send(mine, rank), self._receive(theirs[rank], rank))])
        self.control_bytes += CONTROL * len(numbers) * (self.size - 1)
        return [numbers_of.tolist() for numbers_of in theirs]

    def scatter_sum(self, flat: Tensor, weights: Sequence[float], sums: torch.dtype | None = None) -> Tensor:
        """This rank's slice of the sum of everybody's buffer times its weight, added up in rank order.

        It lies in `flat`, or in a buffer of its own if it is summed in another precision, `sums`. What weighs nothing is left out.
        """
        start, stop = shard_range(flat.numel(), self.rank, self.size)
        mine = flat[start:stop]
        total = mine if sums in (None, flat.dtype) else torch.empty(stop - start, dtype=sums, device=flat.device)
        count = max(len(self._cuts(flat, rank)) for rank in range(self.size))
        for number in range(count):
            self._add_piece(flat, mine, total, number, weights)
        self.sent_bytes += (flat.numel() - mine.numel()) * flat.element_size()
        return total

    def _add_piece(self, flat: Tensor, mine: Tensor, total: Tensor, number: int, weights: Sequence[float]) -> None:
        """One piece of everybody's slice: sent to whom it belongs, and added up by whom it belongs to."""
        messages = [
            self._send(flat[slice(*cuts[number])], rank)
            for rank in self._others()
            if number < len(cuts := self._cuts(flat, rank))
        ]
        cuts, (first, _) = self._cuts(flat, self.rank), shard_range(flat.numel(), self.rank, self.size)
        if number >= len(cuts):
            self._wait(messages)
            return
        piece = slice(cuts[number][0] - first, cuts[number][1] - first)
        theirs = {rank: torch.empty_like(mine[piece]) for rank in self._others()}
        self._wait([*messages, *(self._receive(buffer, rank) for rank, buffer in theirs.items())])
        parts = [mine[piece] if rank == self.rank else theirs[rank] for rank in range(self.size)]
        total[piece] = ordered_sum([part.to(total.dtype) for part in parts], weights)

    def gather(self, whole: Tensor) -> None:
        """Everybody's slice of a buffer, of which this rank has filled in its own."""
        start, stop = shard_range(whole.numel(), self.rank, self.size)
        mine = self._cuts(whole, self.rank)
        for number in range(max(len(self._cuts(whole, rank)) for rank in range(self.size))):
            sends = [self._send(whole[slice(*mine[number])], rank) for rank in self._others()] if number < len(mine) else []
            receives = [
                self._receive(whole[slice(*cuts[number])], rank)
                for rank in self._others()
                if number < len(cuts := self._cuts(whole, rank))
            ]
            self._wait([*sends, *receives])
        self.sent_bytes += (stop - start) * whole.element_size() * (self.size - 1)

    def _cuts(self, flat: Tensor, rank: int) -> list[tuple[int, int]]:
        """Where the pieces of a rank's slice begin and end."""
        start, stop = shard_range(flat.numel(), rank, self.size)
        length = max(1, self._piece_bytes // flat.element_size())
        return [(at, min(at + length, stop)) for at in range(start, stop, length)]

    def _others(self) -> list[int]:
        """Beginning with the next one, so that not all send to the same at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _send(self, tensor: Tensor, rank: int) -> _Open:
        work = dist.isend(tensor.contiguous(), group=self._group, group_dst=rank)
        assert work is not None
        return _Open(work, rank, "send to")

    def _receive(self, tensor: Tensor, rank: int) -> _Open:
        work = dist.irecv(tensor, group=self._group, group_src=rank)
        assert work is not None
        return _Open(work, rank, "hear from")

    def _wait(self, messages: Sequence[_Open]) -> None:
        for message in messages:
            try:
                message.work.wait(timedelta(seconds=self._limit_s))
            except RuntimeError as error:
                raise ExchangeFailed(
                    f"rank {self.rank} could not {message.doing} rank {message.rank} within {self._limit_s:g} s: it died, or its "
                    f"line is too slow for this limit. What was saved before this round stands. ({error})"
                ) from error


def ordered_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum in rank order, rounded after every product and every sum, so that its bits do not depend on where a buffer
    is cut."""
    (first, weight), *rest = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    total = first * weight
    for part, weight in rest:
        total += part if weight == 1.0 else part * weight
    return total
