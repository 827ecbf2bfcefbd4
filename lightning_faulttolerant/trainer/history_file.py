"""Where the history of a run is kept: a file that is appended to, or an object that is replaced now and then.

An object in a store can't be appended to. There the process keeps the lines in memory, with those that were there
before, and sends all of them when a fit begins, starts and ends, and meanwhile once a minute, in a thread of its own.
Only who holds the lock of the run writes; see docs/decisions/0031-history.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

from lightning_faulttolerant.checkpoint.background import BackgroundWriter
from lightning_faulttolerant.checkpoint.store import is_url, open_writer
from lightning_faulttolerant.records.history import ALIVE, AUTOSAVE, DONE, FILE_NAME
from lightning_faulttolerant.records.lines import Line, append_line, parse_lines, read_lines
from lightning_faulttolerant.records.shortening import shortened, text_of

if TYPE_CHECKING:
    from lightning_faulttolerant.checkpoint.stores.remote import RemoteStore

_log = logging.getLogger(__name__)

MAX_BYTES = 1_000_000
MAX_REMOTE_BYTES = 200_000
_MAX_UNWRITTEN = 1000
SENT_EVERY_SECONDS = 60.0


class HistoryFile(Protocol):
    """The history of one run, to which one process at a time adds."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line."""

    def lines(self) -> list[Line]:
        """Return all lines that there are, or raise what reading them does."""

    def flush(self) -> None:
        """Wait until all lines are where they belong."""

    def close(self) -> None:
        """Note that the script came to its normal end, if there is any history."""

    def announce(self, error: Exception) -> None:
        """Say once that it can't be written."""


def open_history(directory: str, *, check: Callable[[], None]) -> HistoryFile:
    """Return the history of a run; nothing is read or written yet.

    Args:
        directory: The run's, here or below a URL.
        check: Raises if the directory is not ours any more.
    """
    return RemoteHistory(directory, check=check) if is_url(directory) else LocalHistory(directory)


class _Announced:
    """Says something once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_spoken = False

    def say(self, error: Exception) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _log.warning(
                "The history of this run can't be written to %s; training continues without: %s: %s",
                self._path, type(error).__name__, error,
            )  # fmt: skip


@final
class LocalHistory:
    """A file, to which each line is appended at once.

    Args:
        directory: Of the run; it exists.
        max_bytes: How long the file may become before it is shortened.
    """

    def __init__(self, directory: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = os.path.join(directory, FILE_NAME)
        self._max_bytes = max_bytes
        self._room = max_bytes
        self._unwritten: list[Mapping[str, Any]] = []
        """What a full disk has not taken yet; the next line brings it along."""
        self._announced = _Announced(self.path)
        self._lock = threading.Lock()

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line, and those before it for which there was no room."""
        with self._lock:
            if self._unwritten and line["event"] == self._unwritten[-1]["event"] == ALIVE:
                self._unwritten.pop()  # the newer one tells all
            self._unwritten = [*self._unwritten, line][-_MAX_UNWRITTEN:]
            while self._unwritten:
                append_line(self.path, self._unwritten[0])
                del self._unwritten[0]
            if os.stat(self.path).st_size > self._room:
                self._shorten()

    def lines(self) -> list[Line]:
        """Return all lines that there are."""
        return read_lines(self.path)

    def flush(self) -> None:
        """Do nothing: each line is there already."""

    def close(self) -> None:
        """Note that the script came to its normal end, if there is any history."""
        if os.path.exists(self.path):
            try:
                self.add(_done())
            except OSError as error:
                self.announce(error)

    def announce(self, error: Exception) -> None:
        """Say once that it can't be written."""
        self._announced.say(error)

    def _shorten(self) -> None:
        text = text_of(shortened(read_lines(self.path), max_bytes=self._max_bytes))
        self._room = max(self._max_bytes, 2 * len(text))  # even if it does not help, or fails: not at each line
        with open_writer(self.path, fsync=False) as file:
            file.write(text)


@final
class RemoteHistory:
    """An object, replaced as a whole in a thread of its own.

    Args:
        directory: URL of the run.
        check: Raises if it is not ours any more: asked before each replacement.
        max_bytes: How long the object may become before it is shortened.
        every_seconds: How often it is replaced while nothing begins, starts or ends.
    """

    def __init__(
        self,
        directory: str,
        *,
        check: Callable[[], None],
        max_bytes: int = MAX_REMOTE_BYTES,
        every_seconds: float = SENT_EVERY_SECONDS,
    ) -> None:
        self._url = directory
        self._check = check
        self._max_bytes = max_bytes
        self._every_seconds = every_seconds
        self._announced = _Announced(f"{directory}/{FILE_NAME}")
        self._lock = threading.Lock()
        self._writer = BackgroundWriter("history")
        self._earlier: list[Line] | None = None
        """What was there before; ``None`` until it was read: nothing is written before."""
        self._lines: list[Line] = []
        self._num_added = self._num_sent = 0
        self._sent_at = float("-inf")

    def add(self, line: Mapping[str, Any]) -> None:
        """Keep a line, and begin to send all of them if that is due."""
        with self._lock:
            if self._lines and line["event"] == self._lines[-1]["event"] == ALIVE:
                self._lines.pop()  # the newer one tells all
            self._lines.append(dict(line))
            self._num_added += 1
            is_due = time.monotonic() - self._sent_at >= self._every_seconds
            # In the lock: a thread that writes autosaves adds lines, too, and only one of the two may begin.
            if (is_due or line["event"] not in (ALIVE, AUTOSAVE)) and not self._writer.is_busy:
                self._take_error()
                self._sent_at = time.monotonic()
                self._writer.start(self._send)

    def lines(self) -> list[Line]:
        """Return all lines that there are, sent or not."""
        earlier = self._read()
        with self._lock:
            return [*earlier, *self._lines]

    def flush(self) -> None:
        """Wait until all lines are sent."""
        self._writer.wait()
        self._take_error()
        if self._num_sent < self._num_added:
            self._send()

    def close(self) -> None:
        """Note that the script came to its normal end, if there is any history."""
        try:
            if not self._lines and not self._read():
                return
            self._writer.wait()
            with self._lock:
                self._lines.append(_done())
                self._num_added += 1
            self.flush()
        except Exception as error:  # noqa: BLE001 - nobody waits for it any more
            self.announce(error)

    def announce(self, error: Exception) -> None:
        """Say once that it can't be written."""
        self._announced.say(error)

    def _take_error(self) -> None:
        error = self._writer.take_error()
        if isinstance(error, Exception):
            self.announce(error)
        elif error is not None:
            raise error

    @property
    def _store(self) -> RemoteStore:
        from lightning_faulttolerant.checkpoint.stores.remote import RemoteStore

        return RemoteStore(self._url)

    def _read(self) -> list[Line]:
        if self._earlier is None:
            self._earlier = parse_lines(self._store.read(FILE_NAME) or b"")
        return self._earlier

    def _send(self) -> None:
        earlier = self._read()
        with self._lock:
            lines, num_added = [*earlier, *self._lines], self._num_added
            text = text_of(lines)
            if len(text) > self._max_bytes:
                lines = shortened(lines, max_bytes=self._max_bytes)
                self._earlier, self._lines = lines, []
                text = text_of(lines)
        self._check()
        self._store.replace(FILE_NAME, text)
        self._num_sent = num_added


def _done() -> Line:
    return {"event": DONE, "time": round(time.time(), 3)}
