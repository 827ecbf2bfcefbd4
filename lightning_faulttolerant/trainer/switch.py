"""The callback that ``PL_FAULT_TOLERANT_TRAINING=1`` adds to every Trainer, through an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.trainer.environment import read_switch

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_ON = ("on", "manual")


def refuse_pytorch_lightning() -> list[Callback]:
    """Say to a Trainer of the ``pytorch_lightning`` package that it is not served, if the environment asks for it.

    Raises:
        UnsupportedTrainerError: If it does.
    """
    if read_switch() in _ON:
        raise UnsupportedTrainerError(
            "PL_FAULT_TOLERANT_TRAINING asks for fault tolerance, but this Trainer comes from the pytorch_lightning"
            " package, which has classes of its own: nothing would be saved. Use `import lightning.pytorch as pl` in"
            " place of `import pytorch_lightning as pl`."
        )
    return []


def callbacks_from_environment() -> list[Callback]:
    """Return the callbacks to add to a Trainer that is being built.

    Lightning calls this once per Trainer, through the entry point group ``lightning.pytorch.callbacks_factory``.

    Raises:
        ValueError: If the variable has a value that means nothing.
    """
    if read_switch() not in _ON:
        return []
    from lightning_faulttolerant.trainer.callback import FaultTolerance  # noqa: PLC0415, RUF100

    callback = FaultTolerance()
    callback.is_from_environment = True
    return [callback]
