"""The examples in docstrings run, and show what they say."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "lightning_faulttolerant").rglob("*.py"))
    if "\n        >>> " in path.read_text(encoding="utf-8") or "\n    >>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example prints what its docstring shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # others can't enter the one of a suite, so it is always trusted
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
