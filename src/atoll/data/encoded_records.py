"""Records as ids: tokenized by a model's own tokenizer, with the end of a text behind each, and cut to a length.

A record's prompt and answer are tokenized as one text, as a model will meet them. The answer begins at the first id in which that
text differs from the prompt alone: a token that reaches from one into the other counts as the answer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.errors import ConfigError, DataError
from atoll.core.optional_imports import require
from atoll.data.instruction_records import Record

NOTHING = -100
"""The label of a position at which nothing is to be learnt, as torch's cross-entropy has it."""

_AT_A_TIME = 1024  # records that are tokenized together

Learn = Literal["all", "answer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Examples of different lengths, one behind the other.

    Attributes:
        ids: of all examples, int32.
        ends: where each example ends in `ids`, int64.
        firsts: within each example, the first id that is to be predicted; its length if there is none, and never 0, since nothing
            predicts the first id of all.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    firsts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of each example, in tokens."""
        return np.diff(self.ends, prepend=0)

    @property
    def targets(self) -> int:
        """Tokens that are to be predicted, in all."""
        return int((self.lengths - self.firsts).sum())

    def digest(self) -> bytes:
        """Of everything."""
        parts = (np.ascontiguousarray(part).data for part in (self.ids, self.ends, self.firsts))
        state = blake2b(digest_size=16)
        for part in parts:
            state.update(part)
        return state.digest()

    def padded(self, chosen: Iterable[int]) -> dict[str, Tensor]:
        """These examples, padded at the end to the longest of them: `input_ids`, `attention_mask` and `labels`, all (examples,
        length) and int64. A label is the id at its own place, which the position before it predicts, or NOTHING."""
        spans = [(int(self.ends[i - 1]) if i else 0, int(self.ends[i]), int(self.firsts[i])) for i in chosen]
        shape = (len(spans), max(stop - start for start, stop, _ in spans))
        ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, NOTHING, np.int64), np.zeros(shape, np.int64)
        for row, (start, stop, first) in enumerate(spans):
            length = stop - start
            ids[row, :length] = self.ids[start:stop]
            labels[row, first:length] = self.ids[start + first : stop]
            mask[row, :length] = 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), "labels": torch.from_numpy(labels)}


def encode(records: Sequence[Record], tokenizer: Any, *, max_len: int, learn: Learn) -> Encoded:
    """The records as ids.

    Args:
        records: what to encode.
        tokenizer: one of the transformers library, as `model_tokenizer` gives it.
        max_len: longer examples are cut there; they then end without the end of a text.
        learn: whether all tokens are to be predicted, or those of the answers and the ends of texts alone.
    """
    ids: list[NDArray[np.int32]] = []
    firsts: list[int] = []
    for at in range(0, len(records), _AT_A_TIME):
        part = records[at : at + _AT_A_TIME]
        whole = _ids_of(tokenizer, [record.prompt + record.answer for record in part])
        prompts = _ids_of(tokenizer, [record.prompt for record in part]) if learn == "answer" else [[] for _ in part]
        for record, example, prompt in zip(part, whole, prompts, strict=True):
            if example[-1:] != [tokenizer.eos_token_id]:  # some tokenizers put it there themselves
                example.append(tokenizer.eos_token_id)
            example = example[:max_len]
            shown = _common(prompt, example) if record.prompt else 0
            ids.append(np.array(example, dtype=np.int32))
            firsts.append(min(len(example), max(1, shown)))
    return Encoded(
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        ends=np.cumsum([len(example) for example in ids], dtype=np.int64),
        firsts=np.array(firsts, dtype=np.int64),
    )


def model_tokenizer(path: str) -> Any:
    """The tokenizer in a model's folder.

    Raises:
        ConfigError: there is no such folder.
        DataError: there is no tokenizer in it, or one without an end of text.
    """
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise ConfigError(
            f"data.tokenizer={path!r} is not a folder (it is taken from {Path.cwd()}). Give the folder of a model with its "
            f"tokenizer."
        )
    transformers = require("transformers", extra="hf", purpose="tokenizers of pretrained models")
    advice = "Save one there with `tokenizer.save_pretrained`, or name the folder of another: data.tokenizer=FOLDER."
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of many kinds, for damaged files too
        raise DataError(f"{folder} holds no tokenizer that can be loaded ({type(error).__name__}: {error}). {advice}") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # for want of files the library makes one that knows no text
        raise DataError(f"{folder} holds no tokenizer: what is there makes nothing of a text. {advice}")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {folder} has no token for the end of a text, so a model could not learn to stop. "
            f"Set its eos_token, and save it again with `tokenizer.save_pretrained`."
        )
    return tokenizer


def _ids_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The ids of each text, with what the tokenizer puts before one."""
    # Not verbose: it would warn of texts that are longer than its model, and which are cut later.
    asked = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded: list[list[int]] = tokenizer(texts, **asked)["input_ids"]
    return encoded


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many ids the two begin with alike."""
    length = min(len(one), len(two))
    return next((at for at in range(length) if one[at] != two[at]), length)
