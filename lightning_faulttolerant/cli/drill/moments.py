"""The moments at which a run is struck: random by default, spread over all of its training batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers
from lightning_faulttolerant.cli.drill.settings import EXCEPTION, TERM, DrillSettings, StrikePlan
from lightning_faulttolerant.records.ledger import HOOKS, FaultPlace

_MAX_TWICE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StrikeMoment:
    """The moment of a strike.

    Args:
        batch: Training batch of the whole run, from 0: all batches before it are done.
        fraction: Share of the time until the next batch is done that passes before the strike.
        hook: The place in the batch where an exception is raised.
        num_twice: How many batches before it the process saves, so that those batches are done again.
    """

    batch: int
    fraction: float
    hook: str
    num_twice: int = 0


def moments_of(settings: DrillSettings, num_batches: int) -> list[StrikeMoment]:
    """Return the moments of a drill: the requested ones, or a random one in each of equal parts of the run.

    Args:
        settings: Settings of the drill.
        num_batches: Number of batches of the uninterrupted run.
    """
    generator = random.Random(settings.seed)
    if settings.at:
        return [StrikeMoment(batch=batch, fraction=0.0, hook=HOOKS[0]) for batch in sorted(set(settings.at))]
    found = []
    for number in range(settings.num_strikes):
        part = (number + generator.random()) / settings.num_strikes
        batch = min(1 + int(part * (num_batches - 1)), max(num_batches - 1, 0))
        fraction = generator.random()
        num_twice = int(fraction * _MAX_TWICE)
        found.append(StrikeMoment(batch=batch, fraction=fraction, hook=generator.choice(HOOKS), num_twice=num_twice))
    return found


def plan_of(
    settings: DrillSettings, coming: Sequence[StrikeMoment], numbers: BatchNumbers, *, num_saved: int
) -> StrikePlan:
    """Return what a process has to do so that its strikes can come.

    Args:
        settings: Settings of the drill.
        coming: The moments of its strikes.
        numbers: Batch numbers of the uninterrupted run.
        num_saved: Number of batches that are done where the process continues.
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
    # A random moment may be anywhere in the batch, but not past it.
    last = coming[0].batch + (not settings.at)
    hold = numbers.place_of(min(last, len(numbers) - 1))
    return StrikePlan(saves=() if settings.kind == TERM else tuple(saves), hold=hold)
