"""A run in TensorBoard: losses against steps, tokens, bytes and time; how far the islands agreed, or how late updates came.

Needs the extra `tensorboard`. TensorBoard's horizontal axis counts in whole numbers, so each measure is written once per
quantity, under its own tag: `val_loss/by_steps`, `val_loss/by_tokens`, `val_loss/by_sent_bytes`, `val_loss/by_virtual_ms`, or
`val_loss/by_wall_ms` where the machines are real.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.core.events import Arrived, Compared, Evaluated, Event, RoundFinished, WindowClosed
from atoll.core.optional_imports import require
from atoll.telemetry.clocks import clock_at
from atoll.telemetry.running_totals import Tally


class TensorBoardSink:
    """Writes scalars for TensorBoard.

    Args:
        folder: where to write; start TensorBoard with `--logdir` on it or on a folder above.
        replay: for a resumed run, the events of its log up to the checkpoint. What an earlier process wrote to the folder is
            then removed and written again, so that curves do not double back. None for a new run.
    """

    def __init__(self, folder: str | Path, replay: Iterable[Event] | None = None) -> None:
        folder = Path(folder)
        writers = require("torch.utils.tensorboard", extra="tensorboard", purpose="TensorBoard logs")
        if replay is not None:
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        self._writer = writers.SummaryWriter(str(folder))
        self._tally = Tally()
        self._arrivals = 0
        for event in replay or ():
            self.emit(event)

    def emit(self, event: Event) -> None:
        self._tally.take(event)
        match event:
            case RoundFinished():
                self._against("train_loss", event.loss, event)
                self._write("cluster/islands", event.islands, event.steps)
                self._write("cluster/sent_bytes_per_island", event.sent_bytes_per_island, event.steps)
                utilisation = self._tally.utilisation(event.time_s)
                if utilisation is not None:
                    self._write("cluster/utilisation", utilisation, event.steps)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._against(f"val_{name}", value, event)
            case Compared():
                self._compared(event)
            case Arrived():
                self._arrivals += 1
                self._write("hub/staleness_by_arrival", event.staleness, self._arrivals)
                self._write(f"hub/staleness_by_{clock_at(event)}_ms", event.staleness, round(1000 * event.time_s))
                self._write("delta/norm_by_arrival", event.norm, self._arrivals)
            case WindowClosed():
                self._write("hub/arrivals_by_window", len(event.islands), event.window)
                self._write("hub/waited_s_by_window", sum(event.idle_s), event.window)
            case _:
                pass

    def close(self) -> None:
        """Writes what is still held back. Closing twice is fine."""
        self._writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _against(self, tag: str, value: float, event: RoundFinished | Evaluated) -> None:
        self._write(f"{tag}/by_steps", value, event.steps)
        self._write(f"{tag}/by_tokens", value, event.tokens)
        self._write(f"{tag}/by_sent_bytes", value, round(event.sent_bytes_per_island))
        self._write(f"{tag}/by_{clock_at(event)}_ms", value, round(1000 * event.time_s))

    def _compared(self, event: Compared) -> None:
        if event.norms:
            self._write("delta/mean_of_norms_by_round", sum(event.norms) / len(event.norms), event.round)
        self._write("delta/norm_of_mean_by_round", event.mean_norm, event.round)
        if event.cosine_mean is not None:
            self._write("delta/cosine_mean_by_round", event.cosine_mean, event.round)
        if event.cosine_std is not None:
            self._write("delta/cosine_std_by_round", event.cosine_std, event.round)

    def _write(self, tag: str, value: float, at: int) -> None:
        writer: Any = self._writer
        writer.add_scalar(tag, value, at)
