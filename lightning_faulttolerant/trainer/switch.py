"""The callback that ``PL_FAULT_TOLERANT_TRAINING=1`` adds to every Trainer, through an entry point.

It also decides who handles SLURM's notice while a Trainer is built: without the callback, Lightning does. Lightning
leaves SIGUSR1 alone if it finds a handler, so ours must be gone by then.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING

from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.trainer.process import read_switch, without_collections

if TYPE_CHECKING:
    from lightning_faulttolerant.trainer.callback import FaultTolerance


_ON = ("on", "manual")


def callbacks_from_environment() -> list[FaultTolerance]:
    """Return the callbacks to add to a Trainer that is being built: the environment's, and those inside others.

    Each of Lightning's packages calls this once per Trainer, through its own entry point group.

    Raises:
        ValueError: If the variable has an unknown value.
    """
    switch = read_switch()
    # A run that is switched off writes a ledger to be compared with one that is on.
    writes_ledger = switch == "off" and bool(os.environ.get(LEDGER_VARIABLE))
    held = follow_trainer(is_on=switch in _ON)
    if switch not in _ON and not writes_ledger:
        return held
    with without_collections():
        from lightning_faulttolerant.trainer.callback import FaultTolerance  # noqa: PLC0415, RUF100

        callback = FaultTolerance()
    callback.is_from_environment = True
    return [*held, callback]


_TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def follow_trainer(*, is_on: bool) -> list[FaultTolerance]:
    """Handle the notice for a Trainer that is being built with the callback. Otherwise give the signal back.

    Args:
        is_on: Whether the environment adds the callback.

    Returns:
        The callbacks of ours that other callbacks of the Trainer hold, in an attribute or in a list there.
    """
    callbacks = getattr(_trainer_being_built(), "callbacks", [])
    values = (value for callback in callbacks for value in vars(callback).values())
    parts = (each for value in values for each in (value if isinstance(value, (list, tuple)) else [value]))
    held = [each for each in parts if _is_ours(each)]
    if is_on or any(_is_ours(each) for each in (*callbacks, *held)):
        EARLY.begin(os.environ, fit_follows=True)
    else:
        EARLY.give_back()
    return [each for each in held if not any(each is callback for callback in callbacks)]


def _is_ours(value: object) -> bool:
    module = sys.modules.get("lightning_faulttolerant.trainer.callback")
    return module is not None and isinstance(value, module.FaultTolerance)


def _trainer_being_built() -> object:
    """Return the Trainer that is being built, read from the stack: no argument holds it."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if any(kind.__module__ in _TRAINERS and kind.__name__ == "Trainer" for kind in type(found).__mro__):
            return found
        frame = frame.f_back
    return None
