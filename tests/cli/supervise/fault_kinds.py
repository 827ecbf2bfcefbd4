"""The faults of the trials: one line of `KINDS` each. Another line adds another kind to all trials."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIT_MOMENTS = ("setup", "training", "saving", "validation", "teardown")
WITH_WORKERS = ("training", "saving", "validation")
"""The moments at which the loaders have workers, or soon will."""
_MIB = 1 << 20
_held: list[object] = []
"""What a fault takes and keeps until its process ends."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a fault is caused.

    Args:
        directory: The directory of the script, with its autosaves in ``autosaves``.
        seed: The seed of the trial, for what a kind leaves open.
    """

    directory: Path
    seed: int


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        cause: Causes it, in a training process. Returns ``False`` if it is not possible yet.
        ends: How the command may end, in addition to 0. The same command then has to finish the run.
        moments: When it may come.
        num_ranks: On how many ranks.
        num_workers: The number of loader workers, if the kind needs some.
        mounts: What has to be a small, separate file system: the shared memory, or the autosaves.
    """

    cause: Callable[[Place], object]
    ends: tuple[int, ...] = ()
    moments: tuple[str, ...] = FIT_MOMENTS
    num_ranks: tuple[int, ...] = (1, 2)
    num_workers: int | None = None
    mounts: str = ""


def _raise(_: Place) -> None:
    raise ValueError("an exception")


def _raise_in_thread(_: Place) -> None:
    threading.Thread(target=_raise, args=(_,)).start()


def _wait_for_thread_that_raises(place: Place) -> None:
    answered = threading.Event()

    def answer() -> None:
        _raise(place)
        answered.set()

    threading.Thread(target=answer, daemon=True).start()
    answered.wait()


def _send(signum: int) -> Callable[[Place], None]:
    return lambda _: os.kill(os.getpid(), signum)


def _send_to_command(signum: int) -> Callable[[Place], None]:
    return lambda _: os.kill(os.getppid(), signum)


def _exit(code: int) -> Callable[[Place], None]:
    return lambda _: os._exit(code)


def _abort(_: Place) -> None:
    os.abort()


def _read_address_0(_: Place) -> None:
    ctypes.string_at(0)


def _use_up_memory(_: Place) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 64 * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(bytearray(_MIB))


def _hold_the_interpreter(_: Place) -> None:
    while True:  # a signal interrupts the sleep
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL


def _kill_worker(place: Place) -> bool:
    workers = multiprocessing.active_children()
    if workers:
        os.kill(random.Random(place.seed).choice(workers).pid or 0, signal.SIGKILL)
    return bool(workers)


def _let_worker_lock_twice(place: Place) -> None:
    (place.directory / "deadlock").touch()  # see `StuckDataset`


def _wait_for_ever(_: Place) -> None:
    threading.Event().wait()


def _read_from_nobody(place: Place) -> None:
    os.mkfifo(place.directory / "fifo")
    os.open(place.directory / "fifo", os.O_RDONLY)  # blocks in C until another process writes


def _fill(directory: Path) -> None:
    """Fill a small file system until this process ends."""
    path = directory / f"filling-{os.getpid()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.unlink(path)
    _held.append(descriptor)
    for size in (_MIB // 4, 4096):
        with suppress(OSError):
            while True:
                os.write(descriptor, bytes(size))
    room = os.statvfs(directory)
    assert room.f_bavail * room.f_frsize < _MIB, "the file system is not full"


def _fill_shared_memory(_: Place) -> None:
    _fill(Path("/dev/shm"))


def _fill_autosaves(place: Place) -> None:
    _fill(place.directory / "autosaves")
    if place.seed % 2:  # somebody makes room after a while
        threading.Timer(0.5, os.ftruncate, (_held[-1], 0)).start()


def _let_clock_jump(sign: int) -> Callable[[Place], None]:
    def jump(place: Place) -> None:
        """Change the time of the process, and that of its files; end it soon, so that another has to find them."""
        seconds = sign * 86_400 * random.Random(place.seed).choice([1, 400, 4000])
        time.time = functools.partial(_later, time.time, seconds)
        for path in _all_files(place.directory / "autosaves"):
            with suppress(FileNotFoundError):
                then = path.stat().st_mtime + seconds
                os.utime(path, (then, then))
        threading.Timer(random.Random(place.seed).uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL)).start()

    return jump


def _later(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


def _all_files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


_TERM, _INT = 128 + signal.SIGTERM, 128 + signal.SIGINT
KINDS: dict[str, Kind] = {
    "exception": Kind(_raise),
    "exception-in-thread": Kind(_raise_in_thread),
    "exception-in-awaited-thread": Kind(_wait_for_thread_that_raises),
    "os._exit": Kind(_exit(1)),
    "os._exit-with-0": Kind(_exit(0)),
    "abort": Kind(_abort),
    "segfault": Kind(_read_address_0),
    "out-of-memory": Kind(_use_up_memory),
    "SIGKILL": Kind(_send(signal.SIGKILL)),
    "SIGTERM": Kind(_send(signal.SIGTERM), ends=(_TERM,)),
    "SIGINT": Kind(_send(signal.SIGINT), ends=(_INT,)),
    "SIGTERM-to-command": Kind(_send_to_command(signal.SIGTERM), ends=(_TERM,)),
    "SIGINT-to-command": Kind(_send_to_command(signal.SIGINT), ends=(_INT,)),
    "SIGKILL-to-command": Kind(_send_to_command(signal.SIGKILL), ends=(-signal.SIGKILL,)),
    "SIGSTOP": Kind(_send(signal.SIGSTOP)),
    "GIL": Kind(_hold_the_interpreter),
    "worker-killed": Kind(_kill_worker, moments=WITH_WORKERS, num_workers=2),
    "worker-deadlock": Kind(_let_worker_lock_twice, moments=WITH_WORKERS, num_workers=2),
    "rank-without-collective": Kind(_wait_for_ever, num_ranks=(2,)),
    "shared-memory-full": Kind(_fill_shared_memory, num_workers=2, mounts="/dev/shm"),
    "autosaves-full": Kind(_fill_autosaves, mounts="autosaves"),
    "file-system-blocks": Kind(_read_from_nobody),
    "clock-jumps-ahead": Kind(_let_clock_jump(1)),
    "clock-jumps-back": Kind(_let_clock_jump(-1)),
}


def cause(kind: str, place: Place) -> Any:
    """Cause a fault of a kind, in this process."""
    return KINDS[kind].cause(place)
