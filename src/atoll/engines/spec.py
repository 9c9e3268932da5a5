"""How a run is carried out: one frozen spec per engine. The run's folder keeps it in engine.json, beside the Run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.serialization import write_text
from atoll.engines.elastic.spec import Elastic
from atoll.engines.processes.spec import Processes
from atoll.engines.ray.spec import Ray
from atoll.engines.simulator.spec import Simulator
from atoll.runs.run import Run

FORMAT = 1
_FILE = "engine.json"


@runtime_checkable
class EngineSpec(Protocol):
    """The settings of one engine. They are set by path like a Run's: `--set engine.step_delay=0.5`."""

    name: ClassVar[str]

    def fitted(self, run: Run) -> Run:
        """The run with the islands that this engine will have. Raises ConfigError if the engine cannot carry it out."""
        ...


SPECS: Mapping[str, type[EngineSpec]] = {spec.name: spec for spec in (Simulator, Processes, Elastic, Ray)}
SPELLINGS = {"sim": "simulator", "dist": "processes"}
"""Former names of engines, which users may go on typing."""


def spec_named(name: str) -> EngineSpec:
    """The engine of this name, with default settings."""
    name = SPELLINGS.get(name, name)
    if name not in SPECS:
        raise ConfigError(f"there is no engine {name!r}. There are: {', '.join(SPECS)}.")
    return SPECS[name]()


def write_spec(folder: Path, spec: EngineSpec) -> None:
    write_text(folder / _FILE, json.dumps({"format": FORMAT, "engine": spec.name, "settings": asdict(spec)}) + "\n")  # type: ignore[call-overload]


def read_spec(folder: Path) -> EngineSpec:
    """The spec that a run's folder keeps."""
    path = folder / _FILE
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {_FILE}: it is no run's folder, or one of an older version of atoll.") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {record.get('format')}, and this version of atoll reads format {FORMAT}. Resume with the version "
            f"that wrote it (see source.txt there)."
        )
    return SPECS[record["engine"]](**record["settings"])


def processes_started(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes that torchrun, or a tool like it, started together with this one; 1 without it.

    >>> processes_started({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "first.example"})
    2
    """
    size = environment.get("WORLD_SIZE", "")
    told = "RANK" in environment and ("TORCHELASTIC_RUN_ID" in environment or "MASTER_ADDR" in environment)
    return int(size) if told and size.isdecimal() else 1


def refuse_torchrun(spec: EngineSpec) -> None:
    """Refuse an engine that starts its own processes, or needs none, where torchrun started several: each would repeat the run."""
    processes = processes_started()
    if processes > 1:
        raise ConfigError(
            f"torchrun, or a tool like it, started {processes} processes (WORLD_SIZE={os.environ['WORLD_SIZE']}, "
            f"RANK={os.environ['RANK']}), and each of them would carry out the whole run with --engine {spec.name}. Use --engine "
            f"processes, or start the command once, without torchrun."
        )
