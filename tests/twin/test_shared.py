"""State that is unique in a process is shared by both packages, and modules for both load neither."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
from pathlib import Path

import pytest

import lightning_faulttolerant
from lightning_faulttolerant.twin import SHARED, TRANSLATION

TRAINER = Path(lightning_faulttolerant.__file__).parent / "trainer"
# Values that may exist twice, one for each package, for they belong to one of them.
APART = {"files.loggers._last_steps", "resume.restoring._stand_ins", "ranks.connection._open_sockets", "log._package"}


def dotted(path: Path) -> str:
    """Return the name of a file in the package `trainer`."""
    return ".".join(path.relative_to(TRAINER).with_suffix("").parts).removesuffix(".__init__")


def variables(source: str) -> set[str]:
    """Return the names of a module's values that aren't constants by their name, and the names in `global`."""
    tree = ast.parse(source)
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    targets = {target for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])}
    return found | {target.id for target in targets if isinstance(target, ast.Name) and target.id.islower()}


def test_what_a_process_has_once_is_shared() -> None:
    """No module that exists twice keeps a changeable value, except those that may exist per package."""
    found = {
        f"{dotted(path)}.{name}"
        for path in TRAINER.rglob("*.py")
        if dotted(path) not in SHARED
        for name in variables(path.read_text())
        if name != "_log" and not name.startswith("__")
    }
    assert found - APART == set()


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
