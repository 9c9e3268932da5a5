"""The workloads of a Run: a decoder or a Hugging Face model on text, a perceptron on points, or a pretrained model on instructions.

Data are loaded once. A workload reads them in one shard, for training without islands, or in the run's shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.data.gaussians import GaussianBatches, Gaussians, LabelledBatch, LoadedGaussians
from atoll.data.instructions import IGNORED_LABEL, Instructions, LoadedInstructions, PaddedBatch, PaddedBatches
from atoll.data.partition import IID, Features, KMeans
from atoll.data.text_dataset import LoadedText, Text
from atoll.data.token_batches import TokenBatches
from atoll.data.tokenizer import Tokenizer, tokenizer_in
from atoll.models.gpt import GPT, Decoder
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained
from atoll.replica.flat_parameters import trainable_weights
from atoll.replica.local_replica import torch_threads
from atoll.replica.master_weights import cast_parameters
from atoll.runs.run_settings import Run, device_of, dtype_of

Data = Text | Gaussians | Instructions
LoadedData = LoadedText | LoadedGaussians | LoadedInstructions
_EVAL_BATCH = 256  # points of one evaluation batch of a perceptron
_SAMPLE_TOKENS = 512  # of the text, to compare two tokenizers


@dataclass(frozen=True)
class TextWorkload:
    """A decoder, of atoll or of the Hugging Face library, on text."""

    model: GPT | Pretrained
    tokenizer: Tokenizer
    batches: TokenBatches
    validation: list[Tensor]
    seed: int

    def module(self) -> nn.Module:
        """A new module. Raises ConfigError if it is a Hugging Face model that cannot read the tokens."""
        vocabulary, seq_len = self.tokenizer.vocab_size, self.batches.seq_len
        if isinstance(self.model, GPT):
            return self.model.build(vocabulary, seq_len, self.seed)
        module = self.model.build(self.seed)
        advice = f"Use a config with a vocab_size of {vocabulary} or more, or a smaller tokenizer."
        self.model.check_reads(module, vocabulary - 1, seq_len, advice, "data.seq_len")
        return module

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        if isinstance(module, Decoder):
            return module.loss(batch)
        logits = causal_logits(module, batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The float64 mean of the per-batch losses, in batch order, with one synchronisation of the device."""
        device = next(module.parameters()).device
        losses = torch.stack([self.loss(module, batch.to(device, non_blocking=True)) for batch in self.validation])
        return {"loss": fmean(losses.tolist())}

    def fingerprint(self) -> str:
        model = f"{self.model.fingerprint()}-" if isinstance(self.model, Pretrained) else ""
        return f"{model}{self.tokenizer.digest}-{self.batches.fingerprint()}"


@dataclass(frozen=True)
class ToyWorkload:
    """A perceptron that classifies points of several Gaussians."""

    model: MLP
    data: Gaussians
    batches: GaussianBatches
    validation: LabelledBatch
    seed: int

    def module(self) -> nn.Sequential:
        return self.model.build(self.data.dimensions, self.data.classes, self.seed)

    def loss(self, module: nn.Module, batch: LabelledBatch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(_scores(module, inputs), labels)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The mean cross-entropy and the accuracy over the evaluation points."""
        device = next(module.parameters()).device
        loss, correct = 0.0, 0
        for inputs, labels in zip(*(torch.split(part, _EVAL_BATCH) for part in self.validation), strict=True):
            scores, labels = _scores(module, inputs.to(device)), labels.to(device)
            loss += float(F.cross_entropy(scores, labels, reduction="sum"))
            correct += int((scores.argmax(dim=1) == labels).sum())
        count = len(self.validation[1])
        return {"loss": loss / count, "accuracy": correct / count}

    def fingerprint(self) -> str:
        return self.batches.fingerprint()


def _scores(module: nn.Module, inputs: Tensor) -> Tensor:
    """The module's scores in fp32, of inputs that are cast to its own dtype."""
    scores: Tensor = module(inputs.to(next(module.parameters()).dtype))
    return scores.float()


@dataclass(frozen=True)
class FinetuningWorkload:
    """A pretrained model on instructions.

    The loss of a batch is the mean over exactly the positions that `batches.tokens` counts. Gradients weighted by tokens therefore
    add up to the gradient over all of them, however the examples are batched, padded or cut into micro-batches.
    """

    model: Pretrained
    data: LoadedInstructions
    batches: PaddedBatches
    validation: list[PaddedBatch]
    seed: int

    def module(self) -> nn.Module:
        """The pretrained module. Raises ConfigError if it cannot read the examples."""
        module = self.model.build(self.seed)
        advice = "Leave out data.tokenizer to take the model's own."
        self.model.check_reads(module, self.data.largest_id, self.data.longest, advice, "data.max_len")
        return module

    def loss(self, module: nn.Module, batch: PaddedBatch) -> Tensor:
        """The mean over the predicted positions; 0, with a gradient of 0, if there are none."""
        total, count = _summed_loss(module, batch)
        return total / count.clamp(min=1)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The mean over all predicted tokens of the held-out examples: long answers weigh more than short ones."""
        device = next(module.parameters()).device
        total, count = 0.0, 0
        for batch in self.validation:
            loss, tokens = _summed_loss(module, {name: part.to(device) for name, part in batch.items()})
            total, count = total + float(loss), count + int(tokens)
        return {"loss": total / count}

    def fingerprint(self) -> str:
        return f"{self.model.fingerprint()}-{self.batches.fingerprint()}"


def _summed_loss(module: nn.Module, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """The summed loss of a batch, and the number of predicted tokens."""
    logits = causal_logits(module, batch["input_ids"], batch["attention_mask"])[:, :-1]
    targets = batch["labels"][:, 1:]
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (targets != IGNORED_LABEL).sum()


def causal_logits(module: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Next-token logits of a Hugging Face model, without the cache of keys and values, which only generation needs."""
    masked = {} if mask is None else {"attention_mask": mask}
    logits: Tensor = module(input_ids=ids, **masked, use_cache=False).logits
    return logits


BuiltWorkload = TextWorkload | ToyWorkload | FinetuningWorkload


def single_shard_workload(run: Run, loaded: LoadedData) -> BuiltWorkload:
    """The run's data in one shard, which the warm start reads."""
    return _build(run, loaded, num_shards=1, partition=IID())


def sharded_workload(run: Run, loaded: LoadedData, params: Tree) -> BuiltWorkload:
    """The run's data in its shards. A k-means partition uses the features of the weights `params`. A single shard is the one that
    the warm start has read, and training continues after it."""
    begin = run.train.warm_start_steps if run.shards == 1 else 0
    return _build(run, loaded, num_shards=run.shards, features=_features(run, loaded, params), begin=begin)


def _build(
    run: Run, loaded: LoadedData, *, num_shards: int, partition: IID | None = None, features: Features | None = None, begin: int = 0
) -> BuiltWorkload:
    how = (num_shards, run.train.batch_size, run.seed, begin)
    if isinstance(loaded, LoadedGaussians):
        assert isinstance(run.model, MLP)
        return ToyWorkload(run.model, loaded.settings, *loaded.open(*how), run.seed)
    if isinstance(loaded, LoadedInstructions):
        assert isinstance(run.model, Pretrained)
        return FinetuningWorkload(run.model, loaded, *loaded.open(*how), run.seed)
    assert isinstance(run.model, GPT | Pretrained)
    if isinstance(run.model, Pretrained) and run.model.weights == "loaded":
        _check_same_tokenizer(run.model, loaded)
    return TextWorkload(run.model, loaded.tokenizer, *loaded.open(*how, features, partition), run.seed)


def _check_same_tokenizer(model: Pretrained, loaded: LoadedText) -> None:
    """Refuse text whose tokens do not mean what they mean to the model. Other files may hold the same tokenizer, so the ids of some
    text are compared."""
    own = tokenizer_in(model.path)
    text = loaded.tokenizer.decode(loaded.validation.ids[:_SAMPLE_TOKENS])
    if own is not None and not np.array_equal(own.encode(text), loaded.tokenizer.encode(text)):
        prepared = loaded.settings.prepared_folder is not None
        raise ConfigError(
            f"the tokenizer of the text gives other ids than the one in {model.path}, with which the model was trained. "
            + (f"Prepare the text again with --tokenizer {model.path}" if prepared else f"Set data.tokenizer={model.path}")
            + ", or start from random weights: model.weights=random."
        )


def _features(run: Run, loaded: LoadedData, params: Tree) -> Features | None:
    """Last-layer features of the model with these weights, averaged over the sequence; none if the partition uses none."""
    if not partitioned_by_weights(run):
        return None
    device = device_of(run)
    module: Any = single_shard_workload(run, loaded).module()
    trainable_weights(cast_parameters(module.to(device), dtype_of(run))).load(params)

    def features(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad(), torch_threads(run.cluster.threads_per_island):
            ids = torch.as_tensor(tokens, device=device)
            if isinstance(module, Decoder):
                hidden = module.features(ids)
            else:
                hidden = module(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        return cast(NDArray[np.float32], hidden.mean(dim=1).float().cpu().numpy())

    return features


def partitioned_by_weights(run: Run) -> bool:
    """Whether the partition of the data depends on trained weights."""
    return isinstance(run.data, Text) and isinstance(run.data.partition, KMeans)


def unpartitioned(data: Data) -> Data:
    """The data without shards and partition, on which loading does not depend."""
    return replace(data, shards=None, partition=IID()) if isinstance(data, Text) else replace(data, shards=None)


def data_fingerprint(workload: Workload) -> str | None:
    """Identifies the data and their partition, so that a resumed run can compare them. None for a user's workload."""
    return workload.fingerprint() if isinstance(workload, BuiltWorkload) else None
