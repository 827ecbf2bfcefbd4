"""Marks: what a training process is doing, in memory that it shares with the process that watches it.

A mark is a few numbers in a file that is mapped into memory, so that it costs no system call. It holds no time: the
watcher measures how long a mark stays the same. So a watcher can read it whatever the process does, even if C code
holds the GIL, or a signal has stopped the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lightning_faulttolerant.processes import started_at

DIRECTORY_VARIABLE = "PL_FAULT_TOLERANT_SUPERVISOR"
"""The directory for marks and failures, set by ``lightning-faulttolerant run`` for the processes that it starts."""

OUTSIDE, SETUP, FIRST_BATCH, TRAINING_BATCH, EVALUATION_BATCH, SAVE, END_OF_EPOCH, TEARDOWN = range(8)
SECTION_NAMES = (
    "outside of a fit",
    "setup",
    "first batch",
    "training batch",
    "evaluation batch",
    "save",
    "end of epoch",
    "teardown",
)
"""The names of the sections, by their numbers. Nothing is watched outside of a fit or an evaluation."""
DEFAULT, OFF, REPORT, STOP = range(4)
HANG_NAMES = ("", "off", "report", "stop")
"""The values of ``FaultTolerance(hang=...)``, by their numbers; the first one stands for ``None``."""

_NUMBERS = (
    "count",
    "section",
    "epoch",
    "batch",
    "evaluated",
    "num_saved",
    "saved_number",
    "saved_epoch",
    "saved_batch",
    "saved_evaluated",
    "started",
    "rank",
    "num_ranks",
    "hang",
    "hang_timeout_ms",
    "text_bytes",
)
_SAME_NAMES = ("started", "count", "section", "epoch", "batch", "evaluated", "rank", "num_ranks", "hang")
_PLACES = {name: place for place, name in enumerate(_NUMBERS)}
# One call is faster than single numbers. They are the first ones.
_pack_section = struct.Struct("=2q").pack_into
_pack_batch = struct.Struct("=5q").pack_into
_TEXT_AT = 8 * len(_NUMBERS)
_SIZE = 4096
_PREFIX = "marks-"

PREFIX = "lightning-faulttolerant-"
"""How the names of directories for marks begin."""
_SHARED_MEMORY = Path("/dev/shm")

Saved = tuple[int, int, int, int]
"""The place of an autosave, in an order: the number of the fit, epoch, batch, and batch of an evaluation."""


@final
class Marks:
    """The marks of this process.

    Args:
        directory: The directory that the watcher reads.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        descriptor = os.open(_path(directory), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _allocate(descriptor)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._numbers = memoryview(self._map)[:_TEXT_AT].cast("q")
        self._count = self._num_saved = 0
        self._set(evaluated=-1, started=started_at(os.getpid()))
        self.process_id = os.getpid()

    def begin(self, section: int) -> None:
        """Note that a section begins."""
        self._count += 1
        _pack_section(self._map, 0, self._count, section)

    def begin_batch(self, section: int, epoch: int, batch: int, evaluated: int = -1) -> None:
        """Note that a batch begins.

        Args:
            section: The section.
            epoch: The epoch, from 0.
            batch: The finished batches of the epoch.
            evaluated: The batch of an evaluation, from 0; -1 outside of one.
        """
        self._count += 1
        _pack_batch(self._map, 0, self._count, section, epoch, batch, evaluated)

    def note_saved(self, saved: Saved) -> None:
        """Note that an autosave exists."""
        self._num_saved += 1
        names = ("saved_number", "saved_epoch", "saved_batch", "saved_evaluated")
        self._set(**dict(zip(names, saved, strict=True)))
        self._set(num_saved=self._num_saved)

    def describe(self, *, rank: int, num_ranks: int, hang: int, hang_timeout_ms: int, directory: str = "") -> None:
        """Note what the watcher needs to know of this process.

        Args:
            rank: Its rank.
            num_ranks: The number of ranks.
            hang: What to do if it hangs: `DEFAULT`, `OFF`, `REPORT`, or `STOP`.
            hang_timeout_ms: How long a section may take, in milliseconds; 0 if that is learned.
            directory: The directory of the autosaves, or its URL; empty if it is not known yet.
        """
        text = directory.encode()[: _SIZE - _TEXT_AT]
        self._map[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._set(rank=rank, num_ranks=num_ranks, hang=hang, hang_timeout_ms=hang_timeout_ms, text_bytes=len(text))

    def _set(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self._numbers[_PLACES[name]] = number


def _allocate(descriptor: int) -> None:
    """Reserve the memory: a file with a hole would end the process by SIGBUS once the memory is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, _SIZE)
    elif os.fstat(descriptor).st_size < _SIZE:  # macOS
        os.write(descriptor, bytes(_SIZE))


def shared_memory() -> Path:
    """Return the directory for memory that processes share, or else the one for temporary files."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


_of_this_process: dict[str, Marks] = {}
"""The marks by directory. A forked process begins its own."""


def marks_in(directory: str | os.PathLike[str]) -> Marks:
    """Return the marks of this process in a directory."""
    name = os.fspath(directory)
    marks = _of_this_process.get(name)
    if marks is None or marks.process_id != os.getpid():
        marks = _of_this_process[name] = Marks(name)
    return marks


def close_marks(directory: str | os.PathLike[str]) -> None:
    """Remove the marks of this process from a directory."""
    name = os.fspath(directory)
    if _of_this_process.pop(name, None) is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(name))


def _path(directory: str | os.PathLike[str]) -> str:
    return os.path.join(directory, f"{_PREFIX}{os.getpid()}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMarks:
    """The marks of a process, as its watcher reads them. See `Marks` for the meaning of each."""

    process_id: int
    started: int = 0
    count: int
    section: int
    epoch: int
    batch: int
    evaluated: int
    saved: Saved | None
    rank: int
    num_ranks: int
    hang: int
    hang_timeout_seconds: float
    directory: str

    def __str__(self) -> str:
        place = f"epoch {self.epoch}, batch {self.batch}"
        place += f", evaluation batch {self.evaluated}" if self.evaluated >= 0 else ""
        return f"{SECTION_NAMES[self.section]} ({place})"


def read_marks(directory: str | os.PathLike[str]) -> Iterator[ProcessMarks]:
    """Yield the marks of all processes that have written any, in order of their ranks."""
    found = [marks for path in Path(directory).glob(f"{_PREFIX}*") if (marks := _read(path)) is not None]
    yield from sorted(found, key=lambda marks: (marks.rank, marks.process_id))


def _read(path: Path) -> ProcessMarks | None:
    try:
        content = path.read_bytes()
    except OSError:  # removed in between
        return None
    if len(content) < _SIZE:  # just created
        return None
    numbers = dict(zip(_NUMBERS, struct.unpack_from(f"={len(_NUMBERS)}q", content), strict=True))
    text = content[_TEXT_AT : _TEXT_AT + numbers["text_bytes"]]
    saved = tuple(numbers[f"saved_{name}"] for name in ("number", "epoch", "batch", "evaluated"))
    return ProcessMarks(
        process_id=int(path.name.removeprefix(_PREFIX)),
        saved=saved if numbers["num_saved"] else None,
        hang_timeout_seconds=numbers["hang_timeout_ms"] / 1000,
        directory=text.decode(errors="replace"),
        **{name: numbers[name] for name in _SAME_NAMES},
    )
