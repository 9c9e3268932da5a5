"""Text in: a corpus by its spec.

    stdlib                                  the standard library of the running Python
    files:PATH[#field]                      a file, a glob or a folder: text or .jsonl, also .xz, .gz, .zst
    hf:NAME_OR_PATH[@conf][:split][#field]  a dataset of the Hugging Face hub or its library

>>> corpus = open_corpus("stdlib", limit_bytes=20_000)
>>> sum(len(document.text.encode()) for document in corpus) <= 20_000
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.core.errors import DataError
from atoll.data.documents import Corpus, Document
from atoll.data.huggingface import hub_corpus
from atoll.data.stdlib_corpus import stdlib_corpus
from atoll.data.text_files import files_corpus

__all__ = ["Corpus", "Document", "check_spec", "open_corpus"]

_SCHEMES: dict[str, Callable[[str], Corpus]] = {"files": files_corpus, "hf": hub_corpus}


def open_corpus(spec: str, limit_bytes: int | None = None) -> Corpus:
    """The corpus that a spec names; see the top of this file.

    Args:
        spec: where the text is.
        limit_bytes: how much of it to read at most, with a share for every domain; None: all.

    Raises:
        DataError: the spec is unknown, or there is nothing where it points.
    """
    check_spec(spec)
    scheme, _, rest = spec.partition(":")
    corpus = stdlib_corpus() if scheme == "stdlib" else _SCHEMES[scheme](rest)
    return replace(corpus, limit_bytes=limit_bytes)


def check_spec(spec: str) -> None:
    """Refuse a spec of an unknown form. Looks at nothing but its text."""
    scheme, _, rest = spec.partition(":")
    if spec == "stdlib" or (scheme in _SCHEMES and rest):
        return
    raise DataError(
        f"corpus={spec!r} is not known. Use stdlib, files:PATH[#field], hf:NAME_OR_PATH[@configuration][:split][#field], "
        f"or prepared:FOLDER for what `atoll data prepare` wrote."
    )
