"""Drills of the script that stands in for a training, in this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from lightning_faulttolerant.cli.drill.drilling import Drill
from lightning_faulttolerant.cli.drill.process import DrillSettings
from lightning_faulttolerant.cli.drill.result import DrillResult, Progress, Status, progress_on

STAND_IN = Path(__file__).with_name("stand_in.py")
ROOT = Path(__file__).parents[3]


class ToldProgress:
    """Keeps the reports it gets, and lets the script continue."""

    def __init__(self, where: Path) -> None:
        self.told: list[str] = []
        self._seen = where / "seen"
        self._seen.parent.mkdir(exist_ok=True)
        self._seen.write_text("0")

    def update(self, status: Status) -> None:
        """Write the number of seen batches; replace the file as a whole, since the script reads it at the same time."""
        new = self._seen.with_suffix(".new")
        new.write_text(str(status.done))
        new.replace(self._seen)

    def tell(self, text: str) -> None:
        """Keep a line."""
        self.told.append(text)

    def end(self, status: Status, seconds: float) -> None:
        """Keep the end of the run."""
        self.told.append(f"{status.run} {status.done}")


class SeenProgress(ToldProgress):
    """Shows everything, and lets the script continue."""

    def __init__(self, where: Path, shown: Progress) -> None:
        super().__init__(where)
        self._shown = shown

    def update(self, status: Status) -> None:
        """Show the status, and write the number of seen batches."""
        self._shown.update(status)
        super().update(status)

    def tell(self, text: str) -> None:
        """Show a line."""
        self._shown.tell(text)

    def end(self, status: Status, seconds: float) -> None:
        """Show the end of the run."""
        self._shown.end(status, seconds)


def seen_progress_on(where: Path) -> Callable[[TextIO], AbstractContextManager[SeenProgress]]:
    """Return a function that shows progress on a stream, for scripts that keep their autosaves in `where`."""

    @contextlib.contextmanager
    def seen_on(stream: TextIO) -> Iterator[SeenProgress]:
        with progress_on(stream) as shown:
            yield SeenProgress(where, shown)

    return seen_on


def words(where: Path, *arguments: str) -> tuple[str, ...]:
    """Return the command of the script."""
    return (sys.executable, "-S", str(STAND_IN), str(where / "autosaves"), *arguments)


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of the script."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def drill(where: Path, *arguments: str, **settings: Any) -> DrillResult:
    """Drill the script, with two strikes by default."""
    return make(where, *arguments, **settings).run()


def make(where: Path, *arguments: str, **settings: Any) -> Drill:
    """Create a drill of the script."""
    own: dict[str, Any] = {
        "command": words(where, *arguments),
        "num_strikes": 2,
        "seed": 1,
        "token": secrets.token_hex(4),
    }
    settings = {"directory": where / "drill", **own, **settings}
    return Drill(DrillSettings(**settings), ToldProgress(where), environment=environment())
