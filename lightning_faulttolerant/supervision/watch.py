"""The watcher of a run: it finds training processes whose section takes too long, and reports or ends them.

A run that is not started by ``lightning-faulttolerant run`` has one next to it on each machine. ``python -m
lightning_faulttolerant.supervision.watch DIRECTORY`` looks at the heartbeats in that directory until none is left, and
then removes the directory.

The report of a hang says what each rank was doing, which one keeps the others waiting, and where all of them were.

Two signals work whatever Python is doing: one lets C code write the Python stacks, the other ends the process.
`faulthandler` needs no GIL for the stacks. Data-loading workers that are forked inherit both the handler and its file.
The handler that ends the process with a documented exit code is the C library's ``_exit`` itself. It gets the number of
the signal as its argument, which so becomes the exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, final

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.processes import is_running, parents_and_states, send_signal, with_children
from lightning_faulttolerant.storage.store import open_store, split_path
from lightning_faulttolerant.supervision.guard import start_companion
from lightning_faulttolerant.supervision.heartbeats import (
    OFF,
    OUTSIDE,
    REPORT,
    ProcessHeartbeat,
    SectionTimes,
    read_heartbeats,
)

SIGNAL: int | None = signal.SIGRTMAX - 6 if hasattr(signal, "SIGRTMAX") else None
"""The signal that lets a process write its stacks; ``None`` if the system has no signals to spare."""
_PREFIX = "stacks-"
_ANSWERS_WITHIN_SECONDS = 1.0
_COMPLETE_AFTER_SECONDS = 0.1
# Functions in which a rank waits for the others.
_COLLECTIVE = ("torch/distributed/", "_engine_run_backward", "lightning_faulttolerant/trainer/ranks/")
_LOOKS_ON = "lightning_faulttolerant/trainer/ranks/watch.py"


@final
class StackHandler:
    """Lets a watcher read the stacks of this process, from `__init__` to `close`.

    Args:
        directory: The directory that the watcher reads.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._file: IO[bytes] | None = None
        if SIGNAL is not None and signal.getsignal(SIGNAL) is signal.SIG_DFL:
            self._file = open(stacks_path(directory, os.getpid()), "ab")  # noqa: SIM115 - closed in `close`
            faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    def close(self) -> None:
        """Give the signal back. May be called twice."""
        if self._file is not None and SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
            self._file.close()
            self._file = None


def stacks_path(directory: str | os.PathLike[str], process_id: int) -> Path:
    """Return the file into which a process and its workers write their stacks."""
    return Path(directory) / f"{_PREFIX}{process_id}"


def stacks_of(process_id: int, path: Path, state: str) -> str:
    """Return the stacks of a process, or why there are none.

    Args:
        process_id: The process.
        path: The file that it writes to.
        state: Its state, as ``/proc`` names it.
    """
    if state in "Tt":
        return "stopped by a signal; it can't write its stacks"
    if SIGNAL is None or not _catches(process_id, SIGNAL):
        return "it has no handler that writes its stacks"
    begin = _size(path)
    send_signal(process_id, SIGNAL)
    deadline, size, since = time.monotonic() + _ANSWERS_WITHIN_SECONDS, begin, time.monotonic()
    while time.monotonic() < deadline and not (size > begin and time.monotonic() - since > _COMPLETE_AFTER_SECONDS):
        time.sleep(0.01)
        if (now := _size(path)) != size:
            size, since = now, time.monotonic()
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").strip() or "it did not write its stacks"
    return "it did not write its stacks"


def waits_for_others(stacks: str) -> bool:
    """Return whether the innermost function of a thread waits for other ranks."""
    threads = [text for text in stacks.split("\n\n") if _LOOKS_ON not in text]
    heads = [text.strip().splitlines()[1:4] for text in threads]
    return any(part in line for head in heads for line in head for part in _COLLECTIVE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _catches(process_id: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal. It would end one that has none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


HANG_EXIT_CODE = 60
"""The exit code of a process that a watcher has ended because it hung, and the number of the signal for that."""
_ENDS_WITHIN_SECONDS = 2.0


@final
class ExitSignal:
    """Handles the signal from `__init__` to `close`. Only Linux has signals to spare for it."""

    def __init__(self) -> None:
        self._previous: int | None = None
        self._is_handled = sys.platform == "linux" and signal.getsignal(HANG_EXIT_CODE) is signal.SIG_DFL
        if self._is_handled:
            library = _library()
            self._previous = library.signal(HANG_EXIT_CODE, ctypes.cast(library._exit, ctypes.c_void_p))

    def close(self) -> None:
        """Give the signal back. May be called twice."""
        if self._is_handled:
            self._is_handled = False
            _library().signal(HANG_EXIT_CODE, self._previous)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return library


def end_hung(process_ids: Iterable[int]) -> None:
    """End processes with `HANG_EXIT_CODE`, and kill their descendants, and those that do not end in time."""
    hung = set(process_ids)
    parents, _ = parents_and_states()
    family = with_children(hung, parents)
    for process_id in hung:
        send_signal(process_id, HANG_EXIT_CODE if sys.platform == "linux" else signal.SIGKILL)
        send_signal(process_id, signal.SIGCONT)  # a stopped process handles its signals when it continues
    for process_id in family - hung - {os.getpid()}:  # a watcher is a child of the process that it watches
        send_signal(process_id, signal.SIGKILL)
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while time.monotonic() < deadline and any(map(is_running, hung)):
        time.sleep(0.02)
    for process_id in filter(is_running, hung):
        send_signal(process_id, signal.SIGKILL)


STORAGE_ANSWERS_WITHIN_SECONDS = 5.0


def begin(work: Callable[[], None]) -> threading.Thread:
    """Begin work in a thread, which does not keep the process from its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def done_in_time(work: Callable[[], None]) -> bool:
    """Do work in a thread; return whether it was done in `STORAGE_ANSWERS_WITHIN_SECONDS`. If not, it continues there.

    Args:
        work: The work.
    """
    thread = begin(work)
    thread.join(STORAGE_ANSWERS_WITHIN_SECONDS)
    return not thread.is_alive()


_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "ended"}


def write_hang_report(text: str, directory: str) -> str:
    """Write a report next to the autosaves, or else for temporary files; return its path.

    Args:
        text: The report.
        directory: The directory of the run, or its URL; empty if it is not known. It may be what hangs.
    """
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.uname().nodename}.txt"
    for folder in filter(None, (directory, tempfile.gettempdir())):
        path = f"{folder.rstrip('/')}/{name}"
        written: list[str] = []
        if done_in_time(partial(_write, path, text, written)) and written:
            return path
    return ""


def _write(path: str, text: str, written: list[str]) -> None:
    with contextlib.suppress(OSError, FaultToleranceError):
        directory, name = split_path(path)
        with open_store(directory).writer(name) as file:
            file.write(text.encode())
        written.append(path)


def hang_report(hang: Hang, directory: str | os.PathLike[str]) -> str:
    """Return the report, with the stacks of all processes that can still write them."""
    parents, states = parents_and_states()
    stacks: dict[int, str] = {}
    workers: list[str] = []
    no_workers = {os.getpid(), *(beat.process_id for beat, _ in hang.ranks)}  # a watcher may be a child, too
    for beat, _ in hang.ranks:
        path = stacks_path(directory, beat.process_id)
        stacks[beat.rank] = stacks_of(beat.process_id, path, states.get(beat.process_id, "Z"))
        for process_id in sorted(with_children({beat.process_id}, parents) - no_workers):
            found = stacks_of(process_id, path, states.get(process_id, "Z"))
            workers.append(f"Process {process_id}, started by rank {beat.rank}\n{found}\n")
    rows = [
        f"{beat.rank:>4}  {beat.process_id:>8}  {_STATES.get(states.get(beat.process_id, 'Z'), 'unknown'):<8}"
        f"  {seconds:>6.0f} s  {beat}"
        for beat, seconds in hang.ranks
    ]
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {hang.text}.",
        "",
        f"RANK   PROCESS  STATE      SAME FOR  SECTION, of {hang.beat.num_ranks} ranks in all",
        *rows,
        "",
        lagging_ranks(hang, states, stacks),
        "",
        *(f"Rank {rank}\n{text}\n" for rank, text in stacks.items()),
        *workers,
    ]
    return "\n".join(lines)


def lagging_ranks(hang: Hang, states: dict[int, str], stacks: dict[int, str]) -> str:
    """Return which rank keeps the others waiting, in words."""
    ranks = [beat for beat, _ in hang.ranks]
    stopped = [beat.rank for beat in ranks if states.get(beat.process_id, "Z") in "Tt"]
    if stopped:
        return f"A signal has stopped {_listed(stopped)}."
    if len(ranks) == 1:
        return "There is no other rank on this machine."
    first = min(map(_place, ranks))
    late = [beat.rank for beat in ranks if _place(beat) == first]
    if len(late) < len(ranks):
        return f"The others are ahead of {_listed(late)}."
    absent = [beat.rank for beat in ranks if not waits_for_others(stacks.get(beat.rank, ""))]
    if 0 < len(absent) < len(ranks):
        return f"The others wait in a collective for {_listed(absent)}."
    return "All ranks are at the same place."


def _place(beat: ProcessHeartbeat) -> tuple[int, int, int]:
    return beat.epoch, beat.batch, beat.evaluated


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_LONGEST_LOOK_SECONDS = 1.0
_LONGEST_LOOK_FACTOR = 3.0
_WRITE_EVERY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A section that takes too long.

    Args:
        beat: The heartbeat of the process that is over its limit.
        seconds: For how long they have been the same.
        limit_seconds: How long the section may take.
        why: The reason for that limit, in words.
        ranks: The heartbeats of all processes, each with the seconds for which it has been the same.
    """

    beat: ProcessHeartbeat
    seconds: float
    limit_seconds: float
    why: str
    ranks: tuple[tuple[ProcessHeartbeat, float], ...]

    @property
    def directory(self) -> str:
        """The directory of the run, or its URL; empty if it is not known yet."""
        return next((beat.directory for beat, _ in self.ranks if beat.directory), "")

    @property
    def is_only_reported(self) -> bool:
        """Whether the run asks for nothing but a report."""
        return self.beat.hang == REPORT

    @property
    def text(self) -> str:
        """What hangs, in words."""
        return (
            f"a hang: rank {self.beat.rank} has been in the section {self.beat} for {self.seconds:.0f} s, and"
            f" {self.limit_seconds:.0f} s is the limit ({self.why})"
        )


@final
class HangWatcher:
    """Looks at the heartbeats again and again.

    Args:
        directory: The directory of the heartbeats.
        look_every_seconds: How often `look` is called.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        look_every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times = SectionTimes()
        self._directory = directory
        self._longest_look_seconds = max(_LONGEST_LOOK_SECONDS, _LONGEST_LOOK_FACTOR * look_every_seconds)
        self._clock = clock
        self._last = clock()
        self._since_write = 0.0
        self._writing: threading.Thread | None = None
        self._seen: dict[int, tuple[ProcessHeartbeat, float]] = {}
        self._told: set[tuple[int, int]] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no process that is alive had a heartbeat at the last look."""
        return not self._seen

    def look(self) -> Hang | None:
        """Return the section that is over its limit, if there is one; each is returned once."""
        now = self._clock()
        # A longer time between two looks is time in which the machine, or this process, stood still.
        step, self._last = min(now - self._last, self._longest_look_seconds), now
        seen: dict[int, tuple[ProcessHeartbeat, float]] = {}
        for beat in read_heartbeats(self._directory):
            if is_running(beat.process_id, beat.started):
                seen[beat.process_id] = (beat, self._seconds(beat, step))
                self._follow(beat.directory)
        self._seen = seen
        self._since_write += step
        if self._since_write > _WRITE_EVERY_SECONDS:
            self._since_write = 0.0
            if self._writing is None or not self._writing.is_alive():
                self._writing = begin(self.times.writing())
        return next(filter(None, (self._judge(beat, seconds) for beat, seconds in seen.values())), None)

    def write_learned(self) -> None:
        """Write what was learned, after the write in progress."""
        if self._writing is not None:
            self._writing.join(STORAGE_ANSWERS_WITHIN_SECONDS)
            if self._writing.is_alive():
                return
        done_in_time(self.times.writing())

    def _follow(self, directory: str) -> None:
        if directory and directory != self.times.directory:
            done_in_time(partial(self.times.follow, directory))

    def _seconds(self, beat: ProcessHeartbeat, step: float) -> float:
        """Return for how long a heartbeat has been the same, and learn from one that has changed."""
        before = self._seen.get(beat.process_id)
        if before is None:
            return 0.0
        if before[0].count == beat.count:
            return before[1] + step
        if before[0].section != OUTSIDE and (beat.process_id, before[0].count) not in self._told:
            self.times.learn(before[0].section, before[1])
        return 0.0

    def _judge(self, beat: ProcessHeartbeat, seconds: float) -> Hang | None:
        if beat.section == OUTSIDE or beat.hang == OFF:
            return None
        limit, why = self.times.limit(beat)
        if beat.hang_timeout_seconds:
            limit, why = beat.hang_timeout_seconds, "HangWatch(timeout=...)"
        if seconds <= limit or (beat.process_id, beat.count) in self._told:
            return None
        self._told.update((each.process_id, each.count) for each, _ in self._seen.values())  # they hang together
        self.times.note_hang(beat, seconds)
        self.write_learned()  # the next start needs to know it
        return Hang(beat=beat, seconds=seconds, limit_seconds=limit, why=why, ranks=tuple(self._seen.values()))


_LOOK_EVERY_SECONDS = 0.2
_BEGINS_WITHIN_SECONDS = 60.0


_started: list[int] = []


def start_watcher(directory: str) -> None:
    """Start the watcher of a directory."""
    for process_id in list(_started):  # those that have ended
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(process_id, os.WNOHANG)[0]:
                continue
        _started.remove(process_id)
    _started.append(start_companion(__name__, directory))


def watch(directory: str) -> None:
    """Watch until no process with a heartbeat is left."""
    watcher = HangWatcher(directory, look_every_seconds=_LOOK_EVERY_SECONDS)
    began = time.monotonic()
    has_seen = False
    while os.path.isdir(directory):
        hang = watcher.look()
        has_seen |= not watcher.is_empty
        if watcher.is_empty and (has_seen or time.monotonic() - began > _BEGINS_WITHIN_SECONDS):
            break
        if hang is not None:
            report = hang_report(hang, directory)
            if not hang.is_only_reported:
                _say(f"A rank hangs: all are ended, with exit code {HANG_EXIT_CODE}. The same command continues it.")
                end_hung(beat.process_id for beat, _ in hang.ranks)
            _say(f"{hang.text}. See {write_hang_report(report, hang.directory)}.")
        time.sleep(_LOOK_EVERY_SECONDS)
    watcher.write_learned()
    shutil.rmtree(directory, ignore_errors=True)


def _say(text: str) -> None:
    os.write(2, f"\nFaultTolerance: {text}\n".encode())


if __name__ == "__main__":
    watch(sys.argv[1])
