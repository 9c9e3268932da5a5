"""Who holds which place at a hub, and which rounds are out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.protocols import Sink
from atoll.engines.accounting import dispatched
from atoll.engines.ray.messages import Ticket


@dataclass
class Seat:
    """Who holds a place.

    Attributes:
        life: its life.
        since_s: up to when its presence is in the books.
        last: its last round that was taken, or refused.
        verdict: which of the two.
        refusals: in a row.
        step_s: from being sent off to arriving, by step, as last seen.
        computing_s: computing alone, likewise.
    """

    life: int
    since_s: float
    last: Ticket | None = None
    verdict: Literal["taken", "refused"] = "taken"
    refusals: int = 0
    step_s: float | None = None
    computing_s: float | None = None

    @property
    def has_brought(self) -> bool:
        """Whether this very worker has brought something that was taken, as far as this hub has seen."""
        return self.step_s is not None

    def plain(self) -> list[Any]:
        """What of it goes into a checkpoint."""
        return [self.life, self.since_s, self.last, self.verdict, self.refusals]

    @staticmethod
    def of(plain: list[Any]) -> Seat:
        life, since_s, last, verdict, refusals = plain
        return Seat(life, since_s, None if last is None else (last[0], last[1]), verdict, refusals)


class OpenRounds:
    """The rounds that are out: which hub gave out each, and whether the log has it yet.

    A dispatch is logged when its worker has the weights, or at the latest when its round is over: each once.

    Args:
        epoch: names this hub among all that have been and will be in its place.
        sink: takes events.
        devices: of each worker.
    """

    def __init__(self, epoch: int, sink: Sink, devices: int) -> None:
        self._epoch, self._sink, self._devices = epoch, sink, devices
        self._epochs: dict[int, int] = {}
        self._logged: set[int] = set()

    def begin(self, dispatch: Dispatch) -> None:
        """A worker is sent off by this hub."""
        self._epochs[dispatch.round] = self._epoch

    def ticket(self, dispatch: Dispatch) -> Ticket:
        return dispatch.round, self._epochs[dispatch.round]

    def log(self, dispatch: Dispatch, begin_s: float, sent_bytes: int) -> None:
        """It is out since that time at the latest."""
        if dispatch.round not in self._logged:
            self._logged.add(dispatch.round)
            begin_s = max(begin_s, dispatch.time_s)
            self._sink.emit(dispatched(dispatch, begin_s, sent_bytes, real=True, devices=self._devices))

    def end(self, dispatch: Dispatch) -> None:
        """A round is over."""
        self._logged.discard(dispatch.round)
        del self._epochs[dispatch.round]

    def plain(self) -> dict[str, Any]:
        return {"logged": sorted(self._logged), "epochs": [list(item) for item in self._epochs.items()]}

    def restore(self, plain: Mapping[str, Any]) -> None:
        self._logged, self._epochs = set(plain["logged"]), dict(plain["epochs"])
