"""From a Run to live objects: the only place that knows every room."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.data.partition import IID, Features, KMeans
from atoll.data.stream import TokenBatches
from atoll.data.text import LoadedText, TextData
from atoll.data.tokenizer import Tokenizer
from atoll.engines.flat import weights_of
from atoll.engines.local import Evaluator, LocalReplica, Loss, torch_threads
from atoll.engines.sim.engine import SimEngine
from atoll.errors import ConfigError, TrainingDiverged
from atoll.models.gpt import GPT, Decoder
from atoll.optim.schedules import WSD, at
from atoll.protocols import Sink, Work, Workload
from atoll.runs.run import Run
from atoll.tree import Tree


@dataclass(frozen=True)
class TextWorkload:
    """A decoder on text: the workload of every Run that is not given another."""

    model: GPT
    data: TextData
    seed: int

    @property
    def batches(self) -> TokenBatches:
        return self.data.train

    @property
    def tokenizer(self) -> Tokenizer:
        return self.data.tokenizer

    def module(self) -> Decoder:
        return self.model.build(self.data.vocab_size, self.data.seq_len, self.seed)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, Decoder)
        return module.loss(batch)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The float64 mean of the per-batch losses, in batch order."""
        device = next(module.parameters()).device
        return {"loss": fmean(float(self.loss(module, batch.to(device))) for batch in self.data.validation)}


class WarmStart:
    """Weights after plain training by one island, before the clock starts."""

    def __init__(self, params: Tree, tokens: int, loss: float) -> None:
        self.params, self.tokens, self.loss = params, tokens, loss


def device_of(run: Run) -> str:
    """Where the run computes."""
    if run.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device. Use train.device=cpu, or auto.")
    return run.train.device


def plain_workload(run: Run, text: LoadedText) -> TextWorkload:
    """The run's text as one shard: what plain training reads."""
    data = text.open(num_shards=1, batch_size=run.train.batch_size, seed=run.seed, partition=IID())
    return TextWorkload(run.model, data, run.seed)


def island_workload(run: Run, text: LoadedText, params: Tree) -> TextWorkload:
    """The run's text in one shard per island. `params` are the weights whose features k-means looks at."""
    features = _features(run, plain_workload(run, text).module(), params) if isinstance(run.data.partition, KMeans) else None
    data = text.open(num_shards=run.cluster.islands, batch_size=run.train.batch_size, seed=run.seed, features=features)
    return TextWorkload(run.model, data, run.seed)


def _features(run: Run, module: Decoder, params: Tree) -> Features:
    """Last-layer features of the decoder with these weights, averaged over the sequence."""
    device = device_of(run)
    weights_of(module.to(device)).load(params)

    def features(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad(), torch_threads(run.cluster.threads_per_island):
            hidden = module.features(torch.as_tensor(tokens, device=device))
        return cast(NDArray[np.float32], hidden.mean(dim=1).float().cpu().numpy())

    return features


def fingerprint(workload: Workload) -> str | None:
    """Of the text and of who reads what: whether a run that goes on reads what it read before. None of a user's own workload."""
    if not isinstance(workload, TextWorkload):
        return None
    return f"{workload.tokenizer.digest}-{workload.batches.fingerprint()}"


def loss_of(run: Run, workload: Workload) -> Loss:
    """The workload's loss, compiled if asked: one graph for all replicas."""
    return torch.compile(workload.loss) if run.train.compile else workload.loss


def replica_of(run: Run, workload: Workload, loss: Loss, island: int) -> LocalReplica:
    return LocalReplica(
        workload,
        optimizer=run.optimizer,
        clip_norm=run.train.clip_norm,
        micro_batches=run.train.micro_batches,
        device=device_of(run),
        autocast=run.train.precision == "bf16",
        loss=loss,
        seed=run.seed * 100_003 + island,
    )


def warm_start(run: Run, workload: Workload, progress: Callable[[int, int, float], None]) -> WarmStart:
    """Plain training of one replica: the inner rule at a constant rate after a warm-up. The schedule proper comes later."""
    steps = run.train.warm_start_steps
    if steps == 0:
        return WarmStart(Tree.of(workload.module().to(device_of(run))), 0, float("nan"))
    warmup = getattr(run.optimizer.lr, "warmup", 0)  # the schedule's own, once more
    schedule = WSD(lr=warm_start_rate(run), steps=steps, warmup=min(warmup, steps), decay=0)
    plain = replace(run, optimizer=replace(run.optimizer, lr=schedule))
    replica = replica_of(plain, workload, loss_of(run, workload), island=-1)
    losses: list[float] = []
    tokens = 0
    with torch_threads(run.cluster.threads_per_island):
        for start in range(0, steps, _STRETCH):
            count = min(_STRETCH, steps - start)
            trained = replica.train(count, Work(shard=0, start=start, schedule=start, examples=0))
            losses += trained.losses
            for step, loss in enumerate(trained.losses):
                if not math.isfinite(loss):
                    raise TrainingDiverged(
                        f"the loss is {loss} at step {start + step} of the warm start. Nothing was saved. Lower "
                        f"train.warm_start_lr or the optimizer's rate, or set train.clip_norm."
                    )
            tokens += trained.tokens
            progress(start + count, steps, losses[-1])
    return WarmStart(replica.params(), tokens, fmean(losses[-max(1, steps // 10) :]))


def warm_start_rate(run: Run) -> float:
    """The learning rate of the warm start: given, or the highest of the run's schedule."""
    return run.train.warm_start_lr or max(at(run.optimizer.lr, step) for step in range(run.train.steps))


_STRETCH = 10  # steps between two signs of life


def engine_of(
    run: Run, workload: Workload, params: Tree, sink: Sink, save: Callable[[SimEngine], None] | None
) -> tuple[SimEngine, Evaluator]:
    """The simulator for this run, and what judges the weights."""
    loss = loss_of(run, workload)
    evaluator = Evaluator(workload, device_of(run))
    engine = SimEngine(
        algorithm=run.algorithm,
        cluster=run.cluster,
        params=params,
        batches=workload.batches,
        make_replica=lambda island: replica_of(run, workload, loss, island),
        evaluate=evaluator,
        sink=sink,
        steps=run.train.steps,
        seed=run.seed,
        evaluate_every=run.rounds(run.keep.evaluate_every),
        save=save,
        save_every=run.rounds(run.keep.save_every),
    )
    return engine, evaluator
