"""Replacements of methods on single objects that leave no trace once undone.

During a fit, Lightning skips the hooks that our callback leaves empty: each call would cost 3 microseconds. Lightning
enters a profiler context for each callback and hook, six times a step, but skips a hook that is not callable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lightning_faulttolerant.trainer.bases import is_empty_hook, is_lightnings

Method = Callable[..., Any]


class Patches:
    """Replacements of methods on single objects, all undone together."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

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
        if had_own:
            self._undo.callback(setattr, owner, name, original)
        else:
            self._undo.callback(delattr, owner, name)

    def undo(self) -> None:
        """Undo all replacements, the last one first. An error of one is raised after all others are undone."""
        self._undo.close()


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

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        copied = memo.get(id(self._owner))
        return self if copied is None else getattr(type(copied), self._name).__get__(copied)


def overridden(owner: object, hook: str) -> object:
    """Return the function of a hook, unless it is the empty one, or `owner` has no such hook."""
    function = getattr(owner, hook, None)
    function = getattr(function, "__func__", function)
    is_modules = isinstance(owner, LightningModule)
    is_empty = function is getattr(LightningModule, hook) if is_modules else is_empty_hook(function, hook)
    return None if is_empty else function


def is_lightnings_function(function: object) -> bool:
    """Return whether Lightning defines `function`."""
    return is_lightnings(getattr(function, "__module__", ""))


def is_users_function(function: object) -> bool:
    """Return whether neither Lightning nor this package defines `function`."""
    return not is_lightnings_function(function) and not is_our_function(function)


def is_our_function(function: object) -> bool:
    """Return whether this package defines `function`."""
    return str(getattr(function, "__module__", "")).startswith("lightning_faulttolerant.")


PER_BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)


def pass_over_idle_hooks(callback: Callback, patches: Patches) -> None:
    """Let Lightning skip the batch hooks that `callback` inherits unchanged. A subclass may override some."""
    for name in PER_BATCH_HOOKS:
        if is_empty_hook(getattr(type(callback), name), name):
            patches.replace(callback, name, None)
