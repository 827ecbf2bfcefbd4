"""The moments at which a run is struck: random ones, spread over all of its training batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers
from lightning_faulttolerant.cli.drill.settings import EXCEPTION, TERM, DrillSettings, StrikePlan
from lightning_faulttolerant.records.ledger import HOOKS, FaultPlace

_MAX_TWICE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a strike is to come.

    Args:
        batch: Training batch of the whole run, from 0: all before it are done.
        fraction: How much of the time until the next batch is done is to pass.
        hook: Where in the batch an exception is raised.
        num_twice: How many batches before it the process is to save, so that they are done again.
    """

    batch: int
    fraction: float
    hook: str
    num_twice: int = 0


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
        fraction = generator.random()
        num_twice = int(fraction * _MAX_TWICE)
        found.append(Moment(batch=batch, fraction=fraction, hook=generator.choice(HOOKS), num_twice=num_twice))
    return found


def plan_of(settings: DrillSettings, coming: Sequence[Moment], numbers: BatchNumbers, *, num_saved: int) -> StrikePlan:
    """Return what a process is asked to do so that its strikes can come.

    Args:
        settings: Of the drill.
        coming: When it is to be struck.
        numbers: Of the uninterrupted run.
        num_saved: How many batches are done where it continues.
    """
    saves = []
    for moment in coming:
        saves.append(numbers.place_of(max(num_saved + 1, moment.batch - moment.num_twice)))
        num_saved = moment.batch
    if settings.kind == EXCEPTION:
        places = [(numbers.place_of(moment.batch), moment.hook) for moment in coming]
        faults = [FaultPlace(fit=fit, epoch=epoch, batch=batch, hook=hook) for (fit, epoch, batch), hook in places]
        return StrikePlan(faults=tuple(faults), saves=tuple(saves))
    if not coming:
        return StrikePlan()
    # At a random moment it may be anywhere in the batch, but not past it.
    last = coming[0].batch + (not settings.at)
    hold = numbers.place_of(min(last, len(numbers) - 1))
    return StrikePlan(saves=() if settings.kind == TERM else tuple(saves), hold=hold)
