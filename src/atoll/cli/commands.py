"""What the verbs do. Imported by the verb that is called, because this brings torch with it."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import getdoc
from pathlib import Path

import rich
import typer
from rich.markup import escape
from rich.table import Table

from atoll import recipes
from atoll.cli.user_classes import check_imported
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.config.settings import Presets, describe
from atoll.core.errors import ConfigError
from atoll.core.events import Event, RunStarted
from atoll.core.protocols import Sink
from atoll.engines import driver
from atoll.engines.driver import Cache, Result
from atoll.engines.processes.spec import in_full, refuse_copies
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run import Run, candidates
from atoll.telemetry import compare as comparing
from atoll.telemetry.console import ConsoleSink
from atoll.telemetry.plots import plot_comparison, write_plots
from atoll.telemetry.progress import read_progress
from atoll.telemetry.report import report_sections
from atoll.telemetry.summary import read_summary
from atoll.telemetry.trace import write_trace


def list_recipes() -> None:
    table = Table("recipe", "what it does", box=None, header_style="bold")
    for name, make in recipes.ALL.items():
        table.add_row(name, (getdoc(make) or "").splitlines()[0])
    rich.print(table)


def show_recipe(name: str, settings: Sequence[str], seed: int | None, *, as_json: bool) -> None:
    run = run_of(name, settings, seed)
    if as_json:
        print(json.dumps(to_json(run)))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("path", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("type", overflow="fold", style="dim")
    for setting in describe(run, candidates, PRESETS):
        table.add_row(setting.path, escape(setting.text), escape(setting.kind))
    rich.print(table)


def carry_out(
    name: str | None,
    settings: Sequence[str],
    seed: int | None,
    *,
    out: Path | None,
    resume_from: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    refuse_copies(_together(resume_from))
    if resume_from is not None:
        if out is not None:
            raise ConfigError(f"--out {out} with --resume {resume_from}: a run goes on in its own folder. Leave out --out.")
        folder = _resume(name, settings, seed, resume_from, quiet=quiet)
    elif name is None:
        raise ConfigError(f"no recipe was given. There are: {', '.join(recipes.ALL)}. Or go on with a run: --resume DIR.")
    else:
        folder = _start(run_of(name, settings, seed), out, Cache(), quiet=quiet).folder
    show_result(folder, as_json=as_json)


def _together(resume_from: Path | None) -> str:
    """How processes that torchrun started work together instead."""
    if resume_from is None:
        return "Add --engine dist, and they train together. "
    if (resume_from.expanduser() / "run.json").is_file():
        return ""
    return f"If {resume_from} is a run of real processes whose folder lies on another machine, add --engine dist. "


def show_result(folder: Path, *, as_json: bool) -> None:
    """The figures of a finished run."""
    if as_json:
        print(read_summary(folder).to_json())
    else:
        one = comparing.comparison([folder])
        rich.print(comparing.table(one))
        print(f"{comparing.sentence(one)}\nfolder: {folder}")


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
    refuse_copies("")
    root = out or default_path("compare", seed or 0)
    # Everything is looked up before anything runs: a misspelt last name should not cost the first runs.
    planned = _planned(what, settings, seed)
    cache = Cache()
    folders = [
        item if isinstance(item, Path) else _start(item, root / f"{item.recipe}-{index}", cache, quiet=quiet).folder
        for index, item in enumerate(planned)
    ]
    together = comparing.comparison(folders)
    root.mkdir(parents=True, exist_ok=True)
    if as_json:
        print(json.dumps({**together.to_dict(), "plot": str(plot_comparison(folders, root / "comparison.png"))}))
    elif as_markdown:
        print(comparing.markdown(together))
    else:
        # The table first: without the library that draws, the runs are not lost.
        rich.print(comparing.table(together))
        print(f"\n{comparing.sentence(together)}")
        print(f"plot: {plot_comparison(folders, root / 'comparison.png')}")


def _planned(what: Sequence[str], settings: Sequence[str], seed: int | None) -> list[Run | Path]:
    """The runs that are to be carried out, and the folders of those that are finished, in the order given."""
    folders = [item for item in what if item not in recipes.ALL and Path(item).is_dir()]
    names = [item for item in what if item not in folders]
    unknown = [name for name in names if name not in recipes.ALL]
    if unknown:
        raise ConfigError(
            f"there is no recipe {unknown[0]!r}, and no folder of a run either. Give the folder of a finished run, or a recipe; "
            f"there are: {', '.join(recipes.ALL)}. `atoll recipes` says what they do."
        )
    if not names and (settings or seed is not None):
        given = "--seed" if not settings else f"--set {settings[0]}"
        raise ConfigError(
            f"{given} with folders alone ({', '.join(folders)}): these were run already, and nothing can be set any more. Leave it "
            f"out, or name a recipe that is to run with it."
        )
    for folder in folders:
        read_summary(folder)
    return [Path(item) if item in folders else run_of(item, settings, seed, among=names) for item in what]


def report_run(folder: Path, *, as_json: bool) -> None:
    RunFolder.open(folder)
    progress = read_progress(folder)
    if as_json:
        print(read_summary(folder).to_json())
        return
    if progress.finished:
        rich.print(comparing.table(comparing.comparison([folder])))
    else:
        print(f"not finished: step {progress.steps} of {progress.steps_total}. Go on: atoll run --resume {folder}")
    for section in report_sections(folder):
        rich.print(section)
    for number, path in enumerate(write_plots(folder)):
        print(f"{'       ' if number else 'plot:  '}{path}")
    print(f"trace: {write_trace(folder, folder / 'trace.json')}")


def generate_text(folder: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    from atoll.runs.generate import generate

    check_imported(folder)
    for piece in generate(folder, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed):
        print(piece, end="", flush=True)
    print()


def export_model(folder: Path, out: Path) -> None:
    from atoll.models.pretrained import Pretrained
    from atoll.runs.export import export

    check_imported(folder)
    run = from_json(RunFolder.open(folder).run_json)
    place = export(folder, out)
    loader = "AutoModelForCausalLM.from_pretrained" if isinstance(run.model, Pretrained) else "atoll.load_exported"
    print(f"{place}\nload it with: {loader}({str(place)!r})")


def prepare_data(
    corpus: str,
    out: Path,
    tokenizer: str,
    validation_fraction: float,
    validation_corpus: str | None,
    limit_bytes: int | None,
    *,
    quiet: bool,
) -> None:
    from atoll.cli.progress import preparing
    from atoll.data.prepare import Preparation, find_prepared, prepare

    out = out.expanduser()
    preparation = Preparation(
        corpus=corpus,
        tokenizer=tokenizer,
        limit_bytes=limit_bytes,
        validation_fraction=validation_fraction,
        validation_corpus=validation_corpus,
    )
    prepared = find_prepared(preparation, out)
    if prepared is not None:
        print(
            f"{out} was prepared before, by the same command, and is left as it is. If the text has changed since, remove the "
            f"folder first, or use another --out.",
            file=sys.stderr,
        )
    else:
        with preparing(quiet=quiet) as progress:
            prepared = prepare(preparation, out, progress)
    print(f"{prepared}\nuse it with: --set data.corpus=prepared:{out}")


def run_of(name: str, settings: Sequence[str], seed: int | None, among: Sequence[str] | None = None) -> Run:
    """The recipe with these settings and this seed.

    Args:
        name: of the recipe.
        settings: some of which may be for one recipe alone, with its name before them.
        seed: if another than the recipe's.
        among: all recipes that the settings are given for; none: this one alone.
    """
    run = recipes.recipe(name)
    meant = [_meant_for(setting, among or [name]) for setting in settings]
    run = override(run, [setting for recipe, setting in meant if recipe in (None, name)], candidates, PRESETS)
    return run if seed is None else replace(run, seed=seed)


PRESETS: Presets = {
    "model": {
        "tiny": GPT.tiny,
        "m20": GPT.m20,
        "m60": GPT.m60,
        "m150": GPT.m150,
        "m400": GPT.m400,
        "small": MLP.small,
    }
}
"""`--set model=m60` takes the whole model."""


def _meant_for(setting: str, among: Sequence[str]) -> tuple[str | None, str]:
    """The recipe that a setting is for, none for all of them, and the setting without it."""
    path, equals, value = setting.partition("=")
    recipe, colon, path = path.rpartition(":")
    if not colon:
        return None, setting
    if recipe not in recipes.ALL:
        near = difflib.get_close_matches(recipe, recipes.ALL, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(recipes.ALL)}."
        raise ConfigError(f"{setting}: what stands before the colon is a recipe, and there is none called {recipe!r}. {advice}")
    if recipe not in among:
        raise ConfigError(
            f"{setting}: this is for {recipe}, which is not run here, so that nobody would take it. What is run: "
            f"{', '.join(dict.fromkeys(among))}. Leave it out, or give it to one of these."
        )
    return recipe, f"{path}{equals}{value}"


def sinks_of(title: str, run: Run, *, quiet: bool, here: bool = True) -> list[Sink]:
    """Who shows a run to whoever watches.

    Args:
        title: what to call the run.
        run: what is carried out.
        quiet: nothing is shown.
        here: this machine computes, and casts on CUDA alone, so that it is told if there is none.
    """
    if quiet:
        return []
    line = in_full(run) if here else None
    return [*([] if line is None else [_Line(line, Event)]), ConsoleSink(title, who=_equals(run))]


def _equals(run: Run) -> str | None:
    """Who trains, where devices of several islands are equals; events count each of them as an island."""
    cluster = run.cluster
    if run.inside is not None or cluster.devices_per_island == 1:
        return None
    return f"{cluster.devices} devices of {cluster.islands} island{'s' if cluster.islands != 1 else ''}, all equals"


class _Line:
    """Says one thing when the first event of this kind comes, and not before: a run that is refused has none."""

    def __init__(self, text: str, at: type[Event]) -> None:
        self._text = text
        self._at = at
        self._said = False

    def emit(self, event: Event) -> None:
        if not self._said and isinstance(event, self._at):
            self._said = True
            print(self._text, file=sys.stderr)


def _start(run: Run, out: Path | None, cache: Cache, *, quiet: bool) -> Result:
    folder = (out or default_path(run.recipe, run.seed)).expanduser()
    with interruptible(folder):
        sinks = [] if quiet else [_Line(f"folder: {folder}", RunStarted), *sinks_of(run.recipe, run, quiet=quiet)]
        return driver.run(run, out=folder, sinks=sinks, command=sys.argv, cache=cache)


def _resume(name: str | None, settings: Sequence[str], seed: int | None, folder: Path, *, quiet: bool) -> Path:
    """Goes on with a run if there is something to do; its folder, in which it is finished."""
    if name is None and (settings or seed is not None):
        raise ConfigError("--set and --seed with --resume: a run goes on as it began. Leave them out.")
    folder = folder.expanduser()
    if name is not None:
        RunFolder.open(folder).same_run(to_json(run_of(name, settings, seed)))
    opened = RunFolder.open(folder)
    if not driver.is_finished(opened):
        check_imported(folder)
        with interruptible(folder):
            sinks = sinks_of(f"resume {folder}", from_json(opened.run_json), quiet=quiet)
            driver.resume(folder, sinks=sinks, command=sys.argv)
    return folder


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C ends a run with a word on how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        begun = (folder / "run.json").exists()
        print(f"interrupted. Go on: atoll run --resume {folder}" if begun else "interrupted before the run began.", file=sys.stderr)
        raise typer.Exit(130) from None
