"""MkDocs hook: adds to the site each file of the repository that a page links to, so that links which work there work here too.

README.md becomes the first page. Another Markdown file keeps its path. A source file becomes a page that shows it. Other files
(plots, records) are copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ENTRANCE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
SOURCES = {".py": "python", ".toml": "toml", ".json": "json", ".txt": "text", "": "make"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the entrance pages, the files that pages link to, and the files that those link to."""
    known = {f"docs/{file.src_uri}" for file in files}
    waiting = [*ENTRANCE, *(page for path in sorted(known) if path.endswith(".md") for page in linked(path))]
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        files.append(site_file(path, config))
        if path.endswith(".md"):
            waiting += linked(path)
    return files


def linked(page: str) -> list[str]:
    """The files of the repository that a page links to, by their paths in it."""
    found = (repository_path(page, target) for target in LINK.findall((ROOT / page).read_text("utf-8")))
    return [path for path in found if path is not None]


def repository_path(page: str, target: str) -> str | None:
    """The path of a link's target in the repository; none if it is no file there."""
    path = (ROOT / page).parent / target
    if "://" in target or not path.exists():
        return None
    path = path / "README.md" if path.is_dir() else path
    return path.resolve().relative_to(ROOT).as_posix()


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site's source."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.md" if PurePosixPath(path).suffix in SOURCES else path


def site_file(path: str, config: MkDocsConfig) -> File:
    if PurePosixPath(path).suffix not in {*SOURCES, ".md"}:
        return File.generated(config, site_path(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return File.generated(config, site_path(path), content=with_site_links(text, path))
    language = SOURCES[PurePosixPath(path).suffix]
    return File.generated(config, site_path(path), content=f"# {path}\n\n````{language}\n{text}````\n")


def with_site_links(text: str, path: str) -> str:
    """A page's text with its links relative to the page's place in the site."""
    home = PurePosixPath(site_path(path)).parent

    def moved(link: re.Match[str]) -> str:
        target = repository_path(path, link[1])
        return link[1] if target is None else PurePosixPath(os.path.relpath(site_path(target), home)).as_posix()

    return LINK.sub(moved, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of the pages under docs/ that leave that folder."""
    generated = page.file.generated_by is not None
    return markdown if generated else with_site_links(markdown, f"docs/{page.file.src_uri}")
