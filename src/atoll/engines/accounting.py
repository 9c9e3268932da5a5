"""An engine's books: what each island did and what all of them did together, since the warm start.

Every figure that is reported comes from here, and all of it is saved with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from atoll.core.errors import ConfigError, TrainingDiverged
from atoll.core.events import Computed, Evaluated, RoundFinished, RunFinished, UpdateSkipped
from atoll.core.protocols import Sink
from atoll.replica.local_replica import ComputeResult

MOST_SKIPPED = 20
"""Updates in a row, before a run is given up."""


@dataclass
class Ledger:
    """One island's account, which goes on when it leaves and comes back; or one of its devices', whose bytes are those that it sent
    to the others of the island."""

    sent_bytes: int = 0
    control_bytes: int = 0
    computed_s: float = 0.0
    present_s: float = 0.0
    stretches: int = 0
    """Of computing, so far."""


@dataclass
class Totals:
    """Over all islands."""

    round: int = 0
    steps: int = 0
    outer_steps: int = 0
    failed_rounds: int = 0
    skipped_in_a_row: int = 0
    """Updates, up to now."""
    tokens: int = 0
    """Those in updates that were committed."""
    local_updates: int = 0
    version: int = 0
    """Of the shared fields: the number of commits."""
    dropped_tokens: int = 0
    """Those whose gradients waited in a device when its island was given other weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""


class Books:
    """Ledgers and totals of one run, and the events that are drawn up from them.

    Args:
        islands: how many there are at most.
        devices: of each island, where they have an algorithm of their own; else none.
        real: whether the times that it is given were measured on real machines; else they are a virtual clock's.
    """

    def __init__(self, islands: int, devices: int = 0, *, real: bool = False) -> None:
        self.ledgers = [Ledger() for _ in range(islands)]
        self.inside = [[Ledger() for _ in range(devices)] for _ in range(islands if devices else 0)]
        """Of the devices, by island."""
        self.totals = Totals()
        self.diverged = ""
        """What there is to say about the last loss that was not finite."""
        self.counts_inside = True
        """Whether anybody knows what devices of an island send to each other."""
        self._losses: list[float] = []
        self._planned, self._real = islands, real

    def sent(self, islands: Sequence[int], payload: Sequence[int], control: Sequence[int]) -> None:
        """An exchange took place."""
        for island, payload_bytes, control_bytes in zip(islands, payload, control, strict=True):
            self.ledgers[island].sent_bytes += payload_bytes
            self.ledgers[island].control_bytes += control_bytes

    def ledger(self, island: int, device: int | None = None) -> Ledger:
        """An island's account, or one of its devices'."""
        return self.ledgers[island] if device is None else self.inside[island][device]

    def sent_inside(self, island: int, payload: Sequence[int], control: Sequence[int]) -> None:
        """The devices of an island met."""
        for ledger, payload_bytes, control_bytes in zip(self.inside[island], payload, control, strict=True):
            ledger.sent_bytes += payload_bytes
            ledger.control_bytes += control_bytes

    def computed(
        self,
        island: int,
        start_s: float,
        end_s: float,
        steps: int,
        batches: float,
        trained: ComputeResult,
        round: int | None = None,
        device: int | None = None,
    ) -> Computed:
        """An island, or one of its devices, has computed, in the present round unless another is given. A loss that is not finite
        ends the run here if the island has trained on; a gradient of it may still be left out."""
        round = self.totals.round if round is None else round
        for step, loss in enumerate(trained.losses):
            if not math.isfinite(loss):
                step_text = f"at inner step {self.totals.steps + step}" if device is None else f"on its device {device}"
                self.diverged = (
                    f"the loss is {loss} on island {island} in round {round}, {step_text}. The run stops; what was saved before "
                    f"this round stands. Lower the learning rate, set train.clip_norm, or look at the data there."
                )
                if trained.moved:
                    raise TrainingDiverged(self.diverged)
        self.ledgers[island].computed_s += (end_s - start_s) / (1 if device is None else len(self.inside[island]))
        if device is not None:
            self.inside[island][device].computed_s += end_s - start_s
        self.totals.local_updates += steps
        loss = fmean(trained.losses)
        self._losses.append(loss)
        return Computed(
            island=island,
            round=round,
            start_s=start_s,
            end_s=end_s,
            steps=steps,
            batches=batches,
            tokens=trained.tokens,
            loss=loss,
            device=device,
        )

    def skipped(self, event: UpdateSkipped | None, in_a_row: int, sink: Sink) -> int:
        """An update was skipped, or made: reports it, and says how many in a row were skipped. Too many end the run."""
        if event is None:
            self.diverged = ""  # what was left out since has done no harm
            return 0
        sink.emit(event)
        if in_a_row + 1 == MOST_SKIPPED:
            where = "" if event.inside is None else f" inside island {event.inside}"
            why = self.diverged or "gradients were not finite, or nobody had any. Look at the data, or lower the learning rate."
            raise TrainingDiverged(f"{MOST_SKIPPED} updates in a row were skipped{where}: {why}")
        return in_a_row + 1

    def round_finished(self, steps: int, islands: int, time_s: float) -> RoundFinished:
        """A round is over, and so many steps of the run."""
        self.totals.steps = steps
        return self._closed(islands, time_s)

    def hub_stepped(self, islands: int, time_s: float) -> RoundFinished:
        """A worker's round is over. Steps are counted as if the islands that the books began with had shared the local updates
        evenly, whoever else has come since."""
        self.totals.steps = self.totals.local_updates // self._planned
        return self._closed(islands, time_s)

    def _closed(self, islands: int, time_s: float) -> RoundFinished:
        self.totals.round += 1
        losses, self._losses = self._losses, []
        virtual_s, wall_s = self._clocks(time_s)
        return RoundFinished(
            round=self.totals.round,
            islands=islands,
            steps=self.totals.steps,
            virtual_time_s=virtual_s,
            wall_time_s=wall_s,
            tokens=self.totals.tokens,
            local_updates=self.totals.local_updates,
            loss=fmean(losses) if losses else math.nan,
            sent_bytes_per_island=self._mean("sent_bytes"),
        )

    def evaluated(self, metrics: Mapping[str, float], time_s: float) -> Evaluated:
        """The global weights were judged."""
        self.judged(metrics)
        return replace(self.due(time_s), metrics=self.totals.metrics)

    def due(self, time_s: float) -> Evaluated:
        """An evaluation of the present weights, still without its measures."""
        virtual_s, wall_s = self._clocks(time_s)
        return Evaluated(
            round=self.totals.round,
            steps=self.totals.steps,
            virtual_time_s=virtual_s,
            wall_time_s=wall_s,
            tokens=self.totals.tokens,
            local_updates=self.totals.local_updates,
            sent_bytes_per_island=self._mean("sent_bytes"),
            metrics={},
        )

    def judged(self, metrics: Mapping[str, float]) -> None:
        """These are the measures of the last evaluation."""
        if "loss" not in metrics:
            raise ConfigError(f"Workload.evaluate returned {sorted(metrics)}: it must have at least `loss`. Add it to the mapping.")
        self.totals.metrics = {name: float(value) for name, value in metrics.items()}

    def finished(self, time_s: float, warm_start_tokens: int, digest: str) -> RunFinished:
        """The run is over."""
        virtual_s, wall_s = self._clocks(time_s)
        return RunFinished(
            rounds=self.totals.round,
            outer_steps=self.totals.outer_steps,
            steps=self.totals.steps,
            tokens=self.totals.tokens,
            warm_start_tokens=warm_start_tokens,
            local_updates=self.totals.local_updates,
            virtual_time_s=virtual_s,
            wall_time_s=wall_s,
            utilisation=fmean(ledger.computed_s / ledger.present_s for ledger in self._seen()),
            sent_bytes_per_island=self._mean("sent_bytes"),
            control_bytes_per_island=self._mean("control_bytes"),
            val_loss=self.totals.metrics["loss"],
            digest=digest,
            inside_bytes_per_device=self._inside_bytes(),
            inside_dropped_tokens=self.totals.dropped_tokens if self.inside else None,
        )

    def _clocks(self, time_s: float) -> tuple[float | None, float | None]:
        """The same moment on the virtual and on the real clock; None on the one that does not count."""
        return (None, time_s) if self._real else (time_s, None)

    def _inside_bytes(self) -> float | None:
        """Over the devices of islands that have been there at all."""
        seen = (
            []
            if not self.counts_inside
            else [devices for devices, island in zip(self.inside, self.ledgers, strict=False) if island.present_s > 0]
        )
        return fmean(ledger.sent_bytes for devices in seen for ledger in devices) if seen else None

    def _mean(self, name: str) -> float:
        """Over the islands that have been there at all."""
        return fmean(getattr(ledger, name) for ledger in self._seen() or self.ledgers)

    def _seen(self) -> list[Ledger]:
        return [ledger for ledger in self.ledgers if ledger.present_s > 0]

    def to_parts(self) -> dict[str, Any]:
        return {
            "totals": asdict(self.totals),
            "ledgers": [asdict(ledger) for ledger in self.ledgers],
            "inside": [[asdict(ledger) for ledger in devices] for devices in self.inside],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.totals = Totals(**parts["totals"])
        self.ledgers = [Ledger(**ledger) for ledger in parts["ledgers"]]
        self.inside = [[Ledger(**ledger) for ledger in devices] for devices in parts["inside"]]
