"""Checks that the tests of each compat module share: whether the private names that it uses exist."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def missing(trainer: Any, path: str, seams: Mapping[str, str]) -> str | None:
    """Return what breaks without the name at `path`, or ``None`` if the name exists."""
    value = trainer
    for name in path.split(".")[1:]:
        if not hasattr(value, name):
            return f"This Lightning has no {path} (at {name!r}): {seams[path]} would break."
        value = getattr(value, name)
    return None


def private_names(module: ModuleType) -> set[str]:
    """Return each private name that the source of `module` reads, looks up by a literal, or defines as a method."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    methods = {
        node.name
        for c in ast.walk(tree)
        if isinstance(c, ast.ClassDef)
        for node in c.body
        if isinstance(node, ast.FunctionDef)
    }
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = touched | methods | {text for text in strings if text.isidentifier()}
    return {name for name in named if name.startswith("_") and not name.startswith("__")}
