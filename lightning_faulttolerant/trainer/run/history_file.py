"""Stores the history of a run: in a file that is appended to, or in an object that is replaced now and then.

An object in a store can't be appended to. The process therefore keeps all lines in memory, earlier ones included. It
sends them when a fit begins, starts, and ends, and once a minute in between, in a separate thread. Only the process
that holds the lock of the run writes; see docs/decisions/0031-history.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, final

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter
from lightning_faulttolerant.records.history import ALIVE, AUTOSAVE, DONE, FILE_NAME
from lightning_faulttolerant.records.lines import Line, append_line, parse_lines, read_lines
from lightning_faulttolerant.records.shortening import shortened, text_of
from lightning_faulttolerant.storage.store import is_url, open_writer

if TYPE_CHECKING:
    from lightning_faulttolerant.storage.remote import RemoteStore

_log = logging.getLogger(__name__)

MAX_BYTES = 1_000_000
MAX_REMOTE_BYTES = 200_000
_MAX_UNWRITTEN = 1000
SENT_EVERY_SECONDS = 60.0


class HistoryFile(Protocol):
    """The history of one run. One process at a time adds lines."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line."""

    def lines(self) -> list[Line]:
        """Return all lines, or raise the error of reading them."""

    def flush(self) -> None:
        """Wait until all lines are written."""

    def close(self) -> None:
        """Note that the script finished normally, if any history exists."""

    def announce(self, error: Exception) -> None:
        """Report once that the history can't be written."""


@final
class NoHistory:
    """Takes the place of the history on ranks that write none."""

    def add(self, line: Mapping[str, object]) -> None:
        """Do nothing."""

    def lines(self) -> list[Line]:
        """Return no lines."""
        return []

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def announce(self, error: Exception) -> None:
        """Do nothing."""


def open_history(directory: str, *, check: Callable[[], None]) -> HistoryFile:
    """Return the history of a run. Nothing is read or written yet.

    Args:
        directory: The directory of the run, local or below a URL.
        check: Raises if the directory is no longer ours.
    """
    return RemoteHistory(directory, check=check) if is_url(directory) else LocalHistory(directory)


class _SingleWarning:
    """Reports an error once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_spoken = False

    def say(self, error: Exception) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _log.warning(
                "The history of this run can't be written to %s; training continues without it: %s: %s",
                self._path, type(error).__name__, error,
            )  # fmt: skip


@final
class LocalHistory:
    """A file. Each line is appended immediately.

    Args:
        directory: The directory of the run; it exists.
        max_bytes: How long the file may become before it is shortened.
    """

    def __init__(self, directory: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = os.path.join(directory, FILE_NAME)
        self._max_bytes = max_bytes
        self._room = max_bytes
        self._unwritten: list[Mapping[str, object]] = []
        """Lines that a full disk has not taken yet. The next `add` writes them, too."""
        self._announced = _SingleWarning(self.path)
        self._lock = threading.Lock()

    def add(self, line: Mapping[str, object]) -> None:
        """Append a line, after any earlier lines that could not be written."""
        with self._lock:
            if self._unwritten and line["event"] == self._unwritten[-1]["event"] == ALIVE:
                self._unwritten.pop()  # the newer one replaces it
            self._unwritten = [*self._unwritten, line][-_MAX_UNWRITTEN:]
            while self._unwritten:
                append_line(self.path, self._unwritten[0])
                del self._unwritten[0]
            if os.stat(self.path).st_size > self._room:
                self._shorten()

    def lines(self) -> list[Line]:
        """Return all lines."""
        return read_lines(self.path)

    def flush(self) -> None:
        """Do nothing: each line is written already."""

    def close(self) -> None:
        """Note that the script finished normally, if any history exists."""
        if os.path.exists(self.path):
            try:
                self.add(_done())
            except OSError as error:
                self.announce(error)

    def announce(self, error: Exception) -> None:
        """Report once that the history can't be written."""
        self._announced.say(error)

    def _shorten(self) -> None:
        text = text_of(shortened(read_lines(self.path), max_bytes=self._max_bytes))
        self._room = max(self._max_bytes, 2 * len(text))  # also if shortening fails or is not enough: not at each line
        with open_writer(self.path, fsync=False) as file:
            file.write(text)


@final
class RemoteHistory:
    """An object that is replaced as a whole, in a separate thread.

    Args:
        directory: The URL of the run.
        check: Raises if the directory is no longer ours. Called before each replacement.
        max_bytes: How long the object may become before it is shortened.
        every_seconds: How often it is replaced while no fit begins, starts, or ends.
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
        self._announced = _SingleWarning(f"{directory}/{FILE_NAME}")
        self._lock = threading.Lock()
        self._writer = BackgroundWriter("history")
        self._earlier: list[Line] | None = None
        """The lines that existed before; ``None`` until they are read. Nothing is written until then."""
        self._lines: list[Line] = []
        self._num_added = self._num_sent = 0
        self._sent_at = float("-inf")

    def add(self, line: Mapping[str, object]) -> None:
        """Keep a line, and begin to send all lines if that is due."""
        with self._lock:
            if self._lines and line["event"] == self._lines[-1]["event"] == ALIVE:
                self._lines.pop()  # the newer one replaces it
            self._lines.append(dict(line))
            self._num_added += 1
            is_due = time.monotonic() - self._sent_at >= self._every_seconds
            # Inside the lock: the thread that writes autosaves adds lines, too, and only one of the two may begin.
            if (is_due or line["event"] not in (ALIVE, AUTOSAVE)) and not self._writer.is_busy:
                self._take_error()
                self._sent_at = time.monotonic()
                self._writer.start(self._send)

    def lines(self) -> list[Line]:
        """Return all lines, sent or not."""
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
        """Note that the script finished normally, if any history exists."""
        try:
            if not self._lines and not self._read():
                return
            self._writer.wait()
            with self._lock:
                self._lines.append(_done())
                self._num_added += 1
            self.flush()
        except Exception as error:  # noqa: BLE001 - no caller depends on it any more
            self.announce(error)

    def announce(self, error: Exception) -> None:
        """Report once that the history can't be written."""
        self._announced.say(error)

    def _take_error(self) -> None:
        error = self._writer.take_error()
        if isinstance(error, Exception):
            self.announce(error)
        elif error is not None:
            raise error

    @property
    def _store(self) -> RemoteStore:
        from lightning_faulttolerant.storage.remote import RemoteStore

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
