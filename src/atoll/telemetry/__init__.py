"""Sinks that take the events of a run, and readers that turn its folder into figures, tables, plots and traces.

Sinks: `JsonlSink`, `ConsoleSink`, `TensorBoardSink`, `MemorySink`, and `Fanout` for several at once. Readers read files, never live
objects. torch, matplotlib and rich are imported only when they are needed.
"""

from atoll.telemetry.async_summary import read_asynchrony
from atoll.telemetry.compare import comparison, markdown, sentence, table
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.event_log import JsonlSink, read_events
from atoll.telemetry.plots import plot_comparison, plot_run, write_plots
from atoll.telemetry.report import report_sections
from atoll.telemetry.run_progress import RunningTotals, read_progress
from atoll.telemetry.sinks import Fanout, MemorySink, TensorBoardSink
from atoll.telemetry.summary import Summary, read_memory, read_participation, read_summary
from atoll.telemetry.sync_summary import read_overlap
from atoll.telemetry.trace import write_trace

__all__ = [
    "ConsoleSink",
    "Fanout",
    "JsonlSink",
    "MemorySink",
    "RunningTotals",
    "Summary",
    "TensorBoardSink",
    "comparison",
    "markdown",
    "plot_comparison",
    "plot_run",
    "read_asynchrony",
    "read_events",
    "read_memory",
    "read_overlap",
    "read_participation",
    "read_progress",
    "read_summary",
    "report_sections",
    "sentence",
    "table",
    "write_plots",
    "write_trace",
]
