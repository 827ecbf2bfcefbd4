"""The rules of the flight recorder: which step is an incident."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

NUM_LOSSES = 100
"""How many losses before a step its rule sees."""
_NUM_NEEDED = 20
_NUM_DEVIATIONS = 10.0
_LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """One training step, after its backward pass and before the optimizer's step, for ``FaultTolerance(record=...)``.

    Args:
        step: Its number, from 0 over all epochs.
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        loss: The loss that ``training_step`` returned; ``None`` if it returned none.
        gradient_norm: The 2-norm of all gradients that exist, accumulated ones included. ``None`` with a gradient
            scaler, which scales them.
        losses: The finite losses of up to 100 steps before this one, the oldest first. They start empty in each
            process.
        not_finite: The names of the parameters whose gradients are not finite.

    Example:
        >>> step = MeasuredStep(step=7, epoch=0, batch=7, loss=2.5, gradient_norm=1e4)
        >>> step.is_finite, step.gradient_norm > 1e3
        (True, True)
    """

    step: int
    epoch: int
    batch: int
    loss: float | None
    gradient_norm: float | None
    losses: tuple[float, ...] = field(default=(), repr=False)
    not_finite: tuple[str, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return not self.not_finite and (self.loss is None or math.isfinite(self.loss))


Rule = Callable[[MeasuredStep], bool]
"""Returns whether a step is an incident."""

RULES = ("nan", "spike")
"""The names of our own rules."""


def what_happened(step: MeasuredStep, rule: str | Rule) -> str:
    """Return in words why a step is an incident; an empty text if it is none.

    Args:
        step: The step.
        rule: The name of a rule, or the user's own.
    """
    if callable(rule):
        return f"the rule {_name_of(rule)} says so; the loss is {step.loss}" if rule(step) else ""
    if step.loss is not None and not math.isfinite(step.loss):
        return f"the loss is {step.loss}"
    if step.not_finite:
        more = f" and of {len(step.not_finite) - 1} more" if len(step.not_finite) > 1 else ""
        return f"the gradient of {step.not_finite[0]}{more} is not finite"
    return _spike(step) if rule == "spike" else ""


def _spike(step: MeasuredStep) -> str:
    """Return a text if the loss is far above the recent ones, by the median of their distances from their median."""
    if step.loss is None or len(step.losses) < _NUM_NEEDED:
        return ""
    median = statistics.median(step.losses)
    # 1.4826: for a normal distribution, this is its standard deviation.
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in step.losses)
    if step.loss - median <= _NUM_DEVIATIONS * max(deviation, _LEAST_SHARE * abs(median)):
        return ""
    return f"the loss is {step.loss:.6g}, and the median of the {len(step.losses)} before it is {median:.6g}"


def _name_of(rule: Rule) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))
