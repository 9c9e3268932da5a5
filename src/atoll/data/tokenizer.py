"""Tokenizers turn text into ids from 0 to `vocab_size` - 1 and back: bytes, or byte-level BPE by the `tokenizers` library.

The id `end_of_text` separates documents; encoding a text never gives it. Decoding turns invalid UTF-8 into the replacement
character. Equal digests mean equal ids for every text. Token files store the digest, so tokens are never read with a tokenizer
other than the one that wrote them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.config.type_checks import shown
from atoll.core.errors import ConfigError, DataError
from atoll.core.optional_imports import require
from atoll.core.verified_files import expanded
from atoll.data.compressed_text_files import COMPRESSED_SUFFIXES, read_text
from atoll.data.document_sources import END_OF_TEXT, Document

Ids = NDArray[np.unsignedinteger[Any]]
_LARGEST_BPE = 1 << 20  # four times the largest vocabulary in use; the library allocates as much before it trains


class ByteTokenizer:
    """One id for each of the 256 bytes, and one for the end of a text."""

    vocab_size = 257
    end_of_text = 256
    digest = blake2b(b"atoll bytes 257", digest_size=16).hexdigest()

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        parts = [END_OF_TEXT.encode() if i == self.end_of_text else bytes((i,)) for i in _checked_ids(ids, self.vocab_size)]
        return b"".join(parts).decode(errors="replace")


class BPETokenizer:
    """A tokenizer of the `tokenizers` library, made from the JSON text of its file."""

    def __init__(self, text: str, source: str = "the tokenizer") -> None:
        library = require("tokenizers", extra="hf", purpose="BPE tokenizers", alone=True)
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{source} is not a file of the tokenizers library ({error}). Save one with Tokenizer.save.") from error
        # Where a document spells a special token, that is encoded as plain text.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.text = text

    @cached_property
    def vocab_size(self) -> int:
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def end_of_text(self) -> int | None:
        known = (self._tokenizer.token_to_id(token) for token in (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"))
        return next((token for token in known if token is not None), None)

    @cached_property
    def digest(self) -> str:
        return blake2b(self.text.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=dtype_for(self.vocab_size)) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(_checked_ids(ids, self.vocab_size), skip_special_tokens=False))


Tokenizer = ByteTokenizer | BPETokenizer


def dtype_for(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest dtype in which tokens are stored."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def train_bpe(documents: Iterable[Document], vocab_size: int) -> BPETokenizer:
    """Learn byte-level BPE merges from one pass over the documents. The same documents give the same tokenizer.

    `vocab_size` counts 256 bytes, the end of a text, and the merges. A short text may give fewer.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size={vocab_size}: byte-level BPE needs 257 or more, for 256 bytes and the end of a text.")
    library = require("tokenizers", extra="hf", purpose="BPE tokenizers", alone=True)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = _byte_level(library, library.models.BPE())
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return BPETokenizer(tokenizer.to_str())


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a spec: `bytes`; a JSON file of the tokenizers library; or a folder with `tokenizer.json`, or with GPT-2's
    `vocab.json` and `merges.txt`. Files may be compressed."""
    if spec == "bytes":
        return ByteTokenizer()
    path = expanded(spec)
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise DataError(
            f"tokenizer={spec!r} is neither `bytes` nor a file. Give bytes, the JSON file or the folder of a tokenizer, "
            f"or bpe:VOCAB to train one."
        )
    return BPETokenizer(read_text(path), source=str(path))


def tokenizer_in(folder: str) -> BPETokenizer | None:
    """The tokenizer in a model's folder; none if it has no file that `load_tokenizer` reads."""
    path = expanded(folder)
    names = ("tokenizer.json", "merges.txt")
    return _from_folder(path) if any(_plain_or_compressed(path, name) for name in names) else None


def load_saved_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer that a run or `prepare` saved; bytes if there is no such file."""
    return load_tokenizer(str(file)) if os.path.lexists(file) else ByteTokenizer()


def huggingface_files(tokenizer: Tokenizer, max_length: int) -> dict[str, dict[str, Any]]:
    """The contents of the files, by name, from which `AutoTokenizer` of transformers makes a tokenizer that gives the same ids. It
    adds no token to a text, and takes a special token that a text spells for text, as `encode` does."""
    if isinstance(tokenizer, BPETokenizer):
        whole = {**json.loads(tokenizer.text), "post_processor": None, "truncation": None, "padding": None}
        end_of_text = next((one["content"] for one in whole["added_tokens"] if one["id"] == tokenizer.end_of_text), None)
    else:
        whole, end_of_text = _bytes_as_bpe(), END_OF_TEXT
    ends = {name: end_of_text for name in ("bos_token", "eos_token") if end_of_text is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "split_special_tokens": True}
    return {"tokenizer.json": whole, "tokenizer_config.json": {**config, **ends, "clean_up_tokenization_spaces": False}}


def _bytes_as_bpe() -> dict[str, Any]:
    """The byte tokenizer as a file of the `tokenizers` library: BPE without merges. Byte-level BPE writes a byte as a character:
    itself if it is printable, else the next of those from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (number for number in range(256) if number not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    unused = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    vocab = {characters[byte]: byte for byte in range(256)} | {END_OF_TEXT: ByteTokenizer.end_of_text}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ByteTokenizer.end_of_text, "content": END_OF_TEXT, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", **unused, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }


def bpe_vocab_size(spec: str) -> int | None:
    """The vocabulary size in a spec `bpe:VOCAB`; None for any other spec.

    >>> bpe_vocab_size("bpe:32000"), bpe_vocab_size("bytes")
    (32000, None)
    """
    scheme, colon, size = spec.partition(":")
    if scheme != "bpe" or not colon:
        return None
    if not size.isdecimal() or len(size) > len(str(_LARGEST_BPE)) or int(size) > _LARGEST_BPE:
        raise ConfigError(
            f"tokenizer={shown(spec)}: bpe: must be followed by the size of the vocabulary, at most {_LARGEST_BPE:,}, as in "
            f"bpe:32000."
        )
    return int(size)


def _from_folder(folder: Path) -> BPETokenizer:
    whole, vocab, merges = (_plain_or_compressed(folder, name) for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole is not None:
        return BPETokenizer(read_text(whole), source=str(whole))
    if vocab is None or merges is None:
        raise DataError(
            f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.json and merges.txt. Give the folder that does."
        )
    library = require("tokenizers", extra="hf", purpose="BPE tokenizers", alone=True)
    lines = read_text(merges).split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    try:
        model = library.models.BPE(vocab=json.loads(read_text(vocab)), merges=pairs)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{vocab} and {merges} do not make a tokenizer ({error}). Copy them again from their source.") from error
    tokenizer = _byte_level(library, model)
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return BPETokenizer(tokenizer.to_str())


def _byte_level(library: Any, model: Any) -> Any:
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _plain_or_compressed(folder: Path, name: str) -> Path | None:
    return next((path for suffix in ("", *COMPRESSED_SUFFIXES) if (path := folder / f"{name}{suffix}").is_file()), None)


def _checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    numbers = [int(i) for i in ids]
    wrong = next((i for i in numbers if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise DataError(f"id {wrong} is outside the vocabulary of {vocab_size}. Use the tokenizer that wrote these ids.")
    return numbers
