"""Runs by real processes, from Python: started here, or by torchrun, which then has this script run in each of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.engines.dist.world import is_started
from atoll.errors import ConfigError
from atoll.protocols import Sink, Workload
from atoll.runs.distributed import take_part
from atoll.runs.execute import Result, is_finished, resume
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.launch import launch
from atoll.runs.orders import create_folder, resume_order, start_order
from atoll.runs.place import Dist, placed, read_place, write_place
from atoll.runs.plain import from_json
from atoll.runs.run import Run


def run_on(
    place: Dist,
    run: Run,
    *,
    out: str | Path | None = None,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
) -> Result | None:
    """Carries out a Run by real processes, in a new folder.

    In a process that torchrun started, this is one of them: the first rank is given the result, the others none. Else the processes
    are started here, by the command `atoll`, and the result is that of the first.

    Args:
        place: how many processes, and how.
        run: what to do; `processes` overrides the number of its islands.
        out: the folder; by default a new one under runs/.
        workload: what to train instead of the Run's model and data; under torchrun only.
        sinks: who else takes the events, on the first rank; under torchrun only.
        command: how the run was asked for, for the record.
    """
    folder = Path(out or default_path(run.recipe, run.seed)).expanduser()
    command = list(command or sys.argv)
    if is_started():
        return take_part(
            start_order(run, place, folder, command, workload),
            lambda order: sinks,
            workload,
            folder=folder if out else None,
            start_limit_s=place.start_limit_s,
        )
    if workload is not None or sinks:
        raise ConfigError(
            "a workload or sinks of your own live in this process, and the processes that are started here would not have them. "
            "Start this script by torchrun, or leave them out."
        )
    start_here(create_folder(run, place, folder, command), place)
    return resume(folder, command=command)


def resume_on(out: str | Path, place: Dist | None = None, *, command: Sequence[str] | None = None) -> Result | None:
    """Goes on with a run of real processes, by the same number of them or another; see `run_on`."""
    folder, command = Path(out).expanduser(), list(command or sys.argv)
    place = place or read_place(folder)
    if place is None:
        raise ConfigError(f"{out} is no run of real processes. Use atoll.resume.")
    if is_started():
        return take_part(resume_order(folder, place, command), lambda order: (), folder=folder, start_limit_s=place.start_limit_s)
    if not is_finished(RunFolder.open(folder)):
        start_here(folder, place)
    return resume(folder, command=command)


def start_here(folder: Path, place: Dist, *, quiet: bool = True) -> None:
    """Have processes on this machine go on with the run in this folder, and wait for them."""
    mine = from_json(RunFolder.open(folder).run_json)
    processes = place.processes or mine.cluster.devices
    placed(mine, processes)
    write_place(folder, place)
    launch(processes, ["run", "--resume", str(folder), *(["--quiet"] if quiet else [])], folder)
