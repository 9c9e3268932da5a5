"""Who is to be named when a rank is missed, and why it went. Those who miss it leave, and would be missed in turn: the first one is
meant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store


class Blame:
    """Accusations, written down in a store where all can read them. What leaves after an accusation is not guilty itself.

    Args:
        store: which outlives ranks.
        rank: who writes.
        ranks: of all processes, those of the group whose ranks are named here.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks

    def accuse(self, rank: int) -> tuple[int, str]:
        """Writes down that this rank of the group was missed. Who is to be named, and who said so if it was another."""
        guilty, path = self._ranks[rank], [self._rank]
        try:
            # Who was missed by somebody that it misses itself is not the end of a chain: both wait, and for each other.
            while (accused := self._accused_by(guilty)) is not None and accused not in path:
                path.append(guilty)
                guilty = accused
            self._store.set(f"accused/{self._rank}", str(guilty))
        except RuntimeError:  # the store is gone too: then the one that was missed is named
            return rank, ""
        if guilty not in self._ranks:
            return rank, f", which missed rank {guilty}"
        return self._ranks.index(guilty), f" (rank {path[-1]} missed it first)" if len(path) > 1 else ""

    def leave_last_words(self, text: str) -> None:
        """This process ends, for a reason of its own: those who will miss it can say why."""
        with suppress(RuntimeError):  # the store may be gone too
            self._store.set(f"last-words/{self._rank}", text)

    def last_words(self, rank: int) -> str:
        """What this rank of the group ended with; nothing if it did not say."""
        key = f"last-words/{self._ranks[rank]}"
        with suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""

    def _accused_by(self, rank: int) -> int | None:
        key = f"accused/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else None
