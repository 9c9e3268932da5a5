"""Instructions: prompts and answers to fine-tune a pretrained model on, as one value; opened, it gives padded batches.

Examples differ in length, and so batches differ in how much there is to learn from them. A batch is padded to the longest of its
examples, and `tokens` counts exactly those positions over which the loss is a mean: none where nothing is to be learnt.

>>> Instructions(path="alpaca.jsonl", learn="answer").max_len
512
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError, DataError
from atoll.core.layout import shard_range
from atoll.data.documents import Document
from atoll.data.encoded_records import NOTHING, Encoded, Learn, encode, model_tokenizer
from atoll.data.examples import Indices
from atoll.data.holdout_split import VALIDATION, check_fraction, plan
from atoll.data.instruction_records import Record, read_records
from atoll.data.keyed_random import draws
from atoll.data.shuffled_epochs import Epochs

PaddedBatch = dict[str, Tensor]
"""`input_ids`, `attention_mask` and `labels`, all (examples, longest), int64; see `Encoded.padded`."""


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Which examples there are, how they are tokenized, and what is to be learnt from them.

    Args:
        path: a .jsonl or .json file, a folder of such, or a glob; records are prompts with completions, Alpaca's instructions, or
            plain text.
        tokenizer: the folder of the tokenizer; none: the model's own.
        max_len: tokens at which longer examples are cut.
        learn: all tokens, or those of the answer alone; of plain text all in either case.
        validation_fraction: about this part of the examples is held out.
        validation_path: other files to validate on; then all of `path` is trained on.
        eval_examples: held-out examples to judge a model on; all, if there are no more.
        shards: into how many shards a run deals the examples; none: one per island.
    """

    path: str = ""
    tokenizer: str | None = None
    max_len: int = 512
    learn: Learn = "all"
    validation_fraction: float = 0.05
    validation_path: str | None = None
    eval_examples: int = 512
    shards: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_len < 2:
            raise ConfigError(f"max_len={self.max_len}: an example has at least 2 tokens, one to see and one to predict.")
        if self.eval_examples < 1:
            raise ConfigError(f"eval_examples={self.eval_examples}: a model is judged on at least 1 example.")
        if self.shards is not None and self.shards < 1:
            raise ConfigError(
                f"shards={self.shards}: there is at least 1 shard. Use a positive number, or none for one per island."
            )
        check_fraction(self.validation_fraction)

    def load(self) -> LoadedInstructions:
        """The examples as ids, not yet cut into shards.

        Raises:
            ConfigError: no files or no tokenizer are named.
            DataError: records or the tokenizer cannot be read, or nothing can be learnt from them.
        """
        if not self.path:
            raise ConfigError("data.path is not given: it is a .jsonl file of examples. Say which: --set data.path=FILE.")
        if self.tokenizer is None:
            raise ConfigError("data.tokenizer is not given, and there is no model to bring one. Give the folder of a model.")
        tokenizer = model_tokenizer(self.tokenizer)
        train, validation = (
            encode(side, tokenizer, max_len=self.max_len, learn=self.learn) for side in self._sides(list(read_records(self.path)))
        )
        for name, side in (("training", train), ("validation", validation)):
            if side.targets == 0:
                raise DataError(
                    f"{self.path}: the {len(side)} {name} examples have no token to learn within data.max_len={self.max_len}. "
                    f"Raise data.max_len, give longer examples, or use data.learn=all."
                )
        return LoadedInstructions(instructions=self, train=train, validation=validation, tokenizer=tokenizer)

    def open(self, num_shards: int, batch_size: int, seed: int) -> InstructionData:
        """Batches to train on, from `num_shards` shards, and to validate on. `seed` is of the shards and the order within each."""
        return self.load().open(num_shards, batch_size, seed)

    def _sides(self, named: Sequence[tuple[str, Record]]) -> tuple[list[Record], list[Record]]:
        """What to train on, and what to validate on."""
        if self.validation_path is not None:
            others = read_records(self.validation_path, "data.validation_path")
            train, validation = [record for _, record in named], [record for _, record in others]
        else:
            # A copy of a record under another number is held out with it.
            documents = [Document(name, "", f"{record.prompt}\0{record.answer}") for name, record in named]
            if len(documents) < 2:
                raise DataError(
                    f"{self.path} holds {len(documents)} examples: one to train on and one to validate on are needed. "
                    f"Give more, or data.validation_path=FILE."
                )
            split = plan(documents, self.validation_fraction)
            held_out = [split.sides(document)[VALIDATION] is not None for document in documents]
            train = [record for (_, record), out in zip(named, held_out, strict=True) if not out]
            validation = [record for (_, record), out in zip(named, held_out, strict=True) if out]
        if not train or not validation:
            raise DataError(f"{self.path if not train else self.validation_path} holds no examples. Give a file that does.")
        return train, validation


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedInstructions:
    """All examples in memory, as ids. May be opened several times, with other shards.

    Attributes:
        instructions: what they were made from.
        train: to train on.
        validation: held out.
        tokenizer: of the transformers library.
    """

    instructions: Instructions
    train: Encoded
    validation: Encoded
    tokenizer: Any

    def open(self, num_shards: int, batch_size: int, seed: int, begin: int = 0) -> InstructionData:
        """See `Instructions.open`. `begin`: batches of each shard that were read before."""
        count = len(self.train)
        if not 1 <= num_shards <= count:
            raise ConfigError(
                f"{num_shards} shards of {count} examples: there is at least 1 shard, and each has at least 1 example. "
                f"Use fewer shards, or more examples."
            )
        order = draws("shards", seed).permutation(count)
        shards = [np.sort(order[slice(*shard_range(count, shard, num_shards))]) for shard in range(num_shards)]
        useful = np.flatnonzero(self.validation.firsts < self.validation.lengths)
        judged = min(self.instructions.eval_examples, len(useful))
        chosen = useful[np.arange(judged) * len(useful) // judged]  # spread over all of them
        return InstructionData(
            train=PaddedBatches(self.train, shards, batch_size=batch_size, seed=seed, begin=begin),
            validation=[self.validation.padded(chosen[at : at + batch_size]) for at in range(0, judged, batch_size)],
            tokenizer=self.tokenizer,
            longest=int(max(self.train.lengths.max(), self.validation.lengths.max())),
            largest_id=int(max(self.train.ids.max(), self.validation.ids.max())),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class InstructionData:
    """Opened Instructions: batches by position, fixed batches to judge on, and what a model must be able to read.

    Attributes:
        train: batches by position.
        validation: batches to judge on.
        tokenizer: of the transformers library.
        longest: tokens of the longest example.
        largest_id: that occurs.
    """

    train: PaddedBatches
    validation: list[PaddedBatch]
    tokenizer: Any
    longest: int
    largest_id: int


class PaddedBatches:
    """Padded batches from shards of examples; implements `atoll.core.protocols.Batches`. Any number of threads may read at once.

    A shard is an endless sequence of epochs, each a permutation of the shard's examples that depends on the seed, on which examples
    these are and on the epoch. Batch p is the examples from p * `batch_size` on.
    """

    def __init__(self, examples: Encoded, shards: Iterable[Indices], *, batch_size: int, seed: int, begin: int = 0) -> None:
        self.batch_size = batch_size
        self._examples, self._seed = examples, seed
        self._epochs = Epochs(
            [np.asarray(shard, dtype=np.int64) for shard in shards], batch_size=batch_size, seed=seed, begin=begin
        )

    @property
    def num_shards(self) -> int:
        return self._epochs.num_shards

    def examples(self, shard: int) -> int:
        """How many examples the shard holds."""
        return self._epochs.examples(shard)

    def fingerprint(self) -> str:
        """Of the examples, of which each shard holds, and of their order: whether two readers read the same."""
        parts = [
            f"{self.batch_size}/{self._seed}".encode(),
            self._examples.digest(),
            self._epochs.identity,
        ]
        return blake2b(b"".join(parts), digest_size=16).hexdigest()

    def batch(self, shard: int, position: int) -> PaddedBatch:
        """The batch; the same for the same shard and position, whoever asks and when."""
        return self._examples.padded(self._epochs.batch(shard, position))

    def tokens(self, batch: PaddedBatch) -> int:
        """At how many positions of the batch something is predicted: what its loss is the mean over."""
        return int((batch["labels"][:, 1:] != NOTHING).sum())
