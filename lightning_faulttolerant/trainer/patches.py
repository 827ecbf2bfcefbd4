"""Replacements of methods on single objects that leave no trace once undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

Method = Callable[..., Any]


class Patches:
    """Replacements of methods on single objects, all undone together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: object, name: str, make: Callable[[Method], Method]) -> None:
        """Replace the method `name` of `owner` by the result of `make` for it."""
        replacement = make(getattr(owner, name))
        # Scripts copy callbacks in the middle of a fit, to train another model with them.
        is_copied = isinstance(owner, Callback)
        self.replace(owner, name, _ReplacedMethod(owner, name, replacement) if is_copied else replacement)

    def around(self, owner: object, name: str, wrapper: Method) -> None:
        """Let `wrapper` run instead of the method `name` of `owner`. It takes that method, and then its arguments."""
        self.wrap(owner, name, lambda original: lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replace the attribute `name` of `owner` by `value`."""
        had_own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append((lambda: setattr(owner, name, original)) if had_own else (lambda: delattr(owner, name)))

    def undo(self) -> None:
        """Undo all replacements, the last one first."""
        while self._undo:
            self._undo.pop()()


def then(follow: Callable[[], None]) -> Callable[[Method], Method]:
    """Return a wrapper for a method that calls the original method, and `follow` after it."""

    def wrap(original: Method) -> Method:
        def method() -> None:
            original()
            follow()

        return method

    return wrap


class _ReplacedMethod:
    """The replacement of a method. A deep copy of the owner has its own original method instead."""

    def __init__(self, owner: object, name: str, replacement: Callable[..., object]) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        copied = memo.get(id(self._owner))
        return self if copied is None else getattr(type(copied), self._name).__get__(copied)
