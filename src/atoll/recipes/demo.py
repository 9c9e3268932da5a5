"""The demo recipes: one workload, with a different algorithm in each, so that their figures can be compared.

Four unequal islands on links of 0.8 Mbit/s and 30 ms train a small decoder on the standard library of the running Python. All runs
start from the same weights, after a warm start of plain training, and use the same inner learning rate and schedule.

The batch is chosen so that a larger one hardly helps: DDP, with four times the batch of one island, ends only 0.06 nats below one
island. Otherwise an algorithm that updates more often, with smaller batches, could not be compared with DDP at equal tokens.

The link is chosen so that an exchange takes about half a step of the slowest island. In an all-reduce between 4 islands each island
sends 2 * 3/4 of the gradients:

- here 20,608 parameters * 4 bytes * 1.5 = 124 kB, which take 1.24 s at 0.8 Mbit/s. The latencies of 6 messages add 0.18 s: 1.42 s,
  0.42 of a step of 3.33 s. ACCO exchanges as much for each half of a batch, and the norm of the gradient for another 0.18 s:
  1.60 s, which the half's 1.665 s of computing hide.
- a similar ratio in a real case, 0.50: 1 billion parameters with bfloat16 gradients are 1e9 * 2 bytes * 1.5 = 3 GB, which take 24
  s at 1 Gbit/s. Islands of one GPU at 80 TFLOP/s take 6 * 1e9 * 640e3 / 80e12 = 48 s for a batch of 640,000 tokens. Both times
  grow with the model, so this ratio holds for any number of parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.protocols import Algorithm, AsyncAlgorithm
from atoll.data.text_dataset import Text
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import DelayedNesterov
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.torch_optimizers import Muon
from atoll.runs.cluster import Cluster, Link, step_times
from atoll.runs.run_settings import Keep, Run, Train


def demo_ddp() -> Run:
    """Data-parallel training: islands average every gradient."""
    return _demo("demo-ddp", DDP())


def demo_zero1() -> Run:
    """ZeRO-1: data-parallel training with optimizer state sharded over the islands."""
    return _demo("demo-zero1", ZeRO1())


def demo_acco() -> Run:
    """ACCO: islands exchange one half of a batch while they compute the other."""
    return _demo("demo-acco", ACCO())


def demo_acco_free() -> Run:
    """ACCO with free batches: islands compute until their exchange is over, so none is idle."""
    return _demo("demo-acco-free", ACCO(batch="free"))


def demo_dpu() -> Run:
    """Delayed parameter update: the exchange overlaps the next batch, so each update is one step late."""
    return _demo("demo-dpu", DPU())


def demo_wp() -> Run:
    """Weight prediction: like demo-dpu, with gradients at the predicted weights."""
    return _demo("demo-wp", WP())


def demo_diloco() -> Run:
    """DiLoCo: islands train alone for 20 steps, then average."""
    # At the learning rate that is best for DDP, the paper's momentum of 0.9 overshoots; see docs/log.md.
    return _demo("demo-diloco", DiLoCo(inner_steps=20, outer=Nesterov(lr=0.8, momentum=0.7)))


def demo_streaming() -> Run:
    """Streaming DiLoCo: four fragments, each agreed on every 20 steps while islands train on."""
    return _demo("demo-streaming", Streaming(inner_steps=20, fragments=4, overlap=2, outer=Nesterov(lr=0.8, momentum=0.7)))


def demo_eager() -> Run:
    """Eager updates (experimental): deltas travel during the whole next round; an island's own part counts at once."""
    # The rule of demo-diloco overshoots: a delta counts at once and again a round later; see docs/log.md.
    return _demo("demo-eager", Eager(inner_steps=20, outer=Nesterov(lr=0.4, momentum=0.6)))


def demo_sparseloco() -> Run:
    """SparseLoCo: DiLoCo that sends the largest 1.6 % of its deltas in 2 bits, and keeps the rest for later rounds."""
    return _demo("demo-sparseloco", DiLoCo(inner_steps=20, outer=SGD(lr=1.0), codec="topk", feedback=0.95))


def demo_muloco() -> Run:
    """MuLoCo: DiLoCo with Muon inside, and the outer rule of its paper."""
    run = _demo("demo-muloco", DiLoCo(inner_steps=20, outer=Nesterov(lr=0.7, momentum=0.6)))
    return replace(run, optimizer=Muon(lr=run.optimizer.lr))


def demo_two_level() -> Run:
    """Two levels: ACCO between the two devices of an island, DiLoCo between islands."""
    run = demo_diloco()
    # Twice the devices with half the batch each, as fast per sample: the same samples per step in all, and in the warm start.
    cluster = replace(
        run.cluster,
        step_time_s=tuple(time / 2 for time in step_times("very")),
        devices_per_island=2,
        inside=Link(latency_s=0.0001, bandwidth_mbit_per_s=10_000.0),
    )
    train = replace(run.train, batch_size=32, warm_start_steps=300)
    return replace(run, recipe="demo-two-level", train=train, cluster=cluster, inside=ACCO())


def demo_async() -> Run:
    """Asynchronous Local-SGD with Delayed Nesterov and Dynamic Local Updates: no worker waits."""
    outer = DelayedNesterov(lr=0.8, momentum=0.7, period=4)  # as in demo-diloco
    # Rounds of 20, 15, 7 and 3 steps take 10.0 to 11.6 s, so a grace of 2 s dispatches all workers together.
    return _demo("demo-async", AsyncLocalSGD(inner_steps=20, outer=outer, pace="given", grace_s=2.0))


def demo_async_naive() -> Run:
    """Naive asynchronous Local-SGD: DiLoCo's outer step at every arrival."""
    outer = Nesterov(lr=0.7, momentum=0.9)
    return _demo("demo-async-naive", AsyncLocalSGD(inner_steps=20, outer=outer, weight="1/k"))


def _demo(name: str, algorithm: Algorithm[Any] | AsyncAlgorithm[Any]) -> Run:
    return Run(
        recipe=name,
        model=GPT(layers=1, width=32, heads=4, head_size=8),
        data=Text(corpus="stdlib", tokenizer="bytes", seq_len=64, eval_batches=16),
        algorithm=algorithm,
        optimizer=AdamW(lr=Cosine(lr=0.06, warmup=20, floor=0.0015), betas=(0.9, 0.95), weight_decay=0.1),
        train=Train(steps=600, batch_size=64, warm_start_steps=150, warm_start_lr=0.016),
        cluster=Cluster(
            islands=4,
            step_time_s="very",
            link=Link(latency_s=0.030, bandwidth_mbit_per_s=0.8),
            threads_per_island=1,
        ),
        keep=Keep(evaluate_every=60, save_every=300),
    )
