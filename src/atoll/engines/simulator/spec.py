"""The simulator's spec: one process, islands that really train, and a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atoll.runs.run_settings import Run


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Simulate the run's cluster in this process. The cluster itself is part of the Run: `cluster.*`."""

    name: ClassVar[str] = "simulator"
    resizable: ClassVar[bool] = False
    stops_processes: ClassVar[bool] = False
    runs_on_ranks: ClassVar[bool] = False

    def fitted(self, run: Run) -> Run:
        return run
