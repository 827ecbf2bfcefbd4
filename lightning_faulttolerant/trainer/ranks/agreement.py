"""How ranks agree on a boundary to stop at, or to save at when a save is due, without a collective.

In each rank a thread speaks for the rank, even while its main thread is busy. When a rank wants to stop or save, each
thread promises a boundary that its rank will not pass before it knows the decision. Rank 0 then appoints the furthest
of these boundaries, which no rank has passed. A rank that reaches its promised boundary early waits there. It waits
only for the threads of the other ranks, never for their training, so nothing can hang. While no rank wants anything, a
boundary costs one comparison.

Inside a validation run, the ranks stop at one of its batches if all of them reach it. They may have different numbers
of batches. When one rank runs out of batches first, the run is finished, and all stop at the next boundary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_faulttolerant.errors import RanksLostError

Message = dict[str, Any]

STOP: Final = "stop"
SAVE: Final = "save"
_NEVER = float("inf")
_HOLD_SECONDS = 0.005
# A save is appointed this far ahead, so the other ranks hear of it before they get there.
_AHEAD_SECONDS = 0.5


@dataclass(kw_only=True)
class _ValidationRun:
    """A validation run of this rank; numbers count all validation runs, including the sanity check."""

    number: int
    batch: int = -1
    limit: float = _NEVER
    appointed: int | None = None
    verdict: str | None = None
    is_over: bool = False
    is_here: bool = False
    sent: set[str] = field(default_factory=set)


class Member:
    """One rank's side of the agreement. The main thread calls the first methods, the speaking thread the rest."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.boundary = -1
        """The number of the boundary that this rank reached last, in this fit and process."""
        self.stop: str | None = None
        """Why all ranks are to stop, once rank 0 has said so: the reason of the first rank that wanted to."""
        self.lost: str | None = None
        """Why the ranks can't do anything together anymore."""
        self.outbox: deque[Message] = deque()
        self._clock = clock
        self._limit: float = _NEVER
        self._appointed: tuple[int, str] | None = None
        self._wanted: set[str] = set()  # what this rank has asked for
        self._run: _ValidationRun | None = None
        self._num_runs = 0
        self._runs_asked_for: set[int] = set()
        self._passed: deque[tuple[float, int]] = deque()

    # For the main thread.

    def at_boundary(self) -> str | None:
        """Return what all ranks do at this boundary, which this rank has just reached: stop, save, or nothing.

        Raises:
            RanksLostError: If another rank is lost while this one waits.
        """
        self.boundary += 1
        return None if self.boundary < self._limit else self._hold()

    def want_save(self, window: Mapping[str, int]) -> None:
        """Let all ranks save at a boundary soon: at the end of an accumulation window, once that is near.

        It does not ask earlier, because a stop requested in between has to wait for the appointed boundary.

        Args:
            window: The accumulation window of this boundary: ``batch``, ``num_batches``, ``length`` of `end_of_window`.
        """
        end = end_of_window(self.boundary + 1, boundary=self.boundary, **window)
        if SAVE not in self._wanted and end - self.boundary <= max(2 * self._ahead(), 1):
            self._wanted.add(SAVE)
            self.outbox.append({"ask": SAVE, "window": {**window, "boundary": self.boundary}})

    def want_stop(self, reason: str) -> None:
        """Let all ranks stop; may also be called by another thread."""
        if STOP not in self._wanted:
            self._wanted.add(STOP)
            self.outbox.append({"ask": STOP, "reason": reason})

    def begin_run(self) -> None:
        """Note that a validation run begins."""
        self._num_runs += 1
        self._run = _ValidationRun(number=self._num_runs)

    def at_validation_batch(self) -> bool:
        """Return whether all ranks stop before this batch of the validation run, each before its own.

        Raises:
            RanksLostError: If another rank is lost while this one waits.
        """
        run = self._run
        if run is None:
            return False
        run.batch += 1
        while run.batch >= run.limit:
            if run.verdict is not None:
                run.limit = _NEVER
                return run.verdict == STOP
            run.is_here = run.appointed is not None
            self._wait()
        return False

    def end_batches(self) -> None:
        """Note that this rank has no more batches in the validation run."""
        if self._run is not None:
            self._run.is_over = True

    def _hold(self) -> str | None:
        while self.boundary >= self._limit:
            appointed = self._appointed
            if appointed is not None:
                place, wish = appointed
                if self.boundary > place:
                    raise RanksLostError(
                        f"the ranks agreed to {wish} at boundary {place}, but this rank is already at {self.boundary}"
                    )
                self._appointed, self._limit = None, _NEVER
                self._wanted.discard(SAVE)
                self.outbox.append({"done": place})
                return wish
            self._wait()
        return None

    def _wait(self) -> None:
        if self.lost is not None:
            raise RanksLostError(self.lost)
        time.sleep(_HOLD_SECONDS)

    @property
    def place(self) -> tuple[int, int, int]:
        """A value that changes with every batch."""
        run = self._run
        return self.boundary, self._num_runs, -1 if run is None else run.batch

    @property
    def is_busy(self) -> bool:
        """Whether an agreement is in progress."""
        return bool(self._wanted) or self.stop is not None or self._limit != _NEVER

    # For the thread that speaks for this rank.

    def tick(self) -> None:
        """Queue the messages that are due now."""
        now = self._clock()
        self._passed.append((now, self.boundary))
        while now - self._passed[0][0] > _AHEAD_SECONDS:
            self._passed.popleft()
        run = self._run
        if run is not None and self.stop is not None:
            self._speak_of_run(run)

    def hear(self, message: Message) -> None:
        """Take note of a message that rank 0 sends to all ranks."""
        if "stop" in message:
            self.stop = message["stop"]
        elif "round" in message:
            self.outbox.append({"limit": self._promise(message["round"])})
        elif "at" in message:
            # In this order: a waiting thread must not see the appointment, act on it, and find the limit set again.
            self._limit = message["at"]
            self._appointed = (message["at"], message["wish"])
        else:
            self._hear_of_run(message)

    def _ahead(self) -> int:
        """Return how many boundaries this rank passes while a message is on its way."""
        return self.boundary - self._passed[0][1] if self._passed else 0

    def _promise(self, wish: str) -> int:
        ahead = self._ahead() if wish == SAVE else 0
        while True:
            limit = self.boundary + 1 + ahead
            self._limit = limit
            if self.boundary < limit:  # otherwise the main thread has just passed it
                return limit

    def _speak_of_run(self, run: _ValidationRun) -> None:
        for number in [number for number in self._runs_asked_for if number < run.number]:
            self._runs_asked_for.remove(number)
            self.outbox.append({"run": number, "limit": None})
        if run.is_over or run.is_here:
            what = "over" if run.is_over else "here"
            if not run.sent & {"over", "here"}:
                run.sent |= {what, "limit"}
                self.outbox.append({what: run.number})
        elif "limit" not in run.sent:
            run.sent.add("limit")
            limit = self._promise_in(run)
            self.outbox.append({"run": run.number, "limit": limit})

    def _promise_in(self, run: _ValidationRun) -> int:
        while True:
            limit = run.batch + 1
            run.limit = limit
            if run.batch < limit:
                return limit

    def _hear_of_run(self, message: Message) -> None:
        run = self._run
        if "run" in message:
            self._runs_asked_for.add(message["run"])
        if run is None:
            return
        if message.get("run_at") == run.number and run.verdict is None:
            run.limit = message["batch"]
            run.appointed = message["batch"]
        elif message.get("run_ends") == run.number:
            run.verdict = message["verdict"]


class Chair:
    """Rank 0's part for all: it hears every rank, including itself, and sends the decision to all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.outbox: deque[Message] = deque()
        self._stop: str | None = None
        self._window: Mapping[str, int] | None = None
        self._wish: str | None = None
        self._has_stopped = False
        self._limits: dict[int, int] = {}
        self._done: set[int] = set()
        self._runs: dict[int, dict[int, int | None]] = {}
        self._here: dict[int, set[int]] = {}
        self._verdicts: dict[int, str] = {}
        self._failed: set[int] = set()

    def hear(self, rank: int, message: Message) -> None:
        """Take note of a message from a rank."""
        if "failed" in message:
            self._hear_of_failure(rank, message)
        elif "ask" in message:
            self._hear_wish(message)
        elif "run" in message:
            self._hear_of_run(rank, message["run"], message["limit"])
        elif "limit" in message:
            self._hear_promise(rank, message["limit"])
        elif "done" in message:
            self._done.add(rank)
            if len(self._done) == self._num_ranks:
                self._has_stopped, self._wish = self._wish == STOP, None
                self._begin_round()
        elif "here" in message:
            self._here.setdefault(message["here"], set()).add(rank)
            if len(self._here[message["here"]]) == self._num_ranks:
                self._end_run(message["here"], STOP)
        elif "over" in message:
            self._end_run(message["over"], "continue")

    def _hear_of_failure(self, rank: int, message: Message) -> None:
        if not message["lost"]:
            self._failed.add(rank)
        self.outbox.append(message)
        if len(self._failed) == self._num_ranks:
            self.outbox.append({"all_failed": True})

    def _hear_wish(self, message: Message) -> None:
        if message["ask"] == SAVE:
            self._window = message["window"]
        elif self._stop is None:
            self._stop = message["reason"]
            self.outbox.append({"stop": self._stop})
        else:
            return
        self._begin_round()

    def _begin_round(self) -> None:
        if self._wish is None and not self._has_stopped and (self._stop is not None or self._window is not None):
            self._wish = STOP if self._stop is not None else SAVE
            self._limits, self._done = {}, set()
            self.outbox.append({"round": self._wish})

    def _hear_promise(self, rank: int, limit: int) -> None:
        self._limits[rank] = limit
        if len(self._limits) < self._num_ranks:
            return
        place = max(self._limits.values())
        self._wish = STOP if self._stop is not None else SAVE
        if self._wish == SAVE and self._window is not None:
            place = end_of_window(place, **self._window)
        self._window = None
        self.outbox.append({"at": place, "wish": self._wish})

    def _hear_of_run(self, rank: int, number: int, limit: int | None) -> None:
        if number in self._verdicts:  # sent before this rank was in that run
            self.outbox.append({"run_ends": number, "verdict": self._verdicts[number]})
            return
        if number not in self._runs:
            self.outbox.append({"run": number})
        limits = self._runs.setdefault(number, {})
        limits[rank] = limit
        if limit is None:
            self._end_run(number, "continue")
        elif len(limits) == self._num_ranks:
            self.outbox.append({"run_at": number, "batch": max(limit or 0 for limit in limits.values())})

    def _end_run(self, number: int, verdict: str) -> None:
        if number not in self._verdicts:
            self._verdicts[number] = verdict
            self.outbox.append({"run_ends": number, "verdict": verdict})


def end_of_window(place: int, *, boundary: int, batch: int, num_batches: int, length: int) -> int:
    """Return the first boundary from `place` on where no accumulation window is open, as far as can be known.

    Args:
        place: The number of a boundary.
        boundary: The number of an earlier boundary.
        batch: The batch of the epoch that follows the earlier boundary.
        num_batches: The number of batches in the epoch, 0 if unknown.
        length: The number of batches in a window.
    """
    following = batch + place - boundary
    if num_batches and following >= num_batches:
        return place
    end = place + -following % length
    return min(end, boundary + num_batches - batch) if num_batches else end
