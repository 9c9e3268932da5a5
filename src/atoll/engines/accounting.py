"""The accounting of a run, for every engine: ledgers per island, totals of the run, and the events that follow from them.

Every reported figure since the warm start comes from here. A checkpoint saves all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Dispatch
from atoll.core import events as ev
from atoll.core.errors import ConfigError, TrainingDiverged
from atoll.core.protocols import Sink
from atoll.engines.async_hub import Applied, AsyncHub, Refusal

MAX_SKIPPED = 20
"""Updates skipped in a row that end a run."""
MAX_REFUSALS = 3
"""Updates of one worker refused in a row that end a run."""


def count_in_a_row(before: int, skipped: bool, where: str = "", why: str = "") -> int:
    """How many updates were skipped in a row, now that one more was skipped or not. Raises TrainingDiverged at `MAX_SKIPPED`."""
    if skipped and before + 1 == MAX_SKIPPED:
        why = why or "gradients were not finite, or empty. Look at the data, or lower the learning rate."
        raise TrainingDiverged(f"{MAX_SKIPPED} updates in a row were skipped{where}: {why}")
    return before + 1 if skipped else 0


def diverged_loss(loss: float, where: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"the loss is {loss} on {where}. The run stops; checkpoints from before this round are valid. Lower the learning rate, set "
        f"train.clip_norm, or look at this island's data."
    )


def diverged_hub(arrivals: int) -> TrainingDiverged:
    return TrainingDiverged(
        f"the hub's weights are no longer finite after {arrivals} arrivals, though every delta was. The run stops; its checkpoints "
        f"are valid. Lower the outer learning rate, or the weight of each arrival."
    )


def diverged_weights(round: int, inputs: str = "loss") -> TrainingDiverged:
    """The weights after a round are not finite, though every input of the update was."""
    return TrainingDiverged(
        f"the global weights are no longer finite after round {round}, though every {inputs} was. The run stops; checkpoints from "
        f"before this round are valid. Lower the learning rates, the outer one too, or set train.clip_norm."
    )


class ComputeSpan(NamedTuple):
    """What an island computed between two moments. `losses` has that of each step, or their mean; `moved` is whether the steps
    changed the weights."""

    start_s: float
    end_s: float
    steps: int
    batches: float
    losses: Sequence[float]
    tokens: int
    moved: bool = True

    @property
    def loss(self) -> float:
        return fmean(self.losses)


_RESOLUTION_S = 1 / 1024
"""Transfers that begin within this time of each other count as one, so that a second has at most about so many."""


@dataclass
class BusiestSecond:
    """The most payload that crossed a link in one direction within any second. Transfers follow each other, each at an even rate.

    The bytes of a window of one second change linearly while the window moves, so they are greatest where it begins with a transfer
    or ends with one.
    """

    num_bytes: float = 0.0
    recent: list[list[float]] = field(default_factory=list)
    """The start, the end and the bytes of each transfer of the last second."""

    def add(self, num_bytes: float, start_s: float, end_s: float) -> None:
        start_s = max(start_s, self.recent[-1][1]) if self.recent else start_s
        end_s = max(start_s, end_s)
        if self.recent and start_s - self.recent[-1][0] < _RESOLUTION_S:
            self.recent[-1][1:] = end_s, self.recent[-1][2] + num_bytes
        else:
            self.recent.append([start_s, end_s, num_bytes])
        begins = [begin_s for begin_s, *_ in self.recent if start_s < begin_s + 1 <= end_s]
        windows = [self._within(end_s - 1), *(self._within(begin_s, with_start=True) for begin_s in begins)]
        self.num_bytes = max(self.num_bytes, *windows)
        self.recent = [each for each in self.recent if each[1] > end_s - 1]

    @staticmethod
    def of(num_bytes: float, recent: Iterable[Iterable[float]]) -> BusiestSecond:
        """From what a checkpoint or another island's snapshot has, whose ledgers no digest covers."""
        transfers = [(float(start_s), float(end_s), float(each)) for start_s, end_s, each in recent]
        return BusiestSecond(float(num_bytes), [list(each) for each in transfers])

    def _within(self, begin_s: float, *, with_start: bool = False) -> float:
        """The bytes of the second that begins then: it has its first moment, or its last."""
        total = 0.0
        for start_s, end_s, num_bytes in self.recent:
            if start_s < end_s:
                total += num_bytes * max(0.0, min(end_s, begin_s + 1) - max(start_s, begin_s)) / (end_s - start_s)
            elif begin_s <= start_s < begin_s + 1 if with_start else begin_s < start_s <= begin_s + 1:
                total += num_bytes
        return total


@dataclass
class Ledger:
    """The account of one island, kept while it is absent; or of one device of an island, whose bytes stay inside the island."""

    sent_bytes: int = 0
    control_bytes: int = 0
    computed_s: float = 0.0
    present_s: float = 0.0
    spans: int = 0
    """Compute spans so far."""
    sending: BusiestSecond = field(default_factory=BusiestSecond)
    """Of payload. A donor's transfers are not in it."""
    pulling: BusiestSecond = field(default_factory=BusiestSecond)
    """Of what a hub sent to this worker."""

    @property
    def utilisation(self) -> float:
        return self.computed_s / self.present_s if self.present_s else 0.0

    @property
    def busiest_second_bytes(self) -> float:
        return max(self.sending.num_bytes, self.pulling.num_bytes)

    def add_bytes(self, payload_bytes: int, control_bytes: int, start_s: float | None = None, end_s: float = 0.0) -> None:
        """Bytes that left evenly between these times. An island's exchanges follow each other."""
        self.sent_bytes += payload_bytes
        self.control_bytes += control_bytes
        if start_s is not None and payload_bytes:
            self.sending.add(payload_bytes, start_s, end_s)

    @staticmethod
    def of(parts: Mapping[str, Any]) -> Ledger:
        """What `asdict` has made a mapping of. Those of older versions counted seconds of the clock."""
        plain: dict[str, Any] = {f.name: parts[f.name] for f in fields(Ledger) if not isinstance(f.default_factory, type)}
        before = {"num_bytes": parts.get("busiest_second_bytes", 0.0), "recent": []}
        directions = {name: parts.get(name, before) for name in ("sending", "pulling")}
        plain |= {name: BusiestSecond.of(**each) for name, each in directions.items()}
        return Ledger(**plain)


@dataclass
class DepartedIslands:
    """The sums of the ledgers of islands that left so long ago that their own are no longer kept."""

    islands: int = 0
    seen: int = 0
    """Islands that were present in a round. The figures below are theirs."""
    sent_bytes: int = 0
    control_bytes: int = 0
    utilisation: float = 0.0
    busiest_second_bytes: float = 0.0
    """Of the busiest island."""

    def add(self, ledger: Ledger) -> None:
        self.islands += 1
        if ledger.present_s > 0:
            self.seen += 1
            self.sent_bytes += ledger.sent_bytes
            self.control_bytes += ledger.control_bytes
            self.utilisation += ledger.utilisation
            self.busiest_second_bytes = max(self.busiest_second_bytes, ledger.busiest_second_bytes)


@dataclass
class Totals:
    """Sums over all islands."""

    round: int = 0
    steps: int = 0
    outer_steps: int = 0
    failed_rounds: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    """In committed updates."""
    local_updates: int = 0
    version: int = 0
    """Commits, which is the version of the shared fields."""
    dropped_tokens: int = 0
    """In pending gradients of devices whose island loaded other weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""


class RunAccounting:
    """Ledgers and totals of one run of `islands` planned islands, of `devices` each if these run an algorithm of their own. With
    `real`, times are seconds of a wall clock, else of a virtual clock."""

    def __init__(self, islands: int, devices: int = 0, *, real: bool = False) -> None:
        self.ledgers = [Ledger() for _ in range(islands)]
        self.device_ledgers = [[Ledger() for _ in range(devices)] for _ in range(islands if devices else 0)]
        self.departed = DepartedIslands()
        self.totals = Totals()
        self.divergence = ""
        """Describes the last loss that was not finite."""
        self.counts_device_bytes = True
        """False if the bytes between the devices of an island are unknown."""
        self._losses: list[float] = []
        self._planned, self._real = islands, real

    def ledger(self, island: int, device: int | None = None) -> Ledger:
        return self.ledgers[island] if device is None else self.device_ledgers[island][device]

    # ------------------------------------------------------------------------------------------------------ within a round

    def sent(self, island: int, payload_bytes: int, control_bytes: int, start_s: float | None = None, end_s: float = 0.0) -> None:
        """Accounts what an island sent to one receiver, between these times if they are known."""
        self.ledgers[island].add_bytes(payload_bytes, control_bytes, start_s, end_s)

    def exchanged(
        self,
        what: str,
        *,
        islands: Sequence[int],
        arrived_s: Sequence[float],
        end_s: float,
        sent_bytes: Sequence[int],
        control_bytes: Sequence[int],
        weight: float,
        start_s: float | None = None,
        heard: Sequence[bool] | None = None,
        background: bool = False,
        inside: int | None = None,
    ) -> ev.Exchanged:
        """Accounts one exchange between islands, or between the devices of island `inside`. All take part unless `heard` says
        otherwise, and it starts when the last has arrived unless `start_s` says otherwise."""
        start_s = max(arrived_s) if start_s is None else start_s
        ledgers = [self.ledgers[island] for island in islands] if inside is None else self.device_ledgers[inside]
        for ledger, payload, control in zip(ledgers, sent_bytes, control_bytes, strict=True):
            ledger.add_bytes(payload, control, start_s, end_s)
        return ev.Exchanged(
            round=self.totals.round,
            what=what,
            islands=list(islands),
            heard=[True] * len(islands) if heard is None else list(heard),
            arrived_s=list(arrived_s),
            start_s=start_s,
            end_s=end_s,
            sent_bytes=list(sent_bytes),
            control_bytes=list(control_bytes),
            weight=weight,
            background=background,
            inside=inside,
        )

    def compared(self, products: Sequence[Sequence[float]], weights: Sequence[float]) -> ev.Compared:
        """Norms and cosines of the contributions to a mean, from their weights and the matrix of their inner products."""
        counted = [i for i, weight in enumerate(weights) if weight]  # a tree of weight 0 need not be finite
        squared = exact_sum(weights[i] * weights[j] * products[i][j] for i in counted for j in counted)
        mean_norm = math.sqrt(squared if math.isnan(squared) else max(0.0, squared)) / sum(weights)
        norms = [math.sqrt(row[i]) for i, row in enumerate(products)]
        pairs = [(i, j) for i, j in combinations(range(len(norms)), 2) if 0 < norms[i] < math.inf and 0 < norms[j] < math.inf]
        cosines = [products[i][j] / (norms[i] * norms[j]) for i, j in pairs if math.isfinite(products[i][j])]
        return ev.Compared(
            round=self.totals.round,
            norms=norms,
            mean_norm=mean_norm,
            cosine_mean=fmean(cosines) if cosines else None,
            cosine_std=pstdev(cosines) if cosines else None,
        )

    def computed(self, island: int, span: ComputeSpan, round: int | None = None, device: int | None = None) -> ev.Computed:
        """Accounts a compute span of an island, or of one of its devices, in the present round unless another is given. Raises
        TrainingDiverged if a loss is not finite and the island has updated its weights with it. A gradient may still be skipped."""
        round = self.totals.round if round is None else round
        for step, loss in enumerate(span.losses):
            if not math.isfinite(loss):
                where = f"at inner step {self.totals.steps + step}" if device is None else f"on its device {device}"
                diverged = diverged_loss(loss, f"island {island} in round {round}, {where}")
                self.divergence = str(diverged)
                if span.moved:
                    raise diverged
        self.ledgers[island].computed_s += (span.end_s - span.start_s) / (1 if device is None else len(self.device_ledgers[island]))
        if device is not None:
            self.device_ledgers[island][device].computed_s += span.end_s - span.start_s
        self.totals.local_updates += span.steps
        self._losses.append(span.loss)
        return ev.Computed(
            island=island,
            round=round,
            start_s=span.start_s,
            end_s=span.end_s,
            steps=span.steps,
            batches=span.batches,
            tokens=span.tokens,
            loss=span.loss,
            device=device,
        )

    def count_skipped(self, event: ev.UpdateSkipped | None, in_a_row: int, sink: Sink) -> int:
        """Reports the skipped update, if there is one, and returns `count_in_a_row`."""
        if event is None:
            self.divergence = ""  # the skipped gradients did no harm
            return 0
        sink.emit(event)
        where = "" if event.inside is None else f" inside island {event.inside}"
        return count_in_a_row(in_a_row, skipped=True, where=where, why=self.divergence)

    # ---------------------------------------------------------------------------------------------------------- after a round

    def round_finished(self, steps: int, islands: int, time_s: float) -> ev.RoundFinished:
        """Ends a round of this many present islands, after which the run has taken `steps` steps."""
        self.totals.steps = steps
        self.totals.round += 1
        loss = fmean(self._losses) if self._losses else math.nan
        self._losses = []
        return ev.RoundFinished(round=self.totals.round, islands=islands, loss=loss, **self._figures(time_s))

    def update_applied(
        self, applied: Applied, spans: Iterable[ComputeSpan], *, pushed_s: float, sent_bytes: int, workers: int
    ) -> Iterator[ev.Event]:
        """Accounts the hub step that ends a worker's round. Steps of the run are local updates over the planned islands."""
        dispatch = applied.dispatch
        for span in spans:
            yield self.computed(dispatch.worker, span, round=dispatch.round)
            self.totals.tokens += span.tokens * applied.counted
        self.totals.version = applied.version
        self.totals.outer_steps += applied.moved
        yield ev.Arrived(
            **_worker_round(dispatch),
            window=applied.window,
            pushed_s=pushed_s,
            version=applied.version,
            staleness=applied.staleness,
            applied=applied.counted,
            norm=applied.norm,
            sent_bytes=sent_bytes,
            **self._clock_fields(applied.time_s),
        )
        yield self.round_finished(self.totals.local_updates // self._planned, workers, applied.time_s)

    def evaluation_due(self, time_s: float) -> ev.Evaluated:
        """The evaluation of the present weights, before its metrics are known."""
        return ev.Evaluated(round=self.totals.round, metrics={}, **self._figures(time_s))

    def set_metrics(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of the last evaluation."""
        if "loss" not in metrics:
            raise ConfigError(f"Workload.evaluate returned {sorted(metrics)}: it must have at least `loss`. Add it to the mapping.")
        self.totals.metrics = {name: float(value) for name, value in metrics.items()}

    def evaluated(self, metrics: Mapping[str, float], time_s: float) -> ev.Evaluated:
        """Records an evaluation of the present weights."""
        self.set_metrics(metrics)
        return replace(self.evaluation_due(time_s), metrics=self.totals.metrics)

    def finished(self, time_s: float, warm_start_tokens: int, digest: str) -> ev.RunFinished:
        """The event of the end of the run."""
        return ev.RunFinished(
            rounds=self.totals.round,
            outer_steps=self.totals.outer_steps,
            warm_start_tokens=warm_start_tokens,
            utilisation=self._mean("utilisation"),
            control_bytes_per_island=self._mean("control_bytes"),
            val_loss=self.totals.metrics["loss"],
            digest=digest,
            inside_bytes_per_device=self._bytes_per_device(),
            inside_dropped_tokens=self.totals.dropped_tokens if self.device_ledgers else None,
            busiest_second_bytes=max([self.departed.busiest_second_bytes, *(one.busiest_second_bytes for one in self._seen())]),
            **self._figures(time_s),
        )

    def _figures(self, time_s: float) -> dict[str, Any]:
        """The fields that all events about the run's progress have."""
        totals = {"steps": self.totals.steps, "tokens": self.totals.tokens, "local_updates": self.totals.local_updates}
        return {**totals, "sent_bytes_per_island": self._mean("sent_bytes"), **self._clock_fields(time_s)}

    def _clock_fields(self, time_s: float) -> dict[str, Any]:
        return {"virtual_time_s": None if self._real else time_s, "wall_time_s": time_s if self._real else None}

    def _bytes_per_device(self) -> float | None:
        pairs = zip(self.device_ledgers, self.ledgers, strict=False)
        seen = [devices for devices, island in pairs if island.present_s > 0] if self.counts_device_bytes else []
        return fmean(ledger.sent_bytes for devices in seen for ledger in devices) if seen else None

    def _mean(self, name: str) -> float:
        """Over the islands that have ever been present."""
        ledgers = self._seen() or self.ledgers
        figures = [getattr(one, name) for one in (self.departed, *ledgers)]
        return math.fsum(figures) / (self.departed.seen + len(ledgers))

    def _seen(self) -> list[Ledger]:
        return [ledger for ledger in self.ledgers if ledger.present_s > 0]

    def to_parts(self) -> dict[str, Any]:
        return {
            "totals": asdict(self.totals),
            "ledgers": [asdict(ledger) for ledger in self.ledgers],
            "device_ledgers": [[asdict(ledger) for ledger in devices] for devices in self.device_ledgers],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.totals = Totals(**parts["totals"])
        self.ledgers = [Ledger.of(ledger) for ledger in parts["ledgers"]]
        self.device_ledgers = [[Ledger.of(ledger) for ledger in devices] for devices in parts["device_ledgers"]]

    # ------------------------------------------------------------------------------------------------------------------ a hub

    def dispatched(self, dispatch: Dispatch, begin_s: float, sent_bytes: int, *, devices: int = 1) -> ev.Dispatched:
        """Accounts what the hub sent to a worker, which began its round at `begin_s`."""
        self.ledgers[dispatch.worker].pulling.add(sent_bytes, dispatch.time_s, begin_s)
        return ev.Dispatched(
            **_worker_round(dispatch),
            version=dispatch.version,
            start=dispatch.work.start,
            schedule=dispatch.work.schedule,
            begin_s=begin_s,
            sent_bytes=sent_bytes,
            devices=devices,
            **self._clock_fields(dispatch.time_s),
        )

    def hub_event(self, outcome: ClosedWindow | AbandonedRound | Refusal) -> ev.Event:
        """The event of an outcome that is neither a dispatch nor a hub step."""
        times = self._clock_fields(outcome.time_s)
        match outcome:
            case ClosedWindow(window=window, workers=workers, opened_s=opened_s, idle_s=idle_s):
                return ev.WindowClosed(window=window, islands=list(workers), opened_s=opened_s, idle_s=list(idle_s), **times)
            case AbandonedRound(dispatch=dispatch):
                return ev.Returned(**_worker_round(dispatch), **times)
            case Refusal(worker=worker, round=round, reason=reason):
                return ev.Refused(island=worker, round=round, reason=reason, **times)

    def hub_parts(self, hub: AsyncHub, buffers: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of a checkpoint of a hub, this accounting, the buffers of the last arrival, and what the engine adds."""
        parts = hub.to_parts()
        versions = parts["versions"]
        return {
            "engine": {**self.to_parts(), "hub": parts["plain"], "versions": list(versions), **engine},
            "hub": {"state": parts["state"]},
            "buffers": {"buffers": buffers, "encoded": parts["encoded"]},
            **{f"version-{name}": {"params": tree} for name, tree in versions.items()},
        }

    def restore_hub(self, hub: AsyncHub, load: Callable[[str, Any], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restores what `hub_parts` returned, and returns the engine's part and the buffers. `load(part, like)` loads a part, with
        the types of `like`."""
        engine: dict[str, Any] = load("engine", None)
        self.from_parts(engine)
        versions = {name: load(f"version-{name}", {"params": hub.params})["params"] for name in engine["versions"]}
        tensors = load("buffers", None)
        hub.from_parts(load("hub", {"state": hub.state})["state"], versions, tensors["encoded"], engine["hub"])
        buffers: dict[str, Any] = tensors["buffers"]
        return engine, buffers


def exact_sum(values: Iterable[float]) -> float:
    """The exact sum; the plain one where there is none, such as of opposite infinities."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return sum(terms)


def _worker_round(dispatch: Dispatch) -> dict[str, Any]:
    return {"island": dispatch.worker, "round": dispatch.round, "shard": dispatch.work.shard, "steps": dispatch.steps}
