"""The string literals in the sources of the package: the texts that it may print."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from tests.docs.pages import ROOT


@functools.cache
def messages() -> list[str]:
    """Return all texts of the package except docstrings; a value inside a text is a separate line in it."""
    return [
        text
        for path in (ROOT / "lightning_faulttolerant").rglob("*.py")
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
    ]


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = _text(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _text(node: ast.AST) -> str | None:
    """Return the text of a node, with an empty line for each value in it, or `None` if it is not a text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "\n\n" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else f"{left or chr(10)}{right or chr(10)}"
    return None
