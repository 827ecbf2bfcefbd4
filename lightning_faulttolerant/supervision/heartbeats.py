"""Heartbeats: what a training process is doing, in memory that it shares with the process that watches it.

A heartbeat is a few numbers in a file that is mapped into memory, so it costs no system call. It holds no time: the
watcher measures how long it stays the same. So a watcher can read it whatever the process does, even if C code holds
the GIL, or a signal has stopped the process. The exception that ends a process is in a file next to its heartbeat.

A section may take ten times as long as the slowest of its kind so far, which the next start knows. A limit that is
wrong must not end a run: after a hang, the same place of the run may take twice as long.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.processes import started_at
from lightning_faulttolerant.records.lines import read_json
from lightning_faulttolerant.storage.store import open_file, open_store

DIRECTORY_VARIABLE = "PL_FAULT_TOLERANT_SUPERVISOR"
"""The directory for heartbeats and failures. ``lightning-faulttolerant run`` sets it for its processes."""

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
"""The values of ``HangWatch(action=...)``, by their numbers; the first one stands for ``None``."""

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
_PREFIX = "heartbeat-"

PREFIX = "lightning-faulttolerant-"
"""How the names of directories for heartbeats begin."""
_SHARED_MEMORY = Path("/dev/shm")

Saved = tuple[int, int, int, int]
"""The place of an autosave, in an order: the number of the fit, epoch, batch, and batch of an evaluation."""


@final
class Heartbeat:
    """The heartbeat of this process.

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


_of_this_process: dict[str, Heartbeat] = {}
"""The heartbeats by directory. A forked process begins its own."""


def heartbeat_in(directory: str | os.PathLike[str]) -> Heartbeat:
    """Return the heartbeat of this process in a directory."""
    name = os.fspath(directory)
    heartbeat = _of_this_process.get(name)
    if heartbeat is None or heartbeat.process_id != os.getpid():
        heartbeat = _of_this_process[name] = Heartbeat(name)
    return heartbeat


def close_heartbeat(directory: str | os.PathLike[str]) -> None:
    """Remove the heartbeat of this process from a directory."""
    name = os.fspath(directory)
    if _of_this_process.pop(name, None) is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(name))


def _path(directory: str | os.PathLike[str]) -> str:
    return os.path.join(directory, f"{_PREFIX}{os.getpid()}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessHeartbeat:
    """The heartbeat of a process, as its watcher reads it. See `Heartbeat` for the meaning of each number."""

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


def read_heartbeats(directory: str | os.PathLike[str]) -> Iterator[ProcessHeartbeat]:
    """Yield the heartbeats of all processes that have written one, in order of their ranks."""
    found = [beat for path in Path(directory).glob(f"{_PREFIX}*") if (beat := _read(path)) is not None]
    yield from sorted(found, key=lambda beat: (beat.rank, beat.process_id))


def _read(path: Path) -> ProcessHeartbeat | None:
    try:
        content = path.read_bytes()
    except OSError:  # removed in between
        return None
    if len(content) < _SIZE:  # just created
        return None
    numbers = dict(zip(_NUMBERS, struct.unpack_from(f"={len(_NUMBERS)}q", content), strict=True))
    text = content[_TEXT_AT : _TEXT_AT + numbers["text_bytes"]]
    saved = tuple(numbers[f"saved_{name}"] for name in ("number", "epoch", "batch", "evaluated"))
    return ProcessHeartbeat(
        process_id=int(path.name.removeprefix(_PREFIX)),
        saved=saved if numbers["num_saved"] else None,
        hang_timeout_seconds=numbers["hang_timeout_ms"] / 1000,
        directory=text.decode(errors="replace"),
        **{name: numbers[name] for name in _SAME_NAMES},
    )


FILE_NAME = "section-times.json"
"""Beside the history of the run."""
_FACTOR = 10.0
_OF_BATCHES = frozenset({TRAINING_BATCH, EVALUATION_BATCH})
_LEAST_SECONDS_OF_BATCHES = 300.0
_LEAST_SECONDS = 1800.0
_WORTH_WRITING = 1.2
_HUNG_TIMES = "hung_times"

_Place = tuple[str, int, int, int]


@final
class SectionTimes:
    """The slowest section of each kind, and the place of the last hang."""

    def __init__(self) -> None:
        self._slowest: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._hung: tuple[_Place, int] | None = None
        """Where the last hang was, and how many there were in a row."""
        self._hung_times: tuple[float, float] | None = None
        self._has_new_hang = False
        self.directory = ""
        """The directory of the run, or its URL; empty if it is not known yet."""

    def follow(self, directory: str) -> None:
        """Read what earlier starts have learned, once the directory of the run is known.

        Args:
            directory: The directory, or its URL.
        """
        if not directory or directory == self.directory:
            return
        self.directory = directory
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FaultToleranceError):
            with open_file(f"{directory}/{FILE_NAME}") as file:
                content = read_json(file)
            self._written = {name: float(seconds) for name, seconds in dict(content["slowest"]).items()}
            for name, seconds in self._written.items():
                self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))
            if self._hung_times is None and content.get(_HUNG_TIMES):
                began, noticed = content[_HUNG_TIMES]
                self._hung_times = float(began), float(noticed)
            if content["hung"] and self._hung is None:
                (name, epoch, batch, evaluated), number = content["hung"]
                self._hung = (str(name), int(epoch), int(batch), int(evaluated)), int(number)

    def learn(self, section: int, seconds: float) -> None:
        """Note how long a section has taken."""
        name = SECTION_NAMES[section]
        self._slowest[name] = max(seconds, self._slowest.get(name, 0.0))

    def note_hang(self, beat: ProcessHeartbeat, seconds: float) -> None:
        """Note where a process was over its limit, and for how many seconds it has been there."""
        now = round(time.time(), 3)
        self._hung_times = (now - seconds, now)
        place = _place(beat)
        before = self._hung[1] if self._hung is not None and self._hung[0] == place else 0
        self._hung, self._has_new_hang = (place, before + 1), True

    def limit(self, beat: ProcessHeartbeat) -> tuple[float, str]:
        """Return how long the section of a process may take, in seconds, and the reason in words."""
        slowest = self._slowest.get(SECTION_NAMES[beat.section])
        if slowest is None:
            seconds, why = _LEAST_SECONDS, "none of its kind has ended yet"
        else:
            least = _LEAST_SECONDS_OF_BATCHES if beat.section in _OF_BATCHES else _LEAST_SECONDS
            seconds, why = max(_FACTOR * slowest, least), f"the slowest of its kind took {slowest:.3g} s"
        if self._hung is not None and self._hung[0] == _place(beat):
            seconds *= 2.0 ** min(self._hung[1], 20)
            why += f"; doubled after each hang here, {self._hung[1]} so far"
        return seconds, why

    def writing(self) -> Callable[[], None]:
        """Return what writes that which was learned until now. A failure is no reason to stop."""
        written, directory = self._written, self.directory
        if not self.directory or not (
            self._has_new_hang
            or any(seconds > _WORTH_WRITING * written.get(name, 0.0) for name, seconds in self._slowest.items())
        ):
            return _write_nothing
        self._written = {name: round(seconds, 3) for name, seconds in self._slowest.items()}
        self._has_new_hang = False
        found = {"slowest": self._written, "hung": self._hung, _HUNG_TIMES: self._hung_times}
        content = json.dumps(found).encode()

        def write() -> None:
            with (
                contextlib.suppress(OSError, FaultToleranceError),
                open_store(directory).writer(FILE_NAME, fsync=False) as file,
            ):
                file.write(content)

        return write


def last_hang(directory: str) -> tuple[float, float] | None:
    """Return when the last hang of a run began and when it was noticed, in seconds since 1970; ``None`` if none was.

    Args:
        directory: The directory of the run, or its URL.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FaultToleranceError):
        with open_file(f"{directory}/{FILE_NAME}") as file:
            began, noticed = read_json(file)[_HUNG_TIMES]
        return float(began), float(noticed)
    return None


def _place(beat: ProcessHeartbeat) -> _Place:
    return SECTION_NAMES[beat.section], beat.epoch, beat.batch, beat.evaluated


def _write_nothing() -> None:
    pass


_FAILURE_PREFIX = "failure-"
_MAX_TEXT = 2000
_MAX_SAMPLES = 64
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFailure:
    """An exception that has ended a process.

    Args:
        kind: The name of its class.
        text: Its message.
        function: The Trainer's function: ``fit``, ``validate``, ``test``, or ``predict``.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0; ``None`` before the first batch.
        evaluated: The batch of an evaluation, from 0; ``None`` outside of one.
        samples: The indices of the batch's samples by loader, where they are known.
        rank: The rank.
        time: When it was raised, in seconds since 1970.
        is_lost: Whether it only says that another rank has failed.
    """

    kind: str
    text: str
    function: str
    epoch: int
    batch: int | None
    evaluated: int | None = None
    samples: Mapping[str, list[object]] = field(default_factory=dict)
    rank: int = 0
    time: float
    is_lost: bool = False

    @property
    def identity(self) -> tuple[object, ...] | None:
        """What two failures share if they are the same exception at the same batch; ``None`` without a batch."""
        if self.batch is None or self.is_lost:
            return None
        text = _ADDRESS.sub("0x", self.text)
        return self.kind, text, self.function, self.epoch, self.batch, self.evaluated

    @property
    def place(self) -> str:
        """Where it was raised, in words."""
        if self.batch is None:
            return f"before the first batch of {self.function}"
        if self.evaluated is None:
            return f"in batch {self.batch} of epoch {self.epoch}"
        if self.function != "fit":
            return f"in batch {self.evaluated} of {self.function}"
        return f"in batch {self.evaluated} of the validation run after batch {self.batch} of epoch {self.epoch}"

    @property
    def samples_text(self) -> str:
        """The samples of the batch, in words; empty if they are not known."""
        return "; ".join(f"{loader}: {_listed(indices)}" for loader, indices in self.samples.items())


def _listed(indices: list[object]) -> str:
    more = len(indices) - _MAX_SAMPLES
    return ", ".join(map(str, indices[:_MAX_SAMPLES])) + (f", and {more} more" if more > 0 else "")


def write_failure(directory: str | os.PathLike[str], failure: TrainingFailure) -> None:
    """Write what has ended this process."""
    path = Path(directory) / f"{_FAILURE_PREFIX}{os.getpid()}.json"
    content = asdict(failure) | {"text": failure.text[:_MAX_TEXT]}
    temporary = path.with_suffix(".temporary")
    temporary.write_text(json.dumps(content, default=str), encoding="utf-8")
    os.replace(temporary, path)


def forget_failure(directory: str | os.PathLike[str]) -> None:
    """Remove what this process has written: the script has caught that exception, and continues."""
    with contextlib.suppress(OSError):
        os.unlink(Path(directory) / f"{_FAILURE_PREFIX}{os.getpid()}.json")


def read_failures(directory: str | os.PathLike[str]) -> list[TrainingFailure]:
    """Return what has ended the processes: first those that have failed by themselves, in order of time."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(directory).glob(f"{_FAILURE_PREFIX}*.json")]
    return sorted((TrainingFailure(**content) for content in found), key=lambda one: (one.is_lost, one.time))
