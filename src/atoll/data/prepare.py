"""Prepare a corpus once: tokens on disk, to be mapped by every run that reads them.

    OUT/train.tokens  OUT/validation.tokens  OUT/tokenizer.json (unless it is bytes)  OUT/meta.json

The corpus is read twice as a stream: once to plan the split (and to train the tokenizer, on the training side), once to encode.
What was there before stays until all is written, and `meta.json` comes last: a folder without it is not finished.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atoll.core.atomic_files import replacing
from atoll.core.errors import DataError
from atoll.core.events import Progress
from atoll.data.corpus import open_corpus
from atoll.data.documents import Corpus, Document
from atoll.data.holdout_split import TRAIN, VALIDATION, Planner, Split, sided
from atoll.data.token_files import TokenFile, TokenWriter, token_writer
from atoll.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, bpe_size, load_tokenizer, train_bpe
from atoll.data.tokens import Tokens, encoded

META_VERSION = 1
FILES = ("train.tokens", "validation.tokens")
_TELL_EVERY_BYTES = 1 << 20

Watch = Callable[[Progress], None]
"""Is told how far it is: `done` and `total` in bytes of text; a total of 0 is not known yet."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A prepared folder, opened. `meta` is what its meta.json says."""

    folder: Path
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    meta: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"{self.folder}: {len(self.train):,} tokens of {self.train.num_documents:,} documents to train on, "
            f"{len(self.validation):,} of {self.validation.num_documents:,} to validate on, "
            f"in {len(self.train.domains)} domains; vocabulary {self.tokenizer.vocab_size:,}"
        )


def prepare(
    corpus: str,
    tokenizer: str,
    out: str | Path,
    *,
    validation_fraction: float = 0.05,
    validation_corpus: str | None = None,
    limit_bytes: int | None = None,
    progress: Watch | None = None,
) -> Prepared:
    """Write a corpus as token files, and open them.

    Args:
        corpus: the spec of a corpus; see `atoll.data.corpus`.
        tokenizer: `bytes`, a tokenizer's file or folder, or `bpe:VOCAB` to train one on this corpus.
        out: the folder to write; what was prepared there before is replaced.
        validation_fraction: about this part of the documents is held out, unless there is a validation_corpus.
        validation_corpus: the spec of a text to validate on; then the whole of `corpus` is trained on.
        limit_bytes: read at most this much of `corpus`; None: all.
        progress: is told how far it is.
    """
    source, out, watch = open_corpus(corpus, limit_bytes), Path(out), progress or (lambda _: None)
    held_out = None if validation_corpus is None else open_corpus(validation_corpus)
    split, made, total_bytes = _survey(source, tokenizer, validation_fraction if held_out is None else None, watch)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=out) as folder:
            staging = Path(folder)
            watched = _watched(source, "encode", total_bytes, watch)
            sides = _write_tokens(staging, sided(watched, split, held_out), made)
            if isinstance(made, BPETokenizer):
                _write(staging / "tokenizer.json", made.text)
            asked = _asked(corpus, tokenizer, validation_fraction, validation_corpus, limit_bytes)
            found = {"vocab_size": made.vocab_size, "tokenizer_digest": made.digest, "text_bytes": total_bytes}
            meta = {"version": META_VERSION, **asked, **found, **sides}
            _write(staging / "meta.json", json.dumps(meta, indent=2) + "\n")
            _install(staging, out)
    except OSError as error:
        raise DataError(
            f"could not write to {out}: {error.strerror or error}. Make room there, or choose another folder."
        ) from error
    return open_prepared(out)


def prepared_before(
    corpus: str,
    tokenizer: str,
    out: str | Path,
    *,
    validation_fraction: float = 0.05,
    validation_corpus: str | None = None,
    limit_bytes: int | None = None,
) -> Prepared | None:
    """What lies in the folder already, if it was asked for in the same words as now; none if nothing was prepared there. Whether
    the text has changed since is not looked at: that would take as long as preparing it. The arguments are those of `prepare`.

    Raises:
        DataError: the folder holds something else that was prepared, which `prepare` would replace.
    """
    if not is_prepared(out):
        return None
    remedy = "Use another folder, or remove this one first."
    try:
        there = open_prepared(out)
    except DataError as error:
        raise DataError(f"{out} holds something prepared that cannot be opened. {error} {remedy}") from error
    asked = _asked(corpus, tokenizer, validation_fraction, validation_corpus, limit_bytes)
    differ = [f"{key}={there.meta.get(key)}, asked for is {value}" for key, value in asked.items() if there.meta.get(key) != value]
    if differ:
        raise DataError(f"{out} holds something else that was prepared: {'; '.join(differ)}. {remedy}")
    return there


def _asked(
    corpus: str, tokenizer: str, validation_fraction: float, validation_corpus: str | None, limit_bytes: int | None
) -> dict[str, Any]:
    """What was asked for, as meta.json has it."""
    asked = {"corpus": corpus, "tokenizer": tokenizer, "limit_bytes": limit_bytes}
    return {**asked, "validation_fraction": validation_fraction, "validation_corpus": validation_corpus}


def open_prepared(folder: str | Path) -> Prepared:
    """Open what `prepare` wrote.

    Raises:
        DataError: the folder is not one, is not finished, or is damaged.
    """
    folder = Path(folder).expanduser()
    meta = _read_meta(folder)
    bpe = folder / "tokenizer.json"
    tokenizer: Tokenizer = load_tokenizer(str(bpe)) if bpe.exists() else ByteTokenizer()
    train, validation = (TokenFile.open(folder / name, tokenizer.digest).tokens for name in FILES)
    return Prepared(folder=folder, train=train, validation=validation, tokenizer=tokenizer, meta=meta)


def is_prepared(folder: str | Path) -> bool:
    """Whether this is a folder that `prepare` finished."""
    return (Path(folder).expanduser() / "meta.json").is_file()


def _survey(corpus: Corpus, spec: str, fraction: float | None, watch: Watch) -> tuple[Split, Tokenizer, int]:
    """The split, the tokenizer and the bytes of text, from one pass over the corpus. Without a fraction nothing is held out."""
    planner, total_bytes = None if fraction is None else Planner(fraction), 0
    size = bpe_size(spec)
    loaded = load_tokenizer(spec) if size is None else None  # before the pass: a wrong path should not take minutes to show

    def training() -> Iterator[Document]:
        nonlocal total_bytes
        for document in _watched(corpus, "read" if size is None else "read and train the tokenizer", 0, watch):
            total_bytes += len(document.text.encode())
            if planner is None or planner.add(document):
                yield document

    documents = training()
    tokenizer = loaded or train_bpe(documents, size or 0)
    for _ in documents:
        pass
    split = Split(0) if planner is None else planner.split()
    if size is not None and planner is not None and planner.overruled:  # few documents: learn again, from the right ones
        tokenizer = train_bpe((document for side, document in sided(corpus, split) if side == TRAIN), size)
    return split, tokenizer, total_bytes


def _write_tokens(folder: Path, documents: Iterable[tuple[int, Document]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write both token files in one pass; what meta.json says of them."""
    waiting: deque[int] = deque()

    def read() -> Iterator[Document]:
        for side, document in documents:
            waiting.append(side)
            yield document

    with ExitStack() as stack:
        writers: list[TokenWriter] = [
            stack.enter_context(token_writer(folder / name, vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest))
            for name in FILES
        ]
        # Documents are encoded some at a time and come back in order: `waiting` holds the sides of just those.
        for document, ids in encoded(read(), tokenizer):
            writers[waiting.popleft()].add(document.domain, ids)
    return {
        name: {"documents": len(writers[side].index.starts), "tokens": writers[side].index.num_tokens}
        for name, side in (("train", TRAIN), ("validation", VALIDATION))
    } | {"domains": list(writers[TRAIN].index.domains)}


def _install(staging: Path, out: Path) -> None:
    """Move the new files in, with no moment at which a finished meta.json stands beside files of two preparations."""
    (out / "meta.json").unlink(missing_ok=True)
    (out / "tokenizer.json").unlink(missing_ok=True)
    for name in (*FILES, "tokenizer.json", "meta.json"):
        if (staging / name).exists():
            os.replace(staging / name, out / name)


def _watched(documents: Iterable[Document], phase: str, total: int, watch: Watch) -> Iterator[Document]:
    done = told = 0
    for document in documents:
        yield document
        done += len(document.text.encode())
        if done - told >= _TELL_EVERY_BYTES:
            told = done
            watch(Progress(phase=phase, done=done, total=total, note=document.domain))
    watch(Progress(phase=phase, done=done, total=total or done))


def _write(path: Path, text: str) -> None:
    with replacing(path, DataError) as file:
        file.write(text.encode())


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}. Prepare one with `atoll data prepare`.")
    if not path.is_file():
        raise DataError(f"{folder} has no meta.json: it was not prepared, or not to the end. Run `atoll data prepare` again.")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = int(meta["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}). Run `atoll data prepare` again.") from error
    if version > META_VERSION:
        raise DataError(
            f"{path} has version {version}, newer than this atoll reads ({META_VERSION}). Upgrade atoll, or prepare it again."
        )
    return dict(meta)
