"""Runs as cells of a record: a row is a recipe with settings, a cell is a row with a seed.

Cells are known by what they do, not by how it was asked for: two rows that come to the same Run share their cells.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from atoll import recipes
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError, TrainingDiverged
from atoll.core.events import Evaluated, Event, Progress, RoundFinished
from atoll.engines import driver
from atoll.engines.warm_start import Cache
from atoll.runs.run import Run, candidates
from atoll.telemetry.overlap import overlap_of
from gpu_device import tidy
from progress import Watch
from record import Record
from seed_statistics import Sample

Point = tuple[float, int, float]
"""Of a curve: virtual time in seconds, local updates of all islands, validation loss."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe with some settings changed, as `atoll run RECIPE --set ...` would.

    Attributes:
        recipe: its name.
        base: settings that it shares with other rows.
        settings: settings that make it what it is.
        name: what it is called while it runs; by default its settings.
    """

    recipe: str
    base: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    name: str = ""

    def run(self, seed: int) -> Run:
        """The Run, with nothing left open."""
        return replace(override(recipes.recipe(self.recipe), [*self.base, *self.settings], candidates), seed=seed).resolved

    @property
    def command(self) -> str:
        """How anybody runs it; add `--seed`."""
        return shlex.join(
            ["atoll", "run", self.recipe, *(part for each in (*self.base, *self.settings) for part in ("--set", each))]
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a row: the summaries of the seeds that ended well, and of the others what went wrong. Curves and islands' times,
    one for each of the former, are there if they were asked for."""

    row: Row
    summaries: tuple[dict[str, Any], ...]
    errors: tuple[str, ...] = ()
    curves: tuple[tuple[Point, ...], ...] = ()
    islands: tuple[tuple[dict[str, Any], ...], ...] = ()

    @property
    def loss(self) -> Sample | None:
        """Validation loss over seeds; None if any of them diverged, since the mean of the others would flatter the row."""
        return None if self.errors or not self.summaries else Sample(tuple(summary["val_loss"] for summary in self.summaries))

    def mean(self, figure: str) -> float | None:
        """The mean of a figure over the seeds that have it."""
        values = [summary[figure] for summary in self.summaries if summary[figure] is not None]
        return fmean(values) if values else None

    @property
    def tokens(self) -> float | None:
        """Trained on in all, the warm start included."""
        tokens, warm = self.mean("tokens"), self.mean("warm_start_tokens")
        return None if tokens is None or warm is None else tokens + warm

    @property
    def staleness(self) -> float | None:
        """How many updates an arrival had missed, on average; None where there is no hub."""
        values = [summary["asynchrony"]["staleness"]["mean"] for summary in self.summaries if "asynchrony" in summary]
        return fmean(values) if values else None


LAN = ("cluster.link.bandwidth_mbit_per_s=100",)
"""The link of the demo's recipes in records up to 2026-11-17. Benchmarks whose figures the docs quote keep it."""

KEY_VERSION = 2
"""Cells of earlier versions had keys that depended on the paths of modules. They are found by their recipe, settings and seed."""


def key_of(run: Run) -> str:
    """A digest of all settings of a Run. It does not depend on the modules in which types are defined."""
    return blake2b(json.dumps(_short_types(to_json(run)), sort_keys=True).encode(), digest_size=12).hexdigest()


def _short_types(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: item.rpartition(".")[2] if name == "type" else _short_types(item) for name, item in node.items()}
    return [_short_types(item) for item in node] if isinstance(node, list) else node


def cells_by_key(record: Record) -> dict[str, dict[str, Any]]:
    """All cells of a record that are runs, by the key that their Run has now."""
    cells = {}
    for cell in record.cells:
        if cell.get("key_version") == KEY_VERSION:
            cells[cell["key"]] = cell
        elif "settings" in cell:
            try:
                base = LAN if cell["recipe"].startswith("demo-") else ()
                cells[key_of(Row(recipe=cell["recipe"], base=base, settings=tuple(cell["settings"])).run(cell["seed"]))] = cell
            except ConfigError:  # settings that there are no more
                continue
    return cells


def carry_out(
    rows: Sequence[Row],
    seeds: Sequence[int] | Mapping[Row, Sequence[int]],
    record: Record,
    title: str,
    *,
    quiet: bool = False,
    curves: bool = False,
    islands: bool = False,
    processes: int = 1,
    until_s: float | None = None,
    can: Callable[[Run], bool] = lambda run: True,
    warm: Path | None = None,
) -> dict[Row, Outcome]:
    """Runs what the record does not hold yet. Every row is looked at before anything runs.

    Args:
        rows: what to run.
        seeds: once with each; or each row with its own.
        record: where cells are kept.
        title: of the benchmark, for whoever watches.
        quiet: show no progress.
        curves: keep every evaluation.
        islands: keep where each island's time went.
        processes: how many cells run at a time. On a CPU what comes out does not depend on it; on a GPU, which computes nothing
            twice to the same bits, not more than from one time to the next.
        until_s: begin no further cell after this moment of the monotonic clock. Rows then have the seeds that are there.
        can: whether a Run can be carried out here; one that cannot is left to another machine.
        warm: a folder for warm starts, which processes and later commands share. A GPU makes no two alike.
    """
    of = seeds if isinstance(seeds, Mapping) else dict.fromkeys(rows, seeds)
    every = list(dict.fromkeys(seed for row in rows for seed in of[row]))
    runs = {(row, seed): row.run(seed) for seed in every for row in rows if seed in of[row]}
    cells, missing = cells_by_key(record), dict[str, tuple[Row, int]]()
    for at, run in runs.items():
        if key_of(run) not in cells and can(run):
            missing.setdefault(key_of(run), at)
    work = {key: runs[at] for key, at in missing.items()}
    with Watch(title, len(missing), quiet=quiet) as watch:
        if len(missing) < len(runs):
            watch.say(f"{len(missing)} cells to run; the record has the others, or rows share them")
        if processes == 1:
            done = _here(work, missing, watch, until_s, Cache(warm))
        else:
            done = _elsewhere(work, processes, watch, until_s, warm)
        for key, cell in done:
            row, seed = missing[key]
            kept = {name: value for name, value in cell.items() if {"curve": curves, "islands": islands}.get(name, True)}
            made = {"recipe": row.recipe, "settings": [*row.base, *row.settings], "seed": seed, **kept}
            cells[key] = record.add(key, {"key_version": KEY_VERSION, **made})
            told = f"{_name(row, seed)}: {_in_words(cell)}"
            record.say(told)
            watch.end(told)
    return {row: _outcome(row, [cells.get(key_of(runs[row, seed])) for seed in of[row]]) for row in rows}


def _here(
    work: Mapping[str, Run], named: Mapping[str, tuple[Row, int]], watch: Watch, until_s: float | None, shared: Cache
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One cell after the other in this process."""
    for key, run in work.items():
        if until_s is not None and time.monotonic() > until_s:
            return
        watch.begin(_name(*named[key]))
        yield key, _cell(run, shared, watch)


def _elsewhere(
    work: Mapping[str, Run], processes: int, watch: Watch, until_s: float | None, warm: Path | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Several cells at a time, each in a process of one thread, as they are done."""
    watch.begin(f"{processes} cells at a time")
    waiting, begun = iter(work.items()), dict[Future[dict[str, Any]], str]()
    failure: BaseException | None = None  # those that were begun beside it are kept all the same
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while True:
                over = failure is not None or (until_s is not None and time.monotonic() > until_s)
                for key, run in islice(waiting, 0 if over else processes - len(begun)):
                    begun[pool.submit(_cell_apart, to_json(run), warm)] = key
                if not begun:
                    break
                for future in wait(begun, return_when=FIRST_COMPLETED).done:
                    key, failure = begun.pop(future), failure or future.exception()
                    if future.exception() is None:
                        yield key, future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _cell_apart(run: dict[str, Any], warm: Path | None) -> dict[str, Any]:
    given = from_json(run)
    with Watch("", 1, quiet=True) as watch:
        cell = _cell(given, _own_cache(warm), watch)
    tidy(given.train.device)  # which others share
    return cell


@cache
def _own_cache(warm: Path | None) -> Cache:
    """What the cells of one process share: text and warm starts."""
    return Cache(warm)


def _name(row: Row, seed: int) -> str:
    return f"{row.name or ' '.join([row.recipe, *row.settings])}, seed {seed}"


def _cell(run: Run, shared: Cache, watch: Watch) -> dict[str, Any]:
    """Weights and checkpoints of a cell are of no use later: its folder goes when it is done."""
    curve, times = _Curve(), _Times()
    with TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        try:
            sinks = [_Steps(watch, run.train.steps), curve, times]
            result = driver.run(run, out=Path(folder) / "run", sinks=sinks, cache=shared)
        except TrainingDiverged as error:
            return {"error": str(error)}
        summary = result.summary.to_dict()
    del summary["run_dir"]
    if not math.isfinite(result.summary.val_loss):
        return {"error": f"the validation loss is {result.summary.val_loss}"}
    return {"summary": summary, "curve": curve.points, "islands": times.islands()}


def _outcome(row: Row, cells: Sequence[dict[str, Any] | None]) -> Outcome:
    found = list(takewhile(lambda cell: cell is not None, cells))  # the first seeds: rows are compared seed by seed
    summaries = tuple(cell["summary"] for cell in found if "summary" in cell)
    curves = tuple(tuple((time_s, updates, loss) for time_s, updates, loss in cell["curve"]) for cell in found if "curve" in cell)
    islands = tuple(tuple(cell["islands"]) for cell in found if "islands" in cell)
    return Outcome(row, summaries, tuple(cell["error"] for cell in found if "error" in cell), curves, islands)


def _in_words(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return f"diverged ({cell['error'].split('. ')[0]})"
    return f"loss {cell['summary']['val_loss']:.4f} in {cell['summary']['wall_time_s']:.1f} s"


class _Steps:
    """Tells a Watch how far a run is."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self._watch, self._steps = watch, steps

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundFinished):
            self._watch.advance(event.steps / self._steps, f"step {event.steps} of {self._steps}, loss {event.loss:.3f}")
        elif isinstance(event, Progress) and event.phase.startswith("warm"):
            self._watch.advance(0.0, f"warm start, step {event.done} of {event.total}")


class _Curve:
    """Keeps the evaluations of a run."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.points.append((event.time_s, event.local_updates, event.loss))


class _Times:
    """Keeps where each island's time went."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def islands(self) -> list[dict[str, Any]]:
        return [island.to_dict() for island in overlap_of(self._events).islands]


def seeds_parser(doc: str | None, name: str, page: str) -> argparse.ArgumentParser:
    """Options of a benchmark whose cells are rows with seeds.

    Args:
        doc: the script's docstring, whose first line describes it.
        name: of the record.
        page: of the docs, which has marks of that name.

    >>> options = seeds_parser("What it is for.", "acco_demo", "docs/acco.md").parse_args(["--set", "train.steps=4"])
    >>> options.seeds, options.set, options.processes, options.record
    ([0, 1, 2], ['train.steps=4'], 2, None)
    """
    first = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--processes", type=int, default=2, help="cells that run at a time")
    parser.add_argument("--record", type=Path, help=f"the record's folder; None: records/<today>_{name}")
    parser.add_argument("--docs", type=Path, help=f"a page whose marks are filled with the tables, such as {page}")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser
