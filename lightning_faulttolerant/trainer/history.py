"""The history of a run as the training process writes it: what a fit tells of itself, and never at the fit's expense.

What the lines hold is in ``records/history.py``, where they go in ``history_file.py``. Nothing here raises but what a
signal handler does, nothing is drawn at random, and a boundary only compares two numbers.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.records.history import (
    ALIVE,
    ALIVE_EVERY_SECONDS,
    ALIVE_EVERY_SHARE,
    AUTOSAVE,
    BEGIN,
    END,
    FINISHED,
    START,
    STOPPED,
    UNSAVED,
    name_of,
)
from lightning_faulttolerant.trainer.choice import Choice
from lightning_faulttolerant.trainer.history_file import HistoryFile
from lightning_faulttolerant.trainer.launched import Script
from lightning_faulttolerant.trainer.position import BOUNDARY, Position, position_of
from lightning_faulttolerant.trainer.process import IMPORTED_AT
from lightning_faulttolerant.trainer.report import ResumeReport

_MAX_TEXT = 300


def _without_harm(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that does nothing on ranks without a file, and that says instead of raising what went wrong."""

    @functools.wraps(method)
    def guarded(self: History, *args: Any, **kwargs: Any) -> None:
        if self.file is None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, training has nothing to do with it
            self.file.announce(error)

    return guarded


class History:
    """What one fit adds to the history of its run, from `begin` to `end`.

    Args:
        trainer: Whose fit it is.
        file: Where it goes; ``None`` on ranks that write none.
        fit: The fit's number in its script.
    """

    def __init__(self, trainer: Trainer, file: HistoryFile | None = None, *, fit: int = 0) -> None:
        self._trainer = trainer
        self.file = file
        self._fit = fit
        self._has_started = False
        self._has_ended = False
        self.saved: Position | None = None
        """Where the last autosave was taken."""
        self._untold: dict[str, Any] = {}
        self._began = time.perf_counter()
        self.due_at = float("inf")
        """From this time of ``time.perf_counter`` on a sign of life is due: a boundary need not call before."""

    @_without_harm
    def begin(self, script: Script) -> None:
        """Note that a fit begins.

        Args:
            script: The process in which the callback was made.
        """
        self._add(
            BEGIN,
            process=script.token[:12],
            pid=script.process_id,
            host=socket.gethostname(),
            process_began=process_began(script.process_id),
        )

    @_without_harm
    def start(self, choice: Choice | None, report: ResumeReport | None) -> None:
        """Note that the first batch can be fetched; only the first call of a fit does.

        Args:
            choice: What the fit continues from.
            report: What was restored, if anything was.
        """
        if self._has_started:
            return
        self._has_started = True
        names = ("path", "position", "seconds", "exact", "not_exact", "notes")
        resumed = None
        if report is not None:
            told = {**asdict(report), "not_exact": report.all_not_exact, "seconds": round(report.seconds, 6)}
            resumed = {name: told[name] for name in names}
        self._add(
            START,
            **self._place(),
            num_ranks=self._trainer.world_size,
            continues=choice is not None and choice.continues,
            resumed=resumed,
        )

    @_without_harm
    def autosave(self, series: AutosaveSeries | None, path: str, position: Position, *, seconds: float, taken: float,
                 is_behind: bool = False) -> None:  # fmt: skip
        """Note that an autosave is written and verified. May be called in the thread that has written it.

        Args:
            series: Knows how large it is.
            path: Where it is.
            position: Where it was taken.
            seconds: That training waited for it.
            taken: When, by ``time.perf_counter``.
            is_behind: Whether it was written in the background.
        """
        self._add(
            AUTOSAVE,
            **_place_of(position),
            name=name_of(path),
            taken=round(time.time() - (time.perf_counter() - taken), 3),
            seconds=round(seconds, 6),
            bytes=None if series is None else series.num_bytes.get(path),
            behind=is_behind,
        )
        self.saved = position

    @_without_harm
    def unsaved(self, *, since: float, until: float | None, tries: int, text: str) -> None:
        """Note that nothing can be saved, or that it can be again; between the first and that, keep it for the end.

        Args:
            since: The time of the first save that failed, seconds since 1970.
            until: When one succeeded again; ``None`` if none has yet.
            tries: How many failed.
            text: Why the last of them did.
        """
        line = {"since": round(since, 3), "until": until and round(until, 3), "tries": tries, "text": text[:_MAX_TEXT]}
        self._untold = line if until is None and tries > 1 else {}
        if not self._untold:
            self._add(UNSAVED, **line)

    @_without_harm
    def alive(self) -> None:
        """Leave a sign of life."""
        self._add(ALIVE, **self._place())

    @_without_harm
    def end(self, exception: BaseException | None) -> None:
        """Note how the fit ended, and let nothing of it be under way any more; only the first call of a fit does.

        Args:
            exception: That has ended it, if one has.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if self._untold:
            self._add(UNSAVED, **self._untold)
        reason, text = reason_of(exception)
        self._add(END, **self._place(), reason=reason, text=text, saved=self.saved and _place_of(self.saved))
        self.due_at = float("inf")
        assert self.file is not None
        self.file.flush()

    def _add(self, event: str, **more: Any) -> None:
        assert self.file is not None
        now, (least, most) = time.perf_counter(), ALIVE_EVERY_SECONDS
        # Whether it can be written or not: the next try is as far away.
        self.due_at = now + min(max((now - self._began) * ALIVE_EVERY_SHARE, least), most)
        self.file.add({"event": event, "fit": self._fit, "time": round(time.time(), 3), **more})

    def _place(self) -> dict[str, int]:
        return _place_of(position_of(self._trainer, BOUNDARY))


def reason_of(exception: BaseException | None) -> tuple[str, str]:
    """Return why a fit ended, in a few words and at length.

    Args:
        exception: That has ended it, if one has.
    """
    if exception is None:
        return FINISHED, ""
    if isinstance(exception, TrainingStopped):
        name = exception.reason.removeprefix("Stopped by ").split(" ")
        words = 2 if name[0] == "the" else 1
        return f"{STOPPED}{' '.join(name[:words])}", exception.reason[:_MAX_TEXT]
    name_of_type = type(exception).__name__
    return name_of_type, f"{name_of_type}: {exception}"[:_MAX_TEXT]


@functools.cache
def process_began(process_id: int) -> float:
    """Return when a process of this machine was started, seconds since 1970.

    That of an interactive session counts as started when this module was loaded, and so does every process where the
    system does not say more.

    Args:
        process_id: Of this process, or of the one that has made it.
    """
    if hasattr(sys, "ps1") or getattr(sys.modules.get("__main__"), "__file__", None) is None:
        return round(IMPORTED_AT, 3)
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return round(IMPORTED_AT, 3)
    return round(time.time() - age, 3)


def seconds_of_process() -> float:
    """Return for how many seconds this process has run."""
    return max(time.time() - process_began(os.getpid()), 0.0)


def _place_of(position: Position) -> dict[str, int]:
    return {"epoch": position.epoch, "batch": position.batch, "global_step": position.global_step}
