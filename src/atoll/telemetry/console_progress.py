"""A run on the terminal: one bar per phase, and one line per event worth reading.

Everything goes to standard error; standard output is left for results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from atoll.core import events as ev
from atoll.telemetry.event_log import ClosingSink, clock_at
from atoll.telemetry.run_progress import RunningTotals
from atoll.telemetry.units import human_bytes, human_count, human_percent, human_time, perplexity, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import TaskID

SecondsClock = Callable[[], float]
WARM_START = "warm start"
TRAINING = "training"
# An engine may call the phase of training train, round or resume: all of them move one bar.
_PHASES = {"train": TRAINING, "round": TRAINING, "resum": TRAINING, "warm": WARM_START}


class ConsoleSink(ClosingSink):
    """Shows a run under a title. Close it, or use it in a `with`, so that the terminal gets its cursor back.

    `who` describes what trains, where the number of islands is not enough. Without a console it writes to standard error.
    """

    def __init__(
        self,
        title: str,
        quiet: bool = False,
        *,
        who: str | None = None,
        console: Console | None = None,
        clock: SecondsClock = time.monotonic,
    ) -> None:
        self._who = who
        self._clock = clock
        self._totals = RunningTotals()
        self._text = ""
        self._progress: ev.Progress | None = None  # the last one of training
        self._limiters: dict[type[ev.Event], RateLimiter] = {}
        self._quorum: tuple[int, ...] = ()
        """Of the last commit."""
        self._display = None if quiet else ProgressDisplay(title, console, clock)

    def emit(self, event: ev.Event) -> None:
        if self._display is None:
            return
        self._totals.take(event)
        match event:
            case ev.Progress():
                phase = next((phase for prefix, phase in _PHASES.items() if event.phase.lower().startswith(prefix)), event.phase)
                self._progress = event if phase == TRAINING else self._progress
                text = event.note or (self._text if phase == TRAINING else "")
                self._display.advance(phase, _fraction(event.done, event.total), text)
            case ev.RoundFinished():
                self._text = round_text(event, self._totals)
                self._display.advance(TRAINING, self._fraction_done(event), self._text)
            case ev.WarmStartFinished():
                self._display.finish(WARM_START)
            case ev.RunFinished():
                self._display.finish(TRAINING)
                self._display.close()  # before the last line, which then stays below the bars
            case _:
                pass
        line = event_text(event, self._who)
        unchanged = False
        if isinstance(event, ev.Attended):  # every commit has one, and there are many a second: only another quorum is shown
            quorum = event.participating, event.alive, event.known, event.attempts
            unchanged, self._quorum = quorum == self._quorum, quorum
        if line is not None:
            if type(event) not in self._limiters:
                burst, interval_s = (1, 60.0) if isinstance(event, ev.Saved) else (20, 5.0)
                self._limiters[type(event)] = RateLimiter(self._clock, burst=burst, interval_s=interval_s)
            limiter = self._limiters[type(event)]
            withheld = limiter.withheld
            if unchanged:
                limiter.withheld += 1
            elif limiter.allow():
                self._display.log(line + (f" (and {withheld} more since the last such line)" if withheld else ""))

    def recall(self, events: Iterable[ev.Event]) -> None:
        """Continues the totals of an earlier process. Nothing is shown."""
        for event in events:
            self._totals.take(event)

    def close(self) -> None:
        """Leaves the bars as they are and frees the terminal. A second call does nothing."""
        if self._display is not None:
            self._display.close()

    def _fraction_done(self, event: ev.RoundFinished) -> float | None:
        """With a hub, by the local updates of all workers, because each takes its own number of steps. Without RunStarted, as in a
        resumed run, by the last Progress."""
        started, progress = self._totals.started, self._progress
        if self._totals.asynchronous:
            if started is None:
                return _fraction(progress.done, progress.total) if progress is not None else None
            return _fraction(event.local_updates, started.steps * started.islands)
        return _fraction(event.steps, started.steps if started is not None else progress.total if progress is not None else 0)


def _fraction(done: float, total: float) -> float | None:
    return min(1.0, done / total) if total > 0 else None


def event_text(event: ev.Event, who: str | None = None) -> str | None:
    """One line for an event; None for an event that has none.

    >>> event_text(ev.IslandLeft(island=2, round=7, virtual_time_s=754.0))
    'round 7: island 2 left at 0:12:34'
    """
    match event:
        case ev.RunStarted():
            devices = "" if event.devices_per_island is None else f" of {plural(event.devices_per_island, 'device')}"
            engine = "" if event.engine == "simulator" else f" (engine {event.engine})"
            model = f"{human_count(event.params)} parameters, {event.steps} steps each, seed {event.seed}"
            return f"{event.recipe}: {event.algorithm} on {who or plural(event.islands, 'island') + devices}{engine}, {model}"
        case ev.LimitSet():
            return f"an exchange may take {human_time(event.limit_s)} ({event.why})"
        case ev.WarmStartFinished():
            return f"warm start: {event.steps} steps, {human_count(event.tokens)} tokens, loss {event.loss:.4g}"
        case ev.Evaluated():
            return f"round {event.round}, step {event.steps}: {_metrics_text(event.metrics)}, {human_count(event.tokens)} tokens"
        case ev.IslandJoined():
            return f"round {event.round}: island {event.island} joined at {human_time(event.time_s)}{_transfer_text(event)}"
        case ev.IslandLeft():
            return f"round {event.round}: island {event.island} left at {human_time(event.time_s)}"
        case ev.Refused():
            at = human_time(event.time_s)
            return f"round {event.round}: the update of island {event.island} was refused at {at} ({event.reason})"
        case ev.Returned():
            again = f"{event.steps} steps of shard {event.shard} are assigned again"
            return f"round {event.round}: island {event.island} sent no update, {again}"
        case ev.HubRestarted():
            source = f"checkpoint {event.checkpoint}" if event.checkpoint is not None else "the initial weights (no checkpoint yet)"
            lost = f"{event.lost_rounds} rounds are lost ({event.lost_local_updates} local updates)"
            return f"a new hub continues at {human_time(event.time_s)} from {source}; {lost}"
        case ev.Attended() if event.participating != event.alive or event.attempts > 1:
            again = f", at attempt {event.attempts}" if event.attempts > 1 else ""
            of_all = f"{event.participating} of {event.alive} live islands committed ({event.known} known)"
            return f"round {event.round}: {of_all}{again}"
        case ev.Arranged():
            how = "together in one batched pass" if event.how == "stacked" else "one after the other"
            return f"islands compute {how}: {event.why}"
        case ev.SaveFailed():
            return f"round {event.round}: checkpoint not written, training continues: {event.reason}"
        case ev.LogDamaged():
            return f"events.jsonl is damaged: {event.what}; the run continues, and its report lacks what is lost"
        case ev.RoundFailed():
            return f"round {event.round}: failed, {event.what} was missed by island {', '.join(map(str, event.islands))}"
        case ev.UpdateSkipped():
            return f"round {event.round}: {_skipped_text(event)}"
        case ev.CaughtUp():
            return f"round {event.round}: island {event.island} caught up{_transfer_text(event)}"
        case ev.Saved():
            return f"round {event.round}: saved {event.name}"
        case ev.RunFinished():
            work = f"val loss {event.val_loss:.4g}, {event.rounds} rounds, {human_count(event.tokens)} tokens"
            time = f"{human_time(event.time_s)} of {clock_at(event)} time"
            busy = f", {human_percent(event.utilisation)} of it computing" if event.utilisation is not None else ""
            peak = f" (at most {human_bytes(event.busiest_second_bytes)} in a second)" if event.busiest_second_bytes else ""
            return f"finished: {work}, {human_bytes(event.sent_bytes_per_island)} sent per island{peak}, {time}{busy}"
        case _:
            return None


def round_text(event: ev.RoundFinished, totals: RunningTotals) -> str:
    """The figures beside the bar of training."""
    parts = [f"loss {event.loss:.3f}"]
    if totals.evaluation is not None and "loss" in totals.evaluation.metrics:
        parts.append(f"val {totals.evaluation.metrics['loss']:.3f}")
    if totals.asynchronous:
        started, staleness, done = totals.started, totals.staleness(), human_count(event.local_updates)
        if started is not None:
            total = started.steps * started.islands
            done = f"{human_count(min(event.local_updates, total))}/{human_count(total)}"  # workers may deliver more than that
        parts.append(f"updates {done}")
        parts += [f"staleness {staleness:.1f}"] if staleness is not None else []
        parts.append(plural(event.islands, "worker"))
    parts += [f"{clock_at(event)} time {human_time(event.time_s)}", f"{human_bytes(event.sent_bytes_per_island)} per island"]
    utilisation = totals.utilisation(event.time_s)
    parts += [f"busy {human_percent(utilisation)}"] if utilisation is not None else []
    return "  ".join(parts)


def _transfer_text(event: ev.CaughtUp | ev.IslandJoined) -> str:
    return f", {human_bytes(event.sent_bytes)} from island {event.donor}" if event.donor is not None else ""


def _skipped_text(event: ev.UpdateSkipped) -> str:
    inside = event.inside
    names = [str(number) if inside is None else f"{inside}.{number}" for number in event.islands]
    kind = ("island" if inside is None else "device") + ("s" if len(names) > 1 else "")
    members = "all islands" if inside is None else f"all devices of island {inside}"
    why = f"gradients of {kind} {', '.join(names)} are not finite" if names else "there are no gradients"
    return f"{why}, so {members} skip the update"


def _metrics_text(metrics: dict[str, float]) -> str:
    named = {"val loss": metrics["loss"], "perplexity": perplexity(metrics["loss"])} if "loss" in metrics else {}
    named |= {name: value for name, value in metrics.items() if name != "loss"}
    return ", ".join(f"{name} {value:.4g}" for name, value in named.items())


class RateLimiter:
    """Allows a burst of lines, then one per interval, then one per fiftieth of the time passed.

    >>> times_s = iter([0.0, 1.0, 2.0, 6.0, 1000.0, 1015.0, 1021.0])
    >>> limiter = RateLimiter(lambda: next(times_s), burst=1, interval_s=5.0)        # reads 0.0
    >>> [limiter.allow() for _ in range(6)]
    [True, False, True, True, False, True]
    """

    def __init__(self, clock: SecondsClock, *, burst: int, interval_s: float) -> None:
        self._clock = clock
        self._burst = burst
        self._interval_s = interval_s
        self._begin_s = self._last_s = clock()
        self.withheld = 0  # lines since the last one that was allowed

    def allow(self) -> bool:
        """Whether a line may be written now; if so, it counts as written."""
        now_s = self._clock()
        # Growing pauses keep the number of lines logarithmic in the length of the run: a week fills a few pages.
        if self._burst <= 0 and now_s - self._last_s < max(self._interval_s, 0.02 * (now_s - self._begin_s)):
            self.withheld += 1
            return False
        self._burst, self._last_s, self.withheld = self._burst - 1, now_s, 0
        return True


class ProgressDisplay:
    """Shows how far each phase is, and lines in between, on standard error if no console is given.

    On a terminal it draws one bar per phase in place, with the latest figures below and lines above. In a file, a pipe or a batch
    job it writes a line every tenth of a phase, and in between when the rate limit allows.
    """

    def __init__(self, title: str, console: Console | None = None, clock: SecondsClock = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._console, self._title, self._text = console or Console(stderr=True), title, ""
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}
        self._limiter = RateLimiter(clock, burst=1, interval_s=5.0)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        self._bars = Progress(*columns, console=self._console, get_time=clock, auto_refresh=False)  # the Live below draws it
        # Standard output is not redirected: results go there, not among the bars on standard error.
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, redirect_stdout=False)
        self._plain = not self._console.is_terminal or self._console.is_dumb_terminal

    def advance(self, phase: str, fraction: float | None, text: str) -> None:
        """`fraction` is None where the length of the phase is unknown."""
        if self._plain:
            tenth = int(10 * fraction + 1e-9) if fraction is not None else 0
            passed = tenth > self._tenths.get(phase, 0)
            self._tenths[phase] = tenth
            if self._limiter.allow() or passed:  # in this order: the line of a tenth counts for the limit
                share = human_percent(fraction) if fraction is not None else "..."
                self.log("  ".join(part for part in (f"{self._title}: {phase}", share, text) if part))
            return
        if phase not in self._tasks:
            self._live.start()
            self._tasks[phase] = self._bars.add_task(f"{self._title}: {phase}", total=None)
        self._bars.update(self._tasks[phase], total=1.0 if fraction is not None else None, completed=fraction or 0.0)
        self._text = text

    def finish(self, phase: str) -> None:
        """The phase is complete. A phase that was never shown is ignored."""
        if phase in self._tasks:
            self._bars.update(self._tasks[phase], total=1.0, completed=1.0)
            self._text = ""

    def log(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, Text(self._text, no_wrap=True, overflow="ellipsis")) if self._text else self._bars
