"""Runs as cells of a record: a row is a recipe with settings, a cell is a row with a seed.

The whole Run identifies a cell: two rows with the same Run share their cells.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

from atoll import recipes
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError, ConfigError, TrainingDiverged
from atoll.core.events import Compared, Evaluated, Event, Progress, RoundFinished
from atoll.data.partition import KMeans
from atoll.engines import run_lifecycle
from atoll.engines.warm_start_training import Cache
from atoll.runs.run_settings import Run, candidates
from atoll.telemetry.sync_summary import overlap_of
from gpu_device import free_memory
from progress import CellProgress
from record import Record, benchmark_parser
from seed_statistics import Sample

K = TypeVar("K", bound=Hashable)

Point = tuple[float, int, float]
"""Of a curve: virtual time in seconds, local updates of all islands, validation loss."""
Deltas = tuple[int, float, float, float | None]
"""Of a round: its number, the mean norm of the islands' deltas, the norm of their mean, the mean cosine of all pairs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe with some settings changed, as by `atoll run RECIPE --set ...`."""

    recipe: str
    base: tuple[str, ...] = ()  # settings that it shares with other rows
    settings: tuple[str, ...] = ()  # settings of its own
    name: str = ""  # shown while it runs; empty: its settings

    def run(self, seed: int) -> Run:
        """The resolved Run."""
        return _resolved(self.recipe, (*self.base, *self.settings), seed)

    @property
    def command(self) -> str:
        """The command that runs it, but for `--seed`."""
        return shlex.join(
            ["atoll", "run", self.recipe, *(part for each in (*self.base, *self.settings) for part in ("--set", each))]
        )


@cache
def _resolved(recipe: str, settings: tuple[str, ...], seed: int) -> Run:
    return replace(override(recipes.recipe(recipe), list(settings), candidates), seed=seed).resolved


@dataclass(frozen=True)
class Outcome:
    """The results of a row: a summary for each seed that finished, an error for each that diverged."""

    row: Row
    summaries: tuple[dict[str, Any], ...]
    errors: tuple[str, ...] = ()
    curves: tuple[tuple[Point, ...], ...] = ()  # one per summary, if they were kept
    islands: tuple[tuple[dict[str, Any], ...], ...] = ()  # times of each island, one tuple per summary, if they were kept
    sent: tuple[tuple[float, ...], ...] = ()  # bytes that an island had sent at each point of a curve, if they were kept
    deltas: tuple[tuple[Deltas, ...], ...] = ()  # one per summary, if they were kept

    @property
    def loss(self) -> Sample | None:
        """Validation loss over seeds; None if a seed diverged, since the mean of the others would flatter the row."""
        return None if self.errors or not self.summaries else Sample(tuple(summary["val_loss"] for summary in self.summaries))

    def mean(self, figure: str) -> float | None:
        """The mean of a figure over the seeds that have it."""
        values = [summary[figure] for summary in self.summaries if summary[figure] is not None]
        return fmean(values) if values else None

    @property
    def tokens(self) -> float | None:
        """All tokens trained on, the warm start included."""
        tokens, warm = self.mean("tokens"), self.mean("warm_start_tokens")
        return None if tokens is None or warm is None else tokens + warm

    @property
    def staleness(self) -> float | None:
        """Mean number of updates that an arrival had missed; None where there is no hub."""
        values = [summary["asynchrony"]["staleness"]["mean"] for summary in self.summaries if "asynchrony" in summary]
        return fmean(values) if values else None


FIRST_DEMO = (
    "model=GPT(layers=2,width=48,heads=4,head_size=12)",
    "optimizer.lr.lr=0.05",
    "optimizer.lr.floor=0.00125",
    "train.steps=900",
    "train.batch_size=16",
    "train.warm_start_steps=225",
    "keep.evaluate_every=100",
    "cluster.link.bandwidth_mbit_per_s=100",
)
"""The workload and link of the demo's recipes in records up to 2026-11-17. Benchmarks whose figures the docs quote keep them."""

FIRST_TWO_LEVEL = (*FIRST_DEMO, "train.batch_size=8", "train.warm_start_steps=450")
"""The same for demo-two-level, which has twice the devices with half the batch each."""

KEY_VERSION = 2
"""Cells without a version are of records up to 2026-11-17, whose settings do not name the demo's workload."""


_PREPARED = "prepared:"


def key_of(run: Run, texts: Mapping[str, str] | None = None) -> str:
    """A digest of all settings of a Run. It does not depend on the modules in which types are defined, nor on the folder of a
    prepared text whose identity is in `texts`."""
    settings = _short_types(to_json(run))
    folder = _text_folder(run)
    if folder is not None and texts is not None and folder in texts:
        settings["data"]["corpus"] = f"{_PREPARED}{texts[folder]}"
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=12).hexdigest()


def _text_folder(run: Run) -> str | None:
    """The folder of the prepared text that a Run reads; None if it reads none."""
    corpus = getattr(run.data, "corpus", None)
    return corpus.removeprefix(_PREPARED) if isinstance(corpus, str) and corpus.startswith(_PREPARED) else None


def _short_types(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: item.rpartition(".")[2] if name == "type" else _short_types(item) for name, item in node.items()}
    return [_short_types(item) for item in node] if isinstance(node, list) else node


def cells_by_key(record: Record) -> dict[str, dict[str, Any]]:
    """All cells of a record that are runs, by the key that their Run has now. A cell is found by its recipe, settings and seed:
    a field that an algorithm has gained since, at its default, does not lose it. A cell's `texts` are the identities of the
    prepared texts that its settings name."""
    cells = {}
    for cell in record.cells:
        if "settings" not in cell:
            continue
        base: tuple[str, ...] = ()
        if "key_version" not in cell and cell["recipe"].startswith("demo-"):
            base = FIRST_TWO_LEVEL if cell["recipe"] == "demo-two-level" else FIRST_DEMO
        try:
            run = Row(recipe=cell["recipe"], base=base, settings=tuple(cell["settings"])).run(cell["seed"])
            cells[key_of(run, cell.get("texts"))] = cell
        except ConfigError:  # a setting that no longer exists
            continue
    return cells


@dataclass(frozen=True)
class Wanted(Generic[K]):
    """A cell that a benchmark asks for."""

    label: K  # of its row
    row: Row
    seed: int
    title: str = ""  # of the part that it belongs to
    starts: bool = True  # whether it runs if the record does not hold it


def run_rows(
    rows: Mapping[K, Row], seeds: Sequence[int] | Mapping[K, Sequence[int]], record: Record, title: str, **how: Any
) -> dict[K, Outcome]:
    """Runs the cells of these rows that the record does not hold, seed by seed. All settings are resolved before the first.

    Args:
        rows: by label.
        seeds: of all rows, or of each label.
        record: holds the cells.
        title: of the progress display.
        how: further arguments of `run_cells`.
    """
    seeds_of = seeds if isinstance(seeds, Mapping) else dict.fromkeys(rows, seeds)
    every = dict.fromkeys(seed for label in rows for seed in seeds_of[label])
    wanted = [Wanted(label, rows[label], seed, title) for seed in every for label in rows if seed in seeds_of[label]]
    found = run_cells(lambda known: wanted, record, title, **how)
    return {label: found.get(label, Outcome(row, ())) for label, row in rows.items()}


def run_cells(
    wanted: Callable[[Mapping[K, Outcome]], Sequence[Wanted[K]]],
    record: Record,
    title: str,
    *,
    quiet: bool = False,
    curves: bool = False,
    islands: bool = False,
    processes: int = 1,
    until_s: float | None = None,
    can_run: Callable[[Run], bool] = lambda run: True,
    warm: Path | None = None,
    listed: list[str] | None = None,
) -> dict[K, Outcome]:
    """Runs the wanted cells that the record does not hold, in their order, and returns the outcomes of all rows.

    Args:
        wanted: all cells, from the outcomes of those that it has asked for before: what a cell finds can ask for more.
        record: holds the cells.
        title: of the progress display.
        quiet: show no progress.
        curves: keep every evaluation, and the norms and cosines of every round.
        islands: keep the times of each island.
        processes: cells that run in parallel. On a CPU they do not change the results; on a GPU results vary as from run to run.
        until_s: start no cell after this time of the monotonic clock. Rows then have the seeds that finished.
        can_run: whether this machine can run a Run; other cells stay missing.
        warm: a folder for warm starts that processes and later commands share, since two on a GPU never have the same bits.
        listed: if given, no cell runs: the missing ones are added to it in their order, with their names.

    Raises:
        ConfigError: a cell needs a library that cannot be imported; no cell has run.
        AtollError: cells failed. All others have run, and the record has them.
    """
    cells = _Cells(wanted, record, can_run)
    missing = cells.missing()
    if listed is not None:
        listed += [f"{each.title}: {_name(each.row, each.seed)}" for each in missing.values()]
        return cells.outcomes()
    for each in missing.values():
        _check_libraries(each.row.run(each.seed))
    failed: list[str] = []
    asked = {"curve": curves, "sent": curves, "deltas": curves, "islands": islands}
    with CellProgress(title, len(missing), quiet=quiet) as progress:
        if len(missing) < cells.count:
            progress.log(f"{len(missing)} cells to run; the record has the others, or rows share them")

        def begin() -> tuple[str, Wanted[K]] | None:
            if until_s is not None and time.monotonic() > until_s:
                return None
            return cells.begin()

        parallel = processes > 1
        done = _in_processes(begin, processes, progress, warm) if parallel else _in_this_process(begin, progress, Cache(warm))
        for key, cell in done:
            name = _name(cells.begun[key].row, cells.begun[key].seed)
            if isinstance(cell, BaseException):
                failed.append(f"{name} ({_reason(cell)})")
                result = f"{name}: failed ({_reason(cell)})"
            else:
                cells.add(key, {part: value for part, value in cell.items() if asked.get(part, True)})
                result = f"{name}: {_result_text(cell)}"
            progress.expect(len(cells.begun) + len(cells.missing()))
            record.log(result)
            progress.end(result)
    if failed:
        raise AtollError(
            f"{len(failed)} of {len(cells.begun)} cells failed: {'; '.join(failed)}. {record.path} has the others that were run. "
            f"The same command runs what is missing; with --minutes 0, where a benchmark has it, it writes the tables alone."
        )
    return cells.outcomes()


class _Cells(Generic[K]):
    """The cells that are wanted, in the record or missing."""

    def __init__(
        self, wanted: Callable[[Mapping[K, Outcome]], Sequence[Wanted[K]]], record: Record, can_run: Callable[[Run], bool]
    ) -> None:
        self._wanted, self._record, self._can_run = wanted, record, can_run
        self._known, self._keys = cells_by_key(record), dict[tuple[Row, int], str]()
        self.begun: dict[str, Wanted[K]] = {}
        self._asked: Sequence[Wanted[K]] = []
        self._outcomes: dict[K, Outcome] = {}
        self._ask()

    def _ask(self) -> None:
        """Asks until the outcomes of the known cells ask for nothing else."""
        while True:
            self._outcomes = self.outcomes()
            before, self._asked = self._asked, self._wanted(self._outcomes)
            if list(before) == list(self._asked):
                return

    def _key(self, each: Wanted[K]) -> str:
        at = (each.row, each.seed)
        if at not in self._keys:
            self._keys[at] = key_of(each.row.run(each.seed), self._record.texts)
        return self._keys[at]

    @property
    def count(self) -> int:
        """All wanted cells."""
        return len(self._asked)

    def missing(self) -> dict[str, Wanted[K]]:
        """The cells that can start, in their order."""
        found: dict[str, Wanted[K]] = {}
        for each in self._asked:
            key = self._key(each)
            if each.starts and key not in self._known and key not in self.begun and self._can_run(each.row.run(each.seed)):
                found.setdefault(key, each)
        return found

    def begin(self) -> tuple[str, Wanted[K]] | None:
        """The next cell, which begins; None if there is none now."""
        for key, each in self.missing().items():
            self.begun[key] = each
            return key, each
        return None

    def add(self, key: str, cell: dict[str, Any]) -> None:
        """A cell has finished, and goes to the record."""
        row, seed, texts = self.begun[key].row, self.begun[key].seed, self._record.texts
        folder = _text_folder(row.run(seed))
        named = {"texts": {folder: texts[folder]}} if folder in texts else {}
        made = {"recipe": row.recipe, "settings": [*row.base, *row.settings], "seed": seed, **named, **cell}
        self._known[key] = self._record.add(key, {"key_version": KEY_VERSION, **made})
        self._ask()

    def outcomes(self) -> dict[K, Outcome]:
        """By label, in the order in which the rows are wanted."""
        rows = {each.label: each.row for each in self._asked}
        found: dict[K, dict[int, dict[str, Any] | None]] = {label: {} for label in rows}
        for each in self._asked:
            found[each.label][each.seed] = self._known.get(self._key(each))
        return {label: _outcome(row, [*found[label].values()]) for label, row in rows.items()}


def _check_libraries(run: Run) -> None:
    """Refuses a Run whose shards need a library that cannot be imported, before hours of other cells."""
    partition = getattr(run.data, "partition", None)
    if isinstance(partition, KMeans):
        partition.libraries()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _in_this_process(
    begin: Callable[[], tuple[str, Wanted[K]] | None], progress: CellProgress, shared: Cache
) -> Iterator[tuple[str, dict[str, Any] | BaseException]]:
    """One cell after the other."""
    while (begun := begin()) is not None:
        key, each = begun
        progress.begin(_name(each.row, each.seed))
        try:
            cell: dict[str, Any] | BaseException = _cell(each.row.run(each.seed), shared, progress)
        except Exception as error:  # other cells may not fail
            cell = error
        yield key, cell


def _in_processes(
    begin: Callable[[], tuple[str, Wanted[K]] | None], processes: int, progress: CellProgress, warm: Path | None
) -> Iterator[tuple[str, dict[str, Any] | BaseException]]:
    """Several cells in parallel, each in a process of one thread, in the order of completion. A process that dies ends the pool:
    the cells that ran beside it fail, too, and no other begins."""
    progress.begin(f"{processes} cells in parallel")
    running, broken = dict[Future[dict[str, Any]], str](), False
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while True:
                while not broken and len(running) < processes and (begun := begin()) is not None:
                    key, each = begun
                    try:
                        running[pool.submit(_cell_of_process, to_json(each.row.run(each.seed)), warm)] = key
                    except BrokenProcessPool as error:  # a process died since the last wait
                        broken = True
                        yield key, error
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key, error = running.pop(future), future.exception()
                    broken = broken or isinstance(error, BrokenProcessPool)
                    yield key, future.result() if error is None else error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _cell_of_process(run_json: dict[str, Any], warm: Path | None) -> dict[str, Any]:
    run = from_json(run_json)
    with CellProgress("", 1, quiet=True) as progress:
        cell = _cell(run, _process_cache(warm), progress)
    free_memory(run.train.device)  # the processes share the device
    return cell


@cache
def _process_cache(warm: Path | None) -> Cache:
    """Text and warm starts that the cells of one process share."""
    return Cache(warm)


def _name(row: Row, seed: int) -> str:
    return f"{row.name or ' '.join([row.recipe, *row.settings])}, seed {seed}"


def _cell(run: Run, shared: Cache, progress: CellProgress) -> dict[str, Any]:
    """Runs a cell in a temporary folder: no one needs its weights and checkpoints."""
    curve, times = _Curve(), _Times()
    with TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        try:
            sinks = [_Steps(progress, run.train.steps), curve, times]
            result = run_lifecycle.run(run, out=Path(folder) / "run", sinks=sinks, cache=shared)
        except TrainingDiverged as error:
            return {"error": str(error)}
        summary = result.summary.to_dict()
    del summary["run_dir"]
    if not math.isfinite(result.summary.val_loss):
        return {"error": f"the validation loss is {result.summary.val_loss}"}
    kept = {"curve": curve.points, "sent": curve.sent_bytes, "deltas": curve.deltas}
    return {"summary": summary, **kept, "islands": times.islands()}


def _outcome(row: Row, cells: Sequence[dict[str, Any] | None]) -> Outcome:
    found = list(takewhile(lambda cell: cell is not None, cells))  # up to the first missing seed: rows are compared seed by seed
    summaries = tuple(cell["summary"] for cell in found if "summary" in cell)
    curves = tuple(tuple((time_s, updates, loss) for time_s, updates, loss in cell["curve"]) for cell in found if "curve" in cell)
    islands = tuple(tuple(cell["islands"]) for cell in found if "islands" in cell)
    sent = tuple(tuple(cell["sent"]) for cell in found if "sent" in cell)
    deltas = tuple(
        tuple((at, norm, mean, cosine) for at, norm, mean, cosine in cell["deltas"]) for cell in found if "deltas" in cell
    )
    return Outcome(row, summaries, tuple(cell["error"] for cell in found if "error" in cell), curves, islands, sent, deltas)


def _result_text(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return f"diverged ({cell['error'].split('. ')[0]})"
    return f"loss {cell['summary']['val_loss']:.4f} in {cell['summary']['wall_time_s']:.1f} s"


class _Steps:
    """A sink that shows the progress of a run."""

    def __init__(self, progress: CellProgress, steps: int) -> None:
        self._progress, self._steps = progress, steps

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundFinished):
            self._progress.advance(event.steps / self._steps, f"step {event.steps} of {self._steps}, loss {event.loss:.3f}")
        elif isinstance(event, Progress) and event.phase.startswith("warm"):
            self._progress.advance(0.0, f"warm start, step {event.done} of {event.total}")


class _Curve:
    """A sink that keeps the evaluations of a run, and how far the islands' deltas agreed."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.sent_bytes: list[float] = []
        self.deltas: list[Deltas] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.points.append((event.time_s, event.local_updates, event.loss))
            self.sent_bytes.append(event.sent_bytes_per_island)
        elif isinstance(event, Compared):
            self.deltas.append((event.round, fmean(event.norms), event.mean_norm, event.cosine_mean))


class _Times:
    """A sink that keeps the times of each island."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def islands(self) -> list[dict[str, Any]]:
        return [island.to_dict() for island in overlap_of(self._events).islands]


def seeds_parser(doc: str | None, name: str, page: str = "") -> argparse.ArgumentParser:
    """The options of a benchmark whose cells are rows with seeds; arguments as of `benchmark_parser`.

    >>> options = seeds_parser("Compares algorithms.", "acco_demo", "docs/acco.md").parse_args(["--set", "train.steps=4"])
    >>> options.seeds, options.set, options.processes, options.record
    ([0, 1, 2], ['train.steps=4'], 2, None)
    """
    parser = benchmark_parser(doc, name, page=page)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--processes", type=int, default=2, help="cells that run in parallel")
    return parser


def study_parser(doc: str | None, name: str, tables: Sequence[str], page: str = "") -> argparse.ArgumentParser:
    """The options of a study of many tables on a prepared text, which continues cell by cell."""
    parser = benchmark_parser(doc, name, page=page, quick=True, dry=True)
    parser.add_argument("--text", type=Path, required=True, help="a folder that `atoll data prepare` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the headline; other rows have the first")
    parser.add_argument("--only", action="append", choices=tables, help="start cells of this table alone; repeatable; None: all")
    parser.add_argument("--minutes", type=float, help="start no cell after this time")
    parser.add_argument("--processes", type=int, default=1, help="cells that run in parallel")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
    return parser


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `run_cells` that a study's options give.

    Raises:
        ConfigError: an option is out of range.
    """
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: it is at least 1. Use 1, or some more to fill a GPU, such as 6.")
    if options.minutes is not None and options.minutes < 0:
        raise ConfigError(f"--minutes {options.minutes:g}: it is at least 0. Use 0 to make the tables alone.")
    until_s = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    return {"quiet": options.quiet, "processes": options.processes, "until_s": until_s}


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}"


def commands_section(outcomes: Mapping[str, Outcome]) -> str:
    """The commands that run the rows."""
    return "## Commands\n\n```\n" + "\n".join(dict.fromkeys(outcome.row.command for outcome in outcomes.values())) + "\n```"
