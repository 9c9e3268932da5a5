"""Folders of simulated logs, written with the real sink: synchronous runs whose islands exchange after each round, and asynchronous
runs whose workers exchange with a hub."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.core.events import (
    Arrived,
    Compared,
    Computed,
    Dispatched,
    Evaluated,
    Event,
    Exchanged,
    RoundFinished,
    RunFinished,
    RunStarted,
    WarmStartFinished,
    WindowClosed,
)
from atoll.telemetry.event_log import JsonlSink


@dataclass(frozen=True, kw_only=True)
class Script:
    """A synchronous run. Island i takes `step_s * (1 + i / 4)` for a step, and an exchange takes `exchange_s`."""

    recipe: str = "demo-ddp"
    algorithm: str = "DDP"
    islands: int = 2
    rounds: int = 4
    steps_per_round: int = 5
    step_s: float = 1.0
    exchange_s: float = 2.0
    payload_bytes: int = 1000
    tokens_per_step: int = 100
    params: int = 12_345
    seed: int = 0
    final_loss: float = 2.35
    accuracy: bool = True
    finished: bool = True

    def events(self) -> Iterator[Event]:
        """What the engine reports, in order."""
        yield RunStarted(
            recipe=self.recipe,
            algorithm=self.algorithm,
            islands=self.islands,
            params=self.params,
            steps=self.rounds * self.steps_per_round,
            seed=self.seed,
        )
        yield WarmStartFinished(steps=10, tokens=4000, loss=4.5)
        yield self._evaluated(0)
        for number in range(1, self.rounds + 1):
            yield from self._round(number)
        if self.finished:
            yield self._finished()

    @property
    def slowest_s(self) -> float:
        return self.steps_per_round * self.step_s * (1 + (self.islands - 1) / 4)

    @property
    def round_s(self) -> float:
        return self.slowest_s + self.exchange_s

    @property
    def computed_s(self) -> list[float]:
        """Computing time of each island over the whole run."""
        return [self.rounds * self.steps_per_round * self.step_s * (1 + island / 4) for island in range(self.islands)]

    def loss(self, number: int) -> float:
        return self.final_loss + 2.0 * (math.exp(-3 * number / self.rounds) - math.exp(-3))

    def _round(self, number: int) -> Iterator[Event]:
        """Within a round events carry how many were finished before it, as the simulator counts."""
        start_s = (number - 1) * self.round_s
        arrived_s = [start_s + self.steps_per_round * self.step_s * (1 + island / 4) for island in range(self.islands)]
        steps, islands = self.steps_per_round, list(range(self.islands))
        for island, end_s in enumerate(arrived_s):
            tokens, loss = steps * self.tokens_per_step, self.loss(number) + 0.1
            numbers = {"island": island, "round": number - 1, "steps": steps, "batches": steps, "tokens": tokens}
            yield Computed(start_s=start_s, end_s=end_s, loss=loss, **numbers)
        yield Exchanged(
            round=number - 1,
            what="mean",
            islands=islands,
            heard=[True] * self.islands,
            arrived_s=arrived_s,
            start_s=max(arrived_s),
            end_s=start_s + self.round_s,
            sent_bytes=[self.payload_bytes] * self.islands,
            control_bytes=[16] * self.islands,
            weight=float(self.islands),
        )
        norms = [1.0 + 0.1 * island + 1.0 / number for island in islands]
        yield Compared(round=number - 1, norms=norms, mean_norm=0.9 + 0.5 / number, cosine_mean=0.4 + 0.3 / number, cosine_std=0.05)
        yield RoundFinished(
            round=number,
            islands=self.islands,
            steps=number * steps,
            virtual_time_s=number * self.round_s,
            tokens=number * steps * self.tokens_per_step * self.islands,
            local_updates=number * steps * self.islands,
            loss=self.loss(number) + 0.1,
            sent_bytes_per_island=float(number * self.payload_bytes),
        )
        yield self._evaluated(number)

    def _evaluated(self, number: int) -> Evaluated:
        steps = number * self.steps_per_round
        return Evaluated(
            round=number,
            steps=steps,
            virtual_time_s=number * self.round_s,
            tokens=steps * self.tokens_per_step * self.islands,
            local_updates=steps * self.islands,
            sent_bytes_per_island=float(number * self.payload_bytes),
            metrics={"loss": self.loss(number), **({"accuracy": 0.1 * number / self.rounds} if self.accuracy else {})},
        )

    def _finished(self) -> RunFinished:
        steps, total_s = self.rounds * self.steps_per_round, self.rounds * self.round_s
        return RunFinished(
            rounds=self.rounds,
            outer_steps=self.rounds,
            steps=steps,
            tokens=steps * self.tokens_per_step * self.islands,
            warm_start_tokens=4000,
            local_updates=steps * self.islands,
            virtual_time_s=total_s,
            utilisation=sum(self.computed_s) / self.islands / total_s,
            sent_bytes_per_island=float(self.rounds * self.payload_bytes),
            control_bytes_per_island=16.0 * self.rounds,
            val_loss=self.final_loss,
            digest="00ff",
        )

    def write(self, folder: Path) -> Path:
        """The folder of the run."""
        return _write(folder, self.recipe, self.seed, self.events(), finished=self.finished)


@dataclass(frozen=True, kw_only=True)
class AsyncScript:
    """An asynchronous run. Worker i takes `step_s[i]` for a step; weights and updates take `transfer_s` to travel.

    The hub waits `grace_s` from the first arrival on if another worker arrives by then. Worker i reads shard i.
    """

    recipe: str = "demo-async"
    step_s: tuple[float, ...] = (1.0, 1.5, 4.0)
    rounds: int = 12
    steps_per_round: int = 5
    transfer_s: float = 0.5
    grace_s: float = 2.0
    payload_bytes: int = 1000
    tokens_per_step: int = 100
    seed: int = 0
    accuracy: bool = False
    finished: bool = True

    @property
    def islands(self) -> int:
        return len(self.step_s)

    @property
    def steps(self) -> int:
        """Of each worker, had all been equally fast."""
        return self.rounds * self.steps_per_round // self.islands

    def events(self) -> Iterator[Event]:
        """What the engine reports, in order: the hub's steps, and the windows between them."""
        yield RunStarted(
            recipe=self.recipe, algorithm="AsyncLocalSGD", islands=self.islands, params=12_345, steps=self.steps, seed=self.seed
        )
        yield self._evaluated(0, 0.0)
        away = [self._dispatched(island, number=island, version=0, now_s=0.0) for island in range(self.islands)]
        yield from away
        due = [(self._arrival_s(task), task.island, task) for task in away]
        heapq.heapify(due)
        window: list[tuple[int, float]] = []
        dispatched, windows = self.islands, 0
        for done in range(1, self.rounds + 1):
            now_s, island, task = heapq.heappop(due)
            window.append((island, now_s))
            yield from self._arrived(task, now_s, done, windows)
            if due and done < self.rounds and due[0][0] <= window[0][1] + self.grace_s:
                continue
            if done < self.rounds or self.finished:
                yield self._closed(windows, window, now_s)
            for again, _ in window if done < self.rounds else ():
                task = self._dispatched(again, number=dispatched, version=done, now_s=now_s)
                yield task
                heapq.heappush(due, (self._arrival_s(task), again, task))
                dispatched += 1
            window, windows = [], windows + 1
        if self.finished:
            yield self._finished(now_s)

    def write(self, folder: Path) -> Path:
        """The folder of the run."""
        return _write(folder, self.recipe, self.seed, self.events(), finished=self.finished)

    def _arrival_s(self, task: Dispatched) -> float:
        return task.begin_s + task.steps * self.step_s[task.island] + self.transfer_s

    def _dispatched(self, island: int, *, number: int, version: int, now_s: float) -> Dispatched:
        return Dispatched(
            island=island,
            round=number,
            version=version,
            shard=island,
            start=0,
            schedule=0,
            steps=self.steps_per_round,
            virtual_time_s=now_s,
            begin_s=now_s + self.transfer_s,
            sent_bytes=self.payload_bytes,
        )

    def _arrived(self, task: Dispatched, now_s: float, done: int, window: int) -> Iterator[Event]:
        pushed_s, tokens = now_s - self.transfer_s, task.steps * self.tokens_per_step
        numbers = {"island": task.island, "round": task.round, "steps": task.steps}
        yield Computed(start_s=task.begin_s, end_s=pushed_s, batches=task.steps, tokens=tokens, loss=5.0 - 0.1 * done, **numbers)
        yield Arrived(
            window=window,
            shard=task.shard,
            pushed_s=pushed_s,
            virtual_time_s=now_s,
            version=done,
            staleness=done - 1 - task.version,
            applied=True,
            norm=1.0,
            sent_bytes=self.payload_bytes,
            **numbers,
        )
        yield RoundFinished(
            round=done,
            islands=self.islands,
            steps=done * task.steps // self.islands,
            virtual_time_s=now_s,
            tokens=done * tokens,
            local_updates=done * task.steps,
            loss=5.0 - 0.1 * done,
            sent_bytes_per_island=done * self.payload_bytes / self.islands,
        )
        if done % self.islands == 0 or done == self.rounds:
            yield self._evaluated(done, now_s)

    def _closed(self, number: int, window: list[tuple[int, float]], now_s: float) -> WindowClosed:
        return WindowClosed(
            window=number,
            islands=[island for island, _ in window],
            opened_s=window[0][1],
            virtual_time_s=now_s,
            idle_s=[now_s - arrived_s for _, arrived_s in window],
        )

    def _evaluated(self, done: int, now_s: float) -> Evaluated:
        updates = done * self.steps_per_round
        return Evaluated(
            round=done,
            steps=updates // self.islands,
            virtual_time_s=now_s,
            tokens=updates * self.tokens_per_step,
            local_updates=updates,
            sent_bytes_per_island=done * self.payload_bytes / self.islands,
            metrics={"loss": 5.0 - 0.1 * done, **({"accuracy": done / self.rounds} if self.accuracy else {})},
        )

    def _finished(self, now_s: float) -> RunFinished:
        updates = self.rounds * self.steps_per_round
        return RunFinished(
            rounds=self.rounds,
            outer_steps=self.rounds,
            steps=updates // self.islands,
            tokens=updates * self.tokens_per_step,
            warm_start_tokens=0,
            local_updates=updates,
            virtual_time_s=now_s,
            utilisation=0.5,
            sent_bytes_per_island=self.rounds * self.payload_bytes / self.islands,
            control_bytes_per_island=0.0,
            val_loss=5.0 - 0.1 * self.rounds,
            digest="00ff",
        )


def _write(folder: Path, recipe: str, seed: int, events: Iterable[Event], *, finished: bool) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": 2, "recipe": recipe, "seed": seed}))
    with JsonlSink(folder / "events.jsonl") as sink:
        for event in events:
            sink.emit(event)
    lines = [{"what": "started", "round": 0, "wall_time_s": 0.0}]
    if finished:
        lines.append({"what": "finished", "wall_time_s": 12.5, "resumed_from_round": 0})
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def script() -> type[Script]:
    """The class of synchronous runs; `script(rounds=3).write(folder)` makes a folder."""
    return Script


@pytest.fixture
def async_script() -> type[AsyncScript]:
    """The class of asynchronous runs."""
    return AsyncScript
