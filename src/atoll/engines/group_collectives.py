"""Collectives of a process group: the simulator's sums bit for bit, and the bytes that the ring formula predicts.

gloo's reduce-scatter sends as many bytes as an all-reduce, and its all-reduce adds in an order of its own. Here each rank sends
every other rank the slice which that rank reduces, in chunks, and adds the chunks that it receives in rank order. So sums have the
simulator's bits at any number of ranks, a rank sends what it would send around a ring, and the buffers for received data hold a few
chunks only. Several chunks are in flight at a time, so a link's latency counts once.

One thread at a time uses a `GroupCollectives`. Ranks may leave: the others go on without them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout, shard_range
from atoll.core.protocols import Codec, Encoding
from atoll.engines.chunk_reduction import EncodedPart, add_inner_products, encoded_slices, nothing, weighted_sum
from atoll.engines.liveness import FailureAttribution
from atoll.engines.point_to_point import BatchTransport, Group, PeerUnreachable, transport_for
from atoll.optim.codecs import WINDOW
from atoll.runs.cluster import CONTROL_BYTES

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
"""gloo moves larger messages one way at a time, and messages of this size both ways at once. Between two ranks a chunk is twice as
large, since each rank receives from one other only."""
ENCODED_BYTES = 1 << 16
"""The least bytes of an encoded chunk. gloo adds some 170 bytes to each message, which are 0.3 % of these."""
CHUNKS_IN_FLIGHT = 4
MAX_TEXT_BYTES = 1 << 24
"""Of one rank's text, whose length the rank announces itself."""
LOST = "it died, or its link is too slow"
"""The possible reasons for a rank that does not answer in time."""


class GroupCollectives:
    """The collectives of one process group, which nothing else uses: two threads on one group receive each other's messages.

    Args:
        timeout_s: the most that one chunk may take. It may change between two exchanges.
        attribution: finds the rank that failed first; without it, an error names the rank that was missed here.
        names: what errors call the members; by default their rank in the group.
    """

    def __init__(
        self,
        group: Group,
        *,
        timeout_s: float,
        chunk_bytes: int | None = None,
        attribution: FailureAttribution | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._group_rank = group.rank()
        self._members = list(range(group.size()))
        self._transport = transport_for(group)
        on_gpu = isinstance(self._transport, BatchTransport)
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES * (2 if group.size() == 2 else 1)
        self._attribution = attribution
        self._names = names or [f"rank {rank}" for rank in self._members]
        self.timeout_s = timeout_s
        self.sent_bytes = self.control_bytes = 0
        """Payload and control bytes since the beginning."""

    @property
    def rank(self) -> int:
        """Among the members that have not left."""
        return self._members.index(self._group_rank)

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def names(self) -> tuple[str, ...]:
        """What errors call the members that have not left."""
        return tuple(self._names[member] for member in self._members)

    def remove(self, ranks: Sequence[int]) -> None:
        """These members have left; the ranks of the others close up."""
        self._members = [member for rank, member in enumerate(self._members) if rank not in ranks]

    # --------------------------------------------------------------------------------------------------------- collectives

    def all_gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Every rank's numbers, in rank order."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        received = {rank: torch.empty_like(mine) for rank in self._others()}
        self._finish(self._post(dict.fromkeys(received, mine), received))
        self.control_bytes += CONTROL_BYTES * len(numbers) * (self.size - 1)
        return [received.get(rank, mine).tolist() for rank in range(self.size)]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order. ExchangeFailed on all ranks, before memory is taken, if a length is impossible."""
        mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = [row[0] for row in self.all_gather_numbers(len(mine))]
        for name, length in zip(self.names, lengths, strict=True):
            if not 1 <= length <= MAX_TEXT_BYTES or not length.is_integer():
                raise ExchangeFailed(
                    f"{name} announced a text of {length:g} bytes, and 1 to {MAX_TEXT_BYTES} are allowed: its message was "
                    f"damaged on the way, or it is no process of this run. Restart it if this goes on."
                )
        received = {rank: torch.empty(int(lengths[rank]), dtype=torch.uint8) for rank in self._others()}
        self._finish(self._post(dict.fromkeys(self._others(), mine), received))
        self.control_bytes += len(mine) * (self.size - 1)
        return [text if rank == self.rank else received[rank].numpy().tobytes().decode() for rank in range(self.size)]

    def all_gather_surviving(self, *numbers: float, has_left: Callable[[int], bool]) -> list[list[float] | None]:
        """`all_gather_numbers` in a group whose members may leave unannounced: None in place of each that has.

        `has_left` is asked about a member that does not answer. The remaining members receive the same rows of each other, so
        none of them needs to repeat the exchange.
        """
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        received = {rank: torch.empty_like(mine) for rank in self._others()}
        posted = {rank: self._post({rank: mine}, {rank: received[rank]}) for rank in self._others()}
        rows: list[list[float] | None] = [list(numbers)] * self.size
        for rank, wait in posted.items():
            try:
                wait()
                rows[rank] = received[rank].tolist()
            except PeerUnreachable as lost:
                if not has_left(lost.rank):
                    raise self._failure(lost) from lost
                rows[rank] = None
        self.control_bytes += CONTROL_BYTES * len(numbers) * (self.size - 1)
        return rows

    def post_final(self, *numbers: float) -> object:
        """Post the last numbers that the others will gather from this member, without waiting. The caller keeps the returned object
        alive for as long as they may receive them."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [self._post({rank: mine}, {rank: torch.empty_like(mine)}) for rank in self._others()]

    def reduce_scatter(
        self,
        flat: Tensor,
        weights: Sequence[float],
        sum_dtype: torch.dtype | None = None,
        *,
        inner_products: Tensor | None = None,
        on_received: Callable[[int, Tensor], object] | None = None,
        divide_by: float | None = None,
    ) -> Tensor:
        """This rank's slice of the weighted sum of all buffers, added in rank order and divided by `divide_by`.

        The result lies in `flat`, or in a new buffer if `sum_dtype` differs. A buffer of weight 0 is left out. The inner products
        of all ranks' slices are added to `inner_products`, to about six digits. `on_received` is shown each chunk of another rank
        before it is added.
        """
        start, stop = shard_range(flat.numel(), self.rank, self.size)
        mine = flat[start:stop]
        total = mine if sum_dtype in (None, flat.dtype) else torch.empty(stop - start, dtype=sum_dtype, device=flat.device)
        chunks = [self._chunks(flat, rank) for rank in range(self.size)]

        def steps() -> Iterator[Callable[[], None]]:
            for number in range(max(map(len, chunks))):
                spans = {rank: chunks[rank][number] for rank in self._others() if number < len(chunks[rank])}
                sends = {rank: flat[slice(*span)] for rank, span in spans.items()}
                if number >= len(chunks[self.rank]):
                    yield self._post(sends, {})
                    continue
                chunk = slice(chunks[self.rank][number][0] - start, chunks[self.rank][number][1] - start)
                received = {rank: torch.empty_like(mine[chunk]) for rank in self._others()}
                wait = self._post(sends, received)
                terms = [mine[chunk] if rank == self.rank else received[rank] for rank in range(self.size)]
                yield partial(add, wait, received, terms, total[chunk])

        def add(wait: Callable[[], None], received: Mapping[int, Tensor], terms: Sequence[Tensor], out: Tensor) -> None:
            wait()
            if on_received is not None:
                for rank, chunk in received.items():
                    on_received(rank, chunk)
            if inner_products is not None:
                add_inner_products(terms, inner_products)
            weighted_sum(terms, weights, out)
            if divide_by is not None:
                out /= divide_by  # while it is in the cache

        self._pipeline(steps())
        self.sent_bytes += (flat.numel() - mine.numel()) * flat.element_size()
        return total

    def encoded_mean(
        self,
        flat: Tensor,
        weights: Sequence[float],
        encoding: Encoding,
        *,
        inner_products: Tensor | None = None,
        on_sent: Callable[[int, Tensor], object] = nothing,
        on_received: Callable[[int, Tensor], object] = nothing,
    ) -> Tensor:
        """The weighted mean of all ranks' fp32 buffers, which travel encoded. `flat` then holds what the encoding left out of this
        rank's buffer, times its weight. The weights have a sum above 0. `on_sent` and `on_received` are shown each encoded chunk,
        with the rank that it goes to or comes from.

        A rank encodes its own chunk while others' chunks travel, and sends a finished chunk of the mean at once. All ranks post in
        the same order, and wait for a message only after they have posted it, so none waits for a message that another rank holds
        back.
        """
        part = EncodedPart(self.rank, flat, torch.empty_like(flat), weights, encoding, inner_products)
        gathers, others = encoding.codec.gathers, self._others()
        chunks = [self._encoded_chunks(encoding.codec, *span) for span in encoded_slices(encoding.codec, flat.numel(), self.size)]

        def spans(number: int) -> dict[int, tuple[int, int]]:
            return {rank: chunks[rank][number] for rank in range(self.size) if number < len(chunks[rank])}

        def send() -> Iterator[Callable[[], Callable[[], None] | None]]:
            for number in range(max(map(len, chunks))):
                own = spans(number).get(self.rank)
                seen = part.encode(own) if gathers and own is not None else None
                sends = {
                    rank: part.encode(span)[0] if seen is None else seen[0]
                    for rank, span in spans(number).items()
                    if rank in others
                }
                received = {rank: part.bytes_for(own) for rank in others} if own is not None else {}
                wait = self._post_encoded(sends, received)
                for rank, data in sends.items():
                    on_sent(rank, data)
                if seen is None and own is not None:
                    seen = part.encode(own)
                yield partial(add, wait, number, seen, received)

        def add(
            wait: Callable[[], None], number: int, seen: tuple[Tensor, Tensor] | None, received: Mapping[int, Tensor]
        ) -> Callable[[], None] | None:
            wait()
            for rank, data in received.items():
                on_received(rank, data)
            if seen is not None:
                span = spans(number)[self.rank]
                part.add([seen[1] if rank == self.rank else part.decode(received[rank], span) for rank in range(self.size)], span)
            return None if gathers else gather(spans(number))

        def gather(spans: Mapping[int, tuple[int, int]]) -> Callable[[], None]:
            sends = dict.fromkeys(others, part.encode_mean(spans[self.rank])) if self.rank in spans else {}
            received = {rank: part.bytes_for(span) for rank, span in spans.items() if rank != self.rank}
            return partial(read, self._post_encoded(sends, received), spans, received)

        def read(wait: Callable[[], None], spans: Mapping[int, tuple[int, int]], received: Mapping[int, Tensor]) -> None:
            wait()
            for rank, data in received.items():
                part.read_mean(data, spans[rank])

        self._pipeline(send())
        return part.mean

    def _post_encoded(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        self.sent_bytes += sum(data.numel() for data in sends.values())
        return self._post(sends, receives)

    def _encoded_chunks(self, codec: Codec, start: int, stop: int) -> list[tuple[int, int]]:
        """Chunks of whole windows, so that their bytes do not depend on where a slice is cut. A chunk of a short code has more
        values, so that the headers of messages do not count."""
        least = math.ceil(min(ENCODED_BYTES, self._chunk_bytes) / codec.nbytes(WINDOW))
        length = max(1, self._chunk_bytes // (4 * WINDOW), least) * WINDOW
        return [(at, min(at + length, stop)) for at in range(start, stop, length)]

    def all_gather(self, whole: Tensor, on_chunk: Callable[[int, Tensor], object] | None = None) -> None:
        """Fill in the other ranks' slices of a buffer that holds this rank's own. `on_chunk` is shown each chunk of each rank, in
        the order of the slice: its own while it is being sent, and others when they have arrived."""
        start, stop = shard_range(whole.numel(), self.rank, self.size)
        chunks = [self._chunks(whole, rank) for rank in range(self.size)]
        mine = chunks[self.rank]

        def steps() -> Iterator[Callable[[], None]]:
            for number in range(max(map(len, chunks))):
                sends = dict.fromkeys(self._others(), whole[slice(*mine[number])]) if number < len(mine) else {}
                receives = {rank: whole[slice(*chunks[rank][number])] for rank in self._others() if number < len(chunks[rank])}
                wait = self._post(sends, receives)
                yield wait if on_chunk is None else partial(show, on_chunk, wait, number, receives)

        def show(
            on_chunk: Callable[[int, Tensor], object], wait: Callable[[], None], number: int, received: Mapping[int, Tensor]
        ) -> None:
            if number < len(mine):
                on_chunk(self.rank, whole[slice(*mine[number])])
            wait()
            for rank, chunk in received.items():
                on_chunk(rank, chunk)

        self._pipeline(steps())
        self.sent_bytes += (stop - start) * whole.element_size() * (self.size - 1)

    def gather_slices(self, mine: Tree, layout: Layout) -> Tree:
        """The whole tree, of which each rank holds a slice. It is no part of training: its bytes are not counted."""
        sent_bytes = self.sent_bytes
        whole = Tree(layout, empty(layout.numel, mine.flat.dtype, mine.flat.device))
        whole.shard(self.rank, self.size).flat.copy_(mine.flat)
        self.all_gather(whole.flat)
        self.sent_bytes = sent_bytes
        return whole

    def broadcast(self, whole: Tensor) -> None:
        """Copy rank 0's buffer to all ranks. The bytes are not counted: no algorithm sends them."""

        def steps() -> Iterator[Callable[[], None]]:
            for start in range(0, whole.numel(), length := max(1, self._chunk_bytes // whole.element_size())):
                chunk = whole[start : start + length]
                yield self._post(dict.fromkeys(self._others(), chunk), {}) if self.rank == 0 else self._post({}, {0: chunk})

        self._pipeline(steps())

    def gather(self, mine: Tensor, lengths: Sequence[int]) -> dict[int, Tensor]:
        """On rank 0 the buffers of the other ranks, of these numbers of elements; nothing on the others. The bytes are not counted:
        no algorithm sends them."""
        others = {rank: mine.new_empty(lengths[rank]) for rank in self._others()} if self.rank == 0 else {}

        def steps() -> Iterator[Callable[[], None]]:
            for start in range(0, max(lengths), length := max(1, self._chunk_bytes // mine.element_size())):
                chunk = slice(start, start + length)
                sends = {0: mine[chunk]} if self.rank and start < len(mine) else {}
                yield self._post(sends, {rank: buffer[chunk] for rank, buffer in others.items() if start < len(buffer)})

        self._pipeline(steps())
        return others

    # -------------------------------------------------------------------------------------------------------------- chunks

    def _pipeline(self, steps: Iterator[Callable[[], Callable[[], None] | None]]) -> None:
        """Post steps ahead of the one that is finished, and finish them in order. A step may post another as it finishes."""
        in_flight: deque[Callable[[], Callable[[], None] | None]] = deque()
        following: deque[Callable[[], None]] = deque()
        for step in itertools.chain(steps, itertools.repeat(None)):
            if step is not None:
                in_flight.append(step)
            elif not in_flight:
                break
            if step is None or len(in_flight) > CHUNKS_IN_FLIGHT:
                posted = self._finish(in_flight.popleft())
                if posted is not None:
                    following.append(posted)
                if len(following) > CHUNKS_IN_FLIGHT:
                    self._finish(following.popleft())
        while following:
            self._finish(following.popleft())

    def _chunks(self, flat: Tensor, rank: int) -> list[tuple[int, int]]:
        """Where the chunks of a rank's slice start and stop."""
        start, stop = shard_range(flat.numel(), rank, self.size)
        length = max(1, self._chunk_bytes // flat.element_size())
        return [(at, min(at + length, stop)) for at in range(start, stop, length)]

    def _others(self) -> list[int]:
        """The other ranks, beginning with the next one, so that the ranks do not all send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _post(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        """Returns a function that waits for these messages. It also raises what failed here."""
        members = self._members
        try:
            wait = self._transport.post({members[r]: t for r, t in sends.items()}, {members[r]: t for r, t in receives.items()})
        except PeerUnreachable as lost:
            return partial(_raise, lost)
        return lambda: wait(self.timeout_s)

    def _finish(self, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except PeerUnreachable as lost:
            raise self._failure(lost) from lost

    def _failure(self, lost: PeerUnreachable) -> ExchangeFailed:
        failed, reporter = self._attribution.report_missing(lost.rank) if self._attribution else (lost.rank, "")
        exit_reason = self._attribution.exit_reason(failed) if self._attribution else ""
        within = f" within {self.timeout_s:g} s" if lost.timed_out else ""
        if exit_reason:
            why = f"it has ended, with: {exit_reason.rstrip('.')}"
        elif lost.timed_out:
            why = f"{LOST} for this limit"
        else:
            why = "it has closed its connection, so it has ended" if failed == lost.rank else "it has ended"
        return ExchangeFailed(
            f"{self._names[self._group_rank]} could not {lost.action} {self._names[failed]}{within}{reporter}: {why}. What was "
            f"saved before this round is valid. ({lost})"
        )


def _raise(error: Exception) -> NoReturn:
    raise error
