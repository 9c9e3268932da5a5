"""Opens a corpus by its spec.

    stdlib                                  the standard library of the running Python
    files:PATH[#field]                      a file, a glob or a folder: text or .jsonl, also .xz, .gz, .zst
    hf:NAME_OR_PATH[@conf][:split][#field]  a dataset of the Hugging Face hub, or one on disk

`stdlib` is about 10 MB of Python source in a few domains, so that shards by domain differ: asynchronous, web, encodings, windows,
packages, modules by first letter, and `topics`, the prose of `help()`. It leaves out site-packages, tests, bundled wheels and files
generated when this Python was built. Another version of Python is another text.

>>> corpus = open_corpus("stdlib", limit_bytes=20_000)
>>> sum(len(document.text.encode()) for document in corpus) <= 20_000
True
"""

from __future__ import annotations

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

from atoll.core.errors import DataError
from atoll.core.optional_imports import require
from atoll.data.documents import Corpus, Document
from atoll.data.text_files import files_corpus, text_field


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
        f"corpus={spec!r} is not known. Use stdlib, files:PATH[#field], hf:NAME_OR_PATH[@configuration][:split][#field], "
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


# --------------------------------------------------------------------------------------------------------- Hugging Face

_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class HubSpec:
    """The parts of an `hf:` spec.

    >>> HubSpec.parse("allenai/c4@en:validation#text")
    HubSpec(name='allenai/c4', configuration='en', split='validation', field='text')
    >>> HubSpec.parse("my/folder")
    HubSpec(name='my/folder', configuration=None, split='train', field='text')
    """

    name: str
    configuration: str | None
    split: str
    field: str

    @staticmethod
    def parse(given: str) -> HubSpec:
        match = re.fullmatch(
            r"(?P<name>[^@:#].*?)(@(?P<configuration>[^@:#/]+))?(:(?P<split>[^:#/\\]+))?(#(?P<field>[^#/]+))?", given
        )
        if match is None:
            raise DataError(f"hf:{given} names no dataset. The form is hf:NAME_OR_PATH[@CONFIGURATION][:SPLIT][#FIELD].")
        return HubSpec(
            name=match["name"],
            configuration=match["configuration"],
            split=match["split"] or "train",
            field=match["field"] or "text",
        )


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
        rows = iter(_load_dataset(datasets, spec, Path(spec.name).expanduser()))
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
