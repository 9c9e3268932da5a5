"""Keeps non-finite numbers out of the agreed weights, and names the island that they come from.

With an algorithm that exchanges weights, an island whose weights are not finite takes part with weight 0, logs a warning, and
begins the next round with the agreed weights, all of them: of an algorithm with fragments every piece that it holds itself is as
unusable after one more step. If its optimizer's moments are not finite either, it cannot recover: it raises before it
exchanges, and the others continue without it. With an algorithm that exchanges gradients, all islands skip the update.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import leaves
from atoll.engines.accounting import MAX_SKIPPED, count_in_a_row
from atoll.engines.communication_thread import Request
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.round_record import ExchangeRecord
from atoll.engines.shared_and_sharded_state import restarted
from atoll.replica.flat_parameters import local

_LOGGER = logging.getLogger("atoll")
_LAST_GOOD = "islands.state_dict() still holds the last agreed weights."


class NonFiniteGuard:
    """Checks what one island sends, and what its rounds return. Without a user's optimizer, the algorithm steps."""

    def __init__(self, island: int, optimizer: torch.optim.Optimizer | None, intra_island: GroupCollectives | None) -> None:
        self._island, self._optimizer, self._intra_island = island, optimizer, intra_island
        self._skipped, self._culprits, self._is_first = False, "", False
        """Of the round's last update: whether it was skipped, which islands sent non-finite numbers, and whether this one logs."""
        self._is_bad_round = False
        """Whether this island's weights were not finite in an exchange of this round."""
        self._bad_rounds_in_a_row = self._skipped_in_a_row = 0

    def record(self, exchange: ExchangeRecord, culprits: str, *, is_first: bool) -> None:
        if exchange.makes_update:
            self._skipped, self._culprits, self._is_first = exchange.unusable, culprits, is_first

    async def accepts(self, delta: Tree) -> bool:
        """Whether this island's delta is finite on all of its devices. Raises TrainingDiverged if the island cannot recover."""
        finite = delta.is_finite()
        lost = not finite and _has_nonfinite_state(self._optimizer)
        if self._intra_island is not None:
            intra_island = self._intra_island
            rows = await Request(lambda: intra_island.all_gather_numbers(finite, lost))
            finite, lost = all(row[0] for row in rows), any(row[1] for row in rows)
        is_news = not finite and not self._is_bad_round
        self._bad_rounds_in_a_row += is_news
        self._is_bad_round |= is_news
        if lost or self._bad_rounds_in_a_row == MAX_SKIPPED:
            what = "and its optimizer's moments are not finite" if lost else f"were not finite in {MAX_SKIPPED} rounds in a row"
            raise TrainingDiverged(
                f"the weights of island {self._island} {what}. It leaves before it sends them. {_LAST_GOOD} Look at its data, "
                f"lower the learning rate, or clip gradients."
            )
        if is_news:
            _LOGGER.warning(
                f"atoll: the weights of island {self._island} are not finite. It takes part in this exchange with weight 0, and "
                f"continues from the weights of the others after this round."
            )
        return finite

    def end_round(self, state: Any) -> Any:
        """The State for the next round, from the one that this round returned. Raises TrainingDiverged if that must not replace the
        present one."""
        skipped, culprits = self._skipped, self._culprits
        self._skipped, self._culprits = False, ""
        last = f"{culprits} sent non-finite gradients" if culprits else "no island had gradients to send"
        why = f"in the last one {last}. {_LAST_GOOD} Look at the data there, lower the learning rate, or use a GradScaler."
        self._skipped_in_a_row = count_in_a_row(self._skipped_in_a_row, skipped, why=why)
        if culprits and self._skipped_in_a_row == 1 and self._is_first:
            _LOGGER.warning(f"atoll: {culprits} sent non-finite gradients. All islands skip this update.")
        if not state.params.is_finite():
            raise TrainingDiverged(
                f"the agreed weights would not be finite after this round, although all islands sent finite numbers. {_LAST_GOOD} "
                f"Lower the learning rates, the outer one too, or clip gradients."
            )
        is_bad, self._is_bad_round = self._is_bad_round, False
        if not is_bad:
            self._bad_rounds_in_a_row = 0
        return restarted(state) if is_bad else state


def _has_nonfinite_state(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the optimizer's moments are not finite: then every further step is not finite either."""
    state = (leaf for _, leaf in leaves(list(optimizer.state.values()) if optimizer is not None else []))
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() and not local(leaf).isfinite().all() for leaf in state)
