"""The room as a whole."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tensorboard', 'rich'}"
    code = f"import sys, atoll.telemetry; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)
