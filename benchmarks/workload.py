"""The small workload of the papers' ablations: a decoder of some ten thousand parameters that reads Python's standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LINE = "link=Link(latency_s=0.03,bandwidth_mbit_per_s=100)"
"""Every island's line."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all rows of a study train, unless they say otherwise.

    Attributes:
        steps: inner steps per island after the warm start.
        warm_start: steps of plain training before that.
        inner_steps: of a round.
        islands: how many there are.
        model: sizes of the decoder.
        large: sizes of a larger one.
        data: sizes of the text.
        batch_size: sequences per step and island.
        warmup: steps until the learning rate is at its peak.
        more: settings that are put behind all others of the base.
    """

    steps: int = 400
    warm_start: int = 140
    inner_steps: int = 20
    islands: int = 4
    model: str = "layers=2,width=32,heads=2,head_size=16"
    large: str = "layers=2,width=64,heads=4,head_size=16"
    data: str = "seq_len=32,limit_bytes=1000000,eval_batches=64"
    batch_size: int = 8
    warmup: int = 20
    more: tuple[str, ...] = ()

    def settings(self, algorithm: str, step_time_s: str) -> tuple[str, ...]:
        """Everything that decides a figure, so that rows mean the same whatever becomes of the recipes."""
        return (
            f"model=GPT({self.model})",
            f"data=Text(corpus=stdlib,tokenizer=bytes,{self.data})",
            f"algorithm={algorithm}",
            f"optimizer=AdamW(lr=Cosine(lr=0.006,warmup={self.warmup},floor=0.0006),betas=[0.9,0.95],weight_decay=0.1)",
            f"train=Train(steps={self.steps},batch_size={self.batch_size},warm_start_steps={self.warm_start})",
            f"cluster=Cluster(islands={self.islands},step_time_s={step_time_s},{LINE})",
            "keep=Keep(evaluate_every=1000000,save_every=1000000)",
            *self.more,
        )


class Told(Protocol):
    """What a study tells of its workload, whichever else it has."""

    @property
    def steps(self) -> int: ...
    @property
    def warm_start(self) -> int: ...
    @property
    def inner_steps(self) -> int: ...
    @property
    def islands(self) -> int: ...
    @property
    def batch(self) -> str:
        """The label of the larger batch."""
