"""`atoll run --engine dist`: starts processes here, or is one of those that torchrun started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll import recipes
from atoll.cli.verbs import FolderLine, interruptible, run_of, show_result, sinks_of
from atoll.engines.dist.world import is_started, rank_given, size_given
from atoll.errors import ConfigError
from atoll.protocols import Sink
from atoll.runs import execute
from atoll.runs.distributed import take_part
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.orders import Order, create_folder, resume_order, start_order
from atoll.runs.place import Dist, ignored, read_place
from atoll.runs.real import start_here
from atoll.runs.run import Run


def carry_out_by_processes(
    name: str | None,
    settings: Sequence[str],
    seed: int | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    quiet: bool,
    engine: str | None,
    how: Mapping[str, Any],
) -> None:
    """Carries out a run by real processes."""
    if is_started() and rank_given() > 0:  # the first rank knows what is to be done, and this machine may not have the folder
        _follow(out or resume, how)
        return
    folder = resume.expanduser() if resume is not None else None
    before = read_place(folder) if folder is not None else None
    _check(engine, before, folder, how)
    given = {key: value for key, value in how.items() if value is not None}
    place = Dist(**{**({} if before is None else vars(before)), **given})
    if folder is not None:
        _check_resume(name, settings, seed, out, folder)
        if execute.is_finished(RunFolder.open(folder)):
            show_result(folder, as_json=as_json)
            return
    run = None if folder is not None else _new_run(name, settings, seed)
    if is_started():
        _take_part(run, place, folder, out, as_json=as_json, quiet=quiet)
    else:
        _start(run, place, folder, out, as_json=as_json, quiet=quiet)


def _follow(folder: Path | None, how: Mapping[str, Any]) -> None:
    """Be a process that the first rank tells what to do."""

    def ask_the_first(size: int) -> Order:
        raise AssertionError("only the first rank prepares")

    place = Dist(**{key: value for key, value in how.items() if value is not None})
    take_part(ask_the_first, lambda order: (), folder=folder, start_limit_s=place.start_limit_s)


def _check(engine: str | None, before: Dist | None, folder: Path | None, how: Mapping[str, Any]) -> None:
    if engine == "sim" and before is not None:
        raise ConfigError(f"--engine sim with --resume {folder}: this run is one of real processes. Leave out --engine.")
    if engine == "dist" and folder is not None and before is None:
        raise ConfigError(f"--engine dist with --resume {folder}: this run is a simulated one. Leave out --engine, or start anew.")
    asked = [f"--{key.removesuffix('_s').replace('_', '-')}" for key, value in how.items() if value is not None]
    if engine != "dist" and before is None and asked:
        raise ConfigError(f"{', '.join(asked)}: for real processes. Add --engine dist, or leave it out.")
    if is_started() and how["processes"] is not None and how["processes"] != size_given():
        raise ConfigError(f"--processes {how['processes']}, but torchrun started {size_given()}. Leave out --processes.")


def _check_resume(name: str | None, settings: Sequence[str], seed: int | None, out: Path | None, folder: Path) -> None:
    if out is not None:
        raise ConfigError(f"--out {out} with --resume {folder}: a run goes on in its own folder. Leave out --out.")
    if name is not None or settings or seed is not None:
        raise ConfigError("a recipe, --set or --seed with --resume: a run goes on as it began. Leave them out.")


def _new_run(name: str | None, settings: Sequence[str], seed: int | None) -> Run:
    if name is None:
        raise ConfigError(f"no recipe was given. There are: {', '.join(recipes.ALL)}. Or go on with a run: --resume DIR.")
    return run_of(name, settings, seed)


def _start(run: Run | None, place: Dist, folder: Path | None, out: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Start processes here. The folder is made first, so that what is impossible is refused before anything is started."""
    if run is not None:
        folder = create_folder(run, place, (out or default_path(run.recipe, run.seed)).expanduser(), sys.argv)
        if not quiet:
            print(f"folder: {folder}\n{ignored(run, place)}", file=sys.stderr)
    assert folder is not None
    with interruptible(folder):
        start_here(folder, place, quiet=quiet)
    show_result(folder, as_json=as_json)


def _take_part(run: Run | None, place: Dist, folder: Path | None, out: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Be one of the processes that torchrun started. Only the first rank knows whether the folder is new."""
    if run is not None:
        new = (out or default_path(run.recipe, run.seed)).expanduser()
        prepare = start_order(run, place, new, sys.argv)
    else:
        assert folder is not None
        prepare = resume_order(folder, place, sys.argv)

    def sinks(order: Order) -> Sequence[Sink]:
        watching = [] if quiet else sinks_of(order.run.recipe, order.run, quiet=False)
        lines = [] if quiet or run is None else [FolderLine(order.folder)]
        return [*lines, *watching]

    result = take_part(prepare, sinks, folder=out or folder, start_limit_s=place.start_limit_s)
    if result is not None and run is not None:  # whoever started processes to go on with a folder shows it
        show_result(result.folder, as_json=as_json)
