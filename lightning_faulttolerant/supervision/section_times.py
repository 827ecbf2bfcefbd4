"""How long the sections of a run may take: ten times the slowest of their kind so far, which the next start knows."""

from __future__ import annotations

import contextlib
import json
import os
from typing import final

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.storage.store import open_file, open_writer
from lightning_faulttolerant.supervision.marks import SECTION_NAMES

FILE_NAME = "section-times.json"
"""Beside the history of the run."""
_FACTOR = 10.0
_LEAST_SECONDS = 60.0
_UNKNOWN_SECONDS = 1800.0
_WORTH_WRITING = 1.2


@final
class SectionTimes:
    """The slowest section of each kind."""

    def __init__(self) -> None:
        self._slowest: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._directory = ""

    def follow(self, directory: str) -> None:
        """Read what earlier starts have learned, once the directory of the run is known.

        Args:
            directory: The directory, or its URL.
        """
        if not directory or directory == self._directory:
            return
        self._directory = directory
        with contextlib.suppress(OSError, ValueError, TypeError, FaultToleranceError):
            with open_file(f"{directory}/{FILE_NAME}") as file:
                self._written = {name: float(seconds) for name, seconds in dict(json.load(file)).items()}
            for name, seconds in self._written.items():
                self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))

    def learn(self, section: int, seconds: float) -> None:
        """Note how long a section has taken."""
        name = SECTION_NAMES[section]
        self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))

    def limit(self, section: int) -> tuple[float, str]:
        """Return how long a section may take, in seconds, and the reason in words."""
        slowest = self._slowest.get(SECTION_NAMES[section])
        if slowest is None:
            return _UNKNOWN_SECONDS, "none of its kind has ended yet"
        return max(_FACTOR * slowest, _LEAST_SECONDS), f"the slowest of its kind took {slowest:.3g} s"

    def write(self) -> None:
        """Write what was learned for the next start, if there is something new. A failure is no reason to stop."""
        written = self._written
        if not self._directory or all(
            seconds <= _WORTH_WRITING * written.get(name, 0.0) for name, seconds in self._slowest.items()
        ):
            return
        self._written = {name: round(seconds, 3) for name, seconds in self._slowest.items()}
        with (
            contextlib.suppress(OSError, FaultToleranceError),
            open_writer(os.path.join(self._directory, FILE_NAME), fsync=False) as file,
        ):
            file.write(json.dumps(self._written).encode())
