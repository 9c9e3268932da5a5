"""Messages between the ranks of a process group: posted in the background, and waited for with a timeout."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


@runtime_checkable
class Transport(Protocol):
    """Single messages between the ranks of a group."""

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], /) -> Callable[[float], None]:
        """Start to send these tensors to these ranks, and to receive into those. Returns a function that waits for all of them, for
        at most the given seconds, and raises PeerUnreachable."""
        ...


@runtime_checkable
class MessageGroup(Transport, Protocol):
    """A group that is its own transport."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def abort(self) -> None:
        """End all messages with an error, and close the connections."""
        ...


Group: TypeAlias = dist.ProcessGroup | dist.ProcessGroupGloo | MessageGroup
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


@contextmanager
def _reaching(rank: int, action: str, about: str = "") -> Iterator[None]:
    """Turns torch's error about a message into a PeerUnreachable."""
    try:
        yield
    except RuntimeError as error:
        raise PeerUnreachable(rank, action, f"{about}{error}") from error


class GlooTransport:
    """Single messages over gloo, which reads CPU memory only: tensors on a GPU go through pinned memory. Messages from one rank to
    another arrive in the order of their posts. The group need not be registered with torch.distributed."""

    def __init__(self, group: Group) -> None:
        self._group: Any = group  # torch declares no types for the messages of its backends

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        outgoing, incoming = host_buffers(sends, receives)
        # Receives first: gloo sends nothing before the receiver has announced its buffer. On a slow link that announcement would
        # queue behind the payload of the other direction, and one end would idle for the time of a chunk.
        works = [self._start(self._group.recv, tensor, rank, "receive from") for rank, tensor in incoming.items()]
        works += [self._start(self._group.send, tensor, rank, "send to") for rank, tensor in outgoing.items()]

        def wait(timeout_s: float) -> None:
            for work, rank, action in works:
                with _reaching(rank, action):
                    work.wait(timedelta(seconds=timeout_s))
                if action == "receive from" and receives[rank].is_cuda:
                    receives[rank].copy_(incoming[rank], non_blocking=True)

        return wait

    def _start(
        self, function: Callable[..., dist.Work | None], tensor: Tensor, rank: int, action: str
    ) -> tuple[dist.Work, int, str]:
        with _reaching(rank, action):  # the connection may be known to be closed
            work = function([tensor], rank, 0)
        assert work is not None, "this process is no member of the group"
        return work, rank, action


class BatchTransport:
    """A GlooTransport's messages, all of a post as one batch, which NCCL needs: it keeps no order between single messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._is_nccl = group, dist.get_backend(group) == "nccl"

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        operations = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in receives.items()]
        operations += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in sends.items()]
        ranks = [*receives, *sends]
        about = f"one of ranks {sorted({*ranks})}: "
        with _reaching(ranks[0] if ranks else 0, "exchange with", about):
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait(timeout_s: float) -> None:
            deadline_s = time.monotonic() + timeout_s
            for number, work in enumerate(works):
                # Where a batch is one work, torch does not tell whose message failed.
                with _reaching(ranks[number if len(works) == len(ranks) else 0], "exchange with", about):
                    self._wait(work, deadline_s)

        return wait

    def _wait(self, work: dist.Work, deadline_s: float) -> None:
        # NCCL's own wait blocks the stream, not this thread; gloo does not notice an arrived message before it waits for it.
        while self._is_nccl and not work.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError("it did not answer")
            time.sleep(2e-4)
        if self._is_nccl:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(1e-3, deadline_s - time.monotonic())))


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.contiguous()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def host_buffers(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """These tensors in CPU memory; for tensors on a GPU, their copies in pinned memory, and pinned memory to receive into."""
    outgoing = {rank: _on_host(tensor) for rank, tensor in sends.items()}
    if any(tensor.is_cuda for tensor in sends.values()):
        torch.cuda.current_stream().synchronize()  # the copies to the host run on this stream
    incoming = {
        rank: torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
        for rank, tensor in receives.items()
    }
    return outgoing, incoming


def transport_for(group: Group) -> Transport:
    """The transport for this group's backend."""
    if isinstance(group, MessageGroup):
        return group
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        return BatchTransport(group)
    return GlooTransport(group)
