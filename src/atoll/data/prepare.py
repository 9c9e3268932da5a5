"""Prepares a corpus once: writes token files that runs memory-map.

    OUT/train.tokens  OUT/validation.tokens  OUT/tokenizer.json (unless it is bytes)  OUT/meta.json

The corpus is streamed twice: once to plan the split and to train the tokenizer on the training side, once to encode. Earlier
contents of the folder stay until all new files are written. `meta.json` comes last: a folder without it is not finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atoll.core.errors import DataError, one_line
from atoll.core.events import Progress
from atoll.core.verified_files import expanded, read_record, write_record, write_text
from atoll.data.document_sources import Corpus, Document, open_corpus
from atoll.data.holdout_split import TRAIN, VALIDATION, Split, SplitPlanner, split_documents
from atoll.data.token_store import Tokens, TokenWriter, encode_documents, open_token_file, token_writer
from atoll.data.tokenizer import BPETokenizer, Tokenizer, bpe_vocab_size, load_saved_tokenizer, load_tokenizer, train_bpe

META_VERSION = 1
FILES = ("train.tokens", "validation.tokens")
_REPORT_BYTES = 1 << 20

ReportProgress = Callable[[Progress], None]
"""Takes `done` and `total` in bytes of text; a total of 0 is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What to prepare: settings of `Text` of the same names and meanings. `meta.json` stores these fields."""

    corpus: str
    tokenizer: str
    limit_bytes: int | None = None
    validation_fraction: float = 0.05
    validation_corpus: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedText:
    """An opened folder of prepared text, with the contents of its meta.json."""

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


def prepare(preparation: Preparation, out: str | Path, progress: ReportProgress = lambda _: None) -> PreparedText:
    """Write token files to a folder, in place of what was prepared there before, and open them."""
    source, out = open_corpus(preparation.corpus, preparation.limit_bytes), Path(out)
    validation = None if preparation.validation_corpus is None else open_corpus(preparation.validation_corpus)
    fraction = preparation.validation_fraction if validation is None else None
    split, tokenizer, text_bytes = _plan(source, preparation.tokenizer, fraction, progress)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=out) as folder:
            staging = Path(folder)
            documents = _report(source, "encode", text_bytes, progress)
            sides = _write_tokens(staging, split_documents(documents, split, validation), tokenizer)
            if isinstance(tokenizer, BPETokenizer):
                write_text(staging / "tokenizer.json", tokenizer.text, DataError)
            found = {"vocab_size": tokenizer.vocab_size, "tokenizer_digest": tokenizer.digest, "text_bytes": text_bytes}
            meta = {"version": META_VERSION, **asdict(preparation), **found, **sides}
            write_record(staging / "meta.json", meta, DataError)
            # No meta.json is there while files of two preparations are.
            for name in ("meta.json", "tokenizer.json", *(f"{name}.verified" for name in FILES)):
                (out / name).unlink(missing_ok=True)
            for name in (*FILES, "tokenizer.json", "meta.json"):
                if (staging / name).exists():
                    os.replace(staging / name, out / name)
    except OSError as error:
        raise DataError(
            f"could not write to {out}: {error.strerror or error}. Make room there, or choose another folder."
        ) from error
    return open_prepared(out)


def find_prepared(preparation: Preparation, out: str | Path) -> PreparedText | None:
    """What an earlier call of `prepare` with equal arguments wrote; None if nothing was prepared there.

    Raises DataError if the folder holds another preparation. It does not check whether the text of the corpus has changed since.
    """
    if not is_prepared(out):
        return None
    remedy = "Use another folder, or remove this one first."
    try:
        found = open_prepared(out)
    except DataError as error:
        raise DataError(f"{out} holds something prepared that cannot be opened. {error} {remedy}") from error
    meta, wanted = found.meta, asdict(preparation)
    differ = [f"{key}={meta.get(key)}, asked for is {value}" for key, value in wanted.items() if meta.get(key) != value]
    if differ:
        raise DataError(f"{out} holds something else that was prepared: {'; '.join(differ)}. {remedy}")
    return found


def open_prepared(folder: str | Path, log: Callable[[str], object] = lambda line: None) -> PreparedText:
    """Open what `prepare` wrote, and verify it; see `open_token_file`. Raises DataError if the folder is missing, unfinished or
    damaged."""
    folder = expanded(folder)
    meta = _read_meta(folder)
    tokenizer = load_saved_tokenizer(folder / "tokenizer.json")
    train, validation = (open_token_file(folder / name, tokenizer.digest, log) for name in FILES)
    return PreparedText(folder=folder, train=train, validation=validation, tokenizer=tokenizer, meta=meta)


def is_prepared(folder: str | Path) -> bool:
    """Whether `prepare` finished in this folder."""
    try:
        return (expanded(folder) / "meta.json").is_file()
    except OSError:  # a folder that cannot be read, which is refused when it is opened
        return False


def _plan(corpus: Corpus, spec: str, fraction: float | None, progress: ReportProgress) -> tuple[Split, Tokenizer, int]:
    """The split, the tokenizer and the bytes of text, from one pass over the corpus. Without a fraction nothing is held out."""
    planner, text_bytes = None if fraction is None else SplitPlanner(fraction), 0
    size = bpe_vocab_size(spec)
    loaded = load_tokenizer(spec) if size is None else None  # before the pass, so that a wrong path fails at once

    def training_documents() -> Iterator[Document]:
        nonlocal text_bytes
        for document in _report(corpus, "read" if size is None else "read and train the tokenizer", 0, progress):
            text_bytes += len(document.text.encode())
            if planner is None or planner.add(document):
                yield document

    documents = training_documents()
    tokenizer = loaded or train_bpe(documents, size or 0)
    for _ in documents:
        pass
    split = Split(0) if planner is None else planner.split()
    if size is not None and planner is not None and planner.revised:  # few documents: train again, on the final training side
        tokenizer = train_bpe((document for side, document in split_documents(corpus, split) if side == TRAIN), size)
    return split, tokenizer, text_bytes


def _write_tokens(folder: Path, documents: Iterable[tuple[int, Document]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write both token files in one pass. Returns their part of meta.json."""
    # Documents are encoded in groups, so `tee` holds one group.
    documents, encoded = tee(documents)
    with ExitStack() as stack:
        writers: list[TokenWriter] = [
            stack.enter_context(token_writer(folder / name, vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest))
            for name in FILES
        ]
        for (side, document), ids in zip(documents, encode_documents((part for _, part in encoded), tokenizer), strict=True):
            writers[side].add(document.domain, ids)
    return {
        name: {"documents": len(writers[side].index.starts), "tokens": writers[side].index.num_tokens}
        for name, side in (("train", TRAIN), ("validation", VALIDATION))
    } | {"domains": list(writers[TRAIN].index.domains)}


def _report(documents: Iterable[Document], phase: str, total: int, progress: ReportProgress) -> Iterator[Document]:
    """Pass documents on and report progress after each MiB of text."""
    done = reported = 0
    for document in documents:
        yield document
        done += len(document.text.encode())
        if done - reported >= _REPORT_BYTES:
            reported = done
            progress(Progress(phase=phase, done=done, total=total, note=document.domain))
    progress(Progress(phase=phase, done=done, total=total or done))


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}. Prepare one with `atoll data prepare`.")
    if not path.is_file():
        raise DataError(f"{folder} has no meta.json: it was not prepared, or not to the end. Run `atoll data prepare` again.")
    try:
        meta = read_record(path)
        version = int(meta["version"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}). Run `atoll data prepare` again.") from error
    if version > META_VERSION:
        raise DataError(
            f"{path} has version {version}, newer than this atoll reads ({META_VERSION}). Upgrade atoll, or prepare it again."
        )
    return dict(meta)
