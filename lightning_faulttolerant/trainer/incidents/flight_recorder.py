"""The flight recorder: it notices the step in which something goes wrong, before the optimizer has used it.

It draws no random numbers, and changes neither losses nor gradients.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.errors import IncidentError, RanksLostError
from lightning_faulttolerant.records.incidents import Incident
from lightning_faulttolerant.trainer.compat import num_completed, num_completed_in_all
from lightning_faulttolerant.trainer.incidents.incident_writer import IncidentWriter
from lightning_faulttolerant.trainer.incidents.measuring import (
    SeenStep,
    StepSeams,
    has_scaler,
    loss_and_norm,
    not_finite,
    sums_of_step,
)
from lightning_faulttolerant.trainer.incidents.rules import NUM_LOSSES, MeasuredStep, Rule, what_happened
from lightning_faulttolerant.trainer.patches import Patches

_NONE = -2


class FlightRecorder:
    """Follows the steps of one fit.

    Args:
        trainer: The trainer that runs the fit.
        rule: The name of the rule, or the user's own.
        writer: Writes incidents.
        stops: Whether an incident ends the fit.
    """

    def __init__(self, trainer: Trainer, rule: str | Rule, writer: IncidentWriter, *, stops: bool) -> None:
        self._trainer = trainer
        self._rule = rule
        self._writer = writer
        self._stops = stops
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._last = _NONE
        """The last step that was an incident."""

    def take_seams(self, patches: Patches) -> None:
        """Follow the steps from now on."""
        StepSeams(self._trainer, patches, after_backward=self._after_backward, after_step=self._after_step)

    def interrupt(self, exception: BaseException) -> None:
        """Record the exception that ends the fit, unless it is a stop, or only tells of another one."""
        if isinstance(exception, Exception) and not isinstance(exception, (IncidentError, RanksLostError)):
            where = " (in a validation run)" if self._trainer.validating else ""
            what = f"{type(exception).__name__}: {exception}{where}"
            self._writer.write(self._writer.make(what, is_exception=True))

    def _after_backward(self, seen: SeenStep) -> None:
        if self._trainer.lightning_module.automatic_optimization:
            self._check(seen, self._rule)
        elif not callable(self._rule):  # losses of different kinds have no common scale
            self._check(seen, "nan")

    def _after_step(self, seen: SeenStep) -> None:
        if not self._trainer.lightning_module.automatic_optimization:
            self._check(seen, self._rule, closes=True)

    def _check(self, seen: SeenStep, rule: str | Rule, *, closes: bool = False) -> None:
        step = self._measured(seen)
        what = "" if self._last == step.step else what_happened(step, rule)
        is_one_of_several = not closes and not self._trainer.lightning_module.automatic_optimization
        if step.loss is not None and math.isfinite(step.loss) and not is_one_of_several:
            self._losses.append(step.loss)
        if what:
            self._note(seen, step, what)

    def _measured(self, seen: SeenStep) -> MeasuredStep:
        module = self._trainer.lightning_module
        is_scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None or has_scaler(module)
        gradients = [] if is_scaled else [p.grad for p in module.parameters() if isinstance(p.grad, Tensor)]
        loss, norm = loss_and_norm(seen.loss, gradients)
        return MeasuredStep(
            step=num_completed_in_all(self._trainer),
            epoch=self._trainer.current_epoch,
            batch=num_completed(self._trainer),
            loss=loss,
            gradient_norm=None if is_scaled else norm,
            losses=tuple(self._losses),
            # A norm may overflow: only then it is worth a look at each gradient.
            not_finite=() if math.isfinite(norm) else not_finite(module),
        )

    def _note(self, seen: SeenStep, step: MeasuredStep, what: str) -> None:
        is_first, self._last = self._last != step.step - 1, step.step
        incident = self._writer.make(what)
        if is_first:
            incident = self._written(seen, step, incident)
        if self._stops:
            raise IncidentError(f"Incident in {incident.place}: {what}. To see it, type: {incident.replay}")

    def _written(self, seen: SeenStep, step: MeasuredStep, incident: Incident) -> Incident:
        loss = "" if step.loss is None else str(step.loss)
        sums = sums_of_step(self._trainer, seen)
        incident = replace(incident, loss=loss, gradients=step.not_finite, sums=sums)
        return self._writer.write(incident, after_backward=seen.num_backward) or incident
