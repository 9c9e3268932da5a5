"""`make evidence`: its parts, and the options that reach the scripts. Nothing runs: `make -n`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "small": ["paper_claims.py"],
    "medium": ["paper_claims.py"],
    "large": ["paper_claims.py"],
    "small-batch": ["evidence_diloco.py", "evidence_async.py", "evidence_acco.py"],
    "speed": ["gpu.py"],
    "links": ["acco_links.py", "slow_link.py"],
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
"""Without the settings of a `make` that runs the tests."""
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def commands(*settings):
    """The commands of benchmarks that `make evidence` would carry out, one per script, in their order."""
    command = ["make", "-n", "-s", "evidence", "NO_INSTALL=1", f"PYTHON={sys.executable}", "TEXT=text", *settings]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True)
    joined = done.stdout.replace("\\\n", " ").replace(" && ", "\n")
    return [line for line in joined.splitlines() if " benchmarks/" in line]


def scripts(lines):
    return [line.partition(" benchmarks/")[2].split()[0] for line in lines]


@pytest.mark.parametrize("part", [part for part in SCRIPTS if part not in ("medium", "large", "small-batch", "speed")])
def test_a_part_for_a_cpu_runs_its_scripts(part):
    assert scripts(commands(f"WORKLOAD={part}")) == SCRIPTS[part]


def test_all_lists_the_cells_of_every_part():
    lines = commands("WORKLOAD=all", "DRY=1")
    assert sorted(scripts(lines)) == sorted(script for part in SCRIPTS.values() for script in part)
    assert all("--dry-run" in line for line in lines)
    workloads = [line.partition("--workload ")[2].split()[0] for line in lines if "paper_claims" in line]
    assert workloads == ["small", "medium", "large"]


def test_all_writes_the_tables_of_the_newest_records_into_the_pages():
    lines = commands("WORKLOAD=all", "TABLES=1", "RECORD=newest", "DOCS=1")
    by_script = {script: line for script, line in zip(scripts(lines), lines, strict=True) if "--workload large" not in line}
    claims = next(line for line in lines if "--workload medium" in line)
    for option in ("--minutes 0", "--docs docs/evidence.md", "--readme README.md", "--coverage docs/coverage.md"):
        assert option in claims
    assert "_paper_claims_medium" in claims.partition("--record ")[2]
    pages = {"evidence_headline.py": "evidence", "gpu.py": "evidence", "acco_links.py": "acco"}
    for script, page in pages.items():
        assert f"--docs docs/{page}.md" in by_script[script]
    for study in ("evidence_diloco", "evidence_async", "evidence_acco"):
        assert f"_{study}" in by_script[f"{study}.py"].partition("--record ")[2]
    assert "_gpu_algorithms" in by_script["gpu.py"].partition("--algorithms-record ")[2]
    assert all("--record " in line for line in by_script.values() if "headline" not in line)


def test_the_time_limit_and_the_choices_of_the_newest_record_reach_a_new_one():
    (line,) = commands("WORKLOAD=medium", "DRY=1", "MINUTES=7.5", "PROCESSES=14")
    assert "--minutes 7.5" in line
    assert "--processes 14" in line
    assert "_paper_claims_medium" in line.partition("--choices ")[2]
    assert "--record" not in line
    (line,) = commands("WORKLOAD=medium", "DRY=1", "RECORD=some/record")
    assert "--record some/record" in line
    assert "--choices" not in line


def test_what_cannot_be_made_is_refused():
    for settings, reason in (
        (["WORKLOAD=tiny"], "is none of"),
        (["WORKLOAD=all", "RECORD=some/record"], "RECORD=newest"),
        (["TABLES=1"], "name the record"),
    ):
        command = ["make", "evidence", "NO_INSTALL=1", f"PYTHON={sys.executable}", "DRY=1", *settings]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert reason in done.stderr
