"""Token files: written once as a stream, then mapped into memory.

    header      112 bytes: the fields of `_HEADER` below, the last of which is a checksum of the others
    tokens      uint16 or uint32, all documents one after the other
    index       for each document where it begins (int64), then for each its domain (int32), then the domains' names (JSON)

All numbers are little-endian. The header also holds checksums of the tokens and of the index. Opening checks everything but the
tokens, which would have to be read; `verify` reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from atoll.core.atomic_files import replacing
from atoll.core.errors import DataError
from atoll.data.tokenizer import Ids, dtype_for
from atoll.data.tokens import DocumentIndex, Tokens

MAGIC = b"atolltok"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQ16s16s16s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class Header(NamedTuple):
    """What a file says of itself, in the order of the format."""

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


# -------------------------------------------------------------------------------------------------------------- writing


class TokenWriter:
    """Takes documents one by one; holds none of them. Made by `token_writer`."""

    def __init__(self, file: IO[bytes], vocab_size: int, tokenizer_digest: str) -> None:
        self._file, self._vocab_size, self._digest = file, vocab_size, bytes.fromhex(tokenizer_digest)
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._checksum = blake2b(digest_size=_CHECKSUM_BYTES)
        self.index = DocumentIndex()
        file.write(bytes(HEADER_BYTES))

    def add(self, domain: str, ids: Ids) -> None:
        """Write a document's tokens."""
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise DataError(
                f"id {int(ids.max())} is outside the vocabulary of {self._vocab_size}. Give the tokenizer's own vocab_size."
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._checksum.update(data)
        self.index.add(domain, len(ids))

    def finish(self) -> None:
        """Write the index, and then the header in its place at the front."""
        index = self.index
        if not index.num_tokens:
            raise DataError("there are no tokens to write. Give more text, or hold out less of it.")
        names = json.dumps(index.domains).encode()
        data = index.starts.astype("<i8").tobytes() + index.domain_ids.astype("<i4").tobytes() + names
        self._file.write(data)
        header = _HEADER.pack(
            *Header(
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
    """A writer for a new token file, which appears under its name when the block ends without an error."""
    with replacing(Path(path), DataError) as file:
        writer = TokenWriter(file, vocab_size, tokenizer_digest)
        yield writer
        writer.finish()


def write_tokens(path: str | Path, documents: Iterable[tuple[str, Ids]], *, vocab_size: int, tokenizer_digest: str) -> None:
    """Write documents, each as its domain and its tokens, read as a stream.

    Raises:
        DataError: there are no tokens, or the file could not be written. Whatever was there before is untouched.
    """
    with token_writer(path, vocab_size=vocab_size, tokenizer_digest=tokenizer_digest) as writer:
        for domain, ids in documents:
            writer.add(domain, ids)


# -------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """A token file, mapped into memory: opening it reads its header and index, and its tokens as they are used."""

    path: Path
    header: Header
    tokens: Tokens

    @staticmethod
    def open(path: str | Path, tokenizer_digest: str | None = None) -> TokenFile:
        """Map a token file.

        Args:
            path: of the file.
            tokenizer_digest: refuse tokens of any other tokenizer; None: accept them all.

        Raises:
            DataError: there is no such file, it is not a token file, it is damaged or newer than this atoll, or its tokenizer
                is another one.
        """
        path = Path(path)
        try:
            with open(path, "rb") as file:
                header = _read_header(path, file.read(HEADER_BYTES), path.stat().st_size)
                file.seek(HEADER_BYTES + header.tokens_bytes)
                index = file.read(header.index_bytes)
        except OSError as error:
            raise DataError(f"could not read {path}: {error.strerror or error}. Write it with `atoll data prepare`.") from error
        if _checksum(index) != header.index_checksum:
            raise DataError(f"{path} is damaged: its index does not match its checksum. {_AGAIN}")
        if tokenizer_digest is not None and header.tokenizer_digest.hex() != tokenizer_digest:
            raise DataError(
                f"{path} was written with another tokenizer (digest {header.tokenizer_digest.hex()}, given {tokenizer_digest}). "
                f"Use the tokenizer it was prepared with, or prepare it again."
            )
        return TokenFile(path=path, header=header, tokens=_map(path, header, index))

    def verify(self) -> None:
        """Read all tokens and compare them with their checksum; DataError if they were damaged."""
        state = blake2b(digest_size=_CHECKSUM_BYTES)
        step = 1 << 22
        for start in range(0, len(self.tokens), step):
            state.update(np.ascontiguousarray(self.tokens.ids[start : start + step]).view(np.uint8).data)
        if state.digest() != self.header.tokens_checksum:
            raise DataError(f"{self.path} is damaged: its tokens do not match their checksum. {_AGAIN}")


_AGAIN = "Copy it again from its source, or prepare it again."


def _read_header(path: Path, data: bytes, file_bytes: int) -> Header:
    if data[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a token file of atoll: it does not begin with {MAGIC!r}. Write one with `atoll data prepare`."
        )
    if len(data) < HEADER_BYTES:
        raise DataError(f"{path} is cut short: it has {file_bytes} bytes, fewer than a header's {HEADER_BYTES}. {_AGAIN}")
    header = Header._make(_HEADER.unpack(data[: _HEADER.size]))
    whole = _checksum(data[: _HEADER.size]) == data[_HEADER.size :]
    if header.version > VERSION:
        raise DataError(
            f"{path} has format version {header.version}, and this atoll reads up to {VERSION}: it is newer, or damaged. "
            f"Upgrade atoll, or prepare the data again."
        )
    if not whole:
        raise DataError(f"{path} is damaged: its header does not match its checksum. {_AGAIN}")
    if file_bytes != header.file_bytes:
        raise DataError(
            f"{path} has {file_bytes} bytes, and its header says {header.file_bytes}: it was cut short or added to. {_AGAIN}"
        )
    return header


def _map(path: Path, header: Header, index: bytes) -> Tokens:
    count = header.num_documents
    mapped = np.memmap(path, dtype=f"<u{header.item_bytes}", mode="r", offset=HEADER_BYTES, shape=(header.num_tokens,))
    return Tokens(
        ids=np.asarray(mapped),  # a plain view of the map: slicing a memmap itself is several times slower
        starts=np.frombuffer(index, dtype="<i8", count=count),
        domain_ids=np.frombuffer(index, dtype="<i4", count=count, offset=8 * count),
        domains=tuple(json.loads(index[12 * count :])),
        vocab_size=header.vocab_size,
        tokenizer_digest=header.tokenizer_digest.hex(),
    )


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
