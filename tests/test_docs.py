"""The pages match the code: their Python runs, their command lines parse, their tables are complete, their links resolve."""

import __future__

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shlex
import sys
import tomllib
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest

import atoll
from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.cli import doctor_command, inspect_commands, list_runs_command, main as cli, prepare_command, run_command, sweep_command
from atoll.cli.recipe_settings import run_of, spec_with
from atoll.core.config.overrides import override
from atoll.core.events import KINDS, RoundFinished
from atoll.data.text_dataset import Text
from atoll.engines.elastic import launch as elastic_launch
from atoll.engines.elastic.spec import check_address
from atoll.engines.simulator.spec import Simulator
from atoll.engines.spec import spec_named, write_spec
from atoll.runs.run_settings import candidates
from atoll.telemetry.summary import Summary
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import FaultScript
from tests.samples import SMALL as TINY
from tools.docs_commands import blocks, shell_lines

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COVERAGE = DOCS / "coverage.md"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
SMALL = [*TINY, "train.steps=9", "train.warm_start_steps=2", "keep.evaluate_every=3", "keep.save_every=3"]


def table_commands(page):
    """The command lines in backquotes in the tables of a page."""
    rows = (line for line in page.read_text().splitlines() if line.startswith("| "))
    return [command for row in rows for command in re.findall(r"`((?:atoll|python) [^`]+)`", row)]


def first_column(page, heading):
    """The names in backquotes in the first column of the table whose first heading is this."""
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), flags=re.MULTILINE)[1]
    return [name for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def small(run, *more):
    return override(run, [*SMALL, *more], candidates)


# ------------------------------------------------------------------------------------------------------------ command lines


@pytest.fixture
def parsed(monkeypatch, capsys, tmp_path):
    """Parses a command line with atoll's command, and returns the name of the verb and its arguments instead of carrying it out."""
    calls = []

    def stand_in(module, name):
        signature = inspect.signature(getattr(module, name))
        return lambda *given, **named: calls.append((name, signature.bind(*given, **named).arguments))

    for name in ("show_recipe", "report_run"):
        monkeypatch.setattr(inspect_commands, name, stand_in(inspect_commands, name))
    monkeypatch.setattr(prepare_command, "prepare_data", stand_in(prepare_command, "prepare_data"))
    for command in cli.app.registered_commands:
        if command.callback in (cli.recipes, cli.generate, cli.export, cli.replay, cli.evaluate):
            monkeypatch.setattr(command, "callback", wraps(command.callback)(stand_in(cli, command.callback.__name__)))
    monkeypatch.setattr(doctor_command, "examine", stand_in(doctor_command, "examine"))
    monkeypatch.setattr(run_command, "compare_runs", stand_in(run_command, "compare_runs"))
    monkeypatch.setattr(run_command, "extended", lambda options, steps: options)
    monkeypatch.setattr(sweep_command, "sweep", stand_in(sweep_command, "sweep"))
    monkeypatch.setattr(list_runs_command, "list_runs", stand_in(list_runs_command, "list_runs"))
    for name in ("join_run", "invite_joiner"):
        monkeypatch.setattr(elastic_launch, name, stand_in(elastic_launch, name))
    monkeypatch.setattr(run_command, "carry_out", lambda options, faults=None: calls.append(("run", vars(options))) or tmp_path)
    monkeypatch.setattr(RunFaults, "report", lambda *_: SimpleNamespace(rows=list))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.json").write_text(FaultScript().to_text())
    write_spec(tmp_path, Simulator())

    def read(words):
        monkeypatch.setattr(sys, "argv", list(words))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, f"{shlex.join(words)}: {capsys.readouterr().err}"
        return calls.pop()

    return read


class ArgumentsParsed(Exception):
    """A benchmark has parsed its arguments; the test does not run the rest of it."""


@pytest.fixture
def parsed_benchmark(monkeypatch):
    """Parses the command line of a benchmark with the benchmark's own parser."""
    folder = ROOT / "benchmarks"
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, *given):
        parse(parser, *given)
        raise ArgumentsParsed

    def read(words):
        assert (folder / words[0]).exists(), f"benchmarks has no {words[0]}"
        with pytest.raises(ArgumentsParsed):
            importlib.import_module(Path(words[0]).stem).main(words[1:])

    known = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    yield read
    for name in sys.modules.keys() - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def check_values(verb, given):
    """Checks the arguments of a verb without carrying it out: recipes exist, and settings fit them and one another."""
    if verb == "prepare_data":
        asked = given["preparation"]
        Text(corpus=asked.corpus, tokenizer=asked.tokenizer, validation_fraction=asked.validation_fraction)
    if verb == "join_run" and not given["where"].endswith(".json"):
        check_address(given["where"])
    name = given.get("recipe") or given.get("name")
    names = [name] if name else []
    if verb == "compare_runs":
        names = [name for name in given["what"] if "/" not in name]  # the others are folders
    if verb == "sweep":
        axes = sweep_command.axes_of(given["grid"])
        assert sweep_command.cells_of(name, axes, given["settings"], given["seed"], given["engine"], Path())
        return
    for name in names:
        run = run_of(name, given["settings"], given.get("seed"), among=names)
        assert run.resolved
        if verb == "run":
            spec = spec_with(spec_named(given["engine"] or "simulator"), given["settings"], given["processes"])
            assert spec.fitted(run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_parses(page, parsed, parsed_benchmark):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in [*shell_lines(page), *(table_commands(page) if page == COVERAGE else [])]:
        words = shlex.split(line, comments=True)
        program = Path(words[0]).name
        if program == "torchrun":  # the command follows torchrun's own options
            words = words[words.index("-m") + 1 :]
            program = words[0]
        if program == "atoll":
            check_values(*parsed(words))
        elif program == "python" and words[1].startswith("benchmarks/"):
            parsed_benchmark([words[1].removeprefix("benchmarks/"), *words[2:]])
        elif program == "make":
            assert set(words[1:]) <= {*targets} | {word for word in words if "=" in word}, line
        else:
            assert program in {"python", "pip", "git", "cd", "export"}, f"{page.name}: no test checks {line!r}"


NOT_RUN = re.compile(r"[:,] (?:.*\b(?:device time|GPU time ended|CPU time|none available|needs?|days above|rounds)\b|see Table 1)")
"""Why a row was not run: time or machines that it needs, or a run too short for its rounds. That no study has it is no reason."""


def test_every_line_of_the_coverage_has_commands_and_a_verdict_or_a_reason():
    rows = [line.strip("| ").split(" | ") for line in COVERAGE.read_text().splitlines() if line.startswith("| ")]
    items = [row for row in rows if len(row) == 5 and row[0] != "item"]
    assert len(items) > 80
    for item, _, _, command, measured in items:
        assert re.fullmatch(r"`(?:atoll|python) [^`]+`(?:, `(?:atoll|python) [^`]+`)*", command), f"{item}: {command}"
        assert re.search(r"held|did not hold|[Ww]ithin the spread|not run|[Nn]o verdict|tests?\b|input", measured), item
        for after in re.findall(r"not run([^.|]*)", measured):
            assert NOT_RUN.match(after), f"{item}: it does not say what it would have needed: {after!r}"


# ---------------------------------------------------------------------------------------------------- adding an algorithm

ADDING = DOCS / "adding_an_algorithm.md"
NAMED = re.compile(r"# (\w+\.py)(, continued)?\n")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page's files in a folder from which they can be imported."""
    folder, files = tmp_path_factory.mktemp("page"), {}
    for block in blocks(ADDING, "python"):
        name, continued = NAMED.match(block).groups()
        assert bool(continued) == (name in files), f"{name} begins twice, or is continued before it begins"
        files[name] = files.get(name, "") + NAMED.sub("\n", block, count=1)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield [name.removesuffix(".py") for name in files]
        for name in files:
            sys.modules.pop(name.removesuffix(".py"), None)


def test_the_pages_own_tests_pass(written):
    passed = []
    for name in (name for name in written if name.startswith("test_")):
        for test in (value for key, value in vars(importlib.import_module(name)).items() if key.startswith("test_")):
            test()
            passed.append(test.__name__)
    assert {"test_easgd_keeps_its_promises", "test_qhm_keeps_its_promises"} <= set(passed)


@pytest.mark.parametrize("name", ["easgd", "qhm"])
def test_a_module_of_the_page_opens_with_its_algorithm_and_the_papers_symbols(written, name):
    docstring = importlib.import_module(name).__doc__
    assert "arXiv" in docstring
    assert re.search(r"^ *paper .*\n *here ", docstring, flags=re.MULTILINE)


class StopsAfter:
    """A sink that interrupts a run when so many rounds are over."""

    def __init__(self, rounds):
        self.rounds = rounds

    def emit(self, event):
        if isinstance(event, RoundFinished) and event.round == self.rounds:
            raise KeyboardInterrupt


@pytest.fixture
def python(monkeypatch):
    """Executes a line `python -c CODE ARGUMENTS` of the page in this process."""

    def run(line):
        _, option, code, *arguments = shlex.split(line)
        assert option == "-c"
        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        exec(compile(code, "-c", "exec"), {"__name__": "__main__"})

    return run


def test_the_pages_run_can_be_interrupted_resumed_and_read_as_the_page_says(written, tmp_path, monkeypatch, capsys, python):
    monkeypatch.chdir(tmp_path)
    run = small(importlib.import_module("run_easgd").demo_easgd(), "algorithm.period=3")
    straight = atoll.run(run, out="straight")
    with pytest.raises(KeyboardInterrupt):
        atoll.run(run, out="runs/easgd", sinks=[StopsAfter(2)])
    monkeypatch.delitem(sys.modules, "easgd")

    monkeypatch.setattr(sys, "argv", ["atoll", "run", "--resume", "runs/easgd"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr().err
    assert re.search(r"easgd\.EASGD.*Import the module", said)
    assert 'python -c "import easgd; from atoll.cli.main import main; main()" run --resume runs/easgd' in said

    resume, generate = (line for line in shell_lines(ADDING) if line.startswith("python -c"))
    python(resume)
    for name in ("events.jsonl", "final.safetensors"):
        assert Path("runs/easgd", name).read_bytes() == (straight.folder / name).read_bytes()

    with pytest.raises(SystemExit):
        python(generate)
    assert capsys.readouterr().out.startswith("def ")

    sys.modules.pop("easgd")
    monkeypatch.setattr(sys, "argv", ["atoll", "report", "runs/easgd", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert '"algorithm": "EASGD"' in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- other pages


@pytest.fixture
def executed(tmp_path, monkeypatch, capsys):
    """Executes a page's Python with a smaller demo in the place of the demo; gives the names it leaves and what it printed, on
    standard output and on standard error."""
    monkeypatch.chdir(tmp_path)
    demo = small(recipes.demo_diloco(), "algorithm.inner_steps=3", "keep.tensorboard=true")
    monkeypatch.setattr(recipes, "demo_diloco", lambda: demo)

    def execute(page):
        names = {}
        for block in blocks(page, "python"):
            exec(compile(block, page.name, "exec", __future__.annotations.compiler_flag), names)
        return names, *capsys.readouterr()

    return execute


def test_the_loop_of_the_readme_trains(executed):
    names, _, _ = executed(ROOT / "README.md")
    assert (names["islands"].steps, names["islands"].rounds) == (100, 5)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_names_all_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"dev"}
    line = re.search(r"Extras: (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1]
    assert set(re.findall(r"\w+", line)) == extras


def test_the_page_about_runs_reads_curves_and_lists_every_file_of_a_folder(executed):
    names, out, err = executed(DOCS / "runs.md")
    assert "demo: training  100 %" in err
    result = names["result"]
    assert out.split() == [str(result.val_loss), str(result.folder)]
    assert names["curve"](result.folder)[-1] == (9, result.val_loss)
    listed = {name.removesuffix("/") for name in first_column(DOCS / "runs.md", "file")}
    assert {path.name for path in result.folder.iterdir()} <= listed


def test_the_page_about_finetuning_does_what_it_says(executed, tmp_path, monkeypatch, capsys):
    page = DOCS / "finetuning.md"
    names, _, _ = executed(page)
    assert (tmp_path / "models/tuned/config.json").exists()
    assert names["result"].module.lm_head.weight is names["result"].module.transformer.wte.weight
    tried = [line for line in shell_lines(page) if "sums" in line]
    assert [shlex.split(line)[1] for line in tried] == ["run", "generate", "export"]
    for line in tried:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, capsys.readouterr().err
    assert "2+3=" in capsys.readouterr().out
    assert (tmp_path / "models/sums/tokenizer.json").exists()


def test_the_page_about_runs_has_every_key_of_the_summary_in_order():
    assert first_column(DOCS / "runs.md", "key") == [field.name for field in dataclasses.fields(Summary)]


def test_the_page_about_runs_has_every_event_of_a_log():
    recorded = {name for name, kind in KINDS.items() if kind.recorded}
    assert set(first_column(DOCS / "runs.md", "event")) == recorded


def test_the_page_about_diloco_has_every_setting():
    assert first_column(DOCS / "diloco.md", "field") == [field.name for field in dataclasses.fields(DiLoCo)]


def test_the_page_about_acco_has_every_setting():
    named = first_column(DOCS / "acco.md", "field")
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(ACCO))


def test_every_test_that_a_page_names_exists():
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name} names {name}"


def test_the_page_about_diloco_has_one_place_for_measurements():
    assert re.findall(r"<!-- ablations:(\w+) -->", (DOCS / "diloco.md").read_text()) == ["begin", "end"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_that_a_page_announces_is_there(page):
    text = page.read_text()
    assert "The record's tables go here" not in text, f"{page.name} waits for a record: run the benchmark that it names"
    assert not re.search(r"<!-- (\w+):begin -->\s*<!-- \1:end -->", text), f"{page.name} has an empty place for a record"


# ------------------------------------------------------------------------------------------------------------------ traces

PACKAGE = Path(atoll.__file__).parent
STEP = re.compile(r"^(?:\d+\. |\| |$)", flags=re.MULTILINE)
CODE = re.compile(r"`(?:([\w/]+\.py): )?(?:([A-Z]\w*)\.)?([A-Za-z_]\w*)`")


def definitions(body):
    """What these statements define, by name."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in body if isinstance(node, functions)}


@functools.cache
def package():
    """The definitions of each module of the package, by its path, and all its classes."""
    modules = {path.relative_to(PACKAGE): definitions(ast.parse(path.read_text()).body) for path in PACKAGE.rglob("*.py")}
    classes = {name: node for module in modules.values() for name, node in module.items() if isinstance(node, ast.ClassDef)}
    return modules, classes


def has_method(kind, name):
    """Whether a class of the package, or one that it inherits from, defines this method."""
    node = package()[1].get(kind)
    return node is not None and (
        name in definitions(node.body) or any(has_method(base.id, name) for base in node.bases if isinstance(base, ast.Name))
    )


def named_file(name, before):
    """The file that a page names by its path under src/atoll, or by its name beside the file named before, or by its name only."""
    paths = [path for path in package()[0] if path == Path(name) or (before and path == before.parent / name)]
    paths = paths or [path for path in package()[0] if f"/{path}".endswith(f"/{name}")]
    assert len(paths) == 1, f"{name} is {paths}"
    return paths[0]


def check_step(step):
    """Resolves the names of a step: `file.py: Class.method`, `file.py: function`, and names without a file, whose file or class the
    step has named before."""
    modules, classes = package()
    path, kinds = None, set()
    for file, owner, name in CODE.findall(step):
        if file:
            path = named_file(file, path)
            assert not owner or owner in modules[path], f"{path} has no class {owner}: {step}"
        if owner:
            kinds.add(owner)
            assert has_method(owner, name), f"{owner} has no method {name}: {step}"
        elif file:
            assert name in modules[path], f"{path} has no {name}: {step}"
        elif path:
            known = name in modules[path] or name in classes or any(has_method(kind, name) for kind in kinds)
            assert known, f"neither {path} nor {sorted(kinds)} has {name}: {step}"


def test_every_function_in_the_traces_of_the_design_page_exists():
    traces = re.search(r"^## Traces\n(.*?)^## ", (DOCS / "design.md").read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    steps = STEP.split(traces)
    assert len(steps) > 80
    for step in steps:
        check_step(step)


# ------------------------------------------------------------------------------------------------------------------- links


def anchors(page):
    """The anchors of a page: its headings, as code hosts render them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_resolves(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}"


def test_the_changelog_has_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
