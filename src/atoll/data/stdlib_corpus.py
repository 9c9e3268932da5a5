"""The corpus that everybody has: the standard library of the Python that runs, and its help topics.

About 10 MB of source in a few coarse domains, so that shards by domain differ:

    asynchronous    asyncio, concurrent, multiprocessing
    web             email, html, http, json, urllib, wsgiref, xml, xmlrpc
    encodings       encodings: mostly tables
    windows         curses, tkinter, turtledemo: windows and screens
    packages        every other package
    modules a-f, modules g-p, modules q-z and _     single files by first letter
    topics          the texts of `help()`, which are prose

Left out: site-packages, tests, idlelib, lib2to3, bundled wheels, and what was generated when this Python was built. Another
version of Python is another text.
"""

from __future__ import annotations

import importlib
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from atoll.core.errors import DataError
from atoll.data.documents import Corpus, Document

_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "__pycache__"}
_GENERATED = ("_sysconfigdata", "_sysconfig_vars", "config-")
_PACKAGES = {
    "asynchronous": {"asyncio", "concurrent", "multiprocessing"},
    "web": {"email", "html", "http", "json", "urllib", "wsgiref", "xml", "xmlrpc"},
    "encodings": {"encodings"},
    "windows": {"curses", "tkinter", "turtledemo"},
}


def stdlib_corpus() -> Corpus:
    """The standard library's sources in order of their paths, and the help topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[Path]] = defaultdict(list)
    for path in _sources(root):
        files[domain_of(path.relative_to(root))].append(path)
    if not files:
        raise DataError(
            f"stdlib: there are no .py files under {root}; this Python keeps its library elsewhere or compiled. "
            f"Give text of your own: files:PATH."
        )
    domains: dict[str, Callable[[], Iterator[Document]]] = {name: partial(_read, root, name, files[name]) for name in sorted(files)}
    topics = _topics()
    if topics:
        domains["topics"] = lambda: iter(topics)
    return Corpus(spec="stdlib", domains=domains)


def domain_of(path: Path) -> str:
    """The domain of a file, given its path inside the library.

    >>> domain_of(Path("asyncio/tasks.py")), domain_of(Path("abc.py")), domain_of(Path("tomllib/_re.py"))
    ('asynchronous', 'modules a-f', 'packages')
    """
    first = path.parts[0]
    if len(path.parts) == 1:
        letter = first[0].lower()
        return "modules a-f" if "a" <= letter <= "f" else "modules g-p" if "g" <= letter <= "p" else "modules q-z and _"
    return next((domain for domain, packages in _PACKAGES.items() if first in packages), "packages")


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.startswith(_GENERATED))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(_GENERATED):
                yield Path(folder, name)


def _read(root: Path, domain: str, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        # Python's own sources are UTF-8; a vendor's patch that is not still reads, with marks in place of what is broken.
        text = path.read_bytes().decode(errors="replace")
        yield Document(path.relative_to(root).as_posix(), domain, text)


def _topics() -> list[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave the help texts out
        return []
    return [Document(f"topics/{name}", "topics", topics[name]) for name in sorted(topics)]
