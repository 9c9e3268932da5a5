"""One run of the soak: small elastic islands, with or without faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from atoll.algorithms.diloco import DiLoCo
from atoll.core.events import Attended, Evaluated, Event
from atoll.data.text_dataset import Text
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.run_lifecycle import run
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import Nesterov
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import (
    FAULTS,
    LIGHTHOUSE,
    FaultScript,
    LinkFault,
    UpdateFault,
    random_faults,
    random_update_faults,
)
from atoll.testing.chaos.reports import elastic_report

UPDATE_FAULTS = UpdateFault.__name__
"""Faults inside islands. They are scheduled by round, all others by time."""


_NAMED = ("for_s", "lighthouse")  # in `about` only where they matter


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The size of the soak, and its faults."""

    islands: int = 8
    minutes: float = 10.0  # approximate duration
    every_s: float = 20.0  # between two faults
    seed: int = 0  # of weights, data and faults
    asleep_s: float = 2.5  # per round, instead of computation: many islands share few cores
    round_s: float | None = None  # assumed duration of a round; None: 1.2 times its sleep
    inner_steps: int = 20  # per round
    layers: int = 2
    width: int = 32
    kinds: tuple[str, ...] = ("Kill",)  # of faults, equally likely
    for_s: float = 5.0  # duration of a fault that is not a kill
    lighthouse: bool = False  # whether faults also hit the lighthouse

    @property
    def seconds_per_round(self) -> float:
        return self.round_s or self.asleep_s * 1.2

    @property
    def rounds(self) -> int:
        return max(3, round(self.minutes * 60 / self.seconds_per_round))

    @property
    def run(self) -> Run:
        steps = self.rounds * self.inner_steps
        return Run(
            recipe="soak",
            seed=self.seed,
            model=GPT(layers=self.layers, width=self.width, heads=2, head_size=self.width // 2),
            data=Text(corpus="stdlib", tokenizer="bytes", seq_len=32, limit_bytes=1_000_000, eval_batches=32),
            algorithm=DiLoCo(inner_steps=self.inner_steps, outer=Nesterov(lr=0.7, momentum=0.7)),
            optimizer=AdamW(lr=Cosine(lr=0.006, warmup=min(20, steps // 2), floor=0.0006), betas=(0.9, 0.95), weight_decay=0.1),
            train=Train(steps=steps, batch_size=4),
            cluster=Cluster(islands=self.islands),
            keep=Keep(evaluate_every=10 * self.inner_steps, save_every=10 * self.inner_steps),
        )

    @property
    def engine(self) -> Elastic:
        return Elastic(processes=self.islands, step_delay=self.asleep_s / self.inner_steps, start_timeout_s=300.0)

    @property
    def script(self) -> FaultScript:
        islands = [island_name(number) for number in range(self.islands)]
        names = [*islands, *([LIGHTHOUSE] if self.lighthouse else [])]
        timed = [FAULTS[name] for name in self.kinds if name != UPDATE_FAULTS]
        every = max(1, round(self.every_s / self.seconds_per_round))
        return FaultScript(
            faults=random_faults(
                seed=self.seed,
                victims=names,
                links=names if {*timed}.intersection(get_args(LinkFault)) else (),
                every_s=self.every_s,
                until_s=self.minutes * 60,
                kinds=timed,
                for_s=self.for_s,
            )
            if timed
            else (),
            update_faults=random_update_faults(seed=self.seed, islands=islands, every=every, until=self.rounds)
            if UPDATE_FAULTS in self.kinds
            else (),
        )

    def about(self) -> str:
        numbers = [
            f"{name}={value:g}" for name, value in asdict(self).items() if isinstance(value, int | float) and name not in _NAMED
        ]
        others = [] if self.kinds == Soak.kinds else [f"kinds={'+'.join(self.kinds)}", f"for_s={self.for_s:g}"]
        return ", ".join([*numbers, *others, *(["lighthouse"] if self.lighthouse else [])])


class RunProgress:
    """A sink that shows the progress of a run."""

    def __init__(self, rounds: int, advance: Callable[[float, str], object]) -> None:
        self._rounds, self._advance = rounds, advance

    def emit(self, event: Event) -> None:
        if isinstance(event, Attended):
            self._advance(event.round / self._rounds, f"{event.participating} of {event.alive} islands")


def soak_cell(soak: Soak, folder: Path, *, broken: bool, advance: Callable[[float, str], object]) -> dict[str, Any]:
    """Runs in this folder, with faults or without, and returns the cell."""
    load_before = os.getloadavg()[1]
    faults = RunFaults(soak.script) if broken else None
    sinks = [RunProgress(soak.rounds, advance)]
    run(soak.run, engine=soak.engine, out=folder, command=["benchmarks/soak.py"], sinks=sinks, faults=faults)
    report = elastic_report(folder, units=soak.rounds * soak.islands)
    attended = [event for event in read_events(folder / "events.jsonl", [Attended]) if isinstance(event, Attended)]
    evaluated = [event for event in read_events(folder / "events.jsonl", [Evaluated]) if isinstance(event, Evaluated)]
    return {
        "broken": broken,
        "report": {
            **asdict(report),
            "known": fmean(event.known for event in attended),
            "apart": report.diverged,
            "done": report.injected,
            "planned": len(soak.script.faults) + len(soak.script.update_faults) if broken else 0,
            "succeeded": report.succeeded,
        },
        "tokens": evaluated[-1].tokens,
        "seconds": attended[-1].time_s - attended[0].time_s,
        "load": [load_before, os.getloadavg()[1]],
        "attended": [[round(e.time_s, 2), e.known, e.alive, e.participating, e.attempts, e.digest] for e in attended],
        "losses": [[round(e.time_s, 2), e.tokens, e.loss] for e in evaluated],
    }
