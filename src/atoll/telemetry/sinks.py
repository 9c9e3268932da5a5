"""Sinks that combine others, keep events in memory, or write them for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from atoll.core.events import Arrived, Compared, Evaluated, Event, RoundFinished, WindowClosed
from atoll.core.optional_imports import require
from atoll.telemetry.event_log import ClosingSink, E, clock_at
from atoll.telemetry.run_progress import RunningTotals

if TYPE_CHECKING:
    from atoll.core.protocols import Sink


@runtime_checkable
class ResumableSink(Protocol):
    """A sink that continues its totals when a run resumes: it receives the logged events before the first new one."""

    def recall(self, events: Iterable[Event]) -> None: ...


class Fanout(ClosingSink):
    """Passes every event to each sink, in the order given; without sinks, discards it.

    An exception in a sink reaches the caller at once. Put the log first, so that later sinks show only recorded events.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.emit(event)

    def close(self) -> None:
        """Closes every closable sink, the last one first, even if one of them raises."""
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(getattr(sink, "close", lambda: None))


class MemorySink:
    """Keeps every event in a list, progress included.

    >>> from atoll.core.events import Progress, Saved
    >>> memory = MemorySink()
    >>> memory.emit(Progress(phase="warm start", done=1, total=2))
    >>> memory.emit(Saved(round=3, name="round-3"))
    >>> [event.round for event in memory.of(Saved)]
    [3]
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: type[E]) -> list[E]:
        """The events of these classes, in order."""
        return [event for event in self.events if isinstance(event, kinds)]


def import_tensorboard() -> Any:
    return require("torch.utils.tensorboard", extra="tensorboard", purpose="TensorBoard logs")


class TensorBoardSink(ClosingSink):
    """Writes scalars for TensorBoard. Needs the extra `tensorboard`.

    TensorBoard's horizontal axis takes whole numbers only, so the sink writes each measure once per quantity, under its own tag:
    `val_loss/by_steps`, `val_loss/by_tokens`, `val_loss/by_sent_bytes`, and `val_loss/by_virtual_ms` or `val_loss/by_wall_ms`.

    Args:
        folder: where to write; start TensorBoard with `--logdir` on it or on a folder above.
        replay: for a resumed run, the events of its log up to the checkpoint. The sink then deletes the files of earlier processes
            and writes these events again, so that no curve doubles back. None for a new run.
    """

    def __init__(self, folder: str | Path, replay: Iterable[Event] | None = None) -> None:
        folder = Path(folder)
        writers = import_tensorboard()
        if replay is not None:
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        self._writer: Any = writers.SummaryWriter(str(folder))
        self._totals = RunningTotals()
        self._arrivals = 0
        for event in replay or ():
            self.emit(event)

    def emit(self, event: Event) -> None:
        self._totals.take(event)
        write = self._writer.add_scalar
        match event:
            case RoundFinished():
                self._write_against("train_loss", event.loss, event)
                write("cluster/islands", event.islands, event.steps)
                write("cluster/sent_bytes_per_island", event.sent_bytes_per_island, event.steps)
                utilisation = self._totals.utilisation(event.time_s)
                if utilisation is not None:
                    write("cluster/utilisation", utilisation, event.steps)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._write_against(f"val_{name}", value, event)
            case Compared():
                mean_of_norms = sum(event.norms) / len(event.norms) if event.norms else None
                scalars = {"mean_of_norms": mean_of_norms, "norm_of_mean": event.mean_norm}
                for name, scalar in {**scalars, "cosine_mean": event.cosine_mean, "cosine_std": event.cosine_std}.items():
                    if scalar is not None:
                        write(f"delta/{name}_by_round", scalar, event.round)
            case Arrived():
                self._arrivals += 1
                write("hub/staleness_by_arrival", event.staleness, self._arrivals)
                write(f"hub/staleness_by_{clock_at(event)}_ms", event.staleness, round(1000 * event.time_s))
                write("delta/norm_by_arrival", event.norm, self._arrivals)
            case WindowClosed():
                write("hub/arrivals_by_window", len(event.islands), event.window)
                write("hub/waited_s_by_window", sum(event.idle_s), event.window)
            case _:
                pass

    def close(self) -> None:
        """Writes buffered scalars. A second call does nothing."""
        self._writer.close()

    def _write_against(self, tag: str, value: float, event: RoundFinished | Evaluated) -> None:
        positions = {"steps": event.steps, "tokens": event.tokens, "sent_bytes": round(event.sent_bytes_per_island)}
        for name, position in {**positions, f"{clock_at(event)}_ms": round(1000 * event.time_s)}.items():
            self._writer.add_scalar(f"{tag}/by_{name}", value, position)
