"""`atoll sweep`: a run for each combination of some settings, in one folder. A sweep that was killed continues where it stopped."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from atoll.cli.main import print_table
from atoll.cli.recipe_settings import described, run_of, spec_of, spec_with
from atoll.cli.run_command import interruptible, print_to_stderr, sinks_of
from atoll.core.config.json_records import to_json
from atoll.core.errors import ConfigError, TrainingDiverged
from atoll.core.verified_files import expanded, json_digest
from atoll.engines import run_lifecycle
from atoll.engines.run_lifecycle import discard
from atoll.engines.spec import EngineSpec, refuse_torchrun, spec_named
from atoll.engines.warm_start_training import Cache
from atoll.runs.folder import RunFolder, folder_name
from atoll.runs.run_settings import Run, as_recorded
from atoll.telemetry.summary import Summary, read_summary
from atoll.telemetry.units import human_bytes, human_count, human_loss, human_time

_LONGEST_NAME = 120  # characters of a cell's folder


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One combination of the settings."""

    settings: Mapping[str, str]  # values by path
    run: Run
    spec: EngineSpec
    folder: Path

    def __str__(self) -> str:
        return ", ".join(f"{path}={value}" for path, value in self.settings.items())


def sweep(
    recipe: str,
    grid: Sequence[str],
    settings: Sequence[str],
    seed: int | None,
    *,
    engine: str | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Carry out the cells that are not finished, and show all of them in one table."""
    refuse_torchrun(spec_named("simulator"))
    axes = axes_of(grid)
    root = expanded(out or _default_root(recipe, axes, settings, seed, engine))
    if (holder := next((one for one in (root, *root.absolute().parents) if (one / "run.json").exists()), None)) is not None:
        raise ConfigError(f"{root} is in {holder}, the folder of a run, where `atoll runs` finds no other. Give another --out.")
    cells = cells_of(recipe, axes, settings, seed, engine, root)
    again = f"interrupted. Finished cells are kept: the same command{'' if out else f' (or --out {root})'} continues"
    results: list[Summary | str] = []
    cache = Cache()
    for number, cell in enumerate(cells, start=1):
        title = f"cell {number} of {len(cells)}"
        with interruptible(cell.folder, cell.spec, again):
            results.append(_carried_out(cell, title, cache, quiet=quiet))
        if not quiet:
            print_to_stderr(f"{title}: {cell}: {_result_text(results[-1])}")
    if as_json:
        print(json.dumps(_record(root, cells, results)))
    else:
        _print(root, cells, results)


def alternatives(text: str) -> list[str]:
    """The values between the commas, but not inside of brackets.

    >>> alternatives("1e-3,2e-3"), alternatives("SGD(lr=1.0),Nesterov(lr=0.7, momentum=0.9)"), alternatives("files:a,files:b")
    (['1e-3', '2e-3'], ['SGD(lr=1.0)', 'Nesterov(lr=0.7, momentum=0.9)'], ['files:a', 'files:b'])
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [part.strip() for part in text.split(",")]
    if not isinstance(node, ast.Tuple):
        return [text]
    return [ast.get_source_segment(text, item) or "" for item in node.elts]


def axes_of(grid: Sequence[str]) -> dict[str, list[str]]:
    """The values of each setting that varies, by its path."""
    axes: dict[str, list[str]] = {}
    for text in grid:
        path, equals, values = text.partition("=")
        found = alternatives(values.strip()) if equals else []
        if not path or not all(found) or not found:
            raise ConfigError(f"--grid {text}: give a setting and its values, such as --grid algorithm.inner_steps=10,20,50.")
        if path in axes or len(set(found)) < len(found):
            raise ConfigError(f"--grid {text}: {path} or one of its values is given twice. Give each once.")
        axes[path] = found
    if not axes:
        raise ConfigError("no --grid was given: a sweep varies settings, such as --grid algorithm.inner_steps=10,20,50.")
    return axes


def _default_root(
    recipe: str, axes: Mapping[str, list[str]], settings: Sequence[str], seed: int | None, engine: str | None
) -> Path:
    """The same folder for the same command, also when values were added to its grid; another one when a file has changed."""
    run = described(recipe).run
    digest = json_digest([to_json(run), repr(spec_of(recipe, engine)), sorted(settings), seed, sorted(axes)])
    return Path("runs") / folder_name(run.recipe) / f"sweep-{digest[:8]}"


def cells_of(
    recipe: str, axes: Mapping[str, list[str]], settings: Sequence[str], seed: int | None, engine: str | None, root: Path
) -> list[SweepCell]:
    """All cells, the last setting varying fastest. Every Run is made here: a wrong value must not cost the cells before it."""
    cells = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        varied = [f"{path}={value}" for path, value in chosen.items()]
        given = [*settings, *varied]
        try:
            spec = spec_with(spec_of(recipe, engine), given, None)
            run = spec.fitted(run_of(recipe, given, None if "seed" in chosen else seed))
        except ConfigError as error:
            raise ConfigError(f"the cell {', '.join(varied)}: {error}") from error
        cells.append(SweepCell(settings=chosen, run=run, spec=spec, folder=root / _folder_name(chosen)))
    return cells


def _folder_name(settings: Mapping[str, str]) -> str:
    """
    >>> _folder_name({"train.steps": "40", "seed": "1"}), _folder_name({"data.corpus": "files:a/b"})
    ('train.steps=40_seed=1', 'data.corpus=files-a-b-7c632cc7')
    """
    text = "_".join(f"{path}={value}" for path, value in settings.items())
    name = re.sub(r"[^\w.=+-]+", "-", text)[:_LONGEST_NAME]
    return name if name == text else f"{name}-{blake2b(text.encode(), digest_size=4).hexdigest()}"


def _carried_out(cell: SweepCell, title: str, cache: Cache, *, quiet: bool) -> Summary | str:
    """The figures of a cell, which is begun, resumed or only read; or why it diverged."""
    sinks, log = sinks_of(cell.run, cell.spec, quiet=quiet, title=title), discard if quiet else print_to_stderr
    try:
        if not (cell.folder / "run.json").exists():
            run_lifecycle.run(cell.run, engine=cell.spec, out=cell.folder, sinks=sinks, command=sys.argv, cache=cache, log=log)
        else:
            opened = RunFolder.open(cell.folder)
            opened.same_run(as_recorded(cell.run, opened.run))
            if not opened.finished:
                run_lifecycle.resume(cell.folder, engine=cell.spec, sinks=sinks, command=sys.argv, log=log)
    except TrainingDiverged as error:
        return str(error)
    return read_summary(cell.folder)


def _best(results: Sequence[Summary | str]) -> int | None:
    """The number of the cell with the lowest validation loss."""
    losses = [result.val_loss if isinstance(result, Summary) else math.nan for result in results]
    finite = [number for number, loss in enumerate(losses) if math.isfinite(loss)]
    return min(finite, key=losses.__getitem__, default=None)


def _record(root: Path, cells: Sequence[SweepCell], results: Sequence[Summary | str]) -> dict[str, Any]:
    listed = [
        {
            "settings": dict(cell.settings),
            "folder": str(cell.folder),
            **({"summary": result.to_dict()} if isinstance(result, Summary) else {"error": result}),
        }
        for cell, result in zip(cells, results, strict=True)
    ]
    return {"folder": str(root), "best": _best(results), "cells": listed}


def _print(root: Path, cells: Sequence[SweepCell], results: Sequence[Summary | str]) -> None:
    table = Table(*map(escape, cells[0].settings), "val loss", "tokens", "sent per island", "time", box=None, header_style="bold")
    best = _best(results)
    for number, (cell, result) in enumerate(zip(cells, results, strict=True)):
        figures = ["diverged"]
        if isinstance(result, Summary):
            time = "-" if result.time_s is None else f"{human_time(result.time_s)} ({result.clock})"
            figures = [human_loss(result.val_loss, 4), human_count(result.tokens), human_bytes(result.sent_bytes_per_island), time]
        table.add_row(*map(escape, cell.settings.values()), *figures, style="bold" if number == best else None)
    print_table(table)
    if best is not None:
        print(f"lowest loss: {cells[best]}")
    print(f"folder: {root}")


def _result_text(result: Summary | str) -> str:
    return (
        f"val loss {human_loss(result.val_loss, 4)}" if isinstance(result, Summary) else f"diverged ({result.partition('. ')[0]})"
    )
