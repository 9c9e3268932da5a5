"""The runs of `elastic_cost.py`: the same Run with and without elasticity, and two islands of which one is killed."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ExchangeFailed
from atoll.core.events import Attended, Computed, Event, Exchanged, Leased, RoundFinished, RunFinished
from atoll.data.text_dataset import Text
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.snapshot_server import fetch_snapshot
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.network_interfaces import free_port
from atoll.engines.processes.spec import Processes
from atoll.engines.run_lifecycle import run
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import CHAOS_LOG, FaultScript, Kill, TimedFault, UpdateFault, UpdateFaultKind
from atoll.testing.chaos.reports import elastic_report

COMMAND = ["benchmarks/elastic_cost.py"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The workload of two islands."""

    layers: int
    width: int
    seq_len: int
    batch_size: int
    inner_steps: int
    rounds: int
    asleep_s: float = 0.0  # per round, besides computation

    @property
    def model(self) -> GPT:
        return GPT(layers=self.layers, width=self.width, heads=4, head_size=self.width // 4)

    @property
    def run(self) -> Run:
        steps = self.rounds * self.inner_steps
        return Run(
            recipe="elastic-cost",
            model=self.model,
            data=Text(corpus="stdlib", tokenizer="bytes", seq_len=self.seq_len, limit_bytes=1_000_000, eval_batches=2),
            algorithm=DiLoCo(inner_steps=self.inner_steps),
            optimizer=AdamW(lr=Cosine(lr=0.001, warmup=1, floor=0.0001), betas=(0.9, 0.95), weight_decay=0.1),
            train=Train(steps=steps, batch_size=self.batch_size),
            cluster=Cluster(islands=2),
            keep=Keep(evaluate_every=steps, save_every=steps),
        )

    @property
    def engine(self) -> Elastic:
        return Elastic(processes=2, step_delay=self.asleep_s / self.inner_steps, start_timeout_s=300.0)


# ----------------------------------------------------------------------------------------------------------- without failures


def round_times(size: Size, folder: Path, *, elastic: bool) -> dict[str, Any]:
    """Seconds of each round but the first, and of its exchange after both islands have arrived."""
    if elastic:
        run(size.run, engine=size.engine, out=folder, command=COMMAND)
    else:
        run(size.run, engine=Processes(processes=2, step_delay=size.engine.step_delay), out=folder, command=COMMAND)
    ends_s = [event.time_s for event in _read(folder, RoundFinished)]
    exchanges = list(_read(folder, Exchanged))[1:]
    rounds_s = [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]
    return {
        "elastic": elastic,
        "rounds_s": rounds_s,
        "round_s": median(rounds_s),
        "exchange_s": median(event.end_s - event.start_s for event in exchanges),
        "digest": next(event.digest for event in _read(folder, RunFinished)),
        "load": os.getloadavg()[0],
    }


def _read(folder: Path, kind: type[Any]) -> Iterator[Any]:
    return (event for event in read_events(folder / "events.jsonl", [kind]) if isinstance(event, kind))


# -------------------------------------------------------------------------------------------------------------- with failures


def killed(size: Size, folder: Path, script: FaultScript) -> dict[str, Any]:
    """Two islands with these kills: the delays of the survivor, and whether the killed island returns with the same bits."""
    engine = replace(size.engine, listen=f"127.0.0.1:{free_port('127.0.0.1')}")
    twins = Twins(engine.listen)
    run(size.run, engine=engine, out=folder, command=COMMAND, sinks=[twins], faults=RunFaults(script))
    report = elastic_report(folder, units=2 * size.rounds)
    return {
        "deaths": deaths(folder),
        "twins": twins.found,
        "data": list(report.data),
        "apart": list(report.diverged),
        "into_round_s": into_rounds(folder),
        "load": os.getloadavg()[0],
    }


def deaths(folder: Path) -> list[dict[str, float]]:
    """For each commit by one island after a death: seconds from the end of its own inner steps to the commit, seconds of its steps,
    islands alive at the commit, and seconds until both participate again."""
    computed = {(event.round, event.island): event for event in _read(folder, Computed)}
    attended = {event.round: event for event in _read(folder, Attended)}
    found = []
    for leased in _read(folder, Leased):
        if not leased.returned or not leased.delivered:
            continue
        mine = computed[leased.round - 1, leased.delivered[0][0]]
        commit_s = attended[leased.round].time_s
        back = next((e.time_s for e in attended.values() if e.round > leased.round and e.participating == 2), None)
        found.append(
            {
                "round": leased.round,
                "attempts": attended[leased.round].attempts,
                "alive": attended[leased.round].alive,
                "steps_s": mine.end_s - mine.start_s,
                "delay_s": commit_s - mine.end_s,
                "back_s": back - commit_s if back is not None else None,
            }
        )
    return found


def into_rounds(folder: Path) -> list[float]:
    """Seconds from the start of a round to each kill from outside."""
    actions = [json.loads(line) for line in (folder / CHAOS_LOG).read_text("utf-8").splitlines()]
    seen = [action["at_s"] for action in actions if "observed" in action]
    return [action["at_s"] - max(s for s in seen if s <= action["at_s"]) for action in actions if "injected" in action]


class Twins:
    """A sink that fetches the snapshots of both islands after each death and return, and compares their bits."""

    def __init__(self, address: str) -> None:
        self.found: list[dict[str, Any]] = []
        self._address, self._alone = address, False

    def emit(self, event: Event) -> None:
        if not isinstance(event, Attended):
            return
        if event.participating < 2:
            self._alone = True
        elif self._alone:
            self._alone = not self._compared(RegistryClient(self._address), event.round)

    def _compared(self, registry: RegistryClient, number: int) -> bool:
        try:
            names = [island_name(island) for island in range(2)]
            statuses = registry.statuses(names).values()
            one, two = (fetch_snapshot(status.address, 10.0, DirectNetwork("", run_id=status.run)) for status in statuses)
        except ExchangeFailed:
            return False
        if one is None or two is None or one.header["metadata"]["version"] != two.header["metadata"]["version"]:
            return False  # an island has committed in the meantime
        equal = one.tensors.keys() == two.tensors.keys() and all(torch.equal(t, two.tensors[n]) for n, t in one.tensors.items())
        self.found.append({"round": number, "tensors": len(one.tensors), "bytes": one.nbytes, "equal": equal})
        return True


def kills_at(moments_s: list[float]) -> FaultScript:
    """Kills from outside, of both islands in turn."""
    return FaultScript(
        faults=tuple(TimedFault(at_s=s, fault=Kill(victim=island_name((n + 1) % 2))) for n, s in enumerate(moments_s))
    )


def deaths_in(rounds: list[int]) -> FaultScript:
    """Deaths within the exchange, of both islands in turn, while an island sends its delta or receives the mean."""
    kinds: list[UpdateFaultKind] = ["kill_in_delta", "kill_in_mean"]
    return FaultScript(
        update_faults=tuple(
            UpdateFault(island=island_name((n + 1) % 2), round=r, kind=kinds[n // 2 % 2]) for n, r in enumerate(rounds)
        )
    )
