"""The house is built as it is drawn: imports go down only, and the mathematics is pure."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import atoll

ROOT = Path(atoll.__file__).parent
FLOORS = [  # from the top down; packages on one floor do not import each other
    {"cli", "integrations"},
    {"recipes", "loop", "testing"},
    {"engines"},
    {"runs"},
    {"replica", "telemetry", "models", "data"},
    {"algorithms"},
    {"optim"},
    {"core"},
]
PURE = {"algorithms", "optim"}
IMPURE = {"torch.distributed", "time", "random", "logging", "os", "socket", "threading", "asyncio", "datetime", "multiprocessing"}
FILES = sorted(ROOT.rglob("*.py"))
ROOMS = set().union(*FLOORS)


def room_of(path):
    """The room a file lies in; what lies in the hall itself (__init__, __main__) may see everything."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return None if first in {"__init__", "__main__"} else first


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level_of(room):
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path):
    home = room_of(path)
    if home is None:
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "atoll" and len(parts) > 1 and parts[1] in ROOMS and parts[1] != home:
            assert level_of(parts[1]) > level_of(home), f"{home} may not import {name}"


def test_no_engine_imports_another():
    """What two engines use lies above their folders, in `engines`."""
    engines = {path.parent.name for path in (ROOT / "engines").glob("*/engine.py")}
    assert engines == {"simulator", "processes", "elastic", "ray"}
    for path in (path for path in FILES if path.parent.name in engines and path.parent.parent == ROOT / "engines"):
        found = {name.split(".")[2] for name in imports_of(path) if name.startswith("atoll.engines.")}
        others = (found & engines) - {path.parent.name}
        assert not others, f"{path.relative_to(ROOT)} imports from {others}"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in PURE], ids=lambda path: str(path.relative_to(ROOT)))
def test_mathematics_knows_no_time_chance_or_transport(path):
    for name in imports_of(path):
        assert not any(f"{name}.".startswith(f"{impure}.") for impure in IMPURE), f"{path.name} is pure and may not import {name}"


def test_every_room_is_on_a_floor():
    found = {room_of(path) for path in FILES} - {None}
    assert found <= ROOMS, f"{found - ROOMS} have no floor: say in FLOORS what they may import"


def test_every_room_says_what_it_is_for():
    for package in ROOT.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(package.read_text()))
        assert docstring, f"{package} has no docstring"
        assert "TODO" not in docstring


def classes():
    """Every class of the package, with the file that defines it."""
    for path in FILES:
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def test_no_class_name_stands_twice():
    """Saved files name types by their class names, and one word has one meaning."""
    names = Counter(node.name for _, node in classes())
    assert [name for name, count in names.items() if count > 1] == []


def test_no_service_takes_more_than_ten_arguments():
    """Records, that is dataclasses, are exempt: what belongs together is grouped in one."""
    for path, node in classes():
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = [*method.args.posonlyargs, *method.args.args[1:], *method.args.kwonlyargs]
                assert len(arguments) <= 10, f"{node.name} in {path.relative_to(ROOT)} takes {len(arguments)} arguments"


def test_every_test_file_mirrors_a_source_file():
    tests = Path(__file__).parent
    elsewhere = {"test_architecture", "test_battery", "test_examples", "test_docs", "test_gate", "test_printed_code", "test_site"}
    for path in tests.rglob("test_*.py"):
        if path.stem in elsewhere or path.parent == tests / "benchmarks":  # those are no part of the package
            continue
        room, name = ROOT / path.parent.relative_to(tests), path.stem.removeprefix("test_")
        # What is long is cut by subject: test_acco_time.py tests acco.py.
        sources = [source for source in room.glob("*.py") if name == source.stem or name.startswith(f"{source.stem}_")]
        assert sources, f"{path.relative_to(tests)} tests nothing that is in {room.relative_to(ROOT.parent)}"
