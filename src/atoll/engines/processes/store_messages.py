"""What processes of a run tell each other between rounds, by words in the store, which are taken away when all have read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.core.errors import ExchangeFailed
from atoll.engines.processes.process_group import RankContext
from atoll.engines.round_record import EventAggregator, RoundRecord


class StoreMessages:
    """Diaries that the first rank enters, what it judges, and digests that are compared.

    Args:
        world: this process among all.
        clerk: the first rank's.
    """

    def __init__(self, world: RankContext, clerk: EventAggregator) -> None:
        self._world, self._clerk = world, clerk
        self._unread: list[tuple[int, int, float]] = []
        """Rounds whose diaries the first rank has not read: their numbers, the steps they led to, and when they were over."""
        self._left: dict[str, str] = {}
        """The last word of each kind that this process left."""

    def leave(self, diary: RoundRecord, round: int, steps: int, now_s: float) -> None:
        """A round is over, and so many steps with it. Rounds before it are entered: not all may have told of this one yet."""
        self._world.set(f"diary/{round}/{self._world.rank}", diary.to_json())
        self._unread.append((round, steps, now_s))
        self._enter(but_for=1)

    def enter_all(self) -> None:
        """The books are up to date."""
        self._enter(but_for=0)

    def _enter(self, but_for: int) -> None:
        while len(self._unread) > but_for:
            number, steps, now_s = self._unread.pop(0)
            if not self._world.is_rank_zero:
                continue
            keys = [f"diary/{number}/{rank}" for rank in range(self._world.size)]
            lines = [self._world.get(key, of=rank) for rank, key in enumerate(keys)]
            self._clerk.add_round([RoundRecord.from_json(line) for line in lines], steps, now_s)
            for key in keys:
                self._world.delete(key)

    def first_does(self, round: int, what: Callable[[], None]) -> None:
        """The first rank does something, and the others wait: here, and not in their next exchange, whose limit knows nothing of
        it."""
        key = f"done/{round}"
        if self._world.is_rank_zero:
            what()
            self._replace("done", key, "done")
        else:
            self._world.get(key, of=0)

    def compare(self, round: int, digests: Sequence[str]) -> None:
        """Islands that agreed hold the same bits, each device those of its counterparts."""
        world, key = self._world, f"digests/{round}/{self._world.device}"
        self._replace("digests", f"{key}/{world.island}", " ".join(digests))
        ranks = range(world.device, world.size, world.devices_per_island)
        said = [world.get(f"{key}/{island}", of=rank) for island, rank in enumerate(ranks)]
        apart = [island for island, word in enumerate(said) if word != said[0]]
        if apart:
            raise ExchangeFailed(
                f"islands {apart} hold other weights than island 0 after round {round}, though they agreed on them. Shared fields "
                f"must be computed from shared fields and from what an exchange returned, and from nothing else; or a machine "
                f"computes wrongly. What was saved before stands."
            )

    def _replace(self, kind: str, key: str, text: str) -> None:
        """Everybody has read the last word of this kind: there was a round since, in which all met."""
        before = self._left.get(kind)
        self._world.set(key, text)
        self._left[kind] = key
        if before is not None and before != key:
            self._world.delete(before)
