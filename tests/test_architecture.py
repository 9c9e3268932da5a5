"""The package has the structure that docs/design.md describes: imports go down only, rules and algorithms are pure, class names are
unique, constructors are small."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import atoll

ROOT = Path(atoll.__file__).parent
LEVELS = [  # from the top down; packages on one level do not import each other
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
PACKAGES = set().union(*LEVELS)
MOST_ARGUMENTS = 10


def package_of(path):
    """The package that a file belongs to. `__init__` and `__main__` of atoll itself belong to none, and may import all."""
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


def level_of(package):
    return next(level for level, packages in enumerate(LEVELS) if package in packages)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path):
    home = package_of(path)
    if home is None:
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "atoll" and len(parts) > 1 and parts[1] in PACKAGES and parts[1] != home:
            assert level_of(parts[1]) > level_of(home), f"{home} may not import {name}"


def test_no_engine_imports_another():
    """What two engines use lies above their folders, in `engines`."""
    engines = {path.parent.name for path in (ROOT / "engines").glob("*/engine.py")}
    assert engines == {"simulator", "processes", "elastic", "ray"}
    for path in (path for path in FILES if path.parent.name in engines and path.parent.parent == ROOT / "engines"):
        found = {name.split(".")[2] for name in imports_of(path) if name.startswith("atoll.engines.")}
        others = (found & engines) - {path.parent.name}
        assert not others, f"{path.relative_to(ROOT)} imports from {others}"


@pytest.mark.parametrize("path", [p for p in FILES if package_of(p) in PURE], ids=lambda path: str(path.relative_to(ROOT)))
def test_rules_and_algorithms_import_no_clock_random_numbers_or_transport(path):
    for name in imports_of(path):
        assert not any(f"{name}.".startswith(f"{impure}.") for impure in IMPURE), f"{path.name} is pure and may not import {name}"


def test_every_package_has_a_level():
    found = {package_of(path) for path in FILES} - {None}
    assert found <= PACKAGES, f"{found - PACKAGES} have no level: add them to LEVELS"


def test_every_package_has_a_docstring():
    for package in ROOT.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(package.read_text()))
        assert docstring, f"{package} has no docstring"
        assert "TODO" not in docstring


def classes():
    """Every class of the package, with the file that defines it."""
    for path in FILES:
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def type_aliases():
    """The names in CamelCase that modules assign to, such as `Outcome = Applied | Refusal`."""
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            yield from (name.id for name in targets if isinstance(name, ast.Name) and re.match(r"[A-Z]+[a-z]", name.id))


def test_no_class_name_occurs_twice():
    """Saved files name types by their class names, and one word has one meaning."""
    counts = Counter([*(node.name for _, node in classes()), *type_aliases()])
    twice = {name for name, count in counts.items() if count > 1}
    same_interface = {"IslandsCallback"}  # of Hugging Face's Trainer and of Lightning: each user imports one of them
    assert twice <= same_interface


def dataclass_options(node):
    """The source of the dataclass decorator of a class, if it has one."""
    found = (ast.unparse(decorator) for decorator in node.decorator_list)
    return next((text for text in found if text.partition("(")[0].endswith("dataclass")), None)


def constructor_arguments(node, by_name):
    """The arguments of a class's constructor: those of `__init__`, or the fields of a dataclass and of its bases."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return {argument.arg for argument in (*method.args.posonlyargs, *method.args.args[1:], *method.args.kwonlyargs)}
    inherited = (constructor_arguments(by_name[base.id], by_name) for base in node.bases if getattr(base, "id", None) in by_name)
    fields = (field for field in node.body if isinstance(field, ast.AnnAssign) and dataclass_options(node))
    own = {f.target.id for f in fields if "ClassVar" not in ast.unparse(f) and "init=False" not in ast.unparse(f)}
    return own.union(*inherited)


def test_no_service_takes_more_than_ten_arguments():
    """Records, that is frozen dataclasses and NamedTuples, are exempt: they group what belongs together."""
    by_name = {node.name: node for _, node in classes()}
    records = {name for name, node in by_name.items() if "frozen=True" in (dataclass_options(node) or "")}
    larger = {name for name, node in by_name.items() if len(constructor_arguments(node, by_name)) > MOST_ARGUMENTS}
    assert not larger - records


def test_every_test_file_mirrors_a_source_file():
    tests = Path(__file__).parent
    elsewhere = {
        "test_architecture",
        "test_battery",
        "test_deployment",
        "test_examples",
        "test_docs",
        "test_gate",
        "test_malformed_frames",
        "test_malformed_frames_to_processes",
        "test_package",
        "test_paper_pages",
        "test_printed_code",
        "test_security",
        "test_security_sockets",
        "test_site",
    }
    for path in tests.rglob("test_*.py"):
        if path.stem in elsewhere or path.parent == tests / "benchmarks":  # these test no module of the package
            continue
        package, name = ROOT / path.parent.relative_to(tests), path.stem.removeprefix("test_")
        # Several files may test one module: test_acco_time.py tests acco.py.
        sources = [source for source in package.glob("*.py") if name == source.stem or name.startswith(f"{source.stem}_")]
        assert sources, f"{path.relative_to(tests)} tests no module of {package.relative_to(ROOT.parent)}"
