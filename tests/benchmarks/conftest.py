"""The benchmarks' modules, small settings, and the lines of a record."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [path.stem for path in BENCHMARKS.glob("*.py")]
_IMPORTED: dict[str, ModuleType] = {}
SMALL = [
    "model=GPT(layers=1,width=8,heads=1,head_size=8)",
    "data=Text(limit_bytes=60000,seq_len=16,eval_batches=2)",
    "train=Train(steps=20,batch_size=2,warm_start_steps=2)",
    "optimizer.lr.warmup=2",
]


@pytest.fixture(scope="module")
def b():
    """The benchmarks' modules. They are scripts without a package, so their folder is on the path."""
    sys.path.insert(0, str(BENCHMARKS))
    sys.modules.update(_IMPORTED)  # a second import of all of them takes 0.2 s
    try:
        _IMPORTED.update({name: importlib.import_module(name) for name in NAMES})
        yield SimpleNamespace(**_IMPORTED)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in NAMES:
            del sys.modules[name]


@pytest.fixture
def small():
    """Settings with which a run of a demo recipe takes little time."""
    return list(SMALL)


@pytest.fixture
def small_settings(small):
    """The small settings as a command's arguments, with more after them: `small_settings("train.steps=4")`."""

    def make(*more):
        return [part for each in [*small, *more] for part in ("--set", each)]

    return make


@pytest.fixture
def lines_of():
    """The lines of a record, one per cell: `lines_of(folder)`."""

    def read(record):
        return (record / "cells.jsonl").read_text().splitlines()

    return read
