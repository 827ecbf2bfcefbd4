"""Replacements of methods on single objects, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback


class Patches:
    """Replacements of methods on single objects, undone all at once."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method `name` of `owner` by what `make` returns for it."""
        replacement = make(getattr(owner, name))
        # Scripts copy callbacks in the middle of a fit, to train another model with them.
        is_copied = isinstance(owner, Callback)
        self.replace(owner, name, _ReplacedMethod(owner, name, replacement) if is_copied else replacement)

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


def then(follow: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a method that calls the original one, and `follow` after it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method() -> None:
            original()
            follow()

        return method

    return wrap


class _ReplacedMethod:
    """What stands in the place of a method; a deep copy of its owner has that method of its own instead."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner))
        return self if copied is None else getattr(type(copied), self._name).__get__(copied)
