"""The package as a user installs it: its metadata, the workflows that test and publish it, and the wheel in a bare environment."""

import os
import re
import shutil
import subprocess
import tomllib
from itertools import pairwise

import pytest
import yaml

import atoll
import conftest
from atoll.cli.recipe_settings import run_of
from atoll.models.mlp import MLP
from atoll.testing import network_namespaces
from tools import package_links
from tools.docs_commands import NOT_RUN, PREPARED, command_lines, problems, reason_not_to_run, short
from tools.environments import CONSTRAINTS, ROOT, build_wheel, new_environment
from tools.matrix import CELLS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("name", atoll.__all__)
def test_every_public_name_is_found_in_its_module(name):
    found = getattr(atoll, name)
    assert getattr(found, "__name__", name).removeprefix("atoll.") == name or name == "__version__"


def test_the_stated_versions_of_python_and_torch_are_those_of_the_matrix():
    pythons, torches = zip(*(cell.split(":") for cell in CELLS), strict=True)
    stated = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert sorted(set(pythons)) == stated
    assert PROJECT["requires-python"] == f">={stated[0]}"
    (floor,) = (line.removeprefix("torch>=") for line in PROJECT["dependencies"] if line.startswith("torch>="))
    (tested,) = (line.removeprefix("torch==") for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    assert set(torches) == {f"{floor}.0", tested}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_no_rights_and_no_action_that_can_change(path):
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in (name for name in used if name != "./.github/workflows/ci.yml"):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), f"{action} is not pinned to a commit"
    granted = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert granted == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})


def test_the_cells_of_the_workflow_are_cells_of_the_matrix():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert set(jobs["versions"]["strategy"]["matrix"]["cell"]) <= set(CELLS)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(jobs["test"]["strategy"]["matrix"]["target"]) <= set(targets)


def test_the_workflow_runs_network_namespaces_as_root_and_fails_where_it_cannot():
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    (slow,) = (step for step in steps if "make test-slow" in step.get("run", ""))
    assert slow["if"] == "matrix.target == 'test-slow'"
    assert slow["run"].split()[0] == "sudo"
    assert "ATOLL_NAMESPACES=required" in slow["run"].split()


@pytest.mark.parametrize("why", ["only root can create network namespaces", None])
def test_where_namespaces_are_required_a_session_without_them_does_not_begin(monkeypatch, why):
    monkeypatch.setattr(network_namespaces, "unavailable_reason", lambda nat: why)
    monkeypatch.delenv("ATOLL_NAMESPACES", raising=False)
    conftest.require_namespaces()
    monkeypatch.setenv("ATOLL_NAMESPACES", "required")
    if why is None:
        conftest.require_namespaces()
    else:
        with pytest.raises(pytest.UsageError, match=f"would be skipped: {why}"):
            conftest.require_namespaces()


@pytest.mark.parametrize("tool", ["ip", "nft", "sysctl"])
def test_a_missing_tool_makes_a_site_behind_nat_unavailable(monkeypatch, tool):
    monkeypatch.setattr(network_namespaces, "_found", lambda name: None if name == tool else f"/usr/sbin/{name}")
    assert f"{tool} cannot be found: install" in network_namespaces.unavailable_reason(nat=True)


@pytest.mark.parametrize(("user", "why"), [(0, ""), (0, "`ip netns add` failed"), (1000, "")])
def test_what_ci_runs_requires_namespaces_where_root_can_create_them(tmp_path, user, why):
    """The script itself, with stand-ins for the commands that it calls."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    stands_in = {"id": f"echo {user}", "nft": ":", "make": 'echo "$1 ${ATOLL_NAMESPACES-}"', ".venv/bin/python": f"echo '{why}'"}
    for name, text in stands_in.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**{name: value for name, value in os.environ.items() if name != "ATOLL_NAMESPACES"}, "PATH": path}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    required = " required" if user == 0 and not why else " "
    assert done.stdout.splitlines() == ["install ", f"test{required}", f"test-slow{required}"]
    assert ("skipped" in done.stderr) == (required == " ")
    assert why in done.stderr


def test_the_run_that_tries_a_release_is_small_enough_for_the_limit_of_its_job():
    """With its own model of 33.6 million parameters toy-sync would exceed it: 40 of its 2,000 steps took 77 s on two busy cores."""
    lines = (ROOT / ".github" / "workflows" / "release.yml").read_text().splitlines()
    (line,) = (line for line in lines if '/bin/atoll" run ' in line)
    _, _, recipe, *words = line.split()
    run = run_of(recipe, [setting for option, setting in pairwise(words) if option == "--set"], None)
    assert isinstance(run.model, MLP)
    assert run.train.steps * run.model.num_params(512, 4) < 10**9


def test_a_release_is_published_after_all_tests_with_links_that_lead_to_the_repository(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == {"tests", "build"}
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    (linking,) = (number for number, step in enumerate(steps) if step.startswith("python -m tools.package_links "))
    assert linking < steps.index("python -m build") < steps.index("twine check --strict dist/*")
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    package_links.rewrite(tmp_path, "https://forge.example/us/atoll/", "v9")
    targets = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert "https://forge.example/us/atoll/raw/v9/docs/demo.png" in targets
    for target in targets:
        assert target.startswith(("https://", "http://")), target
        if "forge.example" in target:
            assert (ROOT / re.sub(r"^.*/v9/|#.*$", "", target)).exists(), target
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert {name: value for name, value in project.items() if name != "urls"} == PROJECT
    assert all(url.startswith("https://forge.example/us/atoll") for url in project["urls"].values())


def test_every_command_of_the_pages_can_run_where_the_pages_lead_or_has_a_reason():
    lines = command_lines()
    assert problems(lines) == []
    assert {reason_not_to_run(line) for line in lines} == {None, *(why for _, why in NOT_RUN)}, "a reason applies to no line"


def test_the_prepared_runs_stand_for_those_of_the_pages():
    lines = command_lines()
    assert [line.removeprefix("atoll ") for line in lines[: len(PREPARED)]] == list(PREPARED)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("atoll report runs/nowhere", "no earlier line makes runs/nowhere"),
        ("atoll run demo-diloco --workload train.py:train", "no earlier line makes train.py"),
        ("atoll run demo-diloco --set engine.advertise=192.0.2.7:1", "names another machine, 192.0.2.7"),
        ("atoll report FOLDER", "has a placeholder, FOLDER"),
        ("torchrun examples/pytorch_loop.py", "torchrun is no command of atoll"),
    ],
)
def test_a_command_that_cannot_run_is_found(line, problem):
    assert problems([*command_lines(), line]) == [f"{line}: {problem}"]


def test_every_run_of_the_pages_is_cut_short():
    for line in command_lines():
        words = line.split()
        if reason_not_to_run(line) is None and words[:2] in (["atoll", "run"], ["atoll", "compare"], ["atoll", "sweep"]):
            named = [word for word in words[2:] if re.fullmatch(r"(demo|toy|diloco|acco|finetune)[\w-]*", word)]
            steps = [int(word.partition("=")[2]) for word in short(line) if word.startswith("train.steps=")]
            assert not named or steps[-1] <= 600, line


@pytest.mark.slow
def test_the_wheel_works_in_a_bare_environment(tmp_path):
    commands = new_environment(tmp_path / "environment", [str(build_wheel(tmp_path))])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def atoll(line):
        _, *words = short(f"atoll {line}")
        done = subprocess.run(
            [commands / "atoll", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done

    atoll("recipes")
    atoll("show demo-diloco")
    atoll("run demo-diloco --out runs/first --quiet")
    warned = atoll("report runs/first").stderr
    assert "no plots: figures need matplotlib.figure" in warned
    assert '`pip install "matplotlib>=3.8"`' in warned
    assert (tmp_path / "runs/first/trace.json").exists()
    atoll("compare demo-ddp demo-diloco --out runs/both --quiet")
    atoll("run demo-diloco --engine processes --processes 2 --out runs/two --quiet")
    atoll("generate runs/first --prompt 'def ' --tokens 5")
    atoll("export runs/first --out models/first")
