"""The moments at which a run is struck: random by default, spread over all of its batches of each stage."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_faulttolerant.cli.drill.ledgers import TRAIN, BatchNumbers
from lightning_faulttolerant.cli.drill.settings import EXCEPTION, TERM, DrillSettings, StrikePlan
from lightning_faulttolerant.records.ledger import HOOKS, FaultPlace

_MAX_TWICE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StrikeMoment:
    """The moment of a strike.

    Args:
        batch: Batch of the whole run, from 0: all batches before it are done.
        fraction: Share of the time until the next batch is done that passes before the strike.
        hook: The place in the batch where an exception is raised.
        num_twice: How many batches before it the process saves, so that those batches are done again.
    """

    batch: int
    fraction: float
    hook: str
    num_twice: int = 0


def moments_of(settings: DrillSettings, numbers: BatchNumbers) -> list[StrikeMoment]:
    """Return the moments of a drill: the requested ones, or as many random ones in each stage, in equal parts of it.

    Args:
        settings: Settings of the drill.
        numbers: Batch numbers of the uninterrupted run.
    """
    generator = random.Random(settings.seed)
    if settings.at:
        batches = counted_batches(settings, numbers)
        return [StrikeMoment(batch=batches[at], fraction=0.0, hook=HOOKS[0]) for at in sorted(set(settings.at))]
    found = []
    for batches, num_strikes in _shares(settings, numbers):
        for number in range(num_strikes):
            batch = batches[int((number + generator.random()) / num_strikes * len(batches))]
            fraction = generator.random()
            num_twice = int(fraction * _MAX_TWICE)
            hook = generator.choice(HOOKS)
            if numbers.step(batch).stage != TRAIN:
                hook = HOOKS[0]
            found.append(StrikeMoment(batch=batch, fraction=fraction, hook=hook, num_twice=num_twice))
    return sorted(found, key=lambda moment: moment.batch)


def moved(moments: Iterable[StrikeMoment], numbers: BatchNumbers, first: int) -> list[StrikeMoment]:
    """Return moments, in order, each moved to the next batch of its own stage if it is too early.

    A moment after which its stage has no batch is left out.

    Args:
        moments: The moments.
        numbers: Batch numbers of the uninterrupted run.
        first: The first batch that can be struck.
    """
    found = []
    for moment in moments:
        batch = next(_stage_from(max(moment.batch, first), moment, numbers), None)
        if batch is not None:
            found.append(replace(moment, batch=batch))
    return sorted(found, key=lambda moment: moment.batch)


def postponed(moments: Sequence[StrikeMoment], numbers: BatchNumbers) -> list[StrikeMoment]:
    """Return moments of which the first came too early: those of its stage skip a quarter of the rest of that stage.

    Args:
        moments: The moments, in order.
        numbers: Batch numbers of the uninterrupted run.
    """
    if not moments:
        return []
    stage = numbers.step(moments[0].batch).stage
    later = list(_stage_from(moments[0].batch + 1, moments[0], numbers))
    first = later[len(later) // 4] if later else len(numbers)
    same = [moment for moment in moments if numbers.step(moment.batch).stage == stage]
    others = [moment for moment in moments if numbers.step(moment.batch).stage != stage]
    return sorted([*moved(same, numbers, first), *others], key=lambda moment: moment.batch)


def _stage_from(first: int, moment: StrikeMoment, numbers: BatchNumbers) -> Iterator[int]:
    """Yield the batches from `first` on that are of the stage of a moment."""
    stage = numbers.step(moment.batch).stage
    return (batch for batch in range(first, len(numbers)) if numbers.step(batch).stage == stage)


def counted_batches(settings: DrillSettings, numbers: BatchNumbers) -> list[int]:
    """Return the batches that ``--at`` counts: those of the requested stages, or of training.

    Args:
        settings: Settings of the drill.
        numbers: Batch numbers of the uninterrupted run.
    """
    return numbers.of_stages(settings.stages or (TRAIN,))


def _shares(settings: DrillSettings, numbers: BatchNumbers) -> Iterator[tuple[list[int], int]]:
    """Yield the batches of each stage that can be struck, and how many strikes they get."""
    stages = [numbers.of_stages([stage]) for stage in settings.stages or numbers.stages]
    # Nothing could be saved before the first batch of the run.
    can_be_struck = [batches for batches in ([batch for batch in found if batch] for found in stages) if batches]
    for index, batches in enumerate(can_be_struck):
        share, rest = divmod(settings.num_strikes, len(can_be_struck))
        yield batches, share + (index < rest)


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
    saves: list[int] = []
    for moment in coming:
        # A strike in an evaluation is to show that it continues inside it.
        begin = min(numbers.begin_of_run(moment.batch), moment.batch)
        batch = max(num_saved + 1, moment.batch - moment.num_twice, begin)
        saves += [*_boundary_before(numbers, batch, num_saved), batch]
        num_saved = moment.batch
    places = tuple(numbers.place_of(batch) for batch in saves)
    if settings.kind == EXCEPTION:
        faults = tuple(FaultPlace(batch=numbers.place_of(moment.batch), hook=moment.hook) for moment in coming)
        return StrikePlan(faults=faults, saves=places)
    if not coming:
        return StrikePlan()
    return StrikePlan(
        saves=() if settings.kind == TERM else places, hold=numbers.place_of(_hold(settings, coming[0], numbers))
    )


def _boundary_before(numbers: BatchNumbers, batch: int, num_saved: int) -> list[int]:
    """Return the training batch before a validation run, where a fit saves even if it can't continue inside the run."""
    boundary = numbers.begin_of_run(batch) - 1
    is_in_fit = boundary >= 0 and numbers.step(boundary).fit == numbers.step(batch).fit
    is_in_validation = is_in_fit and numbers.step(batch).stage != TRAIN
    return [boundary] if is_in_validation and boundary > num_saved else []


def _hold(settings: DrillSettings, moment: StrikeMoment, numbers: BatchNumbers) -> int:
    """Return the batch to wait before. A random moment may be anywhere in its batch, but not past it."""
    following = min(moment.batch + 1, len(numbers) - 1)
    is_same_run = numbers.step(following).run == numbers.step(moment.batch).run
    return following if is_same_run and not settings.at else moment.batch
