"""The figures of a run, read from its folder alone: run.json, events.jsonl and timing.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core import events as ev
from atoll.core.errors import AtollError, CheckpointError
from atoll.core.verified_files import check_digests, parse_json
from atoll.telemetry.async_summary import AsynchronySummary, read_asynchrony
from atoll.telemetry.event_log import Clock, clock_of, read_events, read_kind
from atoll.telemetry.run_progress import read_progress, read_settings
from atoll.telemetry.sync_summary import OverlapSummary, read_overlap, reports_overlap
from atoll.telemetry.units import JsonRecord, perplexity


@dataclass(frozen=True, kw_only=True)
class MemorySummary(JsonRecord):
    islands: tuple[Mapping[str, int], ...]  # each island's bytes at its peak, by the names of MemoryCounted
    formula: str | None
    """Bytes per parameter by ACCO's paper, with the widths of this run; None if the paper has no formula for the algorithm."""
    formula_bytes: int | None

    @property
    def largest(self) -> Mapping[str, int]:
        """The island with the highest peak."""
        return max(self.islands, key=itemgetter("peak_bytes"))

    @property
    def sharded(self) -> bool:
        """Whether each island holds a share of the optimizer state, by the formula."""
        return self.formula is not None and "/" in self.formula


@dataclass(frozen=True, kw_only=True)
class ParticipationSummary(JsonRecord):
    """Commits of an elastic run, whose islands join and leave."""

    commits: int
    attempts: int  # of all commits together
    known: int  # islands that ever took part
    alive: float  # mean over commits
    participating: float  # mean over commits
    delivered: int  # leases of data whose work is in a commit
    returned: int  # leases that the leader assigned again
    refused: int  # deltas that failed validation
    not_saved: int  # checkpoints that could not be written


@dataclass(frozen=True, kw_only=True)
class Summary(JsonRecord):
    """A finished run. Counts and times start at the end of the warm start."""

    recipe: str
    algorithm: str
    islands: int
    params: int  # trainable parameters of the model
    tokens: int  # of all islands, without `warm_start_tokens`
    warm_start_tokens: int
    local_updates: int
    outer_steps: int  # exchanges that changed the global weights
    val_loss: float  # of the final global weights, in nats
    val_perplexity: float
    virtual_time_s: float | None  # on the clock of the simulated cluster; None for real machines
    wall_time_s: float | None
    """On real machines, of the whole run. Of a simulated run, of the process that finished it, and None if unknown."""
    sent_bytes_per_island: float  # payload without control bytes, mean over islands
    control_bytes_per_island: float
    utilisation: float | None  # computing time over time present, mean over islands
    resumed_from_round: int  # where the process that finished the run began; 0 if the run was never resumed
    run_dir: str
    seed: int
    rounds: int
    steps: int
    digest: str  # of the final global weights
    engine: str = "simulator"
    val_accuracy: float | None = None  # of the final global weights, in [0, 1]
    busiest_second_bytes: float | None = None
    """Payload that an island sent in one second of the run's clock, at most, as its exchanges are timed. None in older runs."""
    inside_bytes_per_device: float | None = None
    """Payload over the links inside islands, mean over devices; None in a run of one level."""
    inside_dropped_tokens: int | None = None
    """Tokens whose gradients an island discarded when it received new weights; None in a run of one level."""
    asynchrony: AsynchronySummary | None = None
    overlap: OverlapSummary | None = None  # None where `reports_overlap` is false
    memory: MemorySummary | None = None

    @property
    def clock(self) -> Clock:
        return clock_of(self.engine)

    @property
    def time_s(self) -> float | None:
        """On the run's clock."""
        return self.virtual_time_s if self.clock == "virtual" else self.wall_time_s

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False)


def read_summary(folder: str | Path) -> Summary:
    """The summary of a finished run. Raises an AtollError for an unfinished one, with the command that resumes it."""
    folder = Path(folder)
    read_settings(folder)  # refuses the folder of another version
    check_digests(folder)
    log = folder / "events.jsonl"
    last: dict[type[ev.Event], Any] = {}
    for event in read_events(log, kinds=(ev.RunStarted, ev.Evaluated, ev.RunFinished)) if log.exists() else ():
        last[type(event)] = event
    if ev.RunFinished not in last:
        raise AtollError(_unfinished(folder))
    if ev.RunStarted not in last:
        raise CheckpointError(f"{log} ends with RunFinished but has no RunStarted. Restore the beginning of it.")
    finished, evaluated = last[ev.RunFinished], last.get(ev.Evaluated)
    process_s, resumed_from_round = _timing(folder)
    # The accuracy of an earlier evaluation would be that of other weights than the loss.
    metrics = evaluated.metrics if evaluated is not None and evaluated.local_updates == finished.local_updates else {}
    from_events = {
        field.name: getattr(event, field.name)
        for event in (last[ev.RunStarted], finished)
        for field in fields(Summary)
        if hasattr(event, field.name)
    }
    from_folder = {
        "val_perplexity": perplexity(finished.val_loss),
        "wall_time_s": process_s if finished.wall_time_s is None else finished.wall_time_s,
        "resumed_from_round": resumed_from_round,
        "run_dir": str(folder),
        "val_accuracy": metrics.get("accuracy"),
        "asynchrony": read_asynchrony(folder),
        "overlap": read_overlap(folder) if reports_overlap(folder) else None,
        "memory": read_memory(folder),
    }
    return Summary(**(from_events | from_folder))


def read_memory(folder: str | Path) -> MemorySummary | None:
    """The largest count of each island, and the formula of the last count; None where no engine counted memory."""
    counts = read_kind(folder, ev.MemoryCounted) if (Path(folder) / "events.jsonl").exists() else []
    if not counts:
        return None
    names = ("island", *(f"{kind}_bytes" for kind in ev.MEMORY_KINDS), "peak_bytes")
    largest: dict[int, dict[str, int]] = {}
    for count in counts:
        if count.island not in largest or count.peak_bytes > largest[count.island]["peak_bytes"]:
            largest[count.island] = {name: getattr(count, name) for name in names}
    islands = tuple(largest[island] for island in sorted(largest))
    return MemorySummary(islands=islands, formula=counts[-1].formula, formula_bytes=counts[-1].formula_bytes)


def read_participation(folder: str | Path) -> ParticipationSummary | None:
    """The commits of the elastic run in a folder; None for other runs and before the first commit."""
    attended, leased = read_kind(folder, ev.Attended), read_kind(folder, ev.Leased)
    if not attended:
        return None
    return ParticipationSummary(
        commits=len(attended),
        attempts=sum(event.attempts for event in attended),
        known=attended[-1].known,
        alive=fmean(event.alive for event in attended),
        participating=fmean(event.participating for event in attended),
        delivered=sum(len(event.delivered) for event in leased),
        returned=sum(len(event.returned) for event in leased),
        refused=len(read_kind(folder, ev.Refused)),
        not_saved=len(read_kind(folder, ev.SaveFailed)),
    )


def _timing(folder: Path) -> tuple[float | None, int]:
    """Wall-clock seconds of the last process and the round that it began at, from timing.jsonl."""
    wall_time_s, resumed_from_round = None, 0
    path = folder / "timing.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = parse_json(line)
        except ValueError:
            continue  # a kill truncated this line and the resumed process appended to it; these figures are not essential
        if not isinstance(record, dict):
            continue
        with suppress(TypeError, ValueError, OverflowError):
            if record.get("what") == "resumed":
                resumed_from_round = int(record.get("round") or 0)
            elif record.get("what") == "finished":
                wall_time_s = float(record["wall_time_s"]) if "wall_time_s" in record else None
                resumed_from_round = int(record.get("resumed_from_round") or resumed_from_round)
    return wall_time_s, resumed_from_round


def _unfinished(folder: Path) -> str:
    progress = read_progress(folder)
    recipe = progress.started.recipe if progress.started is not None else read_settings(folder).get("recipe", folder.name)
    last = f"its last finished round is {progress.round.round} ({progress.position})" if progress.round else "no round is finished"
    return f"the run in {folder} ({recipe}) is not finished: {last}. Resume it with `atoll run --resume {folder}`."
