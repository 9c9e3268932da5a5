"""Without an optional library the rest works, and the message names the extra to install."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.core import optional_imports
from atoll.core.errors import ConfigError
from atoll.core.optional_imports import install_command, require
from atoll.data.document_sources import Document, open_corpus
from atoll.data.instructions import load_model_tokenizer
from atoll.data.partition import KMeans
from atoll.data.text_dataset import Text
from atoll.data.tokenizer import train_bpe
from atoll.models.pretrained import Pretrained


def read_zst(folder: Path) -> None:
    (folder / "a.txt.zst").write_bytes(b"x")
    list(open_corpus(f"files:{folder}"))


def read_hub(folder: Path) -> None:
    open_corpus(f"hf:{folder}")


def train(folder: Path) -> None:
    train_bpe([Document("a", "a", "text")], 300)


def cluster(folder: Path) -> None:
    Text(partition=KMeans(), limit_bytes=50_000).load().open(2, 2, 0, features=lambda tokens: np.ones((len(tokens), 1)))


def load_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    Pretrained(path=str(folder)).build()


def load_tokenizer(folder: Path) -> None:
    load_model_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("transformers", "hf", load_model),
        ("transformers", "hf", load_tokenizer),
        ("zstandard", "zstd", read_zst),
        ("datasets", "hf", read_hub),
        ("sklearn.cluster", "noniid", cluster),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, use: Callable[[Path], None]
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"need {module}, .*pip install -e \".*\[{extra}\]\""):
        use(tmp_path)


def test_a_library_that_is_enough_alone_is_named_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'BPE tokenizers need tokenizers, .* `pip install "tokenizers>=[\d.]+"`\.$'):
        train(tmp_path)


def test_bytes_of_the_standard_library_need_no_extra(monkeypatch: pytest.MonkeyPatch):
    for module in ("zstandard", "datasets", "tokenizers", "sklearn", "sklearn.cluster"):
        monkeypatch.setitem(sys.modules, module, None)
    assert Text(limit_bytes=50_000).load().open(2, 2, 0).train.num_shards == 2


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(ConfigError, match="figures need no_such_library, which cannot be imported") as caught:
        require("no_such_library", extra="plot", purpose="figures")
    assert f"`{install_command('plot')}`" in str(caught.value)


def test_the_command_installs_from_the_checkout_or_by_the_requirements_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index has atoll itself."""
    assert install_command("plot") == f'pip install -e "{Path(__file__).parents[2]}[plot]"'
    monkeypatch.setattr(optional_imports, "__file__", str(tmp_path / "site-packages/atoll/core/optional_imports.py"))
    assert install_command("plot") == 'pip install "matplotlib>=3.8"'
    assert install_command("torchft") == 'pip install "torchft>=0.2" "cryptography>=42" "xxhash>=3.4"'
