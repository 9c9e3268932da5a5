"""What a source uses that may execute its input, or listen on all interfaces, under whatever name it imports it.

Names are resolved as the interpreter would: `import torch as t`, `from torch import load as read`, `t = torch`, getattr and
import_module with a name that the source spells out. If the source computes such a name, or hands a module on as a value, then what
it uses is not known, and that is a finding, too.
"""

import ast
import builtins
import re
from collections.abc import Iterator

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Their readers execute what they read."""
TORCH = {
    "torch.distributed.elastic": "its launcher unpickles what it finds in its store",
    "torch.distributed.launcher": "its launcher unpickles what it finds in its store",
    "torch.distributed.checkpoint.state_dict_saver": "it gathers pickled objects",
    "torch.distributed.checkpoint.state_dict_loader": "it unpickles the index of a checkpoint",
    "torch.distributed.rpc": "it unpickles functions",
    "torch.hub": "it executes what it downloads",
    "torch.jit": "its archives hold code",
    "torch.package": "its archives hold code",
    "torch.multiprocessing": "its queues unpickle",
    "multiprocessing": "its queues and listeners unpickle",
    "runpy": "it executes files",
    "code": "it executes text",
}
FUNCTIONS = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "torch.load"),
    *(f"torch.distributed.checkpoint.{name}" for name in ("load", "save", "async_save", "load_state_dict", "save_state_dict")),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "importlib.util.module_from_spec", "sys.modules"),
}
SAME = {"torch.serialization.": "torch.", "posix.": "os.", "builtins.": "", "_yaml.": "yaml."}
"""Second names of these functions."""
LISTENERS = {"rendezvous", "TCPStore"}
"""torch's functions that open a store, on all interfaces where they are told to."""
KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}
READS_MODELS = (".from_pretrained", ".from_config")
"""Of transformers: without a word on a model's code they ask the user whether to run it."""
_WATCHED = {"importlib", "os", "posix", "subprocess", "yaml", "torch", "torch.distributed", "torch.serialization", "builtins"}
"""Modules that have dangerous functions beside others."""


def dangers(source: str) -> list[str]:
    """What a source uses, in the order of its first use."""
    return list(dict.fromkeys(name for _, name in sorted(_Source(source).found(), key=lambda one: one[0])))


class _Source:
    def __init__(self, text: str) -> None:
        self._nodes = list(ast.walk(ast.parse(text)))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._bound: dict[str, set[str]] = {}
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self._own = {node.name for node in self._nodes if isinstance(node, functions) and not self._is_in_class(node)}
        """Functions, classes and variables of the source itself."""
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._bind(
                        alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")
        self._follow_assignments()

    def _is_in_class(self, node: ast.AST) -> bool:
        """Whether it is a method or a class's attribute, which hides no name."""
        return isinstance(self._parents.get(node), ast.ClassDef)

    def _bind(self, name: str, *values: str) -> bool:
        known = self._bound.setdefault(name, set())
        new = not known.issuperset(values)
        known.update(values)
        return new

    def _follow_assignments(self) -> None:
        """Bind `t` by `t = torch`, until no name is new."""
        pairs = []
        for node in self._nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                pairs += [(target.id, node.value, self._is_in_class(node)) for target in targets if isinstance(target, ast.Name)]
        self._own |= {name for name, value, in_class in pairs if not in_class and not self._names(value)}
        new = True
        while new:
            bound = [self._bind(name, *values) for name, value, _ in pairs if (values := self._names(value))]
            new = any(bound)

    def _names(self, node: ast.AST) -> set[str]:
        """The full names that an expression may stand for; none if it is a value of the program's own."""
        if isinstance(node, ast.Name):
            if node.id in self._bound:
                return self._bound[node.id]
            hidden = node.id in self._own or self._is_parameter(node)
            return {node.id} if hasattr(builtins, node.id) and not hidden else set()
        if isinstance(node, ast.Attribute):
            return {_canonical(f"{name}.{node.attr}") for name in self._names(node.value)}
        if isinstance(node, ast.Call) and node.args:
            given = [one.value if isinstance(one, ast.Constant) else None for one in node.args]
            called = self._names(node.func)
            if called & {"importlib.import_module", "__import__"} and isinstance(given[0], str):
                return {given[0]}
            if "getattr" in called and len(given) > 1 and isinstance(given[1], str):
                return {_canonical(f"{name}.{given[1]}") for name in self._names(node.args[0])}
        return set()

    def _is_parameter(self, name: ast.Name) -> bool:
        node: ast.AST | None = name
        while (node := self._parents.get(node)) is not None:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = node.args
                everything = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
                if name.id in {one.arg for one in everything}:
                    return True
        return False

    def found(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Each dangerous name, with its place."""
        for node in self._nodes:
            place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
            yield from ((place, name) for name in self._found_in(node))

    def _found_in(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in _modules(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (name for alias in node.names for name in _modules(f"{node.module}.{alias.name}"))
            yield from (alias.name for alias in node.names if _is_object_collective(alias.name))
            yield from (f"{node.module}.*" for alias in node.names if alias.name == "*" and not node.level)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            yield from self._found_in_reference(node)
        elif isinstance(node, ast.Call):
            yield from self._found_in_call(node)

    def _found_in_reference(self, node: ast.Name | ast.Attribute) -> Iterator[str]:
        parent, names = self._parents[node], self._names(node)
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        if isinstance(node, ast.Attribute) and (_is_object_collective(node.attr) or (call and node.attr in LISTENERS)):
            yield node.attr
        if isinstance(parent, ast.Attribute):  # a part of a longer name
            yield from (name for name in names if name in FUNCTIONS)
            return
        for name in names:
            yield from self._found_in_name(name, call)
            if name in _WATCHED and not self._is_followed(node):
                yield f"{name} as a value"
            if name.startswith("torch.") and name.rpartition(".")[2] in LISTENERS:
                yield name.rpartition(".")[2]

    def _found_in_name(self, name: str, call: ast.Call | None) -> Iterator[str]:
        yield from _modules(name)
        computed = call is None or not self._names(call)
        if name in {"importlib.import_module", "__import__"} and not computed:
            return  # the module that it names is what counts
        if name == "torch.load" and call is not None and _given(call).get("weights_only") == "True":
            return
        if name in FUNCTIONS:
            yield name

    def _is_followed(self, node: ast.expr) -> bool:
        """Whether `_names` goes on behind this name of a module."""
        parent = self._parents[node]
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return all(isinstance(target, ast.Name) for target in targets)
        return isinstance(parent, ast.Call) and bool(self._names(parent) or "hasattr" in self._names(parent.func))

    def _found_in_call(self, node: ast.Call) -> Iterator[str]:
        for name in self._names(node):  # getattr(torch, "load"), import_module("pickle")
            outer = self._parents.get(node)
            yield from self._found_in_name(name, outer if isinstance(outer, ast.Call) and outer.func is node else None)
            last = name.rpartition(".")[2]
            if _is_object_collective(last) or last in LISTENERS:
                yield last
        given = _given(node)
        yield from (word for word in sorted(KEYWORDS) if given.get(word, "False") != "False")
        if "trust_remote_code" not in given:
            called = self._names(node.func) or {ast.unparse(node.func)}
            yield from (name for name in called if name.startswith("transformers.") and name.endswith(READS_MODELS))
        if "numpy.load" in self._names(node.func) and len(node.args) > 2:
            yield "allow_pickle"


def _given(call: ast.Call) -> dict[str, str]:
    """The keywords of a call, those of a literal behind ** included."""
    found = {one.arg: ast.unparse(one.value) for one in call.keywords if one.arg is not None}
    for one in call.keywords:
        if one.arg is None and isinstance(one.value, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in one.value.keys]
            found |= {str(key): ast.unparse(value) for key, value in zip(keys, one.value.values, strict=True)}
    return found


def _canonical(name: str) -> str:
    for second, first in SAME.items():
        if name.startswith(second):
            return first + name.removeprefix(second)
    return name


def _modules(name: str) -> Iterator[str]:
    """The dangerous modules that a full name is, or lies in."""
    for module in (*MODULES, *TORCH):
        if name == module or name.startswith(f"{module}."):
            yield module


def _is_object_collective(name: str) -> bool:
    return re.fullmatch(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?", name) is not None
