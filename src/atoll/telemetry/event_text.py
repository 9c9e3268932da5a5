"""Events as short lines for a person who watches a run."""

from __future__ import annotations

import math

from atoll.core.events import (
    Arranged,
    Attended,
    CaughtUp,
    Evaluated,
    Event,
    HubRestarted,
    IslandJoined,
    IslandLeft,
    LimitSet,
    Refused,
    Returned,
    RoundFailed,
    RoundFinished,
    RunFinished,
    RunStarted,
    Saved,
    SaveFailed,
    UpdateSkipped,
    WarmStartFinished,
)
from atoll.telemetry.clocks import clock_at
from atoll.telemetry.running_totals import Tally
from atoll.telemetry.units import human_bytes, human_count, human_percent, human_time


def notice(event: Event, who: str | None = None) -> str | None:
    """One line for an event worth a line of its own; None for the others. `who` trains, if that is known better than by the event.

    >>> notice(IslandLeft(island=2, round=7, virtual_time_s=754.0))
    'round 7: island 2 left at 0:12:34'
    """
    match event:
        case RunStarted():
            where = f"{who or _islands(event)}{_engine(event)}"
            return (
                f"{event.recipe}: {event.algorithm} on {where}, {human_count(event.params)} parameters, "
                f"{event.steps} steps each, seed {event.seed}"
            )
        case LimitSet():
            return f"an exchange may take {human_time(event.limit_s)} ({event.why})"
        case WarmStartFinished():
            return f"warm start: {event.steps} steps, {human_count(event.tokens)} tokens, loss {event.loss:.4g}"
        case Evaluated():
            return f"round {event.round}, step {event.steps}: {_metrics(event.metrics)}, {human_count(event.tokens)} tokens"
        case IslandJoined():
            return f"round {event.round}: island {event.island} joined at {human_time(event.time_s)}{_given(event)}"
        case IslandLeft():
            return f"round {event.round}: island {event.island} left at {human_time(event.time_s)}"
        case Refused():
            at = human_time(event.time_s)
            return f"the update of island {event.island} from its round no. {event.round} was refused at {at} ({event.reason})"
        case Returned():
            lost = f"{event.steps} steps of shard {event.shard} are put back"
            return f"island {event.island} brings nothing from its round no. {event.round}: {lost}"
        case HubRestarted():
            return _restarted(event)
        case Attended():
            return _attended(event)
        case Arranged():
            together = "together in one pass" if event.how == "stacked" else "one after the other"
            return f"islands compute {together}: {event.why}"
        case SaveFailed():
            return f"round {event.round}: not saved, and training goes on: {event.reason}"
        case RoundFailed():
            silent = ", ".join(map(str, event.islands))
            return f"round {event.round}: void, since {event.what} needs everybody and did not hear of: {silent}"
        case UpdateSkipped():
            return f"round {event.round}: {_skipped(event)}"
        case CaughtUp():
            return f"round {event.round}: island {event.island} caught up{_given(event)}"
        case Saved():
            return f"round {event.round}: saved {event.name}"
        case RunFinished():
            return f"finished: {_outcome(event)}"
        case _:
            return None


def _attended(event: Attended) -> str | None:
    """Only where somebody was missed: who else was there."""
    if event.participating == event.alive and event.attempts == 1:
        return None
    again = f", at attempt {event.attempts}" if event.attempts > 1 else ""
    return f"round {event.round}: committed by {event.participating} of {event.alive} islands alive ({event.known} known){again}"


def _restarted(event: HubRestarted) -> str:
    """Where the next hub goes on, and what is done again."""
    where = "with the weights that the run began with: there is no checkpoint yet"
    if event.checkpoint is not None:
        where = f"from checkpoint {event.checkpoint}"
    lost = f"{event.lost_rounds} rounds are lost ({event.lost_local_updates} local updates)"
    return f"another hub goes on at {human_time(event.time_s)} {where}; {lost}"


def _islands(event: RunStarted) -> str:
    islands = f"{event.islands} islands" if event.islands != 1 else "1 island"
    each = event.devices_per_island
    return islands if each is None else f"{islands} of {each} device{'s' if each != 1 else ''}"


def _engine(event: RunStarted) -> str:
    """Only where the machines are real: a run is simulated unless it is said."""
    return "" if event.engine == "sim" else f" (engine {event.engine})"


def figures(event: RoundFinished, tally: Tally) -> str:
    """What stands beside the bar: loss, validation loss, the run's time, bytes per island, utilisation, as far as known.

    With a hub also how many local updates are done, how late the last arrivals were, and how many workers there are.
    """
    parts = [f"loss {event.loss:.3f}"]
    if tally.evaluation is not None and "loss" in tally.evaluation.metrics:
        parts.append(f"val {tally.evaluation.metrics['loss']:.3f}")
    if tally.asynchronous:
        parts += _at_the_hub(event, tally)
    parts += [f"{clock_at(event)} time {human_time(event.time_s)}", f"{human_bytes(event.sent_bytes_per_island)} per island"]
    utilisation = tally.utilisation(event.time_s)
    if utilisation is not None:
        parts.append(f"busy {human_percent(utilisation)}")
    return "  ".join(parts)


def local_updates_total(started: RunStarted) -> int:
    """Of all islands together; a run with a hub ends when they are reached, whoever made them."""
    return started.steps * started.islands


def _at_the_hub(event: RoundFinished, tally: Tally) -> list[str]:
    done, total = event.local_updates, ""
    if tally.started is not None:
        # What workers were out with when the run had enough is more than it asked for.
        done, total = min(done, local_updates_total(tally.started)), f"/{human_count(local_updates_total(tally.started))}"
    staleness = tally.staleness()
    late = [f"staleness {staleness:.1f}"] if staleness is not None else []
    workers = f"{event.islands} workers" if event.islands != 1 else "1 worker"
    return [f"updates {human_count(done)}{total}", *late, workers]


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats; infinite where that overflows.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _given(event: CaughtUp | IslandJoined) -> str:
    return f", {human_bytes(event.sent_bytes)} from island {event.donor}" if event.donor is not None else ""


def _skipped(event: UpdateSkipped) -> str:
    """Why, and who; devices by island and number, as everywhere."""
    inside = event.inside
    names = [str(number) if inside is None else f"{inside}.{number}" for number in event.islands]
    kind = ("island" if inside is None else "device") + ("s" if len(names) > 1 else "")
    everyone = "all islands" if inside is None else f"all devices of island {inside}"
    why = f"gradients of {kind} {', '.join(names)} are not finite" if names else "nobody has gradients"
    return f"{why}, so {everyone} skip the update"


def _metrics(metrics: dict[str, float]) -> str:
    named = {"val loss": metrics["loss"], "perplexity": perplexity(metrics["loss"])} if "loss" in metrics else {}
    named |= {name: value for name, value in metrics.items() if name != "loss"}
    return ", ".join(f"{name} {value:.4g}" for name, value in named.items())


def _outcome(event: RunFinished) -> str:
    parts = [f"val loss {event.val_loss:.4g}", f"{event.rounds} rounds", f"{human_count(event.tokens)} tokens"]
    parts.append(f"{human_bytes(event.sent_bytes_per_island)} sent per island")
    parts.append(f"{human_time(event.time_s)} of {clock_at(event)} time")
    if event.utilisation is not None:
        parts.append(f"{human_percent(event.utilisation)} of it computing")
    return ", ".join(parts)
