"""Makes the links of README and the project's URLs those of a repository, for the page of the package.

    python -m tools.package_links https://HOST/OWNER/atoll v1.2.3

README links to files of the repository by their paths, which lead nowhere on a package index. The release workflow runs this before
it builds; it changes README.md and pyproject.toml of the checkout, and nothing is committed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tools.environments import ROOT

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
PAGES = {"Repository": "", "Documentation": "/tree/{version}/docs", "Changelog": "/blob/{version}/CHANGELOG.md"}


def absolute(text: str, url: str, version: str) -> str:
    """The text of a page at the top of the repository, with absolute links.

    >>> absolute("![a plot](docs/demo.png), [runs](docs/runs.md#text)", "https://x.y/a", "v1")
    '![a plot](https://x.y/a/raw/v1/docs/demo.png), [runs](https://x.y/a/blob/v1/docs/runs.md#text)'
    >>> absolute("[torch](https://pytorch.org), [below](#runs)", "https://x.y/a", "v1")
    '[torch](https://pytorch.org), [below](#runs)'
    """

    def replaced(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        return f"{image}[{words}]({url}/{'raw' if image else 'blob'}/{version}/{path})"

    return LINK.sub(replaced, text)


def with_urls(pyproject: str, url: str, version: str) -> str:
    """The text of pyproject.toml with the project's URLs.

    >>> print(with_urls("[project]\\nname = 'atoll'\\n\\n[tool.ruff]", "https://x.y/a", "v1").split("\\n\\n")[1])
    [project.urls]
    Repository = "https://x.y/a"
    Documentation = "https://x.y/a/tree/v1/docs"
    Changelog = "https://x.y/a/blob/v1/CHANGELOG.md"
    """
    if "[project.urls]" in pyproject:
        raise SystemExit("pyproject.toml has [project.urls] already: remove them there, or leave this step out.")
    lines = "".join(f'{name} = "{url}{page.format(version=version)}"\n' for name, page in PAGES.items())
    before, first_tool, after = pyproject.partition("[tool.")
    return f"{before}[project.urls]\n{lines}\n{first_tool}{after}"


def rewrite(folder: Path, url: str, version: str) -> None:
    """Changes README.md and pyproject.toml in this folder."""
    for name, change in {"README.md": absolute, "pyproject.toml": with_urls}.items():
        path = folder / name
        path.write_text(change(path.read_text("utf-8"), url.rstrip("/"), version), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the repository's address")
    parser.add_argument("version", help="the tag whose files the links lead to")
    given = parser.parse_args()
    rewrite(ROOT, given.url, given.version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
