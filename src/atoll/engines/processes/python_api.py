"""Runs by real processes, from Python: started here, or by torchrun, which then has this script run in each of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.core.config.json_records import from_json
from atoll.core.config.type_checks import check_type
from atoll.core.errors import ConfigError
from atoll.core.protocols import Sink, Workload
from atoll.engines.driver import Result, is_finished, resume
from atoll.engines.processes.launch import launch
from atoll.engines.processes.process_group import started_by_torchrun
from atoll.engines.processes.rank import take_part
from atoll.engines.processes.run_plan import check_same_workload, create_folder, resume_order, start_order
from atoll.engines.processes.spec import Dist, check_backend, place_of, placed, read_place, write_place
from atoll.runs.folder import RunFolder, default_path
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
    check_type("place", place, Dist)
    check_type("run", run, Run)
    folder = Path(out or default_path(run.recipe, run.seed)).expanduser()
    command = list(command or sys.argv)
    if started_by_torchrun():
        return take_part(
            start_order(run, place, folder, command, workload),
            lambda order: sinks,
            workload,
            folder=folder if out else None,
            start_limit_s=place.start_limit_s,
        )
    _refuse_own(workload, sinks)
    start_here(create_folder(run, place, folder, command), place)
    return resume(folder, command=command)


def resume_on(
    out: str | Path,
    place: Dist | None = None,
    *,
    workload: Workload | None = None,
    sinks: Sequence[Sink] = (),
    command: Sequence[str] | None = None,
) -> Result | None:
    """Goes on with a run of real processes, by the same number of them or another; see `run_on`.

    Args:
        out: the run's folder.
        place: how many processes, and how; by default as before.
        workload: as it was given to `run_on`, if one was; under torchrun only, unless the run is finished.
        sinks: who else takes the events, on the first rank; under torchrun only.
        command: how the run was asked for, for the record.
    """
    folder, command = Path(out).expanduser(), list(command or sys.argv)
    if started_by_torchrun():  # the first rank alone need have the folder
        known = place or read_place(folder) or Dist()
        return take_part(
            resume_order(folder, place, command, workload),
            lambda order: sinks,
            workload,
            folder=folder,
            start_limit_s=known.start_limit_s,
        )
    place = place or place_of(folder)
    if not is_finished(RunFolder.open(folder)):
        _refuse_own(workload, sinks)
        start_here(folder, place)
    return resume(folder, workload=workload, command=command)


def _refuse_own(workload: Workload | None, sinks: Sequence[Sink]) -> None:
    if workload is not None or sinks:
        raise ConfigError(
            "a workload or sinks of your own live in this process, and the processes that are started here would not have them. "
            "Start this script by torchrun, or leave them out."
        )


def start_here(folder: Path, place: Dist, *, quiet: bool = True) -> None:
    """Have processes on this machine go on with the run in this folder, and wait for them."""
    opened = RunFolder.open(folder)
    check_same_workload(opened, None)
    mine = from_json(opened.run_json)
    processes = place.processes or mine.cluster.devices
    check_backend(placed(mine, processes).resolved, place)
    with opened.lock():  # a folder in use keeps the place that it is used with
        write_place(folder, place)
    launch(processes, ["run", "--resume", str(folder), *(["--quiet"] if quiet else [])], folder)
