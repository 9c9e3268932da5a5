"""The command `atoll`.

Results go to standard output, progress and errors to standard error. An error that a person can mend is one message and exit
code 2, never a traceback.
"""

from __future__ import annotations

import json as json_library
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
Engine = Literal["sim", "dist", "ray"]
Backend = Literal["gloo", "nccl"]
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


def _engine_in(folder: Path | None) -> str | None:
    """The engine that the run in this folder is carried out by, if it has one of its own."""
    path = folder.expanduser() / "engine.json" if folder is not None else None
    return str(json_library.loads(path.read_text("utf-8"))["engine"]) if path is not None and path.is_file() else None


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
def show(recipe: str, settings: Settings = None, seed: Seed = None, json: Json = False) -> None:
    """Show every setting of a recipe, by the path that `--set` takes."""
    from atoll.cli.commands import show_recipe

    show_recipe(recipe, settings or [], seed, as_json=json)


@app.command()
def run(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name; may be left out with --resume.")] = None,
    settings: Settings = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    engine: Annotated[
        Engine | None,
        typer.Option(help="sim: one process and a virtual clock. dist: real processes. ray: a hub and workers. By default sim."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="dist, ray: so many; by default one per device.")] = None,
    pace: Annotated[
        float | None, typer.Option(min=0.0, help="dist, ray: sleep so many times cluster.step_time_s per batch.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Seconds. dist: of an exchange, by default derived. ray: of a silent hub, by default 300.")
    ] = None,
    start_limit: Annotated[
        float | None, typer.Option(help="dist: seconds that others are waited for outside of rounds. By default 3600.")
    ] = None,
    backend: Annotated[Backend | None, typer.Option(help="dist: what carries weights. By default gloo.")] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="ray: of a cluster that exists; local, or by default, one is started here."),
    ] = None,
    workers_most: Annotated[
        int | None, typer.Option(min=1, help="ray: so many may join if the cluster has room. By default --processes.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="ray, elastic: so many share out the batches of a worker or island. By default 1.")
    ] = None,
    save_every: Annotated[float | None, typer.Option(help="ray: seconds between checkpoints of the hub. By default 30.")] = None,
    elastic: Annotated[bool, typer.Option("--elastic", help="dist: islands may come and go while it runs.")] = False,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Be one more island of the elastic run there.")] = None,
    host: Annotated[str | None, typer.Option(help="elastic: the address to listen on. By default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="elastic: of the run. By default one that is free.")] = None,
    gather: Annotated[float | None, typer.Option(help="elastic: seconds that those who begin wait for all. By default 60.")] = None,
    silence: Annotated[
        float | None, typer.Option(help="elastic: seconds after which one that is not heard is not waited for. By default 1.")
    ] = None,
    refused_above: Annotated[
        float | None, typer.Option(help="elastic: refuse deltas that are so many times longer than lately. By default 25.")
    ] = None,
    chaos: Annotated[
        Path | None, typer.Option(metavar="FILE", help="elastic, ray: break it on purpose, by this script; see docs/chaos.md.")
    ] = None,
) -> None:
    """Carry out a recipe: in a simulated cluster, or by real processes (also under torchrun, on several machines)."""
    if join is not None:
        from atoll.cli.run_elastic import be_joiner

        be_joiner(join, [name for name in _given(context) if name not in ("--join", "--devices")], devices)
        return
    elastic_only = {"host": host, "port": port, "gather_s": gather, "silent_s": silence, "refused_above": refused_above}
    ray_only = {"address": ray_address, "most": workers_most, "save_every_s": save_every}
    on_ray = engine == "ray" or any(value is not None for value in ray_only.values()) or _engine_in(resume) == "ray"
    broken = chaos is not None and not on_ray
    if elastic or broken or any(value is not None for value in elastic_only.values()) or _engine_in(resume) == "elastic":
        from atoll.cli.run_elastic import carry_out_elastic

        of_others = {"--start-limit", "--backend", "--ray-address", "--workers-most", "--save-every"}
        foreign = sorted(of_others.intersection(_given(context)))
        if engine not in (None, "dist"):
            foreign.append(f"--engine {engine}")
        if foreign:
            raise ConfigError(
                f"{', '.join(foreign)} with islands that come and go (--elastic, --chaos, --host, --port, --gather, "
                f"--silence, --refused-above): these are real processes, over gloo, by --engine dist. Leave out one or the other."
            )
        how = {"processes": processes, "devices": devices, "pace": pace, "limit_s": limit, **elastic_only}
        carry_out_elastic(recipe, settings or [], seed, out, resume, json, quiet, how, chaos)
        return
    if on_ray:
        from atoll.cli.run_ray import carry_out_on_ray

        if engine not in (None, "ray") or start_limit is not None or backend is not None:
            raise ConfigError(
                "--start-limit, --backend or another --engine with a run on Ray, which has none of these. Leave them out."
            )
        how = {"processes": processes, "devices": devices, "pace": pace, "limit_s": limit, **ray_only}
        carry_out_on_ray(recipe, settings or [], seed, out, resume, json, quiet, how, chaos)
        return
    if devices is not None:
        raise ConfigError(
            f"--devices {devices}: so many share out the batches of an island of --elastic, or of a worker of --engine ray. "
            f"Elsewhere each is a process: use --set cluster.devices_per_island={devices} with an algorithm inside."
        )
    how = {"processes": processes, "pace": pace, "limit_s": limit, "start_limit_s": start_limit, "backend": backend}
    real_before = resume is not None and (resume.expanduser() / "engine.json").is_file()
    if engine == "dist" or real_before or any(value is not None for value in how.values()):
        from atoll.cli.run_processes import carry_out_by_processes  # brings a good part of torch.distributed with it

        carry_out_by_processes(recipe, settings or [], seed, out, resume, json, quiet, engine, how)
        return
    from atoll.cli.commands import carry_out

    carry_out(recipe, settings or [], seed, out=out, resume_from=resume, as_json=json, quiet=quiet)


@app.command(hidden=True)
def island(
    address: str,
    name: Annotated[str, typer.Option(help="Unlike all others'.")],
    folder: Annotated[Path | None, typer.Option(help="Of the run, where this machine has it.")] = None,
    chaos: Annotated[Path | None, typer.Option(help="A script of faults, see atoll.testing.chaos.")] = None,
) -> None:
    """Be one island of the elastic run at this address."""
    from atoll.cli.run_elastic import be_island

    be_island(address, name, folder, chaos)


@app.command(hidden=True)
def harbour(invitation: Path, address: str) -> None:
    """Keep the lighthouse of an elastic run."""
    from atoll.cli.run_elastic import be_harbour

    be_harbour(invitation, address)


@app.command()
def compare(
    what: Annotated[list[str], typer.Argument(metavar="RECIPE-or-DIR...", help="Recipes to run, or folders of finished runs.")],
    settings: Settings = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and plot go; by default a new folder under runs/.")] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Run several recipes on the same work, or read finished runs, and put them side by side."""
    from atoll.cli.commands import compare_runs

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
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Compute an asynchronous run once more, in the order of its log, and compare the weights."""
    from atoll.cli.replay import replay_folder

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
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
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
