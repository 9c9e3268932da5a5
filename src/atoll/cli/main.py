"""The command `atoll`.

Results go to standard output, progress and errors to standard error. An error that the user can fix is one message and exit code 2,
without a traceback.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from atoll import check_platform
from atoll.core.errors import AtollError, ConfigError
from atoll.core.library_logs import quieten


class _Commands(TyperGroup):
    """Suggests no hidden command for a mistyped one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            self.commands = {name: command for name, command in self.commands.items() if not command.hidden}
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(help="Convert text to token files.", no_args_is_help=True)
app.add_typer(data, name="data")


def recipe_summaries() -> dict[str, str]:
    """The recipes with one line about each, read from their sources: importing them imports torch, which takes seconds."""
    found: dict[str, str] = {}
    for name in ("demo", "papers", "toy", "finetune"):
        source = ast.parse((Path(__file__).parents[1] / "recipes" / f"{name}.py").read_text("utf-8"))
        functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        found |= {one.name.replace("_", "-"): (ast.get_docstring(one) or "").partition("\n")[0] for one in functions}
    return found


def _recipe_names() -> list[str]:
    return list(recipe_summaries())


_TYPES = ("int", "float", "str", "bool", "Path", "any value")


def _setting_paths(context: typer.Context, incomplete: str) -> list[str]:
    """Paths of the recipe and of the engine that the command line names so far, for completion in a shell; behind a path and `=`
    the words that may stand there."""
    from atoll.cli.recipe_settings import PRESETS, run_of, spec_of
    from atoll.core.config.describe_settings import Setting, describe
    from atoll.engines.spec import EngineSettings, saved_spec, spec_named
    from atoll.runs.run_settings import candidates

    # A parser that waits for the value of --set has not assigned the arguments before it.
    given = context.params
    name = given.get("recipe") or next((word for word in context.args if not word.startswith("-")), None)
    engine = given.get("engine") or ("elastic" if given.get("elastic") or given.get("join") else None)
    settings: list[Setting] = []
    with suppress(AtollError):  # a message would stand in the prompt
        settings += describe(run_of(name, (), None), candidates, PRESETS) if name else []
        folder = given.get("resume")
        spec = spec_of(name, engine) if name else spec_named(engine) if engine else saved_spec(folder) if folder else None
        settings += [one for one in describe(EngineSettings(spec)) if "." in one.path] if spec else []
    if "=" not in incomplete:
        return [f"{setting.path}=" for setting in settings]
    words = [(one.path, word) for one in settings for word in one.kind.split(" | ") if word not in _TYPES and word[0] != "["]
    return [f"{path}={word}" for path, word in words]


Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        default_factory=list,
        show_default=False,
        metavar="PATH=VALUE",
        autocompletion=_setting_paths,
        help="Set a value by its path; `atoll show` lists all paths. RECIPE:PATH=VALUE sets it for one of several recipes.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the weights, the data order and the simulated cluster.")]
EngineName = Annotated[
    Literal["simulator", "processes", "elastic", "ray", "sim", "dist"] | None,
    typer.Option(
        help="simulator: one process with a virtual clock. processes: a fixed number of ranks. elastic: islands join and leave. "
        "ray: a hub and asynchronous workers. `atoll show RECIPE --engine NAME` lists the settings of an engine.",
        show_default="simulator",
    ),
]
_LAST_WORD = "Score the last word of each document, as LAMBADA does: of a line of a .jsonl file, or of what <|endoftext|> ends."
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, in the last line of standard output.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `atoll run` and `atoll chaos`."""

    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE-or-FILE",
            help="Name of a recipe, a TOML file of `atoll show --toml`, or the run.json of an earlier run; optional with --resume.",
            autocompletion=_recipe_names,
        ),
    ] = None
    settings: Settings
    seed: Seed = None
    out: Annotated[Path | None, typer.Option(help="New folder for the run; by default runs/RECIPE/seedN-DATE-TIME.")] = None
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder from its newest checkpoint.")] = None
    json: Json = False
    quiet: Quiet = False
    engine: EngineName = None
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, islands or workers; short for --set engine.processes=N.")
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Train your own workload, which this function returns, instead of the recipe's model and data; with --engine "
            "elastic also your own training loop, for atoll.run_islands.",
        ),
    ] = None


def _takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has the fields of RunOptions in the place of its parameter `options`."""
    fields = inspect.signature(RunOptions, eval_str=True).parameters

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(options=RunOptions(**{name: given.pop(name) for name in fields}), **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += fields.values() if parameter.name == "options" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def print_table(table: Any) -> None:
    """Folds cells to the width of a terminal. A pipe or a file has no width, so lines stay whole there, without padding."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=1000)
    with console.capture() as printed:
        console.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models on islands of devices that are poorly connected, unequal and unreliable."""


@app.command()
def recipes() -> None:
    """List the recipes with one line about each."""
    from rich.table import Table

    table = Table("recipe", "what it does", box=None, header_style="bold")
    for name, about in recipe_summaries().items():
        table.add_row(name, about)
    print_table(table)


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE-or-FILE", autocompletion=_recipe_names)],
    settings: Settings,
    seed: Seed = None,
    engine: EngineName = None,
    json: Json = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print a file that `atoll run` takes.")] = False,
) -> None:
    """List every setting of a recipe, and with --engine those of the engine: path, value, allowed types, what it does."""
    from atoll.cli.inspect_commands import show_recipe

    show_recipe(recipe, settings, seed, engine, as_json=json, as_toml=toml)


@app.command()
@_takes_run_options
def run(
    context: typer.Context,
    options: RunOptions,
    elastic: Annotated[bool, typer.Option("--elastic", help="Short for --engine elastic.")] = False,
    extend: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="With --resume DIR: train a finished run for so many more steps, in a new folder (--out)."
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="FILE-or-HOST:PORT",
            help="Join an elastic run as one more island: by a join file of `atoll invite`, or by its address on this machine or "
            "in a trusted network (several with commas between them). With --out keep a copy of the run's folder there.",
        ),
    ] = None,
) -> None:
    """Run a recipe on an engine, resume a run, or join an elastic run. Under torchrun, use --engine processes."""
    from atoll.cli.run_command import carry_out, extended

    if join is not None:
        from atoll.engines.elastic.launch import join_run

        others = [name for name in _given(context) if name not in ("--join", "--set", "--out", "--workload")]
        join_run(join, options.settings, others, options.out, options.workload)
        return
    if elastic and options.engine not in (None, "elastic"):
        raise ConfigError(f"--elastic with --engine {options.engine}: it is short for --engine elastic. Leave out one of them.")
    options = replace(options, engine="elastic") if elastic else options
    carry_out(options if extend is None else extended(options, extend))


@app.command()
@_takes_run_options
def chaos(
    script: Annotated[Path, typer.Argument(help="Fault script in JSON; docs/chaos.md describes the format.")],
    options: RunOptions,
) -> None:
    """Run a recipe with --engine elastic (the default) or ray, inject the faults of a script, and report what they cost."""
    from atoll.cli.run_command import carry_out
    from atoll.engines.spec import read_spec
    from atoll.testing.chaos.attach_faults import RunFaults
    from atoll.testing.chaos.faults import FaultScript
    from atoll.testing.chaos.reports import report_text

    faults = RunFaults(FaultScript.read(script))
    by_default = replace(options, engine="elastic") if options.engine is None and options.resume is None else options
    folder = carry_out(by_default, faults)
    assert folder is not None
    print(report_text(faults.report(folder, read_spec(folder))), file=sys.stderr)


@app.command()
def invite(
    folder: Annotated[Path, typer.Argument(help="Folder of an elastic run that other machines may join.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="New join file.", show_default="join-ID.json in the current folder")
    ] = None,
    standby: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The joiner may run a standby rendezvous, which others dial at this address if the first machine is lost.",
        ),
    ] = None,
    revoke: Annotated[
        str | None, typer.Option(metavar="ID", help="Write no file: admit the join file of this id no more, and drop its islands.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Write no file: replace the run's certificates. Join files written so far are void.")
    ] = False,
) -> None:
    """Write a join file, which admits another machine to a run: copy it there and use `atoll run --join FILE`."""
    from atoll.engines.elastic.launch import invite_joiner

    print(invite_joiner(folder, out, revoke, standby, rotate=rotate))


@app.command()
def doctor(
    settings: Settings,
    address: Annotated[
        str | None,
        typer.Argument(metavar="WORD@HOST:PORT", help="What `atoll doctor --listen HOST:PORT` prints on another machine."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="An address of this machine to listen at. Alone: answer one machine that asks, for at most 10 minutes. With an "
            "address to ask: let the other machine connect back.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE-or-FILE", help="The data to compare.", autocompletion=_recipe_names)
    ] = "demo-diloco",
) -> None:
    """Check this machine, and the network to another: versions, GPUs, interfaces, clocks, data, disk; and say what to do."""
    from atoll.cli.doctor_command import examine

    if examine(address, listen, recipe, settings):
        raise typer.Exit(1)


@app.command(hidden=True)
def island(
    address: str,
    name: Annotated[str, typer.Option(help="Unique name of the island.")],
    folder: Annotated[Path | None, typer.Option(help="Folder of the run, if this machine has it.")] = None,
    faults: Annotated[Path | None, typer.Option(help="Fault script with update faults to inject into this island.")] = None,
    process: Annotated[str | None, typer.Option(help="Identity of this process, by which its supervisor reports its end.")] = None,
    workload: Annotated[str | None, typer.Option(help="The user's workload or loop.")] = None,
) -> None:
    """Run one island of the elastic run at this address."""
    from atoll.engines.elastic.launch import run_island
    from atoll.testing.chaos.update_faults import interpose_update_faults

    interpose = None if faults is None else interpose_update_faults(faults)
    run_island(address, name, folder, interpose=interpose, process=process, code=workload)


@app.command(hidden=True)
def rendezvous(join_info: Path, address: str) -> None:
    """Run the rendezvous of an elastic run."""
    from atoll.engines.elastic.launch import run_rendezvous

    run_rendezvous(join_info, address)


@app.command()
def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE-FILE-or-DIR...",
            help="Recipes and TOML files to simulate, folders of finished runs.",
            autocompletion=_recipe_names,
        ),
    ],
    settings: Settings,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs and the plot; by default a new one under runs/.")] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    quiet: Quiet = False,
) -> None:
    """Simulate several recipes with the same data and warm start, or read finished runs, and print one table."""
    from atoll.cli.run_command import compare_runs

    compare_runs(what, settings, seed, out=out, as_json=json, as_markdown=markdown, quiet=quiet)


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE-or-FILE", autocompletion=_recipe_names)],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="PATH=V1,V2",
            autocompletion=_setting_paths,
            help="A setting and its values; repeat it for the combinations of several settings.",
        ),
    ],
    settings: Settings,
    seed: Seed = None,
    engine: EngineName = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the cells.", show_default="runs/RECIPE/sweep-DIGEST, by all but the values of the grid"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Carry out a run for each combination of values, and print one table. The same command continues a killed sweep."""
    from atoll.cli.sweep_command import sweep as carry_out_sweep

    carry_out_sweep(recipe, grid, settings, seed, engine=engine, out=out, as_json=json, quiet=quiet)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with runs, at any depth.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder: recipe, engine, state, step, loss and date."""
    from atoll.cli.list_runs_command import list_runs

    list_runs(folder, as_json=json)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of the run.")], json: Json = False) -> None:
    """Print the figures of a run, draw its plots, and write its trace for Perfetto or chrome://tracing."""
    from atoll.cli.inspect_commands import report_run

    report_run(folder, as_json=json)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished asynchronous run, simulated or on Ray.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recompute an asynchronous run in the order of its event log, and compare the weights."""
    from atoll.cli.recipe_settings import check_imported
    from atoll.engines.replay_async_run import replay_run
    from atoll.telemetry.console_progress import ConsoleSink

    check_imported(folder)
    with ConsoleSink(f"replay {folder}", quiet) as sink:
        found = replay_run(folder, sink=sink)
    print(dumps(found.to_dict()) if json else found)
    if not found.agrees:
        raise typer.Exit(1)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
    prompt: Annotated[str, typer.Option(help="Start of the text.", show_default="a line break")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the K most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Generate text with the model of a run."""
    from atoll.cli.recipe_settings import check_imported
    from atoll.runs.generate import generate as generate_text

    check_imported(folder)
    print(generate_text(folder, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed))


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    on: Annotated[str, typer.Option(help="The text: stdlib, files:PATH[#field], or hf:NAME[@configuration][:split][#field].")],
    last_word: Annotated[bool, typer.Option("--last-word", help=_LAST_WORD)] = False,
    limit_bytes: Annotated[int | None, typer.Option(min=1, help="Read at most this many bytes.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate the model of a run on any text: perplexity and bits per byte, or accuracy on the last word of each document."""
    from atoll.cli.inspect_commands import evaluate_run
    from atoll.cli.recipe_settings import check_imported

    check_imported(folder)
    evaluate_run(folder, on, last_word=last_word, limit_bytes=limit_bytes, device=device, as_json=json, quiet=quiet)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="New folder for the model.")],
) -> None:
    """Export the trained model of a run: a language model as a folder that transformers loads, others as weights and config."""
    from atoll.cli.recipe_settings import check_imported
    from atoll.models.arcee import arcee_loads
    from atoll.models.gpt import GPT
    from atoll.models.mlp import MLP
    from atoll.runs.export import export as export_model
    from atoll.runs.folder import RunFolder

    check_imported(folder)
    model = RunFolder.open(folder).run.model
    place = export_model(folder, out)
    own = isinstance(model, MLP) or (isinstance(model, GPT) and not arcee_loads(model))
    loader = "atoll.load_exported" if own else "AutoModelForCausalLM.from_pretrained"
    print(f"{place}\nload it with: {loader}({str(place)!r})")


@data.command()
def prepare(
    corpus: Annotated[str, typer.Argument(help="stdlib, files:PATH[#field], or hf:NAME[@configuration][:split][#field].")],
    out: Annotated[Path, typer.Option(help="New folder for the token files.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizers JSON file, or bpe:SIZE to train a BPE.")] = "bytes",
    validation_fraction: Annotated[float, typer.Option(help="Fraction of the documents held out for validation.")] = 0.05,
    validation_corpus: Annotated[str | None, typer.Option(help="Validate on this corpus, and train on all of CORPUS.")] = None,
    limit_bytes: Annotated[int | None, typer.Option(help="Read at most this many bytes, divided over the domains.")] = None,
    quiet: Quiet = False,
) -> None:
    """Convert text to memory-mapped token files; use them with `--set data.corpus=prepared:DIR`."""
    from atoll.cli.prepare_command import prepare_data
    from atoll.data.prepare import Preparation

    preparation = Preparation(
        corpus=corpus,
        tokenizer=tokenizer,
        limit_bytes=limit_bytes,
        validation_fraction=validation_fraction,
        validation_corpus=validation_corpus,
    )
    prepare_data(preparation, out, quiet=quiet)


def main() -> None:
    """Run the command; print an error that the user can fix, and exit with code 2."""
    quieten()
    try:
        check_platform()
        app()
    except AtollError as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        message = f"there is not enough memory ({error}). Use a smaller model or batch, or train.micro_batches."
    else:
        return
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
