"""Reports how long the steps of a script take, and its total time, across restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.streaming.world import current_world

_VERSION = 1


class TimestampedTimer:
    """Report the time since the last report, and the total time.

    Reports come from rank 0. The clock is monotonic: neither daylight saving nor a manual change affects it.

    Args:
        report: The text of the first report; by default "Start".
        start_time: The start of the first step, as of ``time.monotonic()``; by default now.
        running: Seconds that an earlier process counted.
        sync_cuda: Whether to wait for the GPU to finish its work before a time is taken.
        sink: Receives a line of text.
        rank: The rank of this process; by default read from the process group or the environment.

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
        """The total seconds until the last report."""
        self.start_time = self._now() if start_time is None else start_time
        """The start of the current step."""
        self._say(report or "Start", 0.0)

    def report(self, annot: str, ret: bool = False) -> float | None:
        """Report how long the step took that ends here; the next one begins.

        Args:
            annot: The name of the step.
            ret: Whether to return its seconds.
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
        except FaultToleranceError:  # the rank is not known yet; an extra report does no harm
            return True

    def _say(self, text: str, seconds: float) -> None:
        if self._is_heard():
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            step, total = f"{1000 * seconds:,.3f}", f"{self.running:,.3f}"
            self._sink(f"[ {stamp} ] {text:<70}{step:>12} ms, {total:>12} s total")

    def state_dict(self) -> dict[str, Any]:
        """Return the total seconds, including those of the current step."""
        return {"version": _VERSION, "running": self.running + self._now() - self.start_time}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the seconds of an earlier process. The current step begins now.

        Raises:
            ValueError: If it is not a state of a timer.
        """
        if state_dict.get("version") != _VERSION or not isinstance(state_dict.get("running"), (int, float)):
            raise ValueError(f"This is not a state of a TimestampedTimer: {dict(state_dict)!r}.")
        self.running, self.start_time = float(state_dict["running"]), self._now()
