"""`atoll run --engine ray`: a hub and workers on Ray, and this process, which drives them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import recipes
from atoll.cli.commands import interruptible, run_of, show_result, sinks_of
from atoll.core.config.json_records import from_json
from atoll.core.errors import ConfigError
from atoll.engines.driver import is_finished
from atoll.engines.processes.spec import engine_in
from atoll.engines.ray.launch import create_ray_folder, drive, resume_on_ray
from atoll.engines.ray.spec import read_ray, told, with_said
from atoll.runs.folder import RunFolder, default_path

if TYPE_CHECKING:
    from atoll.testing.chaos.faults import FaultScript


def carry_out_on_ray(
    name: str | None,
    settings: Sequence[str],
    seed: int | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    quiet: bool,
    how: Mapping[str, Any],
    chaos: Path | None = None,
) -> None:
    """Carries out an asynchronous run on Ray.

    Args:
        name: of a recipe.
        settings: that differ from the recipe's.
        seed: if another.
        out: the folder of a new run.
        resume: the folder of a run to go on with.
        as_json: whether the result is shown as JSON.
        quiet: whether nothing is shown meanwhile.
        how: the settings of a Ray; none where nothing was said.
        chaos: a script of what is to go wrong, on purpose.
    """
    script = _script(chaos)
    if resume is not None:
        folder = resume.expanduser()
        _check_resume(name, settings, seed, out, folder)
        place = with_said(read_ray(folder), how)
    else:
        if name is None:
            raise ConfigError(f"no recipe was given. There are: {', '.join(recipes.ALL)}. Or go on with a run: --resume DIR.")
        run, place = run_of(name, settings, seed), with_said(None, how)
        folder = create_ray_folder(place, run, out or default_path(run.recipe, run.seed), sys.argv, chaos=script).path
        if not quiet:
            print(f"folder: {folder}", file=sys.stderr)
    opened = RunFolder.open(folder)
    if not is_finished(opened):
        mine = from_json(opened.run_json)
        if not quiet:
            print(told(mine, place), file=sys.stderr, flush=True)
        sinks, say = sinks_of(mine.recipe, mine, quiet=quiet, here=False), _silent if quiet else _say
        # What Ray prints of processes that die is said in fewer words here.
        with interruptible(folder), _terminable(), open(_ray_log(folder), "a", encoding="utf-8") as words, redirect_stdout(words):
            if resume is None:
                drive(opened, place, sinks=sinks, say=say, chaos=script)
            else:
                resume_on_ray(folder, place, sinks=sinks, command=sys.argv, say=say, chaos=script)
    if script is not None:
        from atoll.testing.chaos.reports import hub_report, report_text

        print(report_text(hub_report(folder)), file=sys.stderr)
    show_result(folder, as_json=as_json)


def _script(path: Path | None) -> FaultScript | None:
    """What a file says is to go wrong."""
    if path is None:
        return None
    from atoll.testing.chaos.faults import FaultScript

    return FaultScript.read(path)


def _check_resume(name: str | None, settings: Sequence[str], seed: int | None, out: Path | None, folder: Path) -> None:
    if out is not None:
        raise ConfigError(f"--out {out} with --resume {folder}: a run goes on in its own folder. Leave out --out.")
    if name is not None or settings or seed is not None:
        raise ConfigError("a recipe, --set or --seed with --resume: a run goes on as it began. Leave them out.")
    RunFolder.open(folder)
    engine, _ = engine_in(folder)
    if engine != "ray":
        raise ConfigError(f"--engine ray with --resume {folder}: this run's engine is {engine}. Leave out --engine, or start anew.")


def _ray_log(folder: Path) -> Path:
    path = folder / "logs" / "ray.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
