"""Checkpoints of a loop: dictionaries of numbers, text and tensors, which torch.save writes and torch.load reads safely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Owner, fields_owned
from atoll.core.state_packing import Packed, unpack
from atoll.loop.process_groups import GridPosition

_KIND = "atoll.islands"
_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class LoopCheckpoint:
    """What one process needs to resume, besides the user's model and optimizer.

    Attributes:
        rounds: completed ones.
        steps: of the user, in all rounds.
        steps_in_round: steps since the last completed round.
        position: of the process that saved it.
        module_digest: of the module's weights in the middle of a round; empty where the State has the weights.
        packed: the algorithm's State after the last completed round.
    """

    rounds: int
    steps: int
    steps_in_round: int
    position: GridPosition
    module_digest: str
    packed: Packed

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "packed"}
        tensors = {name: tensor.detach().clone() for name, tensor in self.packed.tensors.items()}
        packed = {"structure": self.packed.structure, "tensors": tensors}
        return {"kind": _KIND, "version": _VERSION, **fields, "position": list(self.position), **packed}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> LoopCheckpoint:
        if given.get("kind") != _KIND or given.get("version") != _VERSION:
            raise CheckpointError(
                f"this is no islands.state_dict() of this version: it has the keys {sorted(map(str, given))[:8]}. Load what "
                f"islands.state_dict() returned, or start without it."
            )
        numbers = {name: int(given[name]) for name in ("rounds", "steps", "steps_in_round")}
        position, packed = GridPosition(*given["position"]), Packed(given["structure"], dict(given["tensors"]))
        return LoopCheckpoint(**numbers, position=position, module_digest=str(given["module_digest"]), packed=packed)

    def check_module(self, weights: Tree, position: GridPosition) -> None:
        """Checks that the module holds the weights of the checkpoint. Another island's checkpoint has a digest of other weights."""
        if self.module_digest and position == self.position and weights.digest() != self.module_digest:
            raise CheckpointError(
                f"this state was saved in the middle of a round, {self.steps_in_round} steps after the last exchange, and the "
                f"model holds other weights. First load the model's state_dict that was saved with it."
            )

    def unpack_state(self, like: Any, position: GridPosition) -> Any:
        """The algorithm's State for this process; CheckpointError for another algorithm's, or another process's slice."""
        sliced = position.devices > 1 or bool(fields_owned(like, Owner.SHARDED))
        if (sliced and position != self.position) or position.devices != self.position.devices:
            raise CheckpointError(
                f"this state holds a slice, saved by {_described(self.position)}. This process is {_described(position)}. Load "
                f"into each process the state that it saved, with the same number of processes."
            )
        try:
            return unpack(self.packed, like)
        except CheckpointError as error:
            difference, _, _ = str(error).partition(": it is the checkpoint of")
            raise CheckpointError(
                f"this state was saved with another model or another algorithm ({difference}). Use those, or start without it."
            ) from error


def _described(position: GridPosition) -> str:
    return f"device {position.device} of {position.devices} in island {position.island} of {position.islands}"
