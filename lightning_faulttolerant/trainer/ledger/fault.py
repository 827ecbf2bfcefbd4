"""The fault of a drill: an exception with its own class, at a place that the environment names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import DrillFault
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, FaultPlace
from lightning_faulttolerant.trainer.compat import num_completed
from lightning_faulttolerant.trainer.ledger.compat import logger_connector
from lightning_faulttolerant.trainer.patches import Patches

Method = Callable[..., Any]

# How often torchrun has restarted the ranks, as its documentation says.
_RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def read_fault() -> FaultPlace | None:
    """Return the place at which the environment requests a fault, if it does.

    Raises:
        ValueError: If it does not name a place.
    """
    text = os.environ.get(FAULT_VARIABLE)
    if not text:
        return None
    places = [FaultPlace.parse(place) for place in text.split(",")]
    num_restarts = int(os.environ.get(_RESTARTS_VARIABLE, "0"))
    return places[num_restarts] if num_restarts < len(places) else None


class Fault:
    """Raises an exception in a fit. It does so once per process: no other fit of the process has the number.

    Args:
        trainer: The trainer of the fit.
        place: The place of the fault.
    """

    def __init__(self, trainer: Trainer, place: FaultPlace) -> None:
        self._trainer = trainer
        self._place = place

    def take_seams(self, patches: Patches) -> None:
        """Begin to watch for the place."""
        trainer, hook = self._trainer, self._place.hook
        epoch_loop = trainer.fit_loop.epoch_loop
        if hook == "start":
            patches.wrap(epoch_loop.automatic_optimization, "run", self._wrap_before)
            patches.wrap(epoch_loop.manual_optimization, "run", self._wrap_before)
        elif hook == "step":
            patches.wrap(trainer.strategy, "backward", self._wrap_after)
        else:
            patches.wrap(logger_connector(trainer), "on_batch_end", self._wrap_after)

    def _wrap_before(self, original: Method) -> Method:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._strike()
            return original(*args, **kwargs)

        return method

    def _wrap_after(self, original: Method) -> Method:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._strike()
            return result

        return method

    def _strike(self) -> None:
        place = (self._trainer.current_epoch, num_completed(self._trainer))
        if not self._trainer.training or place != (self._place.epoch, self._place.batch):
            return
        raise DrillFault(
            f"A drill has asked for this exception, by {FAULT_VARIABLE}={self._place}: it stands for one that a run may"
            " meet. Nothing is wrong with the script. Run it without the variable to let it continue."
        )
