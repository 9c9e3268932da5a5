"""`atoll run`, `atoll chaos` and `atoll compare`: runs that a command starts, resumes or joins."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import rich
import typer

from atoll import recipes
from atoll.cli.main import RunOptions
from atoll.cli.recipe_settings import check_imported, planned_runs, run_of, run_settings, spec_of, spec_with
from atoll.core.config.type_checks import shown_text
from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Evaluated
from atoll.core.protocols import Sink
from atoll.core.verified_files import check_digests, expanded
from atoll.engines import run_lifecycle
from atoll.engines.extend_run import check_can_go_on, extend
from atoll.engines.liveness import interrupted_by_signals
from atoll.engines.run_lifecycle import Faults, Result, check_resumable, discard
from atoll.engines.simulator.virtual_time_estimate import time_on_slower_links
from atoll.engines.spec import EngineSpec, processes_started, refuse_torchrun, saved_spec, spec_named
from atoll.engines.user_code import load_user_code
from atoll.engines.warm_start_training import Cache
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run_settings import Run, as_recorded
from atoll.telemetry import compare as comparing
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.event_log import read_kind
from atoll.telemetry.plot_style import can_draw
from atoll.telemetry.plots import plot_comparison
from atoll.telemetry.summary import read_summary

SLOWER = 10
"""`atoll compare` also shows the times of simulated runs on links that are this many times slower."""


def carry_out(options: RunOptions, faults: Faults | None = None) -> Path | None:
    """Start or resume the run, and show its result. Returns its folder, on rank 0."""
    ranks = processes_started()
    result = _resume(options, faults) if options.resume is not None else _start(options, faults)
    if result is None:
        return None
    # The command that started the ranks shows the result of a run that they resumed.
    if ranks == 1 or options.resume is None:
        show_result(result.folder, as_json=options.json)
    return result.folder


def extended(options: RunOptions, steps: int) -> RunOptions:
    """The options that resume a new folder, in which the finished run of --resume trains for so many more steps. They are checked
    before there is one."""
    if options.resume is None or options.recipe is not None:
        leave_out = f" Leave out {shown_text(options.recipe)}." if options.recipe is not None else ""
        raise ConfigError(f"--extend {steps} is for a finished run: atoll run --resume DIR --extend {steps}.{leave_out}")
    refuse_torchrun(spec_named("simulator"))  # each of its processes would make the folder
    _check_settings(options)
    finished = RunFolder.open(expanded(options.resume))
    saved = saved_spec(finished.path)
    check_can_go_on(finished.path, finished.run, saved)  # before a workload is asked for
    own = None if options.workload is None else load_user_code(options.workload).open()
    check_resumable(finished, _resumed_spec(options), own)
    folder = extend(options.resume, steps, options.out, sys.argv)
    if not options.quiet:
        print_to_stderr(f"folder: {folder}, which continues {options.resume}")
    return replace(options, resume=folder, out=None)


def _start(options: RunOptions, faults: Faults | None) -> Result | None:
    if options.recipe is None:
        raise ConfigError(f"no recipe was given. There are: {', '.join(recipes.ALL)}. To resume a run: --resume DIR.")
    run = run_of(options.recipe, options.settings, options.seed)
    spec = spec_with(spec_of(options.recipe, options.engine), options.settings, options.processes)
    out = options.out
    if out is None and processes_started() == 1:  # else rank 0 chooses it for all
        out = default_path(run.recipe, run.seed)
    with interruptible(out, spec):
        return run_lifecycle.run(
            run,
            engine=spec,
            out=out,
            workload=options.workload,
            sinks=sinks_of(run, spec, quiet=options.quiet),
            command=sys.argv,
            faults=faults,
            log=discard if options.quiet else print_to_stderr,
        )


def _resume(options: RunOptions, faults: Faults | None) -> Result | None:
    assert options.resume is not None
    folder = expanded(options.resume)
    if options.out is not None:
        raise ConfigError(f"--out {options.out} with --resume {folder}: a run stays in its own folder. Leave out --out.")
    _check_settings(options)
    spec = _resumed_spec(options)
    if not folder.is_dir():  # of a run under torchrun, whose rank 0 has the folder
        return run_lifecycle.resume(folder, engine=spec, workload=options.workload, command=sys.argv)
    opened = RunFolder.open(folder)
    if options.recipe is not None:
        opened.same_run(as_recorded(spec.fitted(run_of(options.recipe, options.settings, options.seed)), opened.run))
    check_imported(folder)
    # The launcher has its ranks resume a run that is new.
    title = f"resume {folder}" if opened.checkpoints.is_dir() else None
    with interruptible(folder, spec):
        return run_lifecycle.resume(
            folder,
            engine=spec,
            workload=options.workload,
            sinks=[] if opened.finished else sinks_of(opened.run, spec, quiet=options.quiet, title=title),
            command=sys.argv,
            faults=faults,
            log=discard if options.quiet else print_to_stderr,
        )


def _check_settings(options: RunOptions) -> None:
    if options.recipe is None and any(setting.partition("=")[0] == "train.steps" for setting in options.settings):
        raise ConfigError(
            f"--set train.steps with --resume: a run resumes with the steps that it began with. To train a finished run for N "
            f"more steps, in a new folder: atoll run --resume {options.resume} --extend N."
        )
    if options.recipe is None and (run_settings(options.settings) or options.seed is not None):
        raise ConfigError(
            "--set or --seed with --resume: a run resumes with the settings that it began with; only the engine's, such as "
            "engine.processes, may change. Leave them out."
        )


def _resumed_spec(options: RunOptions) -> EngineSpec:
    assert options.resume is not None
    saved = saved_spec(expanded(options.resume))
    named = spec_named(options.engine or saved.name)  # the driver refuses another engine than the saved one
    return spec_with(saved if named.name == saved.name else named, options.settings, options.processes)


def compare_runs(
    what: Sequence[str],
    settings: Sequence[str],
    seed: int | None,
    *,
    out: Path | None,
    as_json: bool,
    as_markdown: bool,
    quiet: bool,
) -> None:
    """Simulate several recipes on the same work, or read finished runs, and show them in one table."""
    refuse_torchrun(spec_named("simulator"))
    root = out or default_path("compare", seed or 0)
    # All names are looked up before the first run starts: a misspelt last name must not cost the first runs.
    planned = planned_runs(what, settings, seed)
    for item in planned:
        if isinstance(item, Path) and not any("loss" in event.metrics for event in read_kind(item, Evaluated)):
            raise ConfigError(
                f"{item} has no evaluation, so that no loss can be compared. Leave it out. Your own loop records its loss by "
                f"islands.log_evaluation, after islands.finish()."
            )
    drawing = can_draw(print_to_stderr)
    cache = Cache()
    folders = [
        item if isinstance(item, Path) else _simulate(item, root / f"{item.recipe}-{index}", cache, quiet=quiet)
        for index, item in enumerate(planned)
    ]
    for folder in folders:
        if not check_digests(folder):
            print_to_stderr(f"not verified: {folder} has no digests. Older versions of atoll wrote none.")
    comparison = comparing.comparison(folders)
    slower_s = times_on_slower_links(comparison, folders)
    slower = comparing.slower_links(slower_s, SLOWER)
    root.mkdir(parents=True, exist_ok=True)
    if as_json:
        plot = str(plot_comparison(folders, root / "comparison.png")) if drawing else None
        print(json.dumps({**comparison.to_dict(), "time_on_10_times_slower_links_s": slower_s, "plot": plot}))
    elif as_markdown:
        print(comparing.markdown(comparison, slower))
    else:
        rich.print(comparing.table(comparison))
        print("\n" + "\n\n".join(filter(None, (comparing.sentence(comparison), comparing.busiest_seconds(comparison), slower))))
        if drawing:
            print(f"plot: {plot_comparison(folders, root / 'comparison.png')}")


def times_on_slower_links(comparison: comparing.Comparison, folders: Sequence[Path]) -> dict[str, float]:
    """The virtual time of each simulated run on links that are `SLOWER` times slower, by label. It leaves out runs that sent
    nothing, runs on real machines and runs whose settings cannot be read here."""
    times_s = {}
    for row, folder in zip(comparison.rows, folders, strict=True):
        if row.summary.virtual_time_s is None or not row.summary.sent_bytes_per_island:
            continue
        with suppress(AtollError):
            times_s[row.label] = time_on_slower_links(RunFolder.open(folder).run, row.summary.params, SLOWER)
    return times_s


def _simulate(run: Run, folder: Path, cache: Cache, *, quiet: bool) -> Path:
    simulator = spec_named("simulator")
    with interruptible(folder, simulator):
        sinks = sinks_of(run, simulator, quiet=quiet)
        run_lifecycle.run(run, out=folder, sinks=sinks, command=sys.argv, cache=cache, log=discard if quiet else print_to_stderr)
    return folder


def show_result(folder: Path, *, as_json: bool) -> None:
    """Show the figures of a finished run."""
    if as_json:
        print(read_summary(folder).to_json())
    else:
        one = comparing.comparison([folder])
        rich.print(comparing.table(one))
        print("\n".join(filter(None, (comparing.sentence(one), comparing.busiest_seconds(one), f"folder: {folder}"))))


def sinks_of(run: Run, spec: EngineSpec, *, quiet: bool, title: str | None = None) -> list[Sink]:
    """The progress display of this process. Where this command starts ranks, rank 0 has the display."""
    if quiet or (spec.runs_on_ranks and processes_started() == 1):
        return []
    cluster, who = run.cluster, None
    if run.inside is None and cluster.devices_per_island > 1:  # events count each device as an island
        who = f"{cluster.devices} devices of {cluster.islands} island{'s' if cluster.islands != 1 else ''}, all equals"
    return [ConsoleSink(title or run.recipe, who=who)]


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def interruptible(folder: Path | None, spec: EngineSpec, advice: str = "") -> Iterator[None]:
    """Ctrl-C ends a run with a line on how to resume it, or with other advice; SIGTERM and SIGHUP too where the engine's processes
    must be stopped."""
    try:
        with interrupted_by_signals() if spec.stops_processes else nullcontext():
            yield
    except KeyboardInterrupt:
        begun = folder is not None and (folder / "run.json").exists()
        resume = f"interrupted. Resume: atoll run --resume {folder}" if begun else "interrupted before the run began."
        with suppress(OSError):  # the terminal may be gone
            print_to_stderr(advice or resume)
        raise typer.Exit(130) from None
