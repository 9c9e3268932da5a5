"""A loop's state as plain dictionaries of numbers, text and tensors, which torch.save writes and torch.load reads as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Owner, fields_owned
from atoll.core.state_packing import Packed, unpack

_KIND = "atoll.islands"
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a loop remembers.

    Attributes:
        rounds: that were over.
        steps: that this island's user had taken.
        taken: of them, those since the last round was over.
        island: whose it is.
        islands: how many there were.
        device: of the island.
        devices: how many it had.
        weights: a digest of the module's, where they are not those of the State; else nothing.
        packed: the algorithm's State when the last round was over.
    """

    rounds: int
    steps: int
    taken: int
    island: int
    islands: int
    device: int
    devices: int
    weights: str
    packed: Packed

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: value for name, value in vars(self).items() if name != "packed"}
        tensors = {name: tensor.detach().clone() for name, tensor in self.packed.tensors.items()}
        return {"kind": _KIND, "version": _VERSION, **numbers, "structure": self.packed.structure, "tensors": tensors}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Saved:
        if given.get("kind") != _KIND or given.get("version") != _VERSION:
            raise CheckpointError(
                f"this is not what islands.state_dict() of this version gives, but has {sorted(map(str, given))[:8]}. Give "
                f"back what it gave, or begin afresh."
            )
        names = ("rounds", "steps", "taken", "island", "islands", "device", "devices")
        numbers = {name: int(given[name]) for name in names}
        return Saved(**numbers, weights=str(given["weights"]), packed=Packed(given["structure"], dict(given["tensors"])))

    def check_module(self, weights: Tree, *, island: int, islands: int, device: int, devices: int) -> None:
        """That the module has the weights with which this was saved. What another island saved fits none."""
        mine, theirs = (island, islands, device, devices), (self.island, self.islands, self.device, self.devices)
        if self.weights and mine == theirs and weights.digest() != self.weights:
            raise CheckpointError(
                f"this state was saved in the middle of a round, {self.taken} steps after the last agreement, and the model has "
                f"other weights than then. Load the model's state_dict of the same moment too, before that of the islands."
            )


def unpack_state(saved: Saved, like: Any, *, island: int, islands: int, device: int, devices: int) -> Any:
    """The State that was saved, for this process.

    Raises:
        CheckpointError: it is another algorithm's, or a slice of it that is another process's.
    """
    sliced = devices > 1 or bool(fields_owned(like, Owner.SHARDED))
    mine, theirs = (island, islands, device, devices), (saved.island, saved.islands, saved.device, saved.devices)
    if (sliced and mine != theirs) or devices != saved.devices:
        raise CheckpointError(
            f"this state was saved by device {saved.device} of {saved.devices} in island {saved.island} of {saved.islands}, and "
            f"holds a slice. Here is device {device} of {devices} in island {island} of {islands}: give each process its own, with "
            f"as many processes as then."
        )
    try:
        return unpack(saved.packed, like)
    except CheckpointError as error:
        difference, _, _ = str(error).partition(": it is the checkpoint of")
        raise CheckpointError(
            f"this state was saved with another model or another algorithm ({difference}). Enter the block with those it was saved "
            f"with, or begin without it."
        ) from error
