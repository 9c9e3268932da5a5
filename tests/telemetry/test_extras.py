"""Optional libraries are loaded when they are needed, and a missing one is named with the way to get it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.errors import ConfigError
from atoll.telemetry import TensorBoardSink, plot_run
from atoll.telemetry.extras import require


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tensorboard', 'rich'}"
    code = f"import sys, atoll.telemetry; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(ConfigError, match=r'figures need no_such_library.*`pip install "atoll\[plot\]"`'):
        require("no_such_library", extra="plot", purpose="figures")


def test_figures_without_matplotlib_name_their_extra(tmp_path, script, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # Python's own way to say that a module cannot be imported
    with pytest.raises(ConfigError, match=r'pip install "atoll\[plot\]"'):
        plot_run(script().write(tmp_path / "run"), tmp_path / "figure.png")


def test_a_tensorboard_log_without_tensorboard_names_its_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[tensorboard\]"'):
        TensorBoardSink(tmp_path)
