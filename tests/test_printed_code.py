"""The pages print algorithms exactly as their files define them, and these files contain no buffer bookkeeping."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest

import atoll
from atoll.optim.sgd import Nesterov

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLASSES = {kind.__name__: kind for kind in (atoll.DiLoCo, atoll.ACCO, atoll.AsyncLocalSGD, Nesterov)}
PRINTED = re.compile(r"^```python\n# ([A-Z]\w*)\.(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BOOKKEEPING = re.compile(
    r"\.(donate|claim|borrow|release|give|lent|take)\(|\bdel \w+(,|$)|update_in_place|\bin place\b|last reader"
    r"|\b(recycle|pin|unpin|lease|HubStep|temporary)|\bempty\("
)


def printed(page):
    """The methods that a page prints: class, method, text."""
    return PRINTED.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_method_is_the_one_in_the_package(page):
    for kind, method, text in printed(page):
        assert text == textwrap.dedent(inspect.getsource(getattr(CLASSES[kind], method))), f"{kind}.{method} in {page.name}"


@pytest.mark.parametrize(
    ("page", "methods"),
    [
        ("README.md", {"AsyncLocalSGD.round"}),
        ("docs/design.md", {"DiLoCo.round", "ACCO.round", "Nesterov.update"}),
        ("docs/diloco.md", {"DiLoCo.round"}),
        ("docs/acco.md", {"ACCO.round", "ACCO._estimate", "ACCO._commit"}),
        ("docs/async_local_sgd.md", {"AsyncLocalSGD.round", "AsyncLocalSGD.step"}),
    ],
)
def test_the_pages_print_the_algorithms(page, methods):
    assert {f"{kind}.{method}" for kind, method, _ in printed(ROOT / page)} == methods


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "adding_an_algorithm.md"], ids=lambda page: page.name)
def test_every_printed_round_names_its_class(page):
    """Only a block that begins with `# Class.method` is compared with the package."""
    for block in BLOCK.findall(page.read_text()):
        assert "async def round(self" not in block or re.match(r"# [A-Z]\w*\.round\n", block), f"{page.name}: {block}"


@pytest.mark.parametrize("path", sorted((ROOT / "src/atoll/algorithms").glob("*.py")), ids=lambda path: path.name)
def test_an_algorithm_holds_no_buffer_bookkeeping(path):
    found = [line for line in path.read_text().splitlines() if BOOKKEEPING.search(line)]
    assert not found, f"{path.name}: engines decide what is computed in place: {found}"
