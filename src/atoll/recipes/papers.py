"""The papers' own settings. Set your own text with `--set data.corpus=...`; batch and steps can be reduced by `--set` too.

DiLoCo, Tables 1 and 5: AdamW at 4e-4 with 1,000 steps of warm-up and decay 0.1, batches of 512 sequences of 1,024 tokens, shards by
k-means, 8 islands that average every 500 steps, 24,000 steps of plain training and then 64,000 of DiLoCo. The paper does not say:
betas and clipping are OpenDiLoCo's, and the rate goes down to 0 along a cosine.

Asynchronous Local-SGD, Tables 5 and 6: 4 workers of very different speeds, rounds of 50 steps for the fastest, batches of 128
sequences of 256 tokens, 24,000 steps of plain training and then 64,000 per worker. Its inner rate of 0.1 is too high for AdamW:
here it is DiLoCo's, down to the 1e-6 of the authors' notebook. The paper gives no grace period. Rounds of 50, 38, 19 and 8 steps
take 26.6 to 29 s, so a grace of 3 s dispatches all workers together. Shards are random.

ACCO, section 4 and Table 4: 8 islands, AdamW with decay 0.1 along a cosine, no warm-up of either kind, no clipping, bfloat16. On
OpenWebText, micro-batches of 24 sequences of 1,024 tokens, one in each half of a batch, and further ones while an exchange lasts
(Algorithm 1). So a commit has 393,216 tokens or more, and 6 billion tokens are at most 15,259 commits. On TinyStories the paper
gives neither batch nor length: here a commit has the same number of tokens, in sequences of 512. The paper's models are GPT-Neo.
Ours are this package's decoder at the same depth, width, heads and vocabulary (36.0M and 123.6M parameters): with rotary instead of
learned positions, and with full attention in every layer instead of every other.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.data.partition import KMeans
from atoll.data.text_dataset import Text
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import DelayedNesterov
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import Nesterov
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train


def diloco_60m() -> Run:
    """DiLoCo's smallest model, with the paper's settings."""
    return _diloco("diloco-60m", GPT.m60())


def diloco_150m() -> Run:
    """DiLoCo's main model, with the paper's settings."""
    return _diloco("diloco-150m", GPT.m150())


def diloco_400m() -> Run:
    """DiLoCo's largest model, with the paper's settings."""
    return _diloco("diloco-400m", GPT.m400())


def async_20m() -> Run:
    """Asynchronous Local-SGD's main model, with the paper's settings."""
    return _async("async-20m", GPT.m20())


def async_60m() -> Run:
    """Asynchronous Local-SGD's middle model, with the paper's settings."""
    return _async("async-60m", GPT.m60())


def async_150m() -> Run:
    """Asynchronous Local-SGD's largest model, with the paper's settings."""
    return _async("async-150m", GPT.m150())


def acco_36m() -> Run:
    """ACCO's model for TinyStories, with the paper's settings."""
    return _acco("acco-36m", GPT(layers=4, width=768, heads=16, head_size=48, vocab_size=10_000), seq_len=512, lr=5e-4)


def acco_125m() -> Run:
    """ACCO's model for OpenWebText, with the paper's settings."""
    return _acco("acco-125m", GPT(layers=12, width=768, heads=12, head_size=64, vocab_size=50_257), seq_len=1024, lr=6e-4)


def _acco(name: str, model: GPT, *, seq_len: int, lr: float) -> Run:
    islands, commit_tokens = 8, 393_216
    return Run(
        recipe=name,
        model=model,
        data=Text(corpus="stdlib", tokenizer="bytes", seq_len=seq_len, eval_batches=16),
        algorithm=ACCO(pieces_per_half=1, batch="free"),
        optimizer=AdamW(lr=Cosine(lr=lr, warmup=0, floor=0.0), betas=(0.9, 0.95), weight_decay=0.1),
        train=Train(
            steps=round(6e9 / commit_tokens),
            batch_size=commit_tokens // islands // seq_len,
            clip_norm=None,
            device="auto",
            precision="all-bf16",
        ),
        cluster=Cluster(islands=islands, step_time_s=(1.0,)),
        keep=Keep(evaluate_every=500, save_every=500),
    )


def _async(name: str, model: GPT) -> Run:
    outer = DelayedNesterov(lr=0.7, momentum=0.9, period=4)
    return Run(
        recipe=name,
        model=replace(model, vocab_size=32_000),
        data=Text(corpus="stdlib", tokenizer="bytes", seq_len=256, eval_batches=16),
        algorithm=AsyncLocalSGD(inner_steps=50, outer=outer, pace="given", grace_s=3.0),
        optimizer=AdamW(lr=Cosine(lr=4e-4, warmup=1_000, floor=1e-6), betas=(0.9, 0.95), weight_decay=0.1),
        train=Train(steps=64_000, batch_size=128, micro_batches=4, warm_start_steps=24_000, device="auto"),
        cluster=Cluster(islands=4, step_time_s="very"),
        keep=Keep(evaluate_every=500, save_every=500),
    )


def _diloco(name: str, model: GPT) -> Run:
    return Run(
        recipe=name,
        model=replace(model, vocab_size=32_000),
        data=Text(corpus="stdlib", tokenizer="bytes", seq_len=1024, partition=KMeans(), eval_batches=16),
        algorithm=DiLoCo(inner_steps=500, outer=Nesterov(lr=0.7, momentum=0.9), weighting="examples"),
        optimizer=AdamW(lr=Cosine(lr=4e-4, warmup=1_000, floor=0.0), betas=(0.9, 0.95), weight_decay=0.1),
        train=Train(steps=64_000, batch_size=512, micro_batches=16, warm_start_steps=24_000, device="auto"),
        cluster=Cluster(islands=8, step_time_s=(1.0,)),
        keep=Keep(evaluate_every=500, save_every=500),
    )
