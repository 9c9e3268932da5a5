"""What one process has for the algorithm between islands to train: a device that is an island, or one device of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout, shard_range
from atoll.core.protocols import Replica
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.replica.local_replica import LocalReplica


@dataclass(frozen=True)
class ShardSlice:
    """Which slice of how many, one on each of the islands, or on each of the devices of one."""

    number: int
    count: int
    over: Literal["islands", "devices"]


class CheckpointPart(NamedTuple):
    """A part of a checkpoint.

    Attributes:
        value: what a State may hold.
        cut: Trees in it are slices. None if they are whole.
    """

    value: Any
    cut: ShardSlice | None = None


PartLoader = Callable[[str, CheckpointPart], Any]
"""Gives back the value of a part, with the types of the one that it is shown; None if there is no such part."""


class IslandModel(Protocol):
    """What computes here."""

    device: str
    steps_taken: int

    def buffers(self) -> dict[str, Tensor]:
        """What the module keeps besides its weights."""


class IslandRole(Protocol):
    """This process's place in its island."""

    @property
    def replica(self) -> IslandModel: ...

    def trained(self) -> Replica:
        """What a round between islands is handed."""

    def share(self, params: Tree) -> Tree:
        """What this process exchanges with others of these weights: all of them, or its slice."""

    def whole(self, share: Tree) -> Tree:
        """The weights of which everybody in the island holds a share. All devices of the island ask for it together."""

    def tokens(self, read: int) -> int:
        """How many tokens went into updates, of all that were read since this was last asked."""

    def parts(self) -> dict[str, CheckpointPart]:
        """What a checkpoint must hold of it."""

    def restore(self, load: PartLoader) -> None:
        """Go on from a checkpoint."""


class SingleDevice:
    """A device that is an island."""

    def __init__(self, replica: LocalReplica, trained: Replica, number: int) -> None:
        self.replica, self._trained, self._number = replica, trained, number

    def trained(self) -> Replica:
        return self._trained

    def share(self, params: Tree) -> Tree:
        return params

    def whole(self, share: Tree) -> Tree:
        return share

    def tokens(self, read: int) -> int:
        return read

    def parts(self) -> dict[str, CheckpointPart]:
        return {f"replica-{self._number}": CheckpointPart(self.replica.state())}

    def restore(self, load: PartLoader) -> None:
        state = load(f"replica-{self._number}", CheckpointPart(None))
        if state is not None:  # an island that is new begins with fresh moments
            self.replica.restore(state)


def gathered(line: CommunicationThread, wire: GroupCollectives, mine: Tree, layout: Layout) -> Tree:
    """The whole of which everybody on the wire holds a slice. It is no part of training, and its bytes are counted nowhere."""

    def gather() -> Tree:
        counted = wire.sent_bytes
        whole = Tree(layout, empty(layout.numel, mine.flat.dtype, mine.flat.device))
        start, stop = shard_range(layout.numel, wire.rank, wire.size)
        whole.flat[start:stop].copy_(mine.flat)
        wire.all_gather(whole.flat)
        wire.sent_bytes = counted
        return whole

    return line.call(gather)


def check_sliced(algorithm: Any) -> None:
    """Refuses what cannot be done on a slice of the weights."""
    if getattr(algorithm, "pruned", 0.0):
        raise ConfigError(
            f"algorithm.pruned={algorithm.pruned} with several devices per island: each device exchanges a slice of the weights, "
            f"and a neuron's values may lie in two of them. Use pruned=0, or islands of one device."
        )
