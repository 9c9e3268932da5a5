"""Messages between the ranks of a process group: posted in the background, and waited for with a timeout."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | dist.ProcessGroupGloo
_TIMED_OUT = ("timed out", "timeout", "did not answer")


class PeerUnreachable(Exception):
    """A message to or from a rank of the group failed: it timed out, or the rank has closed its connection."""

    def __init__(self, rank: int, action: str, why: str) -> None:
        super().__init__(first_sentence(why))
        self.rank, self.action = rank, action
        self.timed_out = any(words in why.lower() for words in _TIMED_OUT)


def first_sentence(text: str) -> str:
    """The first sentence of a library's error, without its position in the source.

    >>> first_sentence("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:52922: Connection reset by peer. Good luck!")
    'Read error [127.0.0.1]:52922: Connection reset by peer'
    """
    lines = re.sub(r"\[\S+\.\w+:\d+\] ", "", text).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else ""


class Transport(Protocol):
    """Moves tensors between the ranks of one group. Messages from one rank to another arrive in the order of their posts."""

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        """Start to send these tensors to these ranks, and to receive into those. Returns a function that waits for all of them, for
        at most the given seconds, and raises PeerUnreachable."""


def transport_for(group: Group) -> Transport:
    """The transport for this group's backend."""
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        return BatchTransport(group)
    return GlooTransport(group)


class _Message(NamedTuple):
    work: dist.Work
    rank: int
    action: str
    on_arrival: Callable[[], object] | None = None


class GlooTransport:
    """Single messages over gloo, which reads CPU memory only: tensors on a GPU go through pinned memory.

    The group need not be registered with torch.distributed.
    """

    def __init__(self, group: Group) -> None:
        self._group: Any = group  # torch declares no types for the messages of its backends

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        outgoing = {rank: _on_host(tensor) for rank, tensor in sends.items()}
        if any(tensor.is_cuda for tensor in sends.values()):
            torch.cuda.current_stream().synchronize()  # the copies to the host run on this stream
        # Receives first: gloo sends nothing before the receiver has announced its buffer. On a slow link that announcement would
        # queue behind the payload of the other direction, and one end would idle for the time of a piece.
        messages = [self._receive(rank, tensor) for rank, tensor in receives.items()]
        for rank, tensor in outgoing.items():
            messages.append(_Message(_start(partial(self._group.send, [tensor], rank, 0), rank, "send to"), rank, "send to"))
        return lambda timeout_s: _wait(messages, timeout_s)

    def _receive(self, rank: int, tensor: Tensor) -> _Message:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
        work = _start(partial(self._group.recv, [host], rank, 0), rank, "hear from")
        return _Message(work, rank, "hear from", None if host is tensor else lambda: tensor.copy_(host, non_blocking=True))


class BatchTransport:
    """All messages of a post as one batch, which NCCL needs: it keeps no order between single messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # NCCL's own wait blocks the stream, not this thread; gloo does not notice an arrived message before it waits for it.
        self._wait = _poll if dist.get_backend(group) == "nccl" else _wait_until

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        operations = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in receives.items()]
        operations += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in sends.items()]
        ranks = [*receives, *sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise PeerUnreachable(ranks[0], "exchange with", f"one of ranks {sorted({*ranks})}: {error}") from error
        return lambda timeout_s: self._finish(works, ranks, time.monotonic() + timeout_s)

    def _finish(self, works: Sequence[dist.Work], ranks: Sequence[int], deadline_s: float) -> None:
        for number, work in enumerate(works):
            try:
                self._wait(work, deadline_s)
            except RuntimeError as error:
                # Where a batch is one work, torch does not tell whose message failed.
                rank = ranks[number if len(works) == len(ranks) else 0]
                raise PeerUnreachable(rank, "exchange with", f"one of ranks {sorted({*ranks})}: {error}") from error


def _poll(work: dist.Work, deadline_s: float) -> None:
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            raise RuntimeError("it did not answer")
        time.sleep(2e-4)
    work.wait()


def _wait_until(work: dist.Work, deadline_s: float) -> None:
    work.wait(timedelta(seconds=max(1e-3, deadline_s - time.monotonic())))


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.contiguous()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _start(call: Callable[[], dist.Work | None], rank: int, action: str) -> dist.Work:
    try:
        work = call()
    except RuntimeError as error:  # the connection is known to be closed
        raise PeerUnreachable(rank, action, str(error)) from error
    assert work is not None, "this process is no member of the group"
    return work


def _wait(messages: Sequence[_Message], timeout_s: float) -> None:
    for message in messages:
        try:
            message.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerUnreachable(message.rank, message.action, str(error)) from error
        if message.on_arrival is not None:
            message.on_arrival()
