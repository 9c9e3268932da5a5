"""The commands that only read: show, report, evaluate."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import rich
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atoll.cli.main import print_table
from atoll.cli.recipe_settings import PRESETS, run_of, spec_of, spec_with
from atoll.core.config.describe_settings import Setting, describe
from atoll.core.config.json_records import to_json
from atoll.core.config.toml_settings import to_toml
from atoll.core.verified_files import check_digests
from atoll.engines.simulator.spec import Simulator
from atoll.engines.spec import EngineSettings
from atoll.runs.evaluate import evaluate
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run, candidates
from atoll.telemetry import compare as comparing
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.plot_style import can_draw
from atoll.telemetry.plots import write_plots
from atoll.telemetry.report import report_sections
from atoll.telemetry.run_progress import read_progress
from atoll.telemetry.summary import read_summary
from atoll.telemetry.trace import write_trace


def show_recipe(
    name: str, settings: Sequence[str], seed: int | None, engine: str | None, *, as_json: bool, as_toml: bool = False
) -> None:
    """Every setting of a recipe, and of an engine if one is named, by the path that --set takes."""
    run = run_of(name, settings, seed)
    spec = spec_with(spec_of(name, engine), settings, None)
    engine = engine or (None if isinstance(spec, Simulator) else spec.name)
    if as_toml:
        print(to_toml(describe(run)), end="")
        if engine:
            print(f'\n[engine]\nname = "{spec.name}"\n{to_toml(describe(spec)) if fields(spec) else ""}', end="")  # type: ignore[arg-type]
        return
    if as_json:
        print(json.dumps({**to_json(run), **({"engine": to_json(spec)} if engine else {})}))
        return
    explained = [*describe(run, candidates, PRESETS), *(describe(EngineSettings(spec)) if engine else ())]
    if sys.stdout.isatty():  # a table would break most of its lines there
        width = Console().width
        for setting in explained:
            print(_wrapped(f"{setting.path} = {_with_choice(setting, run)}", width, later="    "))
            print(_wrapped(f"{setting.about}  ({setting.kind})", width, first="    ", later="    "))
        return
    table = Table("path", "value", "what it does  (type)", box=None)
    for setting in explained:
        table.add_row(setting.path, escape(_with_choice(setting, run)), escape(f"{setting.about}  ({setting.kind})"))
    print_table(table)


def _wrapped(text: str, width: int, *, first: str = "", later: str) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _with_choice(setting: Setting, run: Run) -> str:
    """The setting's value; if it is left to the device, with what this machine's device has."""
    if setting.path not in ("train.precision", "train.compile") or setting.text != "auto":
        return setting.text
    return f"auto (here {str(getattr(run.resolved.train, setting.path.removeprefix('train.'))).lower()})"


def report_run(folder: Path, *, as_json: bool) -> None:
    RunFolder.open(folder)
    progress = read_progress(folder)
    if as_json:
        print(read_summary(folder).to_json())
        return
    if progress.finished is not None:
        one = comparing.comparison([folder])
        rich.print(comparing.table(one))
        if peak := comparing.busiest_seconds(one):
            print(peak)
    else:
        loop = progress.started is not None and progress.started.engine == "loop"
        how = "Your script resumes it." if loop else f"Resume: atoll run --resume {folder}"
        print(f"not finished: {progress.position}. {how}")
    for section in report_sections(folder):
        rich.print(section)
    if not check_digests(folder):
        print(f"not verified: {folder} has no digests yet. A run writes them when it finishes; older versions of atoll did not.")
    plots = write_plots(folder) if can_draw(lambda line: print(line, file=sys.stderr)) else []
    for number, path in enumerate(plots):
        print(f"{'       ' if number else 'plot:  '}{path}")
    print(f"trace: {write_trace(folder, folder / 'trace.json')}")


def evaluate_run(
    folder: Path, on: str, *, last_word: bool, limit_bytes: int | None, device: str | None, as_json: bool, quiet: bool
) -> None:
    with ConsoleSink(f"evaluate {folder}", quiet) as sink:
        found = evaluate(folder, on, last_word=last_word, limit_bytes=limit_bytes, device=device, progress=sink.emit)
    if found.warning is not None:
        print(f"warning: {found.warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    for name, value in replace(found, warning=None).to_dict().items():
        print(f"{name.replace('_', ' ')}: {f'{value:.4f}' if isinstance(value, float) else value}")
