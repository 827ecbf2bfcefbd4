"""Whose function a hook is: the user's, Lightning's, ours, or the empty one that every callback and module inherits."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_faulttolerant.trainer.bases import is_empty_hook, is_lightnings


def overridden(owner: Any, hook: str) -> Any:
    """Return the function of a hook, unless it is the empty one, or `owner` has no such hook."""
    function = getattr(owner, hook, None)
    function = getattr(function, "__func__", function)
    is_modules = isinstance(owner, LightningModule)
    is_empty = function is getattr(LightningModule, hook) if is_modules else is_empty_hook(function, hook)
    return None if is_empty else function


def is_lightnings_function(function: Any) -> bool:
    """Return whether Lightning defines `function`."""
    return is_lightnings(getattr(function, "__module__", ""))


def is_users_function(function: Any) -> bool:
    """Return whether neither Lightning nor this package defines `function`."""
    return not is_lightnings_function(function) and not is_our_function(function)


def is_our_function(function: Any) -> bool:
    """Return whether this package defines `function`."""
    return str(getattr(function, "__module__", "")).startswith("lightning_faulttolerant.")
