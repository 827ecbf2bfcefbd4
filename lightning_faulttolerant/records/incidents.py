"""Incidents: which step of a run is one, and the reports that its flight recorder writes.

The reports are in the directory ``incidents`` of a fit: ``incident-<step>.json``, and next to it
``incident-<step>.ckpt``, the state before the step, if it could be written. Ranks other than 0 write
``incident-<step>-rank-<r>.json``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_faulttolerant.records.lines import parse_json

INCIDENTS_FOLDER = "incidents"
"""The directory, in that of a fit, of its incidents."""

INCIDENT_NAME = re.compile(r"incident-(?P<step>\d{8,})(?:-rank-(?P<rank>\d+))?\.(?P<kind>ckpt|json)")
"""The name of a file of an incident."""

MAX_INCIDENTS = 5
"""How many incidents of a fit each rank writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """The report of one incident.

    Args:
        step: The training batch, counted from 0 over all epochs.
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        rank: The rank that noticed it.
        what: What happened, in words.
        time: When, in seconds since 1970.
        loss: The loss of the step as text, ``nan`` and ``inf`` included; empty if it is not known.
        gradients: Names of the parameters whose gradients are not finite.
        checkpoint: The name of the file with the state before the step; empty if there is none.
        without: Why there is none.
        autosave: Where the last autosave was taken, in words.
        num_batches: How many batches a replay from the last autosave runs, including that of the step.
        replay: The line to type.
    """

    step: int
    epoch: int
    batch: int
    rank: int
    what: str
    time: float
    loss: str = ""
    gradients: tuple[str, ...] = ()
    checkpoint: str = ""
    without: str = ""
    autosave: str = ""
    num_batches: int = 0
    replay: str = ""

    @property
    def place(self) -> str:
        """The step, in words."""
        return f"step {self.step} (batch {self.batch} of epoch {self.epoch})"

    def lines(self) -> list[str]:
        """Return the report in words, without the line to type."""
        return [
            f"Incident in {self.place}, rank {self.rank}: {self.what}.",
            f"The state before the step is in {self.checkpoint}." if self.checkpoint else self._without(),
        ]

    def _without(self) -> str:
        batches = f"{self.num_batches} batch{'' if self.num_batches == 1 else 'es'}"
        return (
            f"The state before the step could not be written: {self.without}. A replay runs {batches} from the last"
            f" autosave, {self.autosave}."
        )

    def to_json(self) -> str:
        """Return the report as text."""
        return json.dumps({"version": 1, **asdict(self)}, indent=1)


def incident_name(step: int, *, rank: int, kind: str) -> str:
    """Return the name of a file of an incident.

    Args:
        step: The training batch, counted from 0 over all epochs.
        rank: The rank that noticed it.
        kind: ``ckpt``, ``json``, or ``state``, a rank's state on its way to rank 0.

    Example:
        >>> incident_name(25, rank=0, kind="ckpt"), incident_name(25, rank=3, kind="json")
        ('incident-00000025.ckpt', 'incident-00000025-rank-3.json')
    """
    return f"incident-{step:08d}{f'-rank-{rank}' if rank else ''}.{kind}"


def step_of_incident(name: str) -> int | None:
    """Return the step of a checkpoint of an incident; ``None`` for any other name."""
    match = INCIDENT_NAME.fullmatch(name)
    return int(match["step"]) if match is not None and match["kind"] == "ckpt" else None


def read_incident(text: str | bytes) -> Incident | None:
    """Return the report in a text; ``None`` if it is none that this version can read.

    Args:
        text: The content of the file.
    """
    try:
        found: dict[str, Any] = parse_json(text)
        if found.pop("version") != 1:
            return None
        return Incident(**{**found, "gradients": tuple(found["gradients"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


NUM_LOSSES = 100
"""How many losses before a step its rule sees."""
_NUM_NEEDED = 20
_NUM_DEVIATIONS = 10.0
_LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """One training step, after its backward pass and before the optimizer's step, for ``FlightRecorder(rule=...)``.

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
