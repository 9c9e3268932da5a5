"""How many steps a worker's round has: Dynamic Local Updates, eq. (6) of asynchronous Local-SGD (arXiv 2401.09135).

    paper   v(w)    max v             H            w.steps = floor(v(w) / max v * H)
    here    speed   fastest           plan.steps   dynamic_steps(speed, fastest, plan.steps)

Speeds are given, or measured from what arrived. The reference is the fastest worker that is there. A worker whose speed is not
known yet takes the steps of the fastest, and every round takes at least one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.protocols import Plan


def dynamic_steps(speed: float, fastest: float, most: int) -> int:
    """Eq. (6), at least 1.

    >>> [dynamic_steps(1 / step_time_s, 1 / 0.58, most=50) for step_time_s in (0.58, 0.75, 1.51, 3.33)]
    [50, 38, 19, 8]
    """
    # A hair more, so that a worker of exactly half the speed does not lose a step to rounding.
    return max(1, math.floor(speed / fastest * most + 1e-9))


class Pace:
    """The speeds of all workers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._here: dict[int, float | None] = {}
        self._gone: dict[int, float] = {}
        """What was measured of workers that left: they may come back."""
        self._fastest: float | None = None
        """The greatest speed of the present workers; None if it must be computed anew."""

    def join(self, speeds: Mapping[int, float | None]) -> None:
        """Workers join, with their speeds in steps per second where the driver knows them.

        Raises:
            ConfigError: speeds are given, and a worker's is missing or is none. Then no worker has joined.
        """
        given = self._plan.pace == "given"
        self._here |= {w: self._given(w, known) if given else self._gone.get(w) for w, known in speeds.items()}
        self._fastest = None

    def leave(self, worker: int) -> None:
        speed = self._here.pop(worker)
        if speed is not None:
            self._gone[worker] = speed
        self._fastest = None

    def steps(self, worker: int) -> int:
        """Of this worker's next round."""
        speed = self._here[worker]
        if self._plan.pace == "even" or speed is None:
            return self._plan.steps
        if self._fastest is None:
            self._fastest = max(other for other in self._here.values() if other is not None)
        return dynamic_steps(speed, self._fastest, self._plan.steps)

    def measure(self, worker: int, steps: int, seconds: float) -> None:
        """Half of what is known is replaced by what was just seen: a worker that slows down or recovers is known in a few rounds,
        and a single hiccup does not count for the whole. What cannot be a speed is passed over."""
        if self._plan.pace != "measured" or not seconds > 0 or not 0 < steps / seconds < math.inf:
            return
        seen, before = steps / seconds, self._here[worker]
        speed = seen if before is None else before / 2 + seen / 2
        self._here[worker] = speed
        if self._fastest is not None and speed >= self._fastest:
            self._fastest = speed
        elif before is None or before == self._fastest:
            self._fastest = None

    def _given(self, worker: int, known: float | None) -> float:
        if self._plan.speeds:
            known = self._plan.speeds[worker] if worker < len(self._plan.speeds) else None
        if known is None or not 0 < known < math.inf:
            what = "no speed is given" if known is None else f"the speed is {known} steps per second"
            raise ConfigError(
                f"worker {worker}: {what}, and pace=given needs a positive one for every worker. Give `speeds` one figure per "
                f"worker, or use pace=measured."
            )
        return known

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {"here": [list(item) for item in self._here.items()], "gone": [list(item) for item in self._gone.items()]}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self._here = {int(worker): speed for worker, speed in parts["here"]}
        self._gone = {int(worker): float(speed) for worker, speed in parts["gone"]}
        self._fastest = None
