"""Messages between the ranks of a process group: sent and received in the background, and waited for with a time limit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor


class Missed(Exception):
    """A rank of the group was not heard, or could not be sent to: it was `late`, or its end is closed."""

    def __init__(self, rank: int, doing: str, why: str) -> None:
        super().__init__(first_sentence(why))
        self.rank, self.doing = rank, doing
        self.late = any(words in why.lower() for words in _LATE)


_LATE = ("timed out", "timeout", "did not answer")


def first_sentence(text: str) -> str:
    """What a library says has happened, without where in its source, and without its advice.

    >>> first_sentence("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:52922: Connection reset by peer. Good luck!")
    'Read error [127.0.0.1]:52922: Connection reset by peer'
    """
    lines = re.sub(r"\[\S+\.\w+:\d+\] ", "", text).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else ""


class Carrier(Protocol):
    """Moves tensors between the ranks of one group. Messages from one rank to another arrive in the order they were sent in."""

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        """Begin to send these tensors to these ranks, and to receive into those. Returns what waits for all of it, for at most so
        many seconds, and raises Missed."""


Group: TypeAlias = dist.ProcessGroup | dist.ProcessGroupGloo


class _Message(NamedTuple):
    work: dist.Work
    rank: int
    doing: str
    arrived: Callable[[], object] | None = None


class GlooCarrier:
    """Single messages of gloo, which knows the memory of CPUs alone: what lies on a GPU goes through pinned memory.

    The group may be one that torch.distributed itself knows nothing of.
    """

    def __init__(self, group: Group) -> None:
        self._group: Any = group  # torch says nothing of the types of its backends' messages

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        outgoing = {rank: _on_host(tensor) for rank, tensor in sends.items()}
        if any(tensor.is_cuda for tensor in sends.values()):
            torch.cuda.current_stream().synchronize()  # the copies to the host are this stream's
        # Receives first: gloo sends nothing before it is told that there is room, and on a slow line that word would queue behind
        # the payload that goes the other way, so that one end would stand idle for as long as a piece takes.
        messages = [self._receive(rank, tensor) for rank, tensor in receives.items()]
        messages += [self._send(rank, tensor) for rank, tensor in outgoing.items()]
        return lambda limit_s: _wait(messages, limit_s)

    def _send(self, rank: int, tensor: Tensor) -> _Message:
        work = _begun(lambda: self._group.send([tensor], rank, 0), rank, "send to")
        return _Message(work, rank, "send to")

    def _receive(self, rank: int, tensor: Tensor) -> _Message:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
        work = _begun(lambda: self._group.recv([host], rank, 0), rank, "hear from")
        return _Message(work, rank, "hear from", None if host is tensor else lambda: tensor.copy_(host, non_blocking=True))


class BatchCarrier:
    """All messages of a post as one batch, which is how NCCL wants them: it knows no order between single ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # NCCL's own wait holds up the stream, and not this thread; gloo does not know that a message is there before it waits.
        self._wait = _poll if dist.get_backend(group) == "nccl" else _wait_at_most

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        operations = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in receives.items()]
        operations += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in sends.items()]
        ranks = [*receives, *sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise Missed(ranks[0], "exchange with", f"one of ranks {sorted({*ranks})}: {error}") from error
        return lambda limit_s: self._finish(works, ranks, time.monotonic() + limit_s)

    def _finish(self, works: Sequence[dist.Work], ranks: Sequence[int], deadline_s: float) -> None:
        for number, work in enumerate(works):
            try:
                self._wait(work, deadline_s)
            except RuntimeError as error:
                # Where a batch is one work, nobody knows whose message it was that did not come.
                rank = ranks[number if len(works) == len(ranks) else 0]
                raise Missed(rank, "exchange with", f"one of ranks {sorted({*ranks})}: {error}") from error


def _poll(work: dist.Work, deadline_s: float) -> None:
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            raise RuntimeError("it did not answer")
        time.sleep(2e-4)
    work.wait()


def _wait_at_most(work: dist.Work, deadline_s: float) -> None:
    work.wait(timedelta(seconds=max(1e-3, deadline_s - time.monotonic())))


def carrier_of(group: Group) -> Carrier:
    """The one for this group's backend."""
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        return BatchCarrier(group)
    return GlooCarrier(group)


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.contiguous()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _begun(call: Callable[[], dist.Work | None], rank: int, doing: str) -> dist.Work:
    try:
        work = call()
    except RuntimeError as error:  # its end is known to be closed
        raise Missed(rank, doing, str(error)) from error
    assert work is not None, "this process is no member of the group"
    return work


def _wait(messages: Sequence[_Message], limit_s: float) -> None:
    for message in messages:
        try:
            message.work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise Missed(message.rank, message.doing, str(error)) from error
        if message.arrived is not None:
            message.arrived()
