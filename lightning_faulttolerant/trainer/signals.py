"""Stop signals, and a deadline that is known in advance: both end a fit so that its state is saved in time.

The handler of a signal only sets a flag. At a boundary the ranks agree, save and end.

The thread of `Watch` intervenes if the main thread can't reach a boundary by itself. If a sole rank waits for a
batch that a stuck worker never delivers, or is about to exceed its grace period, the thread sends the signal again, and
the handler then raises. When the grace period is over, it ends the process, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import FrameType

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.processes import end_process

_log = logging.getLogger(__name__)

DEADLINE_EXIT_CODE = 75
"""The exit code of a run that a deadline has stopped: sysexits' "temporary failure", run it again."""
REQUEUED_EXIT_CODE = 76
"""The exit code of a run that was saved, with its SLURM job queued again."""
UNSAVED_EXIT_CODE = 74
"""The exit code of a stopped run that could not write its state: sysexits' "input/output error"."""
NOT_REPEATED_EXIT_CODE = 77
_NO_HURRY_SECONDS = 86_400.0
"""The exit code of a run that does not repeat exactly what it did before: sysexits' "permission denied"."""

_STUCK_FETCH_SECONDS = 1.0
_FETCH = "waited for a batch from a worker"
_GRACE = "could not reach the next batch within its grace period"
# The share of the grace period that is left for a save and for the end of the process, at least and at most.
_RESERVED_SHARE = 0.2
_MAX_RESERVED_SHARE = 0.8
# A save takes at most this many times as long as the longest save before.
_SAVE_FACTOR = 1.2

_Handler = Callable[[int, "FrameType | None"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopReason:
    """Why a run is to stop.

    Args:
        name: The cause of the stop.
        exit_code: The exit code of the process.
        requeues: Whether the SLURM job is to be queued again once the state is saved.
    """

    name: str
    exit_code: int
    requeues: bool = False

    def to_text(self) -> str:
        """Return the reason as text, for the other ranks."""
        return f"{self.exit_code} {int(self.requeues)} {self.name}"

    @classmethod
    def from_text(cls, text: str) -> StopReason:
        """Return the reason that `to_text` has written."""
        exit_code, requeues, name = text.split(" ", 2)
        return cls(name=name, exit_code=int(exit_code), requeues=requeues == "1")


def exit_code(signum: int) -> int:
    """Return the exit code of a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + signum


def signal_reason(signum: int, *, requeues: bool = False) -> StopReason:
    """Return the stop reason for a signal."""
    return StopReason(name=signal.Signals(signum).name, exit_code=exit_code(signum), requeues=requeues)


def stopped_by(reason: StopReason, where: str, unsaved: str = "") -> TrainingStopped:
    """Return the exception that ends the process.

    Args:
        reason: Why the run stops.
        where: The place in the run.
        unsaved: Why the state of that place could not be saved, if that failed.
    """
    stopped = TrainingStopped(reason.exit_code, f"Stopped by {reason.name} {where}", reason.name)
    say_unsaved(stopped, unsaved)
    return stopped


def say_unsaved(stopped: TrainingStopped, unsaved: str) -> None:
    """If a save failed, report in the message and the exit code that the last autosave is older, but only once."""
    if unsaved and stopped.code != UNSAVED_EXIT_CODE:
        stopped.code, stopped.reason = UNSAVED_EXIT_CODE, f"{stopped.reason}. {unsaved}"


class GracePeriod:
    """The time that the process may take to end, from the request to stop on.

    Args:
        grace_seconds: How long it may take after a signal.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.seconds = grace_seconds
        self.save_seconds: Callable[[], float] = lambda: 0.0
        """Returns how long a save takes, from earlier saves."""
        self.announced_seconds: Callable[[], float] = lambda: 0.0
        """Returns how long the SLURM job may still run, when its end is announced."""
        self.began_at = 0.0
        self.ends_at = float("inf")

    def begin(self, reason: StopReason, seconds: float | None) -> None:
        """Begin the period.

        Args:
            reason: Why the run stops.
            seconds: How long the period is. Default: as after a signal, or the time to the announced end if longer.
        """
        if seconds is None:
            is_announced = reason.requeues or reason.exit_code == DEADLINE_EXIT_CODE
            seconds = max(self.announced_seconds() if is_announced else 0.0, self.seconds)
        self.began_at = time.monotonic()
        self.ends_at = self.began_at + seconds

    @property
    def length(self) -> float:
        """The length of the period in seconds."""
        return self.ends_at - self.began_at

    def seconds_left(self) -> float:
        """Return how much of the period is left."""
        return self.ends_at - time.monotonic()

    def save_fits(self, seconds_left: float) -> bool:
        """Return whether a save fits in `seconds_left`."""
        return self.save_seconds() * _SAVE_FACTOR <= seconds_left

    def reserved_seconds(self) -> float:
        """Return how much of the end of the period is reserved for the last save."""
        needed = max(_RESERVED_SHARE * self.length, _SAVE_FACTOR * self.save_seconds())
        return min(needed, _MAX_RESERVED_SHARE * self.length)


class _Handlers:
    """The handlers of the stop signals: installed for a fit, and restored after it.

    Args:
        signals: The signals to handle.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self.requeue_signal: signal.Signals | None = None
        self._previous: dict[int, tuple[object, object]] = {}
        self.are_installed = threading.Event()

    def install(
        self, handler: _Handler, originals: Mapping[int, object], requeue_signal: signal.Signals | None
    ) -> None:
        """Let `handler` handle the signals, and keep the original handlers, which it may call in addition."""
        self.requeue_signal = requeue_signal
        for signum in dict.fromkeys([*self._signals, *([] if requeue_signal is None else [requeue_signal])]):
            if signal.getsignal(signum) is signal.SIG_IGN:  # as a shell leaves SIGINT for a command in the background
                continue
            self._previous[signum] = (signal.getsignal(signum), originals.get(signum))
            signal.signal(signum, handler)
        self.are_installed.set()

    def uninstall(self, handler: _Handler) -> None:
        """Give the signals back, unless other code has taken them since."""
        self.are_installed.clear()
        for signum, (previous, _) in self._previous.items():
            if signal.getsignal(signum) == handler:
                signal.signal(signum, previous)  # type: ignore[arg-type]  # what getsignal has returned
        self._previous.clear()

    def original(self, signum: int) -> object:
        """Return the script's own handler of a signal, or ``None``."""
        return self._previous.get(signum, (None, None))[1]

    def any_signal(self) -> int | None:
        """Return a signal that the handler receives, or ``None`` if it receives none."""
        return next(iter(self._previous), None) if self.are_installed.is_set() else None


class StopSignals:
    """Handles stop signals from `install` to `uninstall`, and knows whether and by when the run must end.

    Args:
        signals: The signals to handle.
        grace_seconds: How long the process may take to end after the first signal.
    """

    def __init__(self, signals: Iterable[signal.Signals], *, grace_seconds: float) -> None:
        self.grace = GracePeriod(grace_seconds)
        self._handlers = _Handlers(signals)
        self._must_raise: str | None = None
        self._has_signal = False
        self._held_back: tuple[int, BaseException] | None = None
        """The exception that a handler of the script has raised. It is logged later, outside of the handler."""
        self.requested: StopReason | None = None
        self._raised_at = float("-inf")
        self._saving = False
        self.is_alone = True
        """Whether the main thread may be interrupted. If there are other ranks, one may wait for it in a collective."""
        self.before_hard_end: Callable[[StopReason], None] = lambda reason: None
        self.broke_fetch = False
        self.fetch_began: float | None = None
        """When the fetch in progress began, if its batch comes from workers."""

    def install(self, original_handlers: Mapping[int, object], *, requeue_signal: signal.Signals | None = None) -> None:
        """Take over the signals.

        Args:
            original_handlers: The handlers to call in addition. `uninstall` does not restore these.
            requeue_signal: One more signal. On it, the SLURM job is queued again.
        """
        if threading.current_thread() is not threading.main_thread():
            _log.warning("fit does not run in the main thread, so stop signals end it without a save.")
            return
        self._handlers.install(self._handle, original_handlers, requeue_signal)

    def uninstall(self) -> None:
        """Give the signals back, unless other code has taken them since."""
        self._handlers.uninstall(self._handle)
        self._tell_held_back()

    def _tell_held_back(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            signum, error = held_back
            name = signal.Signals(signum).name
            _log.warning(
                "The script's own handler of %s has raised %r. The run saves anyway, and ends as after any %s.",
                name,
                error,
                name,
            )

    def note(self, reason: StopReason, seconds: float | None = None) -> None:
        """Note that the run is to stop. The first of several reasons counts.

        Args:
            reason: The reason; it may be another rank's.
            seconds: How long the run may take. Default: the grace period, or the time to the announced end if longer.
        """
        if reason.exit_code == NOT_REPEATED_EXIT_CODE:  # nobody ends this process, and there is nothing to save
            seconds = _NO_HURRY_SECONDS
        if self.requested is None:
            self.grace.begin(reason, seconds)
            self.requested = reason

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Protect the main thread from interruption inside this context: the state is being saved."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._must_raise is not None:
            because, self._must_raise = self._must_raise, None
            if because == _FETCH and self.fetch_began is None:  # the batch came after all: the next boundary is near
                return
            self.broke_fetch = self.fetch_began is not None
            raise stopped_by(self.requested or signal_reason(signum), f"while it {because}")
        is_second, self._has_signal = self._has_signal, True
        if is_second or (self.requested is not None and self.is_alone):
            if signum == signal.SIGINT:
                raise stopped_by(signal_reason(signum), "at once, at the second signal")
            return
        # All ranks may have received the signal, and another rank told this one before its own handler could run.
        self.note(signal_reason(signum, requeues=signum == self._handlers.requeue_signal))
        original = self._handlers.original(signum)
        if callable(original) and original is not signal.default_int_handler:
            try:
                original(signum, frame)
            except BaseException as error:  # noqa: BLE001 - usually sys.exit: it would end the run unsaved
                self._held_back = signum, error

    def look(self) -> None:
        """Intervene if it is time. The thread of `Watch` calls this."""
        self._tell_held_back()
        reason = self.requested
        if reason is None:
            return
        if time.monotonic() >= self.grace.ends_at:
            self.before_hard_end(reason)
            end_process(
                reason.exit_code,
                f"{reason.name} has asked the run to stop, but the process could not end within its grace period of "
                f"{self.grace.length:g} seconds. It is ended now; the last autosave stays.",
            )
        because = None if self._saving or not self.is_alone else self._why_stuck()
        signum = self._handlers.any_signal()
        if because is not None and signum is not None:
            self._must_raise = because
            signal.pthread_kill(threading.main_thread().ident or 0, signum)
            self._raised_at = time.monotonic()  # not again before the next time-out

    def _why_stuck(self) -> str | None:
        now = time.monotonic()
        fetch_began = self.fetch_began
        since = max(self.grace.began_at, self._raised_at)
        if fetch_began is not None and now - max(fetch_began, since) > _STUCK_FETCH_SECONDS:
            return _FETCH
        return _GRACE if now - since > self.grace.length - self.grace.reserved_seconds() else None


RESERVE_SECONDS = 10.0
"""The time kept free for the end of the process, besides the time for a save and for a batch."""
_DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def checked_deadline(deadline: datetime | timedelta | str | None) -> float | None:
    """Return a deadline as seconds since 1970.

    Args:
        deadline: The deadline. A ``datetime`` without a time zone is in local time, a ``timedelta`` counts from now. A
            string is either of them as Python prints it.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is a ``timedelta`` that is not positive, or a string that is neither.
    """
    if deadline is None:
        return None
    if isinstance(deadline, str):
        deadline = _parsed(deadline)
    if isinstance(deadline, timedelta):
        if deadline <= timedelta(0):
            raise ValueError(f"deadline must be positive if it is a timedelta, got {deadline}.")
        return time.time() + deadline.total_seconds()
    if not isinstance(deadline, datetime):
        raise TypeError(f"deadline must be a datetime or a timedelta, got {deadline!r}.")
    return deadline.timestamp()


def duration(text: str) -> timedelta | None:
    """Return `text`, such as ``0:05:00`` or ``2 days, 4:00:00``, as a duration; ``None`` if it is not one."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = found.groups()
    return timedelta(days=int(days or 0), hours=int(hours), minutes=int(minutes), seconds=float(seconds))


def _parsed(text: str) -> datetime | timedelta:
    """Return `text` as a time or a duration: configuration files have no type for either."""
    from_now_on = duration(text)
    if from_now_on is not None:
        return from_now_on
    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text))  # Python 3.10 does not know the Z
    except ValueError:
        raise ValueError(
            f"deadline is {text!r}, which is neither a time such as '2026-12-31 18:30:00+01:00' nor a duration"
            " such as '4:00:00' or '2 days, 4:00:00'."
        ) from None


class Deadline:
    """Knows when a run has to stop to be saved before its deadline.

    The time in between is that of a save, plus the longest time between two batches so far, of training or validation,
    plus `RESERVE_SECONDS`.

    Args:
        at: The deadline, in seconds since 1970.
        save_seconds: Returns how long a save takes, known from earlier saves.
        progress: Returns a value that changes with every batch.
        clock: Returns the time, in seconds since 1970.
    """

    def __init__(
        self,
        at: float,
        *,
        save_seconds: Callable[[], float],
        progress: Callable[[], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.at = at
        self._save_seconds = save_seconds
        self._progress = progress
        self._clock = clock
        self._seen: object = progress()
        self._seen_at: float | None = None
        self._longest = 0.0

    def seconds_left(self) -> float:
        """Return the time until the deadline."""
        return self.at - self._clock()

    def is_near(self) -> bool:
        """Return whether it is time to stop. Call this a few times a second."""
        now = self._clock()
        seen = self._progress()
        if seen != self._seen:
            if self._seen_at is not None:
                self._longest = max(self._longest, now - self._seen_at)
            self._seen, self._seen_at = seen, now
        return now >= self.at - RESERVE_SECONDS - _SAVE_FACTOR * self._save_seconds() - self._longest
