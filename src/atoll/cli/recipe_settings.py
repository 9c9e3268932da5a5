"""The Run and the engine's spec that the arguments of a command describe."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from atoll import recipes
from atoll.core.config.describe_settings import Presets
from atoll.core.config.json_records import find_type, from_json
from atoll.core.config.overrides import override
from atoll.core.config.toml_settings import assignments, read_toml
from atoll.core.config.type_checks import shown, shown_text
from atoll.core.errors import ConfigError
from atoll.engines.spec import EngineSpec, read_spec, spec_named, with_settings
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.runs.folder import RunFolder, is_own_loop, own_loop_problem
from atoll.runs.run_settings import Run, candidates
from atoll.telemetry.run_progress import read_settings_file
from atoll.telemetry.summary import read_summary

PRESETS: Presets = {
    "model": {"tiny": GPT.tiny, "m20": GPT.m20, "m60": GPT.m60, "m150": GPT.m150, "m400": GPT.m400, "small": MLP.small}
}
"""`--set model=m60` sets the whole model."""
_ENGINE = "engine."


class Described(NamedTuple):
    """What a recipe's name or a file describes: a Run, and the engine if the file names one."""

    run: Run
    engine: EngineSpec | None = None


def described(name: str) -> Described:
    """The recipe of this name, or what a TOML file or the run.json of an earlier run describes."""
    path = Path(name)
    if name not in recipes.ALL and (path / "run.json").is_file():
        raise ConfigError(
            f"{shown_text(name)} is a folder. `atoll run --resume {name}` continues the run in it; `atoll run {path / 'run.json'}` "
            f"begins it again."
        )
    if name in recipes.ALL or path.suffix not in (".toml", ".json"):
        return Described(recipes.recipe(name))
    if path.suffix == ".json":
        record, beside = read_settings_file(path), path.with_name("engine.json")
        if is_own_loop(record):
            raise ConfigError(own_loop_problem(path.parent))
        return Described(from_json(record, hint=Run), read_spec(path.parent) if beside.exists() else None)
    table = read_toml(path)
    try:
        return _from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_table(table: dict[str, Any]) -> Described:
    base, engine = table.get("recipe"), table.pop("engine", None)
    if not isinstance(base, str):
        raise ConfigError(
            f"`recipe` names the recipe that the file begins with, and is missing. There are: {', '.join(recipes.ALL)}."
        )
    run = override(recipes.recipe(base), list(assignments(table)), candidates, PRESETS)
    if engine is None:
        return Described(run)
    if not isinstance(engine, dict) or not isinstance(name := engine.pop("name", None), str):
        raise ConfigError('[engine] has no name. Write name = "simulator", "processes", "elastic" or "ray" there.')
    return Described(run, with_settings(spec_named(name), list(assignments(engine, "engine"))))


def spec_of(name: str, engine: str | None) -> EngineSpec:
    """The engine that the command names, else the one of the file."""
    found = described(name).engine
    asked = spec_named(engine or (found.name if found else "simulator"))
    return found if found is not None and found.name == asked.name else asked


def run_of(name: str, settings: Sequence[str], seed: int | None, among: Sequence[str] | None = None) -> Run:
    """The recipe, or the file, with these settings and this seed.

    Args:
        settings: as --set has them. RECIPE:PATH=VALUE is for that recipe alone; engine.PATH=VALUE is for the engine.
        among: all recipes of the command; None: this one alone.
    """
    run = described(name).run
    meant = [_meant_for(setting, among or [name]) for setting in settings if not setting.startswith(_ENGINE)]
    run = override(run, [setting for recipe, setting in meant if recipe in (None, name)], candidates, PRESETS)
    return run if seed is None else replace(run, seed=seed)


def _meant_for(setting: str, among: Sequence[str]) -> tuple[str | None, str]:
    """The recipe that a setting is for, or None for all of them, and the setting without its recipe."""
    path, equals, value = setting.partition("=")
    recipe, colon, path = path.rpartition(":")
    if not colon:
        return None, setting
    if recipe not in recipes.ALL:
        raise ConfigError(
            f"{shown_text(setting)}: a recipe stands before the colon, and there is none called {shown(recipe)}. "
            f"{recipes.suggestion(recipe)}"
        )
    if recipe not in among:
        raise ConfigError(
            f"{shown_text(setting)}: this is for {recipe}, which does not run here. The command runs "
            f"{', '.join(dict.fromkeys(among))}. Leave the setting out, or name one of these."
        )
    return recipe, f"{path}{equals}{value}"


def spec_with(spec: EngineSpec, settings: Sequence[str], processes: int | None) -> EngineSpec:
    """The spec with the settings that are for the engine, and this number of processes."""
    given = [setting for setting in settings if setting.startswith(_ENGINE)]
    if processes is not None:
        if not any(field.name == "processes" for field in fields(spec)):  # type: ignore[arg-type]
            raise ConfigError(
                f"--processes {processes}: --engine {spec.name} runs in one process. Add --engine processes, elastic or ray, or "
                f"leave it out."
            )
        given.append(f"engine.processes={processes}")
    return with_settings(spec, given)


def run_settings(settings: Sequence[str]) -> list[str]:
    """The settings that are for the Run, not for the engine."""
    return [setting for setting in settings if not setting.startswith(_ENGINE)]


def planned_runs(what: Sequence[str], settings: Sequence[str], seed: int | None) -> list[Run | Path]:
    """The runs to carry out, and the folders of finished runs, in the order given."""
    folders = [item for item in what if item not in recipes.ALL and Path(item).is_dir()]
    names = [item for item in what if item not in folders]
    unknown = [name for name in names if name not in recipes.ALL and not Path(name).is_file()]
    if unknown:
        raise ConfigError(
            f"there is no recipe {shown(unknown[0])}, and no run's folder or file of that name. "
            f"{recipes.suggestion(unknown[0])} Or give the folder of a finished run, or a TOML file."
        )
    for name in names:
        if (engine := described(name).engine) is not None and engine.name != "simulator":
            raise ConfigError(f"{name} is for the engine {engine.name}, and compare simulates. Run it, and give its folder.")
    if not names and (settings or seed is not None):
        given = "--seed" if not settings else f"--set {settings[0]}"
        raise ConfigError(
            f"{given} with folders alone ({', '.join(folders)}): these runs are finished, and nothing can be set any more. Leave "
            f"it out, or name a recipe to run."
        )
    for folder in folders:
        read_summary(folder)
    return [Path(item) if item in folders else run_of(item, settings, seed, among=names) for item in what]


def check_imported(folder: Path) -> None:
    """Refuse a run of a user's classes whose module is not imported, with the command that imports it first."""
    for name in _type_names(RunFolder.open(folder).run_json):
        module = name.rpartition(".")[0]
        of_a_script = "__main__" in name or "<locals>" in name
        if find_type(name) is not None or (module in sys.modules and not of_a_script):
            continue
        why = f"{folder} is a run of {name}, which is not a class of atoll, and a file cannot make atoll import a module."
        if of_a_script:
            raise ConfigError(f"{why} Only the script that defines this class can open it. Put the class into a module.")
        command = f'python -c "import {module}; from atoll.cli.main import main; main()" {shlex.join(sys.argv[1:])}'
        raise ConfigError(f"{why} Import the module first, in the folder where it lies: {command}")


def _type_names(node: Any) -> Iterator[str]:
    """The full names of all users' classes in a Run as JSON."""
    if isinstance(node, dict) and "." in str(node.get("type", "")):
        yield str(node["type"])
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _type_names(inner)
