"""The callback that ``PL_FAULT_TOLERANT_TRAINING=1`` adds to every Trainer, through an entry point."""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.trainer.early_stop import follow_trainer
from lightning_faulttolerant.trainer.environment import read_switch

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_ON = ("on", "manual")


def refuse_pytorch_lightning() -> list[Callback]:
    """Say to a Trainer of the ``pytorch_lightning`` package that it is not served, if fault tolerance is asked for.

    That Trainer calls this while it is built, through the entry point group ``pytorch_lightning.callbacks_factory``.

    Raises:
        UnsupportedTrainerError: If the environment asks for it, or the Trainer was given a `FaultTolerance`.
    """
    switch = read_switch()
    follow_trainer(is_on=switch in _ON)
    if switch in _ON:
        raise UnsupportedTrainerError(
            "PL_FAULT_TOLERANT_TRAINING asks for fault tolerance, but this Trainer comes from the pytorch_lightning"
            " package, which has classes of its own: nothing would be saved. Use `import lightning.pytorch as pl` in"
            " place of `import pytorch_lightning as pl`."
        )
    trainer = _trainer_being_built()
    if trainer is not None and switch != "off":
        from lightning_faulttolerant.trainer.callback import FaultTolerance  # noqa: PLC0415, RUF100
        from lightning_faulttolerant.trainer.ranks.supported import check_package  # noqa: PLC0415, RUF100

        if any(isinstance(callback, FaultTolerance) for callback in trainer.callbacks):
            check_package(trainer)
    return []


def _trainer_being_built() -> Any:
    """Return the Trainer of the other package whose constructor this is called from, or None.

    No argument says it, and a later hook is too late: with 2.5 the constructor fails for a callback that is not of its
    package, with nothing but "Expected a parent".
    """
    package = sys.modules.get("pytorch_lightning")
    frame = inspect.currentframe()
    while frame is not None and package is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, package.Trainer):
            return found
        frame = frame.f_back
    return None


def callbacks_from_environment() -> list[Callback]:
    """Return the callbacks to add to a Trainer that is being built.

    Lightning calls this once per Trainer, through the entry point group ``lightning.pytorch.callbacks_factory``.

    Raises:
        ValueError: If the variable has a value that means nothing.
    """
    switch = read_switch()
    # A run that is switched off is to be compared with one that is not.
    writes_ledger = switch == "off" and bool(os.environ.get(LEDGER_VARIABLE))
    follow_trainer(is_on=switch in _ON)
    if switch not in _ON and not writes_ledger:
        return []
    from lightning_faulttolerant.trainer.callback import FaultTolerance  # noqa: PLC0415, RUF100

    callback = FaultTolerance()
    callback.is_from_environment = True
    return [callback]
