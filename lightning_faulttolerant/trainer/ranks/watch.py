"""The thread that watches while a rank trains: it speaks for the rank, and ends a process that can't end by itself.

When a rank fails or dies, all other ranks learn of it. They can't continue, and most of them wait for that rank in a
collective, where no Python runs. A process that has not ended `ENDS_WITHIN_SECONDS` later is ended by this thread.

An exception that ends one rank of several is printed immediately, and only once. The teardown that follows may wait for
other ranks until the process is killed, and then Python prints nothing. If the exception does end the process, Python
would print the same traceback again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from lightning_faulttolerant.errors import RanksLostError, TrainingStopped
from lightning_faulttolerant.processes import end_process
from lightning_faulttolerant.trainer.ranks.agreement import Chair, Member
from lightning_faulttolerant.trainer.ranks.connection import Line
from lightning_faulttolerant.trainer.signals import StopReason, StopSignals

_log = logging.getLogger(__name__)

ENDS_WITHIN_SECONDS = 10.0
"""How long the other ranks may take to end after a rank fails or dies."""
_POLL_SECONDS = 0.1
_BUSY_POLL_SECONDS = 0.02
# Ranks learn of a stop, and end because of it, one shortly after another.
_LAST_SECONDS = 1.0

Message = dict[str, Any]
_Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_DIED: Message = {"text": "has died", "code": 1, "lost": True}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure or death of a rank."""

    rank: int
    text: str
    exit_code: int
    known_at: float


class _LookingThread:
    """A thread that looks again and again, from `start` to `close`. An exception does not end it.

    Args:
        look: Looks once.
        pause_seconds: Returns how long to wait before the next look.
    """

    def __init__(self, look: Callable[[], None], pause_seconds: Callable[[], float]) -> None:
        self._look = look
        self._pause_seconds = pause_seconds
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="fault-tolerance-watch", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause_seconds())
            self._wake.clear()
            try:
                self._look()
            except Exception:  # noqa: BLE001 - this thread must not end before the rank does
                _log.exception("The thread that watches the other ranks has failed.")


class Watch:
    """The watching thread, from `start` to `close`.

    Args:
        stop: The stop signals of this rank.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        line: The line to the other ranks; ``None`` for a single rank.
    """

    def __init__(self, stop: StopSignals, *, rank: int = 0, num_ranks: int = 1, line: Line | None = None) -> None:
        self._stop = stop
        self._rank = rank
        self._line = line
        self.member = Member()
        self._chair = Chair(num_ranks) if rank == 0 else None
        self.failure: Failure | None = None
        self.end_together = False
        """Whether all ranks end by agreement, so the end of one rank is not a failure."""
        self.looks: list[Callable[[], None]] = [stop.look]
        """Further checks, called a few times a second."""
        self._failures: list[Message] = []
        self._num_sent = 0
        self._thread = _LookingThread(self.look, lambda: _BUSY_POLL_SECONDS if self._is_busy() else _POLL_SECONDS)

    def start(self) -> None:
        """Start the thread."""
        _give_excepthook_back()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and say goodbye to the other ranks. May be called twice."""
        self._thread.close()
        if self._line is not None:
            self._talk(self._line)  # messages that are not sent yet: that this rank has failed
            self._line.close()
            self._line = None

    def fail(self, exception: BaseException) -> None:
        """Report the exception that ends this rank alone, here and to the others. Later calls do nothing."""
        is_reported = any(message["failed"] == self._rank for message in self._failures)
        if self._line is None or self.end_together or is_reported:
            return
        is_stop = isinstance(exception, TrainingStopped)
        text = str(exception.reason) if isinstance(exception, TrainingStopped) else repr(exception)
        if not is_stop:
            print_traceback(exception, self._rank)
        code = exception.code if isinstance(exception, TrainingStopped) and isinstance(exception.code, int) else 1
        # A rank that lost the others has not failed by itself, and may wait for work that they left undone.
        lost = isinstance(exception, RanksLostError)
        message = {"failed": self._rank, "text": f"has failed: {text[:1000]}", "code": code, "lost": lost}
        self._failures.append(message)
        self._thread.wake()
        reason = self._stop.requested
        if reason is not None and not is_stop and self._stop.grace.seconds_left() < _LAST_SECONDS:
            end_process(reason.exit_code, f"{reason.name} has ended another rank, so this one ends, too.")

    def _is_busy(self) -> bool:
        return self._line is not None and self.member.is_busy

    def look(self) -> None:
        """Do everything that is due now."""
        for look in self.looks:
            look()
        if self._line is not None:
            self._talk(self._line)
        failure = self.failure
        if failure is not None and time.monotonic() - failure.known_at > ENDS_WITHIN_SECONDS:
            who = "This rank" if failure.rank == self._rank else f"Rank {failure.rank}"
            end_process(
                failure.exit_code,
                f"{who} {failure.text}. This process could not end by itself within {ENDS_WITHIN_SECONDS:g} seconds, "
                "because it waits for another rank or for its own work. It is ended now; the last autosave stays.",
            )

    def _talk(self, line: Line) -> None:
        if self._stop.requested is not None:
            self.member.want_stop(self._stop.requested.to_text())
        for rank, message in line.receive():
            self._hear(rank, {**_DIED, "failed": rank} if message is None else message)
        self.member.tick()
        outgoing = []
        while self.member.outbox:
            outgoing.append(self.member.outbox.popleft())
        while len(self._failures) > self._num_sent:
            outgoing.append(self._failures[self._num_sent])
            self._num_sent += 1
        for message in outgoing:
            self._say(line, message)
        while self._chair is not None and self._chair.outbox:
            message = self._chair.outbox.popleft()
            line.send(message)
            self._learn(message)

    def _say(self, line: Line, message: Message) -> None:
        if "failed" in message:
            self._learn(message)
        if self._chair is None:
            line.send(message)
        else:
            self._hear(self._rank, message)

    def _hear(self, rank: int, message: Message) -> None:
        """Handle a message from `rank`: rank 0 hears all ranks, the others hear rank 0 only."""
        if self._chair is None:
            self._learn(message)
        else:
            self._chair.hear(rank, message)

    def _learn(self, message: Message) -> None:
        if "failed" in message:
            if self.failure is None and not self.end_together:
                self._note_failure(message)
        elif "all_failed" in message:  # no rank waits for another: each ends in its own time
            self.failure = None
            self.end_together = True
        else:
            self.member.hear(message)
            if self.member.stop is not None:
                self._stop.note(StopReason.from_text(self.member.stop))

    def _note_failure(self, message: Message) -> None:
        failure = Failure(
            rank=message["failed"], text=message["text"], exit_code=message["code"], known_at=time.monotonic()
        )
        self.failure = failure
        if failure.rank != self._rank:
            self.member.lost = f"rank {failure.rank} {failure.text}"
            sys.stderr.write(
                f"\n[rank {self._rank}] FaultTolerance: rank {failure.rank} {failure.text}. This rank can't continue"
                f" without it and ends within {ENDS_WITHIN_SECONDS:g} seconds; the last autosave stays.\n"
            )


def print_traceback(exception: BaseException, rank: int) -> None:
    """Print an exception with its traceback, and let Python add one line if it ends the process.

    Args:
        exception: The exception that ended the rank.
        rank: The number of the rank.
    """
    trace = "".join(traceback.format_exception(exception))
    sys.stderr.write(f"\n[rank {rank}] FaultTolerance: an exception has ended this rank.\n{trace}")
    sys.stderr.flush()
    _give_excepthook_back()
    # Not the exception itself: its frames hold the model.
    sys.excepthook = partial(_print_again, sys.excepthook, _innermost(exception), rank)


def _print_again(
    original: _Excepthook,
    printed: list[str],
    rank: int,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    _give_excepthook_back()
    if _innermost(error) != printed:
        original(kind, error, trace)
        return
    message = "".join(traceback.format_exception_only(kind, error)).rstrip()
    sys.stderr.write(f"[rank {rank}] {message}\n[rank {rank}] Its traceback is printed above.\n")


def _give_excepthook_back() -> None:
    """Put back the hook that was there: the printed exception has ended the process, or the script has caught it."""
    hook = sys.excepthook
    if isinstance(hook, partial) and hook.func is _print_again:
        sys.excepthook = hook.args[0]


def _innermost(error: BaseException) -> list[str]:
    """Return the last lines of a traceback. The first ones change as the exception leaves more functions."""
    return [*traceback.format_tb(error.__traceback__)[-1:], *traceback.format_exception_only(error)]
