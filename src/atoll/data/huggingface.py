"""Datasets of the Hugging Face hub, or of its library on disk, read as a stream.

    hf:NAME_OR_PATH[@CONFIGURATION][:SPLIT][#FIELD]        hf:allenai/c4@en:train#text

A path may be a folder written by `save_to_disk`, a folder of data files, or one data file (json, jsonl, parquet, csv, txt).
Nothing is asked of the network for a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.errors import DataError
from atoll.core.optional_imports import require
from atoll.data.documents import Corpus, Document

_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class HubSpec:
    """What an `hf:` spec says.

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
    """The corpus of an `hf:` spec: one domain, called like the dataset."""
    spec = HubSpec.parse(given)
    datasets = require("datasets", extra="hf", purpose="hf: corpora")
    domain = Path(spec.name).name
    return Corpus(spec=f"hf:{given}", domains={domain: partial(_read, datasets, spec, domain)})


def _read(datasets: Any, spec: HubSpec, domain: str) -> Iterator[Document]:
    rows = _rows(datasets, spec)
    number = 0
    while True:
        # The library downloads and parses as it goes, and its errors are of many kinds.
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"hf:{spec.name}: row {number} of {spec.split} could not be read ({error}).") from error
        if row is None:
            return
        yield Document(f"{spec.split}#{number}", domain, _text(row, spec, number))
        number += 1


def _rows(datasets: Any, spec: HubSpec) -> Iterator[Mapping[str, Any]]:
    try:
        return iter(_load(datasets, spec, Path(spec.name).expanduser()))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"hf:{spec.name} could not be opened ({type(error).__name__}: {error}). "
            f"Check the name, the split (:{spec.split}), the configuration (@{spec.configuration}), and that it can be reached."
        ) from error


def _load(datasets: Any, spec: HubSpec, path: Path) -> Iterable[Mapping[str, Any]]:
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


def _text(row: Mapping[str, Any], spec: HubSpec, number: int) -> str:
    if spec.field not in row:
        raise DataError(
            f"hf:{spec.name}: row {number} has no field {spec.field!r}; it has {', '.join(row)}. Name the right one: #FIELD."
        )
    text = row[spec.field]
    if not isinstance(text, str):
        raise DataError(
            f"hf:{spec.name}: in row {number} the field {spec.field!r} holds {type(text).__name__}, not text. Name another."
        )
    return text
