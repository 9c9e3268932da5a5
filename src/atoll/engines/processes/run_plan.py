"""What all processes of a run are to do: the first rank makes it up, and tells the others. What it refuses it tells them too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.protocols import Workload
from atoll.engines.driver import check_workload, is_finished, refuse_impossible
from atoll.engines.processes.process_group import init_process_group, torchrun_rank, torchrun_world_size
from atoll.engines.processes.spec import Dist, check_backend, place_of, placed, write_place
from atoll.engines.processes.transport import first_sentence
from atoll.engines.warm_start import Cache
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run

_ORDER = "order"


@dataclass(frozen=True)
class Order:
    """What all processes are to do, as the first rank tells it.

    Attributes:
        run: the Run, placed on so many processes.
        place: how.
        folder: of the run.
        finished: nothing is left to do.
    """

    run: Run
    place: Dist
    folder: Path
    finished: bool = False

    def to_text(self) -> str:
        place = {name: getattr(self.place, name) for name in self.place.__dataclass_fields__}
        return json.dumps({"run": to_json(self.run), "place": place, "folder": str(self.folder), "finished": self.finished})

    @staticmethod
    def from_text(text: str) -> Order:
        record = json.loads(text)
        return Order(from_json(record["run"]), Dist(**record["place"]), Path(record["folder"]), record["finished"])


Prepare: TypeAlias = Callable[[int, Cache], AbstractContextManager[Order]]
"""Asked on the first rank, with the number of processes and what keeps the data that it reads. It makes or opens the run's folder,
and holds it."""


# ------------------------------------------------------------------------------------------------------------------ making up


def create_folder(
    run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None, cache: Cache | None = None
) -> Path:
    """A new folder for this run on so many processes as the place says. What is impossible is refused before it is there."""
    mine = placed(run, place.processes or run.cluster.devices)
    check_backend(mine.resolved, place)
    refuse_impossible(mine.resolved, workload, cache or Cache())
    RunFolder.create(folder, to_json(mine), list(command))
    write_place(folder, place)
    return folder


def start_order(run: Run, place: Dist, folder: Path, command: Sequence[str], workload: Workload | None = None) -> Prepare:
    """What begins a new run, in a new folder."""

    @contextmanager
    def prepare(size: int, cache: Cache) -> Iterator[Order]:
        here = replace(place, processes=size)
        create_folder(run, here, folder, command, workload, cache)
        with RunFolder(folder).lock():
            yield Order(placed(run, size), here, folder)

    return prepare


def resume_order(folder: Path, place: Dist | None, command: Sequence[str], workload: Workload | None = None) -> Prepare:
    """What goes on with a run, perhaps by another number of processes; by default as before. A folder that is in use is left as it
    is."""

    @contextmanager
    def prepare(size: int, cache: Cache) -> Iterator[Order]:
        opened = RunFolder.open(folder)
        with opened.lock():
            check_same_workload(opened, workload)
            run, here = from_json(opened.run_json), replace(place or place_of(folder), processes=size)
            if is_finished(opened):
                yield Order(run, here, folder, finished=True)
                return
            mine = placed(run, size)
            check_backend(mine.resolved, here)
            opened.resumed(list(command))
            write_place(folder, here)
            yield Order(mine, here, folder)

    return prepare


def check_same_workload(folder: RunFolder, workload: Workload | None) -> None:
    """Check that a run goes on with a workload of its own if it began with one."""
    try:
        check_workload(folder, workload)
    except ConfigError as error:
        raise ConfigError(
            f"{error} A run of real processes goes on by atoll.resume_on, in a script that torchrun starts."
        ) from error


# -------------------------------------------------------------------------------------------------------------------- telling


def come_together(limit_s: float) -> tuple[Store, int, int]:
    """Find the other processes, as `init_process_group` does. Who has not come when the limit is over is named."""
    try:
        found, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    except RuntimeError as error:
        raise ExchangeFailed(
            f"rank {torchrun_rank()} of {torchrun_world_size()} did not find all others within {limit_s:g} s. See that all of them "
            f"were started, that they reach the first rank's machine, and that they were given its address; or raise "
            f"--start-limit. ({first_sentence(str(error))})"
        ) from error
    # It is kept until all have met: where the first rank keeps the store itself, both are one.
    wait_for_all(PrefixStore("atoll", found), rank, size, limit_s)
    return init_process_group(limit_s)


def wait_for_all(store: Store, rank: int, size: int, limit_s: float) -> None:
    """Wait until every rank has said that it is here."""
    words = [f"here/{other}" for other in range(size)]
    try:
        store.set(words[rank], "")
        store.wait(words, timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise ExchangeFailed(f"rank {rank} {_who_is_missing(store, words, limit_s)}") from error


def _who_is_missing(store: Store, words: Sequence[str], limit_s: float) -> str:
    try:
        here = [other for other, word in enumerate(words) if store.check([word])]
    except RuntimeError:
        return "waited for the others, and the first rank's machine, or what was started there, has ended."
    missing = [other for other in range(len(words)) if other not in here]
    return (
        f"waited {limit_s:g} s for ranks {missing} of {len(words)}, which have not come; ranks {here} are here. See that all were "
        f"started, or raise --start-limit."
    )


def give_order(store: Store, prepare: Prepare, size: int, cache: Cache, held: ExitStack) -> Order:
    """On the first rank: make up what is to be done, and tell the others. `held` then holds the folder."""
    try:
        order = held.enter_context(prepare(size, cache))
    except Exception as error:
        store.set(_ORDER, json.dumps({"refused": str(error) or type(error).__name__}))
        raise
    store.set(_ORDER, order.to_text())
    return _with_limit(store, order)


def take_order(store: Store, rank: int) -> Order:
    """On another rank: hear what is to be done."""
    try:
        text = store.get(_ORDER).decode()
    except RuntimeError as error:
        raise ExchangeFailed(
            f"rank {rank} was not told what to do: rank 0 has ended, or takes longer than --start-limit. "
            f"({first_sentence(str(error))})"
        ) from error
    refused = json.loads(text).get("refused")
    if refused is not None:
        raise ConfigError(f"rank 0 has refused the run: {refused}")
    return _with_limit(store, Order.from_text(text))


def _with_limit(store: Store, order: Order) -> Order:
    """Only now all ranks know how long they are to wait for each other."""
    store.set_timeout(timedelta(seconds=order.place.start_limit_s))
    return order
