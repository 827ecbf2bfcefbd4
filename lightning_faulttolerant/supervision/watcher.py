"""Watches the marks of training processes, and finds those whose section takes too long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.supervision.marks import OFF, OUTSIDE, REPORT, STOP, ProcessMarks, read_marks
from lightning_faulttolerant.supervision.section_times import SectionTimes
from lightning_faulttolerant.supervision.slow_storage import STORAGE_ANSWERS_WITHIN_SECONDS, begin, done_within

_LONGEST_LOOK_SECONDS = 1.0
_LONGEST_LOOK_FACTOR = 3.0
_WRITE_EVERY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A section that takes too long.

    Args:
        marks: The marks of the process that is over its limit.
        seconds: For how long they have been the same.
        limit_seconds: How long the section may take.
        why: The reason for that limit, in words.
        ranks: The marks of all processes, each with the seconds for which they have been the same.
    """

    marks: ProcessMarks
    seconds: float
    limit_seconds: float
    why: str
    ranks: tuple[tuple[ProcessMarks, float], ...]

    @property
    def directory(self) -> str:
        """The directory of the run, or its URL; empty if it is not known yet."""
        return next((marks.directory for marks, _ in self.ranks if marks.directory), "")

    @property
    def is_only_reported(self) -> bool:
        """Whether the run asks for nothing but a report."""
        return self.marks.hang == REPORT

    @property
    def text(self) -> str:
        """What hangs, in words."""
        return (
            f"a hang: rank {self.marks.rank} has been in the section {self.marks} for {self.seconds:.0f} s, and"
            f" {self.limit_seconds:.0f} s is the limit ({self.why})"
        )


@final
class HangWatcher:
    """Looks at the marks again and again.

    Args:
        directory: The directory of the marks.
        default: What to do for processes that say nothing about it: `OFF`, `REPORT`, or `STOP`.
        look_every_seconds: How often `look` is called.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        default: int = STOP,
        look_every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times = SectionTimes()
        self._directory = directory
        self._default = default
        self._longest_look_seconds = max(_LONGEST_LOOK_SECONDS, _LONGEST_LOOK_FACTOR * look_every_seconds)
        self._clock = clock
        self._last = clock()
        self._since_write = 0.0
        self._writing: threading.Thread | None = None
        self._seen: dict[int, tuple[ProcessMarks, float]] = {}
        self._told: set[tuple[int, int]] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no process that is alive had marks when last looked at."""
        return not self._seen

    def look(self) -> Hang | None:
        """Return the section that is over its limit, if there is one; each is returned once."""
        now = self._clock()
        # A longer time between two looks is time in which the machine, or this process, stood still.
        step, self._last = min(now - self._last, self._longest_look_seconds), now
        seen: dict[int, tuple[ProcessMarks, float]] = {}
        for marks in read_marks(self._directory):
            if is_running(marks.process_id, marks.started):
                seen[marks.process_id] = (marks, self._seconds(marks, step))
                self._follow(marks.directory)
        self._seen = seen
        self._since_write += step
        if self._since_write > _WRITE_EVERY_SECONDS:
            self._since_write = 0.0
            if self._writing is None or not self._writing.is_alive():
                self._writing = begin(self.times.writing())
        return next(filter(None, (self._judge(marks, seconds) for marks, seconds in seen.values())), None)

    def write_learned(self) -> None:
        """Write what was learned, after the write in progress."""
        if self._writing is not None:
            self._writing.join(STORAGE_ANSWERS_WITHIN_SECONDS)
            if self._writing.is_alive():
                return
        done_within(STORAGE_ANSWERS_WITHIN_SECONDS, self.times.writing())

    def _follow(self, directory: str) -> None:
        if directory and directory != self.times.directory:
            done_within(STORAGE_ANSWERS_WITHIN_SECONDS, partial(self.times.follow, directory))

    def _seconds(self, marks: ProcessMarks, step: float) -> float:
        """Return for how long the marks have been the same, and learn from those that have changed."""
        before = self._seen.get(marks.process_id)
        if before is None:
            return 0.0
        if before[0].count == marks.count:
            return before[1] + step
        if before[0].section != OUTSIDE and (marks.process_id, before[0].count) not in self._told:
            self.times.learn(before[0].section, before[1])
        return 0.0

    def _judge(self, marks: ProcessMarks, seconds: float) -> Hang | None:
        if marks.section == OUTSIDE or (marks.hang or self._default) == OFF:
            return None
        limit, why = self.times.limit(marks)
        if marks.hang_timeout_seconds:
            limit, why = marks.hang_timeout_seconds, "hang_timeout"
        if seconds <= limit or (marks.process_id, marks.count) in self._told:
            return None
        self._told.update((each.process_id, each.count) for each, _ in self._seen.values())  # they hang together
        self.times.note_hang(marks, seconds)
        self.write_learned()  # the next start needs to know it
        return Hang(marks=marks, seconds=seconds, limit_seconds=limit, why=why, ranks=tuple(self._seen.values()))
