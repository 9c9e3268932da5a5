"""Corpora: streams of documents by domain, opened by a spec.

    stdlib                                  the standard library of the running Python
    files:PATH[#field]                      a file, a glob or a folder: text or .jsonl, also .xz, .gz, .zst
    hf:NAME_OR_PATH[@conf][:split][#field]  a dataset of the Hugging Face hub, or one on disk

`stdlib` is about 10 MB of Python source in a few domains, so that shards by domain differ: asynchronous, web, encodings, windows,
packages, modules by first letter, and `topics`, the prose of `help()`. It leaves out site-packages, tests, bundled wheels and files
generated when this Python was built. Another version of Python is another text.

A folder of `files:` is read recursively without hidden files; its sub-folders are the domains. A glob is read in the same way, from
its last folder without a wildcard on. A text file is one document, or several that each end with a line `<|endoftext|>`.
"""

from __future__ import annotations

import glob
import heapq
import importlib
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.config.type_checks import shown
from atoll.core.errors import ConfigError, DataError
from atoll.core.optional_imports import require
from atoll.core.verified_files import expanded
from atoll.data.compressed_text_files import decode_utf8, find_files, open_file, read_json_lines, text_field, uncompressed_suffix

END_OF_TEXT = "<|endoftext|>"
"""Ends a document where it stands alone on a line of a text file. Tokenizers have an id for it, which separates documents."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its domain, and a name that is unique in its corpus."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by domain. Each iteration reads them again in the same order, without the blank ones."""

    spec: str  # for error messages
    domains: Mapping[str, Callable[[], Iterator[Document]]]  # a reader for each
    limit_bytes: int | None = None  # UTF-8 bytes of text to yield at most; None: all

    def __post_init__(self) -> None:
        check_limit_bytes(self.limit_bytes)

    def __iter__(self) -> Iterator[Document]:
        empty = True
        for document in self._documents():
            yield document
            empty = False
        if empty:
            raise DataError(f"{self.spec} holds no text: all of its documents are empty. Check that the spec names the right text.")

    def _documents(self) -> Iterator[Document]:
        allotted = None if self.limit_bytes is None else self._allotted_bytes(self.limit_bytes)
        for number, read in enumerate(self.domains.values()):
            documents = _with_text(read())
            if allotted is not None:
                documents = (_truncate(d, size)[0] for d, size in zip(documents, allotted[number], strict=False) if size)
            yield from documents

    def _allotted_bytes(self, limit_bytes: int) -> list[list[int]]:
        """For each domain, how many bytes of each document to yield."""
        # A document longer than a domain's share is truncated to it. Else the first long document would use up the limit.
        share, left = max(1, limit_bytes // len(self.domains)), limit_bytes
        readers = [_with_text(read()) for read in self.domains.values()]
        sizes: list[list[int]] = [[] for _ in readers]
        full_sizes: list[list[int]] = [[] for _ in readers]
        heap = [(0, domain) for domain in range(len(readers))]  # (bytes so far, domain)
        while heap and left > 0:
            so_far, domain = heap[0]
            document = next(readers[domain], None)
            if document is None:
                heapq.heappop(heap)
                continue
            size = _truncate(document, min(share, left))[1]
            sizes[domain].append(size)
            full_sizes[domain].append(len(document.text.encode()))
            left -= size
            heapq.heapreplace(heap, (so_far + max(1, size), domain))
        # If the whole text is within the limit, nothing is truncated.
        return full_sizes if not heap and sum(map(sum, full_sizes)) <= limit_bytes else sizes


def check_limit_bytes(limit_bytes: int | None) -> None:
    if limit_bytes is not None and limit_bytes < 1:
        raise ConfigError(f"limit_bytes={limit_bytes} leaves no text. Use a positive number of bytes, or none for all of it.")


def _with_text(documents: Iterator[Document]) -> Iterator[Document]:
    return (document for document in documents if document.text and not document.text.isspace())


def _truncate(document: Document, limit_bytes: int) -> tuple[Document, int]:
    """The document's first bytes, up to the end of the last whole character, and their number."""
    data = document.text.encode()
    if len(data) <= limit_bytes:
        return document, len(data)
    text = data[:limit_bytes].decode(errors="ignore")
    return replace(document, text=text), len(text.encode())


def open_corpus(spec: str, limit_bytes: int | None = None) -> Corpus:
    """The corpus of a spec. Raises DataError if the spec is unknown or names nothing."""
    check_corpus_spec(spec)
    scheme, _, rest = spec.partition(":")
    corpus = stdlib_corpus() if scheme == "stdlib" else _SCHEMES[scheme](rest)
    return replace(corpus, limit_bytes=limit_bytes)


def check_corpus_spec(spec: str) -> None:
    """Refuse a spec of an unknown form, without looking at any file."""
    scheme, _, rest = spec.partition(":")
    if spec == "stdlib" or (scheme in _SCHEMES and rest):
        return
    raise DataError(
        f"corpus={shown(spec)} is not known. Use stdlib, files:PATH[#field], hf:NAME_OR_PATH[@configuration][:split][#field], "
        f"or prepared:FOLDER for what `atoll data prepare` wrote."
    )


# ------------------------------------------------------------------------------------------------------ standard library

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "__pycache__"}
_GENERATED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
_PACKAGES_BY_DOMAIN = {
    "asynchronous": {"asyncio", "concurrent", "multiprocessing"},
    "web": {"email", "html", "http", "json", "urllib", "wsgiref", "xml", "xmlrpc"},
    "encodings": {"encodings"},
    "windows": {"curses", "tkinter", "turtledemo"},
}


def stdlib_corpus() -> Corpus:
    """The standard library's sources in the order of their paths, and the help topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[Path]] = defaultdict(list)
    for path in _stdlib_sources(root):
        files[stdlib_domain(path.relative_to(root))].append(path)
    if not files:
        raise DataError(
            f"stdlib: there are no .py files under {root}; this Python keeps its library elsewhere or compiled. "
            f"Give text of your own: files:PATH."
        )
    domains: dict[str, Callable[[], Iterator[Document]]] = {
        name: partial(_read_sources, root, name, files[name]) for name in sorted(files)
    }
    topics = _help_topics()
    if topics:
        domains["topics"] = lambda: iter(topics)
    return Corpus(spec="stdlib", domains=domains)


def stdlib_domain(path: Path) -> str:
    """The domain of a file, given its path inside the library.

    >>> stdlib_domain(Path("asyncio/tasks.py")), stdlib_domain(Path("abc.py")), stdlib_domain(Path("tomllib/_re.py"))
    ('asynchronous', 'modules a-f', 'packages')
    """
    first = path.parts[0]
    if len(path.parts) == 1:
        letter = first[0].lower()
        return "modules a-f" if "a" <= letter <= "f" else "modules g-p" if "g" <= letter <= "p" else "modules q-z and _"
    return next((domain for domain, packages in _PACKAGES_BY_DOMAIN.items() if first in packages), "packages")


def _stdlib_sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith(_GENERATED_PREFIXES))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(_GENERATED_PREFIXES):
                yield Path(folder, name)


def _read_sources(root: Path, domain: str, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        # Python's own sources are UTF-8. Invalid bytes in a vendor's patch become replacement characters.
        yield Document(path.relative_to(root).as_posix(), domain, path.read_bytes().decode(errors="replace"))


def _help_topics() -> list[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave the help texts out
        return []
    return [Document(f"topics/{name}", "topics", topics[name]) for name in sorted(topics)]


# ------------------------------------------------------------------------------------------------------------- text files


def files_corpus(given: str) -> Corpus:
    """The corpus of `PATH` or `PATH#field`, where PATH is a file, a glob or a folder."""
    # A '#' may also be part of a file's name.
    path, _, field = (given, "", "") if Path(given).exists() else given.partition("#")
    spec = f"files:{given}"
    if not path:
        raise DataError(f"{spec} names no file. Give a file, a glob or a folder: files:PATH.")
    root, paths = find_files(path)
    target = expanded(path)
    if not paths and not glob.has_magic(path) and not target.exists():
        raise DataError(f"{spec}: there is no file or folder {target}. Check the path; it is relative to {Path.cwd()}.")
    if not paths:
        raise DataError(f"{spec}: nothing was found there. Give a file, a folder with files in it, or a glob that matches some.")
    by_domain: dict[str, list[Path]] = defaultdict(list)
    for found in paths:
        inside = found.relative_to(root)
        by_domain[inside.parts[0] if len(inside.parts) > 1 else root.resolve().name].append(found)
    read = partial(_read_documents, root, field or "text")
    return Corpus(spec=spec, domains={name: partial(read, name, by_domain[name]) for name in sorted(by_domain)})


def _read_documents(root: Path, field: str, domain: str, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        if uncompressed_suffix(path) == ".jsonl":
            yield from _read_jsonl(path, name, domain, field)
        else:
            yield from _read_text(path, name, domain)


def _read_jsonl(path: Path, name: str, domain: str, field: str) -> Iterator[Document]:
    for number, record in read_json_lines(path):
        where = f"{path}:{number}"
        if not isinstance(record, dict):
            raise DataError(f"{where} is a JSON {type(record).__name__}, not an object. Each line needs a field with the text.")
        yield Document(f"{name}#{number}", domain, text_field(record, field, where, "Name the field with the text: PATH#field."))


def _read_text(path: Path, name: str, domain: str) -> Iterator[Document]:
    """The documents of a text file. The first has the name of the file, the others have a number besides."""
    end, lines, number, at = END_OF_TEXT.encode(), list[bytes](), 0, 0

    def document() -> Document:
        text = decode_utf8(path, b"".join(lines), at)
        text = text.removeprefix("\ufeff") if at == 0 else text  # a byte-order mark is no text
        return Document(f"{name}#{number}" if number else name, domain, text)

    with open_file(path) as file:
        for line in file:
            if line.startswith(end) and line.strip() == end:
                yield document()
                at += sum(map(len, lines)) + len(line)
                lines, number = [], number + 1
            else:
                lines.append(line)
        yield document()


# --------------------------------------------------------------------------------------------------------- Hugging Face

_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class HubSpec:
    """The parts of an `hf:` spec."""

    name: str
    configuration: str | None = None
    split: str = "train"
    field: str = "text"

    @staticmethod
    def parse(given: str) -> HubSpec:
        match = re.fullmatch(
            r"(?P<name>[^@:#].*?)(@(?P<configuration>[^@:#/]+))?(:(?P<split>[^:#/\\]+))?(#(?P<field>[^#/]+))?", given
        )
        if match is None:
            raise DataError(f"hf:{given} names no dataset. The form is hf:NAME_OR_PATH[@CONFIGURATION][:SPLIT][#FIELD].")
        return HubSpec(**{part: value for part, value in match.groupdict().items() if value is not None})


def hub_corpus(given: str) -> Corpus:
    """The corpus of an `hf:` spec: one domain with the name of the dataset.

    A path may be a folder written by `save_to_disk`, a folder of data files, or one data file (json, jsonl, parquet, csv, txt). For
    a path the network is not used.
    """
    spec = HubSpec.parse(given)
    datasets = require("datasets", extra="hf", purpose="hf: corpora")
    domain = Path(spec.name).name
    return Corpus(spec=f"hf:{given}", domains={domain: partial(_read_rows, datasets, spec, domain)})


def _read_rows(datasets: Any, spec: HubSpec, domain: str) -> Iterator[Document]:
    try:
        rows = iter(_load_dataset(datasets, spec, expanded(spec.name)))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"hf:{spec.name} could not be opened ({type(error).__name__}: {error}). "
            f"Check the name, the split (:{spec.split}), the configuration (@{spec.configuration}), and that it can be reached."
        ) from error
    number = 0
    while True:
        # The library downloads and parses as it goes, and raises errors of many kinds.
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"hf:{spec.name}: row {number} of {spec.split} could not be read ({error}).") from error
        if row is None:
            return
        text = text_field(row, spec.field, f"hf:{spec.name}, row {number}", "Name the field with the text: #FIELD.")
        yield Document(f"{spec.split}#{number}", domain, text)
        number += 1


def _load_dataset(datasets: Any, spec: HubSpec, path: Path) -> Iterable[Mapping[str, Any]]:
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, Mapping):
            return saved  # type: ignore[no-any-return]  # a single split was saved: there is no other
        if spec.split not in saved:
            raise DataError(
                f"hf:{spec.name} has no split {spec.split!r}; it has {', '.join(saved)}. Name one: hf:{spec.name}:SPLIT."
            )
        return saved[spec.split]  # type: ignore[no-any-return]
    if path.is_file():
        loader = _LOADERS.get(path.suffix)
        if loader is None:
            raise DataError(
                f"hf:{spec.name} is a {path.suffix or 'nameless'} file; {', '.join(_LOADERS)} can be read. Or use files:PATH."
            )
        return datasets.load_dataset(loader, data_files=str(path), split="train", streaming=True)  # type: ignore[no-any-return]
    name = str(path) if path.is_dir() else spec.name
    return datasets.load_dataset(name, spec.configuration, split=spec.split, streaming=True)  # type: ignore[no-any-return]


_SCHEMES: dict[str, Callable[[str], Corpus]] = {"files": files_corpus, "hf": hub_corpus}
