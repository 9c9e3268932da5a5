"""Specs of corpora."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.data.corpus import open_corpus


@pytest.mark.parametrize("spec", ["", "wikipedia", "file:a.txt", "files:", "hf:", "stdlib:3", "prepared"])
def test_an_unknown_spec_is_refused_with_all_that_is_allowed(spec: str):
    with pytest.raises(DataError, match=r"is not known. Use stdlib, files:PATH.*hf:.*prepared:"):
        open_corpus(spec)


def test_each_known_spec_opens_its_reader_with_the_limit(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello")
    (document,) = open_corpus(f"files:{tmp_path}", limit_bytes=4)
    assert document.text == "hell"
    assert open_corpus("stdlib", limit_bytes=10).spec == "stdlib"
