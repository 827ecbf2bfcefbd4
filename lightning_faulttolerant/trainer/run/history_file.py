"""Stores the history of a run: in a file that is appended to, or in an object that is replaced now and then.

An object in a store can't be appended to. The process therefore keeps all lines in memory, earlier ones included. It
sends them when a fit begins, starts, and ends, and once a minute in between, in a separate thread. Only the process
that holds the lock of the run writes; see docs/decisions/0031-history.md.

A history that has become long is shortened; if possible, the rest gives the same account of the time. First, marks of
life that are no longer needed are removed, and older autosaves and validation runs are combined into sums: the account
of a chapter stays the same. If that is not enough, as in a loop of crashes, the oldest processes are forgotten, and a
line at the front says how many.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, final

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter
from lightning_faulttolerant.records.history import (
    ALIVE,
    AUTOSAVE,
    AUTOSAVES,
    BEGIN,
    DONE,
    FILE_NAME,
    SHORTENED,
    START,
    VALIDATION,
    name_of,
    summed_times,
)
from lightning_faulttolerant.records.history_parser import place_of, slow_of
from lightning_faulttolerant.records.lines import Line, append_line, parse_lines, read_lines
from lightning_faulttolerant.storage.store import is_url, open_store

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
        with open_store(os.path.dirname(self.path)).writer(FILE_NAME, fsync=False) as file:
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


NUM_KEPT = 200
_MARK_BYTES = 150
_IN_SUM = ("epoch", "batch", "global_step", "seconds", "time")


def text_of(lines: Iterable[Mapping[str, object]]) -> bytes:
    """Return lines as the content of a file.

    Args:
        lines: Objects that JSON can hold.
    """
    return b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)


def shortened(lines: Sequence[Line], *, max_bytes: int, num_kept: int = NUM_KEPT) -> list[Line]:
    """Return lines that say the same in less space.

    Args:
        lines: The lines of a whole file.
        max_bytes: If the result is longer than this, whole processes are removed, except the last one.
        num_kept: How many of the newest autosaves, and of the newest validation runs, are kept unchanged.
    """
    kept = list(_summed(lines, _needed(lines, num_kept)))
    return _forgotten(kept, max_bytes) if len(text_of(kept)) > max_bytes else kept


def _needed(lines: Sequence[Line], num_kept: int) -> set[int]:
    """Return the indices of the marks, autosaves, and validation runs that are kept unchanged."""
    needed: set[int] = set()
    for event in (AUTOSAVE, VALIDATION) if num_kept else ():
        needed.update([index for index, line in enumerate(lines) if line.get("event") == event][-num_kept:])
    waited: int | None = None
    for index, line in enumerate(lines):  # the last line of each fit, and the last that says how long data took
        waited = index if "data" in line else waited
        following = lines[index + 1] if index + 1 < len(lines) else {"event": BEGIN}
        if following.get("event") == BEGIN or following.get("fit") != line.get("fit"):
            needed.update((index,) if waited is None else (index, waited))
            waited = None
    by_name: dict[tuple[object, object], int] = {}
    marks: dict[object, _Marks] = {}
    for index, line in enumerate(lines):
        fit, resumed = line.get("fit"), line.get("resumed")
        if line.get("event") == AUTOSAVE:
            by_name[fit, line.get("name")] = index
        if line.get("event") in (ALIVE, AUTOSAVE):
            marks.setdefault(fit, _Marks()).add(index, line)
        elif line.get("event") == START and isinstance(resumed, dict):
            # An autosave of another chapter does not count, but its mark does: both are kept.
            saved = by_name.get((fit, name_of(str(resumed.get("path")))))
            known = marks[fit].last_before(line) if fit in marks else None
            needed.update(found for found in (saved, known) if found is not None)
    # A fit may have continued inside the validation runs that these autosaves are from.
    inside = {_run_of(lines[index]) for index in needed} - {None}
    runs = (index for index, line in enumerate(lines) if line.get("event") == VALIDATION)
    return needed.union(index for index in runs if (lines[index].get("fit"), lines[index].get("since")) in inside)


def _run_of(line: Line) -> tuple[object, object] | None:
    """Return the fit and the beginning of the validation run that an autosave was taken in, if it was."""
    run = line.get("validation")
    since = run.get("since") if isinstance(run, dict) and line.get("event") in (AUTOSAVE, AUTOSAVES) else None
    return (line.get("fit"), since) if isinstance(since, (int, float)) else None


class _Marks:
    """The times and places of a fit so far, except those that a later one has made useless by going back."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, tuple[int, int, float], int]] = []

    def add(self, index: int, line: Line) -> None:
        place, time = place_of(line), _number(line, "taken") or _number(line, "time")
        if place is None:
            return
        own = place.order
        while self._marks and self._marks[-1][1] >= own and self._marks[-1][0] <= time:
            self._marks.pop()
        self._marks.append((time, own, index))

    def last_before(self, start: Line) -> int | None:
        """Return the mark that tells when the run was at the place where a start continues, if any."""
        place = place_of(start)
        if place is None:
            return None
        own = place.order
        marks = (mark for mark in self._marks if mark[1] <= own)
        return max(marks, key=lambda mark: (mark[0], mark[2] or 0), default=(0.0, own, None))[2]


def _summed(lines: Sequence[Line], needed: set[int]) -> Iterator[Line]:
    """Yield the lines that are needed, and the sums of adjacent autosaves and validation runs that are not."""
    autosaves: Line | None = None
    validations: Line | None = None
    inside = {_run_of(lines[index]) for index in needed} - {None}
    for index, line in enumerate(lines):
        event = line.get("event")
        if index not in needed and event == ALIVE:
            continue
        if index not in needed and event in (AUTOSAVE, AUTOSAVES):
            run = _run_of(line)
            if autosaves is not None and run != _run_of(autosaves) and not inside.isdisjoint((run, _run_of(autosaves))):
                yield autosaves
                autosaves = None
            autosaves = _sum(autosaves, line)
            continue
        if index not in needed and event == VALIDATION:
            validations = sum_of_validations(validations, line)
            continue
        yield from filter(None, (autosaves, validations))
        autosaves = validations = None
        yield line
    yield from filter(None, (autosaves, validations))


def _sum(one: Line | None, other: Line) -> Line:
    if other.get("event") == AUTOSAVE:
        longest = {name: other[name] for name in _IN_SUM if name in other}
        other = {
            "event": AUTOSAVES,
            "fit": other.get("fit"),
            "time": other.get("time"),
            "since": _began(other),
            "number": 1,
            "seconds": _number(other, "seconds"),
            "bytes": _number(other, "bytes"),
            "longest": longest,
            **({"data": other["data"]} if "data" in other else {}),
            **({"slow": other["slow"]} if "slow" in other else {}),
            **({"validation": other["validation"]} if _run_of(other) is not None else {}),
        }
    if one is None:
        return other
    sums = {name: _number(one, name) + _number(other, name) for name in ("number", "seconds", "bytes")}
    candidates = [line["longest"] for line in (one, other) if isinstance(line.get("longest"), dict)]
    longest = max(candidates, key=lambda line: _number(line, "seconds"), default={})
    slow = [each for line in (one, other) for each in slow_of(line.get("slow"))]
    if slow:
        other = {**other, "slow": [asdict(each) for each in summed_times(slow)]}
    return {**other, **sums, "since": one.get("since"), "longest": longest}


def _began(autosave: Line) -> object:
    """Return when training began to wait for an autosave. A capture may have been taken long before."""
    taken = autosave.get("taken", autosave.get("time"))
    if autosave.get("in_background") is True or not isinstance(taken, (int, float)):
        return taken
    return _number(autosave, "time") - _number(autosave, "seconds")


def sum_of_validations(one: Mapping[str, object] | None, other: Mapping[str, object]) -> Line:
    """Return one line for two about validation runs, of the same fit.

    Args:
        one: The earlier line, if there is one.
        other: The later one.
    """
    if one is None:
        return dict(other)
    sums = {name: _number(one, name) + _number(other, name) for name in ("number", "seconds", "num_batches")}
    return {**other, **sums, "since": one.get("since"), "first": one.get("first")}


def _number(line: Mapping[str, object], name: str) -> Any:
    found = line.get(name)
    return found if isinstance(found, (int, float)) else 0


def _forgotten(lines: list[Line], max_bytes: int) -> list[Line]:
    """Remove the oldest processes so that half of the space is free again; the last process always stays."""
    starts = _starts(lines)
    if len(starts) < 2:
        return lines
    ends = list(accumulate((len(text_of([line])) for line in lines), initial=0))
    fits = (
        number for number in range(1, len(starts)) if ends[-1] - ends[starts[number]] <= max_bytes / 2 - _MARK_BYTES
    )
    number = next(fits, len(starts) - 1)
    gone, left = lines[: starts[number]], lines[starts[number] :]
    earlier = [line for line in gone if line.get("event") == SHORTENED]
    since = earlier[0].get("since") if earlier else gone[0].get("time")
    num_gone = number + sum(_number(line, "number") for line in earlier)
    return [{"event": SHORTENED, "number": num_gone, "since": since, "time": gone[-1].get("time")}, *left]


def _starts(lines: Sequence[Line]) -> list[int]:
    """Return the indices of the lines where processes begin."""
    begins = [index for index, line in enumerate(lines) if line.get("event") == BEGIN]
    tokens = [lines[index].get("process") for index in begins]
    return [index for index, token, before in zip(begins, tokens, [object(), *tokens], strict=False) if token != before]
