"""The benchmarks run in miniature, resume, and judge as they say they do: their modules, small settings, and lines of a record."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [path.stem for path in BENCHMARKS.glob("*.py")]
SMALL = [
    "model=GPT(layers=1,width=8,heads=1,head_size=8)",
    "data=Text(limit_bytes=60000,seq_len=16,eval_batches=2)",
    "train=Train(steps=20,batch_size=2,warm_start_steps=2)",
    "optimizer.lr.warmup=2",
]


@pytest.fixture(scope="module")
def b():
    """The benchmarks' modules, which lie in no package: their folder is the path while they are scripts."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in NAMES:
            del sys.modules[name]


@pytest.fixture
def small():
    """Settings with which a run of a demo's recipe takes no time."""
    return list(SMALL)


@pytest.fixture
def small_settings(small):
    """Makes the small settings a command's arguments, with more after them: `small_settings("train.steps=4")`."""

    def make(*more):
        return [part for each in [*small, *more] for part in ("--set", each)]

    return make


@pytest.fixture
def lines_of():
    """Gives the lines of a record, one per cell: `lines_of(folder)`."""

    def read(record):
        return (record / "cells.jsonl").read_text().splitlines()

    return read
