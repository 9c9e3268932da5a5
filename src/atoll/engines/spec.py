"""How a run is carried out: one frozen spec per engine. The run's folder keeps it in engine.json, beside the Run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.config.type_checks import hints_of, settable
from atoll.core.errors import CheckpointError, ConfigError, one_line
from atoll.core.verified_files import read_record, write_record
from atoll.engines.elastic.spec import Elastic
from atoll.engines.processes.spec import Processes
from atoll.engines.ray.spec import Ray
from atoll.engines.simulator.spec import Simulator
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run

FORMAT = 1
_FILE = "engine.json"


@runtime_checkable
class EngineSpec(Protocol):
    """The settings of one engine. They are set by path like a Run's: `--set engine.step_delay=0.5`."""

    name: ClassVar[str]
    resizable: ClassVar[bool]  # another number of islands may resume a run
    stops_processes: ClassVar[bool]  # the command that starts a run stops its processes, also on SIGTERM and SIGHUP
    runs_on_ranks: ClassVar[bool]  # its processes are ranks, which torchrun may start; rank 0 shows the progress

    def fitted(self, run: Run) -> Run:
        """The run with the islands that this engine will have. Raises ConfigError if the engine cannot carry it out."""


SPECS: Mapping[str, type[EngineSpec]] = {spec.name: spec for spec in (Simulator, Processes, Elastic, Ray)}
SPELLINGS = {"sim": "simulator", "dist": "processes"}
"""Former names of engines, which users may go on typing."""


def spec_named(name: str) -> EngineSpec:
    """The engine of this name, with default settings."""
    name = SPELLINGS.get(name, name)
    if name not in SPECS:
        raise ConfigError(f"there is no engine {name!r}. There are: {', '.join(SPECS)}.")
    return SPECS[name]()


@dataclass(frozen=True)
class EngineSettings:
    """Gives an engine's settings the paths that --set knows them by."""

    engine: EngineSpec


def with_settings(spec: EngineSpec, settings: Sequence[str]) -> EngineSpec:
    """The spec with these settings, such as engine.step_delay=0.5."""
    return override(EngineSettings(spec), settings).engine


def write_spec(folder: Path, spec: EngineSpec) -> None:
    settings = {field.name: to_json(getattr(spec, field.name)) for field in fields(spec)}  # type: ignore[arg-type]
    write_record(folder / _FILE, {"format": FORMAT, "engine": spec.name, "settings": settings})


def read_spec(folder: Path) -> EngineSpec:
    """The spec that a run's folder keeps."""
    path = folder / _FILE
    try:
        record = read_record(path)
        version = record.get("format")
        if version == FORMAT:
            kind, settings = SPECS[record["engine"]], dict(record["settings"])
            unknown = settings.keys() - settable(kind).keys()
            if unknown:
                raise ConfigError(f"engine {kind.name} has no setting {', '.join(sorted(unknown))}")
            return kind(**{name: from_json(value, name, hints_of(kind)[name]) for name, value in settings.items()})
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {_FILE}: it is no run's folder, or one of an older version of atoll.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}). It holds the name and the settings of one of the engines "
            f"{', '.join(SPECS)}. Restore it from a copy, or start a new run."
        ) from error
    raise CheckpointError(
        f"{path} has format {str(version)[:50]}, and this version of atoll reads format {FORMAT}. Resume with the version that "
        f"wrote it (see source.txt there)."
    )


def saved_spec(folder: Path) -> EngineSpec:
    """The spec of a run that is resumed. Of the ranks that torchrun started only rank 0 needs the folder."""
    if processes_started() > 1 and not folder.is_dir():
        return Processes()
    RunFolder.open(folder).refuse_own_loop()
    return read_spec(folder)


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or a tool that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys() and bool({"TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & environment.keys())


def processes_started(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes that torchrun, or a tool like it, started together with this one; 1 without it.

    >>> processes_started({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "first.example"})
    2
    """
    size = environment.get("WORLD_SIZE", "")
    return int(size) if started_by_torchrun(environment) and size.isdecimal() else 1


def refuse_torchrun(spec: EngineSpec) -> None:
    """Refuse an engine that starts its own processes, or needs none, where torchrun started several: each would repeat the run."""
    processes = processes_started()
    if processes > 1:
        raise ConfigError(
            f"torchrun, or a tool like it, started {processes} processes (WORLD_SIZE={os.environ['WORLD_SIZE']}, "
            f"RANK={os.environ['RANK']}), and each of them would carry out the whole run with --engine {spec.name}. Use --engine "
            f"processes, or start the command once, without torchrun."
        )
