"""How long the sections of a run may take: ten times the slowest of their kind so far, which the next start knows.

A limit that is wrong must not end a run: after a hang, the same place of the run may take twice as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import final

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.storage.store import open_file, open_writer
from lightning_faulttolerant.supervision.marks import EVALUATION_BATCH, SECTION_NAMES, TRAINING_BATCH, ProcessMarks

FILE_NAME = "section-times.json"
"""Beside the history of the run."""
_FACTOR = 10.0
_OF_BATCHES = frozenset({TRAINING_BATCH, EVALUATION_BATCH})
_LEAST_SECONDS_OF_BATCHES = 300.0
_LEAST_SECONDS = 1800.0
_WORTH_WRITING = 1.2
_HUNG_TIMES = "hung_times"

_Place = tuple[str, int, int, int]


@final
class SectionTimes:
    """The slowest section of each kind, and the place of the last hang."""

    def __init__(self) -> None:
        self._slowest: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._hung: tuple[_Place, int] | None = None
        """Where the last hang was, and how many there were in a row."""
        self._hung_times: tuple[float, float] | None = None
        self._has_new_hang = False
        self.directory = ""
        """The directory of the run, or its URL; empty if it is not known yet."""

    def follow(self, directory: str) -> None:
        """Read what earlier starts have learned, once the directory of the run is known.

        Args:
            directory: The directory, or its URL.
        """
        if not directory or directory == self.directory:
            return
        self.directory = directory
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FaultToleranceError):
            with open_file(f"{directory}/{FILE_NAME}") as file:
                content = json.load(file)
            self._written = {name: float(seconds) for name, seconds in dict(content["slowest"]).items()}
            for name, seconds in self._written.items():
                self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))
            if self._hung_times is None and content.get(_HUNG_TIMES):
                began, noticed = content[_HUNG_TIMES]
                self._hung_times = float(began), float(noticed)
            if content["hung"] and self._hung is None:
                (name, epoch, batch, evaluated), number = content["hung"]
                self._hung = (str(name), int(epoch), int(batch), int(evaluated)), int(number)

    def learn(self, section: int, seconds: float) -> None:
        """Note how long a section has taken."""
        name = SECTION_NAMES[section]
        self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))

    def note_hang(self, marks: ProcessMarks, seconds: float) -> None:
        """Note where a process was over its limit, and for how many seconds it has been there."""
        now = round(time.time(), 3)
        self._hung_times = (now - seconds, now)
        place = _place(marks)
        before = self._hung[1] if self._hung is not None and self._hung[0] == place else 0
        self._hung, self._has_new_hang = (place, before + 1), True

    def limit(self, marks: ProcessMarks) -> tuple[float, str]:
        """Return how long the section of a process may take, in seconds, and the reason in words."""
        slowest = self._slowest.get(SECTION_NAMES[marks.section])
        if slowest is None:
            seconds, why = _LEAST_SECONDS, "none of its kind has ended yet"
        else:
            least = _LEAST_SECONDS_OF_BATCHES if marks.section in _OF_BATCHES else _LEAST_SECONDS
            seconds, why = max(_FACTOR * slowest, least), f"the slowest of its kind took {slowest:.3g} s"
        if self._hung is not None and self._hung[0] == _place(marks):
            seconds *= 2.0 ** min(self._hung[1], 20)
            why += f"; doubled after each hang here, {self._hung[1]} so far"
        return seconds, why

    def writing(self) -> Callable[[], None]:
        """Return what writes that which was learned until now. A failure is no reason to stop."""
        written, path = self._written, os.path.join(self.directory, FILE_NAME)
        if not self.directory or not (
            self._has_new_hang
            or any(seconds > _WORTH_WRITING * written.get(name, 0.0) for name, seconds in self._slowest.items())
        ):
            return _write_nothing
        self._written = {name: round(seconds, 3) for name, seconds in self._slowest.items()}
        self._has_new_hang = False
        found = {"slowest": self._written, "hung": self._hung, _HUNG_TIMES: self._hung_times}
        content = json.dumps(found).encode()

        def write() -> None:
            with contextlib.suppress(OSError, FaultToleranceError), open_writer(path, fsync=False) as file:
                file.write(content)

        return write


def last_hang(directory: str) -> tuple[float, float] | None:
    """Return when the last hang of a run began and when it was noticed, in seconds since 1970; ``None`` if none was.

    Args:
        directory: The directory of the run, or its URL.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FaultToleranceError):
        with open_file(f"{directory}/{FILE_NAME}") as file:
            began, noticed = json.load(file)[_HUNG_TIMES]
        return float(began), float(noticed)
    return None


def _place(marks: ProcessMarks) -> _Place:
    return SECTION_NAMES[marks.section], marks.epoch, marks.batch, marks.evaluated


def _write_nothing() -> None:
    pass
