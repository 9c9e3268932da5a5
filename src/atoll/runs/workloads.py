"""What a Run trains: a decoder on text, a perceptron on points, or a pretrained model on instructions. One workload for each kind
of data.

Data are loaded once and opened as often as asked: as one shard for plain training, and in the run's shards for the islands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.data.gaussians import GaussianBatches, GaussianData, Gaussians, LabelledBatch, LoadedGaussians
from atoll.data.instructions import Instructions, LoadedInstructions
from atoll.data.partition import IID, Features, KMeans
from atoll.data.text import LoadedText, Text, TextData
from atoll.data.token_batches import TokenBatches
from atoll.data.tokenizer import Tokenizer
from atoll.models.gpt import GPT, Decoder
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained
from atoll.replica.flat_parameters import trainable_weights
from atoll.replica.local_replica import torch_threads
from atoll.replica.master_weights import cast_parameters
from atoll.runs.finetuning import FinetuningWorkload
from atoll.runs.run import Run, device_of, dtype_of

Loaded = LoadedText | LoadedGaussians | LoadedInstructions
_EVAL_BATCH = 256  # points that a perceptron is judged on at a time


@dataclass(frozen=True)
class TextWorkload:
    """A decoder on text."""

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
        """The float64 mean of the per-batch losses, in batch order. The device is waited for once."""
        device = next(module.parameters()).device
        losses = torch.stack([self.loss(module, batch.to(device, non_blocking=True)) for batch in self.data.validation])
        return {"loss": fmean(losses.tolist())}

    def fingerprint(self) -> str:
        """Of the text and of who reads what."""
        return f"{self.tokenizer.digest}-{self.batches.fingerprint()}"


@dataclass(frozen=True)
class ToyWorkload:
    """A perceptron that tells Gaussians apart."""

    model: MLP
    data: GaussianData
    seed: int

    @property
    def batches(self) -> GaussianBatches:
        return self.data.train

    def module(self) -> nn.Sequential:
        return self.model.build(self.data.dimensions, self.data.classes, self.seed)

    def loss(self, module: nn.Module, batch: LabelledBatch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(_scores(module, inputs), labels)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The mean cross-entropy over the points to judge on, and the part of them that is told right."""
        device = next(module.parameters()).device
        loss, right = 0.0, 0
        for inputs, labels in zip(*(torch.split(part, _EVAL_BATCH) for part in self.data.evaluation), strict=True):
            scores, labels = _scores(module, inputs.to(device)), labels.to(device)
            loss += float(F.cross_entropy(scores, labels, reduction="sum"))
            right += int((scores.argmax(dim=1) == labels).sum())
        count = len(self.data.evaluation[1])
        return {"loss": loss / count, "accuracy": right / count}

    def fingerprint(self) -> str:
        """Of the points and of who reads what."""
        return self.batches.fingerprint()


def _scores(module: nn.Module, inputs: Tensor) -> Tensor:
    """What the module makes of points, which are given to it in its own precision; to be compared in single."""
    scores: Tensor = module(inputs.to(next(module.parameters()).dtype))
    return scores.float()


BuiltWorkload = TextWorkload | ToyWorkload | FinetuningWorkload


def plain_workload(run: Run, loaded: Loaded) -> BuiltWorkload:
    """The run's data as one shard: what plain training reads."""
    return _opened(run, loaded, num_shards=1, partition=IID())


def island_workload(run: Run, loaded: Loaded, params: Tree) -> BuiltWorkload:
    """The run's data in its shards. `params` are the weights whose features k-means looks at. A single shard is what the warm start
    has read, in the same order: who trains on it goes on from there."""
    begin = run.train.warm_start_steps if run.shards == 1 else 0
    return _opened(run, loaded, num_shards=run.shards, features=_features(run, loaded, params), begin=begin)


def _opened(
    run: Run, loaded: Loaded, *, num_shards: int, partition: IID | None = None, features: Features | None = None, begin: int = 0
) -> BuiltWorkload:
    if isinstance(loaded, LoadedGaussians):
        assert isinstance(run.model, MLP)
        return ToyWorkload(run.model, loaded.open(num_shards, run.train.batch_size, run.seed, begin), run.seed)
    if isinstance(loaded, LoadedInstructions):
        assert isinstance(run.model, Pretrained)
        return FinetuningWorkload(run.model, loaded.open(num_shards, run.train.batch_size, run.seed, begin))
    assert isinstance(run.model, GPT)
    text = loaded.open(num_shards, run.train.batch_size, run.seed, features, partition, begin)
    return TextWorkload(run.model, text, run.seed)


def _features(run: Run, loaded: Loaded, params: Tree) -> Features | None:
    """Last-layer features of the decoder with these weights, averaged over the sequence; none where nobody asks for them."""
    if not needs_weights(run):
        return None
    device, module = device_of(run), plain_workload(run, loaded).module()
    assert isinstance(module, Decoder)
    trainable_weights(cast_parameters(module.to(device), dtype_of(run))).load(params)

    def features(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad(), torch_threads(run.cluster.threads_per_island):
            hidden = module.features(torch.as_tensor(tokens, device=device))
        return cast(NDArray[np.float32], hidden.mean(dim=1).float().cpu().numpy())

    return features


def needs_weights(run: Run) -> bool:
    """Whether the data are dealt out by what trained weights make of them."""
    return isinstance(run.data, Text) and isinstance(run.data.partition, KMeans)


def whole(data: Text | Gaussians | Instructions) -> Text | Gaussians | Instructions:
    """The data before they are dealt out to islands: what loading them depends on."""
    return replace(data, shards=None, partition=IID()) if isinstance(data, Text) else replace(data, shards=None)


def dealt(loaded: Loaded, data: Text | Gaussians | Instructions) -> Loaded:
    """The same data, to be dealt out in this way."""
    if isinstance(loaded, LoadedText):
        assert isinstance(data, Text)
        return replace(loaded, text=data)
    if isinstance(loaded, LoadedInstructions):
        assert isinstance(data, Instructions)
        return replace(loaded, instructions=data)
    assert isinstance(data, Gaussians)
    return replace(loaded, gaussians=data)


def fingerprint(workload: Workload) -> str | None:
    """Of the data and of who reads what: whether a run that goes on reads what it read before. None of a user's own workload."""
    return workload.fingerprint() if isinstance(workload, BuiltWorkload) else None
