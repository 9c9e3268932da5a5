"""What a hub has to tell: events, and weights that are to be judged. Whoever asks says what it has heard already, so that an answer
which was lost on its way is given again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core.events import Evaluated, Event
from atoll.engines.ray.hub_spec import ToJudge
from atoll.engines.ray.storage import Log


class Tidings:
    """What there is to tell. Events are written into the log first. A protocols.Sink.

    Args:
        log: of the run.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._events: list[Event] = []
        self._heard = 0
        """Events that were told and heard, and are not kept any more."""
        self._waiting: dict[int, ToJudge] = {}
        self._filed = 0

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        self._events.append(event)

    def since(self, heard: int) -> tuple[list[Event], int]:
        """The events after the first so many, and how many there are now."""
        del self._events[: max(0, heard - self._heard)]
        self._heard = max(heard, self._heard)
        return list(self._events), self._heard + len(self._events)

    def is_new(self, heard: int, handed: int) -> bool:
        """Whether there is something that was not heard, or not handed out."""
        return self._heard + len(self._events) > heard or self._filed > handed

    # ------------------------------------------------------------------------------------------------------------- judging

    @property
    def waiting(self) -> int:
        """How much is to be judged."""
        return len(self._waiting)

    def file(self, due: Evaluated, reference: Any, buffers: Mapping[str, Any]) -> None:
        """Something is to be judged."""
        self._filed += 1
        self._waiting[self._filed] = ToJudge(self._filed, due, (reference,), buffers)

    def to_judge(self, handed: int) -> list[ToJudge]:
        """What is to be judged, but for what was handed out."""
        return [waiting for number, waiting in self._waiting.items() if number > handed]

    def take_back(self, number: int) -> Evaluated | None:
        """Somebody has judged it, or nobody can. What it was, unless it was taken back already."""
        waiting = self._waiting.pop(number, None)
        return None if waiting is None else waiting.due
