"""Token ids of many documents, in memory or memory-mapped from a token file.

Each document ends with the tokenizer's end-of-text id, if the tokenizer has one. A token file is written as a stream:

    header      112 bytes: the fields of `TokenFileHeader`, then a checksum of them
    tokens      uint16 or uint32, all documents one after the other
    index       the start of each document (int64), the domain of each (int32), then the names of the domains (JSON)

All numbers are little-endian. Opening a file checks the header, the index and the tokens against their checksums, and that every id
is in the vocabulary. The tokens are read once: FILE.verified beside the file remembers its size, inode and time of change. While
these are the same, the tokens are not read again.
"""

from __future__ import annotations

import json
import math
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.core.errors import DataError
from atoll.core.verified_files import read_record, replacing, write_record
from atoll.data.document_sources import Document
from atoll.data.tokenizer import Ids, Tokenizer, dtype_for

_ENCODE_BYTES = 1 << 20
"""Text that is encoded in one call of the tokenizer."""
_VERIFY_TOKENS = 1 << 22
_LOG_EVERY_S = 3.0
_UPLOAD_LOCK = Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The ids of all documents one after the other."""

    ids: Ids  # uint16 or uint32
    starts: NDArray[np.int64]  # of each document
    domain_ids: NDArray[np.int32]  # for each document, an index into `domains`
    domains: tuple[str, ...]
    _uploads: dict[str, torch.Tensor | None] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def domains_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """For each token position, the index of its document's domain."""
        return self.domain_ids[np.searchsorted(self.starts, positions, side="right") - 1]

    def on_device(self, device: str) -> torch.Tensor | None:
        """The ids on a device, as int32, uploaded once for all readers; None if they would take too much of its memory."""
        with _UPLOAD_LOCK:
            if device not in self._uploads:
                fit = 4 * len(self) <= _upload_limit(torch.device(device))
                self._uploads[device] = torch.from_numpy(self.ids.astype(np.int32)).to(device) if fit else None
            return self._uploads[device]


def _upload_limit(device: torch.device) -> float:
    """Bytes of tokens that a device may hold: one 8th of its free memory."""
    if device.type != "cuda":
        return math.inf
    cached_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + cached_by_torch) // 8


class DocumentIndex:
    """The start and the domain of each document, appended to as documents are encoded."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.starts, self.domain_ids = array("q"), array("i")
        self.domains: dict[str, int] = {}

    def add(self, domain: str, num_tokens: int) -> None:
        self.starts.append(self.num_tokens)
        self.domain_ids.append(self.domains.setdefault(domain, len(self.domains)))
        self.num_tokens += num_tokens


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Ids]:
    """The ids of each document, with the end-of-text id. Documents are encoded about 1 MiB of text at a time."""
    batch, size = list[str](), 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= _ENCODE_BYTES:
            yield from _encode_batch(batch, tokenizer)
            batch, size = [], 0
    yield from _encode_batch(batch, tokenizer)


def _encode_batch(texts: list[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    end, dtype = tokenizer.end_of_text, dtype_for(tokenizer.vocab_size)
    for ids in tokenizer.encode_batch(texts):
        yield ids.astype(dtype) if end is None else np.append(ids, end).astype(dtype)


def encode_in_memory(documents: Sequence[Document], tokenizer: Tokenizer) -> Tokens:
    index, parts = DocumentIndex(), []
    for document, ids in zip(documents, encode_documents(documents, tokenizer), strict=True):
        index.add(document.domain, len(ids))
        parts.append(ids)
    if not parts:
        raise DataError("there are no documents to make tokens of. Give more text, or hold out less of it.")
    return Tokens(
        ids=np.concatenate(parts),
        starts=np.array(index.starts, dtype=np.int64),
        domain_ids=np.array(index.domain_ids, dtype=np.int32),
        domains=tuple(index.domains),
    )


# ----------------------------------------------------------------------------------------------------------- token files

MAGIC = b"atolltok"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQ16s16s16s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_REMEDY = "Copy it again from its source, or prepare it again."


class TokenFileHeader(NamedTuple):
    """The fields of a file's header, in their order."""

    magic: bytes
    version: int
    item_bytes: int
    num_tokens: int
    num_documents: int
    vocab_size: int
    names_bytes: int
    tokenizer_digest: bytes
    tokens_checksum: bytes
    index_checksum: bytes

    @property
    def index_bytes(self) -> int:
        return 12 * self.num_documents + self.names_bytes

    @property
    def tokens_bytes(self) -> int:
        return self.item_bytes * self.num_tokens

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.tokens_bytes + self.index_bytes


class TokenWriter:
    """Writes documents one by one and holds only their index. Made by `token_writer`."""

    def __init__(self, file: IO[bytes], vocab_size: int, tokenizer_digest: str) -> None:
        self._file, self._vocab_size, self._digest = file, vocab_size, bytes.fromhex(tokenizer_digest)
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._checksum = blake2b(digest_size=_CHECKSUM_BYTES)
        self.index = DocumentIndex()
        file.write(bytes(HEADER_BYTES))

    def add(self, domain: str, ids: Ids) -> None:
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise DataError(
                f"id {int(ids.max())} is outside the vocabulary of {self._vocab_size}. Give the tokenizer's own vocab_size."
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._checksum.update(data)
        self.index.add(domain, len(ids))

    def finish(self) -> None:
        """Write the index at the end of the file, then the header at its front."""
        index = self.index
        if not index.num_tokens:
            raise DataError("there are no tokens to write. Give more text, or hold out less of it.")
        names = json.dumps(list(index.domains)).encode()
        data = np.array(index.starts, dtype="<i8").tobytes() + np.array(index.domain_ids, dtype="<i4").tobytes() + names
        self._file.write(data)
        header = _HEADER.pack(
            *TokenFileHeader(
                magic=MAGIC,
                version=VERSION,
                item_bytes=self._dtype.itemsize,
                num_tokens=index.num_tokens,
                num_documents=len(index.starts),
                vocab_size=self._vocab_size,
                names_bytes=len(names),
                tokenizer_digest=self._digest,
                tokens_checksum=self._checksum.digest(),
                index_checksum=_checksum(data),
            )
        )
        self._file.seek(0)
        self._file.write(header + _checksum(header))


@contextmanager
def token_writer(path: str | Path, *, vocab_size: int, tokenizer_digest: str) -> Iterator[TokenWriter]:
    """A writer for a new token file. The file replaces `path` when the block ends without an error, and not before."""
    with replacing(Path(path), DataError) as file:
        writer = TokenWriter(file, vocab_size, tokenizer_digest)
        yield writer
        writer.finish()


def open_token_file(
    path: str | Path, tokenizer_digest: str | None = None, log: Callable[[str], object] = lambda line: None
) -> Tokens:
    """Memory-map a token file. `log` takes a line every few seconds while the tokens are verified.

    Raises DataError if it is missing, damaged, newer than this atoll, or not written by the tokenizer with the given digest.
    """
    path = Path(path)
    header, index = _read_header_and_index(path)
    if tokenizer_digest is not None and header.tokenizer_digest.hex() != tokenizer_digest:
        raise DataError(
            f"{path} was written with another tokenizer (digest {header.tokenizer_digest.hex()}, given {tokenizer_digest}). "
            f"Use the tokenizer it was prepared with, or prepare it again."
        )
    count = header.num_documents
    mapped = np.memmap(path, dtype=f"<u{header.item_bytes}", mode="r", offset=HEADER_BYTES, shape=(header.num_tokens,))
    _verify_once(path, header, mapped, log)
    return Tokens(
        ids=np.asarray(mapped),  # a plain view of the map: slicing a memmap itself is several times slower
        starts=np.frombuffer(index, dtype="<i8", count=count),
        domain_ids=np.frombuffer(index, dtype="<i4", count=count, offset=8 * count),
        domains=tuple(json.loads(index[12 * count :])),
    )


def _verify_once(path: Path, header: TokenFileHeader, tokens: Ids, log: Callable[[str], object]) -> None:
    """Verify the tokens, unless the file is the one that an earlier call has verified."""
    found = path.stat()
    identity = {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "changed_ns": [found.st_mtime_ns, found.st_ctime_ns],
        "checksum": header.tokens_checksum.hex(),
    }
    remembered = path.with_name(f"{path.name}.verified")
    with suppress(OSError, ValueError):
        if read_record(remembered) == identity:
            return
    _verify_tokens(path, header, tokens, log)
    with suppress(DataError):  # a folder that cannot be written: the next process verifies the file again
        write_record(remembered, identity, DataError)


def _verify_tokens(path: Path, header: TokenFileHeader, tokens: Ids, log: Callable[[str], object]) -> None:
    state, logged_s = blake2b(digest_size=_CHECKSUM_BYTES), time.monotonic()
    for start in range(0, len(tokens), _VERIFY_TOKENS):
        part = tokens[start : start + _VERIFY_TOKENS]
        state.update(part.data)
        largest = int(part.max())
        if largest >= header.vocab_size:
            raise DataError(f"{path} has the id {largest}, outside of its vocabulary of {header.vocab_size}. {_REMEDY}")
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            log(f"verifying {path}: {start / len(tokens):.0%} of {header.tokens_bytes / 1e9:.1f} GB")
    if state.digest() != header.tokens_checksum:
        raise DataError(f"{path} is damaged: its tokens do not match their checksum. {_REMEDY}")


def _read_header_and_index(path: Path) -> tuple[TokenFileHeader, bytes]:
    try:
        with open(path, "rb") as file:
            header = _checked_header(path, file.read(HEADER_BYTES), path.stat().st_size)
            file.seek(HEADER_BYTES + header.tokens_bytes)
            index = file.read(header.index_bytes)
    except OSError as error:
        raise DataError(f"could not read {path}: {error.strerror or error}. Write it with `atoll data prepare`.") from error
    if _checksum(index) != header.index_checksum:
        raise DataError(f"{path} is damaged: its index does not match its checksum. {_REMEDY}")
    if not header.num_tokens or header.item_bytes != np.dtype(dtype_for(header.vocab_size)).itemsize:
        raise DataError(f"{path} is damaged: its header names no tokens, or another width than its vocabulary needs. {_REMEDY}")
    return header, index


def _checked_header(path: Path, data: bytes, file_bytes: int) -> TokenFileHeader:
    if data[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a token file of atoll: it does not begin with {MAGIC!r}. Write one with `atoll data prepare`."
        )
    if len(data) < HEADER_BYTES:
        raise DataError(f"{path} is cut short: it has {file_bytes} bytes, fewer than a header's {HEADER_BYTES}. {_REMEDY}")
    header = TokenFileHeader._make(_HEADER.unpack(data[: _HEADER.size]))
    if header.version > VERSION:
        raise DataError(
            f"{path} has format version {header.version}, and this atoll reads up to {VERSION}: it is newer, or damaged. "
            f"Upgrade atoll, or prepare the data again."
        )
    if _checksum(data[: _HEADER.size]) != data[_HEADER.size :]:
        raise DataError(f"{path} is damaged: its header does not match its checksum. {_REMEDY}")
    if file_bytes != header.file_bytes:
        raise DataError(
            f"{path} has {file_bytes} bytes, and its header says {header.file_bytes}: it was cut short or added to. {_REMEDY}"
        )
    return header


def _checksum(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
