"""`atoll replay`: an asynchronous run once more, from its log."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from atoll.cli.user_classes import check_imported
from atoll.engines.simulator.replay_run import replay_run
from atoll.telemetry.console import ConsoleSink


def replay_folder(folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Says how near the replay comes; exit code 1 if that is not near enough."""
    check_imported(folder)
    with ConsoleSink(f"replay {folder}", quiet) as sink:
        found = replay_run(folder, sink=sink)
    print(json.dumps(found.to_dict()) if as_json else found)
    if not found.agrees:
        raise typer.Exit(1)
