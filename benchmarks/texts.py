"""Which text a record's cells were trained on: they name a folder, which may hold another text tomorrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.data.prepare import is_prepared, open_prepared
from record import Record

_FACTS = ("vocab_size", "tokenizer_digest", "text_bytes", "train", "validation", "domains")


def same_texts(record: Record, folders: Mapping[str, Path]) -> None:
    """Writes down which texts these folders hold, in `text.json`, or makes sure that they are those of the record.

    Raises:
        ConfigError: a folder holds another text, or none where the record knows none either.
    """
    path = record.path / "text.json"
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, folder in folders.items():
        if not is_prepared(folder):
            if name in known:  # tables can be made of what is there
                continue
            raise ConfigError(
                f"--{name} {folder}: this is no prepared text. Make one with: atoll data prepare CORPUS --out {folder}"
            )
        meta = open_prepared(folder).meta
        found = {fact: meta[fact] for fact in _FACTS}
        if known.setdefault(name, found) != found:
            raise ConfigError(
                f"--{name} {folder} holds another text than the record {record.path} was made with: {found}, not {known[name]}. "
                f"Give that text, or another --record."
            )
    path.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
