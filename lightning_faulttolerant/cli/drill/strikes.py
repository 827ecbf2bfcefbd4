"""The strikes of a run: the moments that are chosen for them, where each strike hit, and where the run continued.

The moments are random by default, and spread over all batches of each stage. The rest is read from the ledgers of the
processes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_faulttolerant.cli.drill.ledgers import (
    FIT,
    STEPS,
    TRAIN,
    BatchNumbers,
    Resumption,
    place_of,
    resumption_of,
)
from lightning_faulttolerant.cli.drill.process import EXCEPTION, TERM, DrillProcess, DrillSettings, StrikePlan
from lightning_faulttolerant.cli.drill.result import Strike
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.ledger import HOOKS, FaultPlace
from lightning_faulttolerant.records.lines import Line

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


_KINDS = (ledger.FIT, ledger.RESUMED, *STEPS)
_PLACE = ("epoch", "batch", "validation_batch")
_NEEDED = ("event", "fit", "time", "pid", *_PLACE, "text", "exact", "not_exact", "path")
# A launcher that restarts its ranks does not report their exit codes.
_FAILED_UNDER_LAUNCHER = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStretch:
    """The lines of rank 0 from one start to the next: a process of the drill, or a restart by a launcher in one.

    Args:
        process: The process of the drill.
        lines: Its lines: where each fit began and continued, and its batches, reduced to their places.
        numbers: Batch numbers of the uninterrupted run.
        index: Index of the stretch in its process, from 0.
        is_last: Whether it is the last stretch of its process.
    """

    process: DrillProcess
    lines: Sequence[Line]
    numbers: BatchNumbers
    index: int
    is_last: bool

    @property
    def batches(self) -> list[Line]:
        """The lines of the batches, of training and of evaluations."""
        return [line for line in self.lines if line["event"] in STEPS]

    @property
    def resumption(self) -> Resumption | None:
        """The place where it continued, before its first batch; None if it began from the beginning."""
        before = itertools.takewhile(lambda line: line["event"] not in STEPS, self.lines)
        resumed = [resumption_of(self.process.number, line) for line in before if line["event"] == ledger.RESUMED]
        return max(resumed, key=lambda resumption: self.numbers.at(resumption.place), default=None)

    @property
    def start(self) -> int:
        """The number of batches of the whole run that were done where it began."""
        return self.numbers.at(self.resumption.place) if self.resumption is not None else 0

    @property
    def done(self) -> int:
        """The number of batches of the whole run that were done at its end."""
        return max([self.numbers.at(place_of(line)) for line in self.batches], default=self.start)

    @property
    def began(self) -> float:
        """The time of its start, seconds since 1970. For a restart by a launcher, the time when its fit began."""
        return self.process.began if self.index == 0 else float(self.lines[0].get("time", 0.0))

    @property
    def hook(self) -> str:
        """The place in the batch where an exception was to end it; empty for none."""
        faults = self.process.plan.faults
        return faults[self.index].hook if self.index < len(faults) else ""

    @property
    def seconds(self) -> float:
        """The seconds from its start to its end."""
        if self.is_last and self.process.seconds is not None:
            return self.process.began + self.process.seconds - self.began
        last = self.lines[-1]
        return float(last["until"] if "until" in last else last.get("time", 0.0)) - self.began


def stretches_of(processes: Sequence[DrillProcess], numbers: BatchNumbers) -> list[LedgerStretch]:
    """Return the stretches of a run, in order.

    Args:
        processes: The processes of the run.
        numbers: Batch numbers of the uninterrupted run.
    """
    found = []
    for process in processes:
        # Without the compared values: a run may have millions of lines.
        lines = ({name: line[name] for name in _NEEDED if name in line} for line in process.lines().get(0, ()))
        parts = list(_by_start(lines))
        found += [
            LedgerStretch(process=process, lines=part, numbers=numbers, index=i, is_last=i == len(parts) - 1)
            for i, part in enumerate(parts)
        ]
    return found


def _by_start(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield the lines of each start. A start is a new process that begins a fit again."""
    part: list[Line] = []
    process_id, last_fit = None, 0
    for line in lines:
        if line.get("event") not in _KINDS:
            if part:
                part[-1]["until"] = line.get("time", 0.0)
            continue
        if line["event"] == ledger.FIT:
            fit = int(line.get("fit", 1))
            if part and line.get("pid") != process_id and fit <= last_fit:
                yield part
                part = []
            process_id, last_fit = line.get("pid"), fit
        part.append(line)
    if part:
        yield part


def strikes_of(stretches: Sequence[LedgerStretch], kind: str) -> tuple[Strike, ...]:
    """Return the strikes that count. After such a strike, the run continued from beyond its previous start.

    Args:
        stretches: The stretches of the run.
        kind: Kind of the strikes.
    """
    strikes: list[Strike] = []
    for struck, after in itertools.pairwise(stretches):
        resumption = after.resumption
        if resumption is None or after.start <= struck.start:
            continue
        first = after.batches[0] if after.batches else None
        exit_code = struck.process.exit_code if struck.is_last else None
        strikes.append(
            Strike(
                number=len(strikes) + 1,
                kind=kind,
                **_place_of_strike(struck.numbers, struck.done),
                resumed_at=struck.numbers.trained_before(after.start),
                resumed_batch=_batch_in_run(struck.numbers, after.start, of=struck.done),
                resumed_text=resumption.text,
                num_twice=max(struck.done - after.start, 0),
                seconds_in_process=struck.seconds,
                seconds_to_first_batch=float(first["time"]) - after.began if first is not None else None,
                exit_code=_FAILED_UNDER_LAUNCHER if exit_code is None else exit_code,
                hook=struck.hook,
            )
        )
    return tuple(strikes)


def _place_of_strike(numbers: BatchNumbers, done: int) -> dict[str, Any]:
    """Return where a strike hit, as arguments of `Strike`: in the first batch that was not finished."""
    step = numbers.step(done)
    *_, epoch, batch, evaluated = step.place
    return {
        "stage": step.stage,
        "place": str(step),
        "fit": step.ordinal,
        "epoch": epoch if step.function == FIT else None,
        "batch": batch - 1 if step.stage == TRAIN else evaluated - 1,
        "at": numbers.trained_before(done),
    }


def _batch_in_run(numbers: BatchNumbers, number: int, *, of: int) -> int | None:
    """Return which batch of an evaluation has `number` batches before it; None if it is not of that of batch `of`."""
    begin = numbers.begin_of_run(of)
    return number - begin if numbers.step(of).stage != TRAIN and number >= begin else None
