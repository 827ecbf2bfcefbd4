"""The package keeps its layers: which part imports which, which part may use Lightning, and how long things may get.

A module of the tests imports from no test.

The checks are functions of a mapping from path to source, so that each is also run on a source that breaks it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "lightning_faulttolerant"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# From top to bottom, as in docs and design: a module imports its own layer and those below. Lightning stops at trainer.
LAYERS = (
    ("__init__", "__main__"),
    ("cli", "testing"),
    ("trainer",),
    ("twin",),  # the trainer package once more; only its names are defined
    ("checkpoint",),
    ("loader",),
    ("state",),
    ("samplers",),
    ("streaming",),
    ("supervision",),
    ("storage",),
    ("errors", "processes", "records"),
    ("clock", "early_signals"),
)
LEVEL = {part: level for level, parts in enumerate(reversed(LAYERS)) for part in parts}

# What each part may import besides the standard library.
THIRD_PARTY = {
    "__init__": set(),
    "__main__": set(),
    "cli": {"torch", "fsspec"},
    "testing": {"torch", "torchmetrics", "fsspec"},
    "trainer": {"lightning", "torch", "torchmetrics", "fsspec"},
    "checkpoint": {"torch", "fsspec"},
    "loader": {"torch"},
    "state": {"torch", "torchmetrics"},
    "samplers": {"torch"},
    "streaming": {"torch", "fsspec", "numpy"},  # numpy comes with torchmetrics: docs/decisions/0023
    "clock": set(),
    "early_signals": set(),
    "storage": {"fsspec"},
    "supervision": set(),
    "errors": set(),
    "processes": set(),
    "records": set(),
    "twin": set(),
}
# The second copy of the trainer package is created with these names. Only annotations may import them.
OF_THE_TWIN = {"lightning_fabric", "pytorch_lightning"}
# Not declared as dependencies: imported when needed, never when a module is loaded.
OPTIONAL = {"aiohttp", "numpy", "omegaconf", "rich"}

# Class names that stand more than once in one module, and why. A name never stands in two modules.
DEFINED_TWICE = {
    "AnyCallback": "one definition is for types, the other one for running",
    "AnyCheckpointIO": "one definition is for types, the other one for running",
}

Sources = dict[Path, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, with the facts that the checks need."""

    line: int
    module: str
    name: str | None
    at_load: bool
    for_types: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def sources(root: Path) -> Sources:
    """Return the sources in a directory by their paths relative to it."""
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Return a parsed source, for all checks."""
    return ast.parse(source)


def part_of(path: Path) -> str:
    """Return the first name under the package: that of a subpackage, or of a module at the top."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def module_of(path: Path) -> str:
    """Return the dotted name that imports a file."""
    names = path.with_suffix("").parts
    return ".".join((PACKAGE, *(names[:-1] if names[-1] == "__init__" else names)))


def imports_of(source: str) -> Iterator[Import]:
    """Yield every import of a module: statements anywhere in it, and `import_module` of a literal name.

    Relative ones are refused by ruff.
    """

    def visit(node: ast.AST, *, at_load: bool, for_types: bool) -> Iterator[Import]:
        at = {"line": getattr(node, "lineno", 0), "at_load": at_load, "for_types": for_types}
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name, name=None, **at) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(module=node.module or "", name=alias.name, **at) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(module=str(name), name=None, **at) for name in names)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Try)):
            at_load = False
        guarded: list[ast.stmt] = []
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            guarded = node.body
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load=at_load, for_types=for_types or child in guarded)

    yield from visit(tree_of(source), at_load=True, for_types=False)


def target_of(found: Import, modules: set[str]) -> str:
    """Return the module that an import of our package names: `from a import b` may mean module `a.b`."""
    full = f"{found.module}.{found.name}"
    return full if full in modules else found.module


def upward_imports(files: Sources) -> Iterator[str]:
    """Yield imports of a layer above, or of a neighbor in the same layer; a part without a layer is a KeyError."""
    modules = {module_of(path) for path in files}
    for path, source in files.items():
        part = part_of(path)
        level = LEVEL[part]
        for found in imports_of(source):
            if found.top != PACKAGE:
                continue
            names = target_of(found, modules).split(".")
            other = names[1] if len(names) > 1 else "__init__"
            if LEVEL[other] > level or (LEVEL[other] == level and other != part):
                yield f"{path}:{found.line} ({part}) imports {'.'.join(names)}, which is not below it"


def foreign_imports(files: Sources) -> Iterator[str]:
    """Yield imports of packages that the part may not use, and of optional ones that loading the module would need."""
    for path, source in files.items():
        part = part_of(path)
        for found in imports_of(source):
            top = found.top
            if top == PACKAGE or top in sys.stdlib_module_names or top in THIRD_PARTY[part]:
                continue
            if part == "trainer" and top in OF_THE_TWIN and found.for_types:
                continue
            if top not in OPTIONAL:
                yield f"{path}:{found.line} ({part}) imports {found.module}"
            elif found.at_load and not found.for_types:
                yield f"{path}:{found.line} imports {top}, which is optional, when it is loaded"


def import_cycles(files: Sources) -> Iterator[str]:
    """Yield modules that import each other, not counting imports for annotations."""
    modules = {module_of(path) for path in files}
    graph = {
        module_of(path): {
            target_of(found, modules) for found in imports_of(source) if found.top == PACKAGE and not found.for_types
        }
        for path, source in files.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield " <- ".join(error.args[1])


def private_lightning_names(files: Sources) -> Iterator[str]:
    """Yield each place in trainer/ outside compat.py that reads, or looks up by a literal, a foreign private name."""
    for path, source in files.items():
        if part_of(path) != "trainer" or path.name == "compat.py":
            continue
        for found in imports_of(source):
            names = [*found.module.split("."), found.name or ""]
            if found.top == "lightning" and any(is_private(name) for name in names):
                yield f"{path}:{found.line} imports {'.'.join(filter(None, names))} outside compat.py"
        for node in ast.walk(tree_of(source)):
            name, owner = private_access(node)
            if is_private(name) and not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield f"{path}:{node.lineno} touches .{name} outside compat.py"


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_access(node: ast.AST) -> tuple[str, ast.AST | None]:
    """Return the name that a node reads from an object, and the object: `x.name` or `getattr(x, "name")`."""
    if isinstance(node, ast.Attribute):
        return node.attr, node.value
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ):
        return str(node.args[1].value), node.args[0]
    return "", None


def long_files(files: Sources) -> Iterator[str]:
    """Yield files that are too long to read."""
    for path, source in files.items():
        num_lines = len(source.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"


def long_functions(files: Sources) -> Iterator[str]:
    """Yield functions that do not fit on a screen."""
    for path, source in files.items():
        for node in ast.walk(tree_of(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def names_given_twice(files: Sources) -> Iterator[str]:
    """Yield class names that stand for two classes, nested ones and those in functions included."""
    places: dict[str, list[Path]] = {}
    for path, source in files.items():
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    for name, paths in places.items():
        if len(paths) > 1 and (name not in DEFINED_TWICE or len(set(paths)) > 1):
            yield f"the class name {name} stands in {', '.join(map(str, paths))}"


def imports_of_tests(files: Sources) -> Iterator[str]:
    """Yield imports of a test module or of a name in one: what several tests need is in a module that is no test."""
    for path, source in files.items():
        if not re.search(r"^\s*(from|import) .*\btest_|\.test_|import test_", source, re.MULTILINE):
            continue  # not worth parsing
        for found in imports_of(source):
            if any(name.startswith("test_") for name in (*found.module.split("."), found.name or "")):
                yield f"{path}:{found.line} imports {'.'.join(filter(None, [found.module, found.name]))}, of a test"


CHECKS = [
    upward_imports,
    foreign_imports,
    import_cycles,
    private_lightning_names,
    long_files,
    long_functions,
    names_given_twice,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_passes(check: Callable[[Sources], Iterator[str]]) -> None:
    """The package breaks no rule of its layers."""
    files = sources(Path(__file__).parents[1] / PACKAGE)
    assert files
    assert list(check(files)) == []


def test_no_test_imports_from_another() -> None:
    """What several tests need is in modules that are no tests."""
    files = sources(Path(__file__).parent)
    assert Path("laws/test_which_run.py") in files
    assert list(imports_of_tests(files)) == []


def function_of(num_lines: int) -> str:
    """Return the source of a function of `num_lines` lines."""
    return "def f():\n" + "    pass\n" * (num_lines - 1)


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
BROKEN = [
    (upward_imports, {"state/rng.py": f"from {PACKAGE}.loader.ring import Ring"}),
    (upward_imports, {"loader/ring.py": f"from {PACKAGE} import FaultTolerance"}),
    (upward_imports, {"errors.py": f"{FOR_TYPES}import {PACKAGE}.state"}),
    (upward_imports, {"state/rng.py": f"importlib.import_module('{PACKAGE}.trainer')"}),
    (foreign_imports, {"testing/exactness.py": "def f():\n    import lightning.pytorch"}),
    (foreign_imports, {"state/rng.py": "import numpy as np"}),
    (import_cycles, {"state/a.py": f"from {PACKAGE}.state import b", "state/b.py": f"from {PACKAGE}.state.a import x"}),
    (private_lightning_names, {"trainer/callback.py": "trainer._checkpoint_connector"}),
    (private_lightning_names, {"trainer/callback.py": "getattr(trainer, '_results')"}),
    (private_lightning_names, {"trainer/callback.py": "from lightning.pytorch.loops.fetchers import _DataFetcher"}),
    (long_files, {"errors.py": "\n" * (MAX_FILE_LINES + 1)}),
    (long_functions, {"errors.py": function_of(MAX_FUNCTION_LINES + 1)}),
    (names_given_twice, {"loader/a.py": "class Ring:\n    class At: ...", "state/b.py": "def f():\n    class At: ..."}),
    (names_given_twice, {"trainer/a.py": "class AnyCallback: ...", "trainer/b.py": "class AnyCallback: ..."}),
    (imports_of_tests, {"laws/test_pace.py": "from tests.laws.test_which_run import Waits"}),
    (imports_of_tests, {"runs.py": "importlib.import_module('tests.laws.test_faults')"}),
]
ALLOWED = {
    "checkpoint/series.py": f"from {PACKAGE}.errors import CheckpointError\nimport fsspec",
    "cli.py": "\n" * MAX_FILE_LINES,
    "errors.py": function_of(MAX_FUNCTION_LINES),
    "state/__init__.py": f"from {PACKAGE}.state.a import x",
    "state/a.py": f"from {PACKAGE}.state import b",
    "state/b.py": "def f():\n    import numpy as np",
    "state/rng.py": f"{FOR_TYPES}import numpy as np",
    "trainer/bases.py": f"{FOR_TYPES}class AnyCallback: ...\nelse:\n    class AnyCallback: ...",
    "trainer/callback.py": f"from {PACKAGE}.checkpoint import series\nimport lightning.pytorch\nself._a\nx.__class__",
    "trainer/compat.py": "trainer._results\nfrom lightning.x import _y",
    "trainer/twin.py": f"{FOR_TYPES}from pytorch_lightning import Callback",
}


@pytest.mark.parametrize(("check", "files"), BROKEN)
def test_a_check_finds_the_fault(check: Callable[[Sources], Iterator[str]], files: dict[str, str]) -> None:
    """Each check reports exactly one fault in a source that breaks its rule."""
    assert len(list(check({Path(path): source for path, source in files.items()}))) == 1


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_objects_to_what_is_allowed(check: Callable[[Sources], Iterator[str]]) -> None:
    """No check reports a fault in sources that keep the rules."""
    assert list(check({Path(path): source for path, source in ALLOWED.items()})) == []
