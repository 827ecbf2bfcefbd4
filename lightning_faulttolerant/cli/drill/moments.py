"""The moments at which a run is struck: random ones, spread over all of its training batches."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_faulttolerant.cli.drill.settings import DrillSettings
from lightning_faulttolerant.records.ledger import HOOKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a strike is to come.

    Args:
        batch: Training batch of the whole run, from 0: all before it are done.
        fraction: How much of the time until the next batch is done is to pass.
        hook: Where in the batch an exception is raised.
    """

    batch: int
    fraction: float
    hook: str


def moments_of(settings: DrillSettings, num_batches: int) -> list[Moment]:
    """Return the moments of a drill: those that it asks for, or one at random in each of equal parts of the run.

    Args:
        settings: Of the drill.
        num_batches: Of the uninterrupted run.
    """
    generator = random.Random(settings.seed)
    if settings.at:
        return [Moment(batch=batch, fraction=0.0, hook=HOOKS[0]) for batch in sorted(set(settings.at))]
    found = []
    for number in range(settings.num_strikes):
        part = (number + generator.random()) / settings.num_strikes
        batch = min(1 + int(part * (num_batches - 1)), max(num_batches - 1, 0))
        found.append(Moment(batch=batch, fraction=generator.random(), hook=generator.choice(HOOKS)))
    return found
