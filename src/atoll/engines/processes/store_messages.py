"""What ranks tell each other between rounds: values in the store, which are deleted when all ranks have read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.core.errors import ExchangeFailed
from atoll.engines.processes.process_group import RankContext
from atoll.engines.round_record import EventAggregator, RoundRecord


class StoreMessages:
    """Records for rank 0, barriers around its evaluations, and digests that islands compare.

    Rank 0 reads the records of a round one round later, so that no rank waits for the accounting.
    """

    def __init__(self, context: RankContext, aggregator: EventAggregator) -> None:
        self._context, self._aggregator = context, aggregator
        self._unread: list[tuple[int, int, float]] = []
        """Rounds whose records rank 0 has not read: their numbers, the steps after them, and their ends."""
        self._keys: dict[str, str] = {}
        """The last key of each kind that this rank has set."""

    def post_record(self, record: RoundRecord, round: int, steps: int, now_s: float) -> None:
        """A round is over. Rank 0 adds the rounds before it: ranks may still have to post this one's records."""
        self._context.set(f"record/{round}/{self._context.rank}", record.to_json())
        self._unread.append((round, steps, now_s))
        self._add_rounds(up_to=1)

    def add_all_rounds(self) -> None:
        """Rank 0 brings the accounting up to date."""
        self._add_rounds(up_to=0)

    def _add_rounds(self, up_to: int) -> None:
        while len(self._unread) > up_to:
            round, steps, now_s = self._unread.pop(0)
            if not self._context.is_rank_zero:
                continue
            keys = [f"record/{round}/{rank}" for rank in range(self._context.size)]
            records = [RoundRecord.from_json(self._context.get(key, of=rank)) for rank, key in enumerate(keys)]
            self._aggregator.add_round(records, steps, now_s)
            for key in keys:
                self._context.delete(key)

    def run_on_rank_zero(self, round: int, action: Callable[[], None]) -> None:
        """Rank 0 does something, and the other ranks wait here: the timeout of their next exchange does not allow for it."""
        key = f"done/{round}"
        if self._context.is_rank_zero:
            action()
            self._replace("done", key, "done")
        else:
            self._context.get(key, of=0)

    def compare_digests(self, round: int, digests: Sequence[str]) -> None:
        """Check that each device holds the same bits as its counterparts."""
        context, key = self._context, f"digests/{round}/{self._context.device}"
        self._replace("digests", f"{key}/{context.island}", " ".join(digests))
        ranks = range(context.device, context.size, context.devices_per_island)
        texts = [context.get(f"{key}/{island}", of=rank) for island, rank in enumerate(ranks)]
        diverged = [island for island, text in enumerate(texts) if text != texts[0]]
        if diverged:
            raise ExchangeFailed(
                f"islands {diverged} hold other weights than island 0 after round {round}, though they agreed on them. An "
                f"algorithm must compute shared fields from shared fields and results of exchanges only; or a machine computes "
                f"wrongly. Earlier checkpoints are valid."
            )

    def _replace(self, kind: str, key: str, text: str) -> None:
        """Set a value and delete the last one of its kind: all ranks have read that, since they have exchanged a round since."""
        before = self._keys.get(kind)
        self._context.set(key, text)
        self._keys[kind] = key
        if before is not None and before != key:
            self._context.delete(before)
