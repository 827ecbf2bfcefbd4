"""User state on objects of Lightning: functions that these objects hold, and attributes of the Trainer."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.state.objects.users import is_librarys, names_in_code

_TRAINERS = ("lightning.pytorch.trainer", "lightning.pytorch.loops")


def functions_of(trainer: Trainer, callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return the functions that schedulers and Lightning's own callbacks hold, by path: they may keep state.

    Args:
        trainer: The trainer that runs the fit.
        callbacks: The callbacks, by name.
    """
    owners: dict[str, Any] = {f"schedulers[{i}]": c.scheduler for i, c in enumerate(trainer.lr_scheduler_configs)}
    owners.update({name: one for name, one in callbacks.items() if is_librarys(type(one))})
    held = ((f"{path}.{name}", value) for path, owner in owners.items() for name, value in vars(owner).items())
    found: dict[str, Any] = {}
    for path, value in held:
        values = value if isinstance(value, list) else [value]
        found.update({f"{path}[{i}]": one for i, one in enumerate(values) if isinstance(one, types.FunctionType)})
    return found


@functools.cache
def names_of_trainers() -> frozenset[str]:
    """Return every name that Lightning's own code for trainers uses. A trainer's attributes are among them."""
    return names_in_code(_functions())


def _functions() -> Iterator[Any]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_TRAINERS)]
    for value in [value for module in modules for value in vars(module).values()]:
        yield value
        if isinstance(value, type):
            yield from vars(value).values()
