"""Several sinks behind one, and a sink that remembers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from atoll.core.events import Event

if TYPE_CHECKING:
    from atoll.core.protocols import Sink

E = TypeVar("E", bound=Event)


@runtime_checkable
class Closable(Protocol):
    """A sink that holds something open."""

    def close(self) -> None: ...


@runtime_checkable
class Recalls(Protocol):
    """A sink whose figures go on from what happened before, when a run is resumed."""

    def recall(self, events: Iterable[Event]) -> None: ...


class Fanout:
    """Hands every event to each sink, in the order given.

    What a sink raises goes up at once, so the log belongs first: later sinks then show nothing that was not recorded.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.emit(event)

    def close(self) -> None:
        """Closes every sink that can be closed, the last one first, even if one of them raises."""
        with ExitStack() as stack:
            for sink in self.sinks:
                if isinstance(sink, Closable):
                    stack.callback(sink.close)

    def __enter__(self) -> Fanout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Remembered:
    """Keeps every event in a list, progress included.

    >>> from atoll.core.events import Progress, Saved
    >>> remembered = Remembered()
    >>> remembered.emit(Progress(phase="warm start", done=1, total=2))
    >>> remembered.emit(Saved(round=3, name="round-3"))
    >>> [event.round for event in remembered.of(Saved)]
    [3]
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class Silent:
    """Takes events where nobody reports."""

    def emit(self, event: Event) -> None:
        pass
