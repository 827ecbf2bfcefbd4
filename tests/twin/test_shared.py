"""State that is unique in a process is shared by both packages, and modules for both load neither."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_faulttolerant
from lightning_faulttolerant.twin import SHARED, TRANSLATION, Translation, TwinFinder

TRAINER = Path(lightning_faulttolerant.__file__).parent / "trainer"
# Values that can change, and may exist twice, one for each package. By module, with the reason.
APART = {
    "ranks.compat.DDP_SEAMS": "never changes",
    "adapters.state._ADAPTERS": "never changes, and holds classes of its package",
    "run.changes._ARGUMENTS": "never changes",
    "files.loggers._last_steps": "by loggers of its package",
    "resume.restoring._stand_ins": "objects that are made for a Trainer of its package",
    "ranks.connection._open_sockets": "each module closes its own in a forked process",
    "ranks.connection._PROBES": "never changes",
    "ranks.connection._LEAVES": "never changes",
    "ranks.nodes._LENGTH": "never changes",
    "ranks.watch._DIED": "never changes",
    "ranks.strategies.REFUSED": "never changes, and holds classes of its package",
    "resume.loaded._STATES": "never changes",
    "save.run_state.TITLES": "never changes",
    "files.experiments._ADVICE": "never changes",
    "save.contents._PLACES": "never changes",
    "adapters.compat._CONNECTOR": "never changes",
}

FIXED = ("logging.", "re.", "frozenset", "tuple", "timedelta", "float", "TypeVar", "object")


def dotted(path: Path) -> str:
    """Return the name of a file in the package `trainer`."""
    return ".".join(path.relative_to(TRAINER).with_suffix("").parts).removesuffix(".__init__")


def changeable(source: str) -> list[str]:
    """Return the names of a module with changeable values: containers, created objects, names in `global`."""
    tree = ast.parse(source)
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or value is None:
            continue
        is_container = isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        is_fixed = called.startswith(
            ("logging.", "re.", "frozenset", "tuple", "timedelta", "float", "TypeVar", "object")
        )
        if is_container or (called and not is_fixed):
            found.append(target.id)
    return found


def test_what_a_process_has_once_is_shared() -> None:
    """No module that exists twice keeps a changeable value, except those that may exist per package."""
    apart = {
        f"{dotted(path)}.{name}"
        for path in TRAINER.rglob("*.py")
        if dotted(path) not in SHARED
        for name in changeable(path.read_text())
        if not name.endswith(("SEAMS", "__"))
    }
    assert apart <= set(APART), apart - set(APART)


def test_something_that_changes_is_found() -> None:
    """A dictionary, a new set, and a global are found; a pattern and a number are not."""
    source = "a = {}\nb: set[str] = set()\nc = re.compile('')\nd = 1\ndef f():\n    global e\n    e = 1"
    assert sorted(changeable(source)) == ["a", "b", "e"]


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_module_is_one(name: str) -> None:
    """Both names lead to one module, and it does not need Lightning."""
    ours = importlib.import_module(f"lightning_faulttolerant.trainer.{name}")
    assert importlib.import_module(f"lightning_faulttolerant.twin.{name}") is ours
    assert ours.__name__ == f"lightning_faulttolerant.trainer.{name}"


def test_the_others_are_two() -> None:
    """Each other module of the trainer exists once more, from the same file, with the names of the other package."""
    others = [dotted(path) for path in TRAINER.rglob("*.py") if dotted(path) not in (*SHARED, "__init__")]
    assert len(others) > 60
    for name in others:
        one = importlib.import_module(f"lightning_faulttolerant.trainer.{name}")
        other = importlib.import_module(f"lightning_faulttolerant.twin.{name}")
        assert one is not other
        assert one.__file__ == other.__file__
        named = [value for value in vars(other).values() if isinstance(value, type)]
        assert not [kind for kind in named if kind.__module__.startswith("lightning.")], name


def test_source_and_pickles_of_the_twin() -> None:
    """The twin's source is available, with the original's number of lines, and its classes go to other processes."""
    from lightning_faulttolerant.trainer.position import TrainerPosition
    from lightning_faulttolerant.twin import position  # type: ignore[attr-defined]

    assert inspect.getsource(position.TrainerPosition) == inspect.getsource(TrainerPosition)
    assert pickle.loads(pickle.dumps(position.TrainerPosition)) is position.TrainerPosition
    source = (TRAINER / "compat.py").read_text()
    assert len(TRANSLATION.translated(source).splitlines()) == len(source.splitlines())


def test_compiled_code_is_cached_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin has its own compiled code, beside that of the original, and reads it the second time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "source.py").write_text("import one.part as part\nname = part.__name__\n")
    for name in ("one", "one.part", "other", "other.part", "made"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    finder = TwinFinder("made", str(tmp_path), Translation({"one": "other"}))
    spec = finder.find_spec("made.source")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["other"].part = sys.modules["other.part"]  # type: ignore[attr-defined]
    try:
        for _ in range(2):
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            assert module.name == "other.part"
            [cached] = (tmp_path / "__pycache__").iterdir()
            assert cached.name.startswith("source-twin.")
            assert spec.loader.get_source("made.source").startswith("import other.part")  # type: ignore[attr-defined]
    finally:
        for name in ("one", "one.part", "other", "other.part", "made"):
            del sys.modules[name]
