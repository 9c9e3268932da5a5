"""Numbers that are not finite: whose they are, and that they do not spread.

Where islands exchange weights, an island whose own are not finite weighs nothing, says so, and goes on from what the others agree
on. If its optimizer's moments are not finite either, that would help nobody: it raises, before it exchanges, and the others go on
without it. Where islands exchange gradients, all of them leave the update out. Nothing that is not finite replaces what was agreed
on before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.core.pytree import leaves
from atoll.engines.accounting import MAX_SKIPPED
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import Request
from atoll.engines.round_record import ExchangeRecord
from atoll.loop.notices import warn
from atoll.loop.uneven_inputs import Company
from atoll.replica.flat_parameters import local

_KEPT = "What was last agreed on is in islands.state_dict()."


class Soundness:
    """Watches one island's rounds.

    Args:
        island: its number.
        company: the other islands.
        optimizer: the user's; none where the algorithm steps by itself.
        inside: a wire with the devices of this island; none where it has one.
    """

    def __init__(
        self, island: int, company: Company, optimizer: torch.optim.Optimizer | None, inside: GroupCollectives | None
    ) -> None:
        self._island, self._company, self._optimizer, self._inside = island, company, optimizer, inside
        self._last: tuple[ExchangeRecord, str] | None = None
        """What the round's last update was made of, and who brought something that is not finite."""
        self._unsound_in_a_row = self._skipped_in_a_row = 0

    def note(self, meeting: ExchangeRecord) -> None:
        """Islands met."""
        if meeting.makes_update:
            self._last = meeting, self._company.names(meeting.nonfinite)

    async def accepts(self, delta: Tree) -> bool:
        """Whether what this island did can be used. All devices of the island come to the same answer.

        Raises:
            TrainingDiverged: it cannot, and nothing will be better in the next round.
        """
        finite = delta.is_finite()
        lost = not finite and _is_lost(self._optimizer)
        if self._inside is not None:
            inside = self._inside
            told = await Request(lambda: inside.all_gather_numbers(finite, lost))
            finite, lost = all(row[0] for row in told), any(row[1] for row in told)
        self._unsound_in_a_row = 0 if finite else self._unsound_in_a_row + 1
        if lost or self._unsound_in_a_row == MAX_SKIPPED:
            why = "so are its optimizer's moments" if lost else f"so they were in {MAX_SKIPPED} rounds in a row"
            raise TrainingDiverged(
                f"the weights of island {self._island} are not finite, and {why}. It leaves, and brings nothing to the others. "
                f"{_KEPT} Look at its data, lower the learning rate, or clip gradients."
            )
        if not finite:
            warn(
                f"the weights of island {self._island} are not finite. It weighs nothing in this agreement, and goes on from what "
                f"the others agree on."
            )
        return finite

    def check(self, after: Any) -> None:
        """A round led to this State.

        Raises:
            TrainingDiverged: it must not replace the one before it.
        """
        last, self._last = self._last, None
        useless = last is not None and last[0].unusable
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if useless else 0
        who = last[1] if last is not None else ""
        if self._skipped_in_a_row == MAX_SKIPPED:
            why = f"{who} brought something that is not finite" if who else "nobody had anything to bring"
            raise TrainingDiverged(
                f"{MAX_SKIPPED} updates in a row were left out; at last {why}. {_KEPT} Look at the data there, lower the learning "
                f"rate, or use a GradScaler."
            )
        if who and self._skipped_in_a_row == 1 and self._company.rank == 0:
            warn(f"{who} brought gradients that are not finite. All islands leave this update out.")
        if not after.params.is_finite():
            raise TrainingDiverged(
                f"the agreed weights would not be finite after this round, though what every island brought was. {_KEPT} Lower the "
                f"learning rates, the outer one too, or clip gradients."
            )


def _is_lost(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer remembers something that is not finite: it will never step soundly again."""
    remembered = (leaf for _, leaf in leaves(list(optimizer.state.values()) if optimizer is not None else []))
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() and not local(leaf).isfinite().all() for leaf in remembered)
