"""`atoll run --engine dist`: starts processes here, or is one of those that torchrun started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import recipes
from atoll.algorithms.zero import FSDP
from atoll.cli.commands import interruptible, run_of, show_result, sinks_of
from atoll.core.errors import ConfigError
from atoll.core.protocols import Sink
from atoll.engines import driver
from atoll.engines.processes.process_group import started_by_torchrun, torchrun_world_size
from atoll.engines.processes.python_api import start_here
from atoll.engines.processes.rank import take_part
from atoll.engines.processes.run_plan import Order, Prepare, create_folder, resume_order, start_order
from atoll.engines.processes.spec import Dist, ignored, read_place
from atoll.engines.warm_start import Cache
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What somebody asked for.

    Attributes:
        name: of a recipe.
        settings: that differ from the recipe's.
        seed: if another.
        out: the folder of a new run.
        resume: the folder of a run to go on with.
        engine: that was named.
        how: the settings of a Dist; none where nothing was said.
    """

    name: str | None
    settings: Sequence[str]
    seed: int | None
    out: Path | None
    resume: Path | None
    engine: str | None
    how: Mapping[str, Any]

    def place(self) -> Dist:
        """As before where the run goes on, but for what was said now."""
        before = read_place(self.resume) if self.resume is not None else None
        given = {key: value for key, value in self.how.items() if value is not None}
        return Dist(**{**({} if before is None else vars(before)), **given})

    def run(self) -> Run:
        if self.name is None:
            raise ConfigError(f"no recipe was given. There are: {', '.join(recipes.ALL)}. Or go on with a run: --resume DIR.")
        return run_of(self.name, self.settings, self.seed)

    def folder_of(self, run: Run) -> Path:
        return self.out or default_path(run.recipe, run.seed)

    def check(self) -> None:
        """Refuse what does not go together."""
        before = read_place(self.resume) if self.resume is not None else None
        if self.engine == "sim" and before is not None:
            raise ConfigError(f"--engine sim with --resume {self.resume}: this run is one of real processes. Leave out --engine.")
        if self.engine == "dist" and self.resume is not None and before is None:
            raise ConfigError(
                f"--engine dist with --resume {self.resume}: this run is a simulated one. Leave out --engine, or start anew."
            )
        asked = [f"--{key.removesuffix('_s').replace('_', '-')}" for key, value in self.how.items() if value is not None]
        if self.engine != "dist" and before is None and asked:
            raise ConfigError(f"{', '.join(asked)}: for real processes. Add --engine dist, or leave it out.")
        if started_by_torchrun() and self.how["processes"] not in (None, torchrun_world_size()):
            raise ConfigError(
                f"--processes {self.how['processes']}, but torchrun started {torchrun_world_size()}. Leave out --processes."
            )
        if self.resume is not None:
            self._check_resume(self.resume)

    def _check_resume(self, folder: Path) -> None:
        if self.out is not None:
            raise ConfigError(f"--out {self.out} with --resume {folder}: a run goes on in its own folder. Leave out --out.")
        if self.name is not None or self.settings or self.seed is not None:
            raise ConfigError("a recipe, --set or --seed with --resume: a run goes on as it began. Leave them out.")

    def order(self) -> Prepare:
        """What all processes are to do."""
        self.check()
        if self.resume is not None:
            return resume_order(self.resume, self.place(), sys.argv)
        run = self.run()
        return start_order(run, self.place(), self.folder_of(run), sys.argv)


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
    asked = Asked(
        name=name,
        settings=settings,
        seed=seed,
        out=None if out is None else out.expanduser(),
        resume=None if resume is None else resume.expanduser(),
        engine=engine,
        how=how,
    )
    if started_by_torchrun():
        _take_part(asked, as_json=as_json, quiet=quiet)
    else:
        _start(asked, as_json=as_json, quiet=quiet)


def _start(asked: Asked, *, as_json: bool, quiet: bool) -> None:
    """Start processes here. The folder is made first, so that what is impossible is refused before anything is started."""
    asked.check()
    place, folder = asked.place(), asked.resume
    if folder is None:
        run = asked.run()
        folder = create_folder(run, place, asked.folder_of(run), sys.argv)
        if not quiet:
            print(f"folder: {folder}", file=sys.stderr)
    if not driver.is_finished(RunFolder.open(folder)):
        with interruptible(folder):
            start_here(folder, place, quiet=quiet)
    show_result(folder, as_json=as_json)


def _take_part(asked: Asked, *, as_json: bool, quiet: bool) -> None:
    """Be one of the processes that torchrun started. The first rank knows what is to be done, and tells the others what it refuses;
    their machines may not have the folder."""
    shows = False

    @contextmanager
    def prepare(size: int, cache: Cache) -> Iterator[Order]:
        nonlocal shows
        with asked.order()(size, cache) as order:
            shows = asked.resume is None or order.finished  # whoever started processes to go on with a folder shows it
            yield order

    def sinks(order: Order) -> Sequence[Sink]:
        if quiet:
            return ()
        if asked.resume is None:
            print(f"folder: {order.folder}", file=sys.stderr)
        print(f"{ignored(order.run, order.place)}\n{_start_limit(order.place)}", file=sys.stderr, flush=True)
        casts = isinstance(order.run.inside, FSDP)  # torch's own, which does so on a CPU too
        return sinks_of(order.run.recipe, order.run, quiet=False, here=not casts)

    limit_s = asked.place().start_limit_s
    result = take_part(prepare, sinks, folder=asked.out or asked.resume, start_limit_s=limit_s)
    if result is not None and shows:
        show_result(result.folder, as_json=as_json)


def _start_limit(place: Dist) -> str:
    return f"outside of rounds the others are waited for {place.start_limit_s:g} s (--start-limit)."
