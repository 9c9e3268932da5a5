"""Sinks that take the events of a run, and readers that turn its folder into figures, tables, plots and traces.

Readers read files, never live objects. torch, matplotlib and rich are imported only when they are needed.
"""

from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.event_log import JsonlSink, read_events
from atoll.telemetry.sinks import Fanout, MemorySink, TensorBoardSink
from atoll.telemetry.summary import read_summary

__all__ = ["ConsoleSink", "Fanout", "JsonlSink", "MemorySink", "TensorBoardSink", "read_events", "read_summary"]
