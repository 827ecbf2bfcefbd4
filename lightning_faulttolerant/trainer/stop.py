"""Stop signals: a handler only sets a flag; at a boundary the ranks agree, save and end.

A watcher thread steps in where the main thread can't reach a boundary by itself: it waits for a batch that a stuck
worker never delivers, or the grace period is over. It sends the signal once more, and the handler then raises.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

from lightning_faulttolerant.errors import TrainingStopped

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_STUCK_FETCH_SECONDS = 1.0
_FETCH = "waited for a batch from a worker"
_GRACE = "could not reach the next batch within its grace period"
# What is left of the grace period for a save and for the end of the process.
_RESERVED_SHARE = 0.2


def exit_code(signum: int) -> int:
    """Return the exit code of a process that ended for a signal: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + signum


def stopped_by(signum: int, where: str) -> TrainingStopped:
    """Return the exception that ends the process for a signal."""
    return TrainingStopped(exit_code(signum), f"Stopped by {signal.Signals(signum).name} {where}")


class StopSignals:
    """Handles stop signals from `install` to `uninstall`.

    Args:
        signals: Which.
        grace_seconds: How long after the first one the process has to end.
    """

    def __init__(self, signals: Iterable[signal.Signals], *, grace_seconds: float) -> None:
        self._signals = tuple(signals)
        self._grace_seconds = grace_seconds
        self._previous: dict[int, Any] = {}
        self._installed = threading.Event()
        self._must_raise: str | None = None
        self._main_thread = threading.main_thread().ident
        self.requested: int | None = None
        self._requested_at = 0.0
        self._saving = False
        self.broke_fetch = False
        self.fetch_began: float | None = None
        """When the fetch that is under way began, if its batch comes from workers."""

    def install(self, original_handlers: Mapping[int, Any]) -> None:
        """Take over the signals; `original_handlers` are those to call besides, and what `uninstall` leaves alone."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("Stop signals are not handled: fit does not run in the main thread.")
            return
        for signum in self._signals:
            if signal.getsignal(signum) is signal.SIG_IGN:  # as a shell leaves SIGINT for a command in the background
                continue
            self._previous[signum] = (signal.getsignal(signum), original_handlers.get(signum))
            signal.signal(signum, self._handle)
        self._installed.set()
        threading.Thread(target=self._watch, name="fault-tolerance-stop", daemon=True).start()

    def uninstall(self) -> None:
        """Give the signals back, where nobody else has taken them since."""
        self._installed.clear()
        for signum, (previous, _) in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, previous)
        self._previous.clear()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let the watcher wait meanwhile: the state is being saved."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._must_raise is not None:
            because, self._must_raise = self._must_raise, None
            if because == _FETCH and self.fetch_began is None:  # it came after all: the next boundary is near
                return
            self.broke_fetch = self.fetch_began is not None
            raise stopped_by(self.requested or signum, f"while it {because}")
        if self.requested is not None:
            if signum == signal.SIGINT:
                raise stopped_by(signum, "at once, at the second signal")
            return
        self._requested_at = time.monotonic()
        self.requested = signum
        original = self._previous.get(signum, (None, None))[1]
        if callable(original) and original is not signal.default_int_handler:
            original(signum, frame)

    def _watch(self) -> None:
        while self._installed.is_set():
            time.sleep(_POLL_SECONDS)
            requested = self.requested
            because = None if requested is None or self._saving else self._why_stuck()
            if requested is not None and because is not None and self._installed.is_set():
                self._must_raise = because
                signal.pthread_kill(self._main_thread or 0, requested)
                self._requested_at = time.monotonic()  # not again before the next time-out

    def _why_stuck(self) -> str | None:
        now = time.monotonic()
        fetch_began = self.fetch_began
        if fetch_began is not None and now - max(fetch_began, self._requested_at) > _STUCK_FETCH_SECONDS:
            return _FETCH
        return _GRACE if now - self._requested_at > self._grace_seconds * (1 - _RESERVED_SHARE) else None


class Agreement(Protocol):
    """How ranks agree at which boundary all of them stop."""

    def stop_signal(self, requested: int | None) -> int | None:
        """Return the signal to stop for at this boundary, or ``None`` to go on; called at every boundary."""


class SoleRank:
    """The agreement of a single rank with itself."""

    def stop_signal(self, requested: int | None) -> int | None:
        """Return what was requested."""
        return requested


class StoreAgreement:
    """Ranks agree over a key-value store (torch's ``Store``): no collective, no device, and nobody waits.

    A rank that is asked to stop proposes a boundary that no rank can have passed yet; the first proposal wins, and so
    does its signal. Every rank looks at each of its boundaries, so all see it before they come to that one.

    Args:
        store: With ``compare_set``, ``check`` and ``get``.
        prefix: Of the key, so that several fits can share a store.
        max_drift: How many boundaries one rank can be ahead of another: 0 where each step has a collective, the batches
            of an accumulation window where only its last one has.
    """

    def __init__(self, store: Any, *, prefix: str, max_drift: int) -> None:
        self._store = store
        self._key = f"{prefix}/stop"
        self._max_drift = max_drift
        self._boundary = -1
        self._stop_at: int | None = None
        self._signal = 0

    def stop_signal(self, requested: int | None) -> int | None:
        """Return the signal to stop for at this boundary, or ``None`` to go on; called at every boundary."""
        self._boundary += 1
        if self._stop_at is None:
            self._look(requested)
        return self._signal if self._stop_at is not None and self._boundary >= self._stop_at else None

    def _look(self, requested: int | None) -> None:
        if requested is not None:
            # A rank that is not ahead may have passed this boundary already, and is on its way to the next.
            proposal = f"{requested} {self._boundary + 1 + self._max_drift}"
            found = self._store.compare_set(self._key, "", proposal)
        elif self._store.check([self._key]):
            found = self._store.get(self._key)
        else:
            return
        self._signal, self._stop_at = (int(number) for number in found.split())
