"""Collectives of a process group, by pieces: the simulator's sums, to the bit, and the formula's bytes.

gloo's own reduce-scatter sends what an all-reduce sends, and its all-reduce adds in an order of its own. Here every rank sends each
other rank the slice that is to be its own, in pieces, and adds what it receives in rank order. So sums have the simulator's bits
at any number of ranks, a rank sends exactly what it would send round a ring, and nothing needs more room than a few pieces. Several
pieces are under way at a time, so that a line's latency is waited for once.

A wire is used by one thread at a time. Ranks may leave it: who is left goes on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.core.layout import shard_range
from atoll.engines.processes.failure_attribution import Blame
from atoll.engines.processes.transport import BatchCarrier, Group, Missed, carrier_of

PIECE_BYTES = 1 << 20
"""gloo moves large messages one way at a time, and messages of this size both ways together. Of two ranks each has but one other to
hear from at a time: there it is twice as much."""
UNDER_WAY = 4
"""Pieces that are sent ahead of those that are waited for."""
MISSED = "it died, or its line is too slow"
"""What is said of a rank that was missed."""
CONTROL = 8  # bytes of a number that travels beside the payload


class Wire:
    """The collectives of one group.

    Args:
        group: a process group that nobody else uses: two threads on one group get each other's messages.
        limit_s: how long a piece may take before the exchange has failed. It may be changed between two exchanges.
        piece_bytes: at most so much is sent in one message; none: as much as `PIECE_BYTES` says.
        blame: finds out who is to be named when somebody is missed; none names the one who was missed here.
        names: what members are called in errors; else by their rank in the group.
    """

    def __init__(
        self,
        group: Group,
        *,
        limit_s: float,
        piece_bytes: int | None = None,
        blame: Blame | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._me = group.rank()
        self._members = list(range(group.size()))
        self._carrier = carrier_of(group)
        on_gpu = isinstance(self._carrier, BatchCarrier)
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._piece_bytes = piece_bytes or PIECE_BYTES * (2 if group.size() == 2 else 1)
        self._blame = blame
        self._names = names or [f"rank {rank}" for rank in self._members]
        self.limit_s = limit_s
        self.sent_bytes = self.control_bytes = 0
        """Since the beginning: payload, and what travels beside it."""

    @property
    def rank(self) -> int:
        """Among those who have not left."""
        return self._members.index(self._me)

    @property
    def size(self) -> int:
        return len(self._members)

    def leave_out(self, ranks: Sequence[int]) -> None:
        """These members have left; the ranks of the others close up."""
        self._members = [member for rank, member in enumerate(self._members) if rank not in ranks]

    # --------------------------------------------------------------------------------------------------------- collectives

    def tell(self, *numbers: float) -> list[list[float]]:
        """Everybody's numbers, in rank order."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        theirs = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._waiting(self._post(dict.fromkeys(self._others(), mine), {rank: theirs[rank] for rank in self._others()}))
        self.control_bytes += CONTROL * len(numbers) * (self.size - 1)
        return [numbers_of.tolist() for numbers_of in theirs]

    def tell_text(self, text: str) -> list[str]:
        """Everybody's text, in rank order."""
        mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = [int(row[0]) for row in self.tell(len(mine))]
        theirs = {rank: torch.empty(lengths[rank], dtype=torch.uint8) for rank in self._others()}
        self._waiting(self._post(dict.fromkeys(self._others(), mine), theirs))
        self.control_bytes += len(mine) * (self.size - 1)
        return [bytes(theirs.get(rank, mine).tolist()).decode() if rank != self.rank else text for rank in range(self.size)]

    def tell_those_left(self, *numbers: float, left: Callable[[int], bool]) -> list[list[float] | None]:
        """`tell` among members of whom some may have left without a word: none in their place.

        `left` is asked of a member of the group that is missed. All that are there have the same of each other, so that they need
        not begin again.
        """
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        theirs = {rank: torch.empty_like(mine) for rank in self._others()}
        posted = {rank: self._post({rank: mine}, {rank: theirs[rank]}) for rank in self._others()}
        told: list[list[float] | None] = [list(numbers)] * self.size
        for rank, wait in posted.items():
            try:
                wait()
                told[rank] = theirs[rank].tolist()
            except Missed as missed:
                if not left(missed.rank):
                    raise self._failure(missed) from missed
                told[rank] = None
        self.control_bytes += CONTROL * len(numbers) * (self.size - 1)
        return told

    def post_last_words(self, *numbers: float) -> object:
        """What members who tell next will hear of this one, and nothing after it. Nobody waits for that: keep what is returned for
        as long as they may hear it."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [self._post({rank: mine}, {rank: torch.empty_like(mine)}) for rank in self._others()]

    def scatter_sum(
        self,
        flat: Tensor,
        weights: Sequence[float],
        sums: torch.dtype | None = None,
        *,
        products: Tensor | None = None,
        heard: Callable[[int, Tensor], object] | None = None,
        over: float | None = None,
    ) -> Tensor:
        """This rank's slice of the sum of everybody's buffer times its weight, added up in rank order, and divided by `over`.

        It lies in `flat`, or in a buffer of its own if it is summed in another precision, `sums`. What weighs nothing is left out.
        The inner products of everybody's slices are added to `products`, to about six digits. `heard` is shown each piece of
        another rank before it is added.
        """
        start, stop = shard_range(flat.numel(), self.rank, self.size)
        mine = flat[start:stop]
        total = mine if sums in (None, flat.dtype) else torch.empty(stop - start, dtype=sums, device=flat.device)
        self._pipeline(self._scattering(flat, mine, total, weights, products, heard, over))
        self.sent_bytes += (flat.numel() - mine.numel()) * flat.element_size()
        return total

    def _scattering(
        self,
        flat: Tensor,
        mine: Tensor,
        total: Tensor,
        weights: Sequence[float],
        products: Tensor | None,
        heard: Callable[[int, Tensor], object] | None,
        over: float | None,
    ) -> Iterator[Callable[[], None]]:
        """Each piece of everybody's slice: sent to whom it belongs, and added up by whom it belongs to."""
        first, _ = shard_range(flat.numel(), self.rank, self.size)
        cuts = [self._cuts(flat, rank) for rank in range(self.size)]
        for number in range(max(map(len, cuts))):
            sends = {rank: flat[slice(*cuts[rank][number])] for rank in self._others() if number < len(cuts[rank])}
            if number >= len(cuts[self.rank]):
                yield self._post(sends, {})
                continue
            piece = slice(cuts[self.rank][number][0] - first, cuts[self.rank][number][1] - first)
            theirs = {rank: torch.empty_like(mine[piece]) for rank in self._others()}
            arrived = partial(_show_when, self._post(sends, theirs), theirs, heard) if heard else self._post(sends, theirs)
            parts = [mine[piece] if rank == self.rank else theirs[rank] for rank in range(self.size)]
            yield partial(_add_when, arrived, parts, weights, total[piece], products, over)

    def gather(self, whole: Tensor) -> None:
        """Everybody's slice of a buffer, of which this rank has filled in its own."""
        start, stop = shard_range(whole.numel(), self.rank, self.size)
        self._pipeline(self._gathering(whole))
        self.sent_bytes += (stop - start) * whole.element_size() * (self.size - 1)

    def _gathering(self, whole: Tensor) -> Iterator[Callable[[], None]]:
        cuts = [self._cuts(whole, rank) for rank in range(self.size)]
        mine = cuts[self.rank]
        for number in range(max(map(len, cuts))):
            sends = dict.fromkeys(self._others(), whole[slice(*mine[number])]) if number < len(mine) else {}
            receives = {rank: whole[slice(*cuts[rank][number])] for rank in self._others() if number < len(cuts[rank])}
            yield self._post(sends, receives)

    def hand_out(self, whole: Tensor) -> None:
        """The first rank's buffer, written into everybody's. Counted nowhere: it is no algorithm's."""
        self._pipeline(self._handing_out(whole))

    def _handing_out(self, whole: Tensor) -> Iterator[Callable[[], None]]:
        for start in range(0, whole.numel(), length := max(1, self._piece_bytes // whole.element_size())):
            piece = whole[start : start + length]
            yield self._post(dict.fromkeys(self._others(), piece), {}) if self.rank == 0 else self._post({}, {0: piece})

    # -------------------------------------------------------------------------------------------------------------- pieces

    def _pipeline(self, steps: Iterator[Callable[[], None]]) -> None:
        """Begin steps ahead of those that are finished, in order."""
        under_way: deque[Callable[[], None]] = deque()
        for step in steps:
            under_way.append(step)
            if len(under_way) > UNDER_WAY:
                self._waiting(under_way.popleft())
        while under_way:
            self._waiting(under_way.popleft())

    def _cuts(self, flat: Tensor, rank: int) -> list[tuple[int, int]]:
        """Where the pieces of a rank's slice begin and end."""
        start, stop = shard_range(flat.numel(), rank, self.size)
        length = max(1, self._piece_bytes // flat.element_size())
        return [(at, min(at + length, stop)) for at in range(start, stop, length)]

    def _others(self) -> list[int]:
        """Beginning with the next one, so that not all send to the same at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _post(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        """Returns what waits for these messages. Who is gone already is missed there, not here."""
        members = self._members
        try:
            wait = self._carrier.post({members[r]: t for r, t in sends.items()}, {members[r]: t for r, t in receives.items()})
        except Missed as missed:
            return partial(_raise, missed)
        return lambda: wait(self.limit_s)

    def _waiting(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Missed as missed:
            raise self._failure(missed) from missed

    def _failure(self, missed: Missed) -> ExchangeFailed:
        guilty, says = self._blame.accuse(missed.rank) if self._blame else (missed.rank, "")
        words = self._blame.last_words(guilty) if self._blame else ""
        within = f" within {self.limit_s:g} s" if missed.late else ""
        if words:
            why = f"it has ended, with: {words.rstrip('.')}"
        elif missed.late:
            why = f"{MISSED} for this limit"
        else:
            why = "it has closed its connection, so it has ended" if guilty == missed.rank else "it has ended"
        return ExchangeFailed(
            f"{self._names[self._me]} could not {missed.doing} {self._names[guilty]}{within}{says}: {why}. What was saved before "
            f"this round stands. ({missed})"
        )


def _raise(error: Exception) -> None:
    raise error


def _show_when(arrived: Callable[[], None], theirs: Mapping[int, Tensor], heard: Callable[[int, Tensor], object]) -> None:
    arrived()
    for rank, piece in theirs.items():
        heard(rank, piece)


def _add_when(
    arrived: Callable[[], None],
    parts: Sequence[Tensor],
    weights: Sequence[float],
    out: Tensor,
    products: Tensor | None,
    over: float | None,
) -> None:
    arrived()
    if products is not None:
        _multiply(parts, products)
    add_up(parts, weights, out)
    if over is not None:
        out /= over  # while it is in the cache


def _multiply(parts: Sequence[Tensor], products: Tensor) -> None:
    """Adds inner products. A piece lies in the cache, and is short enough for its own precision."""
    for one, two in itertools.combinations_with_replacement(range(len(parts)), 2):
        product = float(torch.dot(parts[one].float(), parts[two].float()))
        products[one, two] += product
        products[two, one] += product if one != two else 0.0


def add_up(parts: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """The weighted sum in rank order, rounded after every product and every sum, so that its bits do not depend on where a buffer
    is cut. Parts are overwritten, and `out` may be one of them."""
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            term = part.to(out.dtype)
            term = term if weight == 1.0 else term.mul_(weight)
            total = term if total is None else total.add_(term)
    if total is not None and total.data_ptr() != out.data_ptr():
        out.copy_(total)
