"""Faults inside an island's process: unusable deltas, and messages whose bits differ from their checksums.

The engine does not know of them: the corrupter wraps the algorithm, whose peers then average another tree, and the membership,
whose process group then flips a bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Codec, Encoding, Peers, Replica
from atoll.engines.chunk_reduction import encoded_slices
from atoll.engines.elastic.island import Interpose
from atoll.engines.elastic.membership import Membership
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.point_to_point import MessageGroup
from atoll.testing.chaos.faults import FaultScript, UpdateFault


class UpdateCorrupter:
    """Injects the update faults of one island, given those of all. `current_round` gives the round that the island is in."""

    def __init__(
        self, faults: Iterable[UpdateFault], island: str, current_round: Callable[[], int], log: Callable[[str], object]
    ) -> None:
        self._pending = [fault for fault in faults if fault.island == island]
        self._current_round, self._log = current_round, log
        self.codec: Codec | None = None
        self.numel = 0
        """How the last averaged tree was encoded, and its size."""

    def algorithm(self, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        """The algorithm with peers that average a corrupted tree."""

        async def round(state: Any, replica: Replica, peers: Peers) -> Any:
            async def mean(tree: Tree, weight: float = 1.0, **how: Any) -> Any:
                encoding: Encoding | None = how.get("encoding")
                self.codec = encoding.codec if encoding is not None else None
                return await peers.mean(self.corrupt(tree), weight, **how)

            corrupted: Any = _Wrapper(peers, mean=mean)
            return await algorithm.round(state, replica, corrupted)

        wrapper: Any = _Wrapper(algorithm, round=round)
        return wrapper  # type: ignore[no-any-return]

    def membership(self, membership: Membership) -> Membership:
        """The membership with process groups that corrupt messages."""
        connect = membership.connect
        wrapper: Any = _Wrapper(membership, connect=lambda quorum, limit_s: _CorruptedGroup(connect(quorum, limit_s), self))
        return wrapper  # type: ignore[no-any-return]

    def take(self, *kinds: str) -> str | None:
        """The kind of the pending fault of the current round among these kinds. Each fault is taken once."""
        for fault in self._pending:
            if fault.round == self._current_round() and fault.kind in kinds:
                self._pending.remove(fault)
                self._log(f"chaos: {fault.kind} in round {fault.round}")
                return fault.kind
        return None

    def slice_length(self, size: int) -> int:
        """The largest number of elements that an island sends another one of its own tree."""
        if self.codec is None:
            return -(-self.numel // size)
        return max(self.codec.nbytes(stop - start) for start, stop in encoded_slices(self.codec, self.numel, size))

    def corrupt(self, tree: Tree) -> Tree:
        """The tree that this island averages instead of its own."""
        self.numel = tree.numel
        kind = self.take("nan", "huge")
        if kind == "nan":
            flat = tree.flat.clone()
            flat[0] = float("nan")
            return Tree(tree.layout, flat)
        return tree * 1e6 if kind == "huge" else tree


def interpose_update_faults(script: Path) -> Interpose:
    """Injects an island's update faults of this script into its process."""
    faults = FaultScript.read(script).update_faults

    def interpose(
        algorithm: Algorithm[Any], membership: Membership, status: IslandStatus, log: Callable[[str], object]
    ) -> tuple[Algorithm[Any], Membership]:
        corrupter = UpdateCorrupter(faults, status.name, lambda: status.version.round, log)
        return corrupter.algorithm(algorithm), corrupter.membership(membership)

    return interpose


class _Wrapper:
    """Has these attributes, and all others of what it wraps."""

    def __init__(self, wrapped: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class _CorruptedGroup(_Wrapper):
    """A process group that flips one bit of a message when a fault is due. Payload is single or half precision, or encoded; control
    messages are double precision, or text."""

    def __init__(self, group: Any, corrupter: UpdateCorrupter) -> None:
        super().__init__(group)
        self._corrupter = corrupter
        self._sent_numel: dict[int, int] = {}
        """Payload elements sent, by destination rank."""
        self._control_messages: dict[int, int] = {}
        """Double-precision messages sent, by destination rank."""

        if isinstance(group, MessageGroup):
            self.__dict__["post"] = self._post

    def _post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        posted: Callable[[float], None] = self._wrapped.post({rank: self._sent(one, rank) for rank, one in sends.items()}, receives)
        return posted

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._wrapped.send([self._sent(tensors[0], rank)], rank, tag)

    def _sent(self, tensor: Tensor, rank: int) -> Tensor:
        """What is sent in place of this tensor."""
        if tensor.dtype == torch.float64:
            return self._control_message(tensor, rank)
        if (tensor.dtype == torch.uint8 and self._corrupter.codec is None) or not tensor.numel():
            return tensor
        sent = self._sent_numel[rank] = self._sent_numel.get(rank, 0) + tensor.numel()
        # The island first sends each rank its slice of the delta; what it sends to that rank beyond the slice is the mean.
        phase = "mean" if sent > self._corrupter.slice_length(self._wrapped.size()) else "delta"
        kind = self._corrupter.take(f"corrupt_{phase}", f"kill_in_{phase}")
        if kind == f"kill_in_{phase}":
            os.kill(os.getpid(), signal.SIGKILL)
        return _flip_bit(tensor) if kind else tensor

    def _control_message(self, tensor: Tensor, rank: int) -> Tensor:
        """The first message names the state this island holds; the second, if it has trained, the weight of its delta."""
        count = self._control_messages[rank] = self._control_messages.get(rank, 0) + 1
        is_weight = count == 2 and tensor.numel() > 1 and bool(tensor[0])
        return _flip_bit(tensor, bit=51) if is_weight and self._corrupter.take("corrupt_weight") else tensor


def _flip_bit(tensor: Tensor, bit: int = 0) -> Tensor:
    """A copy with one bit of its first number flipped."""
    copy = tensor.clone()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    copy.view(-1).view(width)[0] ^= 1 << bit
    return copy
