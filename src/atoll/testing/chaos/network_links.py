"""Lines between network namespaces that can be broken: cut without a word to either end, or shaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from atoll.core.errors import ConfigError
from atoll.testing.chaos.faults import LIGHTHOUSE, Script
from atoll.testing.namespaces import Island, entered, star, why_not


class Line:
    """The line that joins namespaces. A breaking.Breakable.

    Args:
        ends: of it, as `atoll.testing.namespaces.joined` and `star` give them.
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


class Sea:
    """The lines of a run whose processes are each in a network namespace of their own: whoever's line is cut is cut off from all.

    Args:
        ends: of the lines, by the names of the processes.
    """

    def __init__(self, ends: Mapping[str, tuple[Island, Island]]) -> None:
        self._ends = ends
        self.lines = {name: Line(pair) for name, pair in ends.items()}
        self.address = ends[LIGHTHOUSE][0].address
        """Where islands find the lighthouse."""

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that starts a process of this name where it belongs."""
        return self._ends[name][0].inside(command)


@contextmanager
def sea(islands: Sequence[str]) -> Iterator[Sea]:
    """Islands and a lighthouse with a line each. This thread is where the lighthouse is, and so is what it starts there."""
    with star([LIGHTHOUSE, *islands]) as ends, entered(ends[LIGHTHOUSE][0]):
        yield Sea(ends)


def refuse_lines(script: Script, names: Sequence[str]) -> None:
    """Refuse a script that breaks lines which there are not, or cannot be."""
    if not script.lines:
        return
    strangers = sorted(script.lines - set(names))
    if strangers:
        raise ConfigError(
            f"a script breaks the lines of {', '.join(strangers)}, and the run has those of {', '.join(names)}. Name some of these."
        )
    reason = why_not()
    if reason is not None:
        raise ConfigError(
            f"a script breaks lines, which are made of network namespaces, and {reason}. Leave out what is Cut or Slow, or run it "
            f"where they can be made."
        )
