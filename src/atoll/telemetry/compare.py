"""Several finished runs side by side: a table for the terminal, one sentence, Markdown and JSON.

The run that sent the most bytes is the reference of the others. Times are compared only between runs with the same clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.core.errors import ConfigError
from atoll.telemetry.run_progress import read_settings
from atoll.telemetry.summary import Summary, read_summary
from atoll.telemetry.units import human_bytes, human_count, human_fraction, human_loss, human_share, human_time, human_times

if TYPE_CHECKING:
    from rich.table import Table

_MAX_ROOMY_COLUMNS = 8
_WIDTH = 80  # characters of a terminal
_MAX_NAME = 28  # a longer name may be wrapped
_MAX_NAME_IN_HEADING = 16
_SAME = 0.005  # ratios this close to one count as equal
_SAME_WORK = 0.01  # whole rounds do not always add up to the same number of tokens
_MAX_CLAUSES = 4  # a sentence about more runs names only the best


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    label: str  # different from those of the other runs
    summary: Summary
    data: Mapping[str, Any] = field(default_factory=dict)  # settings of the data, without those that divide it between islands


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Finished runs in the order given."""

    rows: tuple[ComparedRun, ...]

    @property
    def most(self) -> ComparedRun:
        """The run that sent the most bytes; among equals the slowest, if they have the same clock, then the first."""
        timed = not self.mixed_clocks
        return max(self.rows, key=lambda run: (run.summary.sent_bytes_per_island, (run.summary.time_s or 0.0) if timed else 0.0))

    @property
    def mixed_clocks(self) -> bool:
        """Whether some runs were simulated and others were not."""
        return len({run.summary.clock for run in self.rows}) > 1

    @property
    def losses(self) -> dict[str, str]:
        """Each validation loss by label, with three digits, or four if three do not distinguish different losses."""
        losses = [run.summary.val_loss for run in self.rows]
        enough = len({human_loss(loss, 3) for loss in losses}) == len({human_loss(loss, 4) for loss in losses})
        return {run.label: human_loss(run.summary.val_loss, 3 if enough else 4) for run in self.rows}

    def to_dict(self) -> dict[str, Any]:
        """The sentence, the run that sent most, and per run its label, its bytes as a share of the most, and its summary."""
        runs = [
            {"label": run.label, "share_of_most_bytes": _bytes_ratio(run, self.most), **run.summary.to_dict()} for run in self.rows
        ]
        return {"sentence": sentence(self), "most_bytes": self.most.label, "runs": runs}


def comparison(folders: Sequence[str | Path]) -> Comparison:
    """Reads the runs in these folders, which must be finished."""
    if not folders:
        raise ConfigError("no run folders were given, so there is nothing to compare. Give one folder or more.")
    summaries = [read_summary(folder) for folder in folders]
    labels = distinct_labels(summaries, [summary.run_dir for summary in summaries])
    runs = zip(labels, summaries, folders, strict=True)
    return Comparison(rows=tuple(ComparedRun(label=label, summary=s, data=_data(folder)) for label, s, folder in runs))


def distinct_labels(runs: Sequence[Any], folders: Sequence[str]) -> list[str]:
    """The recipes of runs (summaries or RunStarted events); where runs share one, with the seed, the engine, both, or the folder.
    All labels take the same form.

    >>> from types import SimpleNamespace as Run
    >>> distinct_labels([Run(recipe="ddp", seed=0, engine="simulator"), Run(recipe="ddp", seed=1, engine="simulator")], ["a", "b"])
    ['ddp (seed 0)', 'ddp (seed 1)']
    >>> distinct_labels([Run(recipe="ddp", seed=0, engine=engine) for engine in ("simulator", "ray")], ["a", "b"])
    ['ddp (simulator)', 'ddp (ray)']
    """
    forms = [
        [run.recipe for run in runs],
        [f"{run.recipe} (seed {run.seed})" for run in runs],
        [f"{run.recipe} ({run.engine})" for run in runs],
        [f"{run.recipe} (seed {run.seed}, {run.engine})" for run in runs],
        [f"{run.recipe} ({Path(folder).name})" for run, folder in zip(runs, folders, strict=True)],
    ]
    distinct = (labels for labels in forms if len(set(labels)) == len(labels))
    return next(distinct, [f"{number}. {folder}" for number, folder in enumerate(folders, start=1)])


def table(comparison: Comparison) -> Table:
    """For the terminal: figures are never cut, and all columns fit into 80 characters."""
    from rich import box
    from rich.table import Table

    most = comparison.most.label
    columns = _columns(comparison, most if len(most) <= _MAX_NAME_IN_HEADING else "the most")
    widths = [max(map(len, [*_in_two_lines(heading).split("\n"), *cells])) for heading, cells in columns.items()]
    crowded = len(columns) > _MAX_ROOMY_COLUMNS or sum(widths) + 2 * len(widths) > _WIDTH
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if crowded else 1, 0, 0), pad_edge=False, show_edge=not crowded)
    for number, heading in enumerate(columns):
        # On a narrow terminal algorithms wrap first, then very long names.
        whole = number > 1 or (number == 0 and all(len(run.label) <= _MAX_NAME for run in comparison.rows))
        side: Literal["left", "right"] = "left" if number < 2 else "right"
        lines = heading.replace(" ", "\n") if crowded else _in_two_lines(heading)
        result.add_column(lines, justify=side, no_wrap=whole, overflow="fold")
    for name, algorithm, *cells in zip(*columns.values(), strict=True):
        # The name of the clock goes below its time where columns are narrow.
        result.add_row(name, algorithm, *(cell.replace(" (", "\n(") if crowded else cell for cell in cells))
    return result


def markdown(comparison: Comparison, slower: str = "") -> str:
    """A Markdown table with the sentence below it, the line of `busiest_seconds`, and that of `slower_links` if there is one."""
    columns = _columns(comparison, comparison.most.label)
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    below = ["", sentence(comparison), *(f"\n{line}" for line in (busiest_seconds(comparison), slower) if line), ""]
    return "\n".join([lines[0], "|---|---|" + "---:|" * (len(columns) - 2), *lines[1:], *below])


def busiest_seconds(comparison: Comparison) -> str:
    """One line about the most that an island of each run sent in one second; empty if no run has that figure."""
    rows = [(run.label, run.summary.busiest_second_bytes) for run in comparison.rows]
    peaks = ", ".join(f"{label} {human_bytes(peak)}" for label, peak in rows if peak)
    return f"An island sent at most, in one second: {peaks}." if peaks else ""


def slower_links(times_s: Mapping[str, float], factor: float) -> str:
    """One line about the virtual times that runs would have on slower links, by their labels.

    >>> slower_links({"demo-ddp": 19_160.0, "demo-diloco": 3_848.0}, 10)
    'On links 10 times slower: demo-ddp 5:19:20, demo-diloco 1:04:08 (simulated without training).'
    """
    times = ", ".join(f"{label} {human_time(time_s)}" for label, time_s in times_s.items())
    return f"On links {factor:g} times slower: {times} (simulated without training)." if times else ""


def _columns(comparison: Comparison, most: str) -> dict[str, list[str]]:
    """The cells of each column by its heading. Columns that say nothing about these runs are left out."""
    summaries = [run.summary for run in comparison.rows]
    several, losses = len(summaries) > 1, comparison.losses
    memories = [summary.memory for summary in summaries if summary.memory is not None]
    compare_memory = several and (
        len({memory.largest["peak_bytes"] for memory in memories}) > 1 or any(memory.sharded for memory in memories)
    )
    clock = "" if comparison.mixed_clocks else f"{summaries[0].clock} "
    columns: tuple[tuple[str, bool, Callable[[ComparedRun, Summary], str]], ...] = (
        ("run", True, lambda run, _: run.label),
        ("algorithm", True, lambda _, s: s.algorithm),
        ("val loss", True, lambda run, _: losses[run.label]),
        ("accuracy", any(s.val_accuracy is not None for s in summaries), lambda _, s: _accuracy_cell(s.val_accuracy)),
        ("tokens", True, lambda _, s: human_count(s.tokens)),
        ("sent per island", True, lambda _, s: human_bytes(s.sent_bytes_per_island)),
        (f"against {most}", several, lambda run, _: _times_less(run, comparison.most)),
        (f"{clock}time", True, lambda _, s: _time_cell(s, name_clock=not clock)),
        ("busy", True, lambda _, s: human_share(s.utilisation, 1.0)),
        ("peak memory", compare_memory, lambda _, s: "-" if s.memory is None else human_bytes(s.memory.largest["peak_bytes"])),
    )
    return {heading: [cell(run, run.summary) for run in comparison.rows] for heading, shown, cell in columns if shown}


def _time_cell(summary: Summary, *, name_clock: bool) -> str:
    return "-" if summary.time_s is None else human_time(summary.time_s) + (f" ({summary.clock})" if name_clock else "")


def _accuracy_cell(fraction: float | None) -> str:
    """With one decimal, because compared runs often differ by less than 1 %."""
    return f"{100 * fraction:.1f} %" if fraction is not None and math.isfinite(fraction) else human_share(fraction, 1.0)


def _in_two_lines(heading: str) -> str:
    return "\n".join(heading.rsplit(" ", 1))


def _times_less(run: ComparedRun, most: ComparedRun) -> str:
    if run is most:
        return "the most"
    ratio = _bytes_ratio(run, most)
    if ratio is None or ratio == 1:
        return "the same"
    return f"{human_times(1 / ratio)}x less" if ratio else "nothing"


def _bytes_ratio(run: ComparedRun, other: ComparedRun) -> float | None:
    """Bytes that this run sent per island over those of the other; None where the other sent nothing."""
    other_bytes = other.summary.sent_bytes_per_island
    return run.summary.sent_bytes_per_island / other_bytes if other_bytes else None


def _data(folder: str | Path) -> dict[str, Any]:
    """The settings of the data without its division between islands, which compared runs may choose."""
    data = read_settings(folder).get("data")
    if not isinstance(data, dict):
        return {}
    kept = {key: value for key, value in data.items() if key not in ("partition", "shards")}
    return kept | {"type": str(kept["type"]).rpartition(".")[2]} if "type" in kept else kept


def sentence(comparison: Comparison) -> str:
    """One sentence about the loss, the bytes and the time of each run against those of the run that sent most. It says so if a run
    is worse, and if runs are not comparable because they did different work."""
    if len(comparison.rows) == 1:
        return _alone(comparison)
    text = _not_comparable(comparison.rows) or (
        _each_run(comparison) if len(comparison.rows) <= _MAX_CLAUSES else _best_runs(comparison)
    )
    return f"{text}{_uncompared_times(comparison)}."


def _alone(comparison: Comparison) -> str:
    (run,) = comparison.rows
    summary, loss = run.summary, comparison.losses[run.label]
    reached = f"{run.label} reaches {loss}" if math.isfinite(summary.val_loss) else f"{run.label} diverged (its loss is {loss})"
    wall = " of wall time" if summary.clock == "wall" else ""
    time = f" in {human_time(summary.time_s)}{wall}" if summary.time_s is not None else ""
    sent = f"sending {human_bytes(summary.sent_bytes_per_island)} per island"
    return f"{reached} after {human_count(summary.tokens)} tokens, {sent}{time}."


def _not_comparable(runs: Sequence[ComparedRun]) -> str:
    """Why the losses say nothing about the algorithms; empty if they do."""
    first, *others = (run.data for run in runs)
    differing = [key for key in first if all(key in data for data in others) and any(data[key] != first[key] for data in others)]
    tokens = [_tokens_computed(run.summary) + run.summary.warm_start_tokens for run in runs]
    requested = [count - _tokens_past_end(run.summary) for run, count in zip(runs, tokens, strict=True)]
    if differing:
        why = "their data differ"
        found = [f"{run.label} has {', '.join(f'{key}={run.data[key]}' for key in differing)}" for run in runs]
    elif len({run.summary.params for run in runs}) > 1:
        why = "their models differ in parameters"
        found = [f"{run.label} has {human_count(run.summary.params)}" for run in runs]
    elif max(requested) > (1 + _SAME_WORK) * min(tokens):
        why = "they trained on different numbers of tokens"
        # The table has these, without the warm start, where that does not differ.
        alike = len({run.summary.warm_start_tokens for run in runs}) == 1 and all(
            _tokens_computed(run.summary) == run.summary.tokens for run in runs
        )
        counts = [run.summary.tokens for run in runs] if alike else tokens
        within = "" if alike else " with the warm start and late updates"
        found = [f"{run.label} saw {human_count(count)}{within}" for run, count in zip(runs, counts, strict=True)]
    else:
        return ""
    return f"These runs are not comparable, because {why}: {_listed(found)}"


def _tokens_computed(summary: Summary) -> float:
    """Including those of updates that a hub left out as too stale, because that is a choice of the algorithm."""
    hub = summary.asynchrony
    return summary.tokens if hub is None or not hub.applied else summary.tokens * hub.arrivals / hub.applied


def _tokens_past_end(summary: Summary) -> float:
    """Tokens that a run may have computed beyond the requested ones. A hub stops with the arrival that reaches the request; islands
    that accumulate freely, so that commits differ in size, stop with the commit that does."""
    rounds = summary.overlap
    if rounds is not None and rounds.background and rounds.most_tokens > rounds.fewest_tokens:
        return rounds.most_tokens
    if summary.asynchrony is None or not summary.local_updates:
        return 0.0
    longest = max((worker.steps / worker.rounds for worker in summary.asynchrony.workers if worker.rounds), default=0.0)
    return longest * summary.tokens / summary.local_updates


def _each_run(comparison: Comparison) -> str:
    reference, clauses = comparison.most, list[str]()
    for run in comparison.rows:
        if run is not reference:
            outcome = _outcome(run, reference, comparison.losses, first=not clauses)
            cost = " ".join(part for part in (_bytes(run, reference), _time(run, reference)) if part)
            clauses.append(f"{outcome} {cost}")
    return "; ".join(clauses)


def _outcome(run: ComparedRun, reference: ComparedRun, losses: Mapping[str, str], *, first: bool) -> str:
    """The loss of a run. Only the first clause names the loss of the reference."""
    mine, other = losses[run.label], losses[reference.label]
    if not math.isfinite(run.summary.val_loss):
        return f"{run.label} diverged (its loss is {mine})" + (f" where {reference.label} reaches {other}," if first else ",")
    if not math.isfinite(reference.summary.val_loss):
        return f"{run.label} reaches {mine}" + (f" where {reference.label} diverged," if first else "")
    if mine == other:
        return f"{run.label} matches {reference.label}'s {other}"
    if run.summary.val_loss < reference.summary.val_loss:
        return f"{run.label} reaches {mine}" + (f" against {reference.label}'s {other}" if first else "")
    worse = float(mine) - float(other)  # the difference of the losses as shown
    return f"{run.label} ends {worse:.2g} worse than {reference.label} ({mine} against {other}),"


def _bytes(run: ComparedRun, reference: ComparedRun) -> str:
    ratio = _bytes_ratio(run, reference)
    if not ratio:
        return "with nothing sent"
    share = "the same bytes" if abs(ratio - 1) < _SAME else f"{human_fraction(ratio)} of the bytes"
    if (run.summary.asynchrony is None) != (reference.summary.asynchrony is None):
        return f"sending {share} (what a hub sends is not counted)"
    return f"with {share}"


def _time(run: ComparedRun, reference: ComparedRun) -> str:
    mine_s, other_s = run.summary.time_s, reference.summary.time_s
    if not mine_s or not other_s or run.summary.clock != reference.summary.clock:
        return ""
    ratio = mine_s / other_s
    if abs(ratio - 1) < _SAME:
        return "in the same time"
    return f"in {human_fraction(ratio)} of the time" if ratio < 1 else f"in {human_times(ratio)} times the time"


def _best_runs(comparison: Comparison) -> str:
    total, finite = len(comparison.rows), [run for run in comparison.rows if math.isfinite(run.summary.val_loss)]
    if not finite:
        return f"All {total} runs diverged"
    lowest = min(finite, key=lambda run: run.summary.val_loss)
    least = min(finite, key=lambda run: run.summary.sent_bytes_per_island)
    best = [
        f"{lowest.label} reaches the lowest loss ({comparison.losses[lowest.label]})",
        f"{least.label} sends least ({human_bytes(least.summary.sent_bytes_per_island)} per island)",
    ]
    timed = [(run.summary.time_s, run.label) for run in finite if run.summary.time_s is not None]
    if len(timed) == len(finite) and len({run.summary.clock for run in finite}) == 1:
        time_s, label = min(timed)
        best.append(f"{label} is fastest ({human_time(time_s)})")
    return f"Of {total} runs, {_listed(best)}" + (f"; {total - len(finite)} diverged" if len(finite) < total else "")


def _uncompared_times(comparison: Comparison) -> str:
    if not comparison.mixed_clocks:
        return ""
    parts = []
    for clock in ("virtual", "wall"):
        labels = [run.label for run in comparison.rows if run.summary.clock == clock]
        parts.append(f"{clock} times ({_listed(labels) if len(comparison.rows) <= _MAX_CLAUSES else len(labels)})")
    return f"; {' and '.join(parts)} are not compared"


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["one", "two", "three"])
    'one, two and three'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
