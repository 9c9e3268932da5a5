"""Instructions: prompts and answers to fine-tune a pretrained model on, as one spec, which opens to padded batches.

Records are JSON objects in one of three forms, which docs/finetuning.md describes. Other fields are ignored. A record with the
fields of two forms has the later one: {"text"}; {"prompt", "completion"}; {"instruction", "input", "output"}.

The model's own tokenizer encodes prompt and answer as one text and appends the end of text. The answer begins at the first id in
which that text differs from the prompt alone, so a token that spans both belongs to the answer. A batch is padded to its longest
example. The loss is a mean over the target positions of a batch, which `tokens` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.config.type_checks import check_positive, check_types
from atoll.core.errors import ConfigError, DataError
from atoll.core.optional_imports import require
from atoll.core.verified_files import expanded
from atoll.data.compressed_text_files import find_files, parse_json, read_json_lines, read_text, text_field, uncompressed_suffix
from atoll.data.document_sources import Document
from atoll.data.holdout_split import TRAIN, check_fraction, plan_split
from atoll.data.shuffled_epochs import OpenedData, ShuffledShards, check_shards_setting, random_shards

PaddedBatch = dict[str, Tensor]
"""`input_ids`, `attention_mask` and `labels`, all (examples, longest), int64; see `EncodedRecords.padded`."""

IGNORED_LABEL = -100
"""The label of a position that is no target, as in torch's cross-entropy."""

Learn = Literal["all", "answer"]

_ENCODE_RECORDS = 1024  # in one call of the tokenizer
_SUFFIXES = (".jsonl", ".json")
_FORMS = '{"text"}, {"prompt", "completion"} or {"instruction", "input", "output"}'


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """The records, their tokenizer, and which tokens are targets.

    Args:
        path: a .jsonl or .json file, a folder of them, or a glob.
        tokenizer: the folder of the tokenizer; none: the model's own.
        max_len: longer examples are truncated to this many tokens.
        learn: targets are all tokens, or those of the answer; of plain text all in either case.
        validation_fraction: about this part of the records is held out.
        validation_path: other files to validate on; then all of `path` is for training.
        eval_examples: validation examples to evaluate on; all, if there are no more.
        shards: number of shards; none: one per island.
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
        check_positive(self, "eval_examples")
        check_shards_setting(self.shards)
        check_fraction(self.validation_fraction)

    def load(self) -> LoadedInstructions:
        """Read and encode the records. Raises ConfigError or DataError if files, tokenizer or targets are missing."""
        if not self.path:
            raise ConfigError("data.path is not given: it is a .jsonl file of examples. Set it: --set data.path=FILE.")
        if self.tokenizer is None:
            raise ConfigError("data.tokenizer is not given, and there is no model to bring one. Give the folder of a model.")
        tokenizer = load_model_tokenizer(self.tokenizer)
        train, validation = (
            encode_records(side, tokenizer, max_len=self.max_len, learn=self.learn)
            for side in self._split(list(read_records(self.path)))
        )
        for name, side in (("training", train), ("validation", validation)):
            if side.num_targets == 0:
                raise DataError(
                    f"{self.path}: the {len(side)} {name} examples have no token to learn within data.max_len={self.max_len}. "
                    f"Raise data.max_len, give longer examples, or use data.learn=all."
                )
        return LoadedInstructions(settings=self, train=train, validation=validation, tokenizer=tokenizer)

    def _split(self, named: Sequence[tuple[str, InstructionRecord]]) -> tuple[list[InstructionRecord], list[InstructionRecord]]:
        """The records to train on, and those to validate on."""
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
            split = plan_split(documents, self.validation_fraction)
            train, validation = [], []
            for document, (_, record) in zip(documents, named, strict=True):
                (train if split.sides(document)[TRAIN] is not None else validation).append(record)
        if not train or not validation:
            raise DataError(f"{self.path if not train else self.validation_path} holds no examples. Give a file that does.")
        return train, validation


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedInstructions:
    """All examples in memory, as ids. May be opened several times, with other shards."""

    settings: Instructions
    train: EncodedRecords
    validation: EncodedRecords
    tokenizer: Any

    @property
    def longest(self) -> int:
        """The number of tokens of the longest example."""
        return int(max(self.train.lengths.max(), self.validation.lengths.max()))

    @property
    def largest_id(self) -> int:
        """The largest token id of any example."""
        return int(max(self.train.ids.max(), self.validation.ids.max()))

    def open(
        self, num_shards: int, batch_size: int, seed: int, skip_batches: int = 0
    ) -> OpenedData[PaddedBatches, list[PaddedBatch]]:
        """Training batches from `num_shards` shards, and validation batches. `seed` decides the shards and the order in each. Each
        shard starts after its first `skip_batches` batches."""
        shards = [np.sort(shard) for shard in random_shards(len(self.train), num_shards, seed)]
        with_targets = np.flatnonzero(self.validation.first_targets < self.validation.lengths)
        num_evaluated = min(self.settings.eval_examples, len(with_targets))
        chosen = with_targets[np.arange(num_evaluated) * len(with_targets) // num_evaluated]  # evenly spaced
        return OpenedData(
            train=PaddedBatches(self.train, shards, batch_size=batch_size, seed=seed, skip_batches=skip_batches),
            validation=[self.validation.padded(chosen[at : at + batch_size]) for at in range(0, num_evaluated, batch_size)],
        )


class PaddedBatches(ShuffledShards["EncodedRecords"]):
    """Padded batches from shards of examples; implements `atoll.core.protocols.Batches`."""

    def fingerprint(self) -> str:
        """A digest of the examples, the shards and their order: equal for readers of the same batches."""
        return self._fingerprint(f"{self.batch_size}/{self._seed}".encode(), self._examples.digest())

    def batch(self, shard: int, position: int) -> PaddedBatch:
        return self._examples.padded(self.indices(shard, position))

    def tokens(self, batch: PaddedBatch) -> int:
        """How many target positions the batch has: its loss is the mean over them."""
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


# --------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """A prompt and the answer to it. Plain text has an empty prompt."""

    prompt: str
    answer: str


def read_records(path: str, setting: str = "data.path") -> Iterator[tuple[str, InstructionRecord]]:
    """All records of a file, a glob or a folder, each with its name FILE#NUMBER, in the order of the files' paths.

    A folder is read recursively without hidden files. `setting` is the name of the path in error messages.
    """
    for name, file in _find_record_files(path, setting):
        for number, found in _read_json_values(file):
            yield f"{name}#{number}", parse_record(found, f"{file}, record {number}")


def parse_record(found: Any, where: str = "the record") -> InstructionRecord:
    """The record of a JSON object in one of the three forms."""
    if not isinstance(found, Mapping):
        raise DataError(f"{where} is a JSON {type(found).__name__}, not an object. Each record is one of {_FORMS}.")

    def text(field: str) -> str:
        return text_field(found, field, where, "Put it in quotes, or leave it out.")

    if {"instruction", "output"} <= found.keys():
        return InstructionRecord(_alpaca_prompt(text("instruction"), text("input") if found.get("input") else ""), text("output"))
    if {"prompt", "completion"} <= found.keys():
        return InstructionRecord(text("prompt"), text("completion"))
    if "text" in found:
        return InstructionRecord("", text("text"))
    raise DataError(f"{where} has the fields {', '.join(found) or 'none'}. Each record is one of {_FORMS}. Rename the fields.")


def _alpaca_prompt(instruction: str, context: str) -> str:
    """The prompt with which Alpaca was trained, as in the `text` of its dataset."""
    task = "Below is an instruction that describes a task"
    paired = ", paired with an input that provides further context" if context else ""
    request = f"{task}{paired}. Write a response that appropriately completes the request."
    parts = [request, f"### Instruction:\n{instruction}", *([f"### Input:\n{context}"] if context else []), "### Response:\n"]
    return "\n\n".join(parts)


def _find_record_files(path: str, setting: str) -> list[tuple[str, Path]]:
    """The files, each with a name that does not depend on where their folder lies."""
    root, files = find_files(path, _SUFFIXES)
    if not files:
        raise DataError(
            f"{setting}={path!r}: there is no {' or '.join(_SUFFIXES)} file (the path is relative to {Path.cwd()}). Give a file, "
            f"a folder with such files, or a glob that matches some."
        )
    is_folder = expanded(path).is_dir()
    return sorted((file.relative_to(root).as_posix() if is_folder else file.name, file) for file in files)


def _read_json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, numbered from 1 by line or by their place in the array."""
    if uncompressed_suffix(path) != ".json":
        yield from read_json_lines(path)
        return
    advice = "A .json file is one array of objects; with an object on each line, call it .jsonl."
    whole = parse_json(read_text(path), str(path), advice)
    if not isinstance(whole, list):
        raise DataError(
            f"{path} is a JSON {type(whole).__name__}, not an array. Give an array of records, or one per line in .jsonl."
        )
    yield from enumerate(whole, start=1)


# -------------------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedRecords:
    """Examples of different lengths, one after the other.

    `first_targets` has the first id of each example that is a target: at least 1, since nothing predicts the first id, and the
    example's length if no id is a target.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]  # of each example in `ids`
    first_targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    @property
    def num_targets(self) -> int:
        return int((self.lengths - self.first_targets).sum())

    def digest(self) -> bytes:
        state = blake2b(digest_size=16)
        for part in (self.ids, self.ends, self.first_targets):
            state.update(np.ascontiguousarray(part).data)
        return state.digest()

    def padded(self, chosen: Iterable[int]) -> PaddedBatch:
        """These examples, padded at the end to the longest of them. A label is the id at its own position, which the position
        before it predicts, or IGNORED_LABEL."""
        spans = [(int(self.ends[i - 1]) if i else 0, int(self.ends[i]), int(self.first_targets[i])) for i in chosen]
        shape = (len(spans), max(stop - start for start, stop, _ in spans))
        ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64), np.zeros(shape, np.int64)
        for row, (start, stop, first) in enumerate(spans):
            length = stop - start
            ids[row, :length] = self.ids[start:stop]
            labels[row, first:length] = self.ids[start + first : stop]
            mask[row, :length] = 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), "labels": torch.from_numpy(labels)}


def encode_records(records: Sequence[InstructionRecord], tokenizer: Any, *, max_len: int, learn: Learn) -> EncodedRecords:
    """Encode with a tokenizer of the transformers library. Examples longer than `max_len` are truncated, without an end of text."""
    ids: list[NDArray[np.int32]] = []
    first_targets: list[int] = []
    for at in range(0, len(records), _ENCODE_RECORDS):
        part = records[at : at + _ENCODE_RECORDS]
        whole = _encode_texts(tokenizer, [record.prompt + record.answer for record in part])
        prompts = _encode_texts(tokenizer, [record.prompt for record in part]) if learn == "answer" else [[] for _ in part]
        for record, example, prompt in zip(part, whole, prompts, strict=True):
            if example[-1:] != [tokenizer.eos_token_id]:  # some tokenizers append it themselves
                example.append(tokenizer.eos_token_id)
            example = example[:max_len]
            prompt_length = _common_prefix(prompt, example) if record.prompt else 0
            ids.append(np.array(example, dtype=np.int32))
            first_targets.append(min(len(example), max(1, prompt_length)))
    return EncodedRecords(
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        ends=np.cumsum([len(example) for example in ids], dtype=np.int64),
        first_targets=np.array(first_targets, dtype=np.int64),
    )


def load_model_tokenizer(path: str) -> Any:
    """The tokenizer in a model's folder. Raises ConfigError without the folder, DataError without a usable tokenizer in it."""
    folder = expanded(path)
    if not path or not folder.is_dir():
        raise ConfigError(
            f"data.tokenizer={path!r} is not a folder (the path is relative to {Path.cwd()}). Give the folder of a model with its "
            f"tokenizer."
        )
    transformers = require("transformers", extra="hf", purpose="tokenizers of pretrained models")
    advice = "Save one there with `tokenizer.save_pretrained`, or name the folder of another: data.tokenizer=FOLDER."
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises errors of many kinds, for damaged files too
        raise DataError(f"{folder} holds no tokenizer that can be loaded ({type(error).__name__}: {error}). {advice}") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # without files the library makes one that encodes nothing
        raise DataError(f"{folder} holds no tokenizer: the one that was loaded encodes a text as nothing. {advice}")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {folder} has no token for the end of a text, so a model could not learn to stop. "
            f"Set its eos_token, and save it again with `tokenizer.save_pretrained`."
        )
    return tokenizer


def _encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    # Not verbose: the tokenizer would warn of texts longer than its model's limit, which are truncated later.
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded: list[list[int]] = tokenizer(texts, **options)["input_ids"]
    return encoded


def _common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """The number of leading ids that are equal."""
    length = min(len(one), len(two))
    return next((at for at in range(length) if one[at] != two[at]), length)
