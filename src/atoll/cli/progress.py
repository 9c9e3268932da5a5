"""A bar for work on text, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from atoll.core.events import Progress as Told


@contextmanager
def preparing(*, quiet: bool) -> Iterator[Callable[[Told], None]]:
    """Shows what `atoll.data.prepare` tells, one bar for each phase."""
    if quiet:
        yield lambda told: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(told: Told) -> None:
            if told.phase not in tasks:
                tasks[told.phase] = bars.add_task(told.phase, total=None)
            bars.update(tasks[told.phase], completed=told.done, total=told.total or None)

        yield show
