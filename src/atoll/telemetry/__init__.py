"""What is done with events: sinks that take them, and readers that make sense of a run's folder afterwards.

Sinks: `JsonlSink` (the run's log), `ConsoleSink`, `TensorBoardSink`, `Remembered`, and `Fanout` for several at once.
Readers: `read_events`, `read_summary`, `read_progress`, `comparison`, `plot_comparison`, `plot_run`, `write_trace`;
`read_asynchrony` and `plot_asynchrony` for runs with a hub, `read_overlap` and `plot_overlap` for those whose islands meet;
`read_memory` for what their islands held.
Readers see files, never live objects. Nothing here imports torch, matplotlib or rich before it is needed.
"""

from atoll.telemetry.async_summary import Asynchrony, AsynchronySummary, read_asynchrony
from atoll.telemetry.compare import Comparison, comparison, markdown, sentence, table
from atoll.telemetry.console import ConsoleSink
from atoll.telemetry.event_log import JsonlSink, read_events
from atoll.telemetry.island_times import IslandTimes
from atoll.telemetry.memory import MemorySummary, read_memory
from atoll.telemetry.overlap import Level, Overlap, OverlapSummary, read_overlap
from atoll.telemetry.plots import plot_comparison, plot_run
from atoll.telemetry.plots_async import plot_asynchrony
from atoll.telemetry.plots_overlap import plot_overlap
from atoll.telemetry.sinks import Fanout, Remembered
from atoll.telemetry.summary import RunProgress, Summary, read_progress, read_summary
from atoll.telemetry.tensorboard import TensorBoardSink
from atoll.telemetry.trace import write_trace
from atoll.telemetry.units import human_bytes, human_count, human_time

__all__ = [
    "Asynchrony",
    "AsynchronySummary",
    "Comparison",
    "ConsoleSink",
    "Fanout",
    "IslandTimes",
    "JsonlSink",
    "Level",
    "MemorySummary",
    "Overlap",
    "OverlapSummary",
    "Remembered",
    "RunProgress",
    "Summary",
    "TensorBoardSink",
    "comparison",
    "human_bytes",
    "human_count",
    "human_time",
    "markdown",
    "plot_asynchrony",
    "plot_comparison",
    "plot_overlap",
    "plot_run",
    "read_asynchrony",
    "read_events",
    "read_memory",
    "read_overlap",
    "read_progress",
    "read_summary",
    "sentence",
    "table",
    "write_trace",
]
