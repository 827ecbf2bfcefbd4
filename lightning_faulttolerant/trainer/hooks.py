"""During a fit, Lightning skips the hooks that our callback leaves empty: each call would cost 3 microseconds.

Lightning enters a profiler context for each callback and hook, six times a step, but skips a hook that is not callable.

Whose function a hook is: the user's, Lightning's, ours, or the empty one that every callback and module inherits.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule

from lightning_faulttolerant.trainer.bases import is_empty_hook, is_lightnings
from lightning_faulttolerant.trainer.patches import Patches


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
