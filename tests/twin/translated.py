"""The tests of the suite once more, for ``pytorch_lightning``: translated as the package itself is.

``twin_tests.laws.test_ranks`` is ``tests/laws/test_ranks.py`` with the imports of the other package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_utilities.core import rank_zero

from lightning_faulttolerant.twin import Translation, TwinFinder

PACKAGE = "twin_tests"
_TESTS = Path(__file__).parents[1]
_NAMES = {
    "from tests": f"from {PACKAGE}",
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "lightning_faulttolerant.trainer": "lightning_faulttolerant.twin",
}


def _make_packages() -> None:
    """Create the packages that have no file: directories of tests are not packages on disk."""
    folders = [path for path in _TESTS.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    for path in (_TESTS, *folders):
        name = ".".join((PACKAGE, *path.relative_to(_TESTS).parts))
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = []


_make_packages()
TwinFinder(PACKAGE, str(_TESTS), Translation(_NAMES)).install()
importlib.import_module("lightning.pytorch")
_log = rank_zero.log
importlib.import_module("pytorch_lightning")
# The package that is imported last redirects the messages of both; other tests read Lightning's.
rank_zero.log = _log


def tests_of(name: str) -> dict[str, Any]:
    """Return the tests of a module, and its fixtures, for the other package.

    Args:
        name: The module, such as ``law.test_model``.
    """
    found = vars(importlib.import_module(f"{PACKAGE}.{name}"))
    return {key: value for key, value in found.items() if not key.startswith("__")}


def first_case(test: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the first case of a parametrized test."""
    arguments: dict[str, Any] = {}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
            first = next(iter(values))
            is_set = hasattr(first, "marks")  # of pytest.param
            arguments.update(zip(names, first.values if is_set else first if len(names) > 1 else [first], strict=True))
    return arguments
