"""Events: one class per thing that a run reports, one JSON line per event.

Under a virtual clock every figure in an event is a function of the Run and its seed, so two runs with the same seed have the same
log to the last digit. What depends on the machine (wall-clock time, where the run was resumed) is written elsewhere. On real
machines times are measured: there two logs differ in their times and in what follows from times (utilisation, the limit of an
exchange), and in nothing else.

Times and counts start at the end of the warm start. An event within a round carries its number, counted from 0. An event between
two rounds (RoundFinished, Evaluated, Saved) carries the number of finished rounds. In an asynchronous run a round belongs to one
worker: the hub numbers it when it dispatches the worker, and it ends with the hub's step for the worker's update. So rounds may
finish in another order than that of their numbers.

A run has one clock. A moment is `virtual_time_s`, seconds on the simulated cluster's clock, or `wall_time_s`, seconds on real
machines (a resumed run continues from the time of its checkpoint). The other is None, and `time_s` is the one that is not. Every
other time (`start_s`, `end_s`, `arrived_s` and so on) is on the same clock.

Engines on real machines also write the absolute time of each event, `unix_time_s`: the run's clock stands still between a crash and
a resume. A simulated run has none, since two equal runs would have different logs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from atoll.core.errors import AtollError

_TIMES = ("virtual_time_s", "wall_time_s", "unix_time_s")
_OPTIONAL = ("wall_time_s", "unix_time_s")
"""Left out of the log where they are None."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. Subclasses are final."""

    recorded: ClassVar[bool] = True  # in the run's log; progress is not

    unix_time_s: float | None = field(default=None, compare=False, repr=False)
    """Seconds since 1970, in UTC. Two events are equal whenever they happened."""

    def to_json(self) -> str:
        """One line. Floats are written so that they read back as the same float; NaN and infinity as {"float": "nan"} and so on.
        Times come last, and those that the run's clock does not have are left out."""
        # Field by field: `asdict` copies the values, and a log has a dozen events per round.
        names = sorted((f.name for f in fields(self)), key=lambda name: _TIMES.index(name) if name in _TIMES else -1)
        values = {name: getattr(self, name) for name in names}
        record = {name: _plain(value) for name, value in values.items() if name not in _OPTIONAL or value is not None}
        return json.dumps({"event": type(self).__name__} | record, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Timed(Event):
    """An event with a moment, on one of the two clocks."""

    virtual_time_s: float | None
    wall_time_s: float | None = None

    @property
    def time_s(self) -> float:
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
    params: int  # trainable parameters of the model
    steps: int  # inner steps of each island after the warm start; 0 where a user's loop decides
    seed: int
    devices_per_island: int | None = None  # where the devices of an island have an algorithm of their own
    engine: str = "simulator"  # its clock is virtual; that of processes, elastic, ray and loop (`atoll.islands`) is real


@dataclass(frozen=True, kw_only=True)
class WarmStartFinished(Event):
    steps: int
    tokens: int
    loss: float  # mean training loss over the last tenth of the warm start


@dataclass(frozen=True, kw_only=True)
class Computed(Event):
    """An island computed from `start_s` to `end_s`: `steps` optimizer steps, or the gradients of `batches`."""

    island: int
    round: int
    start_s: float
    end_s: float
    steps: int
    batches: float  # a fraction where batches are cut into pieces
    tokens: int
    loss: float
    device: int | None = None  # of the island, where its devices have an algorithm of their own


@dataclass(frozen=True, kw_only=True)
class Exchanged(Event):
    """Islands exchanged, or the devices of one island. Lists run over `islands`."""

    round: int
    what: str  # mean, reduce_scatter, all_gather or total
    islands: list[int]
    heard: list[bool]
    arrived_s: list[float]  # when each was ready to exchange
    start_s: float
    end_s: float
    sent_bytes: list[int]
    control_bytes: list[int]
    weight: float
    background: bool = False  # whether islands computed meanwhile
    inside: int | None = None  # the island whose devices exchanged over their own links; `islands` are then the devices


@dataclass(frozen=True, kw_only=True)
class LimitSet(Event):
    """The timeout of an exchange between real machines. Islands that have not answered by then miss the exchange."""

    limit_s: float
    why: str  # how it was derived, or which setting gave it


@dataclass(frozen=True, kw_only=True)
class Compared(Event):
    """How far the islands' contributions to a mean agreed. With a codec they are the values that their bytes stand for."""

    round: int
    norms: list[float]
    mean_norm: float  # of the mean, the outer rule's input; with a codec before the mean itself is encoded
    cosine_mean: float | None  # of all pairs; None with fewer than two islands
    cosine_std: float | None


@dataclass(frozen=True, kw_only=True)
class CaughtUp(Event):
    """An island that had missed exchanges received the shared fields from one that had not."""

    island: int
    donor: int | None  # None if the last up-to-date island has left
    round: int
    start_s: float
    end_s: float
    sent_bytes: int  # by the donor


@dataclass(frozen=True, kw_only=True)
class IslandJoined(Timed):
    """An island joined. Its time is when it can begin, after it received the shared fields."""

    island: int
    round: int
    donor: int | None
    sent_bytes: int  # by the donor


@dataclass(frozen=True, kw_only=True)
class IslandLeft(Timed):
    island: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Dispatched(Timed):
    """The hub dispatched a worker with its present weights."""

    island: int
    round: int
    version: int  # updates that the hub had applied by then
    shard: int
    start: int  # position in the shard, in batches
    schedule: int  # position on the learning-rate schedule, which belongs to the shard
    steps: int
    begin_s: float  # when the worker has received the weights
    sent_bytes: int  # by the hub
    devices: int = 1  # of the worker, which share its batches


@dataclass(frozen=True, kw_only=True)
class Arrived(Timed):
    """A worker's update arrived at the hub, which took its step."""

    island: int
    round: int
    window: int  # the grace window of the arrival, counted from 0
    shard: int
    steps: int
    pushed_s: float  # when the worker began to send
    version: int  # updates that the hub has applied, this one included if it was
    staleness: int  # updates applied between dispatch and arrival
    applied: bool  # false if the algorithm left the update out as too stale
    norm: float  # of the delta
    sent_bytes: int  # by the worker


@dataclass(frozen=True, kw_only=True)
class WindowClosed(Timed):
    """A grace window closed: the hub dispatches the workers that arrived in it together."""

    window: int
    islands: list[int]  # in order of arrival
    opened_s: float  # the first arrival
    idle_s: list[float]  # how long each of them waited


@dataclass(frozen=True, kw_only=True)
class Refused(Timed):
    """A hub, or the other islands, refused an island's update: it changed no weight. The island continues from the global ones."""

    island: int
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Returned(Timed):
    """A round ended without an update: its batches return to their shard and are assigned again."""

    island: int
    round: int
    shard: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class HubRestarted(Timed):
    """A hub's process died and was restarted. Updates applied after the last checkpoint are lost, and their work is repeated."""

    checkpoint: str | None  # that the hub restarts from; None: from the run's initial weights
    round: int
    lost_rounds: int
    lost_local_updates: int


@dataclass(frozen=True, kw_only=True)
class HubLoad(Timed):
    """How busy a real hub was since the last such event."""

    seconds: float  # since that event
    pushes: int
    busy: float  # share of the time in which the hub applied an update, or gathered a checkpoint
    apply_s: float  # seconds per update, on average
    waited_s: float  # that an update waited for its turn, on average
    most_waiting: int  # updates in the hub at one time, the one being applied included


@dataclass(frozen=True, kw_only=True)
class Attended(Timed):
    """The quorum of a commit in an elastic run."""

    round: int
    known: int  # islands that ever took part
    alive: int  # of those and of joiners, as the leader knows them
    participating: int  # islands whose work is in the commit
    attempts: int  # until the commit succeeded; more than 1 if an island died meanwhile
    epoch: int
    digest: str  # of the replicated state; each island has compared it with the others'


@dataclass(frozen=True, kw_only=True)
class Leased(Timed):
    """What a commit did to the data leases. Each entry is an island, a shard, the first batch, and the number of batches."""

    round: int
    delivered: list[list[int]]  # in the commit
    returned: list[list[int]]  # to be leased again: the island died, fell behind, or was refused
    dropped: list[list[int]] = field(default_factory=list)  # never leased again, after several refusals with these batches


@dataclass(frozen=True, kw_only=True)
class RoundFailed(Timed):
    """An exchange that needs all islands missed one: the round is void for all, and the weights before it stand."""

    round: int
    what: str  # reduce_scatter, all_gather or total
    islands: list[int]  # that missed the exchange


@dataclass(frozen=True, kw_only=True)
class UpdateSkipped(Timed):
    """Gradients of an island were not finite, or no island had any: all islands skip the update, and their weights stay."""

    round: int
    islands: list[int]  # whose gradients were not finite
    inside: int | None = None  # the island whose devices alone skipped it; `islands` are then the devices


MEMORY_KINDS = ("parameters", "gradients", "communication", "optimizer", "copies")
"""What memory is held for: MemoryCounted has bytes of each."""


@dataclass(frozen=True, kw_only=True)
class MemoryCounted(Event):
    """The peak of an island's live tensors in a round, without activations and batches."""

    island: int
    round: int
    params: int  # trainable parameters
    parameters_bytes: int  # the module's weights and buffers
    gradients_bytes: int
    communication_bytes: int  # buffers of exchanges, sent and received
    optimizer_bytes: int  # master weights and moments
    copies_bytes: int  # global weights and outer momentum, where replicas train
    peak_bytes: int  # all of them together
    formula: str | None  # of ACCO's paper for this algorithm, in bytes per parameter at the run's precisions; None: it has none
    formula_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Recut(Event):
    """Islands joined or left, and sharded fields were cut anew. Lists run over `islands`."""

    round: int
    islands: list[int]
    start_s: float
    end_s: float
    sent_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class RoundFinished(Timed):
    """All islands of a round have finished; in an asynchronous run, one worker has. Totals start at the end of the warm start."""

    round: int
    islands: int
    steps: int  # position on the schedule: inner steps of an island that was present from the start
    tokens: int
    local_updates: int
    loss: float  # mean training loss of the round
    sent_bytes_per_island: float


@dataclass(frozen=True, kw_only=True)
class Evaluated(Timed):
    """The global weights on held-out data. `loss` and `accuracy` repeat two of the metrics for readers of the log."""

    round: int
    steps: int
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
    name: str  # of the checkpoint in the run's folder


@dataclass(frozen=True, kw_only=True)
class Arranged(Event):
    """How islands share the device that simulates them: `stacked` in one pass, or one after the other, `apart`."""

    how: str
    why: str


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be written. The run continues, and the last checkpoint stands."""

    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LogDamaged(Event):
    """Lines of the log are lost: another program truncated or replaced it, or no process remembers them. The run continues.
    `read_events` also returns it in the place of a line that it cannot read."""

    what: str
    lost_bytes: int | None = None  # None if that is unknown


@dataclass(frozen=True, kw_only=True)
class RunFinished(Timed):
    rounds: int
    outer_steps: int  # exchanges that changed the global weights
    steps: int
    tokens: int
    warm_start_tokens: int
    local_updates: int
    utilisation: float | None  # mean over islands of computing time over time present
    sent_bytes_per_island: float  # payload, mean over islands
    control_bytes_per_island: float
    val_loss: float
    digest: str  # of the global weights
    inside_bytes_per_device: float | None = None  # payload over links inside islands, mean over devices; None without such links
    inside_dropped_tokens: int | None = None  # of pending gradients that a device dropped when its island received other weights
    busiest_second_bytes: float | None = None  # payload that an island sent, or got from a hub, within any second, at most


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """For a progress display; never logged."""

    recorded: ClassVar[bool] = False
    phase: str
    done: int
    total: int
    note: str = ""


def read_event(line: str) -> Event:
    """The event that `to_json` wrote."""
    record = _read(json.loads(line))
    kind = KINDS[record.pop("event")]
    return kind(**{f.name: record[f.name] for f in fields(kind) if f.init and f.name in record})


KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind for base in (Event, Timed) for kind in base.__subclasses__() if kind is not Timed
}
"""All events by name."""


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
