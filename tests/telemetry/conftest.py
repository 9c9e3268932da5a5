"""A run's folder, written with the real sink: what an engine would report for islands that train alone and then meet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.events import Compared, Computed, Evaluated, Event, Exchanged, RoundFinished, RunFinished, RunStarted, WarmStartFinished
from atoll.telemetry import JsonlSink


@dataclass(frozen=True, kw_only=True)
class Script:
    """A made-up run. Island i takes `step_s * (1 + i / 4)` for a step, and a meeting takes `meet_s`."""

    recipe: str = "demo-ddp"
    algorithm: str = "DDP"
    islands: int = 2
    rounds: int = 4
    steps_per_round: int = 5
    step_s: float = 1.0
    meet_s: float = 2.0
    payload_bytes: int = 1000
    tokens_per_step: int = 100
    params: int = 12_345
    seed: int = 0
    final_loss: float = 2.35
    finished: bool = True

    def events(self) -> Iterator[Event]:
        """What the engine would report, in order."""
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
        return self.slowest_s + self.meet_s

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
            metrics={"loss": self.loss(number), "accuracy": 0.1 * number / self.rounds},
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
        """The run's folder, as a run leaves it."""
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"recipe": self.recipe, "seed": self.seed}))
        with JsonlSink(folder / "events.jsonl") as sink:
            for event in self.events():
                sink.emit(event)
        lines = [{"what": "started", "round": 0, "wall_time_s": 0.0}]
        if self.finished:
            lines.append({"what": "finished", "wall_time_s": 12.5, "resumed_from_round": 0})
        (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder


@pytest.fixture
def script() -> type[Script]:
    """The class of made-up runs; `script(rounds=3).write(folder)` makes a folder."""
    return Script


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a made-up run into its own folder under tmp_path."""

    def write(name: str, made_up: Script) -> Path:
        return made_up.write(tmp_path / name)

    return write
