"""The command `atoll`.

Results go to standard output, progress and errors to standard error. An error that a person can mend is one message and exit
code 2, never a traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.core.errors import AtollError, ConfigError

app = typer.Typer(
    help="Train language models on islands of devices that are poorly connected, unequal and unreliable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(help="Text into tokens.", no_args_is_help=True)
app.add_typer(data, name="data")

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a setting by its path; `atoll show` lists them. RECIPE:PATH=VALUE changes it for one recipe of several.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of weights, data order and everything the cluster draws.")]
Engine = Annotated[
    Literal["simulator", "processes", "elastic", "ray", "sim", "dist"] | None,
    typer.Option(
        help="simulator: one process and a virtual clock. processes: a fixed number of ranks. elastic: islands join and leave. "
        "ray: a hub and workers. `atoll show RECIPE --engine NAME` lists its settings.",
        show_default="simulator",
    ),
]
Recipe = Annotated[str | None, typer.Argument(help="A recipe's name; may be left out with --resume.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; by default a new one under runs/.")]
Resume = Annotated[Path | None, typer.Option(help="Resume the run in this folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
ProcessCount = Annotated[
    int | None, typer.Option("--processes", min=1, help="The number of processes, islands or workers; short for engine.processes.")
]
Json = Annotated[bool, typer.Option("--json", help="The last line of standard output is one JSON object.")]


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # as torch says it


def _show_version(asked: bool) -> None:
    if asked:
        print(version("atoll"))
        raise typer.Exit


def _given(context: typer.Context) -> list[str]:
    """What was given on the command line, as it is written there."""
    sources = [(param.opts[0], context.get_parameter_source(str(param.name))) for param in context.command.params]
    return [option for option, source in sources if source is not None and source.name == "COMMANDLINE"]


@app.callback()
def atoll(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train language models on islands of devices that are poorly connected, unequal and unreliable."""


@app.command()
def recipes() -> None:
    """List the recipes."""
    from atoll.cli.commands import list_recipes

    list_recipes()


@app.command()
def show(recipe: str, settings: Settings = None, seed: Seed = None, engine: Engine = None, json: Json = False) -> None:
    """Show every setting of a recipe by the path that `--set` takes; with --engine, that engine's settings too."""
    from atoll.cli.commands import show_recipe

    show_recipe(recipe, settings or [], seed, engine, as_json=json)


@app.command()
def run(
    context: typer.Context,
    recipe: Recipe = None,
    settings: Settings = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = None,
    json: Json = False,
    quiet: Quiet = False,
    engine: Engine = None,
    processes: ProcessCount = None,
    elastic: Annotated[bool, typer.Option("--elastic", help="The same as --engine elastic.")] = False,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Be one more island of the elastic run at this address.")
    ] = None,
) -> None:
    """Carry out a recipe: in a simulated cluster, or on real processes (also under torchrun, on several machines)."""
    if join is not None:
        from atoll.cli.run_command import join_run

        join_run(join, settings or [], [name for name in _given(context) if name not in ("--join", "--set")])
        return
    if elastic and engine not in (None, "elastic"):
        raise ConfigError(f"--elastic with --engine {engine}: it is short for --engine elastic. Leave out one of them.")
    from atoll.cli.run_command import RunCommand

    RunCommand(
        recipe=recipe,
        settings=settings or [],
        seed=seed,
        engine="elastic" if elastic else engine,
        processes=processes,
        out=out,
        resume=resume,
        as_json=json,
        quiet=quiet,
    ).carry_out()


@app.command()
def chaos(
    script: Annotated[Path, typer.Argument(help="A fault script; see docs/chaos.md.")],
    recipe: Recipe = None,
    settings: Settings = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = None,
    json: Json = False,
    quiet: Quiet = False,
    engine: Engine = None,
    processes: ProcessCount = None,
) -> None:
    """Carry out a recipe on elastic islands or on Ray while faults are injected, and report what they cost."""
    from atoll.cli.run_command import RunCommand
    from atoll.engines.spec import read_spec
    from atoll.testing.chaos.faults import FaultScript
    from atoll.testing.chaos.reports import report_text
    from atoll.testing.chaos.run_faults import RunFaults

    faults = RunFaults(FaultScript.read(script))
    folder = RunCommand(
        recipe=recipe,
        settings=settings or [],
        seed=seed,
        engine=engine or (None if resume is not None else "elastic"),
        processes=processes,
        out=out,
        resume=resume,
        as_json=json,
        quiet=quiet,
    ).carry_out(faults)
    assert folder is not None
    print(report_text(faults.report(folder, read_spec(folder))), file=sys.stderr)


@app.command(hidden=True)
def island(
    address: str,
    name: Annotated[str, typer.Option(help="Of the island, unlike all others'.")],
    folder: Annotated[Path | None, typer.Option(help="Of the run, where this machine has it.")] = None,
) -> None:
    """Be one island of the elastic run at this address."""
    from atoll.engines.elastic.launch import run_island

    run_island(address, name, folder)


@app.command(hidden=True)
def rendezvous(join_info: Path, address: str) -> None:
    """Be the rendezvous of an elastic run."""
    from atoll.engines.elastic.launch import run_rendezvous

    run_rendezvous(join_info, address)


@app.command()
def compare(
    what: Annotated[list[str], typer.Argument(metavar="RECIPE-or-DIR...", help="Recipes to run, or folders of finished runs.")],
    settings: Settings = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and plot go; by default a new folder under runs/.")] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run several recipes on the same work, or read finished runs, and put them side by side."""
    from atoll.cli.run_command import compare_runs

    compare_runs(what, settings or [], seed, out=out, as_json=json, as_markdown=markdown, quiet=quiet)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run's folder.")], json: Json = False) -> None:
    """A run's figures, its plots, and the trace of its timeline (open it in Perfetto or chrome://tracing)."""
    from atoll.cli.commands import report_run

    report_run(folder, as_json=json)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished asynchronous run, simulated or real.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute an asynchronous run once more, in the order of its log, and compare the weights."""
    from atoll.cli.commands import replay_folder

    replay_folder(folder, as_json=json, quiet=quiet)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.", show_default="a line break")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among so many tokens only.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the choices.")] = 0,
) -> None:
    """Let a trained model write."""
    from atoll.cli.commands import generate_text

    generate_text(folder, prompt, tokens, temperature, top_k, seed)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
) -> None:
    """Write a run's trained model for use elsewhere: a pretrained one as a Hugging Face folder, else weights and config."""
    from atoll.cli.commands import export_model

    export_model(folder, out)


@data.command()
def prepare(
    corpus: Annotated[str, typer.Argument(help="stdlib, files:PATH[#field], or hf:NAME[:split][#field].")],
    out: Annotated[Path, typer.Option(help="A new folder for the token files.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizers JSON file, or bpe:SIZE to train one.")] = "bytes",
    validation_fraction: Annotated[float, typer.Option(help="Of the documents, kept for validation.")] = 0.05,
    validation_corpus: Annotated[str | None, typer.Option(help="Another text to validate on; all of CORPUS is trained on.")] = None,
    limit_bytes: Annotated[int | None, typer.Option(help="Read at most so many bytes, with a share for every domain.")] = None,
    quiet: Quiet = False,
) -> None:
    """Turn text into memory-mapped tokens; use them with `--set data.corpus=prepared:DIR`."""
    from atoll.cli.commands import prepare_data

    prepare_data(corpus, out, tokenizer, validation_fraction, validation_corpus, limit_bytes, quiet=quiet)


def main() -> None:
    """The entry point: errors for people, exit codes for programs."""
    try:
        app()
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        print(
            f"error: there is not enough memory ({error}). Use a smaller model or batch, or train.micro_batches.", file=sys.stderr
        )
        sys.exit(2)
