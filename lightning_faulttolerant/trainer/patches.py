"""Replacements of methods on single objects, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Replacements of methods on single objects, undone all at once."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method `name` of `owner` by what `make` returns for it."""
        self.replace(owner, name, make(getattr(owner, name)))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace the attribute `name` of `owner` by `value`."""
        had_own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append((lambda: setattr(owner, name, original)) if had_own else (lambda: delattr(owner, name)))

    def undo(self) -> None:
        """Put everything back, the last replacement first."""
        while self._undo:
            self._undo.pop()()
