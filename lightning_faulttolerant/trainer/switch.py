"""The callback that ``PL_FAULT_TOLERANT_TRAINING=1`` adds to every Trainer, through an entry point."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.trainer.settings.environment import read_switch
from lightning_faulttolerant.trainer.stop.early_stop import follow_trainer

if TYPE_CHECKING:
    from lightning_faulttolerant.trainer.callback import FaultTolerance

_ON = ("on", "manual")


def callbacks_from_environment() -> list[FaultTolerance]:
    """Return the callbacks to add to a Trainer that is being built.

    Each of Lightning's packages calls this once per Trainer, through its own entry point group.

    Raises:
        ValueError: If the variable has an unknown value.
    """
    switch = read_switch()
    # A run that is switched off writes a ledger to be compared with one that is on.
    writes_ledger = switch == "off" and bool(os.environ.get(LEDGER_VARIABLE))
    follow_trainer(is_on=switch in _ON)
    if switch not in _ON and not writes_ledger:
        return []
    from lightning_faulttolerant.trainer.callback import FaultTolerance  # noqa: PLC0415, RUF100

    callback = FaultTolerance()
    callback.is_from_environment = True
    return [callback]
