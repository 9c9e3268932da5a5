"""Lines between network namespaces that can be broken: cut without a word to either end, or shaped."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.testing.namespaces import Island


class Line:
    """The line that joins namespaces. A breaking.Breakable.

    Args:
        ends: of it, as `atoll.testing.namespaces.joined` gives them.
        mbit_per_s: its rate when nothing is wrong; none: as fast as the machine can.
    """

    def __init__(self, ends: Sequence[Island], mbit_per_s: float | None = None) -> None:
        self._ends, self._rate = tuple(ends), mbit_per_s
        self.mend()

    def cut(self) -> None:
        for end in self._ends:
            end.silence()

    def shape(self, mbit_per_s: float) -> None:
        for end in self._ends:
            end.shape(mbit_per_s)

    def mend(self) -> None:
        for end in self._ends:
            end.shape(self._rate)
