"""New virtual environments for checks that must not see the developer's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def new_environment(folder: Path, requirements: Sequence[str], *, python: str = sys.executable, torch: str | None = None) -> Path:
    """Creates a virtual environment with these requirements in their tested versions, and returns its folder of commands.

    Args:
        torch: the version of torch; None: the tested one.
    """
    run(python, "-m", "venv", folder)
    constraints = folder / "constraints.txt"
    tested = CONSTRAINTS.read_text().splitlines()
    constraints.write_text("\n".join(f"torch=={torch}" if torch and line.startswith("torch==") else line for line in tested))
    commands = folder / "bin"
    # torch first: where an index has a CPU build of this version, pip then installs that.
    for wanted in (("torch",), requirements):
        run(commands / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, *wanted)
    return commands


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout in a folder, from a copy: setuptools would also pack files that an earlier build left."""
    copy = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in files:
        if name.startswith("src/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", copy, "-w", folder)
    (wheel,) = folder.glob("atoll-*.whl")
    return wheel


def run(*command: str | Path) -> None:
    # Packages on PYTHONPATH would count as installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
