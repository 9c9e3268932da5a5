"""What all processes of a run are to do: the first rank makes it up, and tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.protocols import Workload
from atoll.runs.execute import refuse_impossible
from atoll.runs.folder import RunFolder
from atoll.runs.place import Dist, placed, write_place
from atoll.runs.plain import from_json, to_json
from atoll.runs.run import Run
from atoll.runs.warm import Cache


@dataclass(frozen=True)
class Order:
    """What all processes are to do, as the first rank tells it.

    Attributes:
        run: the Run, placed on so many processes.
        place: how.
        folder: of the run.
    """

    run: Run
    place: Dist
    folder: Path

    def to_text(self) -> str:
        place = {name: getattr(self.place, name) for name in self.place.__dataclass_fields__}
        return json.dumps({"run": to_json(self.run), "place": place, "folder": str(self.folder)})

    @staticmethod
    def from_text(text: str) -> Order:
        record = json.loads(text)
        return Order(from_json(record["run"]), Dist(**record["place"]), Path(record["folder"]))


def create_folder(run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None) -> Path:
    """A new folder for this run on so many processes as the place says. What is impossible is refused before it is there."""
    mine = placed(run, place.processes or run.cluster.devices)
    refuse_impossible(mine.resolved, workload, Cache())
    RunFolder.create(folder, to_json(mine), list(command))
    write_place(folder, place)
    return folder


def start_order(
    run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None
) -> Callable[[int], Order]:
    """What begins a new run, in a new folder."""

    def prepare(size: int) -> Order:
        here = replace(place, processes=size)
        create_folder(run, here, folder, command, workload)
        return Order(placed(run, size), here, folder)

    return prepare


def resume_order(folder: Path, place: Dist, command: Sequence[str]) -> Callable[[int], Order]:
    """What goes on with a run, perhaps by another number of processes."""

    def prepare(size: int) -> Order:
        opened = RunFolder.open(folder)
        opened.resumed(list(command))
        here = replace(place, processes=size)
        write_place(folder, here)
        return Order(placed(from_json(opened.run_json), size), here, folder)

    return prepare
