"""The docs site builds without a warning: every link and anchor resolves, every public name is documented, nothing is loaded from
other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with --strict: an unknown link or anchor fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_has_every_page_in_its_navigation(site):
    entrance = (site / "index.html").read_text()
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if f'href="{page}"' not in entrance]
    assert not missing, f"add these pages to nav in mkdocs.yml: {missing}"


def test_the_reference_documents_every_public_name(site):
    anchors = {anchor for page in (site / "api").glob("*.html") for anchor in re.findall(r'id="(atoll\.[\w.]+)"', page.read_text())}
    missing = [name for name in atoll.__all__ if name != "__version__" and f"atoll.{name}" not in anchors]
    assert not missing, f"add these names to a page of docs/api: {missing}"


def test_the_site_loads_nothing_from_other_hosts(site):
    loads = re.compile(r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?:https?:)?//|<link[^>]*\bhref=["']?https?://""")
    assert not [page.name for page in site.rglob("*.html") if loads.search(page.read_text())]
