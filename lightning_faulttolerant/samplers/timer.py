"""Says how long the steps of a script take, and how long it has run in all, over its restarts too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.streaming.world import current_world

_VERSION = 1


class TimestampedTimer:
    """Report the time since the last report, and the time in all.

    Reports come from rank 0. Time is measured by a clock that is never set: not by daylight saving, nor by hand.

    Args:
        report: The text of the first report; by default "Start".
        start_time: Since when the first step runs, as of ``time.monotonic()``; by default since now.
        running: Seconds that were counted before, by an earlier process.
        sync_cuda: Whether to wait until the GPU has done what it was given, before a time is taken.
        sink: What takes a line of text.
        rank: Which rank this is; by default as the process group or the environment says.

    Example:
        >>> timer = TimestampedTimer(running=60, sink=lambda line: None)
        >>> seconds = timer.report("loading", ret=True)
        >>> timer.running >= 60
        True
    """

    def __init__(
        self,
        report: str | None = None,
        start_time: float | None = None,
        running: float = 0,
        *,
        sync_cuda: bool = False,
        sink: Callable[[str], object] = print,
        rank: int | None = None,
    ) -> None:
        self._sync_cuda, self._sink, self._rank = sync_cuda, sink, rank
        self.running: float = running
        """Seconds in all, until the last report."""
        self.start_time = self._now() if start_time is None else start_time
        """When the step that runs began."""
        self._say(report or "Start", 0.0)

    def report(self, annot: str, ret: bool = False) -> float | None:
        """Say how long the step took that ends here; the next one begins.

        Args:
            annot: What it was.
            ret: Whether its seconds are returned.
        """
        now = self._now()
        seconds = now - self.start_time
        self.running += seconds
        self.start_time = now
        self._say(annot, seconds)
        return seconds if ret else None

    def _now(self) -> float:
        if self._sync_cuda and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    def _is_heard(self) -> bool:
        if self._rank is not None:
            return self._rank == 0
        try:
            return current_world().rank == 0
        except FaultToleranceError:  # which rank it is can't be told yet: a report too many harms nobody
            return True

    def _say(self, text: str, seconds: float) -> None:
        if self._is_heard():
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            step, total = f"{1000 * seconds:,.3f}", f"{self.running:,.3f}"
            self._sink(f"[ {stamp} ] {text:<70}{step:>12} ms, {total:>12} s total")

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds in all, those of the step that runs included."""
        return {"version": _VERSION, "running": self.running + self._now() - self.start_time}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the seconds of an earlier process; the step that runs begins now.

        Raises:
            ValueError: If it is no state of a timer.
        """
        if state_dict.get("version") != _VERSION or not isinstance(state_dict.get("running"), (int, float)):
            raise ValueError(f"This is no state of a TimestampedTimer: {dict(state_dict)!r}.")
        self.running, self.start_time = float(state_dict["running"]), self._now()
