"""`atoll runs`: the runs in a folder, each from its settings and the end of its log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from atoll.cli.main import print_table
from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Evaluated, RoundFinished
from atoll.core.verified_files import DIGESTS, expanded
from atoll.engines.spec import read_spec
from atoll.runs.folder import RunFolder, is_own_loop
from atoll.telemetry.event_log import read_backwards
from atoll.telemetry.run_progress import read_settings
from atoll.telemetry.units import human_loss


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    folder: str
    state: str  # finished, running, stopped, or unreadable
    recipe: str = ""
    engine: str = ""
    step: int | None = None
    steps: int | None = None  # of the whole run; a user's loop has no number
    val_loss: float | None = None  # of the last evaluation
    started: str = ""


def list_runs(root: Path, *, as_json: bool) -> None:
    """Print the runs in a folder and below it, the newest last."""
    root = expanded(root)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder. Give one that holds runs, such as the parent of an --out.")
    runs = sorted(map(_listed, _folders(root)), key=lambda run: run.started)
    if as_json:
        print(json.dumps([asdict(run) for run in runs]))
        return
    table = Table("folder", "recipe", "engine", "state", "step", "val loss", "started", box=None, header_style="bold")
    for run in runs:
        step = "" if run.step is None else str(run.step) + ("" if run.steps is None else f" of {run.steps}")
        loss = "" if run.val_loss is None else human_loss(run.val_loss, 3)
        table.add_row(escape(run.folder), escape(run.recipe), run.engine, run.state, step, loss, run.started.replace("T", " ")[:16])
    print_table(table)
    if not runs:
        print(f"there is no run in {root}")


def _folders(root: Path) -> Iterator[Path]:
    """The folders with a run.json. A run's folder holds no other run, and hidden folders are being written."""
    for folder, below, files in os.walk(root):
        if "run.json" in files:
            yield Path(folder)
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))


def _listed(path: Path) -> ListedRun:
    folder = RunFolder(path)
    try:
        run = read_settings(path)
        step, loss = _progress(folder)
        recipe, loop = str(run["recipe"]), is_own_loop(run)
        engine, steps = ("loop", None) if loop else (read_spec(path).name, int(run["train"]["steps"]))
    except (AtollError, LookupError, TypeError, ValueError):
        return ListedRun(folder=str(path), state="unreadable", started=_started(folder))
    results = [path / DIGESTS] if loop else [folder.summary, folder.final]
    finished = all(file.exists() for file in results)  # not verified: that would read every log
    state = "running" if folder.in_use else "finished" if finished else "stopped"
    return ListedRun(
        folder=str(path),
        state=state,
        recipe=recipe,
        engine=engine,
        step=step,
        steps=steps,
        val_loss=loss,
        started=_started(folder),
    )


def _progress(folder: RunFolder) -> tuple[int, float | None]:
    """The last finished step, and the loss of the last evaluation, from the end of the log."""
    if not folder.events.is_file():
        return 0, None
    finished: Any = next((event for _, event in read_backwards(folder.events, RoundFinished)), None)
    evaluated: Any = next((event for _, event in read_backwards(folder.events, Evaluated)), None)
    return (0 if finished is None else finished.steps), (None if evaluated is None else evaluated.loss)


def _started(folder: RunFolder) -> str:
    """The local time at which the run began, in ISO form."""
    with suppress(OSError, ValueError, UnicodeDecodeError):
        verb, _, when = folder.source.read_text().partition("\n")[0].partition(": ")
        if verb == "started":
            return datetime.fromisoformat(when).astimezone().isoformat(timespec="seconds")
    return datetime.fromtimestamp(folder.settings.stat().st_mtime).astimezone().isoformat(timespec="seconds")
