"""The fault of a drill: an exception with its own class, at a place that the environment names."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import DrillFault
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, FaultPlace
from lightning_faulttolerant.trainer.evaluation.compat import num_evaluated
from lightning_faulttolerant.trainer.ledger.compat import logger_connector
from lightning_faulttolerant.trainer.ledger.evaluated_batches import around_steps, training_place
from lightning_faulttolerant.trainer.patches import Method, Patches

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
    """Raises an exception in a fit or an evaluation. It does so once per process: no other one has the number.

    Args:
        trainer: The trainer that runs it.
        place: The place of the fault.
    """

    def __init__(self, trainer: Trainer, place: FaultPlace) -> None:
        self._trainer = trainer
        self._place = place

    def take_seams(self, patches: Patches) -> None:
        """Begin to watch for the place."""
        trainer, hook = self._trainer, self._place.hook
        epoch_loop = trainer.fit_loop.epoch_loop
        if self._place.is_in_evaluation:
            around_steps(trainer, patches, self._around_before)
        elif hook == "start":
            patches.around(epoch_loop.automatic_optimization, "run", self._around_before)
            patches.around(epoch_loop.manual_optimization, "run", self._around_before)
        elif hook == "step":
            patches.around(trainer.strategy, "backward", self._around_after)
        else:
            patches.around(logger_connector(trainer), "on_batch_end", self._around_after)

    def _around_before(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self._strike()
        return original(*args, **kwargs)

    def _around_after(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._strike()
        return result

    def _strike(self) -> None:
        place: tuple[int, ...] = tuple(training_place(self._trainer).values())
        if self._place.is_in_evaluation:
            place = (*place, num_evaluated(self._trainer) - 1)
        elif not self._trainer.training:
            return
        if place == self._place.batch[1:]:
            raise DrillFault(
                f"A drill has asked for this exception, by {FAULT_VARIABLE}={self._place}: it stands for one that a"
                " run may meet. Nothing is wrong with the script. Run it without the variable to let it continue."
            )
