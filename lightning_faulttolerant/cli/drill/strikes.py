"""The strikes of a run, from the ledgers of its processes: where each strike hit, and where the run continued."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from lightning_faulttolerant.cli.drill.process import DrillProcess
from lightning_faulttolerant.cli.drill.result import Strike
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line

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
        faults = self.process.faults
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
        parts = list(_by_start(map(_place_only, process.lines().get(0, ()))))
        found += [
            LedgerStretch(process=process, lines=part, numbers=numbers, index=i, is_last=i == len(parts) - 1)
            for i, part in enumerate(parts)
        ]
    return found


def _place_only(line: Line) -> Line:
    """Return a line without the compared values, since a run may have millions of lines."""
    return {name: line[name] for name in _NEEDED if name in line}


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
