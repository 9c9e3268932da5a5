"""A pretrained model on instructions: what is trained, and what is told beforehand of a pair that does not fit.

The loss of a batch is the mean over exactly the positions that `batches.tokens` counts. So gradients weighted by tokens add up to
the gradient over all of them, however they are batched, padded or cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.data.instructions import IGNORED_LABEL, InstructionData, Instructions, PaddedBatch, PaddedBatches
from atoll.models.pretrained import Pretrained
from atoll.runs.run import Run


@dataclass(frozen=True)
class FinetuningWorkload:
    """A pretrained model on instructions."""

    model: Pretrained
    data: InstructionData

    @property
    def batches(self) -> PaddedBatches:
        return self.data.train

    def module(self) -> nn.Module:
        """The pretrained module.

        Raises:
            ConfigError: it cannot read the examples.
        """
        module: Any = self.model.build()
        rows = module.get_input_embeddings().weight.shape[0]
        if self.data.largest_id >= rows:
            raise ConfigError(
                f"the examples hold the token {self.data.largest_id}, and the model in {self.model.path} knows {rows} of them, "
                f"counted from 0: the tokenizer is another model's. Leave out data.tokenizer to take the model's own."
            )
        places = getattr(module.config, "max_position_embeddings", None)
        if places is not None and self.data.longest > places:
            raise ConfigError(
                f"an example has {self.data.longest} tokens, and the model in {self.model.path} reads at most {places}. "
                f"Set data.max_len={places}."
            )
        return module  # type: ignore[no-any-return]

    def loss(self, module: nn.Module, batch: PaddedBatch) -> Tensor:
        """The mean over the positions at which something is predicted; 0, with a gradient of 0, where there is none."""
        total, count = _summed(module, batch)
        return total / count.clamp(min=1)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """The mean over all predicted tokens of the held-out examples: long answers count for more than short ones."""
        device = next(module.parameters()).device
        total, count = 0.0, 0
        for batch in self.data.validation:
            loss, tokens = _summed(module, {name: part.to(device) for name, part in batch.items()})
            total, count = total + float(loss), count + int(tokens)
        return {"loss": total / count}

    def fingerprint(self) -> str:
        """Of the pretrained weights, the examples, and who reads what."""
        return f"{self.model.fingerprint()}-{self.batches.fingerprint()}"


def _summed(module: nn.Module, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """The summed loss of a batch, and over how many tokens."""
    # Without a cache of keys and values, which is for writing and would only take memory.
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (targets != IGNORED_LABEL).sum()


def check_given(run: Run) -> None:
    """Refuse a run of a recipe that leaves open which model and which examples, with the command that says it."""
    if not isinstance(run.model, Pretrained) or not isinstance(run.data, Instructions):
        return
    wanted = {"model.path": "FOLDER", "data.path": "FILE.jsonl"}
    missing = [name for name, given in zip(wanted, (run.model.path, run.data.path), strict=True) if not given]
    if missing:
        settings = " ".join(f"--set {name}={what}" for name, what in wanted.items())
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given: fine-tuning needs the folder of a Hugging "
            f"Face model and a file of examples. Say where they are: atoll run {run.recipe} {settings}"
        )
    run.model.check()  # before the data: else its tokenizer, which comes with it, would be missed first
