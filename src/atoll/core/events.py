"""What can be reported: one class per thing that happens, one JSON line per event.

Under a virtual clock every figure in an event is a function of the Run and its seed. What depends on the machine (wall-clock time,
where the run was resumed) is written elsewhere, so that two runs with the same seed have the same log to the last digit. On real
machines times are measured: there two logs differ in their times and in what follows from times alone (utilisation, the limit of
an exchange), and in nothing else.
Times and counts start at the end of the warm start. What happens within a round carries its number, counted from 0; what
happens between two rounds (RoundFinished, Evaluated, Saved) carries the number of rounds that are over.
In an asynchronous run a round is one worker's: it begins when the hub sends the worker off, which numbers it, and it is over with
the hub's step for what the worker brought. So rounds need not be over in the order of their numbers.

A run has one clock. What happens at a moment carries it as `virtual_time_s`, seconds on the simulated cluster's clock, or as
`wall_time_s`, seconds that have passed on real machines (a run that is resumed goes on from where its checkpoint stood). The other
is None, and `time_s` is whichever counts. Every other time (`start_s`, `end_s`, `arrived_s` and so on) is on the same clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

from atoll.core.errors import AtollError


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. Subclasses are final."""

    recorded: ClassVar[bool] = True
    """Whether the event belongs in the run's log; progress does not."""

    def to_json(self) -> str:
        """One line. Floats are written so that they read back as the same float; NaN and infinity as {"float": "nan"} and so on.
        `wall_time_s` is left out where the clock is virtual."""
        # Field by field: `asdict` copies what is in them, and a log has a dozen events per round.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        record = {name: _plain(value) for name, value in values.items() if name != "wall_time_s" or value is not None}
        return json.dumps({"event": type(self).__name__} | record, allow_nan=False)


class _Moment(Protocol):
    """A moment on one of the two clocks."""

    @property
    def virtual_time_s(self) -> float | None: ...
    @property
    def wall_time_s(self) -> float | None: ...


class Timed:
    """What happens at a moment of the run.

    >>> RoundFailed(round=0, what="total", islands=[1], virtual_time_s=None, wall_time_s=2.5).time_s
    2.5
    """

    @property
    def time_s(self: _Moment) -> float:
        """On the run's clock, virtual or real."""
        time_s = self.wall_time_s if self.virtual_time_s is None else self.virtual_time_s
        if time_s is None:
            raise AtollError(
                f"{type(self).__name__} has neither virtual_time_s nor wall_time_s: a run has one clock or the other. "
                f"Give the time on the clock that counts."
            )
        return time_s


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    recipe: str
    algorithm: str
    islands: int
    params: int
    """Trainable parameters of the model."""
    steps: int
    """Inner steps each island will take after the warm start."""
    seed: int
    devices_per_island: int | None = None
    """Where the devices of an island have an algorithm of their own."""
    engine: str = "simulator"
    """What ran it, and so which clock counts: sim (a virtual one), dist or ray (a real one)."""


@dataclass(frozen=True, kw_only=True)
class WarmStartFinished(Event):
    steps: int
    tokens: int
    loss: float
    """Mean training loss over the last tenth of the warm start."""


@dataclass(frozen=True, kw_only=True)
class Computed(Event):
    """An island computed from `start_s` to `end_s` on the run's clock: `steps` optimizer steps, or the gradients of `batches`."""

    island: int
    round: int
    start_s: float
    end_s: float
    steps: int
    batches: float
    """Not a whole number where batches are cut into pieces."""
    tokens: int
    loss: float
    device: int | None = None
    """Which of the island's, where these have an algorithm of their own."""


@dataclass(frozen=True, kw_only=True)
class Exchanged(Event):
    """Islands met, or the devices of one of them. Lists run over the islands in `islands`; times are on the run's clock.

    `arrived_s` is when each was ready to exchange; the exchange went from `start_s`, when it began, to `end_s`.
    """

    round: int
    what: str
    """mean, reduce_scatter, all_gather or total."""
    islands: list[int]
    heard: list[bool]
    arrived_s: list[float]
    start_s: float
    end_s: float
    sent_bytes: list[int]
    control_bytes: list[int]
    weight: float
    background: bool = False
    """Whether islands computed meanwhile."""
    inside: int | None = None
    """The island whose devices met, over the lines between them; `islands` are then the devices."""


@dataclass(frozen=True, kw_only=True)
class LimitSet(Event):
    """How long an exchange between real machines may take before islands that did not answer are given up."""

    limit_s: float
    why: str
    """How it was derived, or who gave it."""


@dataclass(frozen=True, kw_only=True)
class Compared(Event):
    """How far the islands' contributions to a mean agreed."""

    round: int
    norms: list[float]
    mean_norm: float
    """Norm of the mean, which is what the outer rule is given."""
    cosine_mean: float | None
    """Mean of the pairwise cosines; none with fewer than two islands."""
    cosine_std: float | None


@dataclass(frozen=True, kw_only=True)
class CaughtUp(Event):
    """An island that had missed exchanges was given the shared fields by one that had not."""

    island: int
    donor: int | None
    """None if the last island that knew has left."""
    round: int
    start_s: float
    end_s: float
    sent_bytes: int
    """By the donor."""


@dataclass(frozen=True, kw_only=True)
class IslandJoined(Timed, Event):
    island: int
    round: int
    virtual_time_s: float | None
    """When it can begin: after it received the shared fields."""
    wall_time_s: float | None = None
    donor: int | None
    sent_bytes: int
    """By the donor."""


@dataclass(frozen=True, kw_only=True)
class IslandLeft(Timed, Event):
    island: int
    round: int
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dispatched(Timed, Event):
    """The hub sent a worker off with its present weights."""

    island: int
    round: int
    version: int
    """Updates that the hub had applied by then."""
    shard: int
    start: int
    """Position in the shard, in batches."""
    schedule: int
    """Position on the learning-rate schedule, which follows the shard."""
    steps: int
    virtual_time_s: float | None
    wall_time_s: float | None = None
    begin_s: float
    """When the worker has the weights."""
    sent_bytes: int
    """By the hub."""
    devices: int = 1
    """Of the worker, which share out its batches."""


@dataclass(frozen=True, kw_only=True)
class Arrived(Timed, Event):
    """A worker's update reached the hub, which took its step."""

    island: int
    round: int
    window: int
    """Which grace window it fell into, counted from 0."""
    shard: int
    steps: int
    pushed_s: float
    """When the worker began to send."""
    virtual_time_s: float | None
    """When it was there."""
    wall_time_s: float | None = None
    version: int
    """Updates that the hub has applied, this one included if it was."""
    staleness: int
    """Updates applied between dispatch and arrival."""
    applied: bool
    """Whether it was; an update may be left out for being too late."""
    norm: float
    """Of the delta."""
    sent_bytes: int
    """By the worker."""


@dataclass(frozen=True, kw_only=True)
class WindowClosed(Timed, Event):
    """A grace window closed: the hub dispatches the workers that arrived in it together."""

    window: int
    islands: list[int]
    """In order of arrival."""
    opened_s: float
    """The first arrival."""
    virtual_time_s: float | None
    wall_time_s: float | None = None
    idle_s: list[float]
    """How long each of them waited."""


@dataclass(frozen=True, kw_only=True)
class Refused(Timed, Event):
    """A hub, or the other islands, did not take what an island brought: the weights stayed as if it had not come. The island goes
    on from the global weights."""

    island: int
    round: int
    virtual_time_s: float | None
    wall_time_s: float | None = None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Returned(Timed, Event):
    """A round ended without an update: its shard's count was put back."""

    island: int
    round: int
    shard: int
    steps: int
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class HubRestarted(Timed, Event):
    """A hub's process died, and another goes on. What was taken after the last checkpoint is lost, and is done again."""

    checkpoint: str | None
    """That it goes on from; none if there was none, so that it begins again with the weights that the run began with."""
    round: int
    lost_rounds: int
    lost_local_updates: int
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class HubLoad(Timed, Event):
    """How busy a real hub was since the last such event."""

    seconds: float
    """That have passed since."""
    pushes: int
    busy: float
    """Share of the time in which an update was being applied, or a checkpoint gathered."""
    apply_s: float
    """Seconds for each, on average."""
    waited_s: float
    """That each waited for its turn, on average."""
    most_waiting: int
    """Updates that were there at one time, the one being applied included."""
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Attended(Timed, Event):
    """Who was there when islands that come and go committed."""

    round: int
    known: int
    """All that ever took part."""
    alive: int
    """Of those, and of newcomers, as far as the one who writes this knows."""
    participating: int
    """Whose work is in the commit."""
    attempts: int
    """Until it succeeded; more than 1 if an island died on the way."""
    epoch: int
    digest: str
    """Of all that islands hold alike: each of them has compared it with the others'."""
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Leased(Timed, Event):
    """What became of the data that was leased for a round. Each entry is an island, a shard, the first batch, and how many."""

    round: int
    delivered: list[list[int]]
    """In the commit."""
    returned: list[list[int]]
    """To be leased again: the island died, fell behind, or was refused."""
    dropped: list[list[int]] = field(default_factory=list)
    """Never to be leased again: several islands were refused with it, or the only one was several times."""
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundFailed(Timed, Event):
    """An exchange that needs all islands missed one: the round is void for all, and the weights before it stand."""

    round: int
    what: str
    """reduce_scatter, all_gather or total."""
    islands: list[int]
    """Those that were not heard."""
    virtual_time_s: float | None
    wall_time_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateSkipped(Timed, Event):
    """Gradients of an island were not finite, or no island had any: all islands skip the update, and their weights stay."""

    round: int
    islands: list[int]
    """Whose gradients were not finite."""
    virtual_time_s: float | None
    wall_time_s: float | None = None
    inside: int | None = None
    """The island whose devices alone skipped it; `islands` are then the devices."""


MEMORY_KINDS = ("parameters", "gradients", "communication", "optimizer", "copies")
"""What memory is held for: MemoryCounted has bytes of each."""


@dataclass(frozen=True, kw_only=True)
class MemoryCounted(Event):
    """What an island held in live tensors at the moment of a round at which it held most, activations and batches apart."""

    island: int
    round: int
    params: int
    """Trainable parameters."""
    parameters_bytes: int
    """The module's weights and buffers."""
    gradients_bytes: int
    communication_bytes: int
    """What travels, and what an exchange brought."""
    optimizer_bytes: int
    """Master weights and moments."""
    copies_bytes: int
    """Global weights and outer momentum, where replicas train."""
    peak_bytes: int
    """All of them together."""
    formula: str | None
    """What ACCO's paper has for this algorithm, in bytes a parameter, with the run's own widths; None if it has none."""
    formula_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Recut(Event):
    """Islands came or went, and what each holds a slice of was cut anew. Lists run over the islands in `islands`."""

    round: int
    islands: list[int]
    start_s: float
    end_s: float
    sent_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class RoundFinished(Timed, Event):
    """All islands of the round are through; of an asynchronous run, one worker is. Totals are since the end of the warm start."""

    round: int
    islands: int
    steps: int
    """Position on the schedule: inner steps each island present from the start has taken."""
    virtual_time_s: float | None
    wall_time_s: float | None = None
    tokens: int
    local_updates: int
    loss: float
    """Mean training loss of the round."""
    sent_bytes_per_island: float


@dataclass(frozen=True, kw_only=True)
class Evaluated(Timed, Event):
    """The global weights on held-out data. `loss` and `accuracy` are among the metrics; they stand by themselves for a reader of
    the log with other tools."""

    round: int
    steps: int
    virtual_time_s: float | None
    wall_time_s: float | None = None
    tokens: int
    local_updates: int
    sent_bytes_per_island: float
    metrics: dict[str, float]
    loss: float = field(init=False)
    accuracy: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", self.metrics.get("loss", math.nan))
        object.__setattr__(self, "accuracy", self.metrics.get("accuracy"))


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    round: int
    name: str
    """Of the checkpoint in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Arranged(Event):
    """How islands share the device that simulates them: `stacked` in one pass, or one after the other, `apart`."""

    how: str
    why: str


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be written. The run goes on, and the last one stands."""

    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(Timed, Event):
    rounds: int
    outer_steps: int
    """Exchanges that changed the global weights."""
    steps: int
    tokens: int
    warm_start_tokens: int
    local_updates: int
    virtual_time_s: float | None
    wall_time_s: float | None = None
    utilisation: float | None
    """Mean over islands of computing time over time present."""
    sent_bytes_per_island: float
    """Payload, mean over islands."""
    control_bytes_per_island: float
    val_loss: float
    digest: str
    """Of the global weights."""
    inside_bytes_per_device: float | None = None
    """Payload over the lines inside islands, mean over devices; none where islands have no inside."""
    inside_dropped_tokens: int | None = None
    """Tokens whose gradients waited in a device when its island was given other weights, and which went into no update."""


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """For a progress display; never logged."""

    recorded: ClassVar[bool] = False
    phase: str
    done: int
    total: int
    note: str = ""


def from_json(line: str) -> Event:
    """The event that `to_json` wrote."""
    record = _read(json.loads(line))
    kind = _KINDS[record.pop("event")]
    return kind(**{f.name: record[f.name] for f in fields(kind) if f.init and f.name in record})


_KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if isinstance(value, dict):
        return float(value["float"]) if value.keys() == {"float"} else {key: _read(item) for key, item in value.items()}
    return value
