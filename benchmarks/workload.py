"""The small workload of the papers' ablations: a decoder of some ten thousand parameters that reads Python's standard library."""

from __future__ import annotations

from dataclasses import dataclass

LINK = "link=Link(latency_s=0.03,bandwidth_mbit_per_s=100)"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the rows of a study train, unless a row changes it."""

    steps: int = 400  # inner steps per island after the warm start
    warm_start: int = 140  # steps
    inner_steps: int = 20  # per round
    islands: int = 4
    model: str = "layers=2,width=32,heads=2,head_size=16"
    large: str = "layers=2,width=64,heads=4,head_size=16"
    data: str = "seq_len=32,limit_bytes=1000000,eval_batches=64"
    batch_size: int = 8  # sequences per step and island
    warmup: int = 20  # steps until the peak learning rate
    more: tuple[str, ...] = ()  # settings after all others

    def settings(self, algorithm: str, step_time_s: str) -> tuple[str, ...]:
        """Every setting that affects a figure, so that rows stay the same when a recipe changes."""
        return (
            f"model=GPT({self.model})",
            f"data=Text(corpus=stdlib,tokenizer=bytes,{self.data})",
            f"algorithm={algorithm}",
            f"optimizer=AdamW(lr=Cosine(lr=0.006,warmup={self.warmup},floor=0.0006),betas=[0.9,0.95],weight_decay=0.1)",
            f"train=Train(steps={self.steps},batch_size={self.batch_size},warm_start_steps={self.warm_start})",
            f"cluster=Cluster(islands={self.islands},step_time_s={step_time_s},{LINK})",
            "keep=Keep(evaluate_every=1000000,save_every=1000000)",
            *self.more,
        )
